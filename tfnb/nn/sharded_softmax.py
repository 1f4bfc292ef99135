"""Softmax cross entropy over all classes, computed on the shards of the weights (semantics S-166).

A shard multiplies by its own rows, and gives of each row of the batch two numbers: the logsumexp of its logits, and the
true logit if the label is one of its classes. The gradient of these needs two numbers back. So B rows of D float32
numbers cost 8 * D + 24 bytes a row and shard: inputs and their gradient, a label, and four numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tfnb.errors import ShapeError, ensure_type
from tfnb.nn.embeddings import ShardedTable, beside, ensure_ids


def sharded_softmax_loss(
    weights: object, biases: object, labels: torch.Tensor, inputs: torch.Tensor, *, partition: str = "mod"
) -> torch.Tensor:
    """The softmax cross entropy of each row over all classes: [batch], as ``F.cross_entropy`` without a reduction.

    weights [classes, D] and biases [classes] or None: tables, or lists of as many shards, see `embedding_lookup` for
    ``partition``. labels: int64 [batch]. inputs: [batch, D]. A shard that was made, or read, under
    ``tfnb.device("task:1")`` computes its logits and its gradient on that task; inputs, labels and their gradient
    travel, logits and weights never. It is the evaluation for a training by `sampled_softmax_loss` on the same shards.

    Raises InvalidArgument for labels that are no classes, ShapeError for other shapes.

    >>> _ = torch.manual_seed(0)
    >>> w, x, y = torch.randn(7, 4), torch.randn(2, 4), torch.tensor([3, 6])
    >>> torch.allclose(sharded_softmax_loss([w[::2], w[1::2]], None, y, x),
    ...                F.cross_entropy(x @ w.T, y, reduction="none"))
    True
    """
    table = ShardedTable.of(weights, partition, "weights")
    offsets = None if biases is None else ShardedTable.of(biases, partition, "biases")
    classes = _ensured(table, offsets, labels, inputs)
    sums, trues = [], []
    for at, shard in enumerate(table.shards):
        if not shard.shape[0]:  # fewer classes than shards
            continue
        with beside(shard):
            logits = F.linear(inputs, shard, None if offsets is None else offsets.shards[at])
            is_own, row = table.owned(classes, at)
            # the derivative of a logsumexp of -inf alone, as of classes that are masked, is no number
            sums.append(torch.logsumexp(logits.clamp(min=torch.finfo(logits.dtype).min), 1))
            trues.append(torch.where(is_own, logits.gather(1, row.unsqueeze(1)).squeeze(1), 0.0))
    return torch.logsumexp(torch.stack(sums), 0) - torch.stack(trues).sum(0)


def _ensured(table: ShardedTable, offsets: ShardedTable | None, labels: object, inputs: object) -> torch.Tensor:
    """The labels. Raises ShapeError for arguments that do not fit."""
    ensure_type(inputs, torch.Tensor, "inputs")
    assert isinstance(inputs, torch.Tensor)
    wide = inputs.shape[1] if inputs.dim() == 2 else "D"
    rows, shape = table.rows, list(table.shards[0].shape)
    fits = inputs.dim() == 2 and len(shape) == 2 and shape[1] == wide and rows > 0
    if offsets is not None:
        lengths = [tuple(shard.shape) for shard in offsets.shards]
        fits = fits and lengths == [(shard.shape[0],) for shard in table.shards]
    if not fits:
        found = "None" if offsets is None else f"{[offsets.rows, *offsets.shards[0].shape[1:]]}"
        count = "" if offsets is None else f" in {len(offsets.shards)} shards"
        raise ShapeError(
            f"a softmax over {rows} classes takes inputs [batch, {wide}], weights [{rows}, {wide}] and biases [{rows}] "
            f"in as many shards, and these are {list(inputs.shape)}, {[rows, *shape[1:]]} in {len(table.shards)} "
            f"shards and {found}{count}"
        )
    classes = ensure_ids(labels, "labels")
    if classes.dim() != 1:
        raise ShapeError(f"labels are of shape [batch], and these are {list(classes.shape)}")
    return classes
