"""A graph over several tasks: `python -m tests.benchmarks.bench_parts [ROW ...]`, part of `make bench-cluster`.

loops: iterations a second of a loop over 1 to 4 tasks of Dask workers (EuroSys'18, figure 11, has loops over machines
with and without a barrier in each iteration). Side by side, a `scan` whose tasks have a carried value each, which needs
no message in an iteration; and a chain, whose value goes from task to task, and whose predicate travels from the last
one to all others. cut: a training step cut in two parts, both in this process, beside the uncut one. mlp: a step of a
net of two layers, each on a task of its own, beside the same step on one task, and plain Dask actors with a layer each.
auto: a net of two branches that ``tfnb.place(step, "auto")`` puts on two tasks by the times of five traced runs, its
predicted time beside the measured one, and beside the same step on one task. Results are compared before anything is
timed.

Each row prints what it measured beside its target, and one line of JSON.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tests.benchmarks.cluster_rows import said
from tests.benchmarks.cluster_steps import workers
from tests.over_tasks import on

ITERATIONS = {"side by side": 10_000, "chain": 1_000}
TARGETS = {"side by side": 30_000, "chain": 2_000}  # iterations a second, of each number of tasks
CUT_TARGET, CUT_MS = 1.03, 10
PLAIN_TARGET = 1.0  # of the time of plain Dask actors, at most
PREDICTED_TARGET = 0.15  # of the measured time, by which a prediction may be wrong
RATE = 0.05


# -- loops ------------------------------------------------------------------------------------------------------------


def side_by_side(tasks: int, x: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
    """Each task has a value of its own; the number of rows says when they end."""

    def body(carry: Any, row: torch.Tensor) -> Any:
        new = []
        for task, mine in enumerate(carry):
            with on(task):
                new.append(mine * 0.5 + 1)
        return tuple(new), row

    return list(tfnb.scan(body, (x,) * tasks, rows)[0])


def chain(tasks: int, x: torch.Tensor, rows: torch.Tensor) -> list[torch.Tensor]:
    """One value goes through all tasks; the last one says whether there is another iteration."""

    def test(y: torch.Tensor) -> torch.Tensor:
        with on(tasks - 1):
            return y < rows.shape[0] * tasks

    def body(y: torch.Tensor) -> Any:
        for task in range(tasks):
            with on(task):
                y = y + 1
        return (y,)

    return list(tfnb.while_loop(test, body, (x,)))


LOOPS: dict[str, Callable[[int, torch.Tensor, torch.Tensor], list[torch.Tensor]]] = {
    "side by side": side_by_side, "chain": chain
}  # fmt: skip


def loops(counts: Sequence[int] = (1, 2, 3, 4), rounds: int = 3) -> None:
    """The best round of each kind and number of tasks."""
    found: dict[str, dict[int, float]] = {kind: {} for kind in LOOPS}
    for tasks in counts:
        with workers(tasks + 1) as client, tfnb.connect(client, ps=1):
            for kind, loop in LOOPS.items():
                with tfnb.record(f"{kind.replace(' ', '_')}_{tasks}") as g:
                    x = tfnb.placeholder(torch.tensor(0.0), name="x")
                    rows = tfnb.placeholder(torch.zeros(3), shape=(None,), name="rows")
                    ends = loop(tasks, x, rows)
                fed = {x: torch.tensor(0.0), rows: torch.zeros(ITERATIONS[kind])}
                short = fed | {rows: torch.zeros(20)}
                expected = tfnb.Session(g, compile="off").run(ends, short)
                torch.testing.assert_close(tfnb.run(ends, short), expected, rtol=0, atol=0)
                seconds = min(_timed(lambda ends=ends, fed=fed: tfnb.run(ends, fed)) for _ in range(rounds))
                found[kind][tasks] = ITERATIONS[kind] / seconds
                print(f"loop {kind} over {tasks}: {found[kind][tasks]:,.0f} iterations a second", flush=True)
    for kind, rates in found.items():
        print(f"loop {kind}: at least {min(rates.values()):,.0f} iterations a second (target {TARGETS[kind]:,})")
    said("parts loops", found)


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# -- steps ------------------------------------------------------------------------------------------------------------


def layers(width: int) -> tuple[nn.Module, nn.Module]:
    """The net of each task."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    return first, nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def training(name: str, width: int, batch: int) -> tuple[tfnb.Graph, Any, Any, list[Any]]:
    """A training step whose halves ask for a task each: graph, feeds, and what is fetched."""
    first, second = layers(width)
    with tfnb.record(name) as g:
        x = tfnb.placeholder(torch.randn(batch, 784), name="x")
        y = tfnb.placeholder(torch.randint(10, (batch,)), name="y")
        with on(0):
            h = first(x)
        with on(1):
            loss = F.cross_entropy(second(h), y)
        step = tfnb.train.SGD(RATE).minimize(loss)
    return g, x, y, [loss, step]


