"""Writes without a handle happen with the steps of their block, as in eager torch, which is the oracle."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import swa_utils

import tfnb
from tests.recording.test_cells import Notebook
from tfnb.errors import BranchChanged, Unsupported

DATA = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]


class World:
    """A trained module, a copy that averages it, a module that goes into no loss, and a Variable."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.model.register_buffer("seen", torch.tensor(0.0))
        self.mean = copy.deepcopy(self.model)
        self.norm = nn.BatchNorm1d(3)
        self.count = tfnb.Variable(torch.tensor(0.0), trainable=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def state(self) -> list[torch.Tensor]:
        """All that a run may change."""
        modules = self.model, self.mean, self.norm
        tensors = [t for module in modules for t in module.state_dict().values()]
        return [t.detach().clone() for t in (*tensors, self.count.value())]


def average(w: World, x: torch.Tensor) -> None:
    with torch.no_grad():
        for p, q in zip(w.mean.parameters(), w.model.parameters(), strict=True):
            p.lerp_(q, 0.2)


def clamp(w: World, x: torch.Tensor) -> None:
    with torch.no_grad():
        for p in w.model.parameters():
            p.clamp_(-0.05, 0.05)


def clamp_data(w: World, x: torch.Tensor) -> None:
    for p in w.model.parameters():
        p.data.clamp_(-0.05, 0.05)


def count(w: World, x: torch.Tensor) -> None:
    w.model.seen += 1


def rebind(w: World, x: torch.Tensor) -> None:
    w.model.seen = w.model.seen * 0.5 + x.mean()


def copy_feed(w: World, x: torch.Tensor) -> None:
    with torch.no_grad():
        w.mean.bias.copy_(x.mean(0)[:2])


def count_variable(w: World, x: torch.Tensor) -> None:
    w.count.assign_add(x.sum())


def statistics(w: World, x: torch.Tensor) -> None:
    w.norm(x)


@tfnb.autograph
def in_branch(w: World, x: torch.Tensor) -> None:
    if x.sum() > 0:
        w.model.seen += 1
        w.mean.bias.data.mul_(0.5)
    else:
        w.model.seen += 10


@tfnb.autograph
def in_loop(w: World, x: torch.Tensor) -> None:
    for row in x:
        w.model.seen += row.sum()
        w.count.assign_add(row.mean())


STATEMENTS = {
    f.__name__: f
    for f in (average, clamp, clamp_data, count, rebind, copy_feed, count_variable, statistics, in_branch, in_loop)
}


def by_torch(w: World, loss: torch.Tensor, between: Callable[[], None]) -> Any:
    w.optimizer.zero_grad()
    loss.backward()
    between()
    return w.optimizer.step()


def by_minimize(w: World, loss: torch.Tensor, between: Callable[[], None]) -> Any:
    if not isinstance(loss, tfnb.Tensor):
        return by_torch(w, loss, between)
    between()
    return tfnb.train.SGD(0.1).minimize(loss, list(w.model.parameters()))


def by_gradients(w: World, loss: torch.Tensor, between: Callable[[], None]) -> Any:
    if not isinstance(loss, tfnb.Tensor):
        return by_torch(w, loss, between)
    optimizer = tfnb.train.SGD(0.1)
    pairs = optimizer.compute_gradients(loss, list(w.model.parameters()))
    between()
    return optimizer.apply_gradients(pairs)


def by_hand(w: World, loss: torch.Tensor, between: Callable[[], None]) -> Any:
    if not isinstance(loss, tfnb.Tensor):
        return by_torch(w, loss, between)
    loss.backward()
    between()
    with torch.no_grad():
        for p in w.model.parameters():
            p -= 0.1 * p.grad
    return tfnb.group(*w.model.parameters())


def in_group(w: World, loss: torch.Tensor, between: Callable[[], None]) -> Any:
    step = by_torch(w, loss, between)
    return step if step is None else tfnb.group(step, loss)


def by_hook(w: World, loss: torch.Tensor, between: Callable[[], None]) -> Any:
    """What happens between is done by a hook of the optimizer, before its step."""
    w.optimizer.zero_grad()
    loss.backward()
    handle = w.optimizer.register_step_pre_hook(lambda *_: between())
    try:
        return w.optimizer.step()
    finally:
        handle.remove()


STEPS = {f.__name__: f for f in (by_torch, by_minimize, by_gradients, by_hand, in_group, by_hook)}
PLACES = ("before", "between", "after")


def train(w: World, x: torch.Tensor, statement: str, place: str, step: str) -> tuple[torch.Tensor, Any]:
    """One step of training, with the statement at its place."""

    def at(here: str) -> None:
        if here == place:
            STATEMENTS[statement](w, x)

    at("before")
    loss = (w.model(x) - 1).square().mean()
    made = STEPS[step](w, loss, lambda: at("between"))
    at("after")
    return loss, made


def recorded(statement: str, place: str, step: str) -> tuple[World, tfnb.Graph, Any, Any, Any]:
    world = World()
    before = world.state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tfnb.record() as graph:
            x = tfnb.placeholder(DATA[0], name="x")
            loss, made = train(world, x, statement, place, step)
    assert all(map(torch.equal, before, world.state())), "recording changes nothing"
    return world, graph, x, loss, made


def eager(statement: str, place: str, step: str, data: Any = DATA) -> list[list[torch.Tensor]]:
    """The state after each step of plain torch."""
    world, found = World(), []
    for x in data:
        train(world, x, statement, place, step)
        found.append(world.state())
    return found


@pytest.mark.parametrize("executor", ["auto", pytest.param("dataflow", marks=pytest.mark.slow)])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_run_of_the_step_does_the_statement(statement: str, place: str, step: str, executor: str) -> None:
    world, graph, x, _, made = recorded(statement, place, step)
    session = tfnb.Session(graph, compile="off", executor=executor)
    for batch, wanted in zip(DATA, eager(statement, place, step), strict=True):
        session.run(made, {x: batch})
        torch.testing.assert_close(world.state(), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("statement", ["average", "clamp", "count", "in_branch"])
def test_a_compiled_step_does_the_statement(statement: str, place: str) -> None:
    world, graph, x, _, made = recorded(statement, place, "by_torch")
    session = tfnb.Session(graph, compile="now")
    for batch, wanted in zip(DATA, eager(statement, place, "by_torch"), strict=True):
        session.run(made, {x: batch})
        torch.testing.assert_close(world.state(), wanted)


@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_fetch_without_the_step_changes_nothing(statement: str) -> None:
    world, _, x, loss, _ = recorded(statement, "after", "by_torch")
    before = world.state()
    tfnb.run(loss, {x: DATA[1]})
    assert all(map(torch.equal, before, world.state()))


def test_a_loaded_graph_does_its_statements(tmp_path: Path) -> None:
    world, graph, x, _, made = recorded("average", "after", "by_torch")
    graph.save(tmp_path / "graph.json")
    tfnb.Session(graph).save(tmp_path / "values.safetensors")
    loaded = tfnb.Graph.load(tmp_path / "graph.json")
    assert loaded.text() == graph.text() and " with " in graph.text()
    session = tfnb.Session(loaded).restore(tmp_path / "values.safetensors")
    for batch in DATA:
        session.run(made.name, {"x": batch})
        tfnb.run(made, {x: batch})
    for ours, other in zip(graph.variables, loaded.variables, strict=True):
        torch.testing.assert_close(ours.value(), other.value(), msg=ours.name)
    torch.testing.assert_close(world.state(), eager("average", "after", "by_torch")[-1])


# -- which step --------------------------------------------------------------------------------------------------------


def two_steps(w: World, other: World, x: torch.Tensor, writes: Callable[[str], None]) -> list[Any]:
    """Two optimizers in one cell, as a GAN has, with writes between."""
    steps = []
    for world, name in ((w, "first"), (other, "second")):
        world.optimizer.zero_grad()
        loss = F.mse_loss(world.model(x), w.model(x).detach() + 1)
        loss.backward()
        writes(f"above {name}")
        steps.append(world.optimizer.step())
        writes(f"below {name}")
    return steps


@pytest.mark.parametrize(
    ("place", "reads", "owner"),
    [
        ("above first", None, 0), ("below first", None, 1), ("above second", None, 1), ("below second", None, 1),
        ("below first", "first", 0), ("below second", "first", 0), ("below second", "second", 1),
        ("above second", "second", 1),
    ],
)  # fmt: skip
def test_a_statement_belongs_to_one_step(place: str, reads: str | None, owner: int) -> None:
    """The last one whose update it reads, else the next one, else the last one."""
    w, other = World(), World()
    read = {"first": w, "second": other}.get(reads or "")

    def write(here: str) -> None:
        if here == place:
            with torch.no_grad():
                w.mean.bias.add_(1.0 if read is None else read.model.bias)
                w.model.seen += 1

    with tfnb.record() as graph:
        x = tfnb.placeholder(DATA[0], name="x")
        steps = two_steps(w, other, x, write)
    bias = {n.id for n in graph.select(op="tfnb.assign") if "mean" in n.name or n.attrs["variable"].shape == (2,)}
    owners = [at for at, step in enumerate(steps) if bias & set(step.node.effects)]
    assert owners == [owner]
    tfnb.run(steps, {x: DATA[0]})
    assert float(w.model.seen) == 1, "two steps of one run do it once"


def test_wasserstein_gan_clamps_its_critic() -> None:
    def cell(critic: nn.Module, maker: nn.Module, z: torch.Tensor, real: torch.Tensor, optimizers: Any) -> list[Any]:
        for p in critic.parameters():
            p.data.clamp_(-0.01, 0.01)
        optimizers[0].zero_grad()
        (critic(maker(z).detach()).mean() - critic(real).mean()).backward()
        steps = [optimizers[0].step()]
        for p in critic.parameters():
            p.data.clamp_(-0.02, 0.02)
        optimizers[1].zero_grad()
        (-critic(maker(z)).mean()).backward()
        return [*steps, optimizers[1].step()]

    def make() -> tuple[nn.Module, nn.Module, Any]:
        torch.manual_seed(1)
        critic = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
        maker = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 3))
        critic, maker = critic.double(), maker.double()  # some gradients are zero but for rounding
        return critic, maker, [torch.optim.RMSprop(m.parameters(), lr=5e-2) for m in (critic, maker)]

    plain, ours = make(), make()
    with tfnb.record():
        z, real = (tfnb.placeholder(batch.double()) for batch in DATA[:2])
        steps = cell(ours[0], ours[1], z, real, ours[2])
    for noise, batch in itertools.pairwise([batch.double() for batch in (*DATA, *DATA)]):
        cell(plain[0], plain[1], noise, batch, plain[2])
        tfnb.run(steps, {z: noise, real: batch})
    for one, other in zip(plain[:2], ours[:2], strict=True):
        torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("how", ["mean", "ema", "multi ema", "function"])
