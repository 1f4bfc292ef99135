"""``tfnb.print`` and ``tfnb.assert_``: Python's own run once, while recording; these nodes run at every run."""

from __future__ import annotations

import builtins

import torch

from tfnb.errors import CheckFailed, InvalidArgument, Unsupported
from tfnb.graph import Ref, Value, Variable, current
from tfnb.graph.node import leaves
from tfnb.recording.api import value_in
from tfnb.recording.dispatch.recorder import Recorder
from tfnb.recording.values.tensor import Operation, Tensor


def print(*xs: object) -> Operation | None:
    """``print`` in each run: tensors with the values of the run, anything else as its text of now.

    A run prints a value only if it can be computed from what the run feeds and computes anyway; to force a print, fetch
    the Operation that `print` returns. Values are printed after the step, also of one that ran on a cluster. While
    recording nothing is printed, and outside of a recording it is Python's ``print``. Raises Unsupported inside of a
    staged loop, branch or recursive function, InvalidArgument for tensors in a container.

    >>> import torch, tfnb
    >>> with tfnb.record():
    ...     x = tfnb.placeholder(torch.ones(3))
    ...     total = x.sum()
    ...     _ = tfnb.print("mean", x.mean(), "of", total)
    >>> _ = tfnb.run(total, {x: torch.arange(4.0)})
    mean tensor(1.5000) of tensor(6.)
    """
    recorder = current.recording()
    if not isinstance(recorder, Recorder):
        builtins.print(*xs)  # noqa: T201  it is Python's
        return None
    if recorder.inside:
        raise Unsupported(
            "tfnb.print inside of a loop, a branch or a function that calls itself: its values are there when it ends, "
            "so return them, or append them to a list, and print those behind it; `run(trace=True)` and its drawing "
            f"have the values of each iteration{recorder.tape.at()}"
        )
    values: dict[Value, Ref] = {}
    pieces = tuple(_piece(x, recorder, values) for x in xs)
    return recorder.group(tuple(values), attrs={"print": pieces})


def _piece(x: object, recorder: Recorder, values: dict[Value, Ref]) -> str | Ref:
    """Argument of a print node for ``x``: a Ref to its value among ``values``, or its text."""
    if isinstance(x, torch.SymInt):
        x = torch.scalar_tensor(x, dtype=torch.int64)  # type: ignore[arg-type]  # torch takes it
    if isinstance(x, (torch.Tensor, Variable)):
        return values.setdefault(value_in(x, recorder), Ref(len(values)))
    if any(isinstance(leaf, (torch.Tensor, Variable)) for leaf in leaves(x)):
        raise InvalidArgument(f"tfnb.print takes tensors one by one, not in a {type(x).__name__}{recorder.tape.at()}")
    return str(x)


def assert_(cond: object, message: str = "") -> None:
    """Stop each run of later nodes if ``cond`` is false, with the message, cell and line.

    cond: a recorded tensor, of which all must be true, or anything else, which is asserted at once. So is the sample. A
    run that raises writes nothing. The error is an AssertionError. Raises CheckFailed for a condition that is false
    now.

    >>> from builtins import print
    >>> import torch, tfnb
    >>> with tfnb.record():
    ...     x = tfnb.placeholder(torch.ones(3))
    ...     tfnb.assert_((x > 0).all(), "x must be positive")
    ...     y = x.log()
    >>> try:
    ...     tfnb.run(y, {x: torch.zeros(3)})
    ... except AssertionError as error:
    ...     print(str(error).splitlines()[0])
    AssertionError: x must be positive
    """
    __tracebackhide__ = True
    recorder = current.recording()
    if isinstance(cond, torch.Tensor) and (cond.dim() or cond.dtype != torch.bool):
        cond = cond.all()
    if not isinstance(cond, Tensor) or not isinstance(recorder, Recorder):
        if not cond:
            raise CheckFailed(message or "assert_")
        return
    sample = recorder._entry(cond).sample
    if sample is not None and recorder.entered and not sample:
        raise CheckFailed(f"{message or 'assert_'}{recorder.tape.at()}")
    recorder.guard(cond, True, raises=f"AssertionError: {message}" if message else "AssertionError")
