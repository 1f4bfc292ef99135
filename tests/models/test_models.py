"""Whole models, unmodified, in training and evaluation mode: one recording equals the plain torch loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tests.models import sequence, structures, vision
from tests.models.check import Draw, Objective, check, same

Case = tuple[Callable[[], nn.Module], Objective, Draw]

# -- what is drawn, what is minimised ------------------------------------------------------------------------------


def inputs(*draws: Callable[[int], torch.Tensor]) -> Draw:
    return lambda rows: tuple(draw(rows) for draw in draws)


def floats(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda rows: torch.randn(rows, *shape)


def ids(count: int, *shape: int, low: int = 0) -> Callable[[int], torch.Tensor]:
    return lambda rows: torch.randint(low, count, (rows, *shape))


def padding(time: int) -> Callable[[int], torch.Tensor]:
    """True where a row has ended: the last place always, the first two never."""
    return lambda rows: torch.arange(time) >= torch.randint(2, time, (rows, 1))


def classified(model: nn.Module, *args: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Cross entropy of the logits (classes on the last axis) against the last input."""
    *xs, labels = args
    logits = model(*xs)
    return logits, F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def per_pixel(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> tuple[Any, torch.Tensor]:
    logits = model(x)
    return logits, F.cross_entropy(logits, labels)


def with_auxiliary(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> tuple[Any, torch.Tensor]:
    logits, aux = model(x)
    loss = F.cross_entropy(logits, labels)
    return logits, loss if aux is None else loss + 0.3 * F.cross_entropy(aux, labels)


def regressed(model: nn.Module, *args: torch.Tensor) -> tuple[Any, torch.Tensor]:
    *xs, target = args
    out = model(*xs)
    return out, F.mse_loss(out, target)


def restored(model: nn.Module, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    out = model(x)
    return out, F.smooth_l1_loss(out, x)


def variational(model: nn.Module, x: torch.Tensor, noise: torch.Tensor) -> tuple[Any, torch.Tensor]:
    parts = model(x, noise)
    return parts, structures.VAE.loss(x, *parts)


def contrasted(model: nn.Module, a: torch.Tensor, b: torch.Tensor, same: torch.Tensor) -> tuple[Any, torch.Tensor]:
    distance = model(a, b)
    return distance, torch.where(same, distance**2, F.relu(1 - distance) ** 2).mean()


def ranked(model: nn.Module, user: torch.Tensor, item: torch.Tensor, liked: torch.Tensor) -> tuple[Any, torch.Tensor]:
    scores = model(user, item)
    return scores, F.binary_cross_entropy_with_logits(scores, liked.float())


def flat_bags(weighted: bool) -> Objective:
    """Rows of five ids as one flat list with offsets."""

    def objective(model: nn.Module, rows: torch.Tensor, weights: torch.Tensor, labels: torch.Tensor) -> Any:
        offsets = torch.arange(0, rows.shape[0] * 5, 5)
        return classified(
            lambda flat, at: model(flat, at, weights.flatten() if weighted else None), rows.flatten(), offsets, labels
        )

    return objective


def on_a_graph(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """A ring over all rows, with chords."""
    count = x.shape[0]
    source = torch.arange(2 * count) % count
    target = (source + torch.arange(2 * count) // count + 1) % count
    return classified(model, x, source, target, labels)


IMAGE, LABEL = floats(3, 32, 32), ids(5)
WORDS = inputs(ids(20, 7), ids(3))
PACKED = inputs(ids(20, 7), ids(8, low=1), ids(3))

CASES: dict[str, Case] = {
    "resnet18": (
        lambda: vision.resnet18(width=4, classes=5), classified, inputs(floats(3, 64, 64), LABEL)
    ),
    "vgg": (lambda: vision.VGG(width=4, classes=5, grid=1, hidden=16, dropout=0.0), classified, inputs(IMAGE, LABEL)),
    "googlenet": (
        lambda: vision.GoogLeNet(width=2, classes=5, dropout=0.0), with_auxiliary, inputs(floats(3, 18, 18), LABEL)
    ),
    "mobilenet": (
        lambda: vision.MobileNet(widths=(4, 6, 6, 8), classes=5, dropout=0.0), classified, inputs(IMAGE, LABEL)
    ),
    "densenet": (
        lambda: vision.DenseNet(depths=(2, 2), growth=4, classes=5), classified, inputs(floats(3, 8, 8), LABEL)
    ),
    "unet": (
        lambda: vision.UNet(channels=1, width=4, depth=2), per_pixel, inputs(floats(1, 13, 10), ids(2, 13, 10))
    ),
    "unet, bilinear": (
        lambda: vision.UNet(width=4, depth=2, bilinear=True), per_pixel, inputs(floats(3, 12, 12), ids(2, 12, 12))
    ),
    "autoencoder": (lambda: vision.AutoEncoder(width=4), restored, inputs(floats(3, 12, 12))),
    "lstm": (lambda: sequence.RecurrentClassifier(nn.LSTM), classified, WORDS),
    "lstm, deep, both ways": (
        lambda: sequence.RecurrentClassifier(nn.LSTM, num_layers=2, bidirectional=True), classified, WORDS
    ),
    "lstm, projected": (lambda: _projected(), regressed, inputs(floats(6, 5), floats(6, 2))),
    "gru": (lambda: sequence.RecurrentClassifier(nn.GRU, bidirectional=True), classified, WORDS),
    "rnn": (lambda: sequence.RecurrentClassifier(nn.RNN, nonlinearity="relu"), classified, WORDS),
    "packed lstm": (sequence.PackedClassifier, classified, PACKED),
    "packed lstm, deep, both ways, sorted": (
        lambda: sequence.PackedClassifier(num_layers=2, bidirectional=True, batch_first=True, is_sorted=True),
        classified, inputs(ids(20, 7), lambda rows: torch.arange(rows, 0, -1), ids(3)),
    ),
    "packed gru": (
        lambda: sequence.PackedClassifier(nn.GRU, bidirectional=True, batch_first=True, bias=False), classified, PACKED
    ),
    "packed rnn": (lambda: sequence.PackedClassifier(nn.RNN), classified, PACKED),
    "cell in a loop": (sequence.CellLoop, regressed, inputs(floats(5, 5), floats(5))),
    "translator": (sequence.Translator, classified, inputs(ids(20, 6), ids(15, 4), ids(15, 4))),
    "encoder": (sequence.Encoder, classified, inputs(ids(20, 6), ids(20, 6))),
    "encoder, padded": (
        lambda: sequence.Encoder(causal=False, activation="gelu"), classified,
        inputs(ids(20, 6), padding(6), ids(20, 6)),
    ),
    "encoder, norm first, both masks": (
        lambda: sequence.Encoder(norm_first=True), classified, inputs(ids(20, 6), padding(6), ids(20, 6)),
    ),
    "decoder": (
        sequence.Decoder, regressed, inputs(floats(5, 8), floats(7, 8), padding(7), floats(5, 8)),
    ),
    "transformer": (sequence.Transformer, classified, inputs(ids(20, 6), ids(20, 5), ids(20, 5))),
    "attention with weights": (
        sequence.CrossAttention, regressed, inputs(floats(4, 8), floats(6, 6), floats(6, 5), floats(4, 8))
    ),
    "attention without weights": (
        lambda: sequence.CrossAttention(weights=False, add_bias_kv=True, add_zero_attn=True), regressed,
        inputs(floats(4, 8), floats(6, 6), floats(6, 5), floats(4, 8)),
    ),
    "gpt": (
        lambda: sequence.GPT(layers=2, vocabulary=20, width=12, heads=2, time=8), classified,
        inputs(ids(20, 6), ids(20, 6)),
    ),
    "gpt by hand": (
        lambda: sequence.GPT(layers=2, vocabulary=20, width=12, heads=2, time=8, by_hand=True), classified,
        inputs(ids(20, 6), ids(20, 6)),
    ),
    "vit": (
        lambda: sequence.ViT(image=16, patch=4, width=8, heads=2, layers=2, classes=5), classified,
        inputs(floats(3, 16, 16), LABEL),
    ),
    "bag, sum": (lambda: structures.Bags("sum", padding_idx=0), classified, inputs(ids(20, 4), ids(3))),
    "bag, mean": (lambda: structures.Bags("mean"), classified, inputs(ids(20, 4), ids(3))),
    "bag, max": (lambda: structures.Bags("max"), classified, inputs(ids(20, 4), ids(3))),
    "bag, offsets": (
        lambda: structures.Bags("mean"), flat_bags(False), inputs(ids(20, 5), floats(5), ids(3))
    ),
    "bag, offsets, weights": (
        lambda: structures.Bags("sum"), flat_bags(True), inputs(ids(20, 5), floats(5), ids(3))
    ),
    "recommender": (structures.Recommender, ranked, inputs(ids(12), ids(15), ids(2))),
    "vae": (structures.VAE, variational, inputs(floats(12), floats(4))),
    "graph convolution": (structures.GraphConvolution, on_a_graph, inputs(floats(5), ids(3))),
    "siamese": (structures.Siamese, contrasted, inputs(floats(6), floats(6), lambda rows: torch.rand(rows) > 0.5)),
    "tied autoencoder": (structures.TiedAutoEncoder, restored, inputs(floats(6))),
    "normed weights": (structures.normed_weights, classified, inputs(floats(6), ids(3))),
    "mixture of experts": (structures.Mixture, classified, inputs(floats(6), ids(3))),
    "norms": (structures.Norms, classified, inputs(floats(8, 6), ids(3))),
    "householder": (structures.householder, classified, inputs(floats(6), ids(3))),
    "cumulative norms": (structures.cumulative_norms, classified, inputs(floats(2, 4, 4), ids(3))),
    "resnet50": (
        lambda: vision.resnet50(width=2, classes=5), classified, inputs(floats(3, 33, 33), LABEL)
    ),
    "attention, averaged weights, both masks": (
        sequence.MaskedAttention, regressed, inputs(floats(5, 8), padding(5), floats(5, 8))
    ),
    "attention, one float mask each head": (
        lambda: sequence.MaskedAttention(per_head=True), regressed, inputs(floats(5, 8), padding(5), floats(5, 8))
    ),
    "attention, masks without weights": (
        lambda: sequence.MaskedAttention(weights=False), regressed, inputs(floats(5, 8), padding(5), floats(5, 8))
    ),
    "transformer, all masks": (
        sequence.MaskedTransformer, regressed,
        inputs(floats(6, 8), floats(5, 8), padding(6), padding(5), floats(5, 8)),
    ),
}  # fmt: skip


def _projected() -> nn.Module:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(5, 6, proj_size=2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)[0]

    return First()


EXACT = {
    "resnet18", "vgg", "googlenet", "densenet", "unet", "autoencoder", "encoder",
    "attention without weights", "vit", "bag, max", "vae", "graph convolution", "tied autoencoder",
    "mixture of experts", "norms", "resnet50", "attention, averaged weights, both masks",
    "attention, one float mask each head",
}  # fmt: skip
SLOW = {
    "resnet18", "googlenet", "densenet", "unet", "translator", "encoder, norm first, both masks", "decoder",
    "resnet50", "transformer", "transformer, all masks", "mobilenet", "gpt by hand", "vit",
    "attention, one float mask each head", "vgg", "unet, bilinear", "lstm, deep, both ways", "encoder, padded",
    "packed lstm, deep, both ways, sorted", "rnn", "gru", "packed gru", "packed rnn", "autoencoder",
    "attention with weights", "bag, mean", "bag, offsets", "attention, masks without weights", "householder",
}  # fmt: skip
# Those of the others in which a module computes something else in evaluation mode.
EVALUATED = {"norms", "cumulative norms", "normed weights"}


def in_modes(names: Iterable[str], slow: Collection[str], evaluated: Collection[str]) -> list[Any]:
    """Each model in training mode, and some in evaluation mode, too."""
    modes = [(name, training) for name in names for training in (True, False) if training or name in evaluated]
    return [
        pytest.param(
            *case, id=f"{case[0]}-{'train' if case[1] else 'eval'}", marks=[pytest.mark.slow] * (case[0] in slow)
        )
        for case in modes
    ]


@pytest.mark.parametrize(("name", "training"), in_modes(CASES, SLOW, SLOW | EVALUATED))
def test_model(name: str, training: bool) -> None:
    make, objective, draw = CASES[name]
    check(make(), objective, draw, training=training, exact=name in EXACT)


# -- what does not fit one loss ------------------------------------------------------------------------------------


def test_two_players_take_turns_over_one_graph() -> None:
    """A GAN: two optimizers over one graph, each step run by itself."""
    model = structures.GAN()
    twin = copy.deepcopy(model)
    with tfnb.record() as graph:
        real, noise = (
            tfnb.placeholder(torch.randn(4, 6), shape=("B", 6)),
            tfnb.placeholder(torch.randn(4, 4), shape=("B", 4)),
        )
        made = model.make(noise)
        judged, fooled = _judge_loss(model, real, made), _make_loss(model, made)
        judge_step = tfnb.train.Adam(1e-2, eps=1e-4).minimize(judged, list(model.judge.parameters()))
        make_step = tfnb.train.SGD(0.1).minimize(fooled, list(model.make.parameters()))
    judge = torch.optim.Adam(twin.judge.parameters(), 1e-2, eps=1e-4)
    make = torch.optim.SGD(twin.make.parameters(), 0.1)
    for rows in (4, 3, 5):
        batch = torch.randn(rows, 6), torch.randn(rows, 4)
        for step, optimizer, loss in (
            (judge_step, judge, lambda real, noise: _judge_loss(twin, real, twin.make(noise))),
            (make_step, make, lambda real, noise: _make_loss(twin, twin.make(noise))),
        ):
            tfnb.run(step, {real: batch[0], noise: batch[1]})
            twin.zero_grad()
            loss(*batch).backward()
            optimizer.step()
            same(dict(model.named_parameters()), dict(twin.named_parameters()), f"parameter after {rows} rows")
            same(dict(model.named_buffers()), dict(twin.named_buffers()), f"buffer after {rows} rows")


def _judge_loss(model: nn.Module, real: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    good, bad = model.judge(real), model.judge(made.detach())
    return F.binary_cross_entropy_with_logits(good, torch.ones_like(good)) + F.softplus(bad).mean()


def _make_loss(model: nn.Module, made: torch.Tensor) -> torch.Tensor:
    return F.softplus(-model.judge(made)).mean()


@pytest.mark.parametrize("model", [
    *(pytest.param(model, marks=pytest.mark.slow) for model in (
        lambda: sequence.GPT(layers=1, vocabulary=20, width=12, heads=2, time=8, dropout=0.3),
        lambda: sequence.GPT(layers=1, vocabulary=20, width=12, heads=2, time=8, dropout=0.3, by_hand=True),
        lambda: sequence.Encoder(layers=1, dropout=0.3),
        lambda: sequence.RecurrentClassifier(nn.GRU, num_layers=2, dropout=0.3),
    )),
    structures.VAE,
])  # fmt: skip
def test_what_a_model_draws_is_new_in_each_run_and_repeats_by_seed(model: Callable[[], nn.Module]) -> None:
    """Dropout and reparameterisation: the mean of many runs is near the mean of as many eager calls."""
    net = model()
    data = torch.randn(3, 12) if isinstance(net, structures.VAE) else torch.randint(1, 20, (3, 6))
    with tfnb.record() as graph:
        x = tfnb.placeholder(data)
        out = net(x)
        out = out[0] if isinstance(out, tuple) else out
        twice = out * 1
    runs = [torch.stack(tfnb.run([out, twice], {x: data})) for _ in range(60)]
    with tfnb.Session(graph) as again, tfnb.Session(graph) as other:
        graph.seed = 7
        first, second = ([session.run(out, {x: data}) for _ in range(2)] for session in (again, other))
    assert all(map(torch.equal, first, second))
    assert all(torch.equal(first, second) for first, second in runs)  # one draw serves all its consumers
    assert not torch.equal(runs[0], runs[1])
    with torch.no_grad():
        eager = torch.stack([parts[0] if isinstance(parts, tuple) else parts for parts in (net(data) for _ in runs)])
    got = torch.stack(runs)[:, 0]
    error = (got.var(0) + eager.var(0)).div(len(runs)).sqrt() + 1e-6
    assert ((got.mean(0) - eager.mean(0)).abs() < 6 * error).all()
    assert (got.std(0).mean() / eager.std(0).mean() - 1).abs() < 0.2
