"""A folder of checkpoints ``ckpt-<step>.json``: which of them are whole, and the retention policy.

Each is a manifest of shards (`tfnb.state.manifests`), which checkpoints share as far as nothing changed; a file of
`Session.save` that is named ``ckpt-<step>.safetensors`` is a checkpoint, too. The folder may be an fsspec URL.

What is kept is the pure function `Retention.kept` of what the files say of themselves, so that it holds over processes.
A file that is damaged, or that another program wrote, is neither counted nor deleted.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from tfnb.errors import CheckpointCorrupt, CheckpointIncompatible, CheckpointWriteError, NotFound
from tfnb.state import checkpoint, manifests
from tfnb.state.checkpoint_stores import LocalStore, Signature, located, store_of
from tfnb.state.manifests import Manifest, Shard

NAMES = re.compile(r"ckpt-(\d{1,18})\.(json|safetensors)", re.ASCII)
_DRAFTS = re.compile(f"{NAMES.pattern}|{manifests.SHARDS.pattern}", re.ASCII)
T = TypeVar("T")
_ABOUT = "saver"  # the key of a checkpoint's meta that says what `kept` has to know


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """One checkpoint of a folder: its step, the time of its snapshot (seconds since the epoch), and its values."""

    step: int
    path: Path | str
    taken: float
    values: Mapping[str, float]

    @property
    def name(self) -> str:
        """The name of its file."""
        return name_of(self.path)

    def value(self, name: str | None) -> float | None:
        """The value of this name, if there is one that is a number."""
        found = None if name is None else self.values.get(name)
        return None if found is None or math.isnan(found) else found


@dataclass(frozen=True, slots=True)
class Retention:
    """The retention policy: keep the newest ``keep``, one for each ``every`` seconds, and the best by a value.

    sign: 1 where less is better, -1 where more is.
    """

    keep: int = 5
    every: float | None = None
    best: str | None = None
    sign: int = 1

    def best_of(self, found: Sequence[CheckpointRecord]) -> CheckpointRecord | None:
        """The one with the best value, the first of equal ones; NaN is no value."""
        rated = [(self.sign * value, at) for at, one in enumerate(found) if (value := one.value(self.best)) is not None]
        return found[min(rated)[1]] if rated else None

    def kept(self, found: Sequence[CheckpointRecord]) -> list[CheckpointRecord]:
        """The checkpoints of ``found`` (sorted by step) that the policy keeps.

        >>> losses = {step: {"loss": abs(step - 3)} for step in range(1, 9)}
        >>> found = [CheckpointRecord(step, Path(f"{step}"), 600.0 * step, loss) for step, loss in losses.items()]
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
    """The checkpoints of a folder. Each file is verified once; afterwards its signature (size, time) stands for its
    bytes.

    It is of one training at a time: what no manifest names is deleted after the next one was written.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.store = store_of(path)
        self._manifests: dict[tuple[str, Signature], Manifest | str] = {}  # or what is wrong
        self._metas_of: dict[tuple[str, Signature], Mapping[str, Any] | str] = {}
        self._shards: dict[tuple[str, Signature], str] = {}  # what is wrong

    @property
    def path(self) -> Path | str:
        """The folder, or its URL."""
        return self.store.path if isinstance(self.store, LocalStore) else str(self.store)

    def make(self) -> None:
        """Create the folder and delete drafts of killed processes. Raises CheckpointWriteError, an OSError;
        InvalidArgument for a file.
        """
        try:
            self.store.make(_DRAFTS)
        except OSError as error:
            raise CheckpointWriteError(f"cannot keep checkpoints in {self.store}: {error.strerror or error}") from error

    def path_of(self, step: int) -> Path | str:
        """The path or URL of the checkpoint of a step."""
        return self.store.path_of(_name(step))

    def named(self) -> list[tuple[int, Path | str]]:
        """Files with the name of a checkpoint, in the order of their steps, whole or not."""
        return [(_step(name), self.store.path_of(name)) for name in _ordered(self.store.listed())]

    def checkpoints(self) -> list[CheckpointRecord]:
        """The whole checkpoints, in the order of their steps."""
        metas = self._metas()
        return [self._kept(name, meta) for name, meta in metas.items() if not isinstance(meta, str)]

    def others(self) -> dict[str, str]:
        """Files named like checkpoints that are damaged or foreign, with the reasons."""
        return {name: meta for name, meta in self._metas().items() if isinstance(meta, str)}

    def write(
        self, step: int, unwritten: checkpoint.Unwritten, values: Mapping[str, float], retention: Retention
    ) -> checkpoint.Checkpoint:
        """Write a checkpoint, then delete the checkpoints that the policy drops. Raises CheckpointWriteError."""
        name, about = _name(step), {"taken": time.time(), "values": dict(values)}
        with checkpoint.released_on_error(unwritten.pinned):
            whole = self._whole()  # a damaged one is written again
        try:
            meta = {**unwritten.meta, _ABOUT: about}
            written, manifest = checkpoint.save_shards(self.store, name, unwritten, meta, whole)
        except BaseException:
            with suppress(OSError):
                self.make()  # a server that was killed left drafts
                self._collect()
            raise
        there = self._listed()
        if gone := [shard.name for shard in manifest.shards if shard.name not in there]:
            self.store.drop(name)
            raise CheckpointWriteError(
                f"cannot write {self.store.path_of(name)}: {gone[0]} was deleted meanwhile. A folder is of one "
                "training at a time: give each a folder of its own. The other checkpoints are unchanged"
            )
        self._manifests[name, there[name]] = manifest
        self._shards |= {(shard.name, there[shard.name]): "" for shard in manifest.shards}
        found = self.checkpoints()
        kept = {name, *(one.name for one in retention.kept(found))}  # the new one, whatever its number
        for old in found:
            if old.name not in kept:
                self.store.drop(old.name)
        self._collect()
        return written

    def _collect(self) -> None:
        """Delete shards that no manifest names; none if a manifest is unreadable, as any shard may be named there."""
        there = self.store.listed()
        known = [self._manifest(name, there[name]) for name in _ordered(there) if name.endswith(".json")]
        if all(isinstance(one, Manifest) for one in known):
            manifests.collect(self.store, [one for one in known if isinstance(one, Manifest)])

    def _whole(self) -> set[Shard]:
        """The undamaged shards of all manifests."""
        there = self._listed()
        known = [self._manifest(name, there[name]) for name in _ordered(there) if name.endswith(".json")]
        named = dict.fromkeys(shard for one in known if isinstance(one, Manifest) for shard in one.shards)
        return {shard for shard in named if not self._fault(shard, there)}

    def _listed(self) -> dict[str, Signature]:
        """Signatures of the files of checkpoints, and of their shards."""
        return {**self.store.listed(), **self.store.listed(manifests.FOLDER)}

    def _metas(self) -> dict[str, Mapping[str, Any] | str]:
        """The metadata of each file, or the reason why there is none, by name in the order of steps."""
        there = self._listed()
        return {name: self._meta(name, there) for name in _ordered(there)}

    def _kept(self, name: str, meta: Mapping[str, Any]) -> CheckpointRecord:
        about = meta.get(_ABOUT)
        about = about if isinstance(about, dict) else {}
        taken, values = about.get("taken"), about.get("values")
        path = self.store.path_of(name)
        if not isinstance(taken, float) or not math.isfinite(taken):  # one of `Session.save`
            taken = path.stat().st_mtime if isinstance(path, Path) and path.exists() else 0.0
        numbers = (
            {name: value for name, value in values.items() if type(value) in (int, float)}
            if isinstance(values, dict)
            else {}
        )
        return CheckpointRecord(_step(name), path, taken, numbers)

    def _meta(self, name: str, there: Mapping[str, Signature]) -> Mapping[str, Any] | str:
        """The metadata of a file, or the reason why the file or one of its shards is unusable."""
        path = self.store.path_of(name)
        if not name.endswith(".json"):
            if not isinstance(path, Path):
                return "in a store that is no local folder, a checkpoint is a manifest"
            return _once(self._metas_of, (name, there[name]), lambda: checkpoint.verified(path))
        manifest = self._manifest(name, there[name])
        if isinstance(manifest, str):
            return manifest
        for shard in manifest.shards:
            if fault := self._fault(shard, there):
                return fault
        return _once(self._metas_of, (name, there[name]), lambda: checkpoint.meta_of(str(path), manifest))

    def _manifest(self, name: str, signature: Signature) -> Manifest | str:
        return _once(self._manifests, (name, signature), lambda: manifests.read(self.store, name))

    def _fault(self, shard: Shard, there: Mapping[str, Signature]) -> str:
        """The reason why a shard is unusable; empty for a whole one."""
        if shard.name not in there:
            return f"{self.store.path_of(shard.name)} is missing"

        def verified() -> str:
            manifests.verify(self.store, shard)
            return ""

        return _once(self._shards, (shard.name, there[shard.name]), verified)


def _once(known: dict[tuple[str, Signature], T | str], key: tuple[str, Signature], read: Callable[[], T]) -> T | str:
    """The result of ``read``, or the reason of its failure; cached, except for system errors that may pass."""
    if (found := known.get(key)) is not None:
        return found
    try:
        known[key] = found = read()
    except FileNotFoundError:
        return "it is gone"
    except OSError as error:
        return str(error)  # another time it may be read
    except (CheckpointCorrupt, CheckpointIncompatible) as error:
        known[key] = found = str(error)
    return found


def newest(path: str | PathLike[str]) -> Path | str:
    """The checkpoint with the highest step of a folder, or the file itself, which is not looked at.

    A damaged one is never passed over in silence: CheckpointCorrupt, also for one of another version, says which one is
    before it. Raises NotFound for a folder without any.
    """
    store, name = located(path)
    if isinstance(store, LocalStore) and not (store.path / name).is_dir():
        return store.path / name
    if NAMES.fullmatch(name) and not isinstance(store, LocalStore):
        return store.path_of(name)
    folder = CheckpointFolder(path)
    metas = folder._metas()
    if not metas:
        raise NotFound(f"there is no checkpoint in {folder.path}: none was written, so leave out resume")
    last = [*metas][-1]
    if not isinstance(fault := metas[last], str):
        return folder.store.path_of(last)
    before = [one.name for one in folder.checkpoints()]
    how = f"the one before is {before[-1]}" if before else "there is none before it"
    raise CheckpointCorrupt(
        f"the newest checkpoint of {folder.path} cannot be used: {fault}; {how}: move {last} away, and "
        "the same call goes on from there"
    )


def name_of(path: Path | str) -> str:
    """The name of a file at a path or URL."""
    return path.name if isinstance(path, Path) else path.rpartition("/")[2]


def _name(step: int) -> str:
    return f"ckpt-{step}.json"


def _step(name: str) -> int:
    return int(name.partition("-")[2].partition(".")[0])


def _ordered(names: Iterable[str]) -> list[str]:
    """Names of checkpoints among ``names``, in the order of their steps."""
    return sorted((name for name in names if NAMES.fullmatch(name)), key=lambda name: (_step(name), name))
