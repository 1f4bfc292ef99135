"""Branches of converted code: both are run on the recorder, as `tfnb.cond` does.

What the names hold before and after is what the branch takes and gives.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from tfnb.control_flow.arrays import arrays, has_blanks, varying
from tfnb.control_flow.branches import joined, spec_inside
from tfnb.control_flow.loops import known_elements
from tfnb.control_flow.staging.statement import (
    NUMBERS,
    CallsItself,
    CannotStage,
    Carries,
    Statement,
    as_number,
    as_test,
    empty_of,
    is_number,
    is_users,
    is_value,
    joint_dtype,
    kind,
    note_python,
    of_dtype,
    part_of,
    plain_number,
    reason,
    same,
    status,
    tensor_of,
)
from tfnb.control_flow.staging.unset import Absent, Sometimes, Undefined, UndefinedReturnValue, guarded
from tfnb.control_flow.structure import SIZES, sample_truth, spec_of, truth
from tfnb.errors import InvalidArgument, TfnbError
from tfnb.graph import Dim, Spec, Value, Variable
from tfnb.graph.spec import sized_if
from tfnb.recording import Recorder, Tensor
from tfnb.recording.calls import Unfinished
from tfnb.recording.loop import DISAGREE
from tfnb.recording.regions import Region, axes, bound_outside, now, record_region

_PACKAGE = str(Path(__file__).parents[2])
_LONG = 40  # operations of a size; what has more is a tensor


def branched(
    st: Statement, test: Any, body: Callable[[], None], orelse: Callable[[], None], wanted: int
) -> None:  # fmt: skip
    """Staged, or else by Python, with a guard."""
    test = as_test(test)
    outcome: bool | None = None  # where not the samples decide
    raises: str | None = None
    try:
        return st.carrying(lambda: stage_if(st, test, body, orelse, len(st.slots) + wanted))
    except OtherSide as side:
        return body() if side.other else orelse()
    except Check as check:
        if not check.is_raise:
            note_python(st, f"the branch that the sample does not take fails: {check}")
        is_check, outcome = check.is_raise, not check.side
        raises = f"{str(check).rstrip(': ')} ({st.place})" if is_check else None
    except CannotStage as why:
        if isinstance(why, CallsItself) and why.place in status.sized:
            raise
        note_python(st, why)
        is_check = False
    before, earlier = st.get(), set(st.recorder.tape.by_id)
    outcome = taken_by_python(st.recorder, test, outcome, is_check=is_check, raises=raises)
    body() if outcome else orelse()
    if not is_check and isinstance(test, Tensor):
        st.set(tuple(below_guard(v, old, earlier) for v, old in zip(st.get(), before, strict=True)))


def taken_by_python(
    recorder: Recorder, test: Any, outcome: bool | None, *, is_check: bool, raises: str | None = None
) -> bool:
    """The outcome, by default the truth of the sample, on which the recording relies from here."""
    if isinstance(test, torch.SymBool):
        return recorder.symbols.decided(test)
    outcome = bool(test.sample) if outcome is None else outcome
    recorder.branch(test, outcome, is_check=is_check, raises=raises)
    return outcome


def below_guard(value: Any, old: Any, earlier: Container[int]) -> Any:
    """A name's value after a branch or loop that Python took: a value from before the guard is one of after it."""
    if value is old or not isinstance(value, Tensor) or value.shown.value.node not in earlier:
        return value
    return value.clone()


def chosen(
    what: str, recorder: Recorder, test: Tensor, body: Callable[[], Any], orelse: Callable[[], Any]
) -> Any:  # fmt: skip
    slot: list[Any] = [Undefined("the expression")]

    def hold(values: tuple[Any, ...]) -> None:
        slot[0] = values[0]

    def put(way: Callable[[], Any]) -> Callable[[], None]:
        return lambda: hold((way(),))

    st = Statement(what, recorder, ("the expression",), lambda: (slot[0],), hold)
    branched(st, test, put(body), put(orelse), 1)
    return slot[0]


class OtherSide(Exception):
    """One side calls a function that is being recorded: so far only the other one tells what it gives."""

    def __init__(self, other: bool) -> None:
        super().__init__(str(other))
        self.other = other


class Check(Exception):
    """A way raises that the samples do not get to: by the user's ``raise``, or because something fails there."""

    def __init__(self, error: Exception, side: bool) -> None:
        super().__init__(reason(error))
        self.is_raise, self.side = _is_raised(error), side


def _is_raised(error: Exception) -> bool:
    """Whether a line of the user's raised it, and no package."""
    if isinstance(error, (CannotStage, TfnbError)):
        return False
    frames = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    return not (frames and (frames[-1].startswith(_PACKAGE) or "site-packages" in frames[-1]))


@dataclass
class _After:
    """What the names hold after a branch: the leaves and form of each; tensors are outputs of the region."""

    region: Region
    values: tuple[Any, ...]
    outputs: dict[tuple[int, int], Value]  # (name, leaf) -> output
    elements: dict[int, list[Spec | None]]  # of names with arrays that did not know theirs before


