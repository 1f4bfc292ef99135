"""A whole step as one native call: the same results, calls that cannot hurt, and Python's lock left free."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tfnb
from tfnb.errors import TfnbError
from tfnb.execution.tiers.compiled_loops import obstacle
from tfnb.execution.tiers.interface import Unfit
from tfnb.execution.tiers.native import package
from tfnb.execution.tiers.native.exportable import ExtraOperands
from tfnb.execution.tiers.native.request import NativeRequest, Operand
from tfnb.execution.tiers.native.segments import SEGMENTS, SegmentedStep
from tfnb.execution.tiers.native.step_arguments import load_arguments, save_arguments
from tfnb.execution.tiers.native.tier import NativeStep, loaded
from tfnb.execution.tiers.native.trial import tried
from tfnb.execution.tiers.operand_checks import OperandRefused

pytestmark = [
    pytest.mark.skipif(obstacle() is not None, reason="there is no C++ compiler"),
    pytest.mark.filterwarnings("ignore"),  # inductor's own
]
ROWS = 8


class Recorded:
    """A recorded step, its program, and what a run gives it."""

    def __init__(self, optimizer: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3))
        with tfnb.record() as self.graph:
            self.x = tfnb.placeholder(torch.randn(ROWS, 6), name="x")
            self.y = tfnb.placeholder(torch.randint(3, (ROWS,)), name="y")
            self.loss = F.cross_entropy(self.model(self.x), self.y)
            before = self.model[0].weight * 1
            self.fetches = [self.loss, before, optimizer.minimize(self.loss)]
        self.feeds = [torch.randn(ROWS, 6), torch.randint(3, (ROWS,))]
        session = tfnb.Session(self.graph, compile="off")
        session.run(self.fetches, self.feed())
        (prepared,) = session._prepared.values()
        self.program = prepared.code.program.undonated()

    def feed(self) -> dict[Any, torch.Tensor]:
        return dict(zip([self.x, self.y], self.feeds, strict=True))

    def storages(self) -> list[torch.Tensor]:
        return [variable.storage.clone() for variable in self.program.variables]

    def step(self, folder: Path) -> NativeStep:
        """Through files, as from another process."""
        self.folder = folder
        NativeRequest.of(self.program, [*self.feeds, *self.storages(), 0]).save(folder)
        package.build(NativeRequest.load(folder), folder)
        return loaded(folder, self.program)


def test_a_step_is_compiled_with_the_default_dtype_of_who_asks(tmp_path: Path) -> None:
    """Ops that say no dtype make tensors of that one; the compiler's process has another."""
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.randn(3, 4, dtype=torch.float64))
        y = x @ torch.ones(4, x.shape[0], dtype=torch.float64)
    session = tfnb.Session(graph, compile="off")
    args = [torch.randn(3, 4, dtype=torch.float64), 0]
    session.run(y, {x: args[0]})
    (prepared,) = session._prepared.values()
    requests = {}
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            requests[dtype] = NativeRequest.of(prepared.code.program.undonated(), args)
        requests[torch.float64].save(tmp_path)
        torch.set_default_dtype(torch.float32)
        read = NativeRequest.load(tmp_path)
        read.as_asked()
        assert torch.get_default_dtype() is torch.float64 and read.key() == requests[torch.float64].key()
    finally:
        torch.set_default_dtype(torch.float32)
    assert read.key() != requests[torch.float32].key()


def test_constants_lie_as_the_compilers_process_reads_them() -> None:
    """A folded constant may be turned round; the package would take it for another layout in each step."""
    turned = torch.randn(3, 2).t()
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.randn(4, 2), shape=(4, 2))
        y = x @ turned
    session = tfnb.Session(graph, compile="off")
    session.run(y, {x: torch.randn(4, 2)})
    (prepared,) = session._prepared.values()
    program = prepared.code.program.undonated()
    (kept,) = program.module.buffers()
    (given,) = ExtraOperands.of(program, []).constants
    assert not kept.is_contiguous() and given.is_contiguous() and torch.equal(given, turned)


