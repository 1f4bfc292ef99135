"""torch's profiler, of which a process has one, without the lines that its library writes to the standard error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tfnb.errors import FailedPrecondition


@contextmanager
def torch_profiler(refusal: str, **options: Any) -> Iterator[Any]:
    """Run ``torch.profiler`` around the block, for all devices present.

    options: of ``torch.profiler.profile``. Raises FailedPrecondition with the text ``refusal`` where one runs already.

    >>> with torch_profiler("not twice") as profile:
    ...     _ = torch.ones(2) + 1
    >>> "aten::add" in {event.key for event in profile.key_averages()}
    True
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read at the first use: it tells of each start and stop otherwise
    if torch.autograd._profiler_enabled():
        raise FailedPrecondition(refusal)
    with torch.profiler.profile(activities=torch.profiler.supported_activities(), **options) as profile:
        yield profile