def test_an_averaged_model_is_updated_with_the_step(how: str, use_buffers: bool) -> None:
    options: dict[str, Any] = {
        "mean": {}, "ema": {"avg_fn": swa_utils.get_ema_avg_fn(0.8)},
        "multi ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.8)},
        "function": {"avg_fn": lambda mean, p, count: mean + (p - mean) / (count + 1)},
    }[how]  # fmt: skip

    def make() -> tuple[nn.Module, swa_utils.AveragedModel, torch.optim.Optimizer]:
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
        return model, swa_utils.AveragedModel(model, use_buffers=use_buffers, **options), torch.optim.SGD(
            model.parameters(), lr=0.1
        )  # fmt: skip

    def step(model: Any, averaged: Any, optimizer: Any, x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        made = optimizer.step()
        averaged.update_parameters(model)
        return made

    plain, ours = make(), make()
    with warnings.catch_warnings(), tfnb.record() as graph:
        warnings.simplefilter("error")
        x = tfnb.placeholder(DATA[0].double())
        made = step(*ours, x)
    assert not graph.select(op="tfnb.guard"), "each run decides whether it is the first update"
    for batch in DATA:
        step(*plain, batch.double())
        tfnb.run(made, {x: batch.double()})
        torch.testing.assert_close(ours[1].state_dict(), plain[1].state_dict(), rtol=1e-9, atol=1e-12)


def test_control_dependencies_on_the_step_make_no_cycle() -> None:
    w = World()
    with tfnb.record():
        x = tfnb.placeholder(DATA[0])
        _, step = train(w, x, "count", "before", "by_torch")
        with tfnb.control_dependencies([step]):
            w.count.assign(w.model.weight.sum())
    tfnb.run(step, {x: DATA[0]})
    torch.testing.assert_close(w.count.value(), w.model.weight.sum().detach())


def test_a_live_handle_runs_when_it_is_fetched() -> None:
    w = World()
    with tfnb.record():
        x = tfnb.placeholder(DATA[0])
        bump = w.count.assign_add(1.0)
        _, step = train(w, x, "count", "after", "by_torch")
    tfnb.run(step, {x: DATA[0]})
    assert float(w.count.value()) == 0 and float(tfnb.run(bump)) == 1


def test_what_a_loss_takes_is_no_statement_of_another_step() -> None:
    w = World()
    with tfnb.record():
        x = tfnb.placeholder(DATA[0])
        w.count.assign_add(1.0)
        doubled = w.count * 2
        _, step = train(w, x, "count", "after", "by_torch")
    tfnb.run(step, {x: DATA[0]})
    assert float(tfnb.run(doubled)) == 2, "it is pulled by who takes it"


# -- what is noted -----------------------------------------------------------------------------------------------------


def warned(block: Callable[[World, torch.Tensor], Any]) -> tuple[World, Any, Any, list[str]]:
    world = World()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with tfnb.record():
            x = tfnb.placeholder(DATA[0], name="x")
            found = block(world, x)
    return world, x, found, [str(w.message) for w in seen]


def test_a_statement_that_needs_another_feed_is_noted() -> None:
    def block(w: World, x: torch.Tensor) -> Any:
        y = tfnb.placeholder(DATA[1], name="y")
        with torch.no_grad():
            w.mean.bias.copy_(y.mean(0)[:2])
        return train(w, x, "count", "after", "by_torch")

    world, x, (_, step), said = warned(block)
    (note,) = said
    assert "test_statements.py line" in note and "leaves it out: it would need the feed y." in note
    tfnb.run(step, {x: DATA[0]})
    assert float(world.model.seen) == 1


@pytest.mark.parametrize("kind", ["enqueue", "dequeue"])
def test_a_statement_that_would_make_the_step_wait_is_noted(kind: str) -> None:
    queue = tfnb.FIFOQueue(4, torch.float32, shapes=())
    queue.enqueue(torch.tensor(3.0))

    def block(w: World, x: torch.Tensor) -> Any:
        if kind == "enqueue":
            queue.enqueue(x.sum())
        else:
            w.count.assign(queue.dequeue())
        return train(w, x, "count", "after", "by_torch")

    _, x, (_, step), said = warned(block)
    assert any("queue" in note.lower() for note in said)
    tfnb.run(step, {x: DATA[0]})
    assert int(queue.size()) == 1


def test_a_step_that_waits_anyway_puts_elements() -> None:
    queue = tfnb.FIFOQueue(9, torch.float32, shapes=(4, 3))
    for batch in DATA:
        queue.enqueue(batch)
    w = World()
    with tfnb.record():
        x = queue.dequeue()
        _, step = train(w, x, "count", "after", "by_torch")
        queue.enqueue(x * 2)
    tfnb.run(step)
    assert int(queue.size()) == 4 and float(w.model.seen) == 1
    for _ in range(3):
        queue.dequeue()
    torch.testing.assert_close(queue.dequeue(), DATA[0] * 2)


def test_a_step_that_nobody_holds_is_noted() -> None:
    w = World()
    with pytest.warns(UserWarning) as seen, tfnb.record():
        loss = (w.model(tfnb.placeholder(DATA[0])) - 1).square().mean()
        w.optimizer.zero_grad()
        loss.backward()
        w.optimizer.step()  # nobody holds it
    (said,) = [str(each.message) for each in seen]
    assert "`step = w.optimizer.step()`" in said and "tfnb.effects()" in said
    assert seen[0].filename == __file__


def test_a_step_in_a_staged_branch_is_one_statement() -> None:
    @tfnb.autograph
    def every_second(w: World, x: torch.Tensor) -> torch.Tensor:
        loss = (w.model(x) - 1).square().mean()
        w.optimizer.zero_grad()
        loss.backward()
        w.model.seen += 1
        if w.model.seen % 2 == 0:
            w.optimizer.step()
        return loss

    _, x, loss, said = warned(every_second)
    notes = [note for note in loss.graph.notes if "tfnb.effects()" in note]
    of_branch = "updated in a staged branch or loop, which is no step of the block: bias, weight;"
    assert said == [] and any(of_branch in note and "tfnb.effects()" in note for note in notes)
    with pytest.warns(UserWarning, match="tfnb.effects"):
        tfnb.run(loss, {x: DATA[0]})

    def everything(w: World, x: torch.Tensor) -> Any:
        w.optimizer.zero_grad()
        loss = every_second(w, x)
        return loss, tfnb.effects()

    world, x, (_, effects), said = warned(everything)
    assert not said
    plain = World()
    for batch in DATA:
        plain.optimizer.zero_grad()
        every_second(plain, batch)
        tfnb.run(effects, {x: batch})
        torch.testing.assert_close(world.state(), plain.state())


def test_a_run_says_what_a_block_without_a_step_wrote_and_it_does_not() -> None:
    def block(w: World, x: torch.Tensor) -> Any:
        count(w, x)
        return w.model(x).sum()

    world, x, y, said = warned(block)
    assert said == [] and ["seen" in note for note in y.graph.notes] == [True]
    with pytest.warns(UserWarning, match=r"test_statements.py line \d+: this changes .*seen.*tfnb.effects"):
        tfnb.run(y, {x: DATA[0]})
    tfnb.run(y, {x: DATA[0]})
    world, x, y, _ = warned(block)
    tfnb.run([y, world.model.seen], {x: DATA[0]})
    assert float(world.model.seen) == 1
    world, x, (y, _, everything), _ = warned(lambda w, x: (w.model(x), count(w, x), tfnb.effects()))
    tfnb.run(y, {x: DATA[0]})
    assert y.graph.notes == () and float(world.model.seen) == 0
    tfnb.run([everything, everything], {x: DATA[0]})
    assert float(world.model.seen) == 1
    assert warned(lambda w, x: w.count.assign_add(1.0))[2].graph.notes == (), "its handle is held"


def test_a_line_that_writes_much_is_one_note() -> None:
    def block(w: World, x: torch.Tensor) -> Any:
        y = tfnb.placeholder(DATA[1], name="y")
        made = train(w, x, "count", "after", "by_torch")
        nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(4)))(y)
        return made

    *_, said = warned(block)
    assert len(said) == 1 and "running_var" in said[0] and " more, and the step" in said[0] and "feed y" in said[0]
    notes = warned(lambda w, x: (w.model(x), clamp(w, x))[0])[2].graph.notes
    assert len(notes) == 1 and "written by hand: bias, weight;" in notes[0]


