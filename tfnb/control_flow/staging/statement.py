"""One statement of converted code: what its names hold, and what the margin says of it.

A statement that cannot be staged says why by `CannotStage`, with everything as it was, and is then run by Python.
"""

from __future__ import annotations

import linecache
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from tfnb.control_flow.frontend.cannot_stage import CannotStage
from tfnb.control_flow.staging.unset import MISSING, Undefined
from tfnb.control_flow.staging.user_frames import user_frame
from tfnb.control_flow.structure import SIZES, of_size, recorder_if_open, spec_of
from tfnb.errors import TfnbError
from tfnb.graph import Variable
from tfnb.recording import Recorder, Tensor
from tfnb.recording.subgraphs.capture import Savepoint

NUMBERS = (bool, int, float, complex)
EXPRESSION = "the expression"  # stands among the names for the value of one that has none


class Slot:
    """A place of an object of outside, an item or an attribute, that a staged body sets: it is carried as a name is."""

    def __init__(self, owner: Any, key: Any, *, is_item: bool) -> None:
        self.owner, self.key, self.is_item = owner, key, is_item
        self.name = f"item {key!r} of a {type(owner).__name__}" if is_item else f"{type(owner).__name__}.{key}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slot) and self.owner is other.owner and self.key == other.key

    __hash__ = None  # type: ignore[assignment]

    @property
    def value(self) -> Any:
        """What stands there."""
        return self.owner[self.key] if self.is_item else getattr(self.owner, self.key)

    @value.setter
    def value(self, new: Any) -> None:
        if new is not self.value:  # nobody hears of what did not change
            if self.is_item:
                self.owner[self.key] = new
            else:
                setattr(self.owner, self.key, new)

    @property
    def is_settled(self) -> bool:
        """Whether the body that is recorded may set it: its object was made there, or the statement carries it."""
        return any(self.owner is made for made in status.made) or self in status.slots


class Carries(BaseException):  # the user's `except Exception` is not meant
    """A staged body sets places that its statement does not carry yet."""

    def __init__(self, slots: list[Slot]) -> None:
        super().__init__(", ".join(slot.name for slot in slots))
        self.slots = slots


class _Status(threading.local):
    """What holds in this thread."""

    def __init__(self) -> None:
        self.active = 0  # calls of converted code
        self.off = 0  # blocks without staging
        self.depth = 0  # staged bodies
        self.quiet = 0  # bodies that the samples do not take, or that are recorded again
        self.foreign: frozenset[str] = frozenset()  # names that a cell binds and that hold something of other cells
        self.made: list[Any] = []  # containers made in the staged body
        self.bodies: list[list[Any]] = []  # the same of all staged bodies around, and of this one
        self.growth: Any = None  # of the innermost loop that is being recorded: a `lists.Growth`
        self.attributes: list[tuple[Any, str, Any]] = []  # set in staged bodies, and what they were
        self.slots: list[Slot] = []  # what the statement of the staged body carries besides names
        self.met: list[tuple[Slot, Any]] = []  # what the staged body sets besides those, and what it was
        self.copies: list[Any] = []  # containers that stand for others in the staged body
        self.calls: list[Any] = []  # of functions that may call themselves: what `recursion` knows of them
        self.sized: list[object] = []  # the statements of which sizes decide, and whose branches are being recorded


status = _Status()
OPERATORS = SimpleNamespace()  # what converted code calls, by `HIDDEN`: `operators` has them


# -- values -------------------------------------------------------------------------------------------------------


def recorder_for(test: Any) -> Recorder | None:
    """The open recording, if ``test`` is one truth value of it that another run may have another way."""
    if not isinstance(test, (Tensor, *SIZES)) or status.off:
        return None
    recorder = recorder_if_open()
    if not isinstance(test, Tensor):
        return recorder if test.node.expr.free_symbols else None
    if recorder is None or test.graph is not recorder.graph or any(size != 1 for size in spec_of(test).shape):
        return None
    return None if recorder.tape.is_fixed(recorder._entry(test).value) else recorder


def as_test(test: Any) -> Any:
    """A number of sizes as the relation that it is not zero."""
    return test != 0 if isinstance(test, (torch.SymInt, torch.SymFloat)) else test


def tensor_of(recorder: Recorder, item: Any) -> Tensor:
    """A tensor, number or size as a recorded tensor."""
    return recorder.fresh(recorder._as_tensor(of_size(item)))


def is_value(item: Any) -> bool:
    """Whether a graph can hold it."""
    return isinstance(item, (torch.Tensor, Variable, *SIZES, *NUMBERS))


def plain_number(item: Any) -> Any:
    """A Python number of the kind that a size is; anything else as it is."""
    kinds: dict[type, Any] = {torch.SymInt: 0, torch.SymFloat: 0.0, torch.SymBool: False}
    return kinds.get(type(item), item)


def as_number(item: Any) -> Any:
    """A tensor that stands for a Python number: ``+=`` gives another one and leaves this as it is."""
    if isinstance(item, Tensor):
        item._is_number = True  # type: ignore[attr-defined]
    return item


def is_number(item: Any) -> bool:
    """Whether a tensor stands for a Python number."""
    return isinstance(item, Tensor) and getattr(item, "_is_number", False)


