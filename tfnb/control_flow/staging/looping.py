"""Loops of converted code: test and body are run on the recorder, as `tfnb.while_loop` does.

What the names hold is what is carried from turn to turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from tfnb.control_flow.arrays import arrays, has_blanks
from tfnb.control_flow.loops import invariants, known_elements
from tfnb.control_flow.staging.lists import Growth
from tfnb.control_flow.staging.memory import Home, Memory, home_of
from tfnb.control_flow.staging.places import is_held
from tfnb.control_flow.staging.statement import (
    NUMBERS,
    BeginsAsNone,
    CannotStage,
    Statement,
    as_number,
    empty_of,
    float_dtype,
    is_number,
    is_users,
    is_value,
    kind,
    note_python,
    part_of,
    plain_number,
    reason,
    same,
    status,
    tensor_of,
)
from tfnb.control_flow.staging.unset import Absent, Sometimes, Undefined, UndefinedReturnValue, guarded, no_value
from tfnb.control_flow.structure import SIZES, sample_truth, spec_of, truth
from tfnb.errors import BranchChanged, InvalidArgument, TfnbError
from tfnb.graph import Spec, Variable
from tfnb.recording import Recorder, Tensor
from tfnb.recording.aliases import Test, linked, overlap
from tfnb.recording.loop import DISAGREE, Loop
from tfnb.recording.regions import bound_outside, now


def staged_loop(st: Statement, stage: Callable[[], None], first: Callable[[], None], *, peels: bool = False) -> bool:
    """Whether a loop could be staged; a user's error in the first turn of the samples is raised.

    peels: the caller can take a turn by itself where BeginsAsNone is raised.
    """
    try:
        st.carrying(stage)
        return True
    except CannotStage as error:
        why = error
    if peels and isinstance(why, BeginsAsNone):
        raise why
    if is_users(why.__cause__ or why):
        st.tried(first)
    note_python(st, why)
    return False


_OTHER_WAYS = "a test in it that stays Python does not go the same way in all of its turns"


class _Again(Exception):
    """The loop is recorded again, knowing more about its variables."""


class Stage:
    """One loop to be staged: which names it carries, as which tensors.

    by_size: only sizes decide how often it turns, so Python can run it for those of the samples. entered: whether the
    samples take a turn.
    """

    def __init__(self, st: Statement, *, by_size: bool, entered: bool) -> None:
        self.st, self.recorder, self.by_size, self.entered = st, st.recorder, by_size, entered
        self.before = st.get()
        self.dtypes: dict[tuple[int, int], torch.dtype] = {}  # of numbers that the body makes into something else
        self.late: dict[int, tuple[TreeSpec, list[Spec]] | None] = {}  # names that the body gives their first value
        self.elements: dict[int, list[Spec | None]] = {}  # of arrays that know theirs by the body only
        self.stay: set[int] = set()  # names that hold after a turn what they held, which the body may have written into
        self.rebound: set[int] = set()  # names of which that was not so after all
        self.places: dict[int, list[Spec]] = {}  # of carried leaves that look at something by places of the turn's own
        self.growth = Growth(status.made if status.depth else None)
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
                except BeginsAsNone:
                    raise
                except Exception as error:
                    if getattr(error, "details", None) == DISAGREE and not self.by_size:
                        if isinstance(error, TfnbError) and st.place not in error.message:
                            error.message += f"\n  {st.place}: `{st.what}`"
                        raise
                    why = _OTHER_WAYS if isinstance(error, BranchChanged) else reason(error)
                    raise CannotStage(why) from error

    def _attempt(self, test: Any, body: Any, xs: Sequence[Tensor], limit: Any, first: Any, step: Any) -> None:
        st, recorder = self.st, self.recorder
        self._plan()
        start = [*([] if first is None else [tensor_of(recorder, first)]), *self.start]
        labels = [*([] if first is None else ["the index"]), *self.labels]
        head, last = (0 if first is None else 1), len(start)
        zeros = [self._zeros(spec) for specs in self.places.values() for spec in specs]
        start += (tensor_of(recorder, each) for each in zeros)
        labels += ["a place"] * len(zeros)

        def condition(*carried: Any) -> list[Any]:
            assert test is not None
            self._set(carried[head:last])
            with st.body(True):
                found = test()
            self._set_back()
            return [truth(recorder, found, f"the condition of `{st.what}`")]

        def turn(*given: Any) -> list[Any]:
            carried, rows = given[head:last], given[len(start) :]
            values_before, first_node = [tensor._entry.value for tensor in carried], len(recorder.new)
            versions = {tensor._family: tensor._family.version for tensor in recorder.live}
            if head and type(first) is type(step) is int and first >= 0 < step:
                recorder.naturals.add(given[0]._entry.value)
            self._set(carried)
            with st.body(self.calls > 0), self.growth.turn():
                self.calls += 1
                body(*([given[0]] if head else []), *rows)
                values = st.get()
            written = {base for base, version in versions.items() if base.version != version}
            if any(map(_is_written, rows)) or any(stack._family in written for stack in xs):
                raise CannotStage("its body writes into the rows that it takes")
            written |= {tensor._family for tensor in carried if _is_written(tensor)}
            self._set(carried)
            st.all_carried()
            after = self._leaves(values, carried)
            self._set_back()
            stacks = {row._family: stack for row, stack in zip(rows, xs, strict=True)}
            self.memory = Memory(recorder, carried, self.homes, stacks, whole=test is None)
            read = {value for node in recorder.new[first_node:] for value in node.inputs} if test is None else None
            self.memory.check(written, self.labels, None if read is None else [v in read for v in values_before])
            if self.growth.is_new or self._finds_places():
                raise _Again
            mine = [place for at in self.places for place in self.memory.places[at]]
            return [
                *([given[0] + step] if head else []),
                *after,
                *mine,
                *self.growth.rows(recorder, written, self.memory),
            ]

        specs = invariants(recorder, start, [*start[:head], *self.first.values(), *zeros])
        loop = Loop(
            recorder, start, labels, xs, specs=specs, limit=limit, what=st.what.split()[0], entered=self.entered
        )  # fmt: skip
        result = loop.record(None if test is None else condition, turn)
        carried, turns = result.carried[head:last], result.turns

        def taken() -> torch.Tensor:
            return turns > 0

        self._finish(carried, result.carried[last:], turns, taken)

        def share(rows: Any, homes: Sequence[Home | None], is_some: bool) -> None:
            for number, home in enumerate(homes):
                if home is not None:
                    at = None if is_some else number
                    self.memory.share_rows(recorder, rows, home, at, len(homes), carried, self._before(), taken)
            if self.memory.meets(homes):
                overlap(recorder, rows)

        if self.growth.lists:
            self.growth.finish(result.rows, st.place, share)

    def _plan(self) -> None:
        """What is carried: names that hold tensors and numbers, and those of which the body told what they will be."""
        self.start: list[Tensor] = []
        self.first: dict[int, Any] = {}  # what the carried names hold in the first turn
        self.labels: list[str] = []
        self.numbers: list[bool] = []  # which stand for Python numbers
        self.forms: dict[int, tuple[TreeSpec, int]] = {}
        for place, value in enumerate(self.before):
            if place in self.stay:
                continue
            if isinstance(value, Sometimes):
                value = value.read()
            if isinstance(value, Undefined):
                known = self.late.get(place)
                if known is None:
                    continue
                form, specs = known
                value = tree_unflatten([self._zeros(spec) for spec in specs], form)
            if place in self.elements:
                value = known_elements(self.recorder, value, self.elements[place], self.st.what)
            leaves, form = tree_flatten(value)
            if not all(map(is_value, leaves)):
                continue
            self.first[place] = value
            self.forms[place] = form, len(leaves)
            name = self.st.label(self.st.names[place])
            paths = [keystr(path) for path, _ in tree_flatten_with_path(value)[0]]
            for at, (leaf, path) in enumerate(zip(leaves, paths, strict=True)):
                self.numbers.append(is_number(leaf) or not isinstance(leaf, (torch.Tensor, Variable)))
                if isinstance(leaf, NUMBERS):
                    found = float_dtype(self.recorder, tree_flatten(self.before)[0]) if type(leaf) is float else None
                    leaf = torch.as_tensor(leaf, dtype=self.dtypes.get((place, at), found))
                self.start.append(tensor_of(self.recorder, leaf))
                self.labels.append(part_of(name, path))

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
        self.st.copies = list(_containers(values))
        self.st.set(tuple(
            old if isinstance(old, Undefined) and not isinstance(old, (Sometimes, UndefinedReturnValue)) else value
            for value, old in zip(values, self.before, strict=True)
        ))  # fmt: skip

    def _set_back(self) -> None:
        self.st.set(self.before)

    def _leaves(self, values: tuple[Any, ...], carried: Sequence[Any]) -> list[Any]:
        """The carried leaves after one turn."""
        found: list[Any] = []
        self.homes: list[Home | None] = []  # of each leaf: what it looks at after the turn, and how
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
                self.homes += [None] * len(mine)
                continue
            if place not in self.rebound and self._stays(place, value, mine):
                self.stay.add(place)
                again = True
                continue
            found += self._carried(place, value, form, mine)
            self.homes += (home_of(self.recorder, leaf) for leaf in tree_flatten(value)[0])
        if again or any(isinstance(leaf, torch.dtype) for leaf in found):
            raise _Again
        return found

    def _stays(self, place: int, value: Any, mine: Sequence[Tensor]) -> bool:
        """Whether a name still holds the tensors that the turn was given: then they are those of outside."""
        outside = tree_flatten(self.before[place])[0]
        if all(leaf is given for leaf, given in zip(tree_flatten(value)[0], mine, strict=False)):
            return not isinstance(self.before[place], Undefined)
        for given, outer in zip(mine, outside, strict=False):
            if _is_written(given) and (_is_shared(self.recorder, outer) or is_held(outer)):
                name = self.st.label(self.st.names[place])
                raise CannotStage(f"it writes into what {name} holds before the loop, and then gives it another value")
        return False

    def _new(self, place: int, value: Any, old: Any) -> bool:
        """A name that is not carried: left as it was, or given its first value."""
        name = self.st.label(self.st.names[place])
        if value is old or (not isinstance(old, Undefined) and type(value) is type(old) and same(value, old)):
            return False
        if place in self.stay:
            self.stay.discard(place)
            self.rebound.add(place)
            return True
        if not isinstance(old, Undefined):
            error = BeginsAsNone if None in tree_flatten(old)[0] else CannotStage
            raise error(f"{name} is {kind(old)} before the loop and {kind(value)} after a turn")
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
        if got != form and place not in self.elements and has_blanks(self.before[place]):
            self.elements[place] = [array.spec for array in arrays(value)]
            raise _Again
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
        numbers = tree_flatten(self.first[place])[0]
        found: list[Any] = []
        for at, (leaf, given) in enumerate(zip(leaves, mine, strict=True)):
            if not is_value(leaf):
                raise CannotStage(f"{name} is a tensor or number before the loop and {kind(leaf)} after a turn")
            was = numbers[at] if at < len(numbers) else None
            wanted = _dtype_after(leaf, given)
            if isinstance(was, NUMBERS) and wanted != given.dtype:
                first = (place, at) not in self.dtypes and isinstance(leaf, torch.Tensor)
                better = torch.result_type(empty_of(wanted), was) if first else torch.promote_types(given.dtype, wanted)
                if better != given.dtype:
                    self.dtypes[place, at] = better
                    found.append(better)
                    continue
            if isinstance(leaf, NUMBERS):
                if wanted != given.dtype:
                    raise InvalidArgument(
                        f"{name} is {given.spec} before the loop and the number {leaf!r} after a turn\n  {st.place}"
                        f"{self.recorder.tape.at()}", details=DISAGREE,
                    )  # fmt: skip
                leaf = torch.as_tensor(leaf, dtype=given.dtype)
            found.append(tensor_of(self.recorder, leaf))
        return found

    def _finds_places(self) -> bool:
        """Whether the turn looked at something by other places of its own than those that are carried."""
        found = {at: list(map(self._spec, places)) for at, places in self.memory.places.items()}
        found = {at: specs for at, specs in found.items() if all(bound_outside(self.recorder, spec) for spec in specs)}
        before, self.places = self.places, found
        return before != found

    def _before(self) -> list[Any]:
        """What is carried, as it was before the loop."""
        return [leaf for place in self.forms for leaf in tree_flatten(self.first[place])[0]]

    def _finish(self, carried: Sequence[Any], places: Sequence[Tensor], turns: Tensor, taken: Test) -> None:
        values = list(self._values(carried))
        before = self._before()
        made = [place for at in self.places for place in self.memory.places[at]]
        places_by_id = dict(zip(map(id, made), places, strict=True))
        self.memory.share(self.recorder, carried, before, turns, taken, places_by_id)
        some = sample_truth(self.recorder, turns)
        st = self.st
        for place, old in enumerate(self.before):
            if not isinstance(old, Undefined) or isinstance(old, (Sometimes, UndefinedReturnValue)):
                continue
            name, why = st.names[place], f"it is first set in the loop of {st.place}"
            if place in self.forms and some is not False:
                whole = values[place]
                values[place] = Sometimes(name, guarded(st.recorder, whole, turns, True, no_value(name, why)))
            elif place in self.late:
                values[place] = Absent(name, why)
        st.set(tuple(values))


def _containers(item: Any) -> Iterator[Any]:
    """Lists and dicts, also in others."""
    for each in item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ():
        yield from (each,) if isinstance(each, (list, dict)) else ()
        yield from _containers(each)


def _is_written(given: Tensor) -> bool:
    """Whether a tensor that a turn was given was written in place."""
    return given._family.version != 0


def _is_shared(recorder: Recorder, leaf: Any) -> bool:
    """Whether others than its name are known to see what is written into a tensor."""
    if not isinstance(leaf, Tensor):
        return isinstance(leaf, (torch.Tensor, Variable))
    base = leaf._family
    is_linked = any(other is not base for other in linked(base))
    return (
        is_linked
        or base.variable is not None
        or any(other._family is base and other is not leaf for other in recorder.live)
    )


def _dtype_after(leaf: Any, given: torch.Tensor) -> torch.dtype:
    """The dtype of what a loop variable becomes; a number takes part as torch's numbers do."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype
    if isinstance(leaf, Variable):
        return leaf.spec.dtype
    if isinstance(leaf, SIZES):
        return torch.as_tensor(plain_number(leaf)).dtype
    return torch.result_type(empty_of(given.dtype), leaf)