def test_statistics_without_a_step_go_with_what_the_module_gives() -> None:
    plain, ours, still = nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    with tfnb.record():
        x = tfnb.placeholder(DATA[0])
        y = ours(x) * 2
        z = still.eval()(x)
        trained = still.train()(x)
    for batch in DATA:
        torch.testing.assert_close(tfnb.run(y, {x: batch}), plain(batch) * 2)
        tfnb.run(z, {x: batch})
    torch.testing.assert_close(ours.state_dict(), plain.state_dict())
    assert int(still.num_batches_tracked) == 0, "another call of it gave the fetched value"
    tfnb.run(trained, {x: DATA[0]})
    assert int(still.num_batches_tracked) == 1


@pytest.mark.parametrize("how", ["rebound", "by the table", "from the feed", "of an unused call"])
def test_what_a_block_without_a_step_gives_a_buffer_is_noted(how: str) -> None:
    def block(w: World, x: torch.Tensor) -> Any:
        y = w.model(x).sum()
        if how == "rebound":
            w.model.seen = w.model.seen + 1
        elif how == "by the table":
            w.model._buffers["seen"] = w.model.seen + 1
        elif how == "from the feed":
            w.model.seen = x.mean()
        else:
            w.norm(x)
        return y

    _, x, y, said = warned(block)
    assert said == [] and len(y.graph.notes) == 1 and "no step that could run it" in y.graph.notes[0]
    with pytest.warns(UserWarning, match="no step that could run it"):
        tfnb.run(y, {x: DATA[0]})


