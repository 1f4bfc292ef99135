"""Lookup tables: sorted keys and their values in two Variables, so that they live wherever Variables live.

A look-up is a binary search in ordinary torch code. Keys are int64; a string stands for 63 bits of its BLAKE2 digest.
Two strings of one call with the same digest are an error. Of several calls they are one key, which nobody notices: the
chance is 5 in 100 million for a table of a million strings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

import torch

from tfnb.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, ShapeError
from tfnb.graph import Variable, current
from tfnb.graph.spec import tensor_of
from tfnb.kernels.tables import EMPTY
from tfnb.state.input_sources import TextLineReader


def string_keys(strings: str | Iterable[str]) -> torch.Tensor:
    """The int64 keys that stand for strings: the same in every process. Raises InvalidArgument for two with one key.

    >>> string_keys(["a", "b", "a"]).unique().numel(), string_keys("a").shape
    (2, torch.Size([]))
    """
    if isinstance(strings, str):
        return torch.tensor(_key(strings))
    of: dict[int, str] = {}
    found = []
    for string in strings:
        if not isinstance(string, str):
            raise InvalidArgument(f"string_keys takes strings, and was given {string!r}")
        key = _key(string)
        if of.setdefault(key, string) != string:
            raise InvalidArgument(f"{of[key]!r} and {string!r} have the same 63-bit digest: change one of them")
        found.append(key)
    return torch.tensor(found, dtype=torch.int64)


def _key(string: str) -> int:
    return int.from_bytes(blake2b(string.encode(), digest_size=8).digest(), "little") % EMPTY


class _Table:
    """The base of all tables; ``lookup`` and ``size`` are recorded in a recording, and immediate outside."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, default: object, buckets: int, name: str) -> None:
        self.name, self.num_oov_buckets = name, buckets
        self._default = tensor_of(default, values.dtype, f"table {name}").expand(values.shape[1:]).clone()
        self._keys = Variable(keys, name=f"{name}/keys", trainable=False)
        self._values = Variable(values, name=f"{name}/values", trainable=False)

    def lookup(self, keys: object) -> torch.Tensor:
        """The value of each key: ``[*keys.shape, *value shape]``; keys are int64, or strings outside of a recording.

        A key that the table lacks has the default, or with out-of-vocabulary buckets ``size + key % num_oov_buckets``.
        Raises InvalidArgument for keys of another dtype.
        """
        wanted = self._taken(keys)
        known, values = self._keys.read(), self._values.read()
        at = torch.searchsorted(known, wanted).clamp(max=self._keys.shape[0] - 1)
        is_found = (known[at] == wanted) & (wanted != EMPTY)
        if self.num_oov_buckets:
            other = (known != EMPTY).sum() + torch.remainder(wanted, self.num_oov_buckets)
            return torch.where(is_found, values[at], other)
        wide = is_found.reshape([*is_found.shape, *[1] * (len(self._values.shape) - 1)])
        return torch.where(wide, values[at], self._default)

    def size(self) -> torch.Tensor:
        """The number of keys, an int64 scalar."""
        return (self._keys.read() != EMPTY).sum()

    def export(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys in rising order, and their values, as they are now."""
        count = int((self._keys.value() != EMPTY).sum())
        return self._keys.value()[:count], self._values.value()[:count]

    def _taken(self, keys: object) -> torch.Tensor:
        if isinstance(keys, str) or (isinstance(keys, (list, tuple)) and keys and isinstance(keys[0], str)):
            return string_keys(keys)
        taken = keys if isinstance(keys, torch.Tensor) else tensor_of(keys, None, f"table {self.name}")
        if taken.dtype != torch.int64 and taken.numel() == 0:
            return taken.long()
        if taken.dtype != torch.int64:
            raise InvalidArgument(
                f"table {self.name} has int64 keys, these are {taken.dtype}: convert them, or use tfnb.string_keys"
            )
        return taken


class HashTable(_Table):
    """A constant table: keys (int64 or strings) to values.

    values: one row for each key. default: the value of other keys. num_oov_buckets: instead of it, other keys go to so
    many numbers behind the table's, by their key. Raises FailedPrecondition for a key that has two values. Raises
    ShapeError unless there is at least one key, and one value for each; InvalidArgument for the largest int64 as a key,
    for a negative ``num_oov_buckets``, and for buckets beside values that are no integers.

    >>> table = HashTable(["cat", "dog"], [3, 5], default=-1)
    >>> table.lookup(["dog", "cow"])
    tensor([ 5, -1])
    """

    def __init__(
        self, keys: object, values: object, default: object = -1, *, num_oov_buckets: int = 0, name: str = "table"
    ) -> None:
        self.name = name
        taken, rows = self._taken(keys).flatten(), torch.as_tensor(values)
        if (taken == EMPTY).any():
            raise InvalidArgument(f"table {name}: the key {EMPTY} marks an empty place, so no table can have it")
        if rows.dim() == 0 or len(rows) != len(taken) or len(taken) == 0:
            raise ShapeError(f"table {name}: {len(taken)} keys need as many values, and at least 1: {list(rows.shape)}")
        is_count = type(num_oov_buckets) is int and num_oov_buckets >= 0
        if not is_count or (num_oov_buckets and (rows.dim() > 1 or rows.is_floating_point())):
            raise InvalidArgument(
                f"table {name}: num_oov_buckets is an int of at least 0 and goes with integer values; it is "
                f"{num_oov_buckets!r}"
            )
        ordered, order = torch.sort(taken, stable=True)
        rows = rows[order]
        twice = ordered[1:] == ordered[:-1]
        differs = (
            twice & (rows[1:] != rows[:-1]).flatten(1).any(1) if rows.dim() > 1 else twice & (rows[1:] != rows[:-1])
        )
        if differs.any():
            first = int(order[1:][differs][0])
            shown = keys[first] if isinstance(keys, (list, tuple)) else int(taken[first])
            raise FailedPrecondition(f"table {name}: key {shown!r} has two values; a HashTable does not change")
        is_first = torch.ones_like(ordered, dtype=torch.bool)
        is_first[1:] = ~twice
        super().__init__(ordered[is_first], rows[is_first], default, num_oov_buckets, name)

    @classmethod
    def from_file(
        cls, url: str, *, default: int = -1, num_oov_buckets: int = 0, name: str = "vocabulary"
    ) -> HashTable:  # fmt: skip
        r"""A vocabulary file with one word a line; a word's value is its line number, from 0. url: as for fsspec.

        >>> import fsspec
        >>> with fsspec.open("memory://doc/vocabulary.txt", "w") as file:
        ...     _ = file.write("the\na\n")
        >>> HashTable.from_file("memory://doc/vocabulary.txt", num_oov_buckets=1).lookup(["a", "the", "an"])
        tensor([1, 0, 2])
        """
        words = list(TextLineReader(url, name=name))
        return cls(words, torch.arange(len(words)), default, num_oov_buckets=num_oov_buckets, name=name)


class MutableHashTable(_Table):
    """A table that runs change, of at most ``capacity`` keys; `insert` and `remove` order as writes of Variables do.

    default: the value of keys that it lacks; its dtype and shape are those of all values. Raises InvalidArgument for a
    capacity below 1.

    >>> table = MutableHashTable(4, default=0.0)
    >>> table.insert([7, 9], [0.5, 1.5])
    >>> table.lookup([9, 8]), int(table.size())
    (tensor([1.5000, 0.0000]), 2)
    """

    def __init__(self, capacity: int, default: object, *, name: str = "table") -> None:
        if not isinstance(capacity, int) or capacity < 1:
            raise InvalidArgument(f"table {name}: the capacity is a number of keys, at least 1, not {capacity!r}")
        like = torch.as_tensor(default)
        keys = torch.full((capacity,), EMPTY, dtype=torch.int64)
        super().__init__(keys, like.expand(capacity, *like.shape).clone(), default, 0, name)

    def insert(self, keys: object, values: object) -> Any:
        """Insert or replace values; of equal keys the last one wins. In a recording the result is an operation to
        fetch.

        Raises ResourceExhausted, with nothing changed, where the table has no room; ShapeError where there is not one
        value for each key; InvalidArgument for the largest int64, which marks an empty place.
        """
        return self._become(torch.ops.tfnb.table_insert, self._taken(keys), self._rows(values))

    def remove(self, keys: object) -> Any:
        """Remove keys; absent keys are ignored.

        Raises InvalidArgument for keys of another dtype.
        """
        return self._become(torch.ops.tfnb.table_remove, self._taken(keys).flatten())

    def load(self, keys: object, values: Sequence[Any] | torch.Tensor) -> Any:
        """Replace all contents by these keys and values, such as those of `export`. Raises as `insert` does."""
        empty = torch.full_like(self._keys.read(), EMPTY)
        return self._become(torch.ops.tfnb.table_insert, self._taken(keys), self._rows(values), known=empty)

    def _rows(self, values: object) -> torch.Tensor:
        if not isinstance(values, torch.Tensor):
            return tensor_of(values, self._values.dtype, f"table {self.name}")
        if values.dtype != self._values.dtype:
            raise InvalidArgument(f"table {self.name} has {self._values.dtype} values, these are {values.dtype}")
        return values

    def _become(self, change: Any, *given: torch.Tensor, known: torch.Tensor | None = None) -> Any:
        try:
            keys, values = change(self._keys.read() if known is None else known, self._values.read(), *given)
        except OverflowError as error:
            raise ResourceExhausted(f"table {self.name}: {error}") from error
        except KeyError as error:
            raise InvalidArgument(f"table {self.name}: {error.args[0]}") from error
        except ValueError as error:
            raise ShapeError(f"table {self.name}: {error}") from error
        done = self._keys.assign(keys), self._values.assign(values)
        return None if current.recording() is None else done
