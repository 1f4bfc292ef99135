"""Python's ``if``, ``while`` and ``for`` on recorded tensors as part of the graph: AutoGraph. Semantics S-20, S-21."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from tfnb.control_flow.frontend.cell_parts import CellPart, cell_parts, cell_text
from tfnb.control_flow.staging.conversion import fn, marked
from tfnb.control_flow.staging.operators import OPERATORS
from tfnb.control_flow.staging.statement import status
from tfnb.control_flow.staging.unset import Undefined
from tfnb.control_flow.structure import recorder_if_open
from tfnb.graph.setting import setting
from tfnb.recording import Recorder, Tensor
from tfnb.recording.overrides.override_table import Stage, override

F = TypeVar("F", bound=Callable[..., Any])


def autograph(function: F) -> F:
    """``function``, whose control flow on recorded tensors becomes part of the graph.

    An ``if``, ``while``, ``for``, ``and``, ``or``, ``not`` or conditional expression that asks for the truth of a
    recorded tensor is a `tfnb.cond` or `tfnb.while_loop`, decided by each run; ``for row in x`` and ``range(n)`` are
    loops of the graph where only a run knows the number. Anything else is what Python does. Functions that it calls are
    converted with it where they are the user's and have source; torch and installed packages run as they are. A
    statement that cannot be staged stays Python: a guard, and a note of the graph that says why. A cell does all this
    by itself.

    ``x.item()``, ``float(x)``, ``int(x)`` and ``bool(x)`` stay in the graph, as numbers that differ from run to run. A
    list that a loop appends to is one stacked tensor after the loop.

    Raises InvalidArgument or ShapeError for a variable that is of another dtype or shape in each branch, or after an
    iteration of a loop, with its name and line. Raises Unsupported for a write into memory that another name may share,
    as each run decides, and for a loop that reads a list that it appends to. Outside a recording the function is called
    as it is.

    >>> import torch, tfnb
    >>> @tfnb.autograph
    ... def halved(x):
    ...     iterations = 0
    ...     while x > 1:
    ...         x = x / 2
    ...         iterations += 1
    ...     return iterations if x > 0 else -1
    >>> with tfnb.record():
    ...     x = tfnb.placeholder(torch.tensor(8.0), name="x")
    ...     y = halved(x)
    >>> tfnb.run(y, {x: 20.0}), tfnb.run(y, {x: -3.0}), halved(8.0)
    (tensor(5), tensor(-1), 3)
    """

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        __tracebackhide__ = True
        if recorder_if_open() is None or status.off:
            return function(*args, **kwargs)
        with converting():
            return fn(function)(*args, **kwargs)

    return marked(call)


def no_autograph() -> AbstractContextManager[None]:
    """Inside, Python takes its branches by the samples, with a guard for each, as outside of AutoGraph.

    >>> import torch, tfnb
    >>> @tfnb.autograph
    ... def doubled(x):
    ...     with tfnb.no_autograph():
    ...         return 2 * x if x.shape[0] > 1 else x
    """
    return setting(status, off=status.off + 1)


def converting() -> AbstractContextManager[None]:
    """Inside, the forward methods of the user's modules are converted too."""
    return setting(status, active=status.active + 1)


@override(Stage.MODULE, torch.nn.Module)
def _forward(rec: Recorder, module: torch.nn.Module) -> Any:
    """A module's forward, converted."""
    written = getattr(type(module), "forward", None)
    if not status.active or status.off or not isinstance(written, FunctionType):
        return NotImplemented
    forward = fn(written)
    return NotImplemented if forward is written else forward


class Cell:
    """A converted cell: its statements, and the final expression; raises CannotStage."""

    def __init__(self, body: Sequence[ast.stmt], result: ast.expr | None, filename: str, flags: int = 0) -> None:
        self._parts, self._result = cell_parts(body, result, filename, flags)
        self._source = list(body), result

    def text(self) -> str:
        """The converted text of the cell, for people."""
        return cell_text(*self._source)

    def run(self, names: dict[str, Any]) -> Any:
        """Run with ``names`` as globals; returns the value of the final expression. Notes list code left to Python."""
        __tracebackhide__ = True
        with converting():
            try:
                for part in self._parts:
                    if part.is_factory:
                        with _names(part, names):
                            _made(part.code, names)()
                    else:
                        _note(part.why)
                        exec(part.code, names)
                return None if self._result is None else _made(self._result, names)()
            finally:
                for name in [name for name, value in names.items() if isinstance(value, Undefined)]:
                    del names[name]


@contextmanager
def _names(part: CellPart, names: dict[str, Any]) -> Iterator[None]:
    """Around a part: hide values of its names from other cells, so that its loops do not start from them."""
    before = {name: names[name] for name in part.names & names.keys() if part.is_loop or _is_stale(names[name])}
    names.update((name, Undefined(name)) for name in before)
    try:
        yield
    finally:
        for name in before.keys() & names.keys():
            if isinstance(found := names[name], Undefined) and found.why is None:
                names[name] = before[name]


def _is_stale(value: object) -> bool:
    """Whether a value stems from an earlier run of the cell."""
    recorder = recorder_if_open()
    assert recorder is not None
    mine = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.graph is recorder.graph]
    return any(leaf.shown.value.node not in recorder.tape.by_id for leaf in mine)


def _made(code: CodeType, names: dict[str, Any]) -> Callable[[], Any]:
    made: Callable[[], Any] = FunctionType(code, names)(OPERATORS)
    return made


def _note(why: str) -> None:
    recorder = recorder_if_open()
    if why and recorder is not None:
        recorder.tape.notes.append(f"{why}: it stays Python")
