"""A GPT of 12 layers whose weights and Adam state are four times the budget: packs beside virtualised memory.

All rows run the same pieces, over the same microbatches, and differ in the order of tasks and in who leaves the device.
Bytes are those of the plan, and where a row is carried out those that were copied. Times are of the virtual clock:
processor time of each task as measured here, copies at a rate that stands to the arithmetic of these tasks as 12 GB/s
stand to 11.3 TFLOPS. --real: the first row and the last one with lanes whose copies take as long.

    python -m tests.benchmarks.bench_packs [--layers 12] [--width 128] [--steps 3] [--real]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from math import inf
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tfnb
from tests.benchmarks.report import machine
from tfnb.execution import pack_step
from tfnb.execution.copy_lanes import CopyLanes
from tfnb.execution.pack_step import PackPrograms, PackStep
from tfnb.memory.lane_clock import LaneTimes, lane_times
from tfnb.memory.machine_rates import MachineRates
from tfnb.memory.moves import ON_DEMAND, TRIED, MoveKind, MovePolicy, Schedule, schedule
from tfnb.memory.pack_tasks import Role
from tfnb.memory.residency import Victims
from tfnb.passes import step_graph

LINK, FLOPS = 12e9, 11.3e12  # bytes and floating-point operations a second of the device that is imitated
CALCULATOR = MachineRates("12 GB/s : 11.3 TFLOPS", link=LINK, memory=inf, flops=FLOPS, start=0)
WORDS, TIME, ROWS, MICROBATCHES = 256, 64, 4, 8
GROUPED: Mapping[str, bool] = {}
PROGRAM: Mapping[str, bool] = {"grouped": False, "just_in_time": False}
LRU = MovePolicy(Victims.LRU, 0)
ORDERS: dict[str, tuple[Mapping[str, bool], tuple[MovePolicy, ...]]] = {
    "LRU, clean written back": (PROGRAM, (replace(LRU, writes_back=True),)),
    "LRU, clean written back, prefetch": (PROGRAM, (replace(LRU, ahead=1, writes_back=True),)),
    "LRU, clean dropped": (PROGRAM, (LRU,)),
    "farthest next use, prefetch": (PROGRAM, (MovePolicy(),)),
    "grouped, LRU": ({"just_in_time": False}, (LRU,)),
    "grouped, farthest next use, prefetch": ({"just_in_time": False}, (MovePolicy(),)),
    "grouped, update just in time, no prefetch": (GROUPED, (ON_DEMAND,)),
    "grouped, update just in time, prefetch of one": (GROUPED, (MovePolicy(),)),
    "grouped, update just in time, prefetch": (GROUPED, TRIED),
}
"""The order of tasks, and the policies of which the quickest is taken."""
FIRST, LAST = next(iter(ORDERS)), "grouped, update just in time, prefetch"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.first(x)).view(*x.shape[:2], 3, 4, x.shape[2] // 4).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Parameter(torch.randn(TIME, width) / 50)
        self.h = nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x) + self.places
        for block in self.h:
            x = block(x)
        return self.head(self.norm(x))


@dataclass
class GptTraining:
    """The training, cut into packs. rows: of a whole step."""

    layers: int = 12
    width: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        net = Transformer(self.layers, self.width)
        ids = torch.randint(0, WORDS, (ROWS * MICROBATCHES, TIME + 1))
        rows, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        with tfnb.record() as self.graph:
            x, y = tfnb.placeholder(rows[:ROWS]), tfnb.placeholder(labels[:ROWS])
            loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten())
            train = tfnb.train.Adam(1e-3).minimize(loss)
        self.programs = PackPrograms(step_graph(self.graph, (loss.value, train.value), (x.value, y.value)))
        self.feeds = {x.value: rows, y.value: labels}
        self.fed, self.fetches = [x, y], [loss, train]
        steps = self.step(GROUPED), self.step(PROGRAM)  # of a small net the largest task needs more than a quarter
        self.budget = max(steps[0].state_bytes // 4, *(step.least for step in steps))

    def step(self, order: Mapping[str, bool]) -> PackStep:
        return PackStep(self.programs, (ROWS,) * MICROBATCHES, **order)

    def planned(self, name: str, step: PackStep, clock: Callable[[PackStep, Schedule], LaneTimes]) -> Schedule:
        """The quickest of the row's policies by a clock."""
        plans = [schedule(step.tasks, step.sizes, self.budget, policy) for policy in ORDERS[name][1]]
        return min(plans, key=lambda plan: clock(step, plan).end)

    def ran(self, name: str) -> pack_step.PackRun:
        """One step carried out; nothing is written."""
        step = self.step(ORDERS[name][0])
        plan = self.planned(name, step, PackStep.times)
        done, _ = step.compute(self.feeds, {v: v.storage for v in self.programs.variables}, plan, self.budget)
        assert done.loaded + done.stored == plan.moved and done.most <= plan.most
        return done


