"""Statements of converted code as branches and loops of the graph.

A statement is staged by running its bodies on the recorder, as `tfnb.cond` and `tfnb.while_loop` do; what its names
hold before and after is what it takes and gives. One that cannot be staged says why by `CannotStage`, with everything
as it was, and is then run by Python.
"""

from __future__ import annotations

import linecache
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from tfnb.control_flow.branches import joined, spec_inside
from tfnb.control_flow.structure import recorder_if_open, spec_of, truth
from tfnb.errors import InvalidArgument, TfnbError
from tfnb.graph import Ref, Source, Spec, Value, Variable
from tfnb.recording import Recorder, Tensor
from tfnb.recording.calls import Unfinished
from tfnb.recording.loop import DISAGREE, Loop
from tfnb.recording.regions import Region, _Before, bound_outside, now, record_region

_HERE = str(Path(__file__).parent)
_NUMBERS = (bool, int, float, complex)
MISSING = object()


class CannotStage(Exception):
    """A statement that is left to Python, and why."""


class _Status(threading.local):
    """What holds in this thread."""

    def __init__(self) -> None:
        self.active = 0  # calls of converted code
        self.off = 0  # blocks without staging
        self.depth = 0  # staged bodies
        self.quiet = 0  # bodies that the samples do not take, or that are recorded again
        self.foreign: frozenset[str] = frozenset()  # names that a cell binds and that hold something of other cells
        self.made: list[Any] = []  # containers made in staged bodies
        self.attributes: list[tuple[Any, str, Any]] = []  # set in staged bodies, and what they were


status = _Status()
_staged: WeakKeyDictionary[Recorder, dict[str, None]] = WeakKeyDictionary()


# -- names without a value ----------------------------------------------------------------------------------------


class Undefined:
    """What a name holds that was not assigned."""

    def __init__(self, symbol_name: str) -> None:
        self.symbol_name = symbol_name

    def read(self) -> Any:
        """Raises as Python does."""
        raise UnboundLocalError(
            f"cannot access local variable {self.symbol_name!r} where it is not associated with a value"
        )

    def __repr__(self) -> str:
        return f"<{self.symbol_name} has no value>"


class UndefinedReturnValue(Undefined):
    """What a function gives that has not returned."""

    def __init__(self) -> None:
        super().__init__("the value that is returned")


class Absent(Undefined):
    """A name that a staged statement did not assign on the samples' way through it."""

    def __init__(self, symbol_name: str, why: str) -> None:
        super().__init__(symbol_name)
        self.why = why

    def read(self) -> Any:
        raise InvalidArgument(f"`{self.symbol_name}` has no value here: {self.why}; give it one before")


class Sometimes(Undefined):
    """A name that a staged statement assigned on the samples' way, and not on every way: a run must agree."""

    def __init__(self, symbol_name: str, make: Callable[[], Any]) -> None:
        super().__init__(symbol_name)
        self._make, self._value = make, MISSING

    def read(self) -> Any:
        """The value, with a guard that the run went the same way."""
        if self._value is MISSING:
            self._value = self._make()
        return self._value


def guarded(recorder: Recorder, item: Any, test: Tensor, outcome: bool) -> Callable[[], Any]:
    """The tensors of ``item``, which a run can have only where ``test`` has this truth: recorded when it is called."""
    source = _source(recorder)  # the statement's, wherever the name is read

    def record() -> Any:
        tape = recorder.tape
        where, tape.where = tape.where, lambda: source
        try:
            guard = tape.append(
                "tfnb.guard", "guard", (), inputs=(recorder._entry(test).value,),
                attrs={"value": Ref(0), "outcome": outcome}, scope=recorder.scopes.current(),
            )  # fmt: skip
            leaves, form = tree_flatten(item)
            with tape.marked(control=(*tape.marks.control, guard.node)):
                leaves = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            return tree_unflatten(leaves, form)
        finally:
            tape.where = where

    return record


