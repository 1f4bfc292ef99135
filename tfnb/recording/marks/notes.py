"""Messages: an op failed while recording, Python decided, a recording ended; and the line that a warning points to."""

from __future__ import annotations

import linecache
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType

import torch
from torch._subclasses import fake_tensor

from tfnb.errors import FeedError, InvalidArgument, ShapeError, StaleNode, Unsupported, file_label
from tfnb.graph import Node, SourceLine, Variable
from tfnb.graph.node import where
from tfnb.graph.op_facts import Op, op_name
from tfnb.recording.marks.user_code import is_foreign

_PLUMBING = frozenset({"tfnb", "torch", "sympy", "functools", "contextlib"})
_HERE = str(Path(__file__).parents[2])  # the package
_AROUND = ("contextlib", "torch.nn.modules.module")  # modules whose frames stand between tfnb's and the user's
# What says that torch knows no shape rule, and not that the shapes are wrong.
_NO_RULE = (
    NotImplementedError, fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException, fake_tensor.UnsupportedOperatorException,
)  # fmt: skip


def explained(
    func: Op, error: Exception, inputs: Iterable[tuple[str, str]], source: SourceLine | None,
    readable: Callable[[str], str],
) -> Exception:  # fmt: skip
    """A failing op in torch's words, with the (name, spec) of its inputs and the line. Our own errors pass.

    readable: puts the user's letters in place of torch's names of sizes.
    """
    if isinstance(error, (InvalidArgument, StaleNode, Unsupported, FeedError)):
        return error
    inputs = tuple(inputs)
    listed = ", ".join(f"{name}: {spec}" for name, spec in inputs)
    kind: type[InvalidArgument | Unsupported] = InvalidArgument if func.namespace == "tfnb" else ShapeError
    kind = Unsupported if isinstance(error, _NO_RULE) else kind
    reason = readable(str(error).strip().split("\n")[0]) or type(error).__name__
    name = func._schema.name.partition("::")[2]
    return kind(
        f"{name} failed: {reason}\n  inputs: {listed or 'none'}" + (f"\n  at {source}" if source else ""),
        op=op_name(func), inputs=tuple(spec for _, spec in inputs), **where(source),
    )  # fmt: skip


NESTED = (
    "a nested tensor cannot stand in a graph, whose values are dense: pad the parts to one length with "
    "torch.nn.utils.rnn.pad_sequence, and mask what was added, as in attn_mask=; or keep all rows in one tensor with "
    "the number of the part that each belongs to, for index_add and scatter_reduce"
)


def dense(tensor: torch.Tensor, at: Callable[[], str]) -> torch.Tensor:
    """The tensor; raises Unsupported for a sparse, nested or other layout, since graph values are strided."""
    if tensor.is_nested:
        raise Unsupported(f"{NESTED}{at()}")
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise Unsupported(
            f"a {layout} tensor of shape {list(tensor.shape)} cannot stand in a graph{at()}; make it dense"
        )
    return tensor


def asked_at(source: SourceLine | None, stop: FrameType | None) -> tuple[str, int] | None:
    """File and line of a function that the user's line led to; None where that line itself asked."""
    at = None if source is None else _calling(stop)
    return None if at is None or source is None or (source.line, source.text) == (at[1], _text(*at)) else at


def calling_line() -> str:
    """The line that calls torch where nothing is recorded, as the end of an error text."""
    at = _calling(None)
    return "" if at is None else f"\n  at {line_of(*at)}"


def _calling(stop: FrameType | None) -> tuple[str, int] | None:
    """File and line of the innermost user frame below ``stop``; None if its source is unknown."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame is not stop:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _PLUMBING:
            at = frame.f_code.co_filename, frame.f_lineno
            return at if _text(*at) else None
        frame = frame.f_back
    return None


def asked_in(source: SourceLine | None, stop: FrameType | None) -> str:
    """The same as the end of a text; empty for None."""
    at = asked_at(source, stop)
    return "" if at is None else f" (asked in {line_of(*at)})"


def line_of(file: str, line: int) -> str:
    """A line of a file or cell, for messages."""
    return f"{file_label(file)} line {line}: {_text(file, line)}"


def _text(file: str, line: int) -> str:
    return linecache.getline(file, line).strip()


def user_level(stop: FrameType | None) -> int:
    """The stacklevel that points a warning of the caller to the user's frame."""
    return _nearest(stop)[1] - 1


