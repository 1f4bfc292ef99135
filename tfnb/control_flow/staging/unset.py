"""Names of converted code without a value, or set in some runs only."""

from __future__ import annotations

from typing import Any

from torch.utils._pytree import TreeSpec, tree_unflatten

from tfnb.errors import InvalidArgument
from tfnb.recording import Recorder, Tensor
from tfnb.recording.writes.aliases import copy_of

MISSING = object()


class Undefined:
    """Stands for the value of a name that was not assigned, or, with ``why``, that only some runs assign."""

    def __init__(self, symbol_name: str, why: str | None = None) -> None:
        self.symbol_name, self.why = symbol_name, why

    def read(self) -> Any:
        """Raises as Python does; InvalidArgument where a staged statement is why."""
        if self.why is not None:
            raise InvalidArgument(f"`{self.symbol_name}` has no value here: {self.why}; give it one before")
        raise UnboundLocalError(
            f"cannot access local variable {self.symbol_name!r} where it is not associated with a value"
        )

    def __repr__(self) -> str:
        return f"<{self.symbol_name} has no value>"


class UndefinedReturnValue(Undefined):
    """Stands for the result of a function that has not returned."""

    def __init__(self) -> None:
        super().__init__("the value that is returned")


class SetInSomeRuns(Undefined):
    """Stands for the value of a name first set inside a loop: a run that reads an unset name raises.

    leaves, form: the value. is_set: a recorded truth value, whether the run gave the name one. is_partial: a branch of
    the iteration that is being recorded decides, and an iteration before may have set it, so nothing reads it yet.
    """

    def __init__(
        self, symbol_name: str, why: str, recorder: Recorder, leaves: list[Any], form: TreeSpec, is_set: Tensor, *,
        is_partial: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(symbol_name, why)
        self.recorder, self.leaves, self.form, self.is_set = recorder, leaves, form, is_set
        self.is_partial, self.is_read = is_partial, False

    def read(self) -> Any:
        """The value, present only in runs that set the name; raises UnboundLocalError if the samples did not."""
        if self.is_partial:
            super().read()
        self.is_read = True
        recorder, text = self.recorder, f"`{self.symbol_name}` has no value: {self.why}"
        sample = self.is_set.sample
        if sample is not None and recorder.entered and not sample:
            raise UnboundLocalError(f"{text}; give it one before{recorder.tape.at()}")
        with recorder.tape.enclosed():
            recorder.guard(self.is_set, True, raises=f"UnboundLocalError: {text}; give it one before")
            leaves = [copy_of(recorder, leaf, text) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.form)
