"""Variables on the servers and their storages here: what is gone is dropped there, what is written here is not lost."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import tfnb
from tests.cluster.conftest import stats
from tests.recording.test_cells import Notebook
from tfnb.cluster.notebook import steps_there
from tfnb.cluster.notebook.holdings import Holdings, Print
from tfnb.errors import FailedPrecondition
from tfnb.graph import Variable, lazy_memory
from tfnb.placement.partition import split

CELL = """
import torch.nn as nn
torch.manual_seed(0)
x = tfnb.placeholder(torch.ones(4, 64), name="x")
model = nn.Linear(64, 256)
loss = model(x).square().mean()
train = tfnb.train.Adam(1e-2).minimize(loss)
"""


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["in another cell", "in the cell"])
def test_a_cell_recorded_again_leaves_no_variables(connect, optimizer):
    notebook = Notebook(f"again {optimizer}")
    cell = CELL
    if optimizer == "in another cell":
        notebook.names["adam"] = tfnb.train.Adam(1e-2)
        cell = CELL.replace("tfnb.train.Adam(1e-2)", "adam")
    cluster = connect(2)
    older = weakref.WeakSet(o for o in gc.get_objects() if type(o) is Variable)  # of other tests, which may end

    def again():
        notebook.run("1", cell)
        names = notebook.names
        for fetch in ("train", "loss"):
            tfnb.run(names[fetch], {names["x"]: torch.ones(4, 64)})
        tfnb.fit(names["train"], {names["x"]: torch.ones(8, 64)}, batch_size=4)
        gc.collect()
        cluster.status()
        held = stats(cluster)
        here = sum(type(o) is Variable and o not in older for o in gc.get_objects())
        return sum(s["variables"] for s in held), sum(s["bytes"] for s in held), here

    first = again()
    assert first[0] == 8
    for _ in range(3):
        assert again() == first
    copies = cluster.client.run(_cached)
    assert 0 < max(copies.values()) <= 8


def _cached(dask_worker):
    """How many values the compute task of a worker keeps."""
    return max([len(actor.task.cache) for actor in dask_worker.state.actors.values()], default=0)


def test_variables_go_where_their_step_was_cut_to_find_them_whatever_is_collected_meanwhile(connect, monkeypatch):
    """The collector runs at any instant: the servers hold less when Variables move than when the step was cut."""
    connect(2)
    garbage = [tfnb.Variable(torch.zeros(1000), name="large")]
    with tfnb.record():
        added = garbage[0].assign_add(torch.ones(1000))
    tfnb.run(added)
    large = weakref.ref(garbage[0])
    garbage += [garbage, added]
    del garbage, added

    def collected(*args, **options):
        assert large() is not None
        cut = split(*args, **options)
        gc.collect()
        assert large() is None
        return cut

    small = [tfnb.Variable(torch.zeros(3), name=f"small{i}") for i in range(5)]
    with tfnb.record():
        train = tfnb.group(*(v.assign_add(torch.ones(3)) for v in small))
    monkeypatch.setattr(steps_there, "split", collected)
    tfnb.run(train)
    assert all(v.value().tolist() == [1.0] * 3 for v in small)


def test_a_variable_that_is_dropped_frees_its_storage_and_its_name(connect):
    v, w = tfnb.Variable(torch.zeros(3), name="v"), tfnb.Variable(torch.ones(3), name="w")
    with tfnb.record("both"):
        total = v.read() + w.read()
    cluster = connect(2)
    tfnb.run(total)
    del total, v
    with tfnb.record("both"):
        twice = w.read() * 2
    gc.collect()
    assert tfnb.run(twice).tolist() == [2, 2, 2]
    assert sum(s["variables"] for s in stats(cluster)) == 1


WRITES = {
    "in place": lambda m: m.weight.zero_(),
    "through data": lambda m: m.weight.data.fill_(2.0),
    "through numpy": lambda m: m.weight.detach().numpy().__setitem__(0, 3.0),
    "load_state_dict": lambda m: m.load_state_dict({"weight": torch.full((2, 4), 5.0), "bias": torch.ones(2)}),
    "assigned": lambda m: m.load_state_dict({"weight": torch.full((2, 4), 6.0), "bias": torch.ones(2)}, assign=True),
    "permuted": lambda m: m.weight.data.copy_(m.weight.data.flip(0)),
}


def model():
    torch.manual_seed(1)
    module = nn.Linear(4, 2)
    with tfnb.record("written"):
        x = tfnb.placeholder(torch.ones(3, 4), name="x")
        out = module(x).sum()
        train = tfnb.train.SGD(0.5).minimize(out)
    return module, x, out, train


def expected(module):
    with torch.no_grad():
        return module(torch.ones(3, 4)).sum().item()


def write(module, how):
    with torch.no_grad():
        WRITES[how](module)


def test_a_write_here_is_seen_there_before_the_next_step(connect):
    module, x, out, train = model()
    cluster = connect(2)
    feed = {x: torch.ones(3, 4)}
    tfnb.run(out, feed)
    for how in WRITES:
        write(module, how)
        assert tfnb.run(out, feed).item() == pytest.approx(expected(module)), how
        tfnb.fit(train, {x: torch.ones(6, 4)}, batch_size=3, exact=False)  # the loss is a sum
        write(module, how)
        weight = next(v for v in out.graph.variables if v.name.endswith("weight"))
        assert torch.equal(weight.value(), module.weight.detach()), how
        module.weight.data.add_(1.0)
        want = expected(module)
        cluster.pull()
        assert expected(module) == pytest.approx(want), "a pull sends first"
    write(module, "in place")
    cluster.close()
    assert module.weight.abs().sum() == 0


def test_a_write_over_values_that_are_old_is_refused_with_what_to_do(connect):
    module, x, _, train = model()
    cluster = connect(2)
    feed = {x: torch.ones(3, 4)}
    tfnb.run(train, feed)
    tfnb.run(train, feed)
    write(module, "in place")
    with pytest.raises(FailedPrecondition, match=r"weight was written here.*shows step 0.*at step 2.*pull\(\)"):
        tfnb.run(train, feed)
    with pytest.warns(UserWarning, match="weight gives way to the servers' value"):
        cluster.pull()
    assert module.weight.abs().sum() > 0
    write(module, "in place")
    tfnb.run(train, feed)
    cluster.pull()
    assert torch.allclose(module.weight, torch.full((2, 4), -1.5))


def test_fit_notices_a_write_between_two_of_its_steps(connect):
    module, x, _, train = model()
    cluster = connect(2)

    def rows():
        for step in range(5):
            if step == 3:
                with torch.no_grad():
                    module.weight.zero_()
            yield {x: torch.ones(4, 4)}

    with pytest.raises(FailedPrecondition, match="weight was written here"):
        tfnb.fit(train, rows(), exact=False)  # the loss is a sum
    assert not module.weight.any(), "what was written here stays"
    bias = next(v for v in train.graph.variables if v.name.endswith("bias"))
    assert torch.equal(module.bias, bias.value()), "everything else shows the last step"
    weight = next(v for v in train.graph.variables if v.name.endswith("weight"))
    weight.assign(torch.full((2, 4), 3.0))
    tfnb.fit(train, {x: torch.ones(4, 4)}, batch_size=4, exact=False)
    assert torch.allclose(module.weight, torch.full((2, 4), 1.0)), "SGD(0.5), and a sum over four rows"
    assert cluster.step > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (300, 70)])
def test_a_print_fits_what_it_was_taken_of_only(dtype, shape):
    value = torch.randn(shape).mul(3).to(dtype)
    taken = Print.of(value)
    assert taken.seems(value) and taken.fits(value)
    if value.numel():
        value.view(-1)[-1] = value.view(-1)[-1].logical_not() if dtype is torch.bool else value.view(-1)[-1] + 1
        assert not taken.seems(value) and not taken.fits(value)
    same = torch.full((3,), float("nan"))
    assert Print.of(same).fits(same), "a NaN is a value like others"


def test_a_print_of_a_view_at_an_odd_place():
    value = torch.zeros(40_001)[1:]
    taken = Print.of(value)
    assert taken.fits(value)
    value[7] = 1
    assert not taken.fits(value)


@pytest.mark.parametrize("make", [torch.from_numpy, lambda zeros: lazy_memory.zeros(zeros.shape, torch.float32)])
def test_to_read_a_large_table_is_not_to_write_it(make):
    table = make(np.zeros((1 << 20, 32), dtype=np.float32))
    table[5] = 1.0
    taken = Print.of(table)
    assert table.abs().sum() == 32 and taken.fits(table), "every page is there now"
    for row in (6, 1 << 19):
        table[row, 3] = -0.0
        assert not taken.fits(table), "minus zero is a value"
        table[row, 3] = 0.0
        assert taken.fits(table)
    table[5, :2] = torch.tensor([2.0, 3.0])
    changed = Print.of(table)
    table[5, :2] = torch.tensor([3.0, 2.0])
    assert not taken.fits(table) and not changed.fits(table), "columns are summed, too"


def test_a_parameter_that_was_read_is_not_behind():
    parameter = nn.Parameter(torch.from_numpy(np.zeros((1 << 20, 32), dtype=np.float32)))
    variable, holdings = Variable.of(parameter, name="table"), Holdings()
    holdings.adopt(variable, ())
    holdings.superseded(variable)
    assert parameter.abs().max() == 0
    assert holdings.written([variable], thorough=True) == []
