"""The Variables on the servers, and whether their local storages are current, stale or written. Data only, no calls.

Variables are held weakly: one that nobody can reach any more is dropped there too. A storage here is a copy, of the
last pull. `Holdings.written` finds the ones that were written since by other means than a step (`load_state_dict`,
``weight.zero_()``); they are to be sent before the next step, unless the servers have newer values than the copy.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tfnb.graph import Variable, lazy_memory
from tfnb.placement.placement import Piece
from tfnb.placement.shards import nbytes

COPIED = 1 << 16  # bytes up to which a copy is kept to compare with; of larger storages two kinds of sums
_ROW = 8192  # bytes


@dataclass(frozen=True, slots=True)
class Print:
    """A fingerprint of a storage: its address, torch's version counter, and its bits or sums of them."""

    place: int
    version: int
    bits: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, storage: torch.Tensor) -> Print:
        """The fingerprint of a storage now."""
        return cls(storage.data_ptr(), _version(storage), _bits(storage))

    def seems(self, storage: torch.Tensor) -> bool:
        """Whether address and version are unchanged; torch does not count writes through ``.data``."""
        return self.place == storage.data_ptr() and self.version == _version(storage)

    def fits(self, storage: torch.Tensor) -> bool:
        """Whether its bits are the same."""
        return all(map(torch.equal, self.bits, _bits(storage)))


def _version(storage: torch.Tensor) -> int:
    return 0 if storage.is_inference() else storage._version


def _bits(storage: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The bits, or sums for large storages: equal for equal bits. Allocates no pages of a lazy table."""
    flat = storage.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)
    if flat.numel() <= COPIED:
        return (flat.clone(),)
    flat = flat.clone() if flat.storage_offset() % 8 else flat  # words begin at such places only
    words = flat[: flat.numel() // _ROW * _ROW].view(torch.int64).view(-1, _ROW // 8)  # sums of them wrap around
    is_large = flat.numel() >= lazy_memory.LARGE and flat.device.type == "cpu"
    found = lazy_memory.sums(words) if is_large else (words.sum(0), words.sum(1))
    return *found, flat[words.numel() * 8 :].clone()


class Holdings:
    """The Variables of one cluster.

    ``homes``: pieces of each key, also of Variables that are gone and were not dropped yet. ``stale``: keys of which
    the servers have newer values than the storage here.
    """

    def __init__(self) -> None:
        self.homes: dict[str, tuple[Piece, ...]] = {}
        self.stale: set[str] = set()
        self._variables: weakref.WeakValueDictionary[str, Variable] = weakref.WeakValueDictionary()
        self._prints: dict[str, Print] = {}
        self.showing = threading.Lock()  # held while storages get what the servers have, in the event loop's thread

    def __len__(self) -> int:
        return len(self._variables)

    def __contains__(self, variable: Variable) -> bool:
        return variable.key in self.homes

    @property
    def variables(self) -> list[Variable]:
        """The reachable Variables."""
        return list(self._variables.values())

    def adopt(self, variable: Variable, pieces: tuple[Piece, ...]) -> None:
        """Register a Variable as living on servers, with its local value."""
        self._variables[variable.key] = variable  # first: another thread may look for those that are `gone`
        self.homes[variable.key] = pieces
        self.same(variable)

    def move(self, variable: Variable, pieces: tuple[Piece, ...]) -> None:
        """Register other pieces of a Variable; its local storage is as current or stale as before."""
        self.homes[variable.key] = pieces

    def same(self, variable: Variable) -> None:
        """Mark a Variable's local storage as equal to the servers' value."""
        self._prints[variable.key] = Print.of(variable.kept)
        self.stale.discard(variable.key)

    def superseded(self, variable: Variable) -> None:
        """Mark a Variable's local storage as stale: a newer value was written on the servers."""
        self.same(variable)
        self.stale.add(variable.key)

    def gone(self) -> dict[int, list[str]]:
        """Keys by shard of Variables that nobody can reach; they count as dropped from here on."""
        found: dict[int, list[str]] = {}
        if len(self.homes) != len(self._variables):
            for key in [key for key in list(self.homes) if key not in self._variables]:
                for piece in self.homes.pop(key):
                    found.setdefault(piece.shard, []).append(piece.key)
                self._prints.pop(key, None)
                self.stale.discard(key)
        return found

    def written(self, variables: Iterable[Variable], *, thorough: bool) -> list[Variable]:
        """The Variables whose local storages were written; ``thorough``: including writes that torch does not count."""
        with self.showing:
            return [variable for variable in variables if self._is_written(variable, thorough)]

    def _is_written(self, variable: Variable, thorough: bool) -> bool:
        seen = self._prints.get(variable.key)
        if seen is None or self._variables.get(variable.key) is not variable:
            return False
        storage = variable.kept
        return (thorough or not seen.seems(storage)) and not seen.fits(storage)

    def behind(self, written: Iterable[Variable]) -> list[Variable]:
        """The written Variables, not led by the notebook, whose local write is based on an outdated copy."""
        return [variable for variable in written if variable.key in self.stale and not variable.leads]

    def loads(self, shards: int) -> list[int]:
        """Bytes on each shard."""
        found = [0] * shards
        for variable in self.variables:
            for piece in self.homes[variable.key]:
                found[piece.shard] += nbytes(variable, piece.rows)
        return found

    def contents(self) -> dict[int, list[tuple[str, int]]]:
        """Names of Variables with their bytes, by shard; of a Variable in pieces the rows stand behind its name."""
        found: dict[int, list[tuple[str, int]]] = {}
        for variable in self.variables:
            for piece in self.homes.get(variable.key, ()):
                name = variable.name + (f"[{piece.rows[0]}:{piece.rows[1]}]" if piece.rows else "")
                found.setdefault(piece.shard, []).append((name, nbytes(variable, piece.rows)))
        return found

    def clear(self) -> None:
        """They live here again."""
        self.homes.clear()
        self.stale.clear()
        self._prints.clear()
        self._variables.clear()
