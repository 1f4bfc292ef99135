"""Loops of converted code: test and body are run on the recorder, as `tfnb.while_loop` does.

What the names hold is what is carried from iteration to iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from tfnb.control_flow.frontend.cannot_stage import CannotStage, Instead
from tfnb.control_flow.loops import invariants, known_elements
from tfnb.control_flow.staging.alias_analysis import Bases, LoopAliases, bases_of
from tfnb.control_flow.staging.lists import Growth
from tfnb.control_flow.staging.statement import (
    NUMBERS,
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
    result_of,
    same,
    status,
    tensor_of,
)
from tfnb.control_flow.staging.unset import SetInSomeRuns, Undefined, UndefinedReturnValue
from tfnb.control_flow.structure import SIZES, spec_of, truth
from tfnb.control_flow.tensor_array import arrays, has_blanks
from tfnb.errors import BranchChanged, InvalidArgument, TfnbError
from tfnb.graph import Spec, Variable
from tfnb.interrupts import from_signal_handler
from tfnb.recording import Tensor
from tfnb.recording.subgraphs.capture import Retry, bound_before, bound_outside, now, retried
from tfnb.recording.subgraphs.loop_node import DISAGREE, LoopRecorder, zeros
from tfnb.recording.writes.aliases import REFUSED, family, lose


def staged_loop(
    st: Statement, stage: Callable[[], None], first: Callable[[], None], *, peels: bool = False
) -> str | None:
    """Stage a loop, or return the reason to leave the loop to Python; a user's error in the samples' first iteration is
    raised.

    peels: the caller can take an iteration by itself where CannotStage says so, which is raised then.
    """
    try:
        stage()
        return None
    except CannotStage as error:
        why = error
    if peels and why.instead is Instead.FIRST_ITERATION:
        raise why
    if is_users(why.__cause__ or why):
        st.tried(first)
    note_python(st, why)
    return f"the `{st.what}` is Python's: {why}"


_OTHER_WAYS = "a test in it that stays Python does not go the same way in all of its iterations"


@dataclass(frozen=True)
class Iterations:
    """``while test(): body()``, at most ``limit`` times.

    With ``first``, the body gets an index, which grows by ``step``; with ``xs``, a row of each.
    """

    test: Callable[[], Any] | None
    body: Callable[..., None]
    xs: Sequence[Tensor] = ()
    limit: Any = None
    first: Any = None
    step: Any = 1


@dataclass(frozen=True)
class _First:
    """A name's first value as carried values from ``at`` on, followed by a flag for whether it was set."""

    form: TreeSpec
    numbers: list[bool]  # which stand for Python numbers
    at: int
    has_flag: bool


