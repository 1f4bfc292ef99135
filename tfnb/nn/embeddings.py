"""Look-ups in tables of one or several shards: Part, then Gather at each shard, then Stitch (OSDI'16, section 4.2).

`tfnb.kernels.sparse_rows` has Part, which sends each distinct id to one shard. Stitch joins the gathered rows, and
picks those of the ids by their places, so every id gets a row. The gradient of a shard consists of its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from tfnb.errors import InvalidArgument, ShapeError, ensure_type
from tfnb.gradients.clip import clip_by_norm
from tfnb.graph import Variable, current
from tfnb.graph.device_request import parse
from tfnb.kernels import sparse_rows as _ops  # noqa: F401  defines torch.ops.tfnb
from tfnb.recording.api import device
from tfnb.recording.values.tensor import Tensor

RULES = {"mod": False, "div": True}  # whether a shard holds consecutive ids


class ShardedTable(NamedTuple):
    """A table of rows in shards. ``by_range``: each shard holds consecutive ids, else ids are dealt out in turn."""

    shards: tuple[Any, ...]
    by_range: bool

    @classmethod
    def of(cls, params: object, partition: str, owner: str = "params") -> ShardedTable:
        """The table of one tensor or a list of shards. Raises ShapeError unless shards share the rows as the rule says,
        InvalidArgument for no shards, several dtypes or an unknown rule.
        """
        shards = tuple(params) if isinstance(params, list | tuple) else (params,)
        if not shards:
            raise InvalidArgument(f"{owner} is a table, or a list of its shards, and this list is empty")
        for at, shard in enumerate(shards):
            ensure_type(shard, (torch.Tensor, Variable), owner if len(shards) == 1 else f"{owner}[{at}]")
        if not isinstance(partition, str) or partition not in RULES:
            raise InvalidArgument(f"partition is 'mod' or 'div', and was given {partition!r}")
        table = cls(shards, RULES[partition])
        table._ensure_shapes(owner)
        return table

    def _ensure_shapes(self, owner: str) -> None:
        shapes = [tuple(shard.shape) for shard in self.shards]
        if any(not shape or not all(isinstance(size, int) for size in shape) for shape in shapes):
            raise ShapeError(f"{owner} has a fixed number of rows, and these are of shape {shapes}")
        wanted = [self.length(shard) for shard in range(len(shapes))]
        for at, shape in enumerate(shapes):
            if shape != (wanted[at], *shapes[0][1:]):
                raise ShapeError(
                    f"{owner}: {self.rows} rows in {len(shapes)} shards are {wanted}, each row of shape "
                    f"{list(shapes[0][1:])}, and {owner}[{at}] is of shape {list(shape)}"
                )
            if self.shards[at].dtype != self.shards[0].dtype:
                raise InvalidArgument(
                    f"{owner}[{at}] holds {self.shards[at].dtype}, and {owner}[0] {self.shards[0].dtype}"
                )

    @property
    def rows(self) -> int:
        """The number of rows of all shards."""
        return sum(int(shard.shape[0]) for shard in self.shards)

    def length(self, shard: int) -> int:
        """The number of rows of a shard: the first ``rows % shards`` shards have one more."""
        return self.rows // len(self.shards) + (shard < self.rows % len(self.shards))

    @property
    def name(self) -> str:
        """The name of the table in error texts."""
        names = [str(s.name) if isinstance(s, Variable | Tensor) else f"a {type(s).__name__}" for s in self.shards]
        return f"table {names[0]}" if len(names) == 1 else f"a table of {len(names)} shards ({names[0]}, ...)"

    def part(self, ids: torch.Tensor) -> list[torch.Tensor]:
        """The distinct row numbers for each shard, and last the place of each id among all row numbers."""
        return self._asked(torch.ops.tfnb.part, ids)

    def owned(self, ids: torch.Tensor, shard: int) -> list[torch.Tensor]:
        """Whether a shard holds each id, and the row number there, 0 elsewhere."""
        return self._asked(torch.ops.tfnb.owned, ids, shard)

    def _asked(self, op: Any, ids: torch.Tensor, *given: int) -> list[torch.Tensor]:
        try:
            return list(op(ids, self.rows, len(self.shards), self.by_range, *given, self.name))
        except IndexError as error:  # outside of a recording
            raise InvalidArgument(str(error)) from None

    def stitched(self, parts: Sequence[torch.Tensor], max_norm: float | None = None) -> torch.Tensor:
        """The rows of ids, from the result of `part`; gathered and clipped where each shard lies."""
        *numbers, places = parts
        gathered = []
        for shard, at in zip(self.shards, numbers, strict=True):
            with beside(shard):
                rows = torch.index_select(shard, 0, at)
                gathered.append(rows if max_norm is None else _clipped(rows, max_norm))
        found = torch.cat(gathered)
        return found.index_select(0, places.reshape(-1)).reshape([*places.shape, *found.shape[1:]])


def embedding_lookup(
    params: object, ids: torch.Tensor, *, partition: str = "mod", max_norm: float | None = None
) -> torch.Tensor:
    """The rows of a table for ``ids`` of any shape: ``[*ids.shape, *row shape]``, as ``F.embedding`` gives them.

    params: one table (Variable, Parameter or tensor), or a list of its P shards. partition: ``"mod"``, id ``i`` is row
    ``i // P`` of shard ``i % P``; ``"div"``, each shard holds consecutive ids. Either way the first shards have one row
    more where P does not divide the rows. max_norm: rows whose 2-norm is larger are scaled down to it, as TensorFlow
    does, and the gradient flows through the scaling; the table stays as it is (``F.embedding`` writes it).

    A shard that was made, or read, under ``tfnb.device("task:1")`` is looked up on that task. Row numbers travel
    there, of each distinct id once, and rows travel back; so do the gradients of these rows. Of a large shard on a
    server tasks read rows, and a small one whole.

    Raises InvalidArgument for an id that the table does not have, and for ids that are no integers; ShapeError for
    shards of other sizes.

    >>> import tfnb
    >>> shards = [torch.tensor([[0.0], [2.0], [4.0]]), torch.tensor([[1.0], [3.0]])]
    >>> embedding_lookup(shards, torch.tensor([[4, 1], [1, 0]])).squeeze(-1)
    tensor([[4., 1.],
            [1., 0.]])
    """
    table = ShardedTable.of(params, partition)
    if max_norm is not None:
        ensure_type(max_norm, (int, float), "max_norm")
        if not max_norm > 0:
            raise InvalidArgument(f"max_norm is a number above 0, and was given {max_norm}")
    return table.stitched(table.part(ensure_ids(ids, "ids")), max_norm)


def ensure_ids(ids: object, owner: str) -> torch.Tensor:
    """The ids; raises InvalidArgument for anything but a tensor of integers."""
    ensure_type(ids, torch.Tensor, owner)
    assert isinstance(ids, torch.Tensor)
    if ids.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise InvalidArgument(f"{owner} are integers, and these are {ids.dtype}")
    return ids


def _clipped(rows: torch.Tensor, norm: float) -> torch.Tensor:
    """Rows of at most this 2-norm."""
    return clip_by_norm(rows, norm, list(range(1, rows.dim()))) if rows.dim() > 1 else rows.clamp(-norm, norm)


def beside(shard: object) -> AbstractContextManager[Any]:
    """Nodes recorded inside ask for the task that a shard was made or read for. A server computes updates only."""
    asked = shard.request if isinstance(shard, Variable) else shard.node.device if isinstance(shard, Tensor) else None
    if asked is None or current.recording() is None or parse(asked).job == "ps":
        return nullcontext()
    return device(asked)
