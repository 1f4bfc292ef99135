"""Packed sequences: what they are packed by is data of the run."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import tfnb
from tfnb.errors import BranchChanged, Unsupported


def test_pack_and_pad_again_at_other_lengths() -> None:
    data, lengths = torch.randn(4, 5, 2), torch.tensor([2, 4, 1, 3])
    with tfnb.record():
        x, n = tfnb.placeholder(data, shape=("B", 5, 2)), tfnb.placeholder(lengths, shape=("B",))
        packed = pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
        out = packed.data, packed.batch_sizes, *pad_packed_sequence(packed, batch_first=True, padding_value=-1.0)
    for counts in (lengths, torch.tensor([5, 5]), torch.tensor([1, 3, 3, 2, 5])):
        data = torch.randn(len(counts), 5, 2)
        expected = pack_padded_sequence(data, counts, batch_first=True, enforce_sorted=False)
        wanted = expected.data, expected.batch_sizes, *pad_packed_sequence(expected, True, -1.0)
        for got, want in zip(tfnb.run(out, {x: data, n: counts}), wanted, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("lengths", [[2, 0], [2, 6], [1, 2]], ids=["none", "too long", "not sorted"])
def test_lengths_that_torch_refuses_stop_the_run(lengths: list[int]) -> None:
    with tfnb.record():
        x, n = tfnb.placeholder(torch.randn(2, 5, 2)), tfnb.placeholder(torch.tensor([3, 2]))
        out = pack_padded_sequence(x, n, batch_first=True).data
    with pytest.raises(BranchChanged):
        tfnb.run(out, {x: torch.randn(2, 5, 2), n: torch.tensor(lengths)})


def test_a_first_state_is_given_in_the_order_of_the_batch() -> None:
    layer, lengths = nn.GRU(3, 4, batch_first=True), torch.tensor([2, 5, 3])
    data, first = torch.randn(3, 5, 3), torch.randn(1, 3, 4)
    with tfnb.record():
        x, n = tfnb.placeholder(data, shape=("B", 5, 3)), tfnb.placeholder(lengths, shape=("B",))
        h = tfnb.placeholder(first, shape=(1, "B", 4))
        _, out = layer(pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False), h)
    _, want = layer(pack_padded_sequence(data, lengths, batch_first=True, enforce_sorted=False), first)
    assert torch.allclose(tfnb.run(out, {x: data, n: lengths, h: first}), want, atol=1e-6)
    assert "check_forward_args" not in vars(layer)


@pytest.mark.parametrize("total", [None, 5, 8])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_layer_called_by_keyword_and_a_batch_of_a_chosen_length(batch_first: bool, total: int | None) -> None:
    layer = nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=batch_first)

    def program(x: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        packed = pack_padded_sequence(x, n, batch_first=batch_first, enforce_sorted=False)
        out, (h, c) = layer(input=packed)
        return *pad_packed_sequence(out, batch_first, padding_value=-1.0, total_length=total), h, c

    def data(count: int) -> torch.Tensor:
        return torch.randn(count, 5, 3) if batch_first else torch.randn(5, count, 3)

    with tfnb.record():
        x = tfnb.placeholder(data(4), shape=("B", 5, 3) if batch_first else (5, "B", 3))
        n = tfnb.placeholder(torch.tensor([3, 5, 2, 4]), shape=("B",))
        out = program(x, n)
    for lengths in ([5, 1, 3], [2, 2], [1, 2, 5, 4, 4]):
        feed = data(len(lengths)), torch.tensor(lengths)
        for got, want in zip(tfnb.run(out, dict(zip((x, n), feed, strict=True))), program(*feed), strict=True):
            torch.testing.assert_close(got, want)


def test_what_was_packed_elsewhere_is_refused() -> None:
    layer = nn.LSTM(3, 4)
    with tfnb.record():
        data, sizes = tfnb.placeholder(torch.randn(3, 3)), tfnb.placeholder(torch.tensor([2, 1]))
        with pytest.raises(Unsupported, match="pack it there"):
            layer(PackedSequence(data, sizes), (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)))


def test_projections_are_refused() -> None:
    layer = nn.LSTM(3, 4, proj_size=2)
    with tfnb.record():
        x, n = (
            tfnb.placeholder(torch.randn(5, 2, 3), shape=(5, 2, 3)),
            tfnb.placeholder(torch.tensor([3, 2]), shape=(2,)),
        )
        with pytest.raises(Unsupported, match="proj_size"):
            layer(pack_padded_sequence(x, n))
