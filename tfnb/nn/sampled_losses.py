"""Losses over sampled classes in the place of all: sampled softmax, and noise-contrastive estimation (S-165).

Both take the rows of the true and the sampled classes only, from one look-up each of weights and biases. The logarithm
of a class's expected count is subtracted from its logit. For training: evaluate with all classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tfnb.errors import InvalidArgument, ShapeError, ensure_type
from tfnb.nn.embeddings import ShardedTable, ensure_ids
from tfnb.nn.samplers import SampledClasses, log_uniform_sampler


def sampled_softmax_loss(
    weights: object, biases: object, labels: torch.Tensor, inputs: torch.Tensor, num_sampled: int, num_classes: int,
    num_true: int = 1, sampled_values: object = None, remove_accidental_hits: bool = True, *, partition: str = "mod",
) -> torch.Tensor:  # fmt: skip
    """The softmax cross entropy of each row over its true classes and ``num_sampled`` others: [batch].

    weights [num_classes, D] and biases [num_classes]: tables or lists of shards, see `embedding_lookup` for
    ``partition`` and for where they may lie. labels: int64 [batch] or [batch, num_true]. inputs: [batch, D].
    sampled_values: a `SampledClasses`, or such a triple; None draws from `log_uniform_sampler`, without repetition, so
    classes are to be numbered from the most frequent one. remove_accidental_hits: a sampled class that is a true one of
    the row gets no mass.

    Arguments are TensorFlow's; the result is not reduced, as there. Raises InvalidArgument for labels that are no
    classes, ShapeError for other shapes.

    >>> import tfnb
    >>> _ = torch.manual_seed(0)
    >>> w, b = torch.randn(50, 4), torch.zeros(50)
    >>> every = tfnb.nn.SampledClasses(torch.arange(50), torch.ones(2, 1), torch.ones(50))
    >>> x, y = torch.randn(2, 4), torch.tensor([3, 8])
    >>> torch.allclose(sampled_softmax_loss(w, b, y, x, 50, 50, sampled_values=every),
    ...                torch.nn.functional.cross_entropy(x @ w.T, y, reduction="none"))
    True
    """
    true, others = _logits(
        weights, biases, labels, inputs, num_sampled, num_classes, num_true, sampled_values, remove_accidental_hits,
        partition,
    )  # fmt: skip
    return torch.logsumexp(torch.cat([true, others], 1), 1) - true.mean(1)


def nce_loss(
    weights: object, biases: object, labels: torch.Tensor, inputs: torch.Tensor, num_sampled: int, num_classes: int,
    num_true: int = 1, sampled_values: object = None, remove_accidental_hits: bool = False, *, partition: str = "mod",
) -> torch.Tensor:  # fmt: skip
    """The noise-contrastive loss of each row, the sum of logistic losses of its true and sampled classes: [batch].

    Arguments as those of `sampled_softmax_loss`. A true class counts ``1 / num_true``, as in TensorFlow.

    >>> w, b = torch.zeros(50, 4), torch.zeros(50)
    >>> some = torch.tensor([1, 2]), torch.ones(1, 1), torch.ones(2)
    >>> nce_loss(w, b, torch.tensor([3]), torch.ones(1, 4), 2, 50, sampled_values=some)  # 3 * log(2)
    tensor([2.0794])
    """
    true, others = _logits(
        weights, biases, labels, inputs, num_sampled, num_classes, num_true, sampled_values, remove_accidental_hits,
        partition,
    )  # fmt: skip
    return -F.logsigmoid(-torch.cat([true, others], 1)).sum(1) - true.mean(1)


def _logits(
    weights: object, biases: object, labels: torch.Tensor, inputs: torch.Tensor, num_sampled: int, num_classes: int,
    num_true: int, sampled_values: object, removes: bool, partition: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Logits of the true classes [batch, num_true] and of the sampled ones [batch, S], less the log expected counts."""
    tables = ShardedTable.of(weights, partition, "weights"), ShardedTable.of(biases, partition, "biases")
    classes = _ensured(tables, labels, inputs, num_sampled, num_classes, num_true, removes)
    drawn = _drawn(sampled_values, classes, num_true, num_sampled, num_classes)
    sampled = drawn.sampled_candidates
    wanted = torch.cat([classes.reshape(-1), sampled])
    parts = tables[0].part(wanted)
    w = tables[0].stitched(parts)
    b = tables[1].stitched(parts if len(tables[0].shards) == len(tables[1].shards) else tables[1].part(wanted))
    count = sampled.shape[0]
    split = wanted.shape[0] - count
    true_w = w[:split].reshape([*classes.shape, w.shape[1]])
    true = (inputs.unsqueeze(1) * true_w).sum(2) + b[:split].reshape(classes.shape)
    others = inputs @ w[split:].T + b[split:]
    true = true - drawn.true_expected_count.double().log().to(true.dtype)
    others = others - drawn.sampled_expected_count.double().log().to(others.dtype)
    if removes:
        hits = (classes.unsqueeze(2) == sampled).any(1)
        others = others.masked_fill(hits, -torch.inf)
    return true, others


