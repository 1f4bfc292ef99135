"""Checkpoints in several files: a manifest ``ckpt-<step>.json``, and its shards, named by their digests.

Shards lie in the folder ``shards``, plain tensor files named by the sha256 digest of what they hold. So what did not
change since the checkpoint before is written once, whoever writes it, and no manifest can name a file elsewhere. A
Variable of a MiB or more has shards of its own, of at most 16 MiB or one row; smaller ones share some. A value that
lies in several shards is their rows in order. The manifest is written last: without it there is no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from tfnb.errors import CheckpointCorrupt, CheckpointIncompatible, CheckpointWriteError
from tfnb.graph import lazy_memory, strict_json
from tfnb.graph.tensor_files import drafted, read_tensors, verified_facts
from tfnb.state.checkpoint_stores import CheckpointStore

FORMAT, VERSION = "tfnb-checkpoint", 1
FOLDER = "shards"  # the folder of the shards, beside the manifests
LARGEST = 16 << 20  # bytes of a shard, unless one row is larger
ALONE = 1 << 20  # bytes from which on a Variable has shards of its own
CAP = 64 << 20  # bytes of a manifest
SHARDS = re.compile(r"[0-9a-f]{64}\.safetensors", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_PROBES = re.compile(r"probe-[0-9a-f]{32}", re.ASCII)
_ABOUT = {"format": "tfnb-shard", "version": 1}


class Shard(NamedTuple):
    """A tensor file of a checkpoint: the digest of its contents, and its size in bytes."""

    sha256: str
    bytes: int

    @property
    def name(self) -> str:
        """Its name in the store."""
        return f"{FOLDER}/{self.sha256}.safetensors"


Layout = Mapping[str, tuple[Shard, ...]]
"""The shards of each tensor, by label: its rows in order."""


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint. ``meta``: steps, data positions, random streams, the graph's hash and others."""

    meta: Mapping[str, Any]
    layout: Layout

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The shards of all values, each once."""
        return tuple(dict.fromkeys(shard for shards in self.layout.values() for shard in shards))

    @property
    def bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.bytes for shard in self.shards)

    def text(self) -> str:
        """The JSON text of the manifest, with a digest of its own.

        >>> shard = Shard("0" * 64, 80)
        >>> read_text("m", Manifest({"step": 1}, {"w": (shard, shard)}).text()).layout["w"] == (shard, shard)
        True
        """
        at = {shard: number for number, shard in enumerate(self.shards)}
        facts = {
            "format": FORMAT, "version": VERSION, "meta": dict(self.meta),
            "files": [{"name": shard.name, "sha256": shard.sha256, "bytes": shard.bytes} for shard in self.shards],
            "tensors": {label: [at[shard] for shard in shards] for label, shards in self.layout.items()},
        }  # fmt: skip
        return json.dumps({"sha256": _digest(facts), **facts}, indent=1)


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_text(where: object, text: str) -> Manifest:
    """The manifest that a text holds; raises CheckpointCorrupt, or CheckpointIncompatible for a newer version."""
    try:
        facts = strict_json.read(text, finite=False)
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            raise ValueError(f"it is no manifest of format {FORMAT}")
        if type(facts.get("version")) is not int or facts["version"] > VERSION:
            raise CheckpointIncompatible(
                f"{where} is {FORMAT} version {str(facts.get('version'))[:40]}; this tfnb reads up to version "
                f"{VERSION}: install a newer one"
            )
        expected = facts.pop("sha256", None)
        if (found := _digest(facts)) != expected:
            raise ValueError(f"its text has sha256 {found}, expected {str(expected)[:80]}")
        shards = [_shard(record) for record in facts["files"]]
        layout = {label: _shards_at(label, numbers, shards) for label, numbers in facts["tensors"].items()}
        if not isinstance(facts["meta"], dict):
            raise TypeError(f"its facts are {type(facts['meta']).__name__}, not an object")
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise CheckpointCorrupt(f"{where} is a damaged manifest: {error}") from None
    return Manifest(facts["meta"], layout)


def _shard(record: Any) -> Shard:
    name, sha256, nbytes = record["name"], record["sha256"], record["bytes"]
    if type(nbytes) is not int or nbytes < 0 or not isinstance(sha256, str):
        raise TypeError(f"the file {str(name)[:80]!r} has no sha256 or number of bytes")
    shard = Shard(sha256, nbytes)
    if not _DIGEST.fullmatch(sha256) or name != shard.name:
        raise ValueError(f"unsafe name {str(name)[:80]!r}: a shard is named {FOLDER}/<sha256>.safetensors")
    return shard


def _shards_at(label: str, numbers: object, shards: list[Shard]) -> tuple[Shard, ...]:
    if not isinstance(numbers, list) or not numbers:
        raise TypeError(f"{label} has no files")
    if not all(type(number) is int and 0 <= number < len(shards) for number in numbers):
        raise ValueError(f"{label} names a file that is none of {len(shards)}")
    return tuple(shards[number] for number in numbers)


# -- writing ------------------------------------------------------------------------------------------------


def write_shards(
    store: CheckpointStore, tensors: Mapping[str, torch.Tensor], whole: Collection[Shard] = (),
    on_shard: Callable[[], object] = lambda: None,
) -> dict[str, tuple[Shard, ...]]:  # fmt: skip
    """Write tensors to shards, skipping undamaged shards in ``whole``; raises CheckpointWriteError.

    on_shard: called after each shard.
    """
    found = dict[str, list[Shard]]()
    for group in _groups(tensors):
        draft = drafted(store, group, _ABOUT)
        shard = Shard(draft.digest, draft.nbytes)
        if shard not in whole:
            store.put(shard.name, draft.write)
        on_shard()
        for label in group:
            found.setdefault(label, []).append(shard)
    return {label: tuple(found[label]) for label in tensors}


def _groups(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of each shard: rows of large ones, and several small ones together.

    >>> table = torch.zeros(3, LARGEST // 8)
    >>> [{label: len(part) for label, part in group.items()} for group in _groups({"a": torch.ones(2), "t": table})]
    [{'t': 2}, {'t': 1}, {'a': 2}]
    """
    small, room = dict[str, torch.Tensor](), LARGEST
    for label, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes >= ALONE:
            rows = max(1, LARGEST * len(tensor) // nbytes) if tensor.dim() else 1
            yield from ({label: part} for part in (tensor.split(rows) if tensor.dim() else (tensor,)))
            continue
        if nbytes > room:
            yield small
            small, room = {}, LARGEST
        small[label] = tensor
        room -= nbytes
    if small:
        yield small


@contextmanager
def probed(store: CheckpointStore) -> Iterator[str]:
    """A block with the name of a probe file, by which another process checks that both see the same store."""
    name = f"{FOLDER}/probe-{secrets.token_hex(16)}"
    store.put(name, lambda draft: draft.write_text(name))
    try:
        yield name
    finally:
        store.drop(name)


def is_seen(store: CheckpointStore, probe: str) -> bool:
    """Whether a store has the file of `probed`: nobody guesses its name."""
    try:
        with store.got(probe) as path:
            return path.read_text() == probe
    except (OSError, UnicodeDecodeError):
        return False


def write(store: CheckpointStore, name: str, manifest: Manifest) -> None:
    """Write a manifest whose shards are there; raises CheckpointWriteError."""
    text = manifest.text().encode()
    if len(text) > CAP:
        raise CheckpointWriteError(f"cannot write {name}: a manifest of {len(text)} bytes; at most {CAP} can be read")
    store.put(name, lambda draft: draft.write_bytes(text))


# -- reading ------------------------------------------------------------------------------------------------


def is_manifest(path: Path) -> bool:
    """Whether a file begins as a manifest does; the header of a safetensors file never has such a length."""
    with path.open("rb") as file:
        return file.read(2) == b"{\n"


def read(store: CheckpointStore, name: str) -> Manifest:
    """A manifest; its shards are not looked at. Raises CheckpointCorrupt, CheckpointIncompatible or OSError."""
    where = store.path_of(name)
    with store.got(name) as path:
        if (size := path.stat().st_size) > CAP:
            raise CheckpointCorrupt(f"{where} is a manifest of {size} bytes; at most {CAP} are allowed")
        content = path.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise CheckpointCorrupt(f"{where} is a damaged manifest: {error}") from None
    return read_text(where, text)


@contextmanager
def _opened(store: CheckpointStore, shard: Shard) -> Iterator[Path]:
    """A block with the path of a shard of the right size; raises CheckpointCorrupt."""
    where = store.path_of(shard.name)
    try:
        with store.got(shard.name) as path:
            if path.is_symlink():
                raise CheckpointCorrupt(f"{where} is a link: shards are files, so that none is outside of the folder")
            if (size := path.stat().st_size) != shard.bytes:
                raise CheckpointCorrupt(f"{where} has {size} bytes, its manifest says {shard.bytes}")
            yield path
    except FileNotFoundError:
        raise CheckpointCorrupt(f"{where} is missing: a manifest names it") from None


def _ensure_is(store: CheckpointStore, shard: Shard, about: Mapping[str, Any], digest: str) -> None:
    found = {name: about.get(name) for name in _ABOUT}
    if found != _ABOUT or digest != shard.sha256:
        raise CheckpointCorrupt(f"{store.path_of(shard.name)} holds {digest}, of {found}: another file has its name")


def verify(store: CheckpointStore, shard: Shard) -> None:
    """Compare all bytes of a shard with its digests; raises CheckpointCorrupt or OSError."""
    with _opened(store, shard) as path:
        about, digest = verified_facts(path)
    _ensure_is(store, shard, about, digest)


def load(
    store: CheckpointStore, manifest: Manifest, beside: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> dict[str, torch.Tensor]:
    """The tensors by label, after all digests were compared; ``beside`` as of `read_tensors`. Raises
    CheckpointCorrupt.
    """
    for shard in manifest.shards:  # before memory is taken for the first of many
        with _opened(store, shard):
            pass
    held: dict[Shard, dict[str, torch.Tensor]] = {}
    for shard in manifest.shards:
        with _opened(store, shard) as path:
            tensors, about, digest = read_tensors(path, beside=beside)
        _ensure_is(store, shard, about, digest)
        held[shard] = tensors
    found: dict[str, torch.Tensor] = {}
    for label, shards in manifest.layout.items():
        found[label] = _joined(label, [_of(held[shard], shard, label) for shard in shards])
        if len(shards) > 1:  # rows of one tensor, each in a shard of its own
            for shard in shards:
                held[shard].pop(label, None)
    return found


def _of(tensors: Mapping[str, torch.Tensor], shard: Shard, label: str) -> torch.Tensor:
    if label not in tensors:
        raise CheckpointCorrupt(f"{shard.name} holds no {label}, which a manifest says")
    return tensors[label]


def _joined(label: str, parts: list[torch.Tensor]) -> torch.Tensor:
    kinds = {(part.dtype, part.shape[1:], part.dim() > 0) for part in parts}
    if len(parts) > 1 and (len(kinds) > 1 or not parts[0].dim()):
        raise CheckpointCorrupt(
            f"the shards of {label} do not fit: {', '.join(str(tuple(one.shape)) for one in parts)}"
        )
    return lazy_memory.joined(parts)


def collect(store: CheckpointStore, kept: Iterable[Manifest]) -> None:
    """Delete the shards that no manifest of ``kept`` names, and probes that were left."""
    named = {shard.name for manifest in kept for shard in manifest.shards}
    for name in store.listed(FOLDER):
        last = name.rpartition("/")[2]
        if name not in named and (SHARDS.fullmatch(last) or _PROBES.fullmatch(last)):
            store.drop(name)