CUTS = {512: 128, 768: 128, 1024: 128}  # widths of the layers, and rows of a batch: a step below 10 ms, and one above


def cut() -> None:
    """The cut of two sizes of a step."""
    for width, batch in CUTS.items():
        _cut(width, batch)


def _cut(width: int, batch: int, rounds: int = 60) -> None:
    """The median of the ratios of pairs of steps, of which the first is the cut one every other time."""
    calls = {}
    rows, labels = torch.randn(batch, 784), torch.randint(10, (batch,))
    for executor in ("auto", "parts"):
        g, x, y, fetches = training(f"cut_{executor}_{width}", width, batch)
        session = tfnb.Session(g, compile="off", executor=executor)
        calls[executor] = lambda session=session, fetches=fetches, fed={x: rows, y: labels}: session.run(fetches, fed)
    for _ in range(5):
        losses = [call()[0] for call in calls.values()]
        torch.testing.assert_close(*losses, rtol=0, atol=0)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in sorted(calls, reverse=bool(turn % 2)):
            seconds[name].append(_timed(calls[name]))
    ratio = statistics.median(a / b for a, b in zip(seconds["parts"], seconds["auto"], strict=True))
    whole = statistics.median(seconds["auto"]) * 1e3
    goal = f"target {CUT_TARGET}, of a step of at least {CUT_MS} ms"
    print(f"a step of {whole:.1f} ms cut in two parts in one process: {ratio:.3f} of the uncut one ({goal})")
    said(f"parts cut {width}", {"ms": whole, "ratio": ratio})


# -- two layers on two tasks ----------------------------------------------------------------------------------------


class Layer:
    """A plain Dask actor: a dense layer and its updates; the first asks the second for the loss and its gradient."""

    def __init__(self, layer: nn.Linear, behind: Any = None) -> None:
        torch.set_num_threads(1)
        self.layer, self.behind = layer, behind

    async def first(self, x: Any, y: Any) -> float:
        """A step."""
        out = F.relu(self.layer(torch.from_numpy(x)))
        loss, grad = await self.behind.second(out.detach().numpy(), y)
        self._update(torch.autograd.grad(out, list(self.layer.parameters()), torch.from_numpy(grad)))
        return float(loss)

    async def second(self, h: Any, y: Any) -> tuple[float, Any]:
        """The loss of a step, and the gradient of what came."""
        given = torch.from_numpy(h).requires_grad_()
        loss = F.cross_entropy(self.layer(given), torch.from_numpy(y))
        grad, *mine = torch.autograd.grad(loss, [given, *self.layer.parameters()])
        self._update(mine)
        return float(loss.detach()), grad.numpy()

    def _update(self, grads: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, grad in zip(self.layer.parameters(), grads, strict=True):
                parameter -= RATE * grad


def dense(width: int) -> tuple[nn.Linear, nn.Linear]:
    """The two layers."""
    torch.manual_seed(0)
    return nn.Linear(width, width), nn.Linear(width, width)


def dense_step(name: str, width: int, batch: int, second: int) -> tuple[Any, Any, list[Any]]:
    """A training step whose second layer asks for a task: feeds, and what is fetched."""
    one, two = dense(width)
    with tfnb.record(name):
        x = tfnb.placeholder(torch.randn(batch, width), name="x")
        y = tfnb.placeholder(torch.randint(width, (batch,)), name="y")
        with on(0):
            h = F.relu(one(x))
        with on(second):
            loss = F.cross_entropy(two(h), y)
        step = tfnb.train.SGD(RATE).minimize(loss)
    return x, y, [loss, step]


def mlp(rounds: int = 60, width: int = 768, batch: int = 128) -> None:
    """Medians of steps taken in turn, and of their ratios."""
    rows, labels = torch.randn(batch, width), torch.randint(width, (batch,))
    with workers(3) as client:
        at = sorted(client.scheduler_info(n_workers=-1)["workers"])
        one, two = dense(width)
        behind = client.submit(Layer, two, actor=True, workers=at[0], pure=False).result(60)
        plain = client.submit(Layer, one, behind, actor=True, workers=at[1], pure=False).result(60)
        calls: dict[str, Callable[[], float]] = {
            "plain actors": lambda: plain.first(rows.numpy(), labels.numpy()).result(60)
        }
        with tfnb.connect(client, ps=1):
            for name, second in (("one task", 0), ("two tasks", 1)):
                x, y, fetches = dense_step(f"mlp_{second}", width, batch, second)
                fed = {x: rows, y: labels}
                calls[name] = lambda fetches=fetches, fed=fed: float(tfnb.run(fetches, fed)[0])
            for _ in range(5):
                losses = {name: call() for name, call in calls.items()}
                assert losses["one task"] == losses["two tasks"], losses
                torch.testing.assert_close(losses["plain actors"], losses["one task"], rtol=1e-5, atol=0)
            seconds: dict[str, list[float]] = {name: [] for name in calls}
            for turn in range(rounds):
                for name in sorted(calls, reverse=bool(turn % 2)):
                    seconds[name].append(_timed(calls[name]))
    found = {name: statistics.median(each) * 1e3 for name, each in seconds.items()}
    for name in ("one task", "plain actors"):
        found[f"of {name}"] = statistics.median(a / b for a, b in zip(seconds["two tasks"], seconds[name], strict=True))
    print(
        f"two layers on two tasks: {found['two tasks']:.1f} ms a step; on one task {found['one task']:.1f} ms, ratio "
        f"{found['of one task']:.2f}; plain Dask actors {found['plain actors']:.1f} ms, ratio "
        f"{found['of plain actors']:.2f} (target {PLAIN_TARGET})"
    )
    said("parts mlp", found)


# -- a placement by search ------------------------------------------------------------------------------------------


def branches(name: str, width: int, batch: int) -> tuple[dict[Any, torch.Tensor], list[Any]]:
    """A training step of two branches of three layers: what is fed, and what is fetched."""
    torch.manual_seed(0)

    def branch() -> nn.Module:
        sizes = (784, width, width, width)
        layers = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(sizes)]
        return nn.Sequential(*layers)

    both, head = nn.ModuleList([branch(), branch()]), nn.Linear(2 * width, 10)
    with tfnb.record(name):
        x = tfnb.placeholder(torch.randn(batch, 784), name="x")
        y = tfnb.placeholder(torch.randint(10, (batch,)), name="y")
        loss = F.cross_entropy(head(torch.cat([each(x) for each in both], 1)), y)
        step = tfnb.train.SGD(RATE).minimize(loss)
    return {x: torch.randn(batch, 784), y: torch.randint(10, (batch,))}, [loss, step]


