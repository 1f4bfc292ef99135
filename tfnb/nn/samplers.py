"""Classes drawn for a loss over many classes, with the expected count of each (semantics S-164).

The log-uniform sampler draws class k with probability ``log((k + 2) / (k + 1)) / log(range_max + 1)``: about Zipf's law
where classes are numbered from the most frequent to the rarest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tfnb.errors import InvalidArgument, ensure_type
from tfnb.graph import current
from tfnb.kernels.random import log_uniform
from tfnb.nn.embeddings import ensure_ids
from tfnb.recording.dispatch.recorder import Recorder
from tfnb.recording.values.tensor import Tensor

SIGMAS = 4.0  # standard deviations below the least expected count at which labels are called unsorted


class SampledClasses(NamedTuple):
    """Sampled classes [S], and how often each true class [B, T] and each sampled class [S] is expected among them."""

    sampled_candidates: torch.Tensor
    true_expected_count: torch.Tensor
    sampled_expected_count: torch.Tensor


def log_uniform_sampler(
    true_classes: torch.Tensor, num_true: int, num_sampled: int, unique: bool, range_max: int
) -> SampledClasses:
    """``num_sampled`` of ``range_max`` classes, log-uniform, with the arguments and results of TensorFlow's
    ``log_uniform_candidate_sampler``.

    true_classes: int64 [B, num_true]. unique: no class twice; a class drawn again is rejected, and the expected count
    of class k is ``1 - (1 - P(k)) ** tries``; else ``num_sampled * P(k)``. Expected counts are float64.

    The draws come from the stream of their node: a run is repeated by its seed, here and on a cluster. Where the
    sample of ``true_classes`` contradicts an order by frequency, a note says so. Raises InvalidArgument for more unique
    classes than there are, and for other shapes.

    >>> drawn = log_uniform_sampler(torch.tensor([[0], [1]]), 1, 4, False, 10)
    >>> drawn.sampled_candidates.shape, drawn.true_expected_count
    (torch.Size([4]), tensor([[1.1563],
            [0.6764]], dtype=torch.float64))
    """
    for value, name in ((num_true, "num_true"), (num_sampled, "num_sampled"), (range_max, "range_max")):
        ensure_type(value, int, name)
        if value < 1:
            raise InvalidArgument(f"{name} is a number of classes, at least 1, and was given {value}")
    ensure_type(unique, bool, "unique")
    labels = ensure_ids(true_classes, "true_classes")
    if labels.dim() != 2 or labels.shape[1] != num_true:
        raise InvalidArgument(f"true_classes are of shape [batch, {num_true}], and these are {list(labels.shape)}")
    if unique and num_sampled > range_max:
        raise InvalidArgument(f"{num_sampled} distinct classes were asked for, and there are {range_max}")
    _note_order(labels, range_max)
    ids, tries = torch.ops.tfnb.log_uniform_draw(labels, num_sampled, range_max, unique)

    def expected(classes: torch.Tensor) -> torch.Tensor:
        p = log_uniform(classes, range_max)
        return -torch.expm1(tries * torch.log1p(-p)) if unique else num_sampled * p

    return SampledClasses(ids, expected(labels), expected(ids))


def _note_order(labels: torch.Tensor, classes: int) -> None:
    """Note labels of a sample that cannot be numbered from the most frequent class on."""
    recording = current.recording()
    sample = labels.found_sample() if isinstance(labels, Tensor) else labels
    gap = None if sample is None else first_gap(sample, classes)
    if isinstance(recording, Recorder) and gap is not None:
        recording.note(
            f"the log-uniform sampler takes class 0 for the most frequent one, and so on: of {gap.labels} labels "
            f"{gap.found} are below {gap.below}, and at least {gap.least} would be if classes were numbered by "
            "frequency. Number them so, or the loss is a worse estimate"
        )


class LabelGap(NamedTuple):
    """The number ``found`` of ``labels`` ``below`` a class; with falling frequencies, ``least`` would be there."""

    labels: int
    found: int
    below: int
    least: int


def first_gap(labels: torch.Tensor, classes: int) -> LabelGap | None:
    """The first range from class 0 that has too few labels for frequencies that fall from class to class.

    The first m classes have at least m / ``classes`` of the labels then, but for chance: `SIGMAS`.

    >>> first_gap(torch.arange(100) % 10, 100), first_gap(90 + torch.arange(100) % 10, 100)
    (None, LabelGap(labels=100, found=0, below=16, least=16))
    """
    total, below = labels.numel(), 1
    while below < classes:
        share, found = below / classes, int((labels < below).sum())
        least = total * share
        if least - found > SIGMAS * (total * share * (1 - share)) ** 0.5:
            return LabelGap(total, found, below, round(least))
        below *= 2
    return None