def stage_if(
    st: Statement, test: Any, body: Callable[[], None], orelse: Callable[[], None], wanted: int
) -> None:  # fmt: skip
    """Both branches into the graph; the first ``wanted`` names are needed afterwards. Raises CannotStage or Check."""
    recorder, by_size = st.recorder, isinstance(test, torch.SymBool)
    test = test if by_size else truth(recorder, test, st.what)
    before, taken = st.get(), sample_truth(recorder, test)
    if by_size and st.key in status.sized:
        raise CallsItself(st.key)
    with st.staging(), _inside(st, by_size), recorder.scope(st.what.split()[0]) as scope:
        dtypes: dict[tuple[int, int], torch.dtype] = {}

        def both(before: tuple[Any, ...]) -> dict[bool, _After]:
            return _both(st, test, taken, {True: body, False: orelse}, before, scope, wanted, dtypes)

        after = both(before)
        try:
            told = _told(after)
            if told:
                undo(after)
                before = tuple(
                    known_elements(recorder, value, told[place], st.what) if place in told else value
                    for place, value in enumerate(before)
                )
                after = both(before)
            dtypes.update(_weak(after, wanted))
            if dtypes:
                undo(after)
                after = both(before)
            values = _Join(st, test, taken, before, after[True], after[False]).values(wanted)
        except BaseException as error:
            undo(after)
            if by_size and isinstance(error, TfnbError):
                raise CannotStage(reason(error)) from error
            raise
    st.set(values)


def _both(
    st: Statement, test: Any, taken: bool | None, ways: dict[bool, Callable[[], None]], before: tuple[Any, ...],
    scope: str, wanted: int, dtypes: dict[tuple[int, int], torch.dtype],
) -> dict[bool, _After]:  # fmt: skip
    """Both branches, the one that the samples take first."""
    by_size = isinstance(test, torch.SymBool)
    after: dict[bool, _After] = {}
    for side in (True, False) if taken is not False else (False, True):
        try:
            where = (test, side) if by_size else None
            is_other = side is not (taken is not False)
            after[side] = _branch(
                st, ways[side], before, scope, wanted, dtypes,
                quiet=is_other, where=where, entered=taken in (None, side),
            )  # fmt: skip
        except Unfinished:
            undo(after)
            raise OtherSide(not side) from None
        except Carries:
            undo(after)
            raise
        except Exception as error:
            undo(after)
            is_here = side is taken and (st.recorder.entered or not _is_raised(error))
            if _disagrees(error, by_size) or (is_here and is_users(error)):
                raise
            if is_here or isinstance(error, CannotStage):
                raise CannotStage(reason(error)) from error
            raise Check(error, side) from error
    return after


def _told(after: dict[bool, _After]) -> dict[int, list[Spec | None]]:
    """The elements of the arrays of which one branch alone says what these are."""
    one, other = after[True].elements, after[False].elements
    return {place: specs for place, specs in (one | other).items() if place not in one or place not in other}