class LoopStaging:
    """One loop to be staged: its carried names, and their tensors.

    by_size: only sizes decide how many iterations it takes, so Python can run it for those of the samples. entered:
    whether the samples take an iteration. aliases: what the last recorded iteration says of shared memory.
    """

    aliases: LoopAliases

    def __init__(self, st: Statement, *, by_size: bool, entered: bool) -> None:
        self.st, self.recorder, self.by_size, self.entered = st, st.recorder, by_size, entered
        self.before = st.get()
        self.dtypes: dict[tuple[int, int], torch.dtype] = {}  # of numbers that the body makes into something else
        self.late: dict[int, _First | None] = {}  # names that the body gives a first value; None: no tensors
        self.returned: dict[int, tuple[list[Spec], TreeSpec]] = {}  # what the body returns of the function
        self.elements: dict[int, list[Spec | None]] = {}  # of arrays that know theirs by the body only
        self.stay: set[int] = set()  # names that no iteration rebinds; the body may write into their memory
        self.rebound: set[int] = set()  # names of which that was not so after all
        self.growth = Growth(status.made if status.depth else None)
        self.calls = 0

    def record(self, iterations: Iterations) -> None:
        """Record the loop, again until its variables are known."""
        st = self.st

        def record() -> None:
            st.set(self.before)
            _Attempt(self, iterations).record()

        with st.staging():
            try:
                retried(self, record)
            except Exception as error:
                if isinstance(error, CannotStage) and error.instead is Instead.FIRST_ITERATION:
                    raise
                if getattr(error, "details", None) == REFUSED or from_signal_handler(error):
                    raise
                if getattr(error, "details", None) == DISAGREE and not self.by_size:
                    if isinstance(error, TfnbError) and st.place not in error.message:
                        error.message += f"\n  {st.place}: `{st.what}`"
                    raise
                why = _OTHER_WAYS if isinstance(error, BranchChanged) else reason(error)
                raise CannotStage(why) from error

    def plan(self) -> None:
        """Choose the carried names: those that hold tensors and numbers."""
        self.start: list[Tensor] = []
        self.first: dict[int, Any] = {}  # what the carried names hold in the first iteration
        self.labels: list[str] = []
        self.numbers: list[bool] = []  # which stand for Python numbers
        self.forms: dict[int, tuple[TreeSpec, int]] = {}
        for place, value in enumerate(self.before):
            if place in self.stay:
                continue
            if place in self.returned:
                value = self._nothing_returned(place)
            if isinstance(value, Undefined):
                continue
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
                self.start.append(result_of(self.recorder, leaf))
                self.labels.append(part_of(name, path))

    def _values(self, carried: Sequence[Any], *, is_after: bool = False) -> tuple[Any, ...]:
        leaves = iter(as_number(leaf) if number else leaf for leaf, number in zip(carried, self.numbers, strict=False))
        found = list(self.before)
        for place, (form, count) in self.forms.items():
            value = tree_unflatten([next(leaves) for _ in range(count)], form)
            if is_after or place not in self.returned:
                found[place] = value
        return tuple(found)

    def _nothing_returned(self, place: int) -> Any:
        """Zeros, carried in place of the value that the function has not returned yet; raises CannotStage."""
        specs, form = self.returned[place]
        if not all(bound_outside(self.recorder, spec) for spec in specs):
            raise CannotStage("it returns a tensor inside of the loop whose size only the loop knows")
        return tree_unflatten([zeros(self.recorder, spec) for spec in specs], form)

    def set(self, carried: Sequence[Any]) -> None:
        """The names for one iteration."""
        self.st.set(self._values(carried))

    def set_back(self) -> None:
        """The names as they were before the loop."""
        self.st.set(self.before)

    def leaves(self, values: tuple[Any, ...], carried: Sequence[Any]) -> list[Any]:
        """The carried leaves after one iteration; raises Retry if they differ from the plan."""
        found: list[Any] = []
        self.bases: list[Bases] = []  # of each leaf: what may have its memory after the iteration
        self.late = {}
        self.lost: list[tuple[Any, str]] = []  # what names held before the loop, which writes into it
        given = iter(carried)
        again = False
        planned = dict(self.forms)
        for place, (value, old) in enumerate(zip(values, self.before, strict=True)):
            if place not in planned:
                again |= self._new(place, value, old)
                continue
            form, count = self.forms[place]
            mine = [next(given) for _ in range(count)]
            bases = self._bases(value)
            if place not in self.rebound and self._stays(place, value, mine):
                self.stay.add(place)
                again = True
                continue
            found += self._carried(place, value, form, mine)
            self.bases += [*bases, *[Bases()] * (len(mine) - len(bases))]
        if again or any(isinstance(leaf, torch.dtype) for leaf in found):
            raise Retry(self)
        return found

    def _bases(self, value: object) -> list[Bases]:
        """The bases of the memory that a name holds after an iteration."""
        return [bases_of(self.recorder, leaf) for leaf in tree_flatten(value)[0]]

    def _stays(self, place: int, value: object, mine: Sequence[Tensor]) -> bool:
        """Whether a name keeps the tensors given to the iteration, and so holds outside tensors throughout."""
        outside = tree_flatten(self.before[place])[0]
        if all(leaf is given for leaf, given in zip(tree_flatten(value)[0], mine, strict=False)):
            return not isinstance(self.before[place], Undefined)
        name = self.st.label(self.st.names[place])
        self.lost += [(outer, name) for given, outer in zip(mine, outside, strict=False) if _is_written(given)]
        return False

    def _new(self, place: int, value: object, old: object) -> bool:
        """Handle a name that is not carried: unchanged, or set for the first time."""
        st = self.st
        name = st.label(st.names[place])
        if value is old or (not isinstance(old, Undefined) and type(value) is type(old) and same(value, old)):
            return False
        if place in self.stay:
            self.stay.discard(place)
            self.rebound.add(place)
            return True
        if not isinstance(old, Undefined):
            instead = Instead.FIRST_ITERATION if None in tree_flatten(old)[0] else Instead.RUN
            raise CannotStage(f"{name} is {kind(old)} before the loop and {kind(value)} after an iteration", instead)
        if not isinstance(old, UndefinedReturnValue):
            if isinstance(old, SetInSomeRuns) and old.is_read:
                raise InvalidArgument(
                    f"{name} is read and set in the `{st.what}` of {st.place}: {old.why}; give it a value before\n  "
                    f"{st.place}{self.recorder.tape.at()}", details=DISAGREE,
                )  # fmt: skip
            self.late[place] = None
            return False
        leaves, form = tree_flatten(value)
        if not all(map(is_value, leaves)):
            raise CannotStage(f"it returns {kind(value)} inside of the loop")
        self.returned[place] = [self._spec(leaf) for leaf in leaves], form
        return True

    def _spec(self, leaf: Any) -> Spec:
        tensor = tensor_of(self.recorder, leaf)
        spec = spec_of(tensor)
        return Spec(spec.dtype, now(self.recorder, spec), spec.device)

    def _carried(self, place: int, value: object, form: TreeSpec, mine: Sequence[Any]) -> list[Any]:
        st = self.st
        name = st.label(st.names[place])
        leaves, got = tree_flatten(value)
        if got != form and place not in self.elements and has_blanks(self.before[place]):
            self.elements[place] = [array.spec for array in arrays(value)]
            raise Retry(self)
        if got != form:
            mixed = not got.is_leaf() and not form.is_leaf()
            if value is None or not mixed:
                raise CannotStage(
                    f"{name} is {kind(self.before[place])} before the loop and {kind(value)} after an iteration"
                )
            raise InvalidArgument(
                f"{name} has {len(mine)} values before the loop and {len(leaves)} after an iteration\n  {st.place}"
                f"{self.recorder.tape.at()}", details=DISAGREE,
            )  # fmt: skip
        numbers = tree_flatten(self.first[place])[0]
        found: list[Any] = []
        for at, (leaf, given) in enumerate(zip(leaves, mine, strict=True)):
            if not is_value(leaf):
                raise CannotStage(f"{name} is a tensor or number before the loop and {kind(leaf)} after an iteration")
            leaf = result_of(self.recorder, leaf) if isinstance(leaf, Tensor) else leaf
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
                        f"{name} is {given.spec} before the loop and the number {leaf!r} after an iteration"
                        f"\n  {st.place}"
                        f"{self.recorder.tape.at()}", details=DISAGREE,
                    )  # fmt: skip
                leaf = torch.as_tensor(leaf, dtype=given.dtype)
            found.append(tensor_of(self.recorder, leaf))
        return found

    def before_bases(self) -> list[Bases]:
        """The bases of the carried memory before the loop."""
        return [bases_of(self.recorder, leaf) for value in self.first.values() for leaf in tree_flatten(value)[0]]

    def begun(self, loop: LoopRecorder, values: Sequence[Any], written: Collection[Any]) -> list[Any]:
        """Names first set by the body, carried from here on, with their values after the iteration.

        A name that holds memory which the iteration writes is left without a value.
        """
        found: list[Any] = []
        self.extra: list[Any] = []
        self.all_labels = list(self.labels)
        for place in self.late:
            value, is_set = values[place], None
            if self.before[place].why is not None:  # another statement gave it a value in some runs
                continue
            if isinstance(value, SetInSomeRuns):
                leaves, form, is_set = value.leaves, value.form, value.is_set
            elif isinstance(value, Undefined):
                continue
            else:
                leaves, form = tree_flatten(value)
            if not leaves or not all(map(is_value, leaves)):
                continue
            numbers = [is_number(leaf) or not isinstance(leaf, (torch.Tensor, Variable)) for leaf in leaves]
            name = self.st.names[place]
            tensors: list[Any] = [result_of(self.recorder, leaf) for leaf in leaves]
            specs = [self._spec(tensor) for tensor in tensors]
            if not all(bound_before(self.recorder, spec) for spec in specs):
                continue
            bases = self._bases(leaves)
            if any(base in written for each in bases for base in each):
                continue
            given: list[Any] = [loop.begun(spec, name) for spec in specs]
            if is_set is not None:
                tensors = [torch.where(is_set, *pair) for pair in zip(tensors, given, strict=True)]
                given.append(loop.begun(spec_of(is_set), f"{name}_is_set"))
                tensors.append(given[-1] | is_set)
            self.late[place] = _First(form, numbers, len(self.extra), is_set is not None)
            self.extra += given
            self.all_labels += [self.st.label(name)] * len(given)
            self.bases += [*bases, *[Bases()] * (len(given) - len(bases))]
            found += tensors
        return found

    def _first_set(self, place: int, late: Sequence[Any], iterations: Any) -> Any:
        """The value after the loop of a name that the body set first."""
        st, first = self.st, self.late[place]
        if first is None:
            return Undefined(st.names[place], f"it is first set in the loop of {st.place}")
        end = first.at + len(first.numbers)
        leaves = [
            as_number(leaf) if number else leaf
            for leaf, number in zip(late[first.at : end], first.numbers, strict=True)
        ]
        how = "did not set it" if first.has_flag else "took no turn"
        why = f"it is first set in the loop of {st.place}, which {how}"
        is_set: Any = late[end] if first.has_flag else iterations > 0
        found = SetInSomeRuns(st.names[place], why, self.recorder, leaves, first.form, is_set)
        sample = is_set.sample
        if self.recorder.inside or (sample is not None and not sample):
            return found
        return found.read()

    def finish(self, carried: Sequence[Any], late: Sequence[Tensor], iterations: Tensor) -> None:
        """Assign the loop's results to the names."""
        values = list(self._values(carried, is_after=True))
        for outer, name in self.lost:
            self._lose(outer, name)
        self.aliases.share(self.st, [*carried, *late], self.all_labels)
        st = self.st
        for place in self.late:
            values[place] = self._first_set(place, late, iterations)
        st.set(tuple(values))

    def _lose(self, outer: Any, name: str) -> None:
        """Invalidate the memory that a name held before a loop that wrote into it: in Python other names would see the
        write.
        """
        st = self.st
        why = f"{st.place}: the `{st.what}` writes into what {name} holds before it, and then gives it another value"
        if isinstance(outer, (torch.Tensor, Variable)):
            for base in list(family(self.recorder.handle(self.recorder._as_tensor(outer))._family)):
                lose(self.recorder, base, why)


