"""An LSTM of eight layers in a loop, on 1 to 8 virtual devices (EuroSys'18, figure 15), beside the published speed-ups.

`python -m tests.benchmarks.bench_wavefront [--units 128] [--batch 64] [--steps 50 100 200]` places equal numbers of
layers on each device, cuts the step, and runs the parts' machines on a virtual clock (`virtual_parts`): the time of a
piece of work is the median of its processor times here, a link has 20 us and 10 GB a second, and the machines' own
turns are free. First the values are compared with those of plain PyTorch. Printed, forward and with gradients: the
speed-up over one device, whose step is one function; over the work of the parts one after the other; beside the
paper's, and the ideal wavefront T G / (T + G - 1) of G equal stages.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import tfnb
from tests.benchmarks.cluster_rows import said
from tests.benchmarks.virtual_parts import Profile, VirtualStep
from tfnb.execution.dataflow.executor import Dataflow
from tfnb.passes import step_graph
from tfnb.passes.flow.step_flow import in_parts
from tfnb.placement.simulation import LinkCost

LAYERS = 8
PUBLISHED = {50: (1.58, 3.13, 5.18), 100: (1.58, 3.07, 5.35), 200: (1.68, 3.25, 5.43)}
DEVICES = (1, 2, 4, 8)
LINK = LinkCost(20e-6, 10e9)
RUNS = 3  # for the profile, after one that makes what is made once


class Deep(nn.Module):
    """The cells, and the devices on which they lie."""

    def __init__(self, units: int, devices: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells = nn.ModuleList(nn.LSTMCell(units, units) for _ in range(LAYERS))
        self.devices = devices

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The last output of the top layer. rows: [time, batch, units]."""
        zeros = torch.zeros_like(rows[0])

        def body(at: Any, *states: Any) -> Any:
            out, found = rows[at], []
            for layer, cell in enumerate(self.cells):
                with tfnb.device(f"task:{layer * self.devices // LAYERS}"):
                    out, memory = cell(out, (states[2 * layer], states[2 * layer + 1]))
                found += [out, memory]
            return (at + 1, *found)

        start = (torch.tensor(0), *([zeros] * (2 * LAYERS)))
        found = tfnb.while_loop(lambda at, *_: at < rows.shape[0], body, start, parallel_iterations=32)
        last: torch.Tensor = found[-2]
        return last

    def plain(self, rows: torch.Tensor) -> torch.Tensor:
        """The same in plain PyTorch."""
        states = [(torch.zeros_like(rows[0]), torch.zeros_like(rows[0])) for _ in self.cells]
        for out in rows:
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(out, states[layer])
                out = states[layer][0]
        return states[-1][0]


def cut(units: int, batch: int, steps: int, devices: int, *, trains: bool) -> tuple[Dataflow, list[Any], torch.Tensor]:
    """The step in parts, its fetched values as plain PyTorch computes them, and what it is fed."""
    model, fed = Deep(units, devices), torch.randn(steps, batch, units)
    loss = model.plain(fed).square().mean()
    values = [loss.detach(), *(torch.autograd.grad(loss, [*model.parameters()]) if trains else ())]
    with tfnb.record() as graph:
        rows = tfnb.placeholder(fed)
        out = model(rows).square().mean()
        wanted = [out, *(tfnb.gradients(out, [*model.parameters()]) if trains else ())]
    step = step_graph(graph, [each.value for each in wanted], [rows.value])
    return Dataflow(in_parts(step)), values, fed


def seconds(program: Dataflow, expected: list[Any], fed: torch.Tensor) -> tuple[float, float]:
    """The time of a step on the clock, and that of its parts' work one after the other."""
    storages = [variable.kept for variable in program.variables]
    profile = Profile()
    for number in range(1 + RUNS):
        run = VirtualStep(program, lambda source, to: LINK, profile=profile if number else Profile())
        for found, wanted in zip(run.run([fed], storages), expected, strict=False):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    timed = VirtualStep(program, lambda source, to: LINK, profile.medians)
    timed.run([fed], storages)
    return timed.now, sum(timed.busy)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--units", type=int, default=128)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, nargs="*", default=[*PUBLISHED])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for trains in (False, True):
        for steps in asked.steps:
            made = {devices: cut(asked.units, asked.batch, steps, devices, trains=trains) for devices in DEVICES}
            with torch.no_grad():
                show(steps, {devices: seconds(*each) for devices, each in made.items()}, trains=trains)


def show(steps: int, found: dict[int, tuple[float, float]], *, trains: bool) -> None:
    """A row for each number of devices."""
    ideal: Callable[[int], float] = lambda devices: steps * devices / (steps + devices - 1)  # noqa: E731
    for number, devices in enumerate(DEVICES):
        taken, work = found[devices]
        facts = {
            "trains": trains,
            "speed-up": found[1][0] / taken,
            "of its work": work / taken,
            "ideal": ideal(devices),
        }
        paper = f"  paper {PUBLISHED[steps][number - 1]:.2f}" if steps in PUBLISHED and number else ""
        print(
            f"T={steps:<4} {'gradients' if trains else 'forward  '} {devices} devices  {taken * 1e3:8.1f} ms  speed-up "
            f"{facts['speed-up']:5.2f}  of its work {facts['of its work']:5.2f}  ideal {facts['ideal']:5.2f}{paper}"
        )
        said(f"wavefront {steps} {devices}", facts)


if __name__ == "__main__":
    main()
