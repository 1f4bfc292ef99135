"""A language model of words, in parts: `notebooks/evaluation/language_model.ipynb`, after figure 9 of OSDI'16.

The text is that of Python's own `help()`. An LSTM is the work of one task. The tables of the embedding and of the
softmax lie in 1 to 8 shards, each on a task of its own, which stands for a parameter server: it gathers rows,
multiplies by its part of the softmax, or gathers rows of sampled classes, and computes the gradients of its part.
"""

from __future__ import annotations

import functools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tests.benchmarks.bench_wavefront import LINK, RUNS
from tests.benchmarks.virtual_parts import Profile, VirtualStep
from tests.over_tasks import on
from tfnb.execution.dataflow.executor import Dataflow
from tfnb.passes import step_graph
from tfnb.passes.flow.step_flow import in_parts

TIME, RATE, PIECES = 20, 0.2, 8  # words of a row; the rate of Adagrad; batches of the text that is held back
LESS = 78  # the paper's 40,000 classes over its 512 samples
LOSSES = ("full", "sampled")


class Sizes(NamedTuple):
    """Classes, the width of embedding and LSTM, and rows of a batch."""

    classes: int
    width: int
    batch: int

    @property
    def sampled(self) -> int:
        """Sampled classes, in the paper's ratio."""
        return round(self.classes / LESS)


@functools.cache
def words(classes: int) -> torch.Tensor:
    """The words of the text, int64 [N], numbered from the most frequent one on; rare words are one class."""
    text = tfnb.datasets.python_docs()
    found = re.findall(r"[a-z_]+|[0-9]+|[^\sa-z0-9_]", text.decode(text.tokens).lower())
    known = {word for word, _ in Counter(found).most_common(classes - 1)}
    assert len(known) == classes - 1, "the text has fewer words"
    kept = [word if word in known else "" for word in found]
    numbers = {word: number for number, (word, _) in enumerate(Counter(kept).most_common())}
    return torch.tensor([numbers[word] for word in kept])


