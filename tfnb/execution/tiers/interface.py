"""The interface of all tiers: a tier takes a lowered program, and returns its code or a reason for none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tfnb.execution.lowering.program import Program
from tfnb.interrupts import from_signal_handler

Forward = Callable[..., Sequence[Any]]
"""Computes a step as ``program.forward`` does: takes feeds, storages and the run's number, and writes nothing."""


class Abandoned(BaseException):
    """Raised to stop asking further tiers: the code is not awaited any more, or would take too long."""


class Unfit(Exception):
    """Raised when operands do not fit compiled code; nothing was done."""


_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierRequest:
    """A program to be run some other way.

    forward: what runs it now. args: as in a run, where code is made for them. owner: who waits for the code. urgent:
    steps wait for it, too.
    """

    program: Program
    forward: Forward
    args: Sequence[Any] = ()
    owner: object = None
    urgent: bool = False


class Tier(Protocol):
    """One way to run lowered programs."""

    @property
    def name(self) -> str:
        """A word for the running code."""

    def made(self, request: TierRequest) -> Forward | str:
        """The code, or the reason for none in a few words; may also raise."""


def first(tiers: Iterable[Tier], request: TierRequest) -> tuple[Forward | None, str]:
    """The code of the first tier that has some, and its name; None, and why no tier has."""
    why: dict[str, None] = {}
    for tier in tiers:
        try:
            found = tier.made(request)
        except Exception as error:
            if from_signal_handler(error):
                raise
            found = words(error)
        if not isinstance(found, str):
            return found, tier.name
        _LOG.info("%s: %s", tier.name, found)
        why[found] = None
    return None, "; ".join(why)


def words(error: BaseException) -> str:
    """An error in one line.

    >>> words(ValueError("no such thing\\nat all"))
    'ValueError: no such thing'
    """
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """The first line that an error says."""
    return next(iter(str(error).strip().splitlines()), "")
