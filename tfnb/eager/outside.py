"""The error of a backward pass outside of the recording, from a value that was derived from a recorded one there.

Ops on a recorded tensor outside of its recording give plain tensors of its sample, of which torch knows no history.
torch's own error says so in its words, at the end of its own frames; this one says what to write.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from tfnb.errors import Unsupported
from tfnb.graph import current
from tfnb.recording.marks.notes import calling_line
from tfnb.recording.values.outside_calls import recorded_of


@cache
def explained() -> None:
    """From here on, torch's engine raises Unsupported where a loss was derived outside of a recording."""
    engine = torch.autograd._engine_run_backward

    def run(outputs: Sequence[torch.Tensor], *args: object, **kwargs: object) -> Any:
        __tracebackhide__ = True
        last = (found() for found in current.stack.used_outside)
        used = next((x for x in (*map(recorded_of, outputs), *last) if x is not None), None)
        if used is None or current.recording() is not None or all(getattr(y, "requires_grad", True) for y in outputs):
            return engine(outputs, *args, **kwargs)
        raise Unsupported(
            f"backward() of what requires no gradient{calling_line()}\n  outside of its recording {used.described()} "
            "is a sample, and what is computed from it there a plain tensor without a history: compute the loss inside "
            "of the recording and call backward() there, or give a recorded loss to tfnb.gradients(loss, variables)"
        )

    torch.autograd._engine_run_backward = run  # type: ignore[assignment]
