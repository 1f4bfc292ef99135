"""A step of ``fit(mode="pipeline")`` beside the same microbatches in one process, and beside torch's own pipelines.

`python -m tests.benchmarks.cluster_pipeline [--width 512] [--rows 128] [--stages 4] [--microbatches 8] [--steps 4]
[--turns 3] [--ps 1]`. A stage is two dense layers, updated by SGD. Processes have one thread each: one for
``fit(microbatches=M)``, one for each stage of ``fit(mode="pipeline")``, each the server of its Variables (``--ps 1``:
beside a parameter server), with the notebook, and one for each stage of
`torch.distributed.pipelining` on gloo. All start from the same weights, and their weights are
compared first: ours bit for bit. Then they train in turns. A step's cost is the difference of a long and a short
training, so that no start and no end is in it.

Prints medians in milliseconds: the processor time of all processes that take part, which is what a pipeline may cost on
any number of cores, and the time on the clock; and the bubble: the schedule's idle share, and the measured one of the
cores that the stages can use. The ratios are medians of pairs. The processes of a cluster take some processor time for
each second that they live (Dask's monitors and heartbeats), which counts more for each step the busier a machine is:
that is measured between the turns, and printed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import tfnb
from tests.benchmarks.cluster_bulk import Row, _Clock
from tests.benchmarks.cluster_rows import said
from tests.benchmarks.cluster_steps import workers
from tests.over_tasks import on

TARGET = 1.15  # times the processor time of one process
RATE = 0.05
THEIRS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
LEAST = 10.0  # milliseconds of a stage's microbatch


class Sizes(NamedTuple):
    """Of the net: columns of its layers, rows of a microbatch, stages, and microbatches of a step."""

    width: int = 512
    rows: int = 128
    stages: int = 4
    microbatches: int = 8

    @property
    def batch(self) -> int:
        """Rows of a step."""
        return self.rows * self.microbatches

    @property
    def bubble(self) -> float:
        """The idle share of even stages."""
        return (self.stages - 1) / (self.microbatches + self.stages - 1)


def stages(sizes: Sizes) -> list[nn.Sequential]:
    """The layers of each stage."""
    torch.manual_seed(0)
    width = sizes.width
    return [
        nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        for _ in range(sizes.stages)
    ]


def data(sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a step, and their targets."""
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(sizes.batch, sizes.width, generator=generator) for _ in range(2))  # type: ignore[return-value]


def flat(layers: Sequence[nn.Module]) -> torch.Tensor:
    """All weights."""
    return torch.cat([parameter.detach().flatten() for layer in layers for parameter in layer.parameters()])


# -- ours -------------------------------------------------------------------------------------------------------------


class Trained:
    """The net as a step of ours; the requests of its stages are soft, so that it trains in one process, too."""

    def __init__(self, sizes: Sizes) -> None:
        self.layers, self._sizes = stages(sizes), sizes
        with tfnb.record("pipeline"):
            self._x = h = tfnb.placeholder(torch.ones(2, sizes.width), name="x", shape=("B", sizes.width))
            self._y = tfnb.placeholder(torch.ones(2, sizes.width), name="y", shape=("B", sizes.width))
            for at, layer in enumerate(self.layers):
                with on(at):
                    h = layer(h)
            with on(sizes.stages - 1):
                loss = nn.functional.mse_loss(h, self._y)
            self._train = tfnb.train.SGD(RATE).minimize(loss)

    def fit(self, steps: int, **options: Any) -> None:
        """Train so many steps of the same rows."""
        x, y = data(self._sizes)
        batches = ({self._x: x, self._y: y} for _ in range(steps))
        tfnb.fit(self._train, batches, microbatches=self._sizes.microbatches, exact=False, **options)


def alone(sizes: Sizes, pipe: Any) -> None:
    """The process of ``fit(microbatches=M)``: trains as it is told, then tells its weights if these are wanted."""
    torch.set_num_threads(1)
    net = Trained(sizes)
    while (steps := pipe.recv()) is not None:
        net.fit(steps)
        pipe.send(flat(net.layers) if steps == 1 else None)


# -- torch's ----------------------------------------------------------------------------------------------------------


def rank(at: int, port: int, sizes: Sizes, pipe: Any) -> None:
    """A stage of torch's pipelines: trains as it is told, then tells its weights if these are wanted."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, sizes.stages, is_master=at == 0, wait_for_workers=False)
    pipe.send(store.port)
    dist.init_process_group("gloo", store=store, rank=at, world_size=sizes.stages)
    x, y = data(sizes)
    layer = stages(sizes)[at]
    optimizer = torch.optim.SGD(layer.parameters(), RATE)
    stage = PipelineStage(layer, at, sizes.stages, torch.device("cpu"))
    first, last = at == 0, at == sizes.stages - 1
    schedules = {name: kind(stage, sizes.microbatches, loss_fn=nn.functional.mse_loss) for name, kind in THEIRS.items()}
    while (asked := pipe.recv()) is not None:
        name, steps = asked
        for _ in range(steps):
            optimizer.zero_grad()
            schedules[name].step(*([x] if first else []), **({"target": y} if last else {}))
            optimizer.step()
        pipe.send(flat([layer]) if steps == 1 else None)


# -- processes --------------------------------------------------------------------------------------------------------


class Processes:
    """Some processes that train together when they are told."""

    def __init__(self, targets: Sequence[Callable[..., None]], sizes: Sizes, *, meets: bool = False) -> None:
        context, port = get_context("spawn"), 0
        self._pipes, self._processes = [], []
        for at, target in enumerate(targets):
            here, there = context.Pipe()
            args = (at, port, sizes, there) if meets else (sizes, there)
            self._processes.append(context.Process(target=target, args=args, daemon=True))
            self._processes[-1].start()
            self._pipes.append(here)
            port = here.recv() if meets else 0
        self.pids = [process.pid or 0 for process in self._processes]

    def __call__(self, asked: Any) -> torch.Tensor | None:
        """Train; returns the weights after one step."""
        for pipe in self._pipes:
            pipe.send(asked)
        found = [pipe.recv() for pipe in self._pipes]
        return None if found[0] is None else torch.cat(found)

    def close(self) -> None:
        """They end."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            with suppress(OSError):
                pipe.send(None)
            process.join(20)