def _source(recorder: Recorder) -> Source | None:
    """The line of the converted code that called."""
    here, frame = recorder.where(), user_frame()
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    if here is not None and (here.line, here.text) == (frame.f_lineno, text):
        return here
    return Source(Path(frame.f_code.co_filename).name, frame.f_lineno, text)


# -- what is staged -----------------------------------------------------------------------------------------------


def recorder_for(test: Any) -> Recorder | None:
    """The open recording, if ``test`` is one truth value of it that another run may have another way."""
    if not isinstance(test, Tensor) or status.off:
        return None
    recorder = recorder_if_open()
    if recorder is None or test.graph is not recorder.graph or any(size != 1 for size in spec_of(test).shape):
        return None
    return None if recorder.tape.is_fixed(recorder._entry(test).value) else recorder


def sample_truth(test: Tensor) -> bool | None:
    """The truth while recording; None without samples."""
    sample = test._entry.sample
    return None if sample is None else bool(sample)


def tensor_of(recorder: Recorder, item: Any) -> Tensor:
    """A tensor, number or size as a recorded tensor."""
    if isinstance(item, torch.SymInt):
        return torch.ops.aten.scalar_tensor(item, dtype=torch.int64)
    return recorder.fresh(recorder._as_tensor(item))


def is_value(item: Any) -> bool:
    """Whether a graph can hold it."""
    return isinstance(item, (torch.Tensor, Variable, torch.SymInt, *_NUMBERS))


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
    return repr(item) if item is None or isinstance(item, (*_NUMBERS, str)) else f"a {type(item).__name__}"


@dataclass
class Statement:
    """One statement of converted code: the names that it binds, and how to get and set what they hold."""

    what: str
    recorder: Recorder
    names: tuple[str, ...]
    get: Callable[[], tuple[Any, ...]]
    set: Callable[[Any], None]
    failed: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        frame = user_frame()
        name = frame.f_code.co_name
        self.place = f"line {frame.f_lineno}" + ("" if name == "<module>" else f" of {name}")
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        self.is_written = all(re.search(rf"(\b|el){word}\b", text) for word in self.what.split())

    @contextmanager
    def staging(self) -> Iterator[None]:
        """Around an attempt: undone where it fails."""
        before, made = self.get(), (status.depth, status.quiet)
        lines = dict(_staged.get(self.recorder, {}))
        notes = list(self.recorder.notes)
        try:
            yield
        except BaseException:
            self.set(before)
            _staged[self.recorder] = lines
            self.recorder.notes[:] = notes
            status.depth, status.quiet = made
            raise
        if self.is_written:  # and not one that stands for a break or return
            _note_staged(self.recorder, f"{self.place} `{self.what}`")

    def label(self, name: str) -> str:
        """A name as messages have it."""
        return "the value that is returned" if name.startswith("ag__retval") else f"`{name}`"

    @contextmanager
    def body(self, quiet: bool) -> Iterator[None]:
        """Inside of a body: what it does to Python's objects is found out."""
        at, made = len(status.attributes), len(status.made)
        status.depth, status.quiet = status.depth + 1, status.quiet + quiet
        try:
            yield
        finally:
            status.depth, status.quiet = status.depth - 1, status.quiet - quiet
            if not status.depth:
                del status.made[made:]
            self.attributes = status.attributes[at:]
            del status.attributes[at:]

    def tried(self, body: Callable[[], Any]) -> None:
        """Raises what ``body`` raises by itself, as if it had not been called: not what its staging raised."""
        before, recording = self.get(), _Before(self.recorder)
        try:
            with self.body(True):
                body()
        except CannotStage:
            pass
        finally:
            recording.undo()
            self.set(before)

    def attributes_kept(self) -> None:
        """After the names hold again what they did: attributes that do not were set out of sight."""
        changed = {
            name: (owner, old) for owner, name, old in reversed(self.attributes)
            if getattr(owner, name, MISSING) is not old
        }  # fmt: skip
        for name, (owner, old) in changed.items():
            if old is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
        if changed:
            name, (owner, _) = next(iter(changed.items()))
            raise CannotStage(f"a function called in it sets the attribute {name} of a {type(owner).__name__}")


