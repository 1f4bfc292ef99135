"""The values of names after one of two branches: the outputs of both, as one node.

A name that one branch leaves as it was, or gives a view of something, has that memory where the branch is taken: nobody
may write into it while others hold that memory, see `alias_analysis`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from tfnb.control_flow.branches import joined, spec_inside
from tfnb.control_flow.frontend.cannot_stage import CannotStage
from tfnb.control_flow.joined_gradients import changed_holders
from tfnb.control_flow.staging.alias_analysis import Bases, reason_of
from tfnb.control_flow.staging.statement import (
    NUMBERS,
    Statement,
    as_number,
    empty_of,
    float_dtype,
    is_number,
    is_value,
    kind,
    part_of,
    plain_number,
    same,
    status,
    tensor_of,
)
from tfnb.control_flow.staging.unset import SetInSomeRuns, Undefined, UndefinedReturnValue
from tfnb.control_flow.structure import SIZES, truth
from tfnb.control_flow.tensor_array import has_blanks
from tfnb.errors import InvalidArgument
from tfnb.graph import Value, Variable
from tfnb.recording import Tensor
from tfnb.recording.overrides.python_answers import stands_for_number
from tfnb.recording.subgraphs.capture import Region, bound_outside
from tfnb.recording.subgraphs.loop_node import DISAGREE
from tfnb.recording.writes.aliases import may_share

_HOW_ARRAYS = "; a TensorArray that one branch alone writes has to know its elements: give it shape="


@dataclass
class After:
    """The values of the names after one branch; tensors are outputs of the region."""

    region: Region
    values: tuple[Any, ...]
    outputs: dict[tuple[int, int], Value]  # (name, leaf) -> output
    bases: dict[tuple[int, int], Bases]  # (name, leaf) -> what may have its memory


class Phi:
    """Joins the values that names hold after two branches."""

    def __init__(
        self, st: Statement, test: object, taken: bool | None, before: tuple[Any, ...], then: After, other: After
    ) -> None:
        self.st, self.test, self.taken, self.before = st, test, taken, before
        self.sides = {True: then, False: other}
        self.columns: list[tuple[Value | None, Value | None]] = []
        self.labels: list[str] = []
        self.made: list[tuple[Tensor, dict[bool, Bases]]] = []  # results, and what may have their memory

    @cached_property
    def predicate(self) -> Tensor:
        """The test as a recorded tensor."""
        return truth(self.st.recorder, self.test, self.st.what)

    def values(self, wanted: int) -> tuple[Any, ...]:
        """The values to set the names to, once the branches are one node."""
        plans = [self._plan(place) if place < wanted else (lambda _, v=v: v) for place, v in enumerate(self.before)]
        st = self.st
        for place, side in enumerate((True, False)):
            self.sides[side].region.outputs = [column[place] for column in self.columns]
        what = f"{st.place}: `{st.what}`"
        regions = (self.sides[True].region, self.sides[False].region)
        if any(r.nodes or r.written for r in regions) or self.columns or changed_holders(st.recorder, regions):
            results = joined(st.recorder, self.predicate, regions, self.labels, what)
        else:
            results = []
        return tuple(plan(results) for plan in plans)

    def _plan(self, place: int) -> Callable[[list[Any]], Any]:
        then, other = (self.sides[side].values[place] for side in (True, False))
        name = self.st.names[place]
        if then is other:
            return lambda _: then
        if isinstance(then, Undefined) or isinstance(other, Undefined):
            return self._one_sided(place, isinstance(other, Undefined))
        leaves, form = tree_flatten(then)
        theirs, their_form = tree_flatten(other)
        label = self.st.label(name)
        if form != their_form:
            mixed = [v for v in (*leaves, *theirs) if isinstance(v, torch.Tensor)]
            if then is None or other is None or not mixed or form.is_leaf() or their_form.is_leaf():
                raise CannotStage(_unlike(label, then, other))
            raise InvalidArgument(
                f"{label} is of another structure in each branch: {kind(then)} of {len(leaves)} values and "
                f"{kind(other)} of {len(theirs)}{_HOW_ARRAYS if has_blanks((then, other)) else ''}"
                f"\n  {self.st.place}{self.st.recorder.tape.at()}", details=DISAGREE,
            )  # fmt: skip
        paths = [keystr(path) for path, _ in tree_flatten_with_path(then)[0]]
        parts = []
        for at, (a, b, path) in enumerate(zip(leaves, theirs, paths, strict=True)):
            parts.append(self._leaf(place, at, a, b, part_of(label, path)))
        return lambda results: tree_unflatten([part(results) for part in parts], form)

    def _leaf(self, place: int, at: int, a: object, b: object, label: str) -> Callable[[list[Any]], Any]:
        if a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and same(a, b)):
            return lambda _: a
        known = self._known(True, a)
        if known is not None and known is self._known(False, b):
            return lambda _: known
        if not is_value(a) or not is_value(b):
            raise CannotStage(_unlike(label, a, b))
        dtype = self._dtype((a, b), (place, at), label)
        column = tuple(self._value(side, place, at, v, dtype) for side, v in ((True, a), (False, b)))
        result = self._column(column, label)
        taken = [isinstance(v, Tensor) and stands_for_number(self.st.recorder, v.shown.value) for v in (a, b)]
        plain = [is_number(v) or not isinstance(v, (torch.Tensor, Variable)) for v in (a, b)]
        if not all(map(operator.or_, taken, plain)):
            return self._shared(place, at, result, label)
        return lambda results: self._number(result(results), is_taken=any(taken))

    def _number(self, found: Any, *, is_taken: bool) -> Any:
        """A result that is a Python number in both branches. is_taken: in one of them, of a tensor's value."""
        if is_taken:
            self.st.recorder.tape.numbers.add(found.value)
        return as_number(found)

    def _shared(
        self, place: int, at: int, result: Callable[[list[Any]], Any], label: str
    ) -> Callable[[list[Any]], Any]:
        """The result, declared to share memory with the branches' outputs."""
        bases = {side: after.bases[place, at] for side, after in self.sides.items() if (place, at) in after.bases}

        def made(results: list[Any]) -> Any:
            found = result(results)
            others = [
                other._family for other, more in self.made
                if any(mine & more.get(side, frozenset()) for side, mine in bases.items())
            ]  # fmt: skip
            may_share(found, [*others, *chain(*bases.values())], reason_of(self.st, label))
            self.made.append((found, bases))
            return found

        return made

    def _known(self, side: bool, leaf: object) -> bool | None:
        """The truth of a leaf on this side implied by the test alone, for flags of a function's return."""
        if isinstance(leaf, bool):
            return leaf
        if not isinstance(leaf, Tensor) or leaf.dtype != torch.bool or not isinstance(self.test, Tensor):
            return None
        recorder = self.st.recorder
        tested, value = recorder._entry(self.test).value, leaf.shown.value
        if value == tested:
            return side
        node = recorder.node(tested.node)
        return not side if node.op == "aten.logical_not.default" and node.inputs[0] == value else None

    def _column(self, column: Any, label: str) -> Callable[[list[Any]], Any]:
        self.columns.append(column)
        self.labels.append(label)
        index = len(self.columns) - 1
        return lambda results: results[index]

    def _dtype(self, leaves: tuple[Any, Any], at: tuple[int, int], label: str) -> torch.dtype | None:
        """The dtype of numbers: that of the tensor in the other branch, or torch's promotion of both.

        leaves: the values of both branches, at this name and leaf.
        """
        numbers = [v for v in leaves if not isinstance(v, (torch.Tensor, Variable))]
        if not numbers:
            return None
        plain = [plain_number(n) for n in numbers]
        if len(numbers) == 2:
            found = torch.result_type(*(torch.as_tensor(n) for n in plain))
            return (float_dtype(self.st.recorder, ()) or found) if found.is_floating_point else found
        side = isinstance(leaves[0], (torch.Tensor, Variable))
        tensor, after = leaves[not side], self.sides[side]
        if at in after.outputs:
            dtype = spec_inside(self.st.recorder, after.region, after.outputs[at]).dtype
        else:
            dtype = tensor.dtype if isinstance(tensor, torch.Tensor) else tensor.spec.dtype
        if torch.result_type(empty_of(dtype), plain[0]) != dtype:
            st = self.st
            raise InvalidArgument(
                f"{label} is {dtype} in one branch and the number {numbers[0]!r} in the other\n  {st.place}"
                f"{st.recorder.tape.at()}", details=DISAGREE,
            )  # fmt: skip
        return dtype

    def _value(self, side: bool, place: int, at: int, leaf: object, dtype: torch.dtype | None) -> Value:
        after, recorder = self.sides[side], self.st.recorder
        if (place, at) in after.outputs:
            return after.outputs[place, at]
        is_state = isinstance(leaf, (torch.Tensor, Variable))
        if is_state and self._base(leaf) in after.region.written:
            raise CannotStage(
                f"{self.st.label(self.st.names[place])} is replaced in one branch and written in the other"
            )
        if isinstance(leaf, NUMBERS):
            leaf = torch.as_tensor(leaf, dtype=dtype)
        found = tensor_of(recorder, leaf)
        return recorder._entry(found.to(dtype) if isinstance(leaf, SIZES) and dtype is not None else found).value

    def _base(self, leaf: Any) -> Any:
        recorder = self.st.recorder
        return recorder._read_base(leaf) if isinstance(leaf, Variable) else recorder.home(leaf)

    def _one_sided(self, place: int, side: bool) -> Callable[[list[Any]], Any]:
        """A name that one branch leaves unset: only results of functions are carried."""
        st, after = self.st, self.sides[side]
        name, value = st.names[place], after.values[place]
        if isinstance(value, SetInSomeRuns):  # its tensors are of inside of the branch
            return lambda _: Undefined(name, value.why)
        if isinstance(value, Undefined):
            return lambda _: value
        if not any(isinstance(s.values[place], UndefinedReturnValue) for s in self.sides.values()):
            return self._set_in_some_runs(place, side)
        leaves, form = tree_flatten(value)
        if not all(map(is_value, leaves)):
            raise CannotStage(f"it returns {kind(value)}, and goes on in the other branch")
        parts = []
        for at, leaf in enumerate(leaves):
            value_at = self._value(side, place, at, leaf, None)
            column = self._column((value_at, None) if side else (None, value_at), st.label(name))
            parts.append(self._shared(place, at, column, st.label(name)))
        return lambda results: tree_unflatten([part(results) for part in parts], form)

    def _set_in_some_runs(self, place: int, side: bool) -> Callable[[list[Any]], Any]:
        """A name that one branch alone sets: in a loop, where an iteration before may have, the value and the test."""
        st, after = self.st, self.sides[side]
        name, value = st.names[place], after.values[place]
        why = f"it is set in one branch of {st.place} only"
        leaves, form = tree_flatten(value)
        is_carried = isinstance(self.sides[not side].values[place], SetInSomeRuns) or not all(map(is_value, leaves))
        fits = not is_carried and all(self._fits(after, place, at) for at in range(len(leaves)))
        if status.growth is None or not leaves or not fits or self._writes(after, leaves):
            return lambda _: Undefined(name, why)
        parts = []
        for at, leaf in enumerate(leaves):
            value_at = self._value(side, place, at, leaf, None)
            column = self._column((value_at, None) if side else (None, value_at), st.label(name))
            parts.append(self._shared(place, at, column, st.label(name)))
        numbers = [is_number(leaf) or not isinstance(leaf, (torch.Tensor, Variable)) for leaf in leaves]
        is_set: Any = self.predicate if side else torch.logical_not(self.predicate)

        def made(results: list[Any]) -> SetInSomeRuns:
            found = [
                as_number(part(results)) if number else part(results)
                for part, number in zip(parts, numbers, strict=True)
            ]
            return SetInSomeRuns(name, why, st.recorder, found, form, is_set, is_partial=True)

        return made

    def _writes(self, after: After, leaves: list[Any]) -> bool:
        """Whether the branch both writes and returns one of these outside tensors."""
        are_state = (leaf for leaf in leaves if isinstance(leaf, (torch.Tensor, Variable)))
        return any(self._base(leaf) in after.region.written for leaf in are_state)

    def _fits(self, after: After, place: int, at: int) -> bool:
        """Whether its sizes are known where the branch was not taken."""
        output = after.outputs.get((place, at))
        if output is None:
            return True
        recorder = self.st.recorder
        return bound_outside(recorder, spec_inside(recorder, after.region, output))


def _is_tensor(item: object) -> bool:
    return isinstance(item, torch.Tensor) and not is_number(item)


def _unlike(label: str, a: object, b: object) -> str:
    """The reason why the branches' values do not form one graph value."""
    text = f"{label} is {kind(a)} in one branch and {kind(b)} in the other"
    if (a is None and _is_tensor(b)) or (b is None and _is_tensor(a)):
        text += (
            "; for each run to decide, begin with a tensor like that, and a truth value that says whether it was set"
        )
    return text