@contextmanager
def processes(*args: Any, **options: Any) -> Iterator[Processes]:
    """Processes that end with the block."""
    made = Processes(*args, **options)
    try:
        yield made
    finally:
        made.close()


# -- measuring --------------------------------------------------------------------------------------------------------


def measured(sizes: Sizes, steps: int, turns: int, ps: str = "stages") -> dict[str, list[Row]]:
    """The costs of a step, by the name of who takes it: ``one`` process, each of our schedules, each of torch's.

    ``idle second``: what the processes of our cluster take while nothing is asked of them.
    """
    with (
        processes([alone], sizes) as one, processes([rank] * sizes.stages, sizes, meets=True) as ranks,
        workers(sizes.stages + (ps != "stages")) as client, tfnb.connect(client, ps="stages" if ps == "stages" else 1),
    ):  # fmt: skip
        net = Trained(sizes)
        ours = [os.getpid(), *client.run(os.getpid).values()]
        ways: dict[str, tuple[Callable[[int], Any], _Clock]] = {"one": (one, _Clock(one.pids))}
        for schedule in THEIRS:
            ways[schedule] = partial(net.fit, mode="pipeline", schedule=schedule), _Clock(ours)
            ways[f"torch {schedule}"] = lambda steps, name=schedule: ranks((name, steps)), _Clock(ranks.pids)
        for schedule in THEIRS:  # equal first
            expected, theirs = one(1), ranks((schedule, 1))
            ways[schedule][0](1)
            assert expected is not None and theirs is not None
            torch.testing.assert_close(flat(net.layers), expected, rtol=0, atol=0)
            torch.testing.assert_close(theirs, expected, rtol=1e-4, atol=1e-6)
        rows: dict[str, list[Row]] = {name: [] for name in (*ways, "idle second")}
        for run, _ in ways.values():
            run(2)
        idle = ways["1f1b"][1]
        for _ in range(turns):
            rows["idle second"].append(idle(partial(time.sleep, 1.0)))
            for name, (run, clock) in ways.items():
                some, more = clock(partial(run, steps)), clock(partial(run, 3 * steps))
                rows[name].append(Row(*((b - a) / (2 * steps) for a, b in zip(some, more, strict=True))))
        return rows


def show(sizes: Sizes, rows: dict[str, list[Row]]) -> None:
    """Print medians, and ratios of pairs."""
    found: dict[str, Any] = {}
    stage = statistics.median(row.processors for row in rows["one"]) / (sizes.stages * sizes.microbatches)
    cores = min(os.cpu_count() or 1, sizes.stages)
    print(
        f"{sizes}: {stage:.1f} ms of a stage's microbatch (at least {LEAST} are meant); {os.cpu_count()} cores; bubble "
        f"by the schedule {sizes.bubble:.3f}"
    )
    idle_second = statistics.median(row.processors for row in rows.pop("idle second"))
    print(f"the idle cluster takes {idle_second:.0f} ms of processor time a second")
    for name, each in rows.items():
        wall, processors = (statistics.median(values) for values in zip(*each, strict=True))
        ratio = statistics.median(a.processors / b.processors for a, b in zip(each, rows["one"], strict=True))
        faster = statistics.median(b.wall / a.wall for a, b in zip(each, rows["one"], strict=True))
        idle = 1 - processors / (wall * (1 if name == "one" else cores))
        found[name] = {
            "wall": wall, "processors": processors, "ratio": ratio, "faster": faster, "idle": idle
        }  # fmt: skip
        print(
            f"{name:11} {processors:8.1f} processors {wall:8.1f} wall; {ratio:.3f} of one process's processor time "
            f"(target {TARGET}), {faster:.2f} times as fast, idle {idle:.2f}"
        )
    said(
        "pipeline",
        {"sizes": sizes._asdict(), "stage": stage, "bubble": sizes.bubble, "idle second": idle_second, "rows": found},
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in Sizes._field_defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--ps", choices=("stages", "1"), default="stages")
    options = parser.parse_args()
    sizes = Sizes(*(getattr(options, name) for name in Sizes._fields))
    torch.set_num_threads(1)
    show(sizes, measured(sizes, options.steps, options.turns, options.ps))


if __name__ == "__main__":
    main()