@pytest.mark.parametrize("how", ["group", "control dependencies"])
def test_effects_may_be_held_by_another_operation(how: str) -> None:
    def block(w: World, x: torch.Tensor) -> Any:
        everything = tfnb.effects()
        w.optimizer.zero_grad()
        loss = (w.model(x) - 1).square().mean()
        loss.backward()
        w.optimizer.step()
        if how == "group":
            return tfnb.group(everything, loss)
        with tfnb.control_dependencies([everything]):
            return loss * 1

    world, x, held, said = warned(block)
    assert said == []
    before = world.state()
    tfnb.run(held, {x: DATA[0]})
    assert not torch.equal(before[0], world.state()[0])


@tfnb.autograph
def of_two(w: World, x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        w.model.seen = w.model.seen + 1
    else:
        w.mean.seen = w.mean.seen + 10
    return x * 1


def test_branches_that_give_two_buffers_other_tensors_are_staged() -> None:
    plain = World()
    world, x, (_, everything), said = warned(lambda w, x: (of_two(w, x), tfnb.effects()))
    assert said == []
    for batch in DATA:
        of_two(plain, batch)
        tfnb.run(everything, {x: batch})
        torch.testing.assert_close(world.state(), plain.state())


def test_a_new_parameter_of_recorded_values_is_refused() -> None:
    layer = nn.Linear(3, 1)
    own = layer.weight
    with pytest.raises(Unsupported, match=r"new Parameter weight .*computed of recorded values(.|\n)*line \d"):  # noqa: SIM117
        with tfnb.record():
            layer.weight = nn.Parameter(tfnb.placeholder(DATA[0]).mean(0, keepdim=True))
    assert layer.weight is own
    with tfnb.record():
        layer.weight = nn.Parameter(torch.randn(1, 3))
        layer(tfnb.placeholder(DATA[0]))
    assert layer.weight is not own


def test_notes_are_of_the_cell_and_go_with_it() -> None:
    notebook = Notebook("noted")
    w = notebook.names["w"] = World()
    notebook.names["x0"] = DATA[0]
    text = (
        "x = tfnb.placeholder(x0)\nloss = (w.model(x) - 1).square().mean()\nw.optimizer.zero_grad()\nloss.backward()\n"
    )
    graph = notebook.run("1", f"{text}w.optimizer.step()")
    assert ["no name holds the step" in note and "line 5" in note for note in graph.notes] == [True]
    graph = notebook.run("1", f"{text}w.model.seen += 1\nstep = w.optimizer.step()")
    assert graph.notes == ()
    for _ in range(2):
        tfnb.run(notebook.names["step"], {notebook.names["x"]: DATA[0]})
    assert float(w.model.seen) == 2


def test_a_step_is_stale_where_its_statement_is() -> None:
    notebook = Notebook("stale-statement")
    w = notebook.names["w"] = World()
    notebook.names["x0"] = DATA[0]
    notebook.run("1", "x = tfnb.placeholder(x0, name='x')\nscale = x.sum() * 2")
    notebook.run("2", "step = tfnb.train.SGD(0.1).minimize(w.model(x).sum())\nw.count.assign(scale)")
    tfnb.run(notebook.names["step"], {"x": DATA[1]})
    torch.testing.assert_close(w.count.value(), DATA[1].sum() * 2)
    notebook.run("1", "x = tfnb.placeholder(x0, name='x')\nother = x.sum() * 3")
    with pytest.raises(tfnb.errors.StaleNode, match=r"In\[2\]"):
        tfnb.run(notebook.names["step"], {"x": DATA[1]})


def test_effects_are_of_the_whole_block() -> None:
    w, plain = World(), World()
    with tfnb.record():
        x = tfnb.placeholder(DATA[0])
        everything = tfnb.effects()
        held = w.count.assign_add(x.sum())
        train(w, x, "average", "after", "by_torch")
    for batch in DATA:
        plain.count.assign_add(batch.sum())
        train(plain, batch, "average", "after", "by_torch")
        tfnb.run(everything, {x: batch})
    torch.testing.assert_close(w.state(), plain.state())
    assert held is not None
    with pytest.raises(Unsupported, match="outside of branches"):  # noqa: SIM117
        with tfnb.record():
            tfnb.cond(tfnb.placeholder(torch.tensor(True)), lambda: (tfnb.effects(), 1)[1], lambda: 1)


def test_a_guard_stops_the_step_with_its_statement() -> None:
    w = World()
    with pytest.warns(UserWarning, match="Python took the True branch"), tfnb.record():
        x = tfnb.placeholder(DATA[0].abs())
        if x.sum() > 0:
            w.model.seen += 1
        _, step = train(w, x, "average", "after", "by_torch")
    before = w.state()
    with pytest.raises(BranchChanged):
        tfnb.run(step, {x: -DATA[0].abs()})
    assert all(map(torch.equal, before, w.state()))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW], ids=lambda each: each.__name__)
