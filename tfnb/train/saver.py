"""Saver: a folder of checkpoints of one training; keeps the newest, the best, and some permanently.

Files are written by a thread of its own from copies of one moment, one at a time. What may pass, such as a full disk or
a server that does not answer, is told in one warning, and does not end a training; other errors do.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from os import PathLike
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Literal

from tfnb.errors import Aborted, FailedPrecondition, InvalidArgument, InvalidType
from tfnb.recording.marks.notes import user_level
from tfnb.state.checkpoint import Checkpoint, Unwritten, released_on_error
from tfnb.state.checkpoint_folder import CheckpointFolder, CheckpointRecord, Retention, name_of
from tfnb.train.callbacks import Progress

_MORE_IS_BETTER = ("acc", "auc", "f1", "precision", "recall", "score")
_NO_VALUES: Mapping[str, float] = MappingProxyType({})
# A full disk or memory, a server that does not answer, or steps that went on meanwhile: it may be better later.
PASSING = (OSError, MemoryError, Aborted)


class Saver:
    """A folder of checkpoints ``ckpt-<step>.json``, readable by `Session.restore` and `fit`.

    path: the folder, which is made where it is missing, or an fsspec URL such as ``s3://bucket/run``. A checkpoint is a
    manifest, written last, of shards with their digests in the folder ``shards``; what did not change since the
    checkpoint before, such as a frozen embedding, is written once. keep: so many of the newest are kept; older ones are
    deleted once the new one is complete. keep_every_hours: the first checkpoint is kept for ever, then each one that is
    at least so many hours younger than the last one kept so, the first one and then the next that is at least so much
    younger. best: a watched value of `fit`, or one over its validation data (``"val_loss"``): the checkpoint with the
    best value so far is kept, too. best_mode: whether ``"min"`` or ``"max"`` is better; by default more of what is
    named like an accuracy (``acc``, ``auc``, ``f1``, ``precision``, ``recall``, ``score``), less of anything else.
    session: what `save` saves; `fit` gives it its own.

    Among the callbacks of `fit` it saves after each epoch; as ``fit(..., checkpoint=saver)`` every so many seconds, and
    after each epoch where it keeps the best. Files that are damaged, or that others wrote, are not counted, and stay
    where they are. ``fit(..., resume=saver)`` goes on from its newest checkpoint.

    >>> import tempfile, tfnb, torch
    >>> w, folder = torch.nn.Parameter(torch.zeros(1)), tempfile.TemporaryDirectory()
    >>> with tfnb.record():
    ...     x = tfnb.placeholder(torch.ones(2))
    ...     loss = (w - x).square().mean()
    ...     train = tfnb.train.SGD(0.25).minimize(loss)
    >>> saver = Saver(folder.name, keep=2, best="loss")
    >>> _ = tfnb.fit(train, {x: torch.ones(8)}, epochs=4, batch_size=2, watch={"loss": loss}, callbacks=[saver])
    >>> [path.name for path in saver.paths], saver.latest.name, saver.best.name
    (['ckpt-12.json', 'ckpt-16.json'], 'ckpt-16.json', 'ckpt-16.json')
    >>> folder.cleanup()
    """

    def __init__(
        self, path: str | PathLike[str], *, keep: int = 5, keep_every_hours: float | None = None,
        best: str | None = None, best_mode: Literal["min", "max"] | None = None, session: object = None,
    ) -> None:  # fmt: skip
        if not isinstance(path, str | PathLike) or not str(path):
            raise InvalidArgument(f"path is the folder of the checkpoints, not {path!r}")
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise InvalidArgument(
                f"keep is the number of checkpoints that are kept, an int of at least 1, not {keep!r}"
            )
        is_number = isinstance(keep_every_hours, int | float) and not isinstance(keep_every_hours, bool)
        if keep_every_hours is not None and not (is_number and keep_every_hours > 0):
            raise InvalidArgument(f"keep_every_hours is a number above 0, or None, not {keep_every_hours!r}")
        if best is not None and (not isinstance(best, str) or not best):
            raise InvalidArgument(f"best is the name of a watched value, such as 'val_loss', not {best!r}")
        if best_mode not in ("min", "max", None) or (best_mode is not None and best is None):
            raise InvalidArgument(f"best_mode says whether 'min' or 'max' of best= is better, not {best_mode!r}")
        if session is not None and not hasattr(session, "state"):
            raise InvalidType(f"session is a tfnb.Session, not {type(session).__name__}")
        mode = best_mode or ("max" if best and any(word in best.lower() for word in _MORE_IS_BETTER) else "min")
        every = None if keep_every_hours is None else 3600 * keep_every_hours
        self.retention = Retention(keep, every, best, 1 if mode == "min" else -1)
        self.failures = 0  # in a row
        self.written: tuple[float, int, Path | str] | None = (
            None  # when, by `perf_counter`, which step, and the last file
        )
        self.is_resumable = False  # the last file is of the first steps of a training, without gaps
        self._folder = CheckpointFolder(path)
        self._session = session
        self._writing: Future[Checkpoint] | None = None
        self._begun = -1  # step of the last one that was begun

    # -- the folder -------------------------------------------------------------------------------------------------

    def __fspath__(self) -> str:
        return str(self._folder.path)

    @property
    def paths(self) -> list[Path | str]:
        """The checkpoints that there are, in the order of their steps; damaged files are none."""
        return [one.path for one in self._folder.checkpoints()]

    @property
    def latest(self) -> Path | str | None:
        """The whole checkpoint with the highest step."""
        return next(reversed(self.paths), None)

    @property
    def best(self) -> Path | str | None:
        """The checkpoint with the best value so far."""
        found = self.retention.best_of(self._folder.checkpoints())
        return None if found is None else found.path

    def __repr__(self) -> str:
        found = self._folder.checkpoints()
        best = self.retention.best_of(found)
        lines = [f"  {one.name}{self._shown(one)}{'; the best' if one == best else ''}" for one in found]
        lines += [f"  not counted: {name}: {why}" for name, why in self._folder.others().items()]
        return "\n".join([f"<Saver of {self._folder.path}: {len(found)} checkpoints>", *lines])

    def _shown(self, one: CheckpointRecord) -> str:
        value = one.value(self.retention.best)
        return "" if value is None else f": {self.retention.best} {value:.6g}"

    # -- saving -----------------------------------------------------------------------------------------------------

    def save(self, step: int | None = None) -> Checkpoint:
        """Write a checkpoint of the current state, and wait for the file.

        step: its number; by default the steps of the training of `fit` that is not at its end, else the number of runs
        of the session. Raises CheckpointWriteError, with what was there unchanged; FailedPrecondition without a
        session.
        """
        if step is not None and (isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**18):
            raise InvalidArgument(f"step is the number of a checkpoint, an int of at least 0, not {step!r}")
        self.settle()
        unwritten = self._taken()
        if step is None:
            step = unwritten.steps or unwritten.meta["streams"]["runs"]
        with released_on_error(unwritten.pinned):
            self._folder.make()
        return self._write(step, unwritten, _NO_VALUES)

    def on_epoch(self, progress: Progress) -> None:
        """`fit` tells that an epoch is over."""
        name = self.retention.best
        if name is not None and name not in progress.values:
            there = ", ".join(map(repr, progress.values)) or "none: give fit watch="
            raise InvalidArgument(f"Saver(best={name!r}): the values of an epoch are {there}")
        self.settle()
        self.begin({key: float(value) for key, value in progress.values.items()})

    # -- for fit ----------------------------------------------------------------------------------------------------

    def opens(self, session: object, begin: int) -> None:
        """Begin a training of a session after ``begin`` steps: the folder's checkpoints belong to it."""
        self._session = session
        self.failures, self._begun, self.written = 0, -1, None
        self._folder.make()
        if ahead := {step: path for step, path in self._folder.named() if step > begin}:
            raise FailedPrecondition(
                f"{self._folder.path} holds {name_of(ahead[max(ahead)])}, and this training begins at step {begin}: go "
                f"on from there, resume={str(self._folder.path)!r}, or give this training a folder of its own"
            )

    @property
    def is_writing(self) -> bool:
        """Whether a file is being written."""
        return self._writing is not None and not self._writing.done()

    @property
    def is_behind(self) -> bool:
        """Whether the session is at a later step than the last checkpoint; a lost cluster takes it back to earlier."""
        return self._session.state.trained > (-1 if self.written is None else self.written[1])

    def begin(self, values: Mapping[str, float] = _NO_VALUES) -> None:
        """Copy the current state of the session, and let a thread write the copy. The caller settles the previous file
        before.
        """
        try:
            unwritten = self._taken()
        except PASSING as error:
            self._failed(error, self._session.state.trained)
            return
        step, future = unwritten.steps, Future[Checkpoint]()

        def write() -> None:
            try:
                future.set_result(self._write(step, unwritten, values))
            except BaseException as error:  # raised by who settles it
                error.add_note(f"{unwritten.nbytes} bytes of tensors were to be written")
                future.set_exception(error)

        with released_on_error(unwritten.pinned):
            Thread(target=write, name=f"tfnb-saver-{step}", daemon=True).start()
        self._begun, self._writing = step, future

    def settle(self) -> None:
        """Wait for the current file, and warn if it could not be written now; raises other errors."""
        if self._writing is None:
            return
        error, self._writing = self._writing.exception(), None
        if error is None:
            self.failures = 0
        elif isinstance(error, PASSING):
            self._failed(error, self._begun)
        else:
            raise error

    def _write(self, step: int, unwritten: Unwritten, values: Mapping[str, float]) -> Checkpoint:
        written = self._folder.write(step, unwritten, values, self.retention)
        training = written.meta["training"]
        self.written = time.perf_counter(), step, written.file
        self.is_resumable = training["steps"] == step > 0 and "gaps" not in training
        return written

    def _failed(self, error: BaseException, step: int) -> None:
        self.failures += 1
        if self.failures > 1:
            return
        last = "there is none before it" if self.written is None else f"the last one is {name_of(self.written[2])}"
        notes = "; ".join(getattr(error, "__notes__", ()))
        warnings.warn(
            f"no checkpoint of step {step} in {self._folder.path}: {error}{'; ' if notes else ''}{notes}; {last}. The "
            "training goes on, and it is tried again later",
            stacklevel=user_level(None),
        )

    def _taken(self) -> Unwritten:
        if self._session is None:
            raise FailedPrecondition(
                "this Saver does not know yet what to save: Saver(path, session=tfnb.Session(graph)), or "
                "fit(..., checkpoint=saver)"
            )
        return self._session.state.unwritten(pins=True)
