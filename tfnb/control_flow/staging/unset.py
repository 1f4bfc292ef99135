"""Names of converted code without a value, or with one that runs have in which a loop takes an iteration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tfnb.control_flow.staging.user_frames import source_line
from tfnb.control_flow.structure import sample_truth
from tfnb.errors import InvalidArgument
from tfnb.graph import Ref
from tfnb.graph.ops import NAMED
from tfnb.recording import Recorder, Tensor
from tfnb.recording.writes.aliases import copy_of

MISSING = object()


class Undefined:
    """What a name holds that was not assigned; with ``why``, one that a staged statement did not assign for sure."""

    def __init__(self, symbol_name: str, why: str | None = None) -> None:
        self.symbol_name, self.why = symbol_name, why

    def read(self) -> Any:
        """Raises as Python does; InvalidArgument where a staged statement is why."""
        if self.why is not None:
            raise InvalidArgument(_no_value(self.symbol_name, self.why))
        raise UnboundLocalError(
            f"cannot access local variable {self.symbol_name!r} where it is not associated with a value"
        )

    def __repr__(self) -> str:
        return f"<{self.symbol_name} has no value>"


class UndefinedReturnValue(Undefined):
    """What a function gives that has not returned."""

    def __init__(self) -> None:
        super().__init__("the value that is returned")


def _no_value(name: str, why: str) -> str:
    return f"`{name}` has no value here: {why}; give it one before"


class FirstSetInLoop(Undefined):
    """A name that a loop gives its first value, after the loop: a run has it that took an iteration.

    taken: a recorded truth value that says whether the loop took one.
    """

    def __init__(self, symbol_name: str, item: Any, taken: Tensor, recorder: Recorder, why: str) -> None:
        super().__init__(symbol_name, why)
        self._read = guarded(recorder, item, taken, True, _no_value(symbol_name, why))
        self.is_there = sample_truth(recorder, taken) is not False

    def read(self) -> Any:
        """The value, with a guard that the run has it; raises InvalidArgument where the samples have not."""
        return self._read() if self.is_there else super().read()


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