def _nearest(stop: FrameType | None) -> tuple[FrameType | None, int]:
    """The nearest frame outside of tfnb and of torch's call of a module, and its distance from the caller's caller."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame is not stop and level < 60:
        if not frame.f_code.co_filename.startswith(_HERE) and frame.f_globals.get("__name__") not in _AROUND:
            break
        frame, level = frame.f_back, level + 1
    return frame, level


def warn_of_sample(name: str, how: str, told: set[tuple[str, str, int]]) -> None:
    """Warn the user's line that a number taken from a recorded tensor outside a recording is the sample's, even after
    runs.

    told: the tensors and lines that were warned of. Nothing is said of tfnb's own code.
    """
    frame, level = sys._getframe(1), 1
    methods = str(Path(frame.f_code.co_filename).parent)  # of the tensor
    while frame.f_back is not None and is_foreign(file := frame.f_code.co_filename):
        if file.startswith(_HERE) and not file.startswith(methods):
            return
        frame, level = frame.f_back, level + 1
    key = name, frame.f_code.co_filename, frame.f_lineno
    if key not in told:
        told.add(key)
        warnings.warn(
            f"{line_of(*key[1:])}: `{how}` of {name} is its value on the sample, the same after every run. Fetch the "
            f"value of a run: `value = tfnb.run({name}, feeds)`, or with a step `_, value = tfnb.run([step, {name}], "
            f"feeds)`; the sample's is `{name}.sample`",
            stacklevel=level + 1,
        )


# -- when Python decides, and at the end ------------------------------------------------------------------------


_BOTH = "torch.where and tfnb's staged control flow have both"


def warn_of_branch(source: SourceLine | None, outcome: bool, stop: FrameType | None, because: str | None) -> None:
    """Warn that Python took a branch on a recorded value. because: why the branch is not staged."""
    warnings.warn(
        f"{source or 'recording'}: Python took the {outcome} branch of a recorded value; the graph holds only "
        "that branch, and a run where it would go the other way raises BranchChanged "
        f"({because or _advice(stop)}){asked_in(source, stop)}",
        stacklevel=user_level(stop),
    )


def _advice(stop: FrameType | None) -> str:
    """Remedy for a branch taken by Python, in the user's code or in an installed package."""
    frame, _ = _nearest(stop)
    if frame is None or f"{os.sep}site-packages{os.sep}" not in frame.f_code.co_filename:
        return _BOTH
    return (
        f"it was asked by {frame.f_globals.get('__name__')}, and the code of installed packages is not staged: if it "
        "is a check that an option leaves out, such as validate_args=False, take that option"
    )


def warn_of_written(asked: Mapping[Variable, SourceLine | None], nodes: Sequence[Node]) -> None:
    """Warn that a Variable whose value decided Python's control flow is written: later runs would decide otherwise.

    asked: the Variables whose values Python took, and where.
    """
    written = {node.attrs["variable"] for node in nodes if node.op == "tfnb.assign"}
    for var, source in asked.items():
        if var in written:
            warnings.warn(
                f"{source or 'recording'}: Python took the value of {var.name}, which this recording writes: every "
                "run goes the way of the sample's. If it says that something is made at the first call, call the "
                "model once before recording it",
                stacklevel=3,
            )


def fixed_batches(at: Sequence[SourceLine | None]) -> list[str]:
    """A note that a batch of a DataLoader is the same in every run; none where no batch is used."""
    if not at:
        return []
    return [
        f"{f'{at[0].label} line {at[0].line}' if at[0] else 'recording'}: a batch of a DataLoader is used here, and is "
        "the same in every run: make each part of it a placeholder, `x = tfnb.placeholder(batch[0])`, and go over the "
        "data outside of the cell: `tfnb.fit(step, loader, feeds=(x, y))`"
    ]
