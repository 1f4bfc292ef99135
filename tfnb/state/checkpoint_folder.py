"""A folder of checkpoints ``ckpt-<step>.safetensors``: which of them are whole, and which are kept.

What is kept is the pure function `kept` of what the files say of themselves, so that it holds over processes. A file
that is damaged, or that another program wrote, is neither counted nor deleted.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from tfnb.errors import CheckpointCorrupt, CheckpointIncompatible, InvalidArgument, NotFound
from tfnb.graph.files import sweep
from tfnb.state import checkpoint

NAMES = re.compile(r"ckpt-(\d{1,18})\.safetensors", re.ASCII)
_ABOUT = "saver"  # the key of a checkpoint's meta that says what `kept` has to know


@dataclass(frozen=True, slots=True)
class Kept:
    """One checkpoint of a folder: its step, when it was taken (seconds since the epoch), and the values then."""

    step: int
    path: Path
    taken: float
    values: Mapping[str, float]

    def value(self, name: str | None) -> float | None:
        """The value of this name, if there is one that is a number."""
        found = None if name is None else self.values.get(name)
        return None if found is None or math.isnan(found) else found


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints are kept: the newest ``keep``, one for each ``every`` seconds, and the best by a value.

    sign: 1 where less is better, -1 where more is.
    """

    keep: int = 5
    every: float | None = None
    best: str | None = None
    sign: int = 1

    def best_of(self, found: Sequence[Kept]) -> Kept | None:
        """The one with the best value, the first of equal ones; NaN is no value."""
        rated = [(self.sign * value, at) for at, one in enumerate(found) if (value := one.value(self.best)) is not None]
        return found[min(rated)[1]] if rated else None

    def kept(self, found: Sequence[Kept]) -> list[Kept]:
        """Those of ``found``, which stand in the order of their steps, that are kept.

        >>> found = [Kept(step, Path(f"{step}"), 600.0 * step, {"loss": abs(step - 3)}) for step in range(1, 9)]
        >>> [one.step for one in Retention(keep=2, every=1800, best="loss").kept(found)]
        [1, 3, 4, 7, 8]
        """
        wanted = {one.path for one in found[-self.keep :]}
        last, every = -math.inf, math.inf if self.every is None else self.every
        for one in found if self.every is not None else ():
            if not 0 <= one.taken - last < every:  # a clock may have been set back
                last = one.taken
                wanted.add(one.path)
        if (best := self.best_of(found)) is not None:
            wanted.add(best.path)
        return [one for one in found if one.path in wanted]


class CheckpointFolder:
    """The checkpoints of a folder, each of which is read whole once: then its size and time stand for its bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[tuple[Path, int, int, int], Mapping[str, Any] | str] = {}  # meta, or what is wrong

    def make(self) -> None:
        """Let there be the folder, without what killed processes left in it; raises OSError."""
        if self.path.exists() and not self.path.is_dir():
            raise InvalidArgument(f"{self.path} is a file; checkpoints are kept in a folder")
        self.path.mkdir(parents=True, exist_ok=True)
        sweep(self.path, NAMES)

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step is written."""
        return self.path / f"ckpt-{step}.safetensors"

    def named(self) -> list[tuple[int, Path]]:
        """Files with the name of a checkpoint, in the order of their steps, whole or not."""
        if not self.path.is_dir():
            return []
        found = [path for path in self.path.iterdir() if NAMES.fullmatch(path.name) and path.is_file()]
        return sorted((_step(path), path) for path in found)

    def checkpoints(self) -> list[Kept]:
        """Those that are whole, in the order of their steps."""
        return [one for _, path in self.named() if (one := self._read(path)) is not None]

    def others(self) -> dict[Path, str]:
        """Files with such names that are no checkpoints, and what is wrong with them."""
        return {path: wrong for _, path in self.named() if (wrong := self.fault(path))}

    def fault(self, path: Path) -> str:
        """What is wrong with a file; empty for a checkpoint that is whole."""
        found = self._meta(path)
        return found if isinstance(found, str) else ""

    def write(
        self, step: int, unwritten: checkpoint.Unwritten, values: Mapping[str, float], retention: Retention
    ) -> checkpoint.Checkpoint:
        """Write a checkpoint, then delete those that are not kept any more. Raises CheckpointWriteError."""
        about = {"taken": time.time(), "values": dict(values)}
        path = self.path_of(step)
        written = checkpoint.save(path, unwritten.variables, {**unwritten.meta, _ABOUT: about}, unwritten.more)
        self._known[_signature(path)] = written.meta
        found = self.checkpoints()
        kept = {path, *(one.path for one in retention.kept(found))}  # the new one, whatever its number
        for old in found:
            if old.path not in kept:
                old.path.unlink(missing_ok=True)
        return written

    def _read(self, path: Path) -> Kept | None:
        meta = self._meta(path)
        if isinstance(meta, str):
            return None
        about = meta.get(_ABOUT)
        about = about if isinstance(about, dict) else {}
        taken, values = about.get("taken"), about.get("values")
        if not isinstance(taken, float) or not math.isfinite(taken):  # one of `Session.save`
            taken = path.stat().st_mtime
        numbers = (
            {name: value for name, value in values.items() if type(value) in (int, float)}
            if isinstance(values, dict)
            else {}
        )
        return Kept(_step(path), path, taken, numbers)

    def _meta(self, path: Path) -> Mapping[str, Any] | str:
        """What a file says of itself, or what is wrong with it."""
        try:
            signature = _signature(path)
            if (known := self._known.get(signature)) is None:
                self._known[signature] = known = checkpoint.verified(path)
        except FileNotFoundError:
            return "it is gone"
        except OSError as error:
            return str(error)  # another time it may be read
        except (CheckpointCorrupt, CheckpointIncompatible) as error:
            self._known[signature] = known = str(error)
        return known


def newest(path: str | PathLike[str]) -> Path:
    """The checkpoint with the highest step of a folder, or the file itself; raises for one that is not whole.

    A damaged one is never passed over in silence: CheckpointCorrupt or CheckpointIncompatible says which one is before
    it.
    """
    folder = CheckpointFolder(Path(path))
    if not folder.path.is_dir():
        return folder.path
    if not (named := folder.named()):
        raise NotFound(f"there is no checkpoint in {folder.path}: none was written, so leave out resume")
    _, last = named[-1]
    if not (fault := folder.fault(last)):
        return last
    before = [one.path for one in folder.checkpoints()]
    how = f"the one before is {before[-1].name}" if before else "there is none before it"
    raise CheckpointCorrupt(
        f"the newest checkpoint of {folder.path} cannot be used: {fault}; {how}: move {last.name} away, and "
        "the same call goes on from there"
    )


def _step(path: Path) -> int:
    return int(path.name.partition("-")[2].partition(".")[0])


def _signature(path: Path) -> tuple[Path, int, int, int]:
    found = path.stat()
    return path, found.st_ino, found.st_size, found.st_mtime_ns
