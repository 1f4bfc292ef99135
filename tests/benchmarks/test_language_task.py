"""The language model of the evaluation: in shards it is that of plain PyTorch, and so it is on a virtual clock."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks.language_task import (
    LOSSES,
    PlainModel,
    ShardedModel,
    Sizes,
    WordTraining,
    virtual_seconds,
    words,
)

SMALL = Sizes(classes=200, width=8, batch=4)
STEPS = 4


def test_words_are_numbered_by_frequency() -> None:
    counts = words(SMALL.classes).bincount()
    assert len(counts) == SMALL.classes and counts.tolist() == sorted(counts.tolist(), reverse=True)


def test_losses_of_the_full_softmax_in_shards_are_those_of_plain_pytorch() -> None:
    plain = WordTraining(PlainModel(SMALL, "full", seed=1), SMALL, 1)
    held_back = plain.go_on(STEPS)
    for shards, executor in ((1, "auto"), (3, "parts")):
        mine = WordTraining(ShardedModel(SMALL, shards, "full", seed=1), SMALL, 1, executor)
        assert mine.go_on(STEPS) == pytest.approx(held_back, rel=1e-5)
        torch.testing.assert_close(torch.tensor(mine.losses), torch.tensor(plain.losses), rtol=1e-5, atol=0.0)


def test_the_sampled_softmax_is_evaluated_by_all_words() -> None:
    both = [WordTraining(ShardedModel(SMALL, shards, "sampled"), SMALL, 0) for shards in (1, 2)]
    held_back = [training.go_on(STEPS) for training in both]
    torch.testing.assert_close(torch.tensor(both[0].losses), torch.tensor(both[1].losses), rtol=1e-5, atol=0.0)
    assert max(both[0].losses) < 4 < min(held_back), "over three sampled words, and over 200"


def test_a_step_in_parts_sends_fewer_bytes_with_sampled_words_and_writes_nothing() -> None:
    sent = []
    for loss in LOSSES:
        model = ShardedModel(SMALL, 2, loss)
        before = [variable.value().clone() for variable in model.graph.variables]
        seconds, nbytes = virtual_seconds(model, SMALL)
        assert seconds > 0 and all(map(torch.equal, before, [v.value() for v in model.graph.variables]))
        sent.append(nbytes)
    assert sent[0] > sent[1] > 0
