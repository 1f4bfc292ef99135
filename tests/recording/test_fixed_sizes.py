"""Sizes that a recording fixed: the run's error repeats the line; functions of torch that need not fix them do not."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tfnb.errors import ShapeError


def _arange_of_len(x: torch.Tensor) -> torch.Tensor:
    return x + torch.arange(len(x))[:, None]


def _loop(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([row.sum() for row in x])


def _equal_rows(x: torch.Tensor) -> torch.Tensor:
    return x + torch.ones(4, 1)


@pytest.mark.parametrize("shape", [None, (None, 3)])
@pytest.mark.parametrize(
    ("function", "line"), [(_arange_of_len, r"len\(x\)"), (_loop, "for row in x"), (_equal_rows, r"ones\(4, 1\)")]
)
def test_a_feed_of_another_size_is_told_the_line_that_fixed_it(function, line, shape) -> None:
    with pytest.warns(UserWarning, match="became the constant 4"), tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 3), shape=shape)
        y = function(x)
    assert torch.equal(tfnb.run(y, {x: torch.ones(4, 3)}), function(torch.ones(4, 3)))
    with pytest.raises(ShapeError, match=rf"axis 0 varied, and became the constant 4 at (.|\n)*{line}") as raised:
        tfnb.run(y, {x: torch.ones(5, 3)})
    assert "shape=(None" not in str(raised.value)


def test_an_axis_that_never_varied_is_advised_to() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 3))
        y = x * 2
    with pytest.raises(ShapeError, match=r"axis 1 is fixed by its recording; placeholder\(sample, shape=\(None"):
        tfnb.run(y, {x: torch.ones(4, 5)})


def test_a_saved_graph_keeps_the_line(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="became the constant 4"), tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(4, 3), name="x")
        y = _arange_of_len(x)
    g.save(tmp_path / "graph.json")
    loaded = tfnb.Graph.load(tmp_path / "graph.json")
    with pytest.raises(ShapeError, match=r"axis 0 varied(.|\n)*len\(x\)"):
        tfnb.Session(loaded).run(y.name, {"x": torch.ones(5, 3)})


@pytest.mark.parametrize("sample", [(2, 3, 8, 8), (3, 3, 8, 8), (2, 2, 8, 8), (5, 1, 8, 8), (2, 3, 4, 6, 5)])
@pytest.mark.parametrize("corners", [True, False])
def test_affine_grid_varies_in_the_batch(sample, corners) -> None:
    space = len(sample) - 2
    layer = torch.nn.Linear(sample[-1], space * (space + 1))

    def warped(x: torch.Tensor) -> torch.Tensor:
        theta = layer(x.flatten(1, -2)[:, 0]).view(-1, space, space + 1)
        return F.grid_sample(x, F.affine_grid(theta, x.size(), align_corners=corners), align_corners=corners)

    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(sample))
        y = warped(x)
    for rows in (1, 2, 7):
        value = torch.randn(rows, *sample[1:])
        torch.testing.assert_close(tfnb.Session(g).run(y, {x: value}), warped(value), rtol=1e-4, atol=1e-5)
    with pytest.raises(ShapeError, match="B >= 1"):
        tfnb.run(y, {x: torch.randn(0, *sample[1:])})


_KEPT: dict[torch.Size, torch.Tensor] = {}


def _kept_by_shape(x: torch.Tensor) -> torch.Tensor:
    if x.shape not in _KEPT:
        _KEPT[x.shape] = torch.ones(3)
    return x + _KEPT[x.shape]


@functools.lru_cache(maxsize=8)
def _encoding(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(shape[1]).expand(shape)


@pytest.mark.parametrize(
    ("function", "line"), [(_kept_by_shape, "x.shape not in _KEPT"), (lambda x: x + _encoding(x.shape), "_encoding")]
)
def test_a_varying_size_as_the_key_of_a_cache_names_the_line(function, line: str) -> None:
    with pytest.raises(TypeError) as raised, tfnb.record():
        function(tfnb.placeholder(torch.ones(4, 3)))
    note = "".join(raised.value.__notes__)
    assert line in note
    assert "shape=" in note
    _encoding.cache_clear()
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 3))
        y = x + _encoding.__wrapped__(x.shape)
    assert torch.equal(tfnb.run(y, {x: torch.ones(6, 3)}), 1 + torch.arange(3.0).expand(6, 3))


class _LanguageModel(nn.Module):
    """The recurrent model of pytorch/examples' word_language_model."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.0), nn.Embedding(11, 6)
        self.rnn, self.decoder = nn.LSTM(6, 8, 2), nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor, hidden):
        out, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return F.log_softmax(self.decoder(self.drop(out)).view(-1, 11), dim=1), hidden


def test_a_recurrent_language_model_varies_in_length_and_batch() -> None:
    torch.manual_seed(0)
    model = _LanguageModel()

    def step(tokens, targets, hidden):
        out, hidden = model(tokens, tuple(h.detach() for h in hidden))
        loss = F.nll_loss(out, targets)
        return [loss, *hidden, *torch.autograd.grad(loss, list(model.parameters()))]

    with tfnb.record() as g:
        tokens = tfnb.placeholder(torch.randint(11, (5, 4)), shape=("T", "N"))
        targets = tfnb.placeholder(torch.randint(11, (20,)))
        hidden = [tfnb.placeholder(torch.zeros(2, 4, 8), shape=(2, "N", 8)) for _ in range(2)]
        out = step(tokens, targets, hidden)
    for length, batch in ((5, 4), (3, 4), (7, 2), (1, 1)):
        given = torch.randint(11, (length, batch)), torch.randint(11, (length * batch,))
        states = [torch.randn(2, batch, 8) for _ in range(2)]
        found = tfnb.Session(g).run(out, dict(zip([tokens, targets, *hidden], [*given, *states], strict=True)))
        torch.testing.assert_close(found, [x.detach() for x in step(*given, states)], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("center", [True, False])
def test_a_spectrogram_and_its_inverse_vary_in_length(center: bool) -> None:
    window = torch.ones(16) if not center else torch.hann_window(16)

    def filtered(x: torch.Tensor) -> torch.Tensor:
        found = torch.stft(x, 16, hop_length=8, window=window, return_complex=True, center=center)
        return torch.istft(found * 0.5, 16, hop_length=8, window=window, center=center, length=x.shape[-1])

    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(2, 64), shape=(None, None))
        y = filtered(x)
    for rows, length in ((3, 64), (2, 48), (1, 96)):
        value = torch.randn(rows, length)
        torch.testing.assert_close(tfnb.Session(g).run(y, {x: value}), filtered(value), rtol=1e-4, atol=1e-5)
