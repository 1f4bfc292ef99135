"""Parts of a loop on a virtual clock: iterations overlap as a wavefront, whatever the values are."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import tfnb
from tests.benchmarks.virtual_parts import VirtualStep
from tfnb.execution.dataflow.executor import Dataflow
from tfnb.passes import step_graph
from tfnb.passes.flow.step_flow import in_parts
from tfnb.placement.simulation import LinkCost

FREE = LinkCost(0.0, float("inf"))


class Unit(dict):
    """A second for each piece of floating work in a loop; counters and what is outside are free."""

    def __missing__(self, step):
        return float(step.op.frame > 0 and step.op.node.outputs[0].dtype.is_floating_point)


def layers(devices: int, length: int, *, trains: bool) -> tuple[Dataflow, list[torch.Tensor], torch.Tensor]:
    """A loop in which each device takes the output of the one below, and its own of the iteration before."""
    first = torch.linspace(-1, 1, 6, dtype=torch.float64)

    def run(x, while_loop, on):
        def body(at, *states):
            out, found = x, []
            for device, state in enumerate(states):
                with on(f"task:{device}"):
                    out = torch.sin(out + state)
                found.append(out)
            return (at + 1, *found)

        return while_loop(body, (torch.tensor(0), *([torch.zeros_like(x)] * devices)))[-1].sum()

    def plainly(body, state):
        for _ in range(length):
            state = body(*state)
        return state

    plain = first.clone().requires_grad_()
    loss = run(plain, plainly, nullcontext)
    expected = [loss.detach(), *(torch.autograd.grad(loss, plain) if trains else ())]
    with tfnb.record() as graph:
        x = tfnb.placeholder(first)

        def looped(body, init):
            return tfnb.while_loop(lambda at, *_: at < length, body, init, parallel_iterations=64)

        out = run(x, looped, tfnb.device)
        wanted = [out, *(tfnb.gradients(out, [x]) if trains else ())]
    return Dataflow(in_parts(step_graph(graph, [each.value for each in wanted], [x.value]))), expected, first


@pytest.mark.parametrize(("devices", "length"), [(2, 5), (4, 12), (8, 20)])
def test_iterations_of_stages_overlap_as_the_ideal_wavefront(devices: int, length: int) -> None:
    program, expected, first = layers(devices, length, trains=False)
    run = VirtualStep(program, lambda source, to: FREE, Unit())
    (found,) = run.run([first], [])
    torch.testing.assert_close(found, expected[0])
    assert run.busy == [length] * devices, "one piece for each iteration"
    assert run.now == length + devices - 1


def test_the_way_back_overlaps_too_and_a_link_takes_its_time() -> None:
    program, expected, first = layers(4, 16, trains=True)
    run = VirtualStep(program, lambda source, to: FREE, Unit())
    for found, wanted in zip(run.run([first], []), expected, strict=False):
        torch.testing.assert_close(found, wanted)
    assert run.now <= 1.25 * max(run.busy), "all four work at a time"
    slow = VirtualStep(program, lambda source, to: LinkCost(0.5, float("inf")), Unit())
    slow.run([first], [])
    assert run.now < slow.now <= run.now + 2 * 0.5 * 4 + 8, "a link delays the front, not each iteration"
