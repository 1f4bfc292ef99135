"""A GPT of 12 layers whose weights and Adam state are four times the budget: packs beside virtualised memory.

All rows run the same pieces, over the same microbatches, and differ in the order of tasks and in who leaves the device.
Bytes are those of the plan, and where a row is carried out those that were copied. Times are of the virtual clock:
processor time of each task as measured here, copies at a rate that stands to the arithmetic of these tasks as 12 GB/s
stand to 11.3 TFLOPS. --real: the first row and the last one with copies that take as long, one after the other.

    python -m tests.benchmarks.bench_packs [--layers 12] [--width 128] [--steps 3] [--real]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tfnb
from tests.benchmarks.report import machine
from tfnb.execution import pack_step
from tfnb.execution.pack_step import PackPrograms, PackStep
from tfnb.execution.virtual_device import VirtualDevice
from tfnb.memory.lane_clock import lane_times
from tfnb.memory.moves import MovePolicy, Schedule, Victims, schedule
from tfnb.memory.pack_tasks import PackTask, Role
from tfnb.passes import step_graph

LINK, FLOPS = 12e9, 11.3e12  # bytes and floating-point operations a second of the device that is imitated
WORDS, TIME, ROWS, MICROBATCHES = 256, 64, 4, 8
GROUPED: Mapping[str, bool] = {}
PROGRAM: Mapping[str, bool] = {"grouped": False, "just_in_time": False}
ORDERS: dict[str, tuple[Mapping[str, bool], MovePolicy]] = {
    "LRU, clean written back": (PROGRAM, MovePolicy(Victims.LRU, 0, True)),
    "LRU, clean written back, prefetch": (PROGRAM, MovePolicy(Victims.LRU, 1, True)),
    "LRU, clean dropped": (PROGRAM, MovePolicy(Victims.LRU, 0)),
    "farthest next use, prefetch": (PROGRAM, MovePolicy()),
    "grouped, LRU": ({"just_in_time": False}, MovePolicy(Victims.LRU, 0)),
    "grouped, farthest next use, prefetch": ({"just_in_time": False}, MovePolicy()),
    "grouped, update just in time, no prefetch": (GROUPED, MovePolicy(ahead=0)),
    "grouped, update just in time, prefetch": (GROUPED, MovePolicy()),
}
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

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        net = Transformer(self.layers, self.width)
        ids = torch.randint(0, WORDS, (ROWS * MICROBATCHES, TIME + 1))
        rows, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        with tfnb.record() as self.graph:
            x, y = tfnb.placeholder(rows[:ROWS]), tfnb.placeholder(labels[:ROWS])
            loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten())
            train = tfnb.train.Adam(1e-3).minimize(loss)
        self.programs = PackPrograms(step_graph(self.graph, (loss.value, train.value), (x.value, y.value)))
        self.feeds = {x.value: rows, y.value: labels}
        self.budget = self.step(GROUPED).state_bytes // 4

    def step(self, order: Mapping[str, bool]) -> PackStep:
        return PackStep(self.programs, (ROWS,) * MICROBATCHES, **order)

    def ran(self, name: str) -> pack_step.PackRun:
        """One step carried out; nothing is written."""
        order, policy = ORDERS[name]
        step = self.step(order)
        plan = schedule(step.tasks, step.sizes, self.budget, policy)
        done, _ = step.compute(self.feeds, {v: v.storage for v in self.programs.variables}, plan, self.budget)
        assert done.loaded + done.stored == plan.moved and done.most == plan.most
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
    """Bytes and times of each order and policy, the times in units of the last one as well."""
    medians, rate = seconds_of(made, steps)

    def lasts(task: PackTask) -> float:
        return medians[task.piece.phase, task.piece.pack]

    rows: dict[str, dict[str, Any]] = {}
    for name, (order, policy) in ORDERS.items():
        step = made.step(order)
        plan = schedule(step.tasks, step.sizes, made.budget, policy)
        ends = [lane_times(plan, step.tasks, step.sizes, rate * part, lasts).end for part in (1, 0.5, 0.25)]
        rows[name] = {"MB": plan.moved / 1e6, **units(step, plan), "seconds": ends}
    for row in rows.values():
        row["times the last"] = [one / last for one, last in zip(row["seconds"], rows[LAST]["seconds"], strict=True)]
    rows[LAST] |= {"MB/s": rate / 1e6, "computing s": sum(map(lasts, made.step(GROUPED).tasks))}
    return rows


def units(step: PackStep, plan: Schedule) -> dict[str, float]:
    """Copied bytes in units of all weights, all gradients and all optimizer state, and borders in MB."""
    held = {role: sum(size for item, size in step.sizes.items() if item.role is role) for role in Role}
    found = {str(role): plan.of(role) / held[role] for role in (Role.WEIGHT, Role.GRADIENT, Role.STATE)}
    return found | {"border MB": plan.of(Role.BORDER) / 1e6}


@contextmanager
def throttled(rate: float) -> Iterator[None]:
    """Devices whose copies take as long as at so many bytes a second."""

    class ThrottledDevice(VirtualDevice):
        def load(self, key: Any) -> None:
            super().load(key)
            time.sleep(self.here[key].nbytes / rate)

        def store(self, key: Any) -> None:
            time.sleep(self.here[key].nbytes / rate)
            super().store(key)

    with patch.object(pack_step, "VirtualDevice", ThrottledDevice):
        yield


def real(made: GptTraining, rate: float) -> dict[str, float]:
    """Seconds of a step by the clock with throttled copies, one after the other and after the tasks."""
    found = {}
    with throttled(rate):
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
        print(f"{name:42s} {units_of}  times the last at the link, half, quarter: {times}", flush=True)
    result = {"bench": "packs", "machine": machine(), "budget": made.budget, "rows": rows}
    if options.real:
        result["real"] = real(made, rows[LAST]["MB/s"] * 1e6)
        print(f"by the clock, throttled: {result['real']}", flush=True)
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