def seconds_of(made: GptTraining, steps: int) -> tuple[dict[tuple[str, int], float], float]:
    """The median processor time of each piece, and bytes a second that stand to its arithmetic as on the device."""
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(steps):
        for task, lasted in made.ran(LAST).seconds.items():
            found.setdefault((task.piece.phase, task.piece.pack), []).append(lasted)
    with FlopCounterMode(display=False) as counter:
        tasks = [(task.piece.phase, task.piece.pack) for task in made.ran(LAST).seconds]
    medians = {piece: statistics.median(each) for piece, each in found.items()}
    return medians, LINK / FLOPS * counter.get_total_flops() / sum(medians[piece] for piece in tasks)


def compared(made: GptTraining, steps: int) -> dict[str, dict[str, Any]]:
    """Bytes and times of each order and policy, the times in units of the last one as well.

    by arithmetic: the time on a device that does nothing but copy and calculate, in units of that of its tasks. of the
    uncut: in units of that of the step that is not cut, which does nothing anew. waits: of which tasks wait, and for
    what. halved: of twice as many microbatches.
    """
    medians, rate = seconds_of(made, steps)

    def measured(step: PackStep, plan: Schedule, part: float = 1.0) -> LaneTimes:
        return lane_times(
            plan, step.tasks, step.sizes, rate * part, lambda task: medians[task.piece.phase, task.piece.pack]
        )  # fmt: skip

    rows: dict[str, dict[str, Any]] = {}
    for name, (order, _) in ORDERS.items():
        step = made.step(order)
        plan = made.planned(name, step, measured)
        ends = [measured(step, plan, part).end for part in (1, 0.5, 0.25)]
        rows[name] = {"MB": plan.moved / 1e6, **units(step, plan), "seconds": ends, **by_arithmetic(made, name, step)}
    for row in rows.values():
        row["times the last"] = [one / last for one, last in zip(row["seconds"], rows[LAST]["seconds"], strict=True)]
    computing = sum(medians[task.piece.phase, task.piece.pack] for task in made.step(GROUPED).tasks)
    halved = PackStep(made.programs, (ROWS // 2,) * (2 * MICROBATCHES))
    rows[LAST] |= {"MB/s": rate / 1e6, "computing s": computing, "halved": by_arithmetic(made, LAST, halved)}
    return rows


def by_arithmetic(made: GptTraining, name: str, step: PackStep) -> dict[str, Any]:
    """The time on `CALCULATOR` in units of that of the tasks, in which tasks wait for what is told."""

    def clock(step: PackStep, plan: Schedule) -> LaneTimes:
        return step.times(plan, CALCULATOR)

    times = clock(step, made.planned(name, step, clock))
    computing, uncut = times.busy[MoveKind.RUN], made.programs.price(ROWS * MICROBATCHES, CALCULATOR)
    return {
        "by arithmetic": times.end / computing, "of the uncut": times.end / uncut,
        "waits": {cause: seconds / computing for cause, seconds in times.waits.items()},
    }  # fmt: skip


def units(step: PackStep, plan: Schedule) -> dict[str, float]:
    """Copied bytes in units of all weights, all gradients and all optimizer state, and borders in MB."""
    held = {role: sum(size for item, size in step.sizes.items() if item.role is role) for role in Role}
    found = {str(role): plan.of(role) / held[role] for role in (Role.WEIGHT, Role.GRADIENT, Role.STATE)}
    return found | {"border MB": plan.of(Role.BORDER) / 1e6}


def weight_copies(made: GptTraining, microbatches: int) -> dict[str, tuple[float, float]]:
    """How often a step copies its weights where nothing stays on the device: by closed form, and by the plan.

    Virtualised memory brings the weights of a pack, and writes them back, for each pass of each microbatch and for the
    update. Packs whose microbatches follow each other bring them for all forward passes, then for the backward passes
    and the update, and write them back once. The last pack has no forward pass of its own. A backward pass leaves out
    the biases at the end of its pack, about a thousandth of all, of which the closed form knows nothing.
    """
    found = {}
    for name, (order, writes_back) in {"virtualised": (PROGRAM, True), "packs": (GROUPED, False)}.items():
        step = PackStep(made.programs, (ROWS,) * microbatches, **order)
        weights = {item: size for item, size in step.sizes.items() if item.role is Role.WEIGHT}
        final = max(task.piece.pack for task in step.tasks)
        items = {read for task in step.tasks if task.piece.pack == final for read in task.reads}
        end = sum(size for item, size in weights.items() if item in items) / sum(weights.values())
        form = 4 * microbatches + 2 - 2 * microbatches * end if writes_back else 3 - end
        room = sum(step.sizes.values()) + max(task.work for task in step.tasks)
        plan = schedule(step.tasks, step.sizes, room, MovePolicy(Victims.ALL, 0, writes_back=writes_back))
        found[name] = form, plan.of(Role.WEIGHT) / sum(weights.values())
    return found


def pieces_of_text(steps: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random pieces of a text for so many steps: characters [rows, TIME], and those after them."""
    text, generator = tfnb.datasets.python_docs().tokens % WORDS, torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - TIME, (steps, ROWS * MICROBATCHES, 1), generator=generator)
    rows = text[starts + torch.arange(TIME + 1)]
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in rows]


def trained(layers: int, width: int, seed: int, steps: int, *, is_limited: bool) -> list[float]:
    """Losses of a training, on the budget of the benchmark or without one."""
    made = GptTraining(layers, width, seed)
    session = tfnb.Session(made.graph, compile="off", memory_budget=made.budget if is_limited else None)
    call = session.make_callable(made.fetches, made.fed, microbatches=MICROBATCHES)
    return [float(call(*batch)[0]) for batch in pieces_of_text(steps, seed)]


def trained_by_torch(layers: int, width: int, seed: int, steps: int) -> list[float]:
    """Losses of the same training in plain PyTorch, which has all of it in memory."""
    torch.manual_seed(seed)
    net, losses = Transformer(layers, width), list[float]()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for rows, labels in pieces_of_text(steps, seed):
        optimizer.zero_grad()
        losses.append(0.0)
        for x, y in zip(rows.split(ROWS), labels.split(ROWS), strict=True):
            loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten()) / MICROBATCHES
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
    return losses


def throttled(rate: float) -> type[CopyLanes]:
    """Lanes whose copies take as long as at so many bytes a second."""

    class ThrottledLanes(CopyLanes):
        def load(self, copy: Callable[[], torch.Tensor]) -> Future[torch.Tensor]:
            def slow() -> torch.Tensor:
                tensor = copy()
                time.sleep(tensor.nbytes / rate)
                return tensor

            return super().load(slow)

        def store(self, copy: Callable[[torch.Tensor], None], tensor: torch.Tensor) -> Future[None]:
            def slow(tensor: torch.Tensor) -> None:
                time.sleep(tensor.nbytes / rate)
                copy(tensor)

            return super().store(slow, tensor)

    return ThrottledLanes


def real(made: GptTraining, rate: float) -> dict[str, float]:
    """Seconds of a step by the clock with throttled copies, which go on beside the tasks."""
    found = {}
    with patch.object(pack_step, "InlineCopies", throttled(rate)):
        for name in (FIRST, LAST):
            began = time.perf_counter()
            made.ran(name)
            found[name] = time.perf_counter() - began
    return found


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--real", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    made = GptTraining(options.layers, options.width)
    rows = compared(made, options.steps)
    for name, row in rows.items():
        units_of = "  ".join(f"{key} {row[key]:6.2f}" for key in ("MB", "weight", "gradient", "state", "border MB"))
        times = "  ".join(f"{each:6.2f}" for each in row["times the last"])
        print(f"{name:46s} {units_of}  times the last at the link, half, quarter: {times}", flush=True)
        waits = ", ".join(f"{cause} {each:.2f}" for cause, each in row["waits"].items())
        print(
            f"{'':46s} by arithmetic {row['by arithmetic']:.2f} of its tasks, {row['of the uncut']:.2f} of the uncut "
            f"step; tasks wait for {waits}", flush=True,
        )  # fmt: skip
    result = {"bench": "packs", "machine": machine(), "budget": made.budget, "rows": rows}
    if options.real:
        result["real"] = real(made, rows[LAST]["MB/s"] * 1e6)
        print(f"by the clock, throttled: {result['real']}", flush=True)
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