def kind(item: Any) -> str:
    """What something is, for messages."""
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
    """The dtype of a Python float among these leaves: float64 where all tensors are of it; None for torch's default.

    Where the leaves are numbers only, what the recording computed so far is looked at, and not single numbers in it.
    """
    dtypes = {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point}
    if not dtypes:
        taken = (recorder.tape.by_id.get(v.node) for node in recorder.new for v in node.inputs)
        nodes = [node for node in (*recorder.new, *taken) if node is not None]
        specs = (spec for node in nodes for spec in node.outputs if spec.shape or node.op != "tfnb.constant")
        dtypes = {spec.dtype for spec in specs if spec.dtype.is_floating_point}
    return torch.float64 if dtypes == {torch.float64} else None


def joint_dtype(a: Tensor, b: Tensor) -> torch.dtype | None:
    """What a Python number and a tensor of another dtype, or two numbers, have in common; None if there is nothing."""
    if a.dtype == b.dtype or not (is_number(a) or is_number(b)):
        return None
    if is_number(a) and is_number(b):
        return torch.promote_types(a.dtype, b.dtype)
    number, tensor = (a, b) if is_number(a) else (b, a)
    kind = complex if number.dtype.is_complex else float if number.dtype.is_floating_point else int
    kind = bool if number.dtype == torch.bool else kind
    return tensor.dtype if torch.result_type(empty_of(tensor.dtype), kind(0)) == tensor.dtype else None


def of_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Any:
    return tensor if dtype is None or tensor.dtype == dtype else tensor.to(dtype)


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
    """One statement of converted code: the names that it binds, and how to get and set what they hold.

    What it sets of objects of outside comes before them, as if it were names as well.
    """

    what: str
    recorder: Recorder
    bound: tuple[str, ...]
    read: Callable[[], tuple[Any, ...]]
    bind: Callable[[Any], None]
    slots: list[Slot] = field(default_factory=list)
    copies: list[Any] = field(default_factory=list)  # containers that names hold in the body alone

    def __post_init__(self) -> None:
        frame = user_frame()
        name = frame.f_code.co_name
        self.key = frame.f_code, frame.f_lasti
        self.line = frame.f_lineno
        self.place = f"line {self.line}" + ("" if name == "<module>" else f" of {name}")
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        self.is_written = all(re.search(rf"(\b|el){word}\b", text) for word in self.what.split())

    @property
    def names(self) -> tuple[str, ...]:
        """What is carried."""
        return (*(slot.name for slot in self.slots), *self.bound)

    def get(self) -> tuple[Any, ...]:
        """What the names hold."""
        return (*(slot.value for slot in self.slots), *self.read())

    def set(self, values: tuple[Any, ...]) -> None:
        """Have the names hold these."""
        for slot, value in zip(self.slots, values, strict=False):
            slot.value = value
        self.bind(values[len(self.slots) :])

    def carrying(self, stage: Callable[[], Any]) -> Any:
        """``stage()``, again whenever it met one more place that has to be carried."""
        while True:
            try:
                return stage()
            except Carries as met:
                if status.depth and not all(slot.is_settled for slot in met.slots):  # those of the one around this too
                    raise
                self.slots += (slot for slot in met.slots if slot not in self.slots)

    @contextmanager
    def staging(self) -> Iterator[None]:
        """Around an attempt: undone where it fails."""
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
        """A name as messages have it."""
        if name == EXPRESSION:
            return name
        return "the value that is returned" if name.startswith("ag__retval") else f"`{name}`"

    @contextmanager
    def body(self, quiet: bool) -> Iterator[None]:
        """Inside of a body: what it does to Python's objects is found out."""
        at, before = len(status.attributes), (status.made, status.slots, status.met, status.copies)
        status.made, status.slots, status.met = [], self.slots, []  # of outside are those of the bodies around this one
        status.bodies.append(status.made)
        status.copies = [*status.copies, *self.copies]
        status.depth, status.quiet = status.depth + 1, status.quiet + quiet
        try:
            yield
        finally:
            status.depth, status.quiet = status.depth - 1, status.quiet - quiet
            for slot, old in reversed(status.met):
                slot.value = old
            self.met = [slot for slot, _ in status.met]
            status.made, status.slots, status.met, status.copies = before
            status.bodies.pop()
            self.attributes = status.attributes[at:]
            del status.attributes[at:]

    def tried(self, body: Callable[[], Any]) -> None:
        """Raises what ``body`` raises by itself, as if it had not been called: not what its staging raised."""
        before, recording = self.get(), Savepoint(self.recorder)
        try:
            with self.body(True):
                body()
        except (CannotStage, Carries):
            pass
        finally:
            recording.undo()
            self.set(before)

    def all_carried(self) -> None:
        """After the names hold again what they did: raise Carries for what a body set besides them."""
        first = {(id(owner), name): (owner, name, old) for owner, name, old in reversed(self.attributes)}
        changed = [each for each in first.values() if getattr(each[0], each[1], MISSING) is not each[2]]
        gone = [owner for owner, name, _ in changed if getattr(owner, name, MISSING) is MISSING]
        for owner, name, old in changed:
            if old is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
        for owner, name, old in changed:
            if any(owner is each for each in gone) or not isinstance(old, (torch.Tensor, *NUMBERS, list, tuple, dict)):
                raise CannotStage(f"a function called in it sets the attribute {name} of a {type(owner).__name__}")
            self.met.append(Slot(owner, name, is_item=False))
        if self.met:
            raise Carries(self.met)


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
    """Whether the user's program failed, and not the staging of it."""
    return not isinstance(error, (CannotStage, TfnbError)) or getattr(error, "op", None) is not None
