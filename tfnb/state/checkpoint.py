"""Variable files: one safetensors file of tensors by label, with JSON metadata and digests. No pickle.

What `load` reads may also be a manifest, whose tensors lie in several such files: see `tfnb.state.manifests`. A file is
whole or absent, and a damaged one is never used: see `tfnb.graph.files`. What a restore would assign is
worked out by the pure function `match` before anything is assigned.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch

from tfnb.errors import CheckpointCorrupt, CheckpointIncompatible, InvalidArgument, NotFound
from tfnb.graph import Spec
from tfnb.graph.tensor_files import read_tensors, verified_facts, write_tensors
from tfnb.state import manifests, param_groups
from tfnb.state.checkpoint_stores import CheckpointStore, located
from tfnb.state.manifests import Layout, Manifest, Shard

FORMAT, VERSION = "tfnb-variables", 1
_FEW = 12  # keys of a file that an error tells


class ShardWriter(Protocol):
    """Values of Variables at one moment that parameter servers hold, and write to shards themselves."""

    @property
    def specs(self) -> Mapping[str, Spec]:
        """The spec of each Variable, by label."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        ...

    def write_shards(self, store: CheckpointStore, whole: Collection[Shard]) -> Layout:
        """As `tfnb.state.manifests.write_shards`, once: the values are given up then."""
        ...

    @property
    def release(self) -> Callable[[], Any]:
        """Gives the values up, unwritten; harmless if they are."""
        ...

    def acknowledge(self, file: Path | str) -> None:
        """The checkpoint is complete: its manifest, which is written last, is this file."""
        ...


@contextmanager
def released_on_error(pinned: ShardWriter | None) -> Iterator[None]:
    """A block between the pinning of values and their writing: servers give the values up if it raises."""
    try:
        yield
    except BaseException:
        if pinned is not None:
            pinned.release()
        raise


class Unwritten(NamedTuple):
    """A checkpoint that can be written at any time: copies of tensors, and values that servers ``pinned``."""

    variables: Mapping[str, torch.Tensor]
    meta: Mapping[str, Any]
    more: Mapping[str, torch.Tensor]
    pinned: ShardWriter | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        here = sum(tensor.nbytes for group in (self.variables, self.more) for tensor in group.values())
        return here + (0 if self.pinned is None else self.pinned.nbytes)

    @property
    def specs(self) -> dict[str, Spec]:
        """The spec of each Variable, by label."""
        here = {label: _shown(tensor) for label, tensor in self.variables.items()}
        return here | ({} if self.pinned is None else dict(self.pinned.specs))

    @property
    def steps(self) -> int:
        """Steps of the training that is not at its end; 0 without one."""
        return self.meta["training"]["steps"]


