"""The autocast of a caller: a run is without it, for a graph has the casts that were recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

is_cast = torch._C._is_any_autocast_enabled
"""Whether the thread is within a block of autocast, of any device."""


@contextmanager
def uncast() -> Iterator[None]:
    """A block without autocast.

    >>> with torch.autocast("cpu"), uncast():
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.float32
    """
    with ExitStack() as stack:
        for device in ("cpu", torch._C._get_accelerator().type) if is_cast() else ():
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