@pytest.mark.parametrize(
    "look",
    [
        lambda model: [p.detach() for p in model.parameters()], lambda model: [p.data for p in model.parameters()],
        lambda model: [p.view(-1) for p in model.parameters()], lambda model: [model.weight.t(), model.bias[1:]],
        lambda model: [*model.state_dict().values()],
        lambda model: [nn.utils.parameters_to_vector(model.parameters())],  # a copy
    ],
    ids=["detach", "data", "view", "parts", "state_dict", "copy"],
)  # fmt: skip
def test_views_of_parameters_show_a_step_that_stands_between(look: Any, optimizer: Any) -> None:
    def step(model: nn.Linear, opt: torch.optim.Optimizer, x: torch.Tensor) -> Any:
        seen = look(model)
        opt.zero_grad()
        model(x).square().mean().backward()
        return opt.step(), [each.sum() for each in seen], [p.sum() for p in model.parameters()]

    torch.manual_seed(1)
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    opt, twin_opt = optimizer(model.parameters(), lr=0.1), optimizer(twin.parameters(), lr=0.1)
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(4, 3))
        fetches = step(model, opt, x)
    session = tfnb.Session(graph)
    for rows in (4, 7, 1):
        batch = torch.randn(rows, 3)
        _, seen, after = session.run(fetches, {x: batch})
        _, want_seen, want_after = step(twin, twin_opt, batch)
        torch.testing.assert_close((seen, after), (want_seen, want_after), rtol=1e-5, atol=1e-6)