def auto(rounds: int = 40, width: int = 1024, batch: int = 256, runs: int = 5) -> None:
    """Medians of steps on two tasks and on one, taken in turn, beside the predictions.

    Every fourth turn is traced: the prediction of the same minutes is by these traces, as the first ones may have been
    taken while the machine was more or less busy.
    """
    steps = {name: branches(f"auto_{name.replace(' ', '_')}", width, batch) for name in ("two tasks", "one task")}
    tasks = {"two tasks": 2, "one task": 1}
    found: dict[str, float] = {}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    with workers(3) as client, tfnb.connect(client, ps=1):
        for name, (fed, fetches) in steps.items():
            found[f"{name}, by formula"] = tfnb.place(fetches, "auto", tasks=tasks[name]).seconds * 1e3
            for _ in range(runs):
                tfnb.run(fetches, fed, trace=True)
            placement = tfnb.place(fetches, "auto", tasks=tasks[name])
            found[f"{name}, by {runs} traces"] = placement.seconds * 1e3
            print(f"{name}: {placement}", flush=True)
        rows = [*steps["one task"][0].values()]
        for turn in range(-3, rounds):
            losses = []
            for name in sorted(steps, reverse=bool(turn % 2)):
                keys, fetches = steps[name]
                start = time.perf_counter()
                losses.append(tfnb.run(fetches, dict(zip(keys, rows, strict=True)), trace=turn % 4 == 3)[0])
                seconds[name] += [time.perf_counter() - start] if turn >= 0 and turn % 4 != 3 else []
            assert losses[0] == losses[1] or turn >= 0, losses
        for name, (_, fetches) in steps.items():
            found[f"{name}, by traces of these minutes"] = tfnb.place(fetches, "auto", tasks=tasks[name]).seconds * 1e3
    for name, each in seconds.items():
        found[name] = statistics.median(each) * 1e3
        predicted = {
            by: ms for key, ms in found.items() if key.startswith(f"{name}, ") for by in [key[len(name) + 2 :]]
        }
        words = ", ".join(f"{ms:.1f} {by} ({ms / found[name] - 1:+.0%})" for by, ms in predicted.items())
        print(f"{name}: {found[name]:.1f} ms a step; predicted {words} (target {PREDICTED_TARGET:.0%})")
    ratio = statistics.median(a / b for a, b in zip(seconds["two tasks"], seconds["one task"], strict=True))
    print(f"two tasks take {ratio:.2f} of the time of one")
    said("parts auto", found | {"ratio": ratio})


ROWS = {"loops": loops, "cut": cut, "mlp": mlp, "auto": auto}


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or ROWS:
        ROWS[name]()


if __name__ == "__main__":
    main()
