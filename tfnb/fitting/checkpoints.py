"""Checkpoints of a training of `fit`: when one is begun, and that the last one is waited for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from tfnb.errors import InvalidArgument
from tfnb.session import Session
from tfnb.train.callbacks import Callback, listed
from tfnb.train.saver import Saver
from tfnb.widgets.progress import duration

_LONGEST = 16  # so many times the interval are the most between two tries


def saver_of(checkpoint: str | PathLike[str] | Saver | None, every: float) -> Saver | None:
    """The Saver that ``checkpoint=`` of `fit` names."""
    if isinstance(every, bool) or not isinstance(every, int | float) or not every > 0:
        raise InvalidArgument(f"checkpoint_every is in seconds, more than 0, not {every!r}")
    if checkpoint is None or isinstance(checkpoint, Saver):
        return checkpoint
    if not isinstance(checkpoint, str | PathLike):
        raise InvalidArgument(f"checkpoint is the path of a folder or a tfnb.train.Saver, not {checkpoint!r}")
    return Saver(checkpoint)


class Checkpoints:
    """The checkpoints of one training: periodic ones of ``saver``, and those of callbacks.

    due: when the next one is, by the clock ``perf_counter``; never without a saver.
    """

    def __init__(
        self, session: Session, saver: Saver | None, every: float, callbacks: Callback | Sequence[Callback], begin: int
    ) -> None:
        self.callbacks = listed(callbacks)
        if saver is not None and saver.retention.best is not None and saver not in self.callbacks:
            self.callbacks.append(saver)  # values are known after an epoch
        self._saver, self._every = saver, every
        self._all = dict.fromkeys([*([] if saver is None else [saver]), *self._of_callbacks()])
        for one in self._all:
            one.opens(session, begin)
        self.due = float("inf") if saver is None else time.perf_counter() + every
        self._is_over = False

    def _of_callbacks(self) -> list[Saver]:
        return [one for one in self.callbacks if isinstance(one, Saver)]

    def take(self, now: float) -> None:
        """Begin the one that is due, between two steps; where one is being written yet, that is tried again soon."""
        assert self._saver is not None
        if self._saver.is_writing:
            self.due = now + min(self._every, 1.0)
            return
        self._saver.settle()
        if self._saver.is_behind:
            self._saver.begin()
        self.due = now + self._every * min(2**self._saver.failures, _LONGEST)

    def end(self, *, last: bool = True) -> None:
        """The training is at its end: write the last one, and wait for all of them. KeyboardInterrupt gives them up."""
        if self._is_over:
            return
        self.due, self._is_over = float("inf"), True
        for saver in self._all:
            saver.settle()
        if last and self._saver is not None and self._saver.is_behind:
            self._saver.begin()
            self._saver.settle()

    @property
    def last(self) -> Path | str | None:
        """The last file that is complete."""
        newest = self._newest()
        return None if newest is None else newest[2]

    @property
    def resumable(self) -> tuple[int, Path | str] | None:
        """Steps and file of the last one with which a training can go on."""
        found = [one.written[1:] for one in self._all if one.written is not None and one.is_resumable]
        return max(found, default=None, key=lambda written: written[0])

    @property
    def text(self) -> str:
        """``checkpoint 312, 14 s ago``: the last one; empty where there is none."""
        if (newest := self._newest()) is None:
            return ""
        at, step, _ = newest
        return f"checkpoint {step}, {duration(time.perf_counter() - at)} ago"

    def _newest(self) -> tuple[float, int, Path | str] | None:
        return max(
            (one.written for one in self._all if one.written is not None), default=None, key=lambda written: written[:2]
        )
