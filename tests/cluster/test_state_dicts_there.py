"""``state_dict()`` while a cluster is connected: what the servers hold, of one step, against plain PyTorch."""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tfnb.cluster.driver import Cluster
from tfnb.cluster.notebook.module_reads import pull_first

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randn(60, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def rows(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return X[4 * step % 60 :][:4], Y[4 * step % 60 :][:4]


class Twin:
    """The same network and optimizer twice: stepped by a graph, and by torch."""

    def __init__(self, make: Any = torch.optim.Adam, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Sequential(nn.Tanh(), nn.Linear(6, 2))
        ).double()
        self.plain = copy.deepcopy(self.model)
        self.optimizer = make(self.model.parameters(), **settings)
        self.torch = make(self.plain.parameters(), **settings)
        with tfnb.record():
            self.x, self.y = (tfnb.placeholder(part) for part in rows(0))
            self.step = tfnb.train.from_torch(self.optimizer).minimize(F.mse_loss(self.model(self.x), self.y))
        self.taken = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            x, y = rows(self.taken)
            tfnb.run(self.step, {self.x: x, self.y: y})
            self.eager()

    def eager(self) -> None:
        x, y = rows(self.taken)
        self.torch.zero_grad()
        F.mse_loss(self.plain(x), y).backward()
        self.torch.step()
        self.taken += 1


def alike(found: Any, expected: Any) -> None:
    torch.testing.assert_close(dict(found), dict(expected), rtol=1e-7, atol=1e-9)


def counted(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps of the pulls from here on."""
    pulls, pull = [], cluster._variables.pull
    monkeypatch.setattr(cluster._variables, "pull", lambda *args: pulls.append(pull(*args)) or pulls[-1])
    return pulls


def test_a_state_dict_after_runs_of_ones_own_is_that_of_torch(connect, monkeypatch) -> None:
    twin = Twin(lr=0.05)
    pulls = counted(connect(1), monkeypatch)
    twin.run(3)
    file = io.BytesIO()
    torch.save(twin.model.state_dict(), file)
    file.seek(0)
    alike(torch.load(file), twin.plain.state_dict())
    assert pulls == [3]
    twin.run(1)
    alike(twin.model[2].state_dict(prefix="tail."), twin.plain[2].state_dict(prefix="tail."))
    alike(twin.model.state_dict(), twin.plain.state_dict())
    assert pulls == [3, 4], "one for all, and none where nothing is newer there"
    twin.run(2)
    found, expected = twin.optimizer.state_dict(), twin.torch.state_dict()
    assert found["param_groups"] == expected["param_groups"] and pulls == [3, 4, 6]
    for number, state in expected["state"].items():
        alike(found["state"][number], state)
    alike(twin.model.state_dict(), twin.plain.state_dict())


def test_a_call_of_the_model_after_runs_of_ones_own_is_that_of_torch(connect, monkeypatch) -> None:
    twin = Twin(lr=0.05)
    pulls = counted(connect(1), monkeypatch)
    for wrapped in (twin.model, nn.DataParallel(twin.model), torch.compile(twin.model, backend="eager")):
        twin.run(2)
        for model in (twin.model, twin.plain):
            model.eval()
        torch.testing.assert_close(wrapped(X), twin.plain(X), rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(
            twin.model[2](X @ torch.ones(4, 6).double()), twin.plain[2](X @ torch.ones(4, 6).double())
        )
        for model in (twin.model, twin.plain):
            model.train()
    assert pulls == [2, 4, 6], "one for a call, and none where nothing is newer there"
    twin.run(1)
    with tfnb.record():
        found = twin.model(tfnb.constant(X))
    twin.plain.train()
    torch.testing.assert_close(found.sample, twin.plain(X), rtol=1e-7, atol=1e-9)
    assert pulls == [2, 4, 6, 7], "one for a recording, whose samples are those of now"


def test_a_call_in_mid_training_has_the_weights_of_one_step(connect) -> None:
    """Each step adds 1 to all weights of all layers, while calls come from another thread."""
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(3)))
    for part in model:
        nn.init.zeros_(part.weight)
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(2))
        step = tfnb.train.SGD(1.0).minimize(-sum(part.weight.sum() for part in model) * x.mean())
    connect(2)
    seen: list[tuple[float, ...]] = []

    def call() -> None:
        with torch.no_grad():
            seen.append((model(torch.ones(1)).item(), *(part.weight.item() for part in model)))

    class Looks:
        def on_step(self, progress: Any) -> None:
            if progress.step % 10 == 0:
                call()

    tfnb.fit(step, {x: torch.ones(200)}, epochs=1, batch_size=2, mode="async", callbacks=[Looks()])
    call()
    assert len(seen) > 5 and seen[-1] == (1e6, 100.0, 100.0, 100.0)
    assert all(product == first * second * third for product, first, second, third in seen), seen
    assert all(len(set(weights)) == 1 for _, *weights in seen), seen


class Own(torch.optim.Optimizer):
    """Momentum in a class of the user's, with a count that is a number of Python."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(count=0, buffer=torch.zeros_like(parameter))
                state["count"] += 1
                state["buffer"].mul_(0.9).add_(parameter.grad)
                parameter.sub_(state["buffer"] * group["lr"] / state["count"])


def test_an_optimizer_of_a_class_of_the_users(connect) -> None:
    twin = Twin(Own, lr=0.05)
    connect(1)
    for steps in (2, 1, 2):
        twin.run(steps)
        found, expected = (each.state_dict()["state"] for each in (twin.optimizer, twin.torch))
        for number, state in expected.items():
            alike({"buffer": found[number]["buffer"]}, {"buffer": state["buffer"]})
            assert int(found[number]["count"]) == state["count"] == twin.taken
        alike(twin.model.state_dict(), twin.plain.state_dict())


def test_wrappers_that_come_later_and_a_reused_destination(connect, monkeypatch) -> None:
    twin = Twin(torch.optim.SGD, lr=0.05, momentum=0.9)
    pulls = counted(connect(1), monkeypatch)
    found: dict[str, torch.Tensor] = {}
    for steps in (1, 2, 3):
        twin.run(1)
        wrapped = nn.DataParallel(nn.ModuleList([twin.model, nn.Linear(1, 1)]))
        wrapped.state_dict(destination=found)
        expected = {f"module.0.{name}": value for name, value in twin.plain.state_dict().items()}
        alike({name: found[name] for name in expected}, expected)
        assert pulls == list(range(1, steps + 1))


class Two(nn.Module):
    """A network of which a graph knows the head, and that only by its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.tied = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.tied.weight = self.head.weight
        self.gain = nn.Parameter(torch.ones(2))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: value.clone() for name, value in super().state_dict(*args, **kwargs).items()}


def test_what_a_graph_knows_by_its_weights_and_two_models(connect, monkeypatch) -> None:
    torch.manual_seed(0)
    two, other = Two().double(), Twin(torch.optim.SGD, lr=0.1)
    start = two.head.weight.detach().clone()
    with tfnb.record():
        x = tfnb.placeholder(X[:4])
        step = tfnb.train.SGD(0.1).minimize((F.linear(x, two.head.weight) * two.gain).sum())
    pulls = counted(connect(1), monkeypatch)
    tfnb.run(step, {x: X[:4]})
    assert other.model.state_dict() and pulls == []
    other.run(1)
    expected = start - 0.1 * X[:4].sum(0)
    alike(two.tied.state_dict(), {"weight": expected, "bias": two.tied.bias})
    assert len(pulls) == 1
    tfnb.run(step, {x: X[:4]})
    found = two.state_dict()
    assert len(pulls) == 2 and torch.equal(found["head.weight"], found["tied.weight"])
    alike({"gain": found["gain"], "body": found["body.bias"]}, {"gain": two.gain, "body": two.body.bias})
    assert not torch.allclose(found["head.weight"], expected)
    alike(other.model.state_dict(), other.plain.state_dict())


def test_models_pickle_and_copy_and_the_hook_goes_at_close(connect) -> None:
    twin = Twin(lr=0.05)
    cluster = connect(1)
    averaged = torch.optim.swa_utils.AveragedModel(twin.model)
    twin.run(2)
    before = {name: value.clone() for name, value in averaged.state_dict().items()}
    twin.run(1)
    averaged_now = averaged.state_dict()
    alike(averaged_now, before)
    copied, pickled = copy.deepcopy(twin.model), pickle.loads(pickle.dumps(twin.model))
    file = io.BytesIO()
    torch.save(twin.model, file)
    file.seek(0)
    optimizers = copy.deepcopy(twin.optimizer), pickle.loads(pickle.dumps(twin.optimizer))
    for one in (copied, pickled, torch.load(file, weights_only=False), *optimizers):
        assert one.state_dict()
    alike(twin.model.state_dict(), twin.plain.state_dict())
    assert pull_first in twin.model._state_dict_pre_hooks.values()
    assert pull_first in twin.model[2][1]._state_dict_pre_hooks.values()
    cluster.close()
    for module in twin.model.modules():
        assert not module._state_dict_pre_hooks
    assert not twin.optimizer._optimizer_state_dict_pre_hooks
    twin.run(1)
    alike(twin.model.state_dict(), twin.plain.state_dict())


def test_what_was_written_here_is_shown_and_sent(connect) -> None:
    twin = Twin(torch.optim.SGD, lr=0.05)
    connect(1)
    twin.run(1)
    twin.model.state_dict()
    for model in (twin.model, twin.plain):
        with torch.no_grad():
            model[0].weight.fill_(0.5)
    alike(twin.model.state_dict(), twin.plain.state_dict())
    twin.run(1)
    alike(twin.model.state_dict(), twin.plain.state_dict())


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_callbacks_of_fit_and_other_threads_see_whole_steps(connect, mode: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(6)])  # each entry counts the steps down
    for part in model:
        nn.init.zeros_(part.weight)
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(2))
        loss = sum(part.weight.sum() for part in model) * x.mean()
        step = tfnb.train.SGD(1.0).minimize(loss)
    connect(2)
    seen: list[set[float]] = []

    def look(*_: Any) -> None:
        found = {name: value.clone() for name, value in model.state_dict().items()}
        seen.append({float(entry) for value in found.values() for entry in value.unique()})

    class Looks:
        def on_step(self, progress: Any) -> None:
            if progress.step % 20 == 0:
                look()

        def on_epoch(self, progress: Any) -> None:
            look()

    tfnb.fit(step, {x: torch.ones(400)}, epochs=1, batch_size=2, mode=mode, callbacks=[Looks()])
    assert len(seen) > 5
    assert seen[-1] == {-200.0} or mode == "sync"
    there = len(seen)
    other = threading.Thread(target=lambda: [look() for _ in range(5)])
    other.start()
    tfnb.fit(step, {x: torch.ones(400)}, epochs=1, batch_size=2, mode=mode)
    other.join(60)
    assert not other.is_alive() and len(seen) == there + 5
    look()
    assert seen[-1] == {-400.0}
    assert all(len(values) == 1 for values in seen[:there]), seen


def test_nothing_is_asked_in_a_recording_or_a_forked_child(connect) -> None:
    twin = Twin(lr=0.05)
    cluster = connect(1)
    twin.run(1)
    with tfnb.record():
        tfnb.run(twin.step, {twin.x: rows(1)[0], twin.y: rows(1)[1]})
        twin.model.state_dict()
    assert cluster.pulled_step == 1, "as each recording does first, and then none"
    twin.eager()
    child = os.fork()
    if not child:
        try:
            os._exit(0 if twin.model.state_dict() and twin.optimizer.state_dict() else 1)
        finally:
            os._exit(2)
    end = time.monotonic() + 30
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
        time.sleep(0.02)
    assert done == (child, 0) and cluster.pulled_step == 1
    alike(twin.model.state_dict(), twin.plain.state_dict())


def test_with_a_server_lost_the_last_pulled_values_and_their_step(connect, monkeypatch) -> None:
    monkeypatch.setattr("tfnb.cluster.notebook.variables_there.REFRESH", 1e9)  # no copy at other processes
    twin = Twin(torch.optim.SGD, lr=0.05)
    cluster = connect(3)
    twin.run(2)
    pulled = {name: value.clone() for name, value in twin.model.state_dict().items()}
    twin.run(3)
    os.kill(cluster._engine.servers[0].info["pid"], signal.SIGKILL)
    with pytest.warns(UserWarning, match=r"state_dict\(\) has the values here, of step 2"):
        found = twin.model.state_dict()
    alike(found, pulled)
    with pytest.warns(UserWarning, match=r"state_dict\(\) has the values here: the cluster was lost.*step 2"):
        twin.optimizer.state_dict()
    alike(copy.deepcopy(twin.model).state_dict(), pulled)
    with pytest.warns(UserWarning, match="the cluster was lost"):
        tfnb.run(twin.step, {twin.x: rows(0)[0], twin.y: rows(0)[1]})
    assert not torch.equal(twin.model.state_dict()["0.weight"], pulled["0.weight"])
    cluster.close()
    assert not twin.model._state_dict_pre_hooks


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_have_the_hook_too(connect) -> None:
    torch.manual_seed(0)
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 2)))
    start = model.state_dict()["0.weight"].clone()
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3, 4))
        step = tfnb.train.SGD(0.5).minimize(F.linear(x, getattr(model, "0").weight).sum())
    connect(1)
    tfnb.run(step, {x: torch.ones(3, 4)})
    alike({"0": model.state_dict()["0.weight"]}, {"0": start - 1.5})