class _Attempt:
    """One attempt to record a loop, with the knowledge of its variables so far.

    head: among the carried values, those of the names are behind the index.
    """

    def __init__(self, stage: LoopStaging, iterations: Iterations) -> None:
        self.stage, self.iterations, self.st, self.recorder = stage, iterations, stage.st, stage.recorder
        stage.plan()
        index = [] if iterations.first is None else [tensor_of(self.recorder, iterations.first)]
        self.head, self.start = len(index), [*index, *stage.start]
        self.labels = [*["the index"] * len(index), *stage.labels]
        self.specs = invariants(self.recorder, self.start, [*index, *stage.first.values()])

    def record(self) -> None:
        """Record the loop and assign its results to the names; raises Retry for new facts about the body."""
        stage, iterations, st = self.stage, self.iterations, self.st
        loop = self.loop = LoopRecorder(
            self.recorder, self.start, self.labels, iterations.xs, specs=self.specs, limit=iterations.limit,
            what=self.st.what.split()[0], entered=stage.entered,
        )  # fmt: skip
        result = loop.record(None if iterations.test is None else self._condition, self._iteration)
        count = len(self.start)
        carried = result.carried[self.head : count]
        stage.finish(carried, result.carried[count:], result.iterations)
        if stage.growth.lists:
            stage.growth.finish(
                result.rows,
                st.place,
                lambda rows, bases: stage.aliases.share_elements(st, rows, bases, result.carried[self.head :]),
            )

    def _condition(self, *carried: object) -> list[Any]:
        assert self.iterations.test is not None
        self.stage.set(carried[self.head : len(self.start)])
        with self.st.body(True):
            found = self.iterations.test()
        self.stage.set_back()
        return [truth(self.recorder, found, f"the condition of `{self.st.what}`")]

    def _iteration(self, *given: Any) -> list[Any]:
        stage, recorder = self.stage, self.recorder
        carried, rows = given[self.head : len(self.start)], given[len(self.start) :]
        versions = {tensor._family: tensor._family.version for tensor in recorder.live}
        values = self._taken(given, carried, rows)
        written = self._written(versions, carried, rows)
        stage.set(carried)
        self.st.refuse_attributes()
        after = stage.leaves(values, carried)
        stage.set_back()
        late = stage.begun(self.loop, values, written)
        stacks = {row._family: stack for row, stack in zip(rows, self.iterations.xs, strict=True)}
        aliases = stage.aliases = LoopAliases(
            recorder, [*carried, *stage.extra], [*stage.before_bases(), *[Bases()] * len(stage.extra)], stage.bases,
            stacks,
        )  # fmt: skip
        aliases.check(self.st, written, stage.all_labels)
        if stage.growth.is_new:
            raise Retry(stage)
        index = [place + self.iterations.step for place in given[: self.head]]
        elements = stage.growth.rows(recorder, lambda bases: aliases.check_element(self.st, bases, written))
        return [*index, *after, *late, *elements]

    def _taken(self, given: Sequence[Any], carried: Sequence[Any], rows: Sequence[Any]) -> tuple[Any, ...]:
        """Run the body once; returns the values of the names afterwards."""
        stage, iterations = self.stage, self.iterations
        if (
            self.head
            and type(iterations.first) is type(iterations.step) is int
            and iterations.first >= 0 < iterations.step
        ):
            self.recorder.tape.naturals.add(given[0]._entry.value)
        stage.set(carried)
        with self.st.body(stage.calls > 0), stage.growth.iteration():
            stage.calls += 1
            iterations.body(*given[: self.head], *rows)
            return self.st.get()

    def _written(self, versions: Mapping[Any, int], carried: Sequence[Tensor], rows: Sequence[Tensor]) -> set[Any]:
        """The tensors that the iteration wrote into."""
        written = {base for base, version in versions.items() if base.version != version}
        if any(map(_is_written, rows)) or any(stack._family in written for stack in self.iterations.xs):
            raise CannotStage("its body writes into the rows that it takes")
        return written | {tensor._family for tensor in carried if _is_written(tensor)}


def _is_written(given: Tensor) -> bool:
    """Whether a tensor that an iteration was given was written in place."""
    return given._family.version != 0


def _dtype_after(leaf: Any, given: torch.Tensor) -> torch.dtype:
    """The dtype of a loop variable's next value; numbers promote like torch's numbers."""
    if isinstance(leaf, torch.Tensor):
        return leaf.dtype
    if isinstance(leaf, Variable):
        return leaf.spec.dtype
    if isinstance(leaf, SIZES):
        return torch.as_tensor(plain_number(leaf)).dtype
    return torch.result_type(empty_of(given.dtype), leaf)