def batches(sizes: Sizes, seed: int, *, is_held_back: bool = False) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random pieces of the first nine tenths of the text, or of the last one: words [TIME, B], and those after them."""
    text = words(sizes.classes)
    border = len(text) * 9 // 10
    text = text[border:] if is_held_back else text[:border]
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - TIME - 1, (sizes.batch,), generator=generator)
        rows = text[starts + torch.arange(TIME + 1).unsqueeze(1)]
        yield rows[:-1], rows[1:].flatten()


class Initial:
    """Initial values of a seed: tables of the embedding and of the softmax, its biases, and the LSTM."""

    def __init__(self, sizes: Sizes, seed: int) -> None:
        torch.manual_seed(seed)
        self.lstm = nn.LSTM(sizes.width, sizes.width)
        self.tables = [torch.randn(sizes.classes, sizes.width) * 0.1 for _ in range(2)]
        self.tables.append(torch.zeros(sizes.classes))


class ShardedModel:
    """The model in shards: its training step with a loss, and the mean full softmax loss."""

    def __init__(self, sizes: Sizes, shards: int, loss: str, seed: int = 0) -> None:
        start = Initial(sizes, seed)
        x, y = next(batches(sizes, 0))
        with tfnb.record(f"{loss}_{shards}") as graph:
            feeds = [tfnb.placeholder(each, shape=each.shape) for each in (x, y)]
            embedding, weights, biases = (
                [self._shard(table[at::shards].clone(), at) for at in range(shards)] for table in start.tables
            )
            with on(0):
                hidden, _ = start.lstm(tfnb.nn.embedding_lookup(embedding, feeds[0]))
                given = weights, biases, feeds[1], hidden.flatten(0, 1)
                full = wanted = tfnb.nn.sharded_softmax_loss(*given).mean()
                if loss == "sampled":
                    wanted = tfnb.nn.sampled_softmax_loss(*given, sizes.sampled, sizes.classes).mean()
            train = tfnb.train.Adagrad(RATE, initial_accumulator_value=0.1).minimize(wanted)
        self.graph, self.feeds, self.full, self.loss, self.train = graph, feeds, full, wanted, train

    @staticmethod
    def _shard(values: torch.Tensor, at: int) -> tfnb.Variable:
        with on(1 + at):
            return tfnb.Variable(values)

    def step(self, executor: str = "auto") -> Callable[..., float]:
        """A training step of words and following words, which returns the loss."""
        call = tfnb.Session(self.graph, compile="off", executor=executor).make_callable(
            [self.loss, self.train], self.feeds
        )
        return lambda *batch: float(call(*batch)[0])

    def evaluated(self) -> Callable[..., float]:
        """The mean full softmax loss of words and following words."""
        call = tfnb.Session(self.graph, compile="off").make_callable(self.full, self.feeds)
        return lambda *batch: float(call(*batch))


class PlainModel:
    """The model in plain PyTorch, in one piece."""

    def __init__(self, sizes: Sizes, loss: str, seed: int = 0) -> None:
        start = Initial(sizes, seed)
        self.lstm, self.sizes, self.name = start.lstm, sizes, loss
        self.embedding, self.weights, self.biases = map(nn.Parameter, start.tables)
        parameters = [self.embedding, self.weights, self.biases, *self.lstm.parameters()]
        self.optimizer = torch.optim.Adagrad(parameters, RATE, initial_accumulator_value=0.1)

    def _hidden(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.lstm(F.embedding(x, self.embedding))[0]
        return hidden.flatten(0, 1)

    def step(self) -> Callable[..., float]:
        """As `ShardedModel.step`. Sampled classes are drawn by `tfnb.nn` here, too."""

        def call(x: torch.Tensor, y: torch.Tensor) -> float:
            given = self.weights, self.biases, y, self._hidden(x)
            if self.name == "sampled":
                loss = tfnb.nn.sampled_softmax_loss(*given, self.sizes.sampled, self.sizes.classes).mean()
            else:
                loss = F.cross_entropy(F.linear(given[3], self.weights, self.biases), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            return float(loss.detach())

        return call

    def evaluated(self) -> Callable[..., float]:
        """As `ShardedModel.evaluated`."""

        def call(x: torch.Tensor, y: torch.Tensor) -> float:
            with torch.no_grad():
                return float(F.cross_entropy(F.linear(self._hidden(x), self.weights, self.biases), y))

        return call


def virtual_seconds(model: ShardedModel, sizes: Sizes) -> tuple[float, int]:
    """Seconds of forward pass and gradients on the virtual clock, and bytes that go from part to part.

    The loss on the clock is that of a run in one piece. No Variable is written.
    """
    batch, fetches = next(batches(sizes, 0)), [model.loss.value, model.train.value]
    program = Dataflow(in_parts(step_graph(model.graph, fetches, [feed.value for feed in model.feeds])))
    storages, profile = [variable.kept for variable in program.variables], Profile()
    wanted = tfnb.Session(model.graph, compile="off").run(model.full, dict(zip(model.feeds, batch, strict=True)))
    for number in range(1 + RUNS):
        run = VirtualStep(program, lambda source, to: LINK, profile=profile if number else Profile())
        found = run.run(batch, storages)[0]
        if model.loss is model.full:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0.0)
    timed = VirtualStep(program, lambda source, to: LINK, profile.medians)
    timed.run(batch, storages)
    return timed.now, timed.sent


class WordTraining:
    """A training on the pieces of text of a seed: the losses of its steps, and the seconds of each."""

    def __init__(self, model: ShardedModel | PlainModel, sizes: Sizes, seed: int, *executor: str) -> None:
        self._step, self._evaluated = model.step(*executor), model.evaluated()
        self._sizes, self._source = sizes, batches(sizes, seed)
        self.losses, self.seconds = list[float](), list[float]()

    def go_on(self, steps: int, seconds: float = 0.0) -> float:
        """Train until there are so many steps and so many seconds of them; the full softmax loss of the text that was
        held back.
        """
        while len(self.losses) < steps or self.spent < seconds:
            batch = next(self._source)
            start = time.perf_counter()
            self.losses.append(self._step(*batch))
            self.seconds.append(time.perf_counter() - start)
        rest = batches(self._sizes, 0, is_held_back=True)
        return sum(self._evaluated(*next(rest)) for _ in range(PIECES)) / PIECES

    @property
    def spent(self) -> float:
        """Seconds of all steps but the first, which prepares what later ones use."""
        return sum(self.seconds[1:])

    @property
    def rates(self) -> list[float]:
        """Words a second of each step but the first two."""
        return [TIME * self._sizes.batch / seconds for seconds in self.seconds[2:]]