def user_frame() -> FrameType:
    """The frame of the converted code that called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_HERE, "<string>")):
        frame = frame.f_back
    return frame or sys._getframe(1)


def _note_staged(recorder: Recorder, text: str) -> None:
    lines = _staged.setdefault(recorder, {})
    lines[text] = None
    note = "staged: " + ", ".join(sorted(lines, key=lambda line: int(line.split()[1])))
    others = [n for n in recorder.notes if not n.startswith("staged: ")]
    recorder.notes[:] = [note, *others]


def note_python(statement: Statement, why: object) -> None:
    """In the margin: a statement that stays Python."""
    note = f"{statement.place}: `{statement.what}` stays Python: {why}"
    if note not in statement.recorder.notes:
        statement.recorder.notes.append(note)


def reason(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, CannotStage):
        return str(error)
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def is_users(error: BaseException) -> bool:
    """Whether the user's program failed, and not the staging of it."""
    return not isinstance(error, (CannotStage, TfnbError)) or getattr(error, "op", None) is not None


# -- if -------------------------------------------------------------------------------------------------------------


class OtherSide(Exception):
    """One side calls a function that is being recorded: so far only the other one tells what it gives."""

    def __init__(self, other: bool) -> None:
        super().__init__(str(other))
        self.other = other


class Check(Exception):
    """The way that the samples do not take raises: by the user's ``raise``, or because something fails there."""

    def __init__(self, error: Exception) -> None:
        super().__init__(reason(error))
        frames = []
        traceback = error.__traceback__
        while traceback is not None:
            frames.append(traceback.tb_frame.f_code.co_filename)
            traceback = traceback.tb_next
        self.is_raise = not isinstance(error, (CannotStage, TfnbError)) and not (
            frames and (frames[-1].startswith(str(Path(_HERE).parent)) or "site-packages" in frames[-1])
        )


@dataclass
class _After:
    """What the names hold after a branch: the leaves and form of each; tensors are outputs of the region."""

    region: Region
    values: tuple[Any, ...]
    outputs: dict[tuple[int, int], Value]  # (name, leaf) -> output


def stage_if(
    st: Statement, test: Tensor, body: Callable[[], None], orelse: Callable[[], None], wanted: int
) -> None:  # fmt: skip
    """Both branches into the graph; the first ``wanted`` names are needed afterwards. Raises CannotStage or Check."""
    recorder = st.recorder
    predicate = truth(recorder, test, st.what)
    before, taken = st.get(), sample_truth(predicate)
    ways = {True: body, False: orelse}
    after: dict[bool, _After] = {}
    with st.staging(), recorder.scope(st.what.split()[0]) as scope:
        for side in (True, False) if taken is not False else (False, True):
            try:
                after[side] = _branch(st, ways[side], before, scope, wanted, quiet=side is not (taken is not False))
            except Unfinished:
                undo(after)
                raise OtherSide(not side) from None
            except Exception as error:
                undo(after)
                if getattr(error, "details", None) == DISAGREE or (side is taken and is_users(error)):
                    raise
                if side is taken or isinstance(error, CannotStage):
                    raise CannotStage(reason(error)) from error
                raise Check(error) from error
        try:
            values = _Join(st, predicate, taken, before, after[True], after[False]).values(wanted)
        except BaseException:
            undo(after)
            raise
    st.set(values)


def undo(after: dict[bool, _After]) -> None:
    """As if no branch had been recorded."""
    for side in reversed(list(after)):
        after[side].region.undo()


