"""Eight kinds of models on three shapes of clusters: a run is bitwise the local one, a sync fit is near it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tests.cluster.conftest import worker_processes

pytestmark = pytest.mark.slow

ROWS, BATCH = 27, 8  # the last batch of a pass has 3 rows


class Kind(NamedTuple):
    """A model ready to train: what is fetched and watched, what is fed, and its state."""

    train: Any
    loss: Any
    feeds: dict[Any, torch.Tensor]
    state: Callable[[], list[torch.Tensor]]
    seen: tuple[Any, ...] = ()
    is_divided: bool = True  # what two tasks compute of halves is what one computes of the whole
    said: str = ""  # if something other than random numbers would make a difference
    gathered: str = ""  # an op that one task does with all rows where tasks sum in mid-step


def _state(*parts: Any) -> Callable[[], list[torch.Tensor]]:
    return lambda: [
        t.detach().clone()
        for part in parts
        for t in (part.state_dict().values() if isinstance(part, nn.Module) else [part.value()])
    ]


def _rows(*size: int) -> torch.Tensor:
    return torch.randn(ROWS, *size, dtype=torch.float64)


def _feeds(data: torch.Tensor, labels: torch.Tensor) -> tuple[Any, Any]:
    return tfnb.placeholder(data[:5], name="x"), tfnb.placeholder(labels[:5], name="y")


def dense() -> Kind:
    """Two layers and Adam."""
    model, data, labels = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double(), _rows(4), _labels(3)
    with tfnb.record("dense"):
        x, y = _feeds(data, labels)
        loss = F.cross_entropy(model(x), y)
        train = tfnb.train.Adam(1e-2).minimize(loss)
    return Kind(train, loss, {x: data, y: labels}, _state(model))


def normalized() -> Kind:
    """Convolutions with batch norm that trains: statistics are of the rows that a task sees."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3)).double()
    data, labels = _rows(1, 6, 6), _labels(3)
    with tfnb.record("normalized"):
        x, y = _feeds(data, labels)
        loss = F.cross_entropy(model(x), y)
        train = tfnb.train.Momentum(0.05, 0.9).minimize(loss)
    return Kind(train, loss, {x: data, y: labels}, _state(model), is_divided=False, said="batch norm in training")


def dropped() -> Kind:
    """Attention with dropout: each task has random numbers of its own."""
    torch.manual_seed(1)
    block, head = nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True).double(), nn.Linear(8, 3).double()
    data, labels = _rows(5, 8), _labels(3)
    with tfnb.record("dropped"):
        x, y = _feeds(data, labels)
        loss = F.cross_entropy(head(block(x).mean(1)), y)
        train = tfnb.train.AdamW(1e-3).minimize(loss)
    return Kind(train, loss, {x: data, y: labels}, _state(block, head), is_divided=False, gathered="_unsafe_view")


def embedded() -> Kind:
    """A table that is looked up, with sparse rows, and a dense head under another optimizer."""
    table, head = nn.Embedding(50, 4).double(), nn.Linear(4, 3).double()
    words, labels = torch.randint(0, 50, (ROWS, 3)), _labels(3)
    with tfnb.record("embedded"):
        x, y = _feeds(words, labels)
        loss = F.cross_entropy(head(table(x).mean(1)), y)
        rows = tfnb.train.Adagrad(0.1).minimize(loss, list(table.parameters()))
        dense = tfnb.train.SGD(0.1).minimize(loss, list(head.parameters()))
        train = tfnb.group(rows, dense)
    return Kind(train, loss, {x: words, y: labels}, _state(table, head), gathered="slices")


def recurrent() -> Kind:
    """A cell in a loop of the graph."""
    cell, head = nn.GRUCell(2, 5).double(), nn.Linear(5, 3).double()
    data, labels = _rows(4, 2), _labels(3)
    with tfnb.record("recurrent"):
        x, y = _feeds(data, labels)
        init = (0, torch.zeros(x.shape[0], 5, dtype=torch.float64))
        _, h = tfnb.while_loop(lambda t, h: t < 4, lambda t, h: (t + 1, cell(x[:, t], h)), init)
        loss = F.cross_entropy(head(h), y)
        train = tfnb.train.RMSProp(1e-2).minimize(loss)
    return Kind(train, loss, {x: data, y: labels}, _state(cell, head), gathered="while")


def branching() -> Kind:
    """A branch that each step takes by its own data: the whole batch decides, or the part that a task has."""
    model, data, labels = nn.Linear(4, 1).double(), _rows(4), _rows(1)
    with tfnb.record("branching"):
        x, y = _feeds(data, labels)
        error = model(x) - y
        loss = tfnb.cond(data_mean(x) > 0, lambda: error.square().mean(), lambda: error.abs().mean() * 2)
        train = tfnb.train.Adam(1e-2).minimize(loss)
    return Kind(train, loss, {x: data, y: labels}, _state(model), said="is no mean over rows", gathered="cond")


def data_mean(x: Any) -> Any:
    """A number that hangs on all rows."""
    return x[:, 0].sum()


