"""Callbacks of `fit` and their argument, and early stopping as one of them. Imports errors only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tfnb.errors import InvalidArgument


@dataclass(slots=True)
class Progress:
    """Where a training stands. ``step`` and ``epoch`` count from 1; ``samples``: rows of all steps of this call.

    ``again``: on a cluster, whether this step was told of before a lost server took it back.
    ``values``: after a step the watched values of it, 0-d tensors (NaN where a lost task told none); after an epoch
    their means over it, and those over the validation data as ``val_...``, floats (NaN for the former where a resumed
    training had all steps of the epoch behind it).

    Here a callback hears of each step before the next one begins. The tasks of a cluster do not wait for it: it hears
    of their steps in groups, up to half a second late, and what it changes counts for steps that no task has
    begun by then. Between epochs they wait in ``"sync"``, ``"allreduce"``, ``"pipeline"`` and LocalSGD where a callback
    is called after each, and in every mode where there is ``validation=``.
    """

    step: int
    epoch: int
    values: Mapping[str, Any]
    samples: int = 0
    stopped: str | None = None
    changed: tuple[Any, int, int | None] | None = None
    again: bool = False

    def stop(self, why: str = "stopped by a callback") -> None:
        """Let the training end here; ``why`` stands in its result."""
        self.stopped = why

    def change(self, mode: object, *, backup: int = 0, staleness: int | None = None) -> None:
        """Change the mode of the training, as named in `tfnb.fit`, from the next step that no task has begun.

        Steps are taken one at a time where the training is in this process: there a mode changes nothing.
        """
        self.changed = (mode, backup, staleness)


class StepObserver(Protocol):
    """A callback that is called after each step that counts."""

    def on_step(self, progress: Progress) -> object:
        """Look at the training, stop it, or change its mode."""


class EpochObserver(Protocol):
    """A callback that is called after each epoch, when the validation data were evaluated."""

    def on_epoch(self, progress: Progress) -> object:
        """Look at the training, stop it, or change its mode."""


Callback = Callable[[Progress], object] | StepObserver | EpochObserver


class Callbacks:
    """The functions to call after each step and epoch: functions (after an epoch), or objects with either method.

    is_noted: an error in one gets a note with the step. A coordinator is no callback of the user: it adds its own note.

    >>> seen = []
    >>> Callbacks([lambda progress: seen.append(progress.epoch)]).on_epoch(Progress(9, 1, {})).stopped is None, seen
    (True, [1])
    """

    def __init__(self, callbacks: Callback | Sequence[Callback], *, is_noted: bool = True) -> None:
        self._is_noted = is_noted
        self._steps: list[Callable[[Progress], object]] = []
        self._epochs: list[Callable[[Progress], object]] = []
        for one in listed(callbacks):
            on_step, on_epoch = getattr(one, "on_step", None), getattr(one, "on_epoch", None)
            if on_step is None and on_epoch is None:
                on_epoch = one
            if not all(call is None or callable(call) for call in (on_step, on_epoch)):
                raise InvalidArgument(
                    "callbacks are functions of one argument, called after each epoch, or objects with "
                    f"on_step(progress) or on_epoch(progress): got {one!r}"
                )
            self._steps += [] if on_step is None else [on_step]
            self._epochs += [] if on_epoch is None else [on_epoch]

    @property
    def follow_steps(self) -> bool:
        """Whether anything is called after each step."""
        return bool(self._steps)

    @property
    def follow_epochs(self) -> bool:
        """Whether anything is called after each epoch."""
        return bool(self._epochs)

    def on_step(self, progress: Progress) -> Progress:
        """Call the callbacks after a step; returns the progress with their requests."""
        __tracebackhide__ = True
        return self._told(self._steps, progress)

    def on_epoch(self, progress: Progress) -> Progress:
        """Call the callbacks after an epoch; returns the progress with their requests."""
        __tracebackhide__ = True
        return self._told(self._epochs, progress)

    def _told(self, calls: Sequence[Callable[[Progress], object]], progress: Progress) -> Progress:
        __tracebackhide__ = True
        for call in calls:
            try:
                call(progress)
            except StopIteration as error:  # a generator that calls this would end with a RuntimeError
                raise InvalidArgument("a callback raised StopIteration: progress.stop() ends a training") from error
            except BaseException as error:
                if self._is_noted:
                    step = progress.step
                    error.add_note(f"in a callback of fit after step {step}; variables are at step {step}")
                raise
        return progress


def listed(callbacks: Callback | Sequence[Callback]) -> list[Any]:
    """One callback, or a sequence of them, as a list."""
    return [callbacks] if callable(callbacks) or not isinstance(callbacks, Sequence) else list(callbacks)


class EarlyStopping:
    """Ends a training when a value has not improved for more than ``patience`` epochs.

    monitor: a watched value, or one over the validation data: ``"val_loss"``. min_delta: an improvement is more than
    that. mode: whether ``"min"`` or ``"max"`` is better. NaN is never an improvement. ``best``, ``best_epoch`` and
    ``best_step`` are of the last improvement. One object is for one training.

    >>> stopping = EarlyStopping("loss", patience=1)
    >>> for epoch, loss in enumerate([3.0, 2.0, 2.5, 2.5], 1):
    ...     stopping.on_epoch(progress := Progress(10 * epoch, epoch, {"loss": loss}))
    >>> progress.stopped, stopping.best_epoch
    ('loss has not improved for 2 epochs: best 2 in epoch 2', 2)
    """

    def __init__(
        self, monitor: str, *, patience: int = 0, min_delta: float = 0.0, mode: Literal["min", "max"] = "min"
    ) -> None:  # fmt: skip
        if mode not in ("min", "max"):
            raise InvalidArgument(f"mode is 'min' or 'max', not {mode!r}")
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 0 or not min_delta >= 0:
            raise InvalidArgument(
                f"patience is a number of epochs, min_delta a number, both at least 0: got {patience!r}, {min_delta!r}"
            )
        self.monitor, self.patience, self.min_delta = monitor, patience, min_delta
        self.best, self.best_epoch, self.best_step = math.inf if mode == "min" else -math.inf, 0, 0
        self._sign = 1 if mode == "min" else -1

    def on_epoch(self, progress: Progress) -> None:
        """Look at the value of this epoch."""
        if self.monitor not in progress.values:
            there = ", ".join(map(repr, progress.values)) or "none: give fit watch="
            raise InvalidArgument(f"EarlyStopping({self.monitor!r}): the values of an epoch are {there}")
        value = float(progress.values[self.monitor])
        if not progress.samples and math.isnan(value):  # all steps of the epoch are of a call before: nobody knows it
            return
        if self._sign * (self.best - value) > self.min_delta:
            self.best, self.best_epoch, self.best_step = value, progress.epoch, progress.step
        elif progress.epoch - self.best_epoch > self.patience:
            epochs = progress.epoch - self.best_epoch
            progress.stop(
                f"{self.monitor} has not improved for {epochs} epoch{'s' if epochs > 1 else ''}: "
                f"best {self.best:.6g} in epoch {self.best_epoch}"
            )