def _branch(
    st: Statement, way: Callable[[], None], before: tuple[Any, ...], scope: str, wanted: int, *, quiet: bool
) -> _After:  # fmt: skip
    recorder = st.recorder
    found: list[Any] = []
    calls = 0

    def call() -> list[Tensor]:
        nonlocal calls
        st.set(before)
        with st.body(quiet or calls > 0):
            calls += 1
            way()
            values = st.get()
        values = tuple(
            v.read() if isinstance(v, Sometimes) and v is not old else v for v, old in zip(values, before, strict=True)
        )
        outputs: dict[tuple[int, int], int] = {}
        tensors: list[Tensor] = []
        for place, value in enumerate(values[:wanted]):
            changed = value is not before[place]
            for leaf_place, leaf in enumerate(tree_flatten(value)[0]):
                if isinstance(leaf, Tensor) or (changed and isinstance(leaf, (torch.Tensor, Variable))):
                    outputs[place, leaf_place] = len(tensors)
                    tensors.append(tensor_of(recorder, leaf))
        found[:] = [values, outputs]
        st.set(before)
        st.attributes_kept()
        return tensors

    region = record_region(recorder, call, [], scope=scope, turns=False)
    st.set(before)
    values, outputs = found
    return _After(region, values, {at: region.outputs[place] for at, place in outputs.items()})


