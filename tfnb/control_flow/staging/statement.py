"""One statement of converted code: the values of its names, and its entries in the margin.

A statement that cannot be staged says why by `CannotStage`, with everything as it was, and is then run by Python.
"""

from __future__ import annotations

import linecache
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from tfnb.control_flow.frontend.cannot_stage import CannotStage
from tfnb.control_flow.staging.unset import MISSING, Undefined
from tfnb.control_flow.staging.user_frames import user_frame
from tfnb.control_flow.structure import SIZES, of_size, recorder_if_open, spec_of
from tfnb.errors import TfnbError, Unsupported
from tfnb.graph import Variable
from tfnb.recording import Recorder, Tensor
from tfnb.recording.subgraphs.capture import Savepoint
from tfnb.recording.writes.aliases import REFUSED

NUMBERS = (bool, int, float, complex)
EXPRESSION = "the expression"  # stands among the names for the value of one that has none
State = Callable[[], tuple[Any, ...]]  # the values of a statement's names
Setter = Callable[[Any], None]  # takes new values of these names
_DEEP = 12  # branches and loops inside of each other


class _Status(threading.local):
    """The state of staging in this thread."""

    def __init__(self) -> None:
        self.active = 0  # calls of converted code
        self.off = 0  # blocks without staging
        self.depth = 0  # staged bodies
        self.quiet = 0  # bodies that the samples do not take, or that are recorded again
        self.made: list[Any] = []  # containers made in the staged body
        self.growth: Any = None  # of the innermost loop that is being recorded: a `lists.Growth`
        self.attributes: list[tuple[Any, str, Any]] = []  # set in staged bodies, and what they were


status = _Status()
OPERATORS = SimpleNamespace()  # what converted code calls, by `HIDDEN`: `operators` has them


# -- values -------------------------------------------------------------------------------------------------------


def recorder_for(test: Any) -> Recorder | None:
    """The open recording, if ``test`` is a single truth value in it that varies between runs with the data.

    Of the sizes of what is fed Python decides, and a run with sizes that would go another way is refused.
    """
    if isinstance(test, SIZES):
        return recorder_of_sizes(test) if free_unbacked_symbols(test) else None
    recorder = recorder_if_open() if isinstance(test, Tensor) and not status.off else None
    if recorder is None or test.graph is not recorder.graph or any(size != 1 for size in spec_of(test).shape):
        return None
    return None if recorder.tape.is_fixed(recorder._entry(test).value) else recorder


def recorder_of_sizes(test: object) -> Recorder | None:
    """The open recording, if ``test`` asks of sizes that vary."""
    is_open = isinstance(test, SIZES) and not status.off and test.node.expr.free_symbols
    return recorder_if_open() if is_open else None


def as_test(test: object) -> Any:
    """A number computed from sizes as its comparison with zero."""
    return test != 0 if isinstance(test, (torch.SymInt, torch.SymFloat)) else test


def tensor_of(recorder: Recorder, item: object) -> Tensor:
    """A tensor, number or size as a recorded tensor."""
    return recorder.fresh(recorder._as_tensor(of_size(item)))


def is_value(item: object) -> bool:
    """Whether a graph can hold an item."""
    return isinstance(item, (torch.Tensor, Variable, *SIZES, *NUMBERS))


def plain_number(item: object) -> Any:
    """A Python number of the kind of a size; other items unchanged."""
    kinds: dict[type, Any] = {torch.SymInt: 0, torch.SymFloat: 0.0, torch.SymBool: False}
    return kinds.get(type(item), item)


def as_number(item: object) -> Any:
    """A tensor as a stand-in for a Python number: ``+=`` makes a new tensor."""
    if isinstance(item, Tensor):
        item._is_number = True  # type: ignore[attr-defined]
    return item


def is_number(item: object) -> bool:
    """Whether a tensor stands for a Python number."""
    return isinstance(item, Tensor) and getattr(item, "_is_number", False)


def kind(item: Any) -> str:
    """A short description of a value, for messages."""
    if isinstance(item, Undefined):
        return "without a value"
    if isinstance(item, Tensor):
        return str(item.spec)
    if isinstance(item, torch.Tensor):
        return "a tensor"
    return repr(item) if item is None or isinstance(item, (*NUMBERS, str)) else f"a {type(item).__name__}"


