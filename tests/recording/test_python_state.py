"""Python state that a recording read: a change is an error before the next run, state that Python keeps is noted."""

from __future__ import annotations

import copy
import enum
import itertools
import warnings
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import tfnb
from tfnb.errors import StaleNode, Unsupported
from tfnb.recording import user_code_ran
from tfnb.recording.marks import python_guards

X = torch.linspace(-1, 1, 12).reshape(4, 3)


class Net(nn.Module):
    """Reads attributes, a text, a helper's attribute and one by its name; sets others."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.0))
        self.heads = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.norm = nn.BatchNorm1d(3)
        self.beta, self.kind, self.slope, self.size = 2.0, "tanh", 0.5, (3,)
        self.activation, self.extra = torch.tanh, None
        self.unread = 1.0
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.body(x)) * self.beta
        for block in self.blocks:
            x = block(x)
        x = self._bent(x).reshape(-1, *self.size)
        if self.extra is not None:
            x = x + self.extra
        self.last = x.detach()
        return self.heads[0](self.activation(x)) + self.last.sum() * 0

    def _bent(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) if self.kind == "tanh" else x * getattr(self, "slope")  # noqa: B009  read by name

    def report(self) -> float:
        """No part of `forward`."""
        return self.unread


def stepped(net: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> tuple[Any, ...]:
    """A recorded step of a net."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    with tfnb.record():
        x = tfnb.placeholder(X)
        optimizer.zero_grad()
        y = net(x)
        loss = y.square().mean()
        loss.backward()
        step = optimizer.step()
    return x, y, loss, step


def run(fetch: Any, x: Any) -> Any:
    user_code_ran()  # as after a cell: the next run compares at once
    return tfnb.run(fetch, {x: X})


def hooked(net: Net) -> None:
    net.body[0].register_forward_hook(lambda module, args, out: out * 2)


