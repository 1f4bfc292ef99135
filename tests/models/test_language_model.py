"""The recurrent language model of pytorch/examples: hidden state handed from batch to batch, a short last sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tfnb

TOKENS, BATCH, LENGTH, RATE, CLIP = 11, 4, 5, 0.5, 0.25


class RNNModel(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.encoder = nn.Embedding(TOKENS, 8)
        self.rnn = getattr(nn, kind)(8, 8, 2)
        self.decoder = nn.Linear(8, TOKENS)
        self.decoder.weight = self.encoder.weight
        self.kind = kind

    def forward(self, tokens: Any, hidden: Any) -> Any:
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        decoded = self.decoder(output).view(-1, TOKENS)
        return nn.functional.log_softmax(decoded, dim=1), hidden

    def init_hidden(self) -> Any:
        weight = next(self.parameters())
        state = [weight.new_zeros(2, BATCH, 8) for _ in range(2 if self.kind == "LSTM" else 1)]
        return tuple(state) if self.kind == "LSTM" else state[0]


def repackage_hidden(h: Any) -> Any:
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    data = torch.randint(TOKENS, (23, BATCH), generator=torch.Generator().manual_seed(0))
    for i in range(0, len(data) - 1, LENGTH):
        n = min(LENGTH, len(data) - 1 - i)
        yield data[i : i + n], data[i + 1 : i + 1 + n].view(-1)


def step(model: nn.Module, tokens: Any, targets: Any, hidden: Any) -> Any:
    model.zero_grad()
    output, hidden = model(tokens, repackage_hidden(hidden))
    loss = nn.functional.nll_loss(output, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-RATE)
    return loss, hidden


def made(kind: str) -> RNNModel:
    torch.manual_seed(1)
    return RNNModel(kind)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_language_model_trains_on_sequences_of_every_length(kind: str) -> None:
    eager, model = made(kind), made(kind)
    tokens, targets = next(batches())
    with tfnb.record():
        x, y = tfnb.placeholder(tokens, shape=(None, BATCH)), tfnb.placeholder(targets)
        state = torch.utils._pytree.tree_map(lambda v: tfnb.placeholder(v, shape=v.shape), eager.init_hidden())
        loss, after = step(model, x, y, state)
        everything = tfnb.effects()
    hidden, carried = eager.init_hidden(), eager.init_hidden()
    for tokens, targets in batches():
        expected, hidden = step(eager, tokens, targets, hidden)
        fed = dict(zip(*map(torch.utils._pytree.tree_leaves, (state, carried)), strict=True))
        found, carried, _ = tfnb.run((loss, after, everything), {x: tokens, y: targets, **fed})
        torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(dict(model.named_parameters()), dict(eager.named_parameters()))