def empty_of(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty((), dtype=dtype, device="meta")


def float_dtype(recorder: Recorder, leaves: Iterable[Any]) -> torch.dtype | None:
    """The dtype of a Python float among these leaves: float64 if all tensors are; None for torch's default.

    Where the leaves are numbers only, what the recording computed so far is looked at, and not single numbers in it.
    """
    dtypes = {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point}
    if not dtypes:
        taken = (recorder.tape.by_id.get(v.node) for node in recorder.new for v in node.inputs)
        nodes = [node for node in (*recorder.new, *taken) if node is not None]
        specs = (spec for node in nodes for spec in node.outputs if spec.shape or node.op != "tfnb.constant")
        dtypes = {spec.dtype for spec in specs if spec.dtype.is_floating_point}
    return torch.float64 if dtypes == {torch.float64} else None


def result_of(recorder: Recorder, leaf: Any) -> Tensor:
    """A value that a branch or an iteration gives on, as a tensor.

    A number that staged code took has the digits there of what the other branch, or the value before, may be.
    """
    found = tensor_of(recorder, leaf)
    if not found.is_floating_point() or not recorder.is_taken(found):
        return found
    return found.to(float_dtype(recorder, ()) or torch.get_default_dtype())  # type: ignore[return-value]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, SIZES):
        return bool(a.node.expr == b.node.expr)
    try:
        return bool(a == b)
    except Exception:
        return False


def part_of(label: str, path: str) -> str:
    return f"{label[:-1]}{path}`" if path and label.endswith("`") else label


# -- statements ---------------------------------------------------------------------------------------------------


@dataclass
class Statement:
    """One statement of converted code: the names it binds, with a getter and setter of their values."""

    what: str
    recorder: Recorder
    names: tuple[str, ...]
    get: Callable[[], tuple[Any, ...]]
    set: Callable[[Any], None]

    def __post_init__(self) -> None:
        frame = user_frame()
        name = frame.f_code.co_name
        self.line = frame.f_lineno
        self.place = f"line {self.line}" + ("" if name == "<module>" else f" of {name}")
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        self.is_written = all(re.search(rf"(\b|el){word}\b", text) for word in self.what.split())

    @contextmanager
    def staging(self) -> Iterator[None]:
        """Around an attempt: undone on failure."""
        before, recording = self.get(), Savepoint(self.recorder)
        try:
            yield
        except BaseException:
            recording.undo()
            self.set(before)
            raise
        if self.is_written:  # and not one that stands for a break or return
            self.recorder.tape.staged[f"{self.place} `{self.what}`"] = self.line

    def label(self, name: str) -> str:
        """A name in the form used by messages."""
        if name == EXPRESSION:
            return name
        return "the value that is returned" if name.startswith("ag__retval") else f"`{name}`"

    @contextmanager
    def body(self, quiet: bool) -> Iterator[None]:
        """Around a body: detect its effects on Python objects."""
        if status.depth >= _DEEP:
            raise Unsupported(
                f"{self.place}: the `{self.what}` stands inside of {_DEEP} other branches and loops of recorded "
                "values: a function that calls itself where such a value decides is marked @tfnb.function",
                details=REFUSED,
            )  # fmt: skip
        at, made = len(status.attributes), status.made
        status.made = []
        status.depth, status.quiet = status.depth + 1, status.quiet + quiet
        try:
            yield
        finally:
            status.depth, status.quiet = status.depth - 1, status.quiet - quiet
            status.made = made
            self.attributes = status.attributes[at:]
            del status.attributes[at:]

    def tried(self, body: Callable[[], Any]) -> None:
        """Raise the errors of ``body`` itself, as if staging had not called it."""
        before, recording = self.get(), Savepoint(self.recorder)
        try:
            with self.body(True):
                body()
        except CannotStage:
            pass
        finally:
            recording.undo()
            self.set(before)

    def refuse_attributes(self) -> None:
        """After the names are restored: raise CannotStage for attributes set by the body.

        All attributes are what they were.
        """
        first = {(id(owner), name): (owner, name, old) for owner, name, old in reversed(self.attributes)}
        changed = [each for each in first.values() if getattr(each[0], each[1], MISSING) is not each[2]]
        for owner, name, old in changed:
            if old is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
        for owner, name, _ in changed:
            raise CannotStage(f"a function called in it sets the attribute {name} of a {type(owner).__name__}")


def note_python(statement: Statement, why: object) -> None:
    """In the margin: a statement that stays Python."""
    note = f"{statement.place}: `{statement.what}` stays Python: {why}"
    if note not in statement.recorder.tape.notes:
        statement.recorder.tape.notes.append(note)


def note_peeled(statement: Statement, why: object) -> None:
    """In the margin: a loop whose first iteration is unrolled."""
    note = f"{statement.place}: the first iteration of the `{statement.what}` is unrolled and always runs: {why}"
    if note not in statement.recorder.tape.notes:
        statement.recorder.tape.notes.append(note)


def reason(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, CannotStage):
        return str(error)
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def is_users(error: BaseException) -> bool:
    """Whether an error stems from the user's program rather than its staging."""
    return not isinstance(error, (CannotStage, TfnbError)) or getattr(error, "op", None) is not None
