"""A buffer that is given another tensor is an assignment of its Variable: values and buffers as in eager torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tfnb
from tfnb.errors import Unsupported
from tfnb.recording import record_cell

DATA = [torch.tensor(row) for row in ([1.0, 2, 3], [-1.0, -2, -0.5], [0.5, -1, 2], [-3.0, 1, 1])]
FIVE = torch.full((3,), 5.0)
Program = Callable[[Any, torch.Tensor], torch.Tensor]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("h", torch.zeros(3))
        self.register_buffer("k", torch.ones(3))
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.h = self.h + x
        return self.h * 1

    def update(self, x: torch.Tensor) -> torch.Tensor:
        self.h = self.h + x
        return self.h * 1

    def again(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("h", self.h + x)
        return self.h * 1


class Parent(nn.Module):
    def __init__(self, how: Program) -> None:
        super().__init__()
        self.child, self.how = Counting(), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self.child, x)


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def check(program: Program, make: Callable[[], nn.Module] = Counting, staged: bool = False) -> None:
    """Four runs and the buffers after each, as in eager torch; recording alone leaves the module as it was."""
    model, twin = made(make), made(make)
    before, values = dict(model.named_buffers()), copy.deepcopy(model.state_dict())
    with tfnb.record():
        x = tfnb.placeholder(DATA[0], shape=(3,))
        out = (tfnb.autograph(program) if staged else program)(model, x)
    assert all(now is before[name] for name, now in model.named_buffers())
    torch.testing.assert_close(dict(model.state_dict()), dict(values), rtol=0, atol=0)
    for data in DATA:
        torch.testing.assert_close(tfnb.run(out, {x: data.clone()}), program(twin, data.clone()).detach())
        torch.testing.assert_close(dict(model.named_buffers()), {n: b.detach() for n, b in twin.named_buffers()})


def call(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m(x)


def cell(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.h = m.h + x
    return m.h * 1


def by_setattr(m: Any, x: torch.Tensor) -> torch.Tensor:
    setattr(m, "h", m.h + x)  # noqa: B010
    return m.h * 1


def by_table(m: Any, x: torch.Tensor) -> torch.Tensor:
    m._buffers["h"] = m.h + x
    return m.h * 1


def by_method(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.update(x)


def by_registration(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.again(x)


def without_gradients(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.h = m.h + x
    return m.h * 1


def in_a_checkpoint(m: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: m.layer(m(x)), x, use_reentrant=False)


WAYS = [call, cell, by_setattr, by_table, by_method, by_registration, without_gradients, in_a_checkpoint]


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:.*torch.utils.checkpoint around a write")
def test_every_way_of_rebinding_is_an_assignment(way: Program, staged: bool) -> None:
    check(way, staged=staged)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:.*torch.utils.checkpoint around a write")
def test_a_parent_rebinds_a_buffer_of_its_child(way: Program) -> None:
    check(call, lambda: Parent(way))


# -- aliases ------------------------------------------------------------------------------------------------------


def old_name(m: Any, x: torch.Tensor) -> torch.Tensor:
    previous = m.h
    m.h = m.h + x
    return previous * 2 + m.h


def old_name_of_a_table(m: Any, x: torch.Tensor) -> torch.Tensor:
    previous = m.h
    m._buffers["h"] = m.h + x
    return m.h * previous


def write_into_the_new_name(m: Any, x: torch.Tensor) -> torch.Tensor:
    new = m.h + x
    m.h = new
    new.mul_(2)
    return m.h * 1


def write_into_the_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    new = m.h + x
    m.h = new
    m.h.mul_(2)
    return new * 1


def write_into_a_view(m: Any, x: torch.Tensor) -> torch.Tensor:
    new = m.h + x
    view = new[:2]
    m.h = new
    view.add_(1)
    return m.h * 1


def write_into_the_table(m: Any, x: torch.Tensor) -> torch.Tensor:
    m._buffers["h"] = m.h + x
    m.h.mul_(2)
    return m.h * 1


def detached(m: Any, x: torch.Tensor) -> torch.Tensor:
    h = m.layer(x) + m.h
    m.h = h.detach()
    return h * 1


def detached_and_written(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        h = m.layer(x) + m.h
        m.h = h.detach()
        m.h.mul_(0.5)
        return h * 1


def detached_from_itself(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.h = m.h.detach()
    m.h.add_(x)
    return m.h * 1


def detached_afterwards(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.h = m.layer(x) + m.h
    m.h = m.h.detach()
    return m.h * 1


def twice(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.h = m.h + x
    first = m.h
    m.h = m.h * 2
    first.add_(1)
    return first + m.h


def twice_by_the_table(m: Any, x: torch.Tensor) -> torch.Tensor:
    m._buffers["h"] = m.h + x
    m.h = m.h * 2
    m._buffers["h"] = m.h + 1
    return m.h * 1


def in_place_and_again(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.h.add_(x)
    m.h = m.h * 2
    m.h += 1
    return m.h * 1


def exchanged(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.h, m.k = m.k, m.h
    m.h = m.h + x
    return m.h + m.k


def a_constant(m: Any, x: torch.Tensor) -> torch.Tensor:
    out = m.h + x
    m.h = FIVE
    return out + m.h


def the_input(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.h = m.h + m.k
    m.k = x
    return m.h + m.k


def put_back(m: Any, x: torch.Tensor) -> torch.Tensor:
    old = m.h
    m.h = m.h + x
    out = m.h * 2
    m.h = old
    m.h.add_(1)
    return out + m.h


def calls_and_the_cell(m: Any, x: torch.Tensor) -> torch.Tensor:
    first = m(x)
    m.h = m.h * 0.5
    return first + m(x)


def state_dicts(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.h = m.h + x
    m.load_state_dict({**m.state_dict(), "k": m.state_dict()["h"] * 2})
    twin = copy.deepcopy(m)
    twin.h = twin.h + 1
    return m.h * m.k + twin.h


def lent(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.h = m.h + 1
    return torch.func.functional_call(m, {"h": x * 2}, (x,)) + m.h


def converted_to_what_it_is(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.to("cpu")
    m.h = m.h
    return m.h + x


@pytest.mark.parametrize("program", [
    old_name, old_name_of_a_table, write_into_the_new_name, write_into_the_buffer, write_into_a_view,
    write_into_the_table, detached, detached_and_written, detached_from_itself, detached_afterwards, twice,
    twice_by_the_table, in_place_and_again, exchanged, a_constant, the_input, put_back, calls_and_the_cell,
    state_dicts, lent, converted_to_what_it_is,
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*written by hand")  # by load_state_dict, which no step runs
@pytest.mark.filterwarnings("ignore:.*took the sample")
def test_names_of_tensors_mean_what_they_mean_in_torch(program: Program) -> None:
    check(program)


def test_gradients_pass_through_a_rebound_buffer_until_it_is_detached() -> None:
    def step(m: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        optimizer.zero_grad()
        m.h = m.layer(x) + m.h.detach()
        loss = m.h.square().sum()
        loss.backward()
        m.h = m.h.detach()
        return loss, optimizer.step()

    model, twin = made(Counting), made(Counting)
    optimizers = [torch.optim.SGD(m.layer.parameters(), 0.1) for m in (model, twin)]
    with tfnb.record():
        x = tfnb.placeholder(DATA[0], shape=(3,))
        loss, train = step(model, optimizers[0], x)
    for data in DATA:
        got = tfnb.run((loss, train), {x: data})[0]
        torch.testing.assert_close(got, step(twin, optimizers[1], data)[0].detach())
        torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()))


# -- branches and loops -------------------------------------------------------------------------------------------


def branch(m: Any, x: torch.Tensor) -> torch.Tensor:
    previous = m.h
    if x.sum() > 0:
        m.h = m.h + x
    else:
        m.h = m.h * 2
    return m.h * 1 + previous


def branch_of_one_side(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.h = m.h * 2
    previous, inner = m.h, x
    if x.sum() > 0:
        before = m.h
        m.h = m.h + x
        inner = before * m.h
    m.h = m.h * 2
    m.h.add_(1)
    return m.h * 1 + inner + previous


def branch_with_a_call(m: Any, x: torch.Tensor) -> torch.Tensor:
    out = m(x) if x.sum() > 0 else x
    return m.h * 1 + out


def nested_branches(m: Any, x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        if x[0] > 0:
            m.h = m.h + x
        else:
            m.update(-x)
        m.h = m.h * 2
    return m.h * 1


def loop(m: Any, x: torch.Tensor) -> torch.Tensor:
    n, out = x.abs().sum(), x * 0
    while n > 0.5:
        previous = m.h
        m.h = m.h + x
        out = out + previous * m.h
        n = n * 0.5
    return m.h * 1 + out


def loop_that_writes_first(m: Any, x: torch.Tensor) -> torch.Tensor:
    n = x.abs().sum()
    while n > 0.5:
        m.h.mul_(2)
        m.h = m.h + x
        n = n * 0.5
    return m.h * 1


def loop_with_calls(m: Any, x: torch.Tensor) -> torch.Tensor:
    n = x.abs().sum()
    while n > 0.5:
        if n > 1:
            m.h = m.h + x
        else:
            m(x)
        n = n * 0.5
    return m.h * 1


def loop_over_rows(m: Any, x: torch.Tensor) -> torch.Tensor:
    out = x * 0
    for row in x:
        m.h = m.h + row
        out = out + m.h
    return m.h * 1 + out


@pytest.mark.parametrize("program", [
    branch, branch_of_one_side, branch_with_a_call, nested_branches, loop, loop_that_writes_first, loop_with_calls,
    loop_over_rows,
])  # fmt: skip
def test_staged_statements_rebind(program: Program) -> None:
    check(program, staged=True)


def test_a_name_from_before_a_loop_that_rebinds_is_refused_where_it_is_read() -> None:
    model = Counting()
    with tfnb.record():
        x = tfnb.placeholder(DATA[0], shape=(3,))
        previous = model.h
        tfnb.while_loop(lambda n: n > 0.5, lambda n: [n * 0.5 + 0 * model(x).sum()], [x.sum()])
        with pytest.raises(Unsupported, match=r"(?s)the buffer h of Counting held before a loop.*clone\(\).*line"):
            previous + 1
    assert not model.h.any()


# -- cells, errors, files -----------------------------------------------------------------------------------------


def run_cell(names: dict[str, Any], source: str) -> None:
    with record_cell("rebound", owner="cell:1", label="In[1]", filename="<cell>", namespace=names):
        exec(compile(source, "<cell>", "exec"), names)


def test_a_cell_runs_again() -> None:
    names: dict[str, Any] = {"tfnb": tfnb, "m": Counting(), "data": DATA[0]}
    for count in range(1, 4):
        run_cell(names, "x = tfnb.placeholder(data, shape=(3,))\nm.h = m.h + x\nout = m.h * 1")
        assert type(names["m"].h) is torch.Tensor
        torch.testing.assert_close(tfnb.run(names["out"], {names["x"]: DATA[0]}), count * DATA[0])
        torch.testing.assert_close(names["m"].h, count * DATA[0])


def test_a_module_made_in_the_cell_may_rebind() -> None:
    with tfnb.record():
        x = tfnb.placeholder(DATA[0], shape=(3,))
        model = Counting()
        model.k = FIVE.clone()
        model.h = torch.ones(3)
        model.layer = nn.Linear(3, 3)
        out = model(x) + model.k
    for _ in range(2):
        torch.testing.assert_close(tfnb.run(out, {x: DATA[0]}), 1 + DATA[0] + FIVE)
    assert type(model.h) is torch.Tensor


def test_a_graph_of_a_file_rebinds(tmp_path: Path) -> None:
    model = Counting()
    with tfnb.record() as graph:
        x = tfnb.placeholder(DATA[0], shape=(3,))
        out = cell(model, x)
    graph.save(tmp_path / "g.json")
    tfnb.Session(graph).save(tmp_path / "values")
    session = tfnb.Session(tfnb.Graph.load(tmp_path / "g.json"))
    session.restore(tmp_path / "values")
    for count in range(1, 3):
        torch.testing.assert_close(session.run(out.name, {x.name: DATA[0]}), count * DATA[0])


@contextmanager
def unchanged(model: nn.Module) -> Iterator[torch.Tensor]:
    """A block that may fail: afterwards the module holds the tensors that it held."""
    before = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    values = copy.deepcopy(model.state_dict())
    try:
        with tfnb.record():
            yield tfnb.placeholder(DATA[0], shape=(3,))
    finally:
        now = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        assert now.keys() == before.keys() and all(now[name] is before[name] for name in now)
        torch.testing.assert_close(dict(model.state_dict()), dict(values), rtol=0, atol=0)


@pytest.mark.parametrize("way", [cell, by_table, in_place_and_again, twice_by_the_table])
def test_a_block_that_fails_leaves_the_module_as_it_was(way: Program) -> None:
    model = Counting()
    with pytest.raises(ZeroDivisionError), unchanged(model) as x:
        way(model, x)
        raise ZeroDivisionError


def other_dtype(m: Any, x: torch.Tensor) -> None:
    m.h = (m.h + x).double()


def other_shape(m: Any, x: torch.Tensor) -> None:
    m._buffers["h"] = torch.cat([m.h, x])


def new_buffer(m: Any, x: torch.Tensor) -> None:
    m.register_buffer("new", x * 2)


def new_buffer_of_the_table(m: Any, x: torch.Tensor) -> None:
    m._buffers["new"] = x * 2


def no_buffer(m: Any, x: torch.Tensor) -> None:
    m.h = None


def new_parameter(m: Any, x: torch.Tensor) -> None:
    m.layer(x)
    m.layer.weight = nn.Parameter(torch.ones(3, 3))


def parameter_from_the_old_one(m: Any, x: torch.Tensor) -> None:
    m.layer.weight = nn.Parameter(m.layer.weight * 0.9)


def new_parameter_of_the_table(m: Any, x: torch.Tensor) -> None:
    m.layer(x)
    m.layer._parameters["weight"] = nn.Parameter(torch.ones(3, 3))


@pytest.mark.parametrize(("program", "text"), [
    (other_dtype, "Counting gives its buffer h, which held torch.float32.*float64"),
    (other_shape, "Counting gives its buffer h, which held torch.float32"),
    (new_buffer, "Counting gives its buffer new, which held nothing"),
    (new_buffer_of_the_table, "Counting gives its buffer new, which held nothing"),
    (no_buffer, "Counting loses its buffer h"),
    (new_parameter, r"Linear is given a new Parameter weight.*p\.copy_"),
    (parameter_from_the_old_one, r"Linear is given a new Parameter weight.*p\.copy_"),
    (new_parameter_of_the_table, r"Linear is given a new Parameter weight.*p\.copy_"),
])  # fmt: skip
def test_refused_with_the_line(program: Program, text: str) -> None:
    model = Counting()
    with pytest.raises(Unsupported, match=f"(?s){text}.*line"), unchanged(model) as x:
        program(model, x)


def test_a_buffer_that_two_modules_share_is_not_parted() -> None:
    model = nn.ModuleList([Counting(), Counting()])
    model[1].h = model[0].h
    text = r"(?s)another tensor, and Counting holds the old one as h.*copy_.*line"
    with pytest.raises(Unsupported, match=text), unchanged(model) as x:
        model[0](x)


def test_a_buffer_that_was_given_a_view_is_not_written_in_place_beside_it() -> None:
    model = Counting()
    text = r"(?s)may share memory.*a buffer of a module was given it.*line"
    with pytest.raises(Unsupported, match=text), unchanged(model) as x:
        model.h = x[:]
        model.h[0] = 1


def test_a_parameter_that_nothing_recorded_uses_may_be_replaced() -> None:
    model = Counting()
    with tfnb.record():
        x = tfnb.placeholder(DATA[0], shape=(3,))
        model.layer.weight = nn.Parameter(torch.ones(3, 3))
        out = model.layer(x) - model.layer.bias
    torch.testing.assert_close(tfnb.run(out, {x: DATA[0]}), torch.full((3,), 6.0))


def enclosing() -> SimpleNamespace:
    """Functions that write and read buffers of a module that they alone have a name for."""
    module = Counting()

    def update(x: torch.Tensor) -> torch.Tensor:
        module.h = module.h + x
        module.k.mul_(2)
        return module.h * module.k

    step = partial(lambda inner, x: inner(x) + 1, update)
    return SimpleNamespace(step=step, state=lambda: (module.h.tolist(), module.k.tolist()))


class Holder:
    """An object with a module, whose method writes a buffer of the module."""

    def __init__(self) -> None:
        self.module = Counting()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.module.h += x
        return x * 2


def holding(kind: str) -> tuple[Callable[[torch.Tensor], torch.Tensor], Counting]:
    """A function through which alone a module is known, and the module."""
    holder = Holder()
    module, some, named = holder.module, [holder.module], {"it": holder.module}

    def add(found: Counting, x: torch.Tensor) -> torch.Tensor:
        found.h += x
        return x * 2

    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "list": lambda x: add(some[0], x), "dict": lambda x: add(named["it"], x), "object": lambda x: holder.step(x),
        "method": holder.step, "default": lambda x, found=module: add(found, x),
        "keyword": lambda x, *, found=module: add(found, x),
    }  # fmt: skip
    return functions[kind], module


@pytest.mark.parametrize("kind", ["list", "dict", "object", "method", "default", "keyword"])
def test_a_module_that_only_something_of_a_function_holds_is_known(kind: str) -> None:
    step, module = holding(kind)
    before = module.h.clone()
    with tfnb.record() as g:
        x = tfnb.placeholder(DATA[0], shape=(3,))
        y, done = step(x), tfnb.effects()
    for row in DATA:
        tfnb.Session(g).run([y, done], {x: row})
    torch.testing.assert_close(module.h, before + torch.stack([*DATA]).sum(0))


def test_a_module_that_only_functions_enclose_is_known() -> None:
    program, twin = enclosing(), enclosing()
    with tfnb.record() as g:
        x = tfnb.placeholder(DATA[0], shape=(3,))
        y, done = program.step(x), tfnb.effects()
    for row in DATA:
        assert torch.equal(tfnb.Session(g).run([y, done], {x: row})[0], twin.step(row))
    assert program.state() == twin.state()
