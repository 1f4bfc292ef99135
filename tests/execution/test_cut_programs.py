"""Random programs cut at random, in random orders of all that happens: bit for bit the step in one part."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tfnb
from tests.control_flow.random_programs import Block, program
from tests.control_flow.test_random_states import FEEDS, Pair
from tests.execution.shuffled import assert_cut, cut_anew, program_in_parts, random_requests, shuffled
from tfnb.graph.ops import LATE
from tfnb.passes.flow.cut import SEND

GRAPHS = int(os.environ.get("TFNB_GRAPHS", "0"))  # more random graphs than the slow tests run: 5000
QUICK, CHUNK, CUTS = 12, 10, 5
SHARES = (1.0, 0.5, 0.2)  # of all nodes that ask for a task
F64 = torch.float64


def assert_same_cut(graph: tfnb.Graph, fetches: Any, feeds: Sequence[dict[Any, Any]], seed: int, cuts: int = 1) -> int:
    """Steps in one part and in several, from the same state, give the same bits and leave the same state.

    cuts: the first is by the recorded requests, others by random ones. Gives how many messages there were.
    """
    variables = list(dict.fromkeys(v for node in graph.nodes if (v := node.attrs.get("variable")) is not None))
    before = [variable.value().clone() for variable in variables]

    def steps(executor: str) -> tuple[tfnb.Session, list[Any]]:
        for variable, value in zip(variables, before, strict=True):
            variable.set(value)
        session = tfnb.Session(graph, compile="off", executor=executor)
        found = [session.run(fetches, fed) for fed in feeds]
        return session, [*found, *(variable.value().clone() for variable in variables)]

    _, expected = steps("auto")
    rng, messages = random.Random(seed), 0
    for at in range(cuts):
        with ExitStack() as stack:
            driver = stack.enter_context(shuffled(seed + at))
            if at:
                stack.enter_context(cut_anew(seed + at, rng.randint(1, 5), rng.choice(SHARES)))
            session, found = steps("parts")
            assert_cut(program_in_parts(session, fetches, feeds[0]))
        assert_equal(found, expected, f"seed {seed}, cut {at}")
        messages += driver.messages
    return messages


def assert_equal(found: Any, expected: Any, what: str) -> None:
    """To the bit; what is not a number is equal to itself."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}")


def check_random_program(
    seed: int, order: int, cuts: int = 1, kind: Callable[[int], Block] = program, share_late: float = 0.0
) -> int:  # fmt: skip
    """A random nested program, its gradients and those of these; how many messages there were.

    share_late: of nodes whose values are sent late.
    """
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    block = kind(seed)
    with tfnb.record() as g, tfnb.device(random_requests(seed, rng.randint(1, 5), rng.choice(SHARES))):
        xs = [tfnb.placeholder(torch.rand(2, dtype=F64, generator=gen) - 0.5, shape=(2,)) for _ in range(3)]
        outs = found = block(list(xs), tfnb.while_loop, tfnb.cond)
        for _ in range(order):
            found = [d for d in tfnb.gradients(sum(y.sum() for y in found), xs) if d is not None]
            outs = [*outs, *found]
    if share_late:
        send_late(g, rng, share_late)
    fed = dict(zip(xs, torch.rand(3, 2, dtype=F64, generator=gen) * 4 - 2, strict=True))
    return assert_same_cut(g, outs, [fed], seed, cuts)


def send_late(graph: tfnb.Graph, rng: random.Random, share: float) -> None:
    """Let a share of the nodes send their values when their own places have used them."""
    nodes = (replace(n, tags=n.tags | {LATE}) if rng.random() < share else n for n in graph.nodes)
    graph.commit(replace(graph.contents, nodes=tuple(nodes)))