@dataclass(frozen=True)
class Checkpoint:
    """A written checkpoint: its file, specs of its tensors and metadata. Accepted wherever a path is."""

    file: Path | str  # a URL, where it is in no local folder
    bytes: int  # of the file, or of all shards that a manifest names
    specs: Mapping[str, Spec]
    meta: Mapping[str, Any]

    def __fspath__(self) -> str:
        return str(self.file)

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Rows of (name, text) that both the plain text and the HTML form show."""
        found = [(name, str(self.meta[name])) for name in ("graph", "graph_hash") if name in self.meta]
        if "streams" in self.meta:  # each step of `fit` and each `run` takes one number of the random streams
            found.append(("steps and runs", str(self.meta["streams"]["runs"])))
        if unfinished := self.meta.get("training", {}).get("steps"):
            found.append(("unfinished fit", f"step {unfinished}"))
        for name in ("sources", "optimizers", "schedulers"):
            found += [(name, ", ".join(self.meta[name]))] if self.meta.get(name) else []
        held = [f"{label} ({about['found']['size']})" for label, about in self.meta.get("queues", {}).items()]
        found += [("queues", ", ".join(held))] if held else []
        return [*found, ("bytes", f"{self.bytes:,}"), *((name, str(spec)) for name, spec in self.specs.items())]

    def _repr_html_(self) -> str:
        from tfnb.view import checkpoint_html  # listed exception: a repr asks view

        return checkpoint_html(self)

    def __repr__(self) -> str:
        return "\n".join([f"{self.file}: {len(self.specs)} variables", *(f"  {a}: {b}" for a, b in self.facts)])


def save(
    path: str | Path, variables: Mapping[str, torch.Tensor], meta: Mapping[str, Any],
    more: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Checkpoint:  # fmt: skip
    """Write the tensors and ``meta`` (JSON: step, graph, hash of the graph ...); replaces an older file as a whole.

    more: tensors that are no Variables. Raises CheckpointWriteError, with the older file unchanged, where the file
    cannot be written.
    """
    file = Path(path)
    write_tensors(file, {**variables, **more}, {"format": FORMAT, "version": VERSION, "meta": dict(meta)})
    specs = {label: _shown(tensor) for label, tensor in variables.items()}
    return Checkpoint(file, file.stat().st_size, specs, dict(meta))


def save_shards(
    store: CheckpointStore, name: str, unwritten: Unwritten, meta: Mapping[str, Any], whole: Collection[Shard] = ()
) -> tuple[Checkpoint, Manifest]:
    """Write all shards except the undamaged ones in ``whole``, and then the manifest that names them.

    Servers write what they pinned. Raises CheckpointWriteError, with every checkpoint that was there unchanged.
    """
    pinned = {} if unwritten.pinned is None else unwritten.pinned.write_shards(store, whole)
    layout = manifests.write_shards(store, {**unwritten.variables, **unwritten.more}, whole)
    manifest = Manifest({**meta, "variables": VERSION}, {**pinned, **layout})
    manifests.write(store, name, manifest)
    if unwritten.pinned is not None:
        unwritten.pinned.acknowledge(store.path_of(name))
    return Checkpoint(store.path_of(name), manifest.bytes, unwritten.specs, manifest.meta), manifest


def load(
    path: str | PathLike[str], beside: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors by label, and ``meta``, which is empty for a safetensors file of another library.

    path: a file of `save`, or a manifest; also an fsspec URL. beside: tensors by label; the value of a mapped one is
    read into its file (`tfnb.mapped_memory`), others into memory. Raises CheckpointCorrupt naming file and key, or
    CheckpointIncompatible for a file of another kind or version, or InvalidArgument for another ``beside``.
    """
    if not isinstance(beside, Mapping) or not all(isinstance(like, torch.Tensor) for like in beside.values()):
        raise InvalidArgument(f"beside gives tensors by label, not {beside!r:.60}")
    store, name = located(path)
    with store.got(name) as file:
        if not file.is_file() or not manifests.is_manifest(file):
            tensors, about, digest = read_tensors(file, of_others=True, beside=beside)
            return tensors, _meta(path, about) if digest else {}
    manifest = manifests.read(store, name)
    meta = meta_of(path, manifest)
    return manifests.load(store, manifest, beside), meta


def verified(path: str | PathLike[str]) -> dict[str, Any]:
    """The ``meta`` of a file of `save`, after all bytes were compared with their digests; raises as `load`."""
    about, _ = verified_facts(Path(path))
    return _meta(path, about)


def meta_of(path: str | PathLike[str], manifest: Manifest) -> dict[str, Any]:
    """The ``meta`` of a manifest, checked; raises as `load`."""
    if manifest.meta.get("variables") != VERSION:
        raise CheckpointIncompatible(
            f"{path} holds variables of version {str(manifest.meta.get('variables'))[:40]}; expected {VERSION}"
        )
    meta = {name: fact for name, fact in manifest.meta.items() if name != "variables"}
    ensure_told(meta)
    return meta