def _weak(after: dict[bool, _After], wanted: int) -> dict[tuple[int, int], torch.dtype]:
    """The dtypes of what stands for a Python number in one branch and is a tensor of another dtype in the other."""
    found: dict[tuple[int, int], torch.dtype] = {}
    for place, pair in enumerate(zip(after[True].values[:wanted], after[False].values[:wanted], strict=True)):
        (ones, form), (others, other_form) = map(tree_flatten, pair)
        for at, (a, b) in enumerate(zip(ones, others, strict=False) if form == other_form else ()):
            dtype = joint_dtype(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else None
            if dtype is not None:
                found[place, at] = dtype
    return found


@contextmanager
def _inside(st: Statement, by_size: bool) -> Iterator[None]:
    """Around the branches of a statement of which sizes decide."""
    before = list(status.sized)
    status.sized += [st.key] if by_size else []
    try:
        yield
    finally:
        status.sized = before


def _disagrees(error: Exception, by_size: bool) -> bool:
    """Whether branches do not fit each other: an error, where Python could not take the one that is meant."""
    return getattr(error, "details", None) == DISAGREE and not by_size


def undo(after: dict[bool, _After]) -> None:
    """As if no branch had been recorded."""
    for side in reversed(list(after)):
        after[side].region.undo()


def _branch(
    st: Statement, way: Callable[[], None], before: tuple[Any, ...], scope: str, wanted: int,
    dtypes: dict[tuple[int, int], torch.dtype], *, quiet: bool, where: tuple[torch.SymBool, bool] | None, entered: bool,
) -> _After:  # fmt: skip
    recorder = st.recorder
    found: list[Any] = []
    calls = 0

    def call() -> list[Tensor]:
        nonlocal calls
        start = len(recorder.new)
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
        own = axes(spec for node in recorder.new[start:] for spec in node.outputs)
        for place, value in enumerate(values[:wanted]):
            changed = value is not before[place]
            for leaf_place, leaf in enumerate(tree_flatten(value)[0]):
                is_given = isinstance(leaf, Tensor) or (changed and isinstance(leaf, (torch.Tensor, Variable)))
                if is_given or _is_of(own, recorder, leaf):
                    outputs[place, leaf_place] = len(tensors)
                    tensors.append(of_dtype(tensor_of(recorder, leaf), dtypes.get((place, leaf_place))))
        blank = [place for place in range(wanted) if has_blanks(before[place]) and not has_blanks(values[place])]
        found[:] = [values, outputs, {place: [array.spec for array in arrays(values[place])] for place in blank}]
        st.set(before)
        st.all_carried()
        return tensors

    region = record_region(recorder, call, [], scope=scope, turns=False, where=where, entered=entered)
    st.set(before)
    values, outputs, elements = found
    return _After(region, values, {at: region.outputs[place] for at, place in outputs.items()}, elements)


def _is_of(own: set[str], recorder: Recorder, leaf: Any) -> bool:
    """Whether it is a size of something inside of a branch, which nobody knows outside."""
    dim = recorder.symbols.leaf(leaf) if isinstance(leaf, SIZES) else None
    return isinstance(dim, Dim) and not own.isdisjoint(dim.symbols)


class _Join:
    """What names hold after one of two branches."""

    def __init__(
        self, st: Statement, test: Any, taken: bool | None, before: tuple[Any, ...], then: _After, other: _After
    ) -> None:
        self.st, self.test, self.taken, self.before = st, test, taken, before
        self.sides = {True: then, False: other}
        self.columns: list[tuple[Value | None, Value | None]] = []
        self.labels: list[str] = []
        self.loose: set[int] = set()  # columns whose axis 0 may be of another size in each branch

    @cached_property
    def predicate(self) -> Tensor:
        """The test as a recorded tensor."""
        return truth(self.st.recorder, self.test, self.st.what)

    def values(self, wanted: int) -> tuple[Any, ...]:
        """What to set the names to, once the branches are one node."""
        plans = [self._plan(place) if place < wanted else (lambda _, v=v: v) for place, v in enumerate(self.before)]
        st = self.st
        for place, side in enumerate((True, False)):
            self.sides[side].region.outputs = [column[place] for column in self.columns]
        what = f"{st.place}: `{st.what}`"
        regions = (self.sides[True].region, self.sides[False].region)
        if any(r.nodes or r.written for r in regions) or self.columns:
            exact = isinstance(self.test, torch.SymBool)  # else Python takes the way that the sizes of the samples take
            results = joined(st.recorder, self.predicate, regions, self.labels, what, self.loose, exact=exact)
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
        parts = []
        for at, (a, b, path, varies) in enumerate(zip(leaves, theirs, paths, varying(then), strict=True)):
            count = len(self.columns)
            parts.append(self._leaf(place, at, a, b, part_of(label, path)))
            self.loose.update(range(count, len(self.columns)) if varies else ())
        return lambda results: tree_unflatten([part(results) for part in parts], form)

    def _leaf(self, place: int, at: int, a: Any, b: Any, label: str) -> Callable[[list[Any]], Any]:
        if a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and same(a, b)):
            return lambda _: a
        if not is_value(a) or not is_value(b):
            raise CannotStage(f"{label} is {kind(a)} in one branch and {kind(b)} in the other")
        if isinstance(self.test, torch.SymBool) and (size := _size_of(self.test, a, b)) is not None:
            return lambda _: size
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
        plain = [plain_number(n) for n in numbers]
        if len(numbers) == 2:
            return torch.result_type(*(torch.as_tensor(n) for n in plain))
        tensor = a if isinstance(a, (torch.Tensor, Variable)) else b
        dtype = tensor.dtype if isinstance(tensor, torch.Tensor) else tensor.spec.dtype
        if torch.result_type(empty_of(dtype), plain[0]) != dtype:
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
        if isinstance(leaf, NUMBERS):
            leaf = torch.as_tensor(leaf, dtype=dtype)
        found = tensor_of(recorder, leaf)
        return recorder._entry(found.to(dtype) if isinstance(leaf, SIZES) and dtype is not None else found).value

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


def _size_of(test: torch.SymBool, a: Any, b: Any) -> Any:
    """What sizes decide between whole numbers or truth values is a size; None for anything else, or a long one."""
    if all(type(side) in (int, torch.SymInt) for side in (a, b)):
        found = sized_if(test, a, b)
    elif all(type(side) in (bool, torch.SymBool) for side in (a, b)):
        found = _either(test, a, b)
    else:
        return None
    return found if isinstance(found, bool) or found.node.expr.count_ops() <= _LONG else None


def _either(test: torch.SymBool, a: Any, b: Any) -> Any:
    """``a if test else b`` of truth values."""
    if isinstance(a, bool):
        return test | b if a else torch.sym_not(test) & b
    if isinstance(b, bool):
        return torch.sym_not(test) | a if b else test & a
    return (test & a) | (torch.sym_not(test) & b)