CHANGES: dict[str, tuple[Callable[[Net], Any], str]] = {
    "number": (lambda n: setattr(n, "beta", 3.0), r"attribute beta of net \(Net\) was 2.0, and is 3.0 now"),
    "number to tensor": (lambda n: setattr(n, "beta", torch.ones(3)), r"beta .* is a tensor \(3,\) now"),
    "text": (lambda n: setattr(n, "kind", "relu"), "attribute kind .* was 'tanh', and is 'relu' now"),
    "tuple": (lambda n: setattr(n, "size", (1, 3)), r"attribute size .* was \(3,\), and is \(1, 3\) now"),
    "none": (lambda n: setattr(n, "extra", 1.0), "attribute extra .* was None, and is 1.0 now"),
    "function": (lambda n: setattr(n, "activation", torch.relu), "attribute activation"),
    "of a module of torch": (lambda n: setattr(n.body[2], "p", 0.5), r"attribute p of net.body.2 \(Dropout\) was 0.0"),
    "momentum": (lambda n: setattr(n.norm, "momentum", 0.5), r"attribute momentum of net.norm \(BatchNorm1d\)"),
    "submodule": (lambda n: setattr(n, "norm", nn.BatchNorm1d(3)), r"submodule norm of net \(Net\) is another one"),
    "deleted": (lambda n: n.body.__delitem__(1), "submodule 1 of net.body .*; the number|the number of submodules"),
    "replaced in a list": (lambda n: n.blocks.__setitem__(0, nn.Linear(3, 3)), "submodule"),
    "inserted": (lambda n: n.body.append(nn.Tanh()), r"the number of submodules of net.body \(Sequential\) was 3"),
    "no bias": (lambda n: n.body[0].register_parameter("bias", None), r"parameter bias of net.body.0 .* was there"),
    "hook": (hooked, "the forward hooks of net.body.0 .* are 1 now, and were 0"),
    "forward": (lambda n: setattr(n.norm, "forward", lambda x: x), "forward of net.norm"),
    "pruned": (lambda n: prune.l1_unstructured(n.body[0], "weight", 0.5), "net.body.0"),
    "parametrized": (lambda n: parametrizations.weight_norm(n.body[0]), "net.body.0"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_after_the_recording_is_an_error_that_names_it(kind: str) -> None:
    change, said = CHANGES[kind]
    net = Net()
    x, y, _, step = stepped(net)
    run([y, step], x)
    change(net)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(StaleNode, match=f"(?s){said}.*test_python_state.py line .*record it again"):
        run(step, x)
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)


def test_a_change_that_is_taken_back_counts_no_more() -> None:
    net = Net()
    x, y, *_ = stepped(net)
    want = run(y, x)
    net.beta = 3.0
    with pytest.raises(StaleNode):
        run(y, x)
    net.beta = 2.0
    torch.testing.assert_close(run(y, x), want)


def quiet_changes() -> dict[str, Callable[[Net], Any]]:
    other = Net()
    return {
        "load_state_dict": lambda n: n.load_state_dict(other.state_dict()),
        "values": lambda n: n.body[0].weight.data.fill_(0.5),
        "unread attribute": lambda n: setattr(n, "unread", 7.0),
        "attribute that forward sets first": lambda n: setattr(n, "last", torch.ones(4, 3)),
        "attribute of a branch not taken is one of the class": lambda n: setattr(n, "comment", "hello"),
        "head that was not called": lambda n: n.heads.__setitem__(1, nn.Linear(3, 7)),
        "further head": lambda n: n.heads.append(nn.Linear(3, 7)),
        "further module": lambda n: setattr(n, "decoder", nn.Linear(3, 3)),
        "eager call": lambda n: n(X),
        "hook that went again": lambda n: n.register_forward_hook(print).remove(),
        "evaluation and back": lambda n: (n.eval() and n(X) is None) or n.train(),
        "gradients": lambda n: n(X).sum().backward(),
        "state dict": lambda n: copy.deepcopy(n).state_dict(),
    }


@pytest.mark.parametrize("kind", quiet_changes())
def test_other_changes_go_on(kind: str) -> None:
    net = Net()
    x, y, _, step = stepped(net)
    run(step, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet_changes()[kind](net)
        run([y, step], x)
        net.double()
    assert net.body[0].weight.dtype is torch.float64


def frozen(net: nn.Module) -> None:
    net.requires_grad_(False)


GRADIENTS: dict[str, tuple[Callable[[nn.Module, torch.optim.Optimizer], Any], str]] = {
    "frozen": (lambda n, o: n[0].requires_grad_(False), "requires_grad of 0.weight was True, and is False now"),
    "parameter hook": (lambda n, o: n[0].weight.register_hook(lambda g: g * 0), "gradient hooks of 0.weight"),
    "group": (lambda n, o: o.add_param_group({"params": [nn.Parameter(torch.ones(1))]}), "groups of SGD"),
    "assign": (
        lambda n, o: n.load_state_dict(copy.deepcopy(n.state_dict()), assign=True),
        "0.weight is another Parameter now, of which SGD does not know",
    ),
    "list": (lambda n, o: o.param_groups[0]["params"].pop(), r"the groups of SGD had \[4\] parameters, and have \[3\]"),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_flags_and_groups_count_where_gradients_are_reached(kind: str) -> None:
    change, said = GRADIENTS[kind]
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y, _, step = stepped(net, optimizer)
    run(step, x)
    change(net, optimizer)
    run(y, x)
    with pytest.raises(StaleNode, match=said):
        run(step, x)


def test_learning_rates_and_flags_that_cells_set_in_turn_go_on() -> None:
    torch.manual_seed(0)
    critic, actor = nn.Linear(3, 1), nn.Linear(3, 3)
    plain = copy.deepcopy((critic, actor))

    def steps(critic: nn.Module, actor: nn.Module) -> tuple[Callable[..., Any], Callable[..., Any]]:
        of_critic, of_actor = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (critic, actor))

        def first(x: torch.Tensor) -> Any:
            critic.requires_grad_(True)
            of_critic.zero_grad()
            critic(actor(x).detach()).mean().backward()
            return of_critic.step()

        def second(x: torch.Tensor) -> Any:
            critic.requires_grad_(False)
            of_actor.zero_grad()
            (-critic(actor(x)).mean()).backward()
            return of_actor.step()

        return first, second

    made = []
    for step in steps(critic, actor):
        with tfnb.record():
            x = tfnb.placeholder(X)
            made.append((step(x), x))
    eager = steps(*plain)
    for _ in range(3):
        for (step, x), twin in zip(made, eager, strict=True):
            run(step, x)
            twin(X)
    torch.testing.assert_close([*critic.state_dict().values()], [*plain[0].state_dict().values()])
    torch.testing.assert_close([*actor.state_dict().values()], [*plain[1].state_dict().values()])


def test_only_runs_that_use_the_changed_part_are_stopped() -> None:
    one, two = nn.Dropout(0.25), nn.Dropout(0.25)
    with tfnb.record():
        x = tfnb.placeholder(X)
        y, z = one(x), two(x)
    two.p = 0.5
    run(y, x)
    with pytest.raises(StaleNode, match="attribute p of two"):
        run([y, z], x)


def test_a_change_is_noticed_before_a_run_that_takes_long_enough_and_in_callables() -> None:
    import time

    net = nn.Dropout(0.0)
    with tfnb.record() as graph:
        x = tfnb.placeholder(X)
        y = net(x * 2)
    call = tfnb.Session(graph).make_callable(y, [x])
    call(X)
    net.p = 0.5
    time.sleep(0.01)
    with pytest.raises(StaleNode):
        call(X)


def test_fit_compares_at_its_start_and_after_each_callback() -> None:
    net = Net()
    x, _, loss, step = stepped(net)
    seen = []

    def anneal(progress: Any) -> None:
        seen.append(progress.epoch)
        net.beta = 0.5 if progress.epoch == 2 else 2.0

    with pytest.raises(StaleNode, match="attribute beta"):
        tfnb.fit(step, {x: X}, epochs=5, watch=[loss], callbacks=anneal)
    assert seen == [1, 2]
    with pytest.raises(StaleNode, match="attribute beta"):
        tfnb.fit(step, {x: X})


def test_the_mode_of_a_module_is_said_once_where_no_recording_has_it() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    with tfnb.record():
        x = tfnb.placeholder(X)
        y = net(x)
    net.eval()
    with pytest.warns(UserWarning, match=r"Dropout\) is in evaluation mode now, and this run computes it in training"):
        run(y, x)
    run(y, x)  # once
    with tfnb.record():
        z = net(tfnb.placeholder(X, name="z"))
    assert z is not None
    net.train()
    run(y, x)


def test_modes_of_two_recordings_are_no_change() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.BatchNorm1d(3))
    with tfnb.record() as graph:
        x = tfnb.placeholder(X)
        y = net(x)
    net.eval()
    with tfnb.record(graph):
        z = net(x)
    for fetch in (y, z, y):
        run(fetch, x)


# -- numbers of the program -----------------------------------------------------------------------------------------

scale, parts, rows = 2.0, [1.0, 2.0], 4


def test_numbers_of_the_program_are_said_once_and_samples_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(3, 3)
    net.temperature = 1.0
    bias = 1
    with tfnb.record():
        x = tfnb.placeholder(torch.zeros(rows, 3))
        n = 5
        y = net(x) * scale * parts[0] * n + bias
    run(y, x)
    monkeypatch.setitem(globals(), "rows", 7)
    run(y, x)  # the size of a sample only
    monkeypatch.setitem(globals(), "scale", 3.0)
    with pytest.warns(UserWarning, match=r"scale was 2.0 when .*, and is 3.0 now: the graph computes with the former"):
        run(y, x)
    run(y, x)
    monkeypatch.setitem(globals(), "parts", [0.5, 2.0])
    with pytest.warns(UserWarning, match=r"parts was \[1.0, 2.0\]"):
        run(y, x)
    bias += 1
    with pytest.warns(UserWarning, match="bias was 1 when"):
        run(y, x)
    n += 1
    run(y, x)


def test_numbers_of_one_name_in_two_modules_are_both_said() -> None:
    tables: list[dict[str, Any]] = [{"rate": 2.0}, {"rate": 5.0}]
    exec(compile("def divided(x):\n    return x / rate", __file__, "exec"), tables[1])
    tables[0]["divided"] = tables[1]["divided"]
    exec(compile("def both(x):\n    return divided(x * rate)", __file__, "exec"), tables[0])
    both: Any = tables[0]["both"]
    with tfnb.record():
        x = tfnb.placeholder(torch.zeros(rows, 3))
        y = both(x)
    run(y, x)
    for table, was in zip(tables, ("2.0", "5.0"), strict=True):
        table["rate"] = 7.0
        with pytest.warns(UserWarning, match=f"rate was {was} when"):
            run(y, x)
    run(y, x)


def test_an_attribute_that_the_block_itself_reads_of_a_module() -> None:
    net = nn.Linear(3, 3)
    net.temperature, net.epoch = 1.0, 0
    with tfnb.record():
        x = tfnb.placeholder(X)
        y = net(x) / net.temperature
    net.epoch = 1
    run(y, x)
    net.temperature = 2.0
    with pytest.raises(StaleNode, match=r"attribute temperature of net \(Linear\) was 1.0, and is 2.0 now"):
        run(y, x)


def squared(x: torch.Tensor) -> torch.Tensor:
    return x.square()


class Criterion:
    """An object of the program that is called, one method of which reads an attribute."""

    def __init__(self, weight: float) -> None:
        self.weight, self.calls = weight, 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.weight


def times(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * factor


SETTINGS: dict[str, tuple[str, Any, Callable[[Any], Any], str]] = {
    "attribute": ("x * its.beta", SimpleNamespace(beta=1.0), lambda its: setattr(its, "beta", 2.0), "its.beta was 1.0"),
    "path": (
        "x * its.loss.beta", SimpleNamespace(loss=SimpleNamespace(beta=1.0)),
        lambda its: setattr(its.loss, "beta", 2.0), "its.loss.beta was 1.0 when .*, and is 2.0 now",
    ),
    "dict with texts": (
        "x * its['beta']", {"name": "run", "beta": 1.0}, lambda its: its.update(beta=2.0),
        r"its was \{'name': 'run', 'beta': 1.0\} when",
    ),
    "text": ("x * 2 if its == 'plain' else -x", "plain", lambda its: "negative", "its was 'plain' when"),
    "NumPy number": ("x * its", np.float32(1.0), lambda its: np.float32(2.0), "its was 1.0 when .*, and is 2.0 now"),
    "NumPy array": (
        "x * torch.from_numpy(its)", np.ones(3, np.float32), lambda its: its.fill(2.0), r"its was \[1.0, 1.0, 1.0\]",
    ),
    "module": ("its(x)", nn.Linear(3, 3), lambda its: nn.Linear(3, 3), "its is another Linear now than when"),
    "function": ("its(x)", squared, lambda its: torch.abs, "its is another function now than when"),
    "lambda": ("its(x)", lambda x: x + 1, lambda its: lambda x: x + 2, "its is another function now than when"),
    "enclosed": ("its(x)", times(2.0), lambda its: times(3.0), "its is another function now than when"),
    "partial": (
        "its(x)", partial(torch.add, other=1.0), lambda its: partial(torch.add, other=2.0), "its is another function",
    ),
    "callable": ("its(x)", Criterion(1.0), lambda its: setattr(its, "weight", 2.0), "its.weight was 1.0 when"),
    "method": ("its.part(x)", Criterion(1.0), lambda its: Criterion(2.0), "its.weight was 1.0 when"),
    "attribute of a global": ("read(x)", None, lambda its: setattr(options, "beta", 2.0), "options.beta was 1.0 when"),
}  # fmt: skip
options = SimpleNamespace(beta=1.0)


def read(x: torch.Tensor) -> torch.Tensor:
    return x * options.beta


def block(tmp_path: Path, formula: str) -> Callable[[dict[str, Any]], Any]:
    """A block of a file that records ``y = formula`` from names of its module."""
    file = tmp_path / "block.py"
    file.write_text(f"with tfnb.record():\n    x = tfnb.placeholder(X)\n    y = {formula}\n")
    return lambda names: exec(compile(file.read_text(), str(file), "exec"), names)


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_setting_of_the_program_that_changed_is_said_once(kind: str, tmp_path: Path) -> None:
    formula, before, change, said = copy.deepcopy(SETTINGS[kind])
    names: dict[str, Any] = {"tfnb": tfnb, "torch": torch, "X": X, "its": before, "read": read}
    block(tmp_path, formula)(names)
    y, x = names["y"], names["x"]
    run(y, x)
    after = change(before)
    names["its"] = before if after is None else after
    try:
        with pytest.warns(UserWarning, match=said):
            run(y, x)
        run(y, x)
    finally:
        options.beta = 1.0


def test_a_scheduler_that_counts_steps_makes_no_other_function_of_them(tmp_path: Path) -> None:
    net = nn.Linear(3, 3)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    names: dict[str, Any] = {"tfnb": tfnb, "X": X, "net": net, "opt": opt}
    block(tmp_path, "net(x); opt.zero_grad(); y.sum().backward(); step = opt.step()")(names)
    torch.optim.lr_scheduler.StepLR(opt, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(names["step"], names["x"])


def test_an_optimizer_that_another_one_replaced_is_said(tmp_path: Path) -> None:
    net = nn.Linear(3, 3)
    names: dict[str, Any] = {"tfnb": tfnb, "X": X, "net": net, "opt": torch.optim.SGD(net.parameters(), lr=0.1)}
    block(tmp_path, "net(x); opt.zero_grad(); y.sum().backward(); step = opt.step()")(names)
    run(names["step"], names["x"])
    names["opt"] = torch.optim.SGD(net.parameters(), lr=0.01)
    with pytest.warns(UserWarning, match="opt is another SGD now than when .* was recorded: the graph computes with"):
        run(names["step"], names["x"])


def test_an_optimizer_of_ours_that_another_one_replaced_is_said(tmp_path: Path) -> None:
    net = nn.Linear(3, 3)
    names: dict[str, Any] = {"tfnb": tfnb, "X": X, "net": net, "opt": tfnb.train.Adam(0.1)}
    block(tmp_path, "net(x); step = opt.minimize(y.sum())")(names)
    run(names["step"], names["x"])
    names["opt"] = tfnb.train.Adam(0.01)
    with pytest.warns(UserWarning, match="opt is another Adam now than when .* was recorded: the graph computes with"):
        run(names["step"], names["x"])


def test_what_is_recorded_alike_is_no_other_setting(tmp_path: Path) -> None:
    def names_of(lines: str) -> dict[str, Any]:
        table: dict[str, Any] = {"torch": torch}
        exec(compile(f"{lines}def its(x, scale=2.0):\n    return (lambda z: z * scale)(x)\n", "<cell>", "exec"), table)
        return table

    names: dict[str, Any] = {"tfnb": tfnb, "X": X, "its": names_of("")["its"], "log": {"losses": []}, "c": Criterion(1)}
    block(tmp_path, "its(x) * c.part(x); log['losses'].append(y)")(names)
    run(names["y"], names["x"])
    names["its"] = names_of("# the cell has another first line now\n\n")["its"]
    names["log"]["losses"].append(1.0)
    names["c"].calls += 1
    run(names["y"], names["x"])
    names["its"] = "a text, of another purpose"
    run(names["y"], names["x"])


gain, offset = 2.0, torch.ones(3)


def gained(x: torch.Tensor) -> torch.Tensor:
    """A function of the program, which reads globals."""
    return x * gain + offset


class Gained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.settings, self.rates, self.mask = nn.Linear(3, 3), {"scale": 1.0}, [1.0, 2.0], torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gained(self.layer(x)) * self.settings["scale"] * self.rates[1] * self.mask


@pytest.mark.parametrize("program", [gained, Gained()], ids=["function", "forward"])
def test_globals_that_functions_of_the_program_read(
    monkeypatch: pytest.MonkeyPatch, program: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    with tfnb.record():
        x = tfnb.placeholder(X)
        y = program(x)
    run(y, x)
    monkeypatch.setitem(globals(), "gain", 3.0)
    with pytest.warns(UserWarning, match=r"gain was 2.0 when .*, and is 3.0 now: the graph computes with the former"):
        run(y, x)
    monkeypatch.setitem(globals(), "offset", torch.ones(3))
    run(y, x)
    monkeypatch.setitem(globals(), "offset", torch.zeros(3))
    with pytest.warns(UserWarning, match="offset has other values now than when"):
        run(y, x)
    run(y, x)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda net: net.settings.update(scale=3.0),
            r"settings of .*Gained.* was \{'scale': 1.0\}, and is \{'scale': 3.0",
        ),
        (lambda net: net.rates.__setitem__(1, 5.0), r"rates of .*Gained.* was \[1.0, 2.0\], and is \[1.0, 5.0\] now"),
    ],
    ids=["dict", "list"],
)
def test_lists_and_dicts_of_numbers_of_a_module(change: Callable[[nn.Module], None], said: str) -> None:
    net = Gained()
    with tfnb.record():
        x = tfnb.placeholder(X)
        y = net(x)
    run(y, x)
    change(net)
    with pytest.raises(StaleNode, match=said):
        run(y, x)


@pytest.mark.parametrize(
    "change",
    [lambda net: net.mask.zero_(), lambda net: setattr(net, "mask", torch.zeros(3))],
    ids=["in place", "another"],
)
def test_a_plain_tensor_that_changed_is_said_once(change: Callable[[nn.Module], None]) -> None:
    net, weights = Gained(), torch.ones(3)
    with tfnb.record():
        x = tfnb.placeholder(X)
        y = net(x)
        z = x * [weights][0].detach()
    run([y, z], x)
    change(net)
    with pytest.warns(UserWarning, match=r"attribute mask of .*Gained.* has other values now"):
        run(y, x)
    run([y, z], x)
    weights.mul_(1)
    run(z, x)
    weights.mul_(2)
    with pytest.warns(UserWarning, match=r"a tensor that .* line \d+ reads has other values now|weights has other"):
        run(z, x)
    run([y, z], x)


def test_a_parameter_that_an_optimizer_does_not_know_and_step_hooks() -> None:
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, _, _, step = stepped(net, optimizer)
    run(step, x)
    handle = optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(StaleNode, match="the step hooks of SGD are others now"):
        run(step, x)
    handle.remove()
    run(step, x)
    net.weight = nn.Parameter(torch.ones(1, 3))
    with pytest.raises(StaleNode, match="weight is another Parameter now, of which SGD does not know"):
        run(step, x)


def test_two_parameters_in_the_same_memory_are_not_written() -> None:
    down, up = nn.Linear(3, 2, bias=False), nn.Linear(2, 3, bias=False)
    up.weight.data = down.weight.data.t()
    optimizer = torch.optim.SGD([*down.parameters(), *up.parameters()], lr=0.1)
    net = nn.Sequential(down, up)
    x, _, _, step = stepped(net, optimizer)
    with pytest.raises(Unsupported, match=r"weight and .*weight are two Parameters or buffers in the same memory"):
        run(step, x)
    up.weight.data = up.weight.data.clone()
    run(step, x)


# -- state that Python keeps ----------------------------------------------------------------------------------------


class Keeps(nn.Module):
    """Each ``by_``: a `forward` that keeps something in another place from call to call, or only seems to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.count, self.hidden, self.seen, self.table = 0, torch.zeros(3), [], {"h": torch.zeros(3)}
        self.nothing, self.is_ready, self.cache, self.output, self.losses = None, False, None, None, []
        self.register_buffer("kept", torch.zeros(3))

    def by_counter(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.count += 1
        return x * self.count

    def by_attribute(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.hidden = torch.tanh(x + self.hidden).mean(0).detach()
        return x + self.hidden

    def by_none(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.nothing is None:
            self.nothing = torch.zeros(3)
        self.nothing = (x.mean(0) + self.nothing).detach()
        return x + self.nothing

    def by_flag(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if not self.is_ready:
            self.is_ready = True
            x = x * 2
        return x

    def by_in_place(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        with torch.no_grad():
            self.hidden.mul_(0.5).add_(x.mean(0))
        return x + self.hidden

    def by_list(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.seen.append(x.detach().mean(0))
        return torch.stack(self.seen).sum(0) + x

    def by_table(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.table["h"] = torch.tanh(x + self.table["h"]).mean(0).detach()
        return x + self.table["h"]

    def by_buffer(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        with torch.no_grad():
            self.kept.add_(x.mean(0))
        return x + self.kept

    def by_output(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.output = x * 2
        return self.output

    def by_cache(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.cache is None:
            self.cache = torch.arange(3.0)
        return x + self.cache

    def by_losses(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.losses.append(x.square().mean())
        return x

    @classmethod
    def by(cls, how: str) -> Keeps:
        return type("Keeps", (cls,), {"forward": vars(cls)[f"by_{how}"]})()


KEPT = {
    "counter": "count", "attribute": "hidden", "none": "nothing", "flag": "is_ready", "in_place": "hidden",
    "list": "seen", "table": "table",
}  # fmt: skip


@pytest.mark.parametrize("how", KEPT)
@pytest.mark.filterwarnings("ignore:.*does not write into a plain tensor")
def test_state_that_python_keeps_is_said(how: str) -> None:
    net = Keeps.by(how)
    with (
        pytest.warns(
            UserWarning,
            match=rf"line \d+: net \(Keeps\) keeps its attribute {KEPT[how]} in Python.*register_buffer.*tfnb.Variable",
        ) as said,
        tfnb.record(),
    ):
        y = net(tfnb.placeholder(X))
    assert y is not None and sum("keeps its attribute" in str(each.message) for each in said) == 1


@pytest.mark.parametrize("how", ["buffer", "output", "cache", "losses"])
def test_what_is_no_state_is_not_said(how: str) -> None:
    net = Keeps.by(how)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tfnb.record():
            y = net(tfnb.placeholder(X)) + sum(net.losses)
            net.losses.clear()
    assert y is not None


def test_state_of_the_block_itself_is_said() -> None:
    total, steps, running, other = 0.0, 0, torch.zeros(3), torch.ones(3)
    with pytest.warns(UserWarning) as said, tfnb.record():
        x = tfnb.placeholder(X)
        steps += 1
        total = total + x.mean()
        running = running * 0.9 + x.mean(0)
        other = x + other.mul(2).sum() * steps
        twice = [running * 0 for steps in range(2)] + list(map(lambda total: total * 2, [x]))  # names of their own
    assert twice
    names = sorted(str(w.message).split("keeps ")[1].split(" ")[0] for w in said)
    assert names == ["other", "running", "steps", "total"]


class Annealed:
    """Counts its own calls."""

    started = 0

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return 1 / self.calls


class Module(nn.Module):
    """Counts the steps of a method other than `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.steps = nn.Linear(3, 1), 0

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return self.linear(x).mean() / self.steps


def enclosing() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


def in_a_dict(x: torch.Tensor) -> Any:
    state = {"n": 0, "inner": {"m": 1}}
    with tfnb.record() as graph:
        state["n"] += 1
        y = tfnb.placeholder(x) * state["n"]
    return graph, y


def in_a_nested_dict(x: torch.Tensor) -> Any:
    state = {"inner": {"m": 1}}
    with tfnb.record() as graph:
        state["inner"]["m"] += 1
        y = tfnb.placeholder(x) * state["inner"]["m"]
    return graph, y


def in_a_deque(x: torch.Tensor) -> Any:
    state: deque[Any] = deque(maxlen=3)
    with tfnb.record() as graph:
        y = tfnb.placeholder(x) * 1
        state.append(y.mean())
        y = y - sum(state) / len(state)
    return graph, y


def in_a_set(x: torch.Tensor) -> Any:
    state = {"first"}
    with tfnb.record() as graph:
        state.add("second")
        y = tfnb.placeholder(x) * len(state)
    return graph, y


def in_a_counter(x: torch.Tensor) -> Any:
    state: Counter[str] = Counter()
    with tfnb.record() as graph:
        state["n"] += 1
        y = tfnb.placeholder(x) * state["n"]
    return graph, y


def in_an_array(x: torch.Tensor) -> Any:
    state = np.zeros(2)
    with tfnb.record() as graph:
        state[0] += 1
        y = tfnb.placeholder(x) * float(state[0])
    return graph, y


def in_a_constant(x: torch.Tensor) -> Any:
    state = torch.ones(())
    with tfnb.record() as graph:
        state = state + 1
        y = tfnb.placeholder(x) * state
    return graph, y


def in_an_object(x: torch.Tensor) -> Any:
    state = SimpleNamespace(n=0)
    with tfnb.record() as graph:
        state.n += 1
        y = tfnb.placeholder(x) * state.n
    return graph, y


def in_a_callable(state: Callable[[], float], x: torch.Tensor) -> Any:
    with tfnb.record() as graph:
        y = tfnb.placeholder(x) * state()
    return graph, y


def in_a_called_object(x: torch.Tensor) -> Any:
    return in_a_callable(Annealed(), x)


def in_a_method(x: torch.Tensor) -> Any:
    state = Module()
    with tfnb.record() as graph:
        y = state.training_step(tfnb.placeholder(x))
    return graph, y


def in_an_enclosed_number(x: torch.Tensor) -> Any:
    return in_a_callable(enclosing(), x)


IN_PLACE = {
    in_a_dict: "state", in_a_nested_dict: "state", in_a_deque: "state", in_a_set: "state", in_a_counter: "state",
    in_an_array: "state", in_a_constant: "state", in_an_object: "state.n", in_a_called_object: "state.calls",
    in_a_method: "state.steps", in_an_enclosed_number: "state",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", IN_PLACE, ids=lambda program: program.__name__)
def test_state_that_the_block_changes_in_place_is_said(program: Callable[[torch.Tensor], Any]) -> None:
    graph, _ = program(X)
    assert [note for note in graph.notes if f"keeps {IN_PLACE[program]} in Python" in note]


ITERATORS: dict[str, Callable[[], Any]] = {
    "count": lambda: itertools.count(1), "cycle": lambda: itertools.cycle([1, 2]), "list": lambda: iter([1, 2]),
    "generator": lambda: (n for n in (1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("kind", ITERATORS)
def test_items_of_an_iterator_of_outside_are_said_to_be_the_same_in_each_run(kind: str) -> None:
    numbers = ITERATORS[kind]()
    with pytest.warns(UserWarning, match="takes items of numbers, an iterator"), tfnb.record():
        y = tfnb.placeholder(X) * next(numbers)
    assert y is not None


def test_logs_and_constants_that_are_made_once_are_no_state() -> None:
    history: dict[str, Any] = {}
    grouped: dict[str, list[Any]] = {"loss": []}
    made: dict[int, Any] = {}
    mask, labels = torch.ones(3), torch.arange(4)
    seen = SimpleNamespace(loss=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tfnb.record():
            x = tfnb.placeholder(X)
            mask = mask.to(x.dtype).bool()
            labels = labels.long()
            if 3 not in made:
                made[3] = 2.0
            loss = (x * mask * made[3]).mean() + labels.sum()
            history["loss"] = seen.loss = loss
            grouped["loss"].append(loss)
    assert history and grouped["loss"] and seen.loss is loss


@pytest.mark.parametrize(("run", "compared"), [(2.0, 21), (0.6, 11), (0.1, 3)])
def test_comparisons_cost_at_most_a_twentieth_of_the_time_with_what_they_do_to_caches(
    monkeypatch: pytest.MonkeyPatch, run: float, compared: int
) -> None:
    """So many comparisons are made in 20 runs, two of them in the first; one takes 0.025, and counts as 0.05."""
    now, comparisons = [0.0], []

    class Guard:
        label, is_cell, all, has_notes = "In[1]", True, (), False

        def is_kept(self) -> bool:
            comparisons.append(now[0])
            now[0] += 0.025
            return True

    Guard.all = (Guard(),)
    monkeypatch.setattr(python_guards, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    watched = python_guards.StepGuards([Guard()])  # type: ignore[list-item]
    for _ in range(20):
        watched.check(pytest.fail)
        now[0] += run
    assert len(comparisons) == compared
    watched.check(pytest.fail)
    before = len(comparisons)
    user_code_ran()
    watched.check(pytest.fail)
    assert len(comparisons) == before + 1


log: list[float] = []


def logged(x: torch.Tensor) -> torch.Tensor:
    """Twice ``x``; a number is kept beside."""
    log.append(1.0)
    return x * 2


def test_a_list_that_only_grows_is_no_number_of_the_graph(recwarn: pytest.WarningsRecorder) -> None:
    history = [0.5]
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3), shape=(3,))
        y = logged(x)
        history.append(2.0)
    session = tfnb.Session(graph)
    session.run(y, {x: torch.ones(3)})
    log.append(3.0)
    history.append(3.0)
    for _ in range(100):
        session.run(y, {x: torch.ones(3)})
    assert not list(recwarn)


def test_an_equal_tensor_in_the_place_of_a_captured_one_is_no_change(recwarn: pytest.WarningsRecorder) -> None:
    table = torch.tensor([1.0, float("nan"), 3.0])
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3), shape=(3,))
        y = x + table
    session = tfnb.Session(graph)
    session.run(y, {x: torch.ones(3)})
    table = table.clone()
    for _ in range(100):
        session.run(y, {x: torch.ones(3)})
    assert not list(recwarn)
    table[0] = 2.0
    with pytest.warns(UserWarning, match="table has other values now"):
        for _ in range(100):
            session.run(y, {x: torch.ones(3)})


@pytest.mark.parametrize("in_object", [False, True])
def test_a_number_that_a_block_sets_in_a_param_group_is_noted(in_object: bool) -> None:
    layer = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.5)
    trainer = SimpleNamespace(optimizer=optimizer)
    told = r"sets lr of the param groups of (trainer\.)?optimizer\. That happens once"
    with pytest.warns(UserWarning, match=told), tfnb.record():
        x = tfnb.placeholder(X)
        if in_object:
            for group in trainer.optimizer.param_groups:
                group["lr"] *= 0.9
        else:
            optimizer.param_groups[0]["lr"] *= 0.9
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        step = optimizer.step()
    run(step, x)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.09)


def test_a_block_that_sets_no_number_of_a_param_group_is_not_noted() -> None:
    layer = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with tfnb.record() as graph:
        x = tfnb.placeholder(X)
        optimizer.param_groups[0]["lr"] = 0.1
        layer(x).square().mean().backward()
        step = optimizer.step()
    run(step, x)
    assert not graph.notes


def test_an_optimizers_state_that_a_block_reads_is_noted() -> None:
    layer = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(X).sum().backward()
    optimizer.step()
    told = r"this cell or block reads optimizer\.state, in Python"
    with pytest.warns(UserWarning, match=told), tfnb.record():
        x = tfnb.placeholder(X)
        y = x * optimizer.state[layer.weight]["exp_avg"].sum()
    run(y, x)
    with pytest.warns(UserWarning, match=told), tfnb.record():
        x = tfnb.placeholder(X)
        y = x * sum(state["step"].item() for state in optimizer.state.values())
    run(y, x)


class Mode(enum.Enum):
    """Two ways."""

    TWICE = 2
    THRICE = 3


def test_a_member_of_an_enumeration_that_a_name_is_bound_to_anew_is_noted() -> None:
    mode = Mode.TWICE
    with tfnb.record() as graph:
        x = tfnb.placeholder(X)
        y = x * (2 if mode is Mode.TWICE else 3)
    session = tfnb.Session(graph)
    session.run(y, {x: X})
    mode = Mode.THRICE
    with pytest.warns(UserWarning, match="mode was <Mode.TWICE: 2> when .* and is <Mode.THRICE: 3> now"):
        user_code_ran()
        session.run(y, {x: X})