class Mixed:
    """For each parameter another formula that a native step knows."""

    def __init__(self, rate: float = 0.05) -> None:
        self.rate = rate

    def minimize(self, loss: Any) -> Any:
        rules = [
            tfnb.train.Adam(self.rate), tfnb.train.AdamW(0.05, amsgrad=True), tfnb.train.SGD(0.1),
            tfnb.train.SGD(0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
        ]  # fmt: skip
        pairs = rules[0].compute_gradients(loss)
        return tfnb.group(*(rule.apply_gradients([pair]) for rule, pair in zip(rules, pairs, strict=True)))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Recorded, NativeStep]]:
    recorded = Recorded(Mixed())
    yield recorded, recorded.step(tmp_path_factory.mktemp("mixed"))


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.slow
def test_a_native_step_writes_what_a_generated_one_does(
    knows: bool, tmp_path: Path, mixed: tuple[Recorded, NativeStep]
) -> None:
    recorded, step = mixed
    if not knows:
        recorded = Recorded(tfnb.train.RMSProp(0.01))
        step = recorded.step(tmp_path)
    program = recorded.program
    assert step.writes == knows  # RMSProp, whose formula is not known: it computes, and the commit writes
    mine, theirs = recorded.storages(), recorded.storages()
    for run in range(4):
        wanted, pending = program.compute(recorded.feeds, theirs, run)
        program.commit(pending)
        if step.writes:
            found = step(recorded.feeds, mine, run)
        else:
            found, pending = program.compute(recorded.feeds, mine, run, step)
            program.commit(pending)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_what_does_not_fit_is_refused_and_nothing_is_written(mixed: tuple[Recorded, NativeStep]) -> None:
    recorded, step = mixed
    x, y = recorded.feeds
    good = recorded.storages()
    strided = good[0].t().contiguous().t()
    memory = torch.randn(ROWS * 6 + good[0].numel())
    shared = memory[: ROWS * 6].view(ROWS, 6), memory[ROWS * 6 - 1 : -1].view(good[0].shape)
    for feeds, storages in [
        ([torch.randn(ROWS + 1, 6), y], good), ([x.double(), y], good), ([torch.randn(6, ROWS).t(), y], good),
        ([x, y[:1].expand(ROWS)], good), ([x, y], [strided, *good[1:]]), ([x, y], [good[0][:-1], *good[1:]]),
        ([x, y], [good[0], good[0].view(-1)[:5], *good[2:]]), ([shared[0], y], [shared[1], *good[1:]]),
        ([torch._neg_view(x), y], good), ([x.to("meta"), y], good),
    ]:  # fmt: skip
        before = [storage.clone() for storage in storages]
        with pytest.raises(Unfit):
            step(feeds, storages, 0)
        assert all(map(torch.equal, storages, before))
    moved = good[0]
    step([x, y], good, 0)
    moved.resize_(2, 2)  # the same tensor object, with other memory under it
    with pytest.raises(Unfit):
        step([x, y], good, 0)
    good = recorded.storages()
    before = [storage.clone() for storage in good]
    for index in (3, -1):
        with pytest.raises(OperandRefused):
            step([x, torch.full((ROWS,), index)], good, 0)
    assert all(map(torch.equal, good, before))


def test_arguments_are_read_as_they_lay(tmp_path: Path) -> None:
    x = torch.randn(4, 6)
    args = [
        x, x.t(), x[1:3, ::2], x > 0, x.bfloat16(), torch.tensor(3), torch.empty(0, 2), torch.complex(x, x),
        torch._neg_view(x), torch.randn(1, 5), x[0, ::2][:1],
        torch.randn(1, 6).expand(4, 6), torch.tensor(2.0).expand(3),
    ]  # fmt: skip
    save_arguments([*args, 7], tmp_path)
    *found, run = load_arguments(tmp_path)
    assert run == 7
    for a, b in zip(args, found, strict=True):
        assert torch.equal(a, b) and Operand.of(a) == Operand.of(b)


@pytest.mark.slow
def test_a_package_is_tried_where_it_is_built(mixed: tuple[Recorded, NativeStep], tmp_path: Path) -> None:
    recorded, _ = mixed
    args = [*recorded.feeds, *recorded.storages(), 0]
    save_arguments(args, tmp_path)
    facts = tried(NativeRequest.of(recorded.program, args), recorded.folder, tmp_path)
    assert facts["agrees"] and 0 < facts["seconds_a_step"] < 60
    other = Recorded(Mixed(0.5))  # a package of the first is none for this one
    facts = tried(NativeRequest.of(other.program, args), recorded.folder, tmp_path)
    assert not facts["agrees"] and facts["status"].startswith("compiled code differs: ")


@pytest.mark.slow
def test_nothing_that_a_step_gave_outlives_its_last_reference(mixed: tuple[Recorded, NativeStep]) -> None:
    recorded, step = mixed
    outs = [weakref.ref(out) for out in step(recorded.feeds, recorded.storages(), 0) if out is not None]
    gc.collect()
    assert len(outs) == 2 and not any(out() is not None for out in outs)


@pytest.mark.slow
def test_a_bad_index_in_a_session_is_an_error_with_its_line() -> None:
    recorded = Recorded(tfnb.train.Adam(0.05))
    session = tfnb.Session(recorded.graph, compile="now")
    session.run(recorded.fetches, recorded.feed())
    session.run(recorded.fetches, recorded.feed())
    assert ": compiled; " in session.status()[0]
    before = recorded.storages()
    with pytest.raises(TfnbError, match="line"):
        session.run(recorded.fetches, recorded.feed() | {recorded.y: torch.full((ROWS,), 3)})
    assert all(map(torch.equal, recorded.storages(), before))
    session.run(recorded.fetches, recorded.feed())
    assert ": compiled; " in session.status()[0]