class _Join:
    """What names hold after one of two branches."""

    def __init__(
        self, st: Statement, predicate: Tensor, taken: bool | None, before: tuple[Any, ...], then: _After, other: _After
    ) -> None:
        self.st, self.predicate, self.taken, self.before = st, predicate, taken, before
        self.sides = {True: then, False: other}
        self.columns: list[tuple[Value | None, Value | None]] = []
        self.labels: list[str] = []

    def values(self, wanted: int) -> tuple[Any, ...]:
        """What to set the names to, once the branches are one node."""
        plans = [self._plan(place) if place < wanted else (lambda _, v=v: v) for place, v in enumerate(self.before)]
        st = self.st
        for place, side in enumerate((True, False)):
            self.sides[side].region.outputs = [column[place] for column in self.columns]
        what = f"{st.place}: `{st.what}`"
        regions = (self.sides[True].region, self.sides[False].region)
        if any(r.nodes or r.written for r in regions) or self.columns:
            results = joined(st.recorder, self.predicate, regions, self.labels, what)
        else:
            results = []
        return tuple(plan(results) for plan in plans)

    def _plan(self, place: int) -> Callable[[list[Any]], Any]:
        then, other = (self.sides[side].values[place] for side in (True, False))
        name, before = self.st.names[place], self.before[place]
        if then is other:
            return lambda _: then
        if isinstance(then, Undefined) or isinstance(other, Undefined):
            return self._one_sided(place, not isinstance(then, Undefined), before)
        if name in status.foreign and not status.depth and (then is before) is not (other is before):
            side = other is before
            if not self._as_before(place, side, before):
                return self._one_sided(place, side, before)
        leaves, form = tree_flatten(then)
        theirs, their_form = tree_flatten(other)
        label = self.st.label(name)
        if form != their_form:
            mixed = [v for v in (*leaves, *theirs) if isinstance(v, torch.Tensor)]
            if then is None or other is None or not mixed or form.is_leaf() or their_form.is_leaf():
                raise CannotStage(f"{label} is {kind(then)} in one branch and {kind(other)} in the other")
            raise InvalidArgument(
                f"{label} is of another structure in each branch: {kind(then)} of {len(leaves)} values and "
                f"{kind(other)} of {len(theirs)}\n  {self.st.place}{self.st.recorder.tape.at()}", details=DISAGREE,
            )  # fmt: skip
        paths = [keystr(path) for path, _ in tree_flatten_with_path(then)[0]]
        parts = [
            self._leaf(place, at, a, b, _part(label, path))
            for at, (a, b, path) in enumerate(zip(leaves, theirs, paths, strict=True))
        ]
        return lambda results: tree_unflatten([part(results) for part in parts], form)

    def _leaf(self, place: int, at: int, a: Any, b: Any, label: str) -> Callable[[list[Any]], Any]:
        if a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and _same(a, b)):
            return lambda _: a
        if not is_value(a) or not is_value(b):
            raise CannotStage(f"{label} is {kind(a)} in one branch and {kind(b)} in the other")
        dtype = self._dtype(a, b, label)
        column = tuple(self._value(side, place, at, v, dtype) for side, v in ((True, a), (False, b)))
        result = self._column(column, label)
        numbers = all(is_number(v) or not isinstance(v, (torch.Tensor, Variable)) for v in (a, b))
        return (lambda results: as_number(result(results))) if numbers else result

    def _column(self, column: Any, label: str) -> Callable[[list[Any]], Any]:
        self.columns.append(column)
        self.labels.append(label)
        index = len(self.columns) - 1
        return lambda results: results[index]

    def _dtype(self, a: Any, b: Any, label: str) -> torch.dtype | None:
        """Of numbers: that of the tensor in the other branch, or torch's promotion of both."""
        numbers = [v for v in (a, b) if not isinstance(v, (torch.Tensor, Variable))]
        if not numbers:
            return None
        plain = [0 if isinstance(n, torch.SymInt) else n for n in numbers]
        if len(numbers) == 2:
            return torch.result_type(*(torch.as_tensor(n) for n in plain))
        tensor = a if isinstance(a, (torch.Tensor, Variable)) else b
        dtype = tensor.dtype if isinstance(tensor, torch.Tensor) else tensor.spec.dtype
        if torch.result_type(_empty(dtype), plain[0]) != dtype:
            st = self.st
            raise InvalidArgument(
                f"{label} is {dtype} in one branch and the number {numbers[0]!r} in the other\n  {st.place}"
                f"{st.recorder.tape.at()}", details=DISAGREE,
            )  # fmt: skip
        return dtype

    def _value(self, side: bool, place: int, at: int, leaf: Any, dtype: torch.dtype | None) -> Value:
        after, recorder = self.sides[side], self.st.recorder
        if (place, at) in after.outputs:
            return after.outputs[place, at]
        if isinstance(leaf, (torch.Tensor, Variable)) and after.region.written:
            raise CannotStage(
                f"{self.st.label(self.st.names[place])} is replaced in one branch and written in the other"
            )
        if isinstance(leaf, _NUMBERS):
            leaf = torch.as_tensor(leaf, dtype=dtype)
        return recorder._entry(tensor_of(recorder, leaf)).value

    def _one_sided(self, place: int, side: bool, before: Any) -> Callable[[list[Any]], Any]:
        """A name that one branch leaves without a value."""
        st, after = self.st, self.sides[side]
        name, value = st.names[place], after.values[place]
        line = st.place
        absent = Absent(name, f"it is set in one branch of {line} only")
        leaves, form = tree_flatten(value)
        is_returned = any(isinstance(s.values[place], UndefinedReturnValue) for s in self.sides.values())
        if isinstance(value, Undefined):
            return lambda _: value
        if not all(map(is_value, leaves)) or not all(self._fits(after, place, at) for at in range(len(leaves))):
            if is_returned:
                raise CannotStage(f"it returns {kind(value)}, and goes on in the other branch")
            return lambda _: (
                absent
                if self.taken is not side
                else Absent(name, f"it is {kind(value)} in one branch of {line} and has no value in the other")
            )
        parts = []
        for at, leaf in enumerate(leaves):
            value_at = self._value(side, place, at, leaf, None)
            parts.append(self._column((value_at, None) if side else (None, value_at), st.label(name)))

        def made(results: list[Any]) -> Any:
            whole = tree_unflatten([part(results) for part in parts], form)
            if is_returned:
                return whole
            if self.taken is not side:
                return absent
            return Sometimes(name, guarded(st.recorder, whole, self.predicate, side))

        return made

    def _as_before(self, place: int, side: bool, before: Any) -> bool:
        """Whether what a branch gave a name is like what the name held."""
        after, recorder = self.sides[side], self.st.recorder
        leaves, form = tree_flatten(after.values[place])
        olds, old_form = tree_flatten(before)
        if form != old_form or not all(map(is_value, (*leaves, *olds))):
            return False
        for at, (leaf, old) in enumerate(zip(leaves, olds, strict=True)):
            inside = after.outputs.get((place, at))
            spec = spec_of(tensor_of(recorder, leaf)) if inside is None else spec_inside(recorder, after.region, inside)
            was = spec_of(tensor_of(recorder, old))
            if (spec.dtype, now(recorder, spec)) != (was.dtype, now(recorder, was)):
                return False
        return True

    def _fits(self, after: _After, place: int, at: int) -> bool:
        """Whether its sizes are known where the branch was not taken."""
        output = after.outputs.get((place, at))
        if output is None:
            return True
        recorder = self.st.recorder
        return bound_outside(recorder, spec_inside(recorder, after.region, output))