def scheduled() -> Kind:
    """A frozen layer, a rate that falls, an average that follows the weights, and gradients that are clipped."""
    model, data, labels = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double(), _rows(4), _labels(3)
    model[0].requires_grad_(False)
    rate = tfnb.train.warmup(3, tfnb.train.cosine_decay(0.2, 20))
    average = tfnb.train.ExponentialMovingAverage(0.9)
    with tfnb.record("scheduled"):
        x, y = _feeds(data, labels)
        loss = F.cross_entropy(model(x), y)
        optimizer = tfnb.train.Nesterov(rate, 0.9)
        pairs = optimizer.compute_gradients(loss)
        grads, _ = tfnb.clip_by_global_norm([g for g, _ in pairs], 0.5)
        step = optimizer.apply_gradients(list(zip(grads, [v for _, v in pairs], strict=True)))
        with tfnb.control_dependencies([step]):
            train = average.apply()
    return Kind(train, loss, {x: data, y: labels}, _state(model))


def recorded_torch() -> Kind:
    """A loop as PyTorch writes it: two optimizers of torch, one for each layer, and an LSTM."""
    lstm, head = nn.LSTM(3, 4, batch_first=True).double(), nn.Linear(4, 3).double()
    data, labels = _rows(4, 3), _labels(3)
    first = torch.optim.Adam(lstm.parameters(), 1e-2)
    second = torch.optim.SGD(head.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)
    with tfnb.record("torch"):
        x, y = _feeds(data, labels)
        first.zero_grad(), second.zero_grad()
        loss = F.cross_entropy(head(lstm(x)[0][:, -1]), y)
        loss.backward()
        train = tfnb.group(first.step(), second.step())
    return Kind(train, loss, {x: data, y: labels}, _state(lstm, head))


def _labels(classes: int) -> torch.Tensor:
    return torch.randint(0, classes, (ROWS,))


KINDS = [dense, normalized, dropped, embedded, recurrent, branching, scheduled, recorded_torch]


def made(kind: Callable[[], Kind]) -> Kind:
    """The same model each time."""
    torch.manual_seed(0)
    return kind()


class Trained(NamedTuple):
    """What training gave: watched values, and the state."""

    losses: list[Any]
    state: list[torch.Tensor]


def by_runs(kind: Kind) -> Trained:
    """Two passes, step by step."""
    losses = []
    for start in [*range(0, ROWS, BATCH)] * 2:
        part = {key: rows[start : start + BATCH] for key, rows in kind.feeds.items()}
        losses.append(tfnb.run([kind.train, kind.loss], part)[1])
    return Trained(losses, kind.state())


def by_fit(kind: Kind, exact: bool | None = None) -> Trained:
    """Three passes."""
    done = tfnb.fit(kind.train, kind.feeds, epochs=3, batch_size=BATCH, watch={"loss": kind.loss}, exact=exact)
    return Trained([entry["loss"] for entry in done.history], kind.state())


@pytest.fixture(scope="module")
def here() -> dict[tuple[Any, Any], Trained]:
    """What this process makes of each kind, with as many threads as a task: some kernels sum by thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {(kind, how): how(made(kind)) for kind in KINDS for how in (by_runs, by_fit)}
    finally:
        torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=[(1, 1), (2, 1), (2, 2)], ids=["1,1", "2,1", "2,2"])
def there(request: pytest.FixtureRequest, here: Any) -> Iterator[Any]:
    """A connected cluster of that many compute tasks and servers."""
    tasks, servers = request.param
    with (
        worker_processes(tasks + servers) as client,
        tfnb.connect(client, ps=servers, timeout=180) as connected,
    ):
        assert (len(connected.tasks), len(connected.servers)) == (tasks, servers)
        yield connected


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_run_is_bitwise_that_of_here(here, there, kind):
    expected, found = here[kind, by_runs], pulled(there, by_runs, made(kind))
    assert all(torch.equal(a, b) for a, b in zip(found.losses, expected.losses, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found.state, expected.state, strict=True))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_sync_fit_is_bitwise_that_of_here_on_one_task_and_close_on_two(here, there, kind):
    model = made(kind)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        expected, found = here[kind, by_fit], pulled(there, by_fit, model)
    texts = [str(one.message) for one in said if "cannot be divided by rows" not in str(one.message)]
    assert [model.said in text for text in texts] == [True] * (len(there.tasks) > 1 and bool(model.said))
    if len(there.tasks) == 1:
        assert all(torch.equal(a, b) for a, b in zip(found.state, expected.state, strict=True))
    elif model.is_divided:
        for a, b in zip(found.state, expected.state, strict=True):
            assert bool(((a - b).abs() <= 1e-12 * (1.0 + b.abs())).all())
    else:
        assert all(bool(t.isfinite().all()) for t in found.state), "statistics and random numbers are of each task"
    if len(there.tasks) == 1 or model.is_divided:
        assert found.losses == pytest.approx(expected.losses, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_exact_fit_is_that_of_here_with_batch_norm_and_dropout(here, there, kind):
    model = made(kind)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        expected, found = here[kind, by_fit], pulled(there, partial(by_fit, exact=True), model)
    is_told = len(there.tasks) > 1 and bool(model.gathered)
    assert [f"exact=True: {model.gathered} (" in str(one.message) for one in said] == [True] * is_told
    for a, b in zip(found.state, expected.state, strict=True):
        assert bool(((a - b).abs() <= 1e-11 * (1.0 + b.abs())).all())
    assert found.losses == pytest.approx(expected.losses, rel=1e-11)


def pulled(cluster: Any, how: Callable[[Kind], Trained], kind: Kind) -> Trained:
    """What the cluster makes of it."""
    found = how(kind)
    cluster.pull()
    return Trained(found.losses, kind.state())