def straight_program(xs: Sequence[torch.Tensor], draws: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Values that are used again and again, by any task. draws: of each, its op, its operands and its task."""
    values = [*xs]
    for op, one, other, task in draws:
        with tfnb.device(f"task:{task}", soft=True):
            made = (torch.add, torch.sub, torch.maximum)[op]
            values.append(made(values[one % len(values)].tanh(), values[-1 - other % len(values)]))
    return values[-4:]


@pytest.mark.parametrize("seed", range(25))
def test_values_that_are_sent_late_are_the_same_and_no_place_waits_for_itself(seed: int) -> None:
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    draws = [(rng.randrange(3), rng.randrange(99), rng.randrange(5), rng.randrange(4)) for _ in range(24)]
    with tfnb.record() as g:
        xs = [tfnb.placeholder(torch.rand(2, dtype=F64, generator=gen), shape=(2,)) for _ in range(3)]
        outs = straight_program(xs, draws)
    send_late(g, rng, rng.choice([1.0, 0.5]))
    step = tfnb.place(outs)
    waits = [op for part in step._step.parts for op in part.flow.ops if op.kind == SEND and op.after]
    assert seed or waits, "the first one has some"
    fed = dict(zip(xs, torch.rand(3, 2, dtype=F64, generator=gen), strict=True))
    assert assert_same_cut(g, outs, [fed], seed, CUTS) > 0


def test_each_of_two_ops_of_one_function_is_waited_for() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(3, dtype=F64), name="x")
        with tfnb.device("task:0", soft=True):
            first, second = x.exp(), x.sin()
        with tfnb.device("task:1", soft=True):
            third, fourth = x.cos(), x.tan()
        outs = []
        for before, value in ((first, third), (second, fourth)):
            with tfnb.device("task:0", soft=True), tfnb.control_dependencies([before]):
                outs.append(value + 1)
    assert assert_same_cut(g, outs, [{x: torch.linspace(0, 1, 3, dtype=F64)}], 0) == 2


@pytest.mark.parametrize("seed", range(QUICK))
def test_random_programs_whose_values_are_sent_late(seed: int) -> None:
    check_random_program(seed, seed % 2, CUTS, share_late=0.5)


@pytest.mark.parametrize("seed", range(QUICK))
def test_random_programs_in_parts_give_the_bits_of_one_part(seed: int) -> None:
    check_random_program(seed, 0, CUTS)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_of_random_programs_in_parts(seed: int) -> None:
    assert check_random_program(seed, 1, CUTS) > 0


@pytest.mark.slow
@pytest.mark.parametrize("first", range(QUICK, max(100, GRAPHS), CHUNK))
def test_many_random_programs_in_parts_give_the_bits_of_one_part(first: int) -> None:
    assert sum(check_random_program(seed, 0, CUTS) for seed in range(first, first + CHUNK)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("first", range(3, max(40, GRAPHS // 2), CHUNK))
def test_many_gradients_of_random_programs_in_parts(first: int) -> None:
    assert sum(check_random_program(seed, 1, CUTS) for seed in range(first, first + CHUNK)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, max(10, GRAPHS // 25), 5))
def test_gradients_of_gradients_of_random_programs_in_parts(first: int) -> None:
    assert sum(check_random_program(seed, 2, CUTS) for seed in range(first, first + 5)) > 0


# -- what programs of loops and branches do not have -----------------------------------------------------------------


class Kept:
    """Variables, a net and a queue that programs use."""

    def __init__(self) -> None:
        self.v = tfnb.Variable(torch.tensor([0.5, -0.25], dtype=F64), name="v")
        self.w = tfnb.Variable(torch.tensor(0.75, dtype=F64), name="w")
        self.queue = tfnb.FIFOQueue(8, [F64], [(2,)])


def variables(x: torch.Tensor, kept: Kept) -> Any:
    """Read and written by turns, by whatever place."""
    first = kept.v.read() * x.sum()
    kept.v.assign_add(first.tanh())
    second = kept.v.read() + kept.w
    kept.w.assign(second.sum() * 0.5)
    return first, kept.v.read() * kept.w


def written_in_loops(x: torch.Tensor, kept: Kept) -> Any:
    def body(i: Any, y: torch.Tensor) -> Any:
        seen = kept.v.assign_add(y.tanh())
        return i + 1, tfnb.cond(seen.sum() > 0, lambda: y * 0.5 - kept.w, lambda: y + kept.w.assign_add(0.25))

    _, y = tfnb.while_loop(lambda i, y: (i < 5) & (y.sum() < 3), body, (0, x.sum(0)))
    return y, kept.v.read() * 2


def draws(x: torch.Tensor, kept: Kept) -> Any:
    y = F.dropout(x, 0.5) + torch.rand_like(x)

    def body(carry: torch.Tensor, row: torch.Tensor) -> Any:
        drawn = torch.rand(2, dtype=F64)
        return carry + drawn * row, tfnb.cond(drawn.sum() > 1, lambda: F.dropout(row, 0.5), lambda: row + drawn)

    return tfnb.scan(body, torch.zeros(2, dtype=F64), y)


def sizes(x: torch.Tensor, kept: Kept) -> Any:
    some = x[x.sum(1) > 0]
    n = some.shape[0]
    grown = tfnb.while_loop(
        lambda y: y.shape[0] < n + 3, lambda y: (torch.cat([y, y[:1] + 1]),), (x[:2],), shape_invariants=[(None, 2)]
    )
    return torch.zeros(n, 3, dtype=F64) + 1, grown[0] * n, torch.arange(x.shape[0])


def absent(x: torch.Tensor, kept: Kept) -> Any:
    """One side of each branch leaves something out, which a gradient asks for as zeros."""
    y = tfnb.cond(x.sum() > 0, lambda: x * kept.w, lambda: torch.ones_like(x))
    z = tfnb.cond(y.mean() > 0.5, lambda: tfnb.cond(x[0, 0] > 0, lambda: y * x, lambda: y), lambda: x.exp())
    return z, *tfnb.gradients(z.sum(), [x, kept.w], unconnected="zero")


def guards(x: torch.Tensor, kept: Kept) -> Any:
    def body(y: torch.Tensor, row: torch.Tensor) -> Any:
        if row.sum() > 0:
            y = y + row
        return y * row.shape[0], y

    limit = (x.shape[1] - x.shape[1] + x.new_ones(()).sum()).item()
    return tfnb.scan(tfnb.autograph(body), x.sum(0) * limit, x)


def three_deep(x: torch.Tensor, kept: Kept) -> Any:
    def inner(k: Any, z: torch.Tensor) -> Any:
        return k + 1, (z * x.sum(0)).sin()

    def middle(j: Any, y: torch.Tensor) -> Any:
        return j + 1, tfnb.while_loop(lambda k, z: (k <= j) & (z.sum() < 1.5), inner, (0, y))[1] + kept.v

    def outer(i: Any, y: torch.Tensor) -> Any:
        return i + 1, tfnb.while_loop(lambda j, y: j < i, middle, (0, y))[1] * 0.9

    y = tfnb.while_loop(lambda i, y: i < 4, outer, (0, x.mean(0)))[1]
    return y, *tfnb.gradients(y.sum(), [x, kept.v])


def scans(x: torch.Tensor, kept: Kept) -> Any:
    last, rows = tfnb.scan(lambda c, r: (c * 0.5 + r, (c * r).tanh()), kept.v.read(), x, reverse=True)
    back, more = tfnb.scan(lambda c, r: (c - r, c), last, rows)
    y = back.sum() + (more * rows).sum()
    (dx,) = tfnb.gradients(y, [x])
    return rows, dx, *tfnb.gradients(dx.square().sum(), [x])


def maps(x: torch.Tensor, kept: Kept) -> Any:
    y = tfnb.map_fn(lambda row: tfnb.cond(row.sum() > 0, lambda: row * 2, lambda: row - kept.v), x)
    return y, tfnb.gradients(y.square().sum(), [x])


def arrays(x: torch.Tensor, kept: Kept) -> Any:
    array = tfnb.TensorArray(4, shape=(2,), dtype=F64)

    def body(i: Any, array: Any, y: torch.Tensor) -> Any:
        y = (y + x[0]).tanh()
        return i + 1, array.write(i, y), y

    _, array, y = tfnb.while_loop(lambda i, *_: i < 4, body, (0, array, kept.v.read()))
    stacked = array.stack()
    return stacked, array.read(2) * y, *tfnb.gradients(stacked.square().sum(), [x])


def queues(x: torch.Tensor, kept: Kept) -> Any:
    put = kept.queue.enqueue(x.sum(0).tanh())
    with tfnb.control_dependencies([put]):
        more = kept.queue.enqueue(kept.v.read() * 2)
        (first,) = kept.queue.dequeue()
    with tfnb.control_dependencies([more, first]):
        (second,) = kept.queue.dequeue()
    return first * x, second + first


def routed(x: torch.Tensor, kept: Kept) -> Any:
    """A mixture of experts: rows go to the expert that a gate chooses, and come back."""
    gate = torch.softmax(x * kept.v, 1)
    weight, chosen = gate.max(1)
    out = torch.zeros_like(x)
    for expert in range(2):
        rows = (chosen == expert).nonzero().squeeze(1)
        made = torch.tanh(x.index_select(0, rows) * (expert + 1)) * weight[rows].unsqueeze(1)
        out = out.index_add(0, rows, made)
    return out, chosen, *tfnb.gradients(out.square().sum(), [x, kept.v])


def views(x: torch.Tensor, kept: Kept) -> Any:
    """Views that are written through, and read by others."""
    whole = x.clone()
    column, turned = whole[:, :1], whole.t()
    column.mul_(2)
    turned.add_(kept.v.read().unsqueeze(1))
    whole[0] = 7
    whole.view(-1)[::2].neg_()
    return whole, column.sum(), turned, whole[whole > 0].sum()


def spectra(x: torch.Tensor, kept: Kept) -> Any:
    found = torch.fft.fft(x, dim=0) * torch.complex(kept.v.read(), kept.w.read())
    back = torch.fft.ifft(found.conj(), dim=0)
    (dx,) = tfnb.gradients(found.abs().sum() + back.real.square().sum(), [x])
    return found, back.imag, torch.view_as_real(back), dx


PROGRAMS: list[Callable[[torch.Tensor, Kept], Any]] = [
    variables, written_in_loops, draws, sizes, absent, guards, three_deep, scans, maps, arrays, queues, routed, views,
    spectra,
]  # fmt: skip


def check_program(model: Callable[[torch.Tensor, Kept], Any], seed: int) -> int:
    """A program under random requests, for several feeds one after another; how many messages there were."""
    rng, kept = random.Random(seed), Kept()
    with tfnb.record() as g, tfnb.device(random_requests(seed, rng.randint(2, 5), rng.choice(SHARES)), soft=True):
        x = tfnb.placeholder(torch.tensor([[1.0, 2], [-1, 0.5], [0.5, 0.25]], dtype=F64), shape=("B", 2), name="x")
        outs = [model(x, kept), tfnb.effects()]
    gen = torch.Generator().manual_seed(seed)
    feeds = [{x: torch.rand(rows, 2, dtype=F64, generator=gen) * 3 - 1} for rows in (4, 2, 5)]
    return assert_same_cut(g, outs, feeds, seed, CUTS)


@pytest.mark.parametrize("model", PROGRAMS, ids=lambda model: model.__name__)
def test_programs_with_state_rows_and_sizes_in_parts(model: Any) -> None:
    assert check_program(model, 0) > 0


@pytest.mark.slow
@pytest.mark.parametrize("model", PROGRAMS, ids=lambda model: model.__name__)
def test_many_cuts_of_programs_with_state_rows_and_sizes(model: Any) -> None:
    for seed in range(1, max(8, GRAPHS // 100)):
        check_program(model, seed)


def check_random_state(seed: int) -> int:
    """A random function with Variables, a net and arrays, and a training step of it, under random requests."""
    pair = Pair(seed, "auto")
    if pair.of_sample is None or any("took the sample" in note for note in pair.graph.notes):
        return 0
    rows = [(row, count) for row, count in FEEDS if pair.python(row, count) is not None]
    feeds = [{pair.x: torch.tensor(row, dtype=F64), pair.n: torch.tensor(count)} for row, count in rows]
    found = [*pair.found, *pair.slopes]
    return assert_same_cut(pair.graph, [found, pair.step], feeds[:2], seed, 2) if feeds else 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Python took the", "ignore:.*became the constant", "ignore:.*dense")
@pytest.mark.parametrize("first", range(0, max(8, GRAPHS // 25), 4))
def test_random_functions_with_state_in_parts(first: int) -> None:
    assert sum(check_random_state(seed) for seed in range(first, first + 4)) > 100