def _empty(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty((), dtype=dtype, device="meta")


def _dtype_after(leaf: Any, given: torch.Tensor) -> torch.dtype:
    """The dtype of what a loop variable becomes; a number takes part as torch's numbers do."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype
    if isinstance(leaf, Variable):
        return leaf.spec.dtype
    return torch.int64 if isinstance(leaf, torch.SymInt) else torch.result_type(_empty(given.dtype), leaf)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.SymInt):
        return bool(a.node.expr == b.node.expr)
    try:
        return bool(a == b)
    except Exception:
        return False


def _part(label: str, path: str) -> str:
    return f"{label[:-1]}{path}`" if path and label.endswith("`") else label


# -- loops ----------------------------------------------------------------------------------------------------------


class _Again(Exception):
    """The loop is recorded again, knowing more about its variables."""


class Stage:
    """One loop to be staged: which names it carries, as which tensors.

    by_size: only sizes decide how often it turns, so Python can run it for those of the samples.
    """

    def __init__(self, st: Statement, *, by_size: bool = False) -> None:
        self.st, self.recorder, self.by_size = st, st.recorder, by_size
        self.before = st.get()
        self.dtypes: dict[tuple[int, int], torch.dtype] = {}  # of numbers that the body makes into something else
        self.late: dict[int, tuple[TreeSpec, list[Spec]] | None] = {}  # names that the body gives their first value
        self.calls = 0

    def record(
        self, test: Callable[[], Any] | None, body: Callable[..., None], *, xs: Sequence[Tensor] = (),
        limit: Any = None, first: Any = None, step: Any = 1,
    ) -> None:  # fmt: skip
        """``while test(): body()``; with ``first``, the body gets an index; with ``xs``, a row of each."""
        st = self.st
        with st.staging():
            while True:
                try:
                    return self._attempt(test, body, xs, limit, first, step)
                except _Again:
                    st.set(self.before)
                except Exception as error:
                    if getattr(error, "details", None) == DISAGREE and not self.by_size:
                        if isinstance(error, TfnbError) and st.place not in error.message:
                            error.message += f"\n  {st.place}: `{st.what}`"
                        raise
                    raise CannotStage(reason(error)) from error

    def _attempt(self, test: Any, body: Any, xs: Sequence[Tensor], limit: Any, first: Any, step: Any) -> None:
        st, recorder = self.st, self.recorder
        self._plan()
        start = [*([] if first is None else [tensor_of(recorder, first)]), *self.start]
        labels = [*([] if first is None else ["the index"]), *self.labels]
        head = 0 if first is None else 1

        def condition(*carried: Any) -> list[Any]:
            assert test is not None
            self._set(carried[head:])
            with st.body(True):
                found = test()
            self._set_back()
            return [truth(recorder, found, f"the condition of `{st.what}`")]

        def turn(*given: Any) -> list[Any]:
            carried, rows = given[head : len(start)], given[len(start) :]
            self._set(carried)
            with st.body(self.calls > 0):
                self.calls += 1
                body(*([given[0]] if head else []), *rows)
                values = st.get()
            self._set(carried)
            st.attributes_kept()
            self._set_back()
            return [*([given[0] + step] if head else []), *self._leaves(values, carried)]

        loop = Loop(recorder, start, labels, xs, limit=limit, what=st.what.split()[0])
        result = loop.record(None if test is None else condition, turn)
        self._finish(result.carried[head:], result.turns)

    def _plan(self) -> None:
        """What is carried: names that hold tensors and numbers, and those of which the body told what they will be."""
        self.start: list[Tensor] = []
        self.labels: list[str] = []
        self.numbers: list[bool] = []  # which stand for Python numbers
        self.forms: dict[int, tuple[TreeSpec, int]] = {}
        for place, value in enumerate(self.before):
            if isinstance(value, Sometimes):
                value = value.read()
            if isinstance(value, Undefined):
                known = self.late.get(place)
                if known is None:
                    continue
                form, specs = known
                value = tree_unflatten([self._zeros(spec) for spec in specs], form)
            leaves, form = tree_flatten(value)
            if not all(map(is_value, leaves)):
                continue
            self.forms[place] = form, len(leaves)
            name = self.st.label(self.st.names[place])
            paths = [keystr(path) for path, _ in tree_flatten_with_path(value)[0]]
            for at, (leaf, path) in enumerate(zip(leaves, paths, strict=True)):
                self.numbers.append(is_number(leaf) or not isinstance(leaf, (torch.Tensor, Variable)))
                if isinstance(leaf, _NUMBERS):
                    leaf = torch.as_tensor(leaf, dtype=self.dtypes.get((place, at)))
                self.start.append(tensor_of(self.recorder, leaf))
                self.labels.append(_part(name, path))

    def _zeros(self, spec: Spec) -> torch.Tensor:
        sizes = spec.sizes(self.recorder.symbols.bindings(spec.shape))
        return torch.zeros(sizes, dtype=spec.dtype, device=spec.device)

    def _values(self, carried: Sequence[Any]) -> tuple[Any, ...]:
        leaves = iter(as_number(leaf) if number else leaf for leaf, number in zip(carried, self.numbers, strict=True))
        return tuple(
            tree_unflatten([next(leaves) for _ in range(self.forms[place][1])], self.forms[place][0])
            if place in self.forms else old for place, old in enumerate(self.before)
        )  # fmt: skip

    def _set(self, carried: Sequence[Any]) -> None:
        """The names for one turn; a late one has no value before the body gives it one."""
        values = self._values(carried)
        self.st.set(tuple(
            old if isinstance(old, Undefined) and not isinstance(old, (Sometimes, UndefinedReturnValue)) else value
            for value, old in zip(values, self.before, strict=True)
        ))  # fmt: skip

    def _set_back(self) -> None:
        self.st.set(self.before)

    def _leaves(self, values: tuple[Any, ...], carried: Sequence[Any]) -> list[Any]:
        """The carried leaves after one turn."""
        found: list[Any] = []
        given = iter(carried)
        again = False
        for place, (value, old) in enumerate(zip(values, self.before, strict=True)):
            if isinstance(value, Sometimes):
                value = value.read()
            if place not in self.forms:
                again |= self._new(place, value, old)
                continue
            form, count = self.forms[place]
            mine = [next(given) for _ in range(count)]
            if isinstance(value, Undefined):
                found += mine  # a late one that this turn did not reach
                continue
            found += self._carried(place, value, form, mine)
        if again or any(isinstance(leaf, torch.dtype) for leaf in found):
            raise _Again
        return found

    def _new(self, place: int, value: Any, old: Any) -> bool:
        """A name that is not carried: left as it was, or given its first value."""
        name = self.st.label(self.st.names[place])
        if value is old or (not isinstance(old, Undefined) and type(value) is type(old) and _same(value, old)):
            return False
        if not isinstance(old, Undefined):
            raise CannotStage(f"{name} is {kind(old)} before the loop and {kind(value)} after a turn")
        leaves, form = tree_flatten(value)
        if place in self.late or not all(map(is_value, leaves)):
            if isinstance(old, UndefinedReturnValue):
                raise CannotStage(f"it returns {kind(value)} inside of the loop")
            self.late.setdefault(place, None)
            return False
        specs = [self._spec(leaf) for leaf in leaves]
        if not all(bound_outside(self.recorder, spec) for spec in specs):
            self.late[place] = None
            return False
        self.late[place] = form, specs
        return True

    def _spec(self, leaf: Any) -> Spec:
        tensor = tensor_of(self.recorder, leaf)
        spec = spec_of(tensor)
        return Spec(spec.dtype, now(self.recorder, spec), spec.device)

    def _carried(self, place: int, value: Any, form: TreeSpec, mine: Sequence[Any]) -> list[Any]:
        st = self.st
        name = st.label(st.names[place])
        leaves, got = tree_flatten(value)
        if got != form:
            mixed = not got.is_leaf() and not form.is_leaf()
            if value is None or not mixed:
                raise CannotStage(
                    f"{name} is {kind(self.before[place])} before the loop and {kind(value)} after a turn"
                )
            raise InvalidArgument(
                f"{name} has {len(mine)} values before the loop and {len(leaves)} after a turn\n  {st.place}"
                f"{self.recorder.tape.at()}", details=DISAGREE,
            )  # fmt: skip
        numbers = tree_flatten(self.before[place])[0] if not isinstance(self.before[place], Undefined) else []
        found: list[Any] = []
        for at, (leaf, given) in enumerate(zip(leaves, mine, strict=True)):
            if not is_value(leaf):
                raise CannotStage(f"{name} is a tensor or number before the loop and {kind(leaf)} after a turn")
            was = numbers[at] if at < len(numbers) else None
            wanted = _dtype_after(leaf, given)
            if isinstance(was, _NUMBERS) and wanted != given.dtype:
                first = (place, at) not in self.dtypes and isinstance(leaf, torch.Tensor)
                better = torch.result_type(_empty(wanted), was) if first else torch.promote_types(given.dtype, wanted)
                if better != given.dtype:
                    self.dtypes[place, at] = better
                    found.append(better)
                    continue
            if isinstance(leaf, _NUMBERS):
                if wanted != given.dtype:
                    raise InvalidArgument(
                        f"{name} is {given.spec} before the loop and the number {leaf!r} after a turn\n  {st.place}"
                        f"{self.recorder.tape.at()}", details=DISAGREE,
                    )  # fmt: skip
                leaf = torch.as_tensor(leaf, dtype=given.dtype)
            found.append(tensor_of(self.recorder, leaf))
        return found

    def _finish(self, carried: Sequence[Any], turns: Tensor) -> None:
        values = list(self._values(carried))
        ran: Any = turns > 0 if any(isinstance(old, Undefined) for old in self.before) else turns
        some = None if turns._entry.sample is None else bool(turns._entry.sample > 0)
        st = self.st
        for place, old in enumerate(self.before):
            if not isinstance(old, Undefined) or isinstance(old, (Sometimes, UndefinedReturnValue)):
                continue
            name = st.names[place]
            if place in self.forms and some is not False:
                whole = values[place]
                values[place] = Sometimes(name, guarded(st.recorder, whole, ran, True))
            elif place in self.late:
                values[place] = Absent(name, f"it is first set in the loop of {st.place}")
        st.set(tuple(values))
