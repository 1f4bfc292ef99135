"""`CannotStage`: why code is left to Python, and how Python runs the code instead."""

from __future__ import annotations

from enum import Enum, auto


class Instead(Enum):
    """The ways in which Python runs a statement that is not staged."""

    RUN = auto()  # runs it; where it branches, as the samples do
    FIRST_ITERATION = auto()  # runs the first iteration of a loop, which gives a value to a name that is None before
    ONE_BRANCH = auto()  # runs one branch: only that tells so far what a function gives that is being recorded
    CHECK = auto()  # runs one branch with a guard: the other one is a `raise` of the user's
    OTHER_FAILS = auto()  # the same: something fails in the other one


class CannotStage(Exception):
    """Code that is left to Python, and why.

    instead: what Python does. branch: the one that it runs, where that is not said by the samples.
    """

    def __init__(self, why: str, instead: Instead = Instead.RUN, *, branch: bool | None = None) -> None:
        super().__init__(why)
        self.instead, self.branch = instead, branch