def _ensured(
    tables: tuple[ShardedTable, ShardedTable], labels: object, inputs: object, num_sampled: object, num_classes: object,
    num_true: object, removes: object,
) -> torch.Tensor:  # fmt: skip
    """The labels as [batch, num_true]. Raises InvalidArgument or ShapeError for arguments that do not fit."""
    for value, name in ((num_true, "num_true"), (num_sampled, "num_sampled"), (num_classes, "num_classes")):
        ensure_type(value, int, name)
        assert isinstance(value, int)
        if value < 1:
            raise InvalidArgument(f"{name} is a number of classes, at least 1, and was given {value}")
    ensure_type(removes, bool, "remove_accidental_hits")
    ensure_type(inputs, torch.Tensor, "inputs")
    assert isinstance(inputs, torch.Tensor)
    shapes = [[table.rows, *table.shards[0].shape[1:]] for table in tables]
    wide = inputs.shape[1] if inputs.dim() == 2 else "D"
    if inputs.dim() != 2 or shapes != [[num_classes, wide], [num_classes]]:
        raise ShapeError(
            f"a loss over {num_classes} classes takes inputs [batch, {wide}], weights [{num_classes}, {wide}] and "
            f"biases [{num_classes}], and these are {list(inputs.shape)}, {shapes[0]} and {shapes[1]}"
        )
    classes = ensure_ids(labels, "labels")
    classes = classes.unsqueeze(1) if classes.dim() == 1 else classes
    if classes.dim() != 2 or classes.shape[1] != num_true:
        raise ShapeError(f"labels are of shape [batch, {num_true}], and these are {list(classes.shape)}")
    return classes


def _drawn(given: object, classes: torch.Tensor, num_true: int, num_sampled: int, num_classes: int) -> SampledClasses:
    """The sampled classes: the given ones, or new ones."""
    if given is None:
        return log_uniform_sampler(classes, num_true, num_sampled, True, num_classes)
    if not isinstance(given, tuple | list) or len(given) != 3:
        raise InvalidArgument("sampled_values are a triple: sampled classes, expected counts of the true and of these")
    for value, name in zip(given, SampledClasses._fields, strict=True):
        ensure_type(value, torch.Tensor, f"sampled_values: {name}")
    drawn = SampledClasses(*given)
    ensure_ids(drawn.sampled_candidates, "sampled_values: sampled_candidates")
    shapes = [tuple(each.shape) for each in drawn]
    if shapes != [(num_sampled,), tuple(classes.shape), (num_sampled,)]:
        raise ShapeError(
            f"sampled_values are of shapes [{num_sampled}], {list(classes.shape)} and [{num_sampled}], and these are "
            f"{', '.join(str(list(shape)) for shape in shapes)}"
        )
    return drawn
