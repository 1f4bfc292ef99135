"""Names of converted code without a value, or with one that not every run gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import GetAttrKey, register_pytree_node, tree_flatten, tree_unflatten

from tfnb.control_flow.staging.user_frames import source_line
from tfnb.control_flow.structure import sample_truth
from tfnb.errors import InvalidArgument
from tfnb.graph import Ref
from tfnb.graph.ops import NAMED
from tfnb.recording import Recorder, Tensor
from tfnb.recording.writes.aliases import copy_of

MISSING = object()


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
        raise InvalidArgument(no_value(self.symbol_name, self.why))


def no_value(name: str, why: str) -> str:
    """What is said of a name that is read, and was not set."""
    return f"`{name}` has no value here: {why}; give it one before"


class Sometimes(Undefined):
    """A name that a staged statement assigns in some runs.

    item: what it holds there; is_set: a recorded truth value that says where. Branches and loops carry it as they carry
    a tuple of both.
    """

    def __init__(self, symbol_name: str, item: Any, is_set: Any, recorder: Recorder, why: str) -> None:
        super().__init__(symbol_name)
        self.item, self.is_set, self.recorder, self.why = item, is_set, recorder, why
        self._read = guarded(recorder, item, is_set, True, no_value(symbol_name, why))

    @property
    def is_there(self) -> bool:
        """Whether the samples may have it."""
        return sample_truth(self.recorder, self.is_set) is not False

    def read(self) -> Any:
        """The value, with a guard that the run assigned it; raises InvalidArgument where the samples did not."""
        if not self.is_there:
            raise InvalidArgument(no_value(self.symbol_name, self.why))
        return self._read()


@dataclass(frozen=True)
class _Named:
    """What is no tensor of a `Sometimes`."""

    symbol_name: str
    recorder: Recorder
    why: str = field(compare=False)


def _parts(some: Sometimes) -> tuple[list[Any], _Named]:
    return [some.item, some.is_set], _Named(some.symbol_name, some.recorder, some.why)


def _whole(parts: Iterable[Any], named: _Named) -> Sometimes:
    item, is_set = parts
    return Sometimes(named.symbol_name, item, is_set, named.recorder, named.why)


register_pytree_node(
    Sometimes,
    _parts,
    _whole,
    flatten_with_keys_fn=lambda some: (
        [(GetAttrKey("item"), some.item), (GetAttrKey("is_set"), some.is_set)],
        _parts(some)[1],
    ),
)


def guarded(recorder: Recorder, item: Any, test: Tensor, outcome: bool, lacks: str) -> Callable[[], Any]:
    """The tensors of ``item``, which a run can have only where ``test`` has this truth.

    lacks: what is said to a run that has not.
    They are recorded when it is called, once, and once in each branch or loop that reads them alone.
    """
    source = source_line(recorder)  # the statement's, wherever the name is read
    made: list[Any] = []

    def read() -> Any:
        nodes = [leaf.shown.value.node for leaf in tree_flatten(made)[0] if isinstance(leaf, Tensor)]
        if not made or not all(node in recorder.tape.by_id for node in nodes):
            made[:] = [record()]
        return made[0]

    def record() -> Any:
        tape = recorder.tape
        where, tape.where = tape.where, lambda: source
        try:
            guard = tape.append(
                "tfnb.guard", "guard", (), inputs=(recorder._entry(test).value,),
                attrs={"value": Ref(0), "outcome": outcome, "lacks": lacks}, scope=recorder.scopes.current(),
                tags=frozenset({NAMED}),
            )  # fmt: skip
            leaves, form = tree_flatten(item)
            with tape.marked(control=(*tape.marks.control, guard.node)):
                leaves = [
                    copy_of(recorder, leaf, f"in some runs {lacks}", is_held=False) if isinstance(leaf, torch.Tensor)
                    else leaf for leaf in leaves
                ]  # fmt: skip
            return tree_unflatten(leaves, form)
        finally:
            tape.where = where

    return read