class Scaled(nn.Module):
    """A layer, and a parameter that is a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 40), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.scale).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_numbers_of_groups_are_those_of_each_run_of_one_package(dtype: torch.dtype) -> None:
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.SGD, {"weight_decay": 0.1}), (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}), (torch.optim.Adam, {}),
        (torch.optim.Adam, {"weight_decay": 0.1}), (torch.optim.AdamW, {"amsgrad": True}), (torch.optim.AdamW, {}),
    ]  # fmt: skip
    changes = {
        "lr": [0.01, 0.02, 0.005], "momentum": [0.9, 0.3], "dampening": [0.3, 0.1], "weight_decay": [0.1, 0.7],
        "betas": [(0.9, 0.999), (0.95, 0.9999), (0.5, 0.9)], "eps": [1e-8, 0.1],
    }  # fmt: skip
    x = torch.randn(5, 6, dtype=dtype)
    nets = [[Scaled().to(dtype) for _ in kinds] for _ in range(2)]
    for mine, theirs in zip(*nets, strict=True):
        theirs.load_state_dict(mine.state_dict())
    made = [
        [kind(net.parameters(), lr=0.01, **settings) for net, (kind, settings) in zip(some, kinds, strict=True)]
        for some in nets
    ]
    with tfnb.record() as graph:
        fed = tfnb.placeholder(x)
        steps = [tfnb.train.from_torch(o).minimize(net(fed)) for o, net in zip(made[0], nets[0], strict=True)]
    session = tfnb.Session(graph, compile="now")
    for run in range(1, 9):
        session.run(steps, {fed: x})
        for optimizer, net in zip(made[1], nets[1], strict=True):
            optimizer.zero_grad()
            net(x).backward()
            optimizer.step()
        tolerance = {"rtol": 2e-6, "atol": 1e-7} if dtype is torch.float32 else {"rtol": 1e-12, "atol": 1e-14}
        for mine, theirs in zip(*nets, strict=True):
            for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(one, other, **tolerance)
        for group in (group for some in made for optimizer in some for group in optimizer.param_groups):
            group.update({name: some[run % len(some)] for name, some in changes.items() if group.get(name)})
    assert ": compiled; " in session.status()[0]


@pytest.mark.slow
def test_eight_threads_go_through_one_package(mixed: tuple[Recorded, NativeStep]) -> None:
    recorded, step = mixed
    wanted = recorded.storages()
    for run in range(200):
        step(recorded.feeds, wanted, run)
    states = [recorded.storages() for _ in range(8)]

    def work(storages: list[torch.Tensor]) -> None:
        for run in range(200):
            step(recorded.feeds, storages, run)

    threads = [threading.Thread(target=work, args=(storages,)) for storages in states]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for storages in states:
        assert all(map(torch.equal, storages, wanted))


@pytest.mark.slow
def test_other_threads_run_during_a_long_step(tmp_path: Path) -> None:
    size = 1500
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.randn(size, size), shape=(size, size), name="x")
        y = x
        for _ in range(8):
            y = torch.tanh(y @ x / size)
        out = y.sum()
    session = tfnb.Session(graph, compile="off")
    feed = torch.randn(size, size)
    session.run(out, {x: feed})
    (prepared,) = session._prepared.values()
    program = prepared.code.program.undonated()
    package.build(NativeRequest.of(program, [feed, 0]), tmp_path)
    step, ticks, spans, over = loaded(tmp_path, program), [], [], threading.Event()

    def tick() -> None:
        while not over.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        for _ in range(3):
            start = time.perf_counter()
            step(feed, 0)
            spans.append((start, time.perf_counter()))
    finally:
        over.set()
        thread.join()
    counts = [sum(start < tick < end for tick in ticks) for start, end in spans]
    assert max(counts) > 10, counts  # a step that kept the interpreter to itself would let one or two pass


@pytest.mark.slow
def test_attention_and_all_before_a_row_sparse_update_are_one_package() -> None:
    losses = []
    for mode in ("off", "now"):
        torch.manual_seed(0)
        table, project = nn.Embedding(11, 16), nn.Linear(16, 48)
        x = torch.randint(11, (4, 9))
        with tfnb.record() as graph:
            rows = tfnb.placeholder(x, shape=(4, 9), name="rows")
            q, k, v = project(table(rows)).view(4, 9, 3, 2, 8).permute(2, 0, 3, 1, 4)
            loss = F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()
            train = tfnb.train.SGD(0.01).minimize(loss)
        with tfnb.Session(graph, compile=mode) as session:
            losses.append([session.run([loss, train], {rows: x})[0] for _ in range(4)])
            assert mode == "off" or ": compiled; " in session.status()[0], session.status()
            if mode == "now":
                (prepared,) = session._prepared.values()
                (sizes,) = prepared.code.tiers._sizes.values()
                assert isinstance(sizes.forward.code, SegmentedStep)
                assert len(sizes.forward.code.package.facts[SEGMENTS]) == 1
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