def _meta(path: str | PathLike[str], about: Mapping[str, Any]) -> dict[str, Any]:
    if about.get("format") != FORMAT or about.get("version") != VERSION:
        found = f"{about.get('format')} version {about.get('version')}"
        raise CheckpointIncompatible(f"{path} is {found}; expected {FORMAT} version {VERSION}")
    meta = about.get("meta")
    if not isinstance(meta, dict):
        raise CheckpointCorrupt(f"{path} has damaged facts: they are {type(meta).__name__}, not an object")
    ensure_told(meta)
    return meta


def ensure_told(about: Mapping[str, Any]) -> None:
    """Raise CheckpointCorrupt for a ``meta`` that has no numbers where `Session.save` writes numbers.

    >>> ensure_told({"streams": {"seed": 0, "runs": 3}, "sources": {"data": {"epoch": 0, "count": 5}}})
    """
    sources, queues = about.get("sources", {}), about.get("queues", {})
    are_dicts = all(isinstance(one, dict) for one in (sources, queues))
    numbers = [
        [about[name].get(key) if isinstance(about[name], dict) else None for key in keys]
        for name, keys in (("streams", ("seed", "runs")), ("training", ("steps",))) if name in about
    ]  # fmt: skip
    if are_dicts:
        numbers += [list(one.values()) if isinstance(one, dict) else [None] for one in sources.values()]
        are_dicts = all(isinstance(one, dict) for one in queues.values())
    if not are_dicts or any(type(number) is not int for some in numbers for number in some):
        raise CheckpointCorrupt("the checkpoint has damaged facts about streams, sources, training or queues")
    param_groups.ensure_told(about)


def match(
    have: Mapping[str, torch.Tensor], want: Mapping[str, Spec], *, strict: bool = True,
    mapping: Mapping[str, str] | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Choose the value of each Variable: label -> tensor. ``have`` is a file's tensors, ``want`` the graph's variables.

    strict: a wanted label that the file lacks is NotFound, with the nearest keys. mapping: label -> key in the file.
    Another shape or dtype is CheckpointIncompatible, with both. Keys that nobody wants are ignored; an error lists all
    three. A label of ``mapping`` that is not wanted is InvalidArgument, a mapped key that the file lacks NotFound
    without ``strict``, too.
    """
    keys = {label: label for label in want} | dict(mapping or {})
    unknown = sorted(keys.keys() - want.keys())
    if unknown:
        raise InvalidArgument(f"mapping names {unknown[0]!r}, which is no variable here{near(unknown[0], want)}")
    missing = [keys[label] for label in want if keys[label] not in have]
    found = {label: have[keys[label]] for label in want if keys[label] in have}
    wrong = [label for label, tensor in found.items() if _spec(tensor) != (want[label].dtype, want[label].shape)]
    others = [f"  {label} is {want[label]}, the checkpoint holds {_shown(found[label])}" for label in wrong]
    if missing and (strict or set(missing) & set((mapping or {}).values())):
        lines = [f"  {key}{near(key, have)}" for key in missing]
        if left := [key for key in have if key not in keys.values()]:
            more = f" and {len(left) - _FEW} more" if len(left) > _FEW else ""
            lines.append(f"it has, for no variable here: {', '.join(left[:_FEW])}{more}")
        lines += ["of another shape or dtype:", *others] if others else []
        raise NotFound("\n".join([f"the checkpoint lacks {len(missing)} of {len(want)} variables:", *lines]))
    if others:
        lines = ["the checkpoint is of another model; nothing was assigned:", *others]
        raise CheckpointIncompatible("\n".join(lines))
    return found


def _spec(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    return tensor.dtype, tuple(tensor.shape)


def _shown(tensor: torch.Tensor) -> Spec:
    return Spec(tensor.dtype, tuple(tensor.shape))


def near(key: str, among: Mapping[str, Any]) -> str:
    """The names of ``among`` that are similar to ``key``, for messages."""
    near = difflib.get_close_matches(key, among, 3)
    return f" (near: {', '.join(near)})" if near else ""
