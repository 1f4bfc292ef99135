"""A compiled step as one call of C: what it does, what it leaves to the longer way, and whom it waits for."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tfnb
from tfnb.errors import DeadlineExceeded, FailedPrecondition, StaleNode, TfnbError
from tfnb.execution.tiers.compiled_loops import obstacle
from tfnb.execution.tiers.native.direct import _memory
from tfnb.graph.variable_locks import LOCKS
from tfnb.recording import user_code_ran

compiles = [
    pytest.mark.skipif(obstacle() is not None, reason="there is no C++ compiler"),
    pytest.mark.slow,  # the first of them compiles, the others find it in the cache
]
ROWS = 8


class Trained:
    """A small step and its session."""

    def __init__(self, compile: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
        with tfnb.record() as self.graph:
            self.x = tfnb.placeholder(torch.randn(ROWS, 6), name="x")
            self.y = tfnb.placeholder(torch.randint(3, (ROWS,)), name="y")
            self.loss = F.cross_entropy(self.model(self.x), self.y)
            self.train = tfnb.train.Momentum(0.1, 0.9).minimize(self.loss)
        self.session = tfnb.Session(self.graph, compile=compile)
        self.call = self.session.make_callable([self.loss, self.train], [self.x, self.y])
        self.feeds = [torch.randn(ROWS, 6), torch.randint(3, (ROWS,))]

    def step(self, x: Any = None) -> torch.Tensor:
        loss, nothing = self.call(self.feeds[0] if x is None else x, self.feeds[1])
        assert nothing is None
        return loss

    @property
    def is_direct(self) -> bool:
        """Whether the last step was one call of C, or the next one will be."""
        return any(prepared.direct is not None for prepared in self.session._prepared.values())

    def values(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


@pytest.fixture
def pair() -> tuple[Trained, Trained]:
    """The same step compiled, after its first direct calls, and as generated code."""
    compiled, generated = Trained("now"), Trained("off")
    for _ in range(3):
        compiled.step(), generated.step()
    assert compiled.is_direct and not generated.is_direct
    return compiled, generated


def check_equal(pair: tuple[Trained, Trained]) -> None:
    a, b = (trained.values() for trained in pair)
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_where_torch_keeps_its_facts_is_found() -> None:
    found = _memory()
    assert found is not None and found.gradient >= 0


class TestDirect:
    pytestmark = compiles

    def test_it_is_the_step_of_generated_code(self, pair: tuple[Trained, Trained]) -> None:
        compiled, generated = pair
        variables = list(compiled.graph.variables)
        before = [variable.version for variable in variables]
        losses = [(compiled.step().item(), generated.step().item()) for _ in range(5)]
        torch.testing.assert_close(*zip(*losses, strict=True), rtol=1e-4, atol=1e-5)
        check_equal(pair)
        written = [now.version - was for now, was in zip(variables, before, strict=True)]
        assert compiled.is_direct and set(written) == {5}
        fed = {compiled.x: compiled.feeds[0], compiled.y: compiled.feeds[1]}
        assert compiled.session.run({"a": compiled.loss, "b": (compiled.train,)}, fed).keys() == {"a", "b"}

    @pytest.mark.parametrize(
        "fed",
        [
            lambda x: x.t().contiguous().t(), lambda x: x.double().float().requires_grad_(), lambda x: x.numpy(),
            lambda x: torch._neg_view(-x), lambda x: torch.cat([x, x]), lambda x: nn.Parameter(x.clone()),
            lambda x: x.clone().expand(ROWS, 6), lambda x: x.tolist(), lambda x: torch.cat([x, x])[::2],
        ],
        ids=["strided", "leaf", "numpy", "negated", "longer", "parameter", "view", "list", "rows"],
    )  # fmt: skip
    def test_other_feeds_give_what_generated_code_gives(
        self, pair: tuple[Trained, Trained], fed: Callable[[torch.Tensor], Any]
    ) -> None:
        compiled, generated = pair
        for _ in range(2):
            got, wanted = (
                trained.call(fed(trained.feeds[0]), trained.feeds[1][torch.arange(len(fed(trained.feeds[0]))) % ROWS])[
                    0
                ]
                for trained in pair
            )
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        compiled.step(), generated.step()
        check_equal(pair)

    @pytest.mark.parametrize("kind", ["inference", "sparse", "dtype", "short", "meta"])
    def test_feeds_that_do_not_fit_are_refused_as_ever(self, pair: tuple[Trained, Trained], kind: str) -> None:
        compiled, generated = pair
        x = compiled.feeds[0]
        with torch.inference_mode():
            inference = x.clone()
        bad = {"inference": inference, "sparse": x.to_sparse(), "dtype": x.to(torch.complex64), "short": x[:, :5],
               "meta": x.to("meta")}[kind]  # fmt: skip
        said = []
        for trained in pair:
            try:
                said.append(str(trained.step(bad)))
            except (TfnbError, RuntimeError) as error:
                said.append(type(error).__name__)
        assert said[0][:6] == said[1][:6]
        compiled.step(), generated.step()
        check_equal(pair)

    @pytest.mark.parametrize(
        "change",
        [
            lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(5, 6))),
            lambda model: setattr(model[0].weight, "data", torch.full((5, 6), 0.5)),
            lambda model: setattr(model[0].weight, "data", torch.full((6, 5), 0.25).t()),
            lambda model: setattr(model[0].weight, "data", torch.full((5, 12), 0.25)[:, ::2]),
            lambda model: setattr(model[0].bias, "data", torch.full((1,), 0.25).expand(5).clone()),
            lambda model: model[0].weight.data.mul_(3),
            lambda model: setattr(model[1], "running_mean", torch.ones(5)),
            lambda model: model.load_state_dict(nn.Sequential(*model).state_dict(), assign=True),
            lambda model: model[0].register_parameter("weight", nn.Parameter(torch.full((5, 6), 0.1))),
            lambda model: model[0]._parameters.update(weight=nn.Parameter(torch.full((5, 6), 0.1))),
            lambda model: setattr(model[0], "_parameters", nn.Linear(6, 5)._parameters),
        ],
        ids=["assigned", "data", "columns", "strided", "bias", "written", "buffer", "loaded", "registered", "table",
             "tables"],
    )  # fmt: skip
    def test_a_variable_that_lies_elsewhere_is_followed(
        self, pair: tuple[Trained, Trained], change: Callable[[nn.Module], object]
    ) -> None:
        for trained in pair:
            torch.manual_seed(1)
            change(trained.model)
            for _ in range(3):
                trained.step()
        check_equal(pair)

    def test_a_submodule_that_is_another_one_is_refused(self, pair: tuple[Trained, Trained]) -> None:
        for trained in pair:
            trained.model[0] = nn.Linear(6, 5)
            user_code_ran()  # a comparison is due
            with pytest.raises(StaleNode, match=r"submodule 0 of Sequential .* is another one now"):
                trained.step()

    def test_a_feed_that_is_the_memory_of_a_variable_is_read_before_it_is_written(
        self, pair: tuple[Trained, Trained]
    ) -> None:
        for trained in pair:
            memory = torch.randn(ROWS * 6, generator=torch.Generator().manual_seed(3))
            trained.model[0].weight.data = memory[:30].view(5, 6)
            for _ in range(3):
                trained.step(memory.view(ROWS, 6))
        check_equal(pair)

    def test_tensors_of_another_size_under_the_same_object_are_an_error_and_nothing_is_written(
        self, pair: tuple[Trained, Trained]
    ) -> None:
        compiled, _ = pair
        before = compiled.model[3].weight.detach().clone()
        compiled.model[0].weight.data = torch.zeros(2, 2)
        with pytest.raises(TfnbError):
            compiled.step()
        assert torch.equal(compiled.model[3].weight, before)

    def test_it_waits_for_who_reads_and_lets_those_that_wait_go_on(self, pair: tuple[Trained, Trained]) -> None:
        compiled, _ = pair
        variables = list(compiled.graph.variables)
        thread = threading.Thread(target=compiled.step)
        with LOCKS.read(*variables):
            before = [variable.version for variable in variables]
            thread.start()
            time.sleep(0.2)
            assert thread.is_alive() and [variable.version for variable in variables] == before
        thread.join(100)
        assert not thread.is_alive() and [variable.version for variable in variables] == [v + 1 for v in before]
        compiled.step()
        compiled.step()
        assert compiled.is_direct and not LOCKS.holds

    def test_steps_of_threads_take_turns_and_none_is_lost(self) -> None:
        interval, steps, threads = sys.getswitchinterval(), 3000, 4
        one, two = (tfnb.Variable(torch.zeros(size, dtype=torch.float64)) for size in (2000, 3))
        with tfnb.record() as graph:
            x = tfnb.placeholder(torch.ones(2000, dtype=torch.float64), shape=(2000,))
            both = tfnb.group(one.assign_add(x), two.assign_add(x[:3]))
        session = tfnb.Session(graph, compile="now")
        call, fed, torn = session.make_callable([both], [x]), torch.ones(2000, dtype=torch.float64), []
        for _ in range(3):
            call(fed)
        (prepared,) = session._prepared.values()
        assert prepared.direct is not None

        def work() -> None:
            for _ in range(steps):
                call(fed)

        def look() -> None:
            for _ in range(200):
                cut = LOCKS.cut([one, two])
                torn.append({*cut.copies[one].tolist(), *cut.copies[two].tolist()})

        found = [threading.Thread(target=target) for target in (*[work] * threads, look)]
        sys.setswitchinterval(1e-5)
        try:
            for thread in found:
                thread.start()
            for thread in found:
                thread.join(120)
        finally:
            sys.setswitchinterval(interval)
        assert {*one.value().tolist(), *two.value().tolist()} == {3 + steps * threads}
        assert one.version == two.version == 3 + steps * threads
        assert all(len(seen) == 1 for seen in torn)

    def test_a_deadline_that_is_far_away_needs_no_generated_code(self, pair: tuple[Trained, Trained]) -> None:
        compiled, (_, generated) = Trained("now"), pair  # which finds it in the cache
        fed = {compiled.x: compiled.feeds[0], compiled.y: compiled.feeds[1]}
        for _ in range(3):
            compiled.session.run([compiled.loss, compiled.train], fed, timeout=60)
        (prepared,) = compiled.session._prepared.values()
        assert compiled.is_direct and prepared.code.program.made is None
        check_equal((compiled, generated))
        prepared.guarded.seconds = 7.0
        compiled.session.run([compiled.loss, compiled.train], fed, timeout=60)
        assert prepared.code.program.made is not None  # which can be stopped

    def test_a_deadline_ends_the_waiting_for_other_steps(self, pair: tuple[Trained, Trained]) -> None:
        compiled, _ = pair
        fed = {compiled.x: compiled.feeds[0], compiled.y: compiled.feeds[1]}
        before = [variable.version for variable in compiled.graph.variables]
        said: list[BaseException] = []

        def work() -> None:
            try:
                compiled.session.run(compiled.train, fed, timeout=0.3)
            except TfnbError as error:
                said.append(error)

        thread = threading.Thread(target=work)
        with LOCKS.read(*compiled.graph.variables):
            thread.start()
            thread.join(100)
        assert [type(error) for error in said] == [DeadlineExceeded]
        assert [variable.version for variable in compiled.graph.variables] == before

    def test_a_closed_session_runs_nothing(self, pair: tuple[Trained, Trained]) -> None:
        compiled, _ = pair
        compiled.session.close()
        with pytest.raises(FailedPrecondition):
            compiled.step()

    def test_it_keeps_no_module_alive(self) -> None:
        compiled = Trained("now")
        for _ in range(3):
            compiled.step()
        assert compiled.is_direct
        gone = [weakref.ref(compiled.model[0]), weakref.ref(compiled.model[0].weight)]
        compiled.model = nn.Sequential()
        gc.collect()
        assert [reference() for reference in gone] == [None, None]
        first = compiled.graph.variables[0]
        before = first.value()
        compiled.step()
        assert not torch.equal(first.value(), before)  # its Variables go on
