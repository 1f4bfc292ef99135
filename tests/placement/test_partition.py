"""A step cut into parts equals the whole step, for one worker and for several. No cluster: the parts run here."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tfnb
import tfnb.placement.shards as shards_module
from tfnb.execution import lower
from tfnb.graph import Value
from tfnb.passes import step_graph
from tfnb.passes.flow.merges import ROWS, mean
from tfnb.passes.flow.row_weights import weighed
from tfnb.passes.microbatches import divide
from tfnb.placement.partition import split
from tfnb.placement.placement import Piece
from tfnb.placement.shards import BY_ROWS, pack, together


def cut(value, rows):
    return value if rows is None else value[slice(*rows)]


def as_value(item):
    return item if isinstance(item, Value) else item.value


class Parts:
    """Runs a split step here: ``workers`` compute on private copies of the reads, shards average and write."""

    def __init__(self, graph, fetches, feeds, *, shards=1, workers=1, where=None):
        self.graph = graph
        self.fetches, self.feeds = [as_value(f) for f in fetches], [as_value(f) for f in feeds]
        step = step_graph(graph, self.fetches, self.feeds)
        self.homes = where or pack(together(step.graph), {}, [0] * shards, step.whole)
        self.split = split(step, self.homes, parallel=workers > 1)
        self.workers, self.copies = workers, {}

    def on(self, shard, variable):
        """What a shard holds of a variable; StopIteration if nothing: a server reads only its own."""
        first, *_ = pieces = self.homes[variable.key]
        piece = next(piece for piece in pieces if piece.shard == shard)
        if piece.rows is None and piece is not first:  # a copy of a number
            return self.copies.setdefault(piece, variable.storage.clone())
        return piece.of(variable.storage)

    def run(self, tensors, run=0):
        s = self.split
        assert s.divides or self.workers == 1 or s.undivided
        borders = [b.value for server in s.servers for b in server.borders]
        wanted = [v for v in s.fetches if v is not None]
        program = lower(s.compute, (*wanted, *borders, *s.checks), s.feeds)
        before = {v: v.storage.clone() for v in self.graph.variables}
        rows = tensors[0].shape[0] if tensors and s.divides else 0
        ranges = divide(rows, self.workers) if rows else [None]
        results = []
        for part in ranges:
            mine = tensors if part is None else [t[part[0] : part[1]] if t.dim() else t for t in tensors]
            values, _ = program.compute(mine, [before[v] for v in program.variables], run)
            results.append(values)
        sizes = ROWS.shares([1 if r is None else r[1] - r[0] for r in ranges])
        commits, merged = [], {}
        for server in s.servers:
            at = [len(wanted) + borders.index(b.value) for b in server.borders]
            pushed = [
                cut(mean([r[i] for r in results], sizes) if b.kind == "grad" else results[0][i], b.rows)
                for i, b in zip(at, server.borders, strict=True)
            ]
            merged[server.shard] = pushed
            update = lower(server.graph, [server.target], server.feeds)
            held = [self.on(server.shard, v) for v in update.variables]
            commits.append((update, update.compute(pushed, held, run)[1]))
        for update, pending in commits:
            update.commit(pending)
        found = dict(zip([i for i, v in enumerate(s.fetches) if v is not None], range(len(wanted)), strict=True))
        out = [
            mean([r[found[i]] for r in results], sizes) if i in found and results[0][found[i]] is not None else None
            for i in range(len(self.fetches))
        ]
        if s.late is not None:
            late = lower(s.late.graph, [v for v in s.late.fetches if v is not None], s.late.feeds)
            averages = [
                torch.cat([merged[shard][i] for shard, i in a.feeds])
                if len(a.feeds) > 1
                else merged[a.feeds[0][0]][a.feeds[0][1]]
                for a in s.late.averages
            ]
            feeds = [*tensors, *(v.storage for v in s.late.after), *averages]
            values = iter(late.compute(feeds, [before[v] for v in late.variables], run)[0])
            out = [o if v is None else next(values) for o, v in zip(out, s.late.fetches, strict=True)]
        return out


def network(seed=0, norm=False, dropout=False):
    torch.manual_seed(seed)
    middle = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Tanh(), *([nn.Dropout(0.3)] if dropout else []), nn.Linear(8, 3))


def values_of(graph):
    return [v.storage.clone() for v in graph.variables]


def restore(graph, values):
    for v, value in zip(graph.variables, values, strict=True):
        v.storage.copy_(value)


def classifier(make, **kwargs):
    model = network(**kwargs)
    data, labels = torch.randn(11, 4), torch.randint(0, 3, (11,))
    with tfnb.record("net") as g:
        x = tfnb.placeholder(data, name="x")
        y = tfnb.placeholder(labels, name="y")
        loss = F.cross_entropy(model(x), y)
        train = make(loss)
    return g, x, y, loss, train, data, labels


def compare(g, fetches, feeds, tensors, *, steps=4, rtol=1e-6, **kwargs):
    """The same steps whole and in parts; returns the Parts."""
    start = values_of(g)
    program = lower(g, [as_value(f) for f in fetches], [as_value(f) for f in feeds])
    expected = []
    for run in range(steps):
        out, pending = program.compute(tensors, [v.storage for v in program.variables], run)
        program.commit(pending)
        expected.append([None if o is None else o.clone() for o in out])
    want = values_of(g)
    restore(g, start)
    parts = Parts(g, fetches, feeds, **kwargs)
    got = [parts.run(tensors, run) for run in range(steps)]
    for a, b in zip(values_of(g), want, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-7)
    for mine, theirs in zip(got, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-5, atol=1e-6)
    return parts


OPTIMIZERS = {
    "sgd": lambda: tfnb.train.SGD(0.1),
    "momentum": lambda: tfnb.train.SGD(0.1, momentum=0.9),
    "adam": lambda: tfnb.train.Adam(1e-2),
    "rmsprop": lambda: tfnb.train.RMSProp(1e-2),
}


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parts_equal_the_whole(name, shards, workers):
    g, x, y, loss, train, data, labels = classifier(lambda loss: OPTIMIZERS[name]().minimize(loss))
    parts = compare(g, [train, loss], [x, y], [data, labels], shards=shards, workers=workers)
    assert parts.split.undivided is None
    assert len(parts.split.servers) == shards
    kinds = {b.kind for server in parts.split.servers for b in server.borders}
    assert kinds == {"grad"}, "slots and weights are read where they live"


def test_one_worker_is_bitwise_equal():
    g, x, y, loss, train, data, labels = classifier(lambda loss: tfnb.train.Adam(1e-2).minimize(loss))
    compare(g, [train, loss], [x, y], [data, labels], rtol=0, shards=2)


def test_slots_share_the_shard_of_their_variable():
    g, x, y, _, train, *_ = classifier(lambda loss: tfnb.train.Adam(1e-2).minimize(loss))
    groups = together(step_graph(g, [train.value], [x.value, y.value]).graph)
    assert len(groups) == 4 and all(len(group) == 4 for group in groups)
    placed = pack(groups, {groups[0][0].key: (Piece(1, "held"),)}, [0, 0], g)
    assert {placed[v.key] for v in groups[0][1:]} == {(Piece(1, v.key),) for v in groups[0][1:]}
    assert {piece.shard for pieces in placed.values() for piece in pieces} == {0, 1}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("shards", "workers"), [(2, 1), (3, 1), (2, 3)])
def test_large_variables_are_divided_by_rows_and_all_shards_take_part(name, shards, workers, monkeypatch):
    monkeypatch.setattr(shards_module, "LARGE", 64)
    g, x, y, loss, train, data, labels = classifier(lambda loss: OPTIMIZERS[name]().minimize(loss))
    rtol = 0 if workers == 1 else 1e-6
    parts = compare(g, [train, loss], [x, y], [data, labels], shards=shards, workers=workers, rtol=rtol)
    placement = parts.split.placement
    assert parts.split.undivided is None and placement.writes == tuple(range(shards))
    large = [v for v in g.variables if v.storage.numel() > 16]
    assert large and all(len(placement.homes[v.key]) == 2 for v in large)
    for v in large:
        rows = [piece.rows for piece in placement.homes[v.key]]
        assert rows[0][0] == 0 and rows[0][1] == rows[1][0] and rows[1][1] == len(v)
    numbers = [v for v in g.variables if v.shape == () and len(placement.homes[v.key]) > 1]
    assert all(torch.equal(copy, v.storage) for v in numbers for p, copy in parts.copies.items() if p.key[:-2] == v.key)
    assert any(transfer.rows for transfer in placement.transfers)
    updates = [n for n in g.nodes if n.op in BY_ROWS and n.outputs[0].shape == (8, 4)]
    assert all(len(found := placement.places[n.id]) == 2 and found[0].job == "ps" for n in updates)


def test_a_variable_whose_update_needs_all_rows_is_not_divided(monkeypatch):
    monkeypatch.setattr(shards_module, "LARGE", 64)

    def clipped(loss):
        optimizer = tfnb.train.SGD(0.5)
        ((grad, weight), *_) = optimizer.compute_gradients(loss)
        return optimizer.apply_gradients([(grad / grad.norm(), weight)])

    g, x, y, loss, train, data, labels = classifier(clipped)
    step = step_graph(g, [as_value(loss)], [as_value(x), as_value(y)])
    homes = pack(together(step.graph), {}, [0, 0], step.whole)
    whole = {v.name for v in g.variables if len(homes[v.key]) == 1}
    divided = {v.name for v in g.variables if len(homes[v.key]) > 1}
    assert "0.weight" in whole and divided == {"2.weight"}, "the loss alone is placed with a view to the whole graph"
    compare(g, [train, loss], [x, y], [data, labels], shards=2, workers=2)
    weight = next(v for v in g.variables if v.name == "0.weight")
    apart = {**homes, weight.key: (Piece(0, "a", (0, 3)), Piece(1, "b", (3, 8)))}
    parts = compare(g, [train, loss], [x, y], [data, labels], where=apart)
    assert "in parts on several servers" in parts.split.undivided
    assert {b.kind for server in parts.split.servers for b in server.borders} == {"value"}, "servers take new values"


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_placement_gives_the_same_values(data):
    make = data.draw(st.sampled_from(list(OPTIMIZERS.values())))
    g, x, y, loss, train, images, labels = classifier(lambda loss: make().minimize(loss))
    shards = data.draw(st.integers(1, 3))
    homes = {}
    for v in g.variables:
        cuts = data.draw(st.sets(st.integers(1, len(v) - 1), max_size=shards - 1)) if v.shape and len(v) > 1 else ()
        ends = [0, *sorted(cuts), len(v) if v.shape else 1]
        where = data.draw(st.permutations(range(shards)))
        if len(ends) == 2:
            homes[v.key] = (Piece(where[0], v.key),)
        else:
            homes[v.key] = tuple(Piece(where[i], f"{v.key}@{i}", r) for i, r in enumerate(pairwise(ends)))
    compare(g, [train, loss], [x, y], [images, labels], where=homes, steps=2)


def test_clipping_by_global_norm_sees_the_averaged_gradients():
    def make(loss):
        optimizer = tfnb.train.SGD(0.5)
        grads, variables = zip(*optimizer.compute_gradients(loss), strict=True)
        norm = torch.sqrt(sum((g * g).sum() for g in grads))
        scale = torch.clamp(0.05 / norm, max=1.0)
        return optimizer.apply_gradients([(g * scale, v) for g, v in zip(grads, variables, strict=True)])

    g, x, y, loss, train, data, labels = classifier(make)
    for shards, workers in ((1, 3), (2, 3)):
        parts = compare(g, [train, loss], [x, y], [data, labels], shards=shards, workers=workers)
        assert parts.split.undivided is None


def test_a_watched_norm_of_gradients_needs_the_average():
    def make(loss):
        optimizer = tfnb.train.SGD(0.5)
        pairs = optimizer.compute_gradients(loss)
        make.norm = (pairs[0][0] ** 2).sum()
        return optimizer.apply_gradients(pairs)

    g, x, y, _, train, data, labels = classifier(make)
    parts = Parts(g, [train, make.norm], [x, y], workers=2)
    assert parts.split.divides and parts.split.fetches[1] is None and len(parts.split.late.averages) == 1
    assert Parts(g, [train, make.norm], [x, y], workers=1).split.late is None, "one task has all rows"
    compare(g, [train, make.norm], [x, y], [data, labels], shards=2, workers=3)


def test_an_assigned_counter_and_a_schedule_live_on_the_server():
    step = tfnb.Variable(torch.tensor(0.0), name="steps", trainable=False)

    def make(loss):
        rate = 0.1 / (1.0 + step)
        train = tfnb.train.SGD(rate).minimize(loss)
        return tfnb.group(train, step.assign_add(1.0))

    g, x, y, loss, train, data, labels = classifier(make)
    parts = compare(g, [train, loss], [x, y], [data, labels], shards=1, workers=2)
    assert {b.kind for s in parts.split.servers for b in s.borders} == {"grad"}
    two = compare(g, [train, loss], [x, y], [data, labels], shards=2, workers=2)
    assert any(b.kind == "value" for s in two.split.servers for b in s.borders), "a rate of another shard is sent"


def test_batch_norm_buffers_are_the_first_workers():
    g, x, y, loss, train, data, labels = classifier(lambda loss: tfnb.train.SGD(0.1).minimize(loss), norm=True)
    writes = [n for n in g.nodes if n.op == "tfnb.assign"]
    fetches = [train, loss, *(Value(n.id) for n in writes if "step" not in n.tags)]
    assert len(fetches) > 2
    parts = compare(g, fetches, [x, y], [data, labels], shards=2, workers=1)
    assert parts.split.undivided is None
    assert {b.kind for s in parts.split.servers for b in s.borders} == {"grad", "value"}


def test_random_draws_stay_with_the_compute_graph():
    g, x, y, loss, train, data, labels = classifier(lambda loss: tfnb.train.SGD(0.1).minimize(loss), dropout=True)
    parts = compare(g, [train, loss], [x, y], [data, labels], shards=2, workers=1)
    assert all(n.stream is None for s in parts.split.servers for n in s.graph.nodes)


def after_training(g, model, x, y):
    with tfnb.record(g):
        return F.cross_entropy(model(x), y)


def test_a_fetch_of_the_state_after_the_step_takes_the_new_values():
    model = network()
    data, labels = torch.randn(11, 4), torch.randint(0, 3, (11,))
    with tfnb.record("net") as g:
        x, y = tfnb.placeholder(data, name="x"), tfnb.placeholder(labels, name="y")
        loss = F.cross_entropy(model(x), y)
        train = tfnb.train.SGD(0.1).minimize(loss)
        later = F.cross_entropy(model(x), y)
    parts = compare(g, [train, loss, later], [x, y], [data, labels], shards=2, workers=2)
    late = parts.split.late
    assert parts.split.divides and late.has_rows and set(late.after) == set(g.variables) and not late.averages
    alone = compare(g, [train, loss, later], [x, y], [data, labels], shards=2, workers=1, rtol=0)
    assert alone.split.late is None and {b.kind for server in alone.split.servers for b in server.borders} == {"grad"}


def test_a_fetch_that_mixes_before_and_after_is_computed_of_all_rows():
    model = network()
    data, labels = torch.randn(11, 4), torch.randint(0, 3, (11,))
    with tfnb.record("net") as g:
        x, y = tfnb.placeholder(data, name="x"), tfnb.placeholder(labels, name="y")
        loss = F.cross_entropy(model(x), y)
        train = tfnb.train.SGD(0.1).minimize(loss)
        gain = loss - F.cross_entropy(model(x), y)
    for workers in (1, 2):
        parts = compare(g, [train, gain], [x, y], [data, labels], shards=2, workers=workers)
        assert parts.split.undivided is None and parts.split.divides == (workers > 1)


def test_plain_writes_in_program_order():
    v, w = tfnb.Variable(torch.tensor([1.0, 2.0]), name="v"), tfnb.Variable(torch.tensor([5.0, 5.0]), name="w")
    with tfnb.record("writes") as g:
        x = tfnb.placeholder(torch.ones(2), shape=(2,), name="x")
        before = v.read() * 2
        a = v.assign_add(x)
        b = w.assign(v.read() + w.read())
        after = v.read() + w.read()
    fetches = [before, a, b, after]
    for shards in (1, 2):
        parts = compare(g, fetches, [x], [torch.tensor([3.0, 4.0])], shards=shards, rtol=0)
        assert parts.split.undivided is None
    assert before.spec.shape == (2,)


def test_a_fed_intermediate_cuts_the_graph():
    g, x, y, loss, train, data, labels = classifier(lambda loss: tfnb.train.SGD(0.1).minimize(loss))
    hidden = next(n for n in g.nodes if n.op == "aten.tanh.default")
    compare(g, [train, loss], [Value(hidden.id), y, x], [torch.randn(11, 8), labels, data], shards=2, workers=2)


def test_feeding_a_variables_read_is_no_assignment():
    v = tfnb.Variable(torch.ones(2), name="v")
    with tfnb.record("fed") as g:
        out = v.assign(v.read() * 3)
    read = next(n for n in g.nodes if n.op == "tfnb.read")
    parts = compare(g, [out], [Value(read.id)], [torch.tensor([2.0, 2.0])], steps=2, rtol=0)
    assert [b.kind for b in parts.split.servers[0].borders] == ["value"]


def test_a_step_without_writes_has_no_servers():
    g, x, y, loss, _train, data, labels = classifier(lambda loss: None)
    parts = compare(g, [loss, x], [x, y], [data, labels])
    assert parts.split.servers == ()


def test_variables_that_are_written_by_what_is_fed_along_no_gradient_are_named():
    seen = tfnb.Variable(torch.zeros(2), name="seen", trainable=False)
    steps = tfnb.Variable(torch.tensor(0.0), name="steps", trainable=False)
    rate = tfnb.Variable(torch.tensor(0.0), name="rate", trainable=False)
    halves = tfnb.Variable(torch.zeros(2), name="halves", trainable=False)

    def make(loss):
        count = F.one_hot(make.labels, 2).sum(0)
        train = tfnb.train.SGD(0.1).minimize(loss)
        told = (rate.assign(make.number), halves.assign(make.pair / 2))
        return tfnb.group(train, steps.assign_add(1.0), *told, seen.assign_add(count.float()))

    layer, data, labels = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), torch.randn(6, 3), torch.arange(6) % 2
    with tfnb.record() as g:
        x, y = tfnb.placeholder(data), tfnb.placeholder(labels)
        make.labels, make.number = y, tfnb.placeholder(torch.tensor(0.5), name="number")
        make.pair = tfnb.placeholder(torch.ones(2), shape=(2,), name="pair")
        train = make(F.cross_entropy(layer(x), y))
    assert Parts(g, [train], [x, y, make.number, make.pair], workers=2).split.placement.apart == ("seen",)


def test_what_is_added_to_a_variable_is_added_on_its_server_and_what_a_task_makes_of_it_is_named():
    torch.manual_seed(0)
    names = ("count", "average", "clipped", "table", "state", "told")
    count, average, clipped, table, state, told = [
        tfnb.Variable(torch.zeros(3), name=name, trainable=False) for name in names
    ]
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(5, 3), name="x")
        n = tfnb.placeholder(torch.tensor(1.0), name="n")
        at = tfnb.placeholder(torch.tensor([0, 2]), shape=(2,), name="at")
        loss = model(x).square().mean()
        writes = [
            count.assign_add(n), average.assign(0.9 * average + 0.1 * x.mean(0)),
            clipped.assign((clipped.read() * 2 + n * loss).clamp(max=7)), told.assign(x.sum(0)),
            table.scatter_add(at, torch.ones(2) * n), state.assign((x.T @ x @ state.read() + n).tanh()),
        ]  # fmt: skip
        train = tfnb.group(tfnb.train.Adam(0.1).minimize(loss), *writes)
    feeds = [torch.randn(5, 3), torch.tensor(3.0), torch.tensor([0, 2])]
    for shards in (1, 2):
        placement = compare(g, [train, loss], [x, n, at], feeds, shards=shards).split.placement
        assert set(placement.raced) == {"table", "state"}
        on_servers = {
            node.name for node in g.nodes if any(place.job == "ps" for place in placement.places.get(node.id, ()))
        }
        assert {"add", "add_1", "clamp"} <= on_servers and not any(name.startswith("mean") for name in on_servers)


def test_gradients_of_updates_by_hand_are_averaged():
    scale, shift = (tfnb.Variable(torch.full((4,), 0.5), name=name) for name in ("scale", "shift"))
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(8, 4), name="x")
        loss = (torch.exp(-scale.read()) * (x * x).mean(0) + scale.read() + x.mean(0) * shift.read().square()).sum()
        writes = [
            v.assign_sub(0.1 * grad)
            for v, grad in zip((scale, shift), tfnb.gradients(loss, [scale, shift]), strict=True)
        ]  # fmt: skip
        train = tfnb.group(*writes)
    parts = compare(g, [train, loss], [x], [torch.randn(8, 4)], shards=2, workers=2)
    kinds = {t.variable: t.kind for t in parts.split.placement.transfers}
    assert kinds == {"scale": "grad", "shift": "grad"} and parts.split.placement.raced == ()


def test_what_is_added_to_a_variable_is_sent_where_it_needs_all_of_one_that_lies_in_parts():
    average, table = (tfnb.Variable(torch.randn(6, 3), name=name) for name in ("average", "table"))
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(5, 6), name="x")
        loss = (x @ table.read()).square().mean()
        moved = average.assign(0.9 * average.read() + 0.1 * loss + 0.001 * table.read())
        train = tfnb.group(moved, tfnb.train.SGD(0.1).minimize(loss))
    halves = (Piece(0, "a", (0, 3)), Piece(1, "b", (3, 6)))
    where = {table.key: halves, average.key: (Piece(0, average.key),)}
    parts = compare(g, [train, loss], [x], [torch.randn(5, 6)], where=where)
    assert parts.split.undivided is None and parts.split.placement.raced == ("average",)


def test_what_is_added_may_be_made_of_the_value_that_was_read():
    w = tfnb.Variable(torch.zeros(3), name="w")
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(5, 3), name="x")
        train = w.assign_add(0.1 * x.T @ (1 - x @ w.read()))
    assert compare(g, [train], [x], [torch.randn(5, 3)]).split.placement.raced == ()


def test_a_check_of_a_value_behind_the_update_is_made_by_a_task_that_has_the_whole_step():
    w, u = (tfnb.Variable(torch.ones(3), name=name) for name in "wu")
    with tfnb.record() as g, pytest.warns(UserWarning, match="Python took the True branch"):
        x = tfnb.placeholder(torch.randn(5, 3), name="x")
        train = tfnb.train.SGD(0.1).minimize((x @ w.read()).mean())
        if w.read().sum() < 100:
            moved = u.assign(w.read() * 2)
        both = tfnb.group(train, moved)
    alone, of_two = (Parts(g, [both], [x], workers=workers).split for workers in (1, 2))
    assert alone.undivided is None and len(alone.checks) == 1
    assert all(node.op != "tfnb.guard" for server in alone.servers for node in server.graph.nodes)
    assert "guard is done with a value behind the update" in of_two.undivided and not of_two.divides
    compare(g, [both], [x], [torch.randn(5, 3)], rtol=0)


# -- late fetches ------------------------------------------------------------------------------------------------

OPERATIONS = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "ratio": lambda a, b: a / (1 + b * b), "root": lambda a, b: (a * a + b * b + 1).sqrt(),
    "bounded": lambda a, b: torch.tanh(a) + b, "largest": torch.maximum,
}  # fmt: skip


def late_program(seed, pick):
    """A training step in float64 whose fetches mix values before and behind the update, and norms of gradients."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    data, target = torch.randn(11, 4, dtype=torch.float64), torch.randn(11, 1, dtype=torch.float64)
    count = tfnb.Variable(torch.tensor(0.0, dtype=torch.float64), name="count", trainable=False)
    optimizer = pick([tfnb.train.SGD(0.1), tfnb.train.SGD(0.1, momentum=0.9), tfnb.train.Adam(0.05)])
    with tfnb.record() as g:
        x, y = tfnb.placeholder(data, name="x"), tfnb.placeholder(target, name="y")
        scale = tfnb.placeholder(torch.tensor(1.0, dtype=torch.float64), name="scale")
        loss = (model(x) - y).square().mean()
        pairs = optimizer.compute_gradients(loss)
        norm = sum((grad * grad).sum() for grad, _ in pairs).sqrt()
        if pick([False, True]):
            pairs = [(grad * torch.clamp(0.05 / norm, max=1.0), v) for grad, v in pairs]
        early = (x.sum(1) * scale).mean()
        weights = sum(p.square().sum() for p in model.parameters())
        train = tfnb.group(optimizer.apply_gradients(pairs), count.assign_add(1.0))
        values = [
            norm, pairs[0][0].abs().max(), weights, loss, early, loss * loss,
            sum(p.square().sum() for p in model.parameters()), model[0].weight[1:3].sum() * scale,
            (model(x) - y).square().mean(), (model(x) - y).abs().max(), model(x).mean() * x.shape[0], count.read(),
        ]  # fmt: skip
        for _ in range(pick(range(5))):
            values.append(OPERATIONS[pick(sorted(OPERATIONS))](pick(values), pick(values)))
    behind = values[:2] + values[6:11] + values[12:]
    return g, [train, loss, *(pick(behind) for _ in range(2)), values[-1]], (x, y, scale), (data, target)


def drawn(seed):
    """A function that picks from items, by numbers that were drawn before."""
    generator = random.Random(seed)
    numbers = iter([generator.randrange(1 << 30) for _ in range(64)])
    return lambda items: items[next(numbers) % len(items)]


@pytest.mark.filterwarnings("ignore:recording. this cell or block keeps pick")  # whose numbers make the program
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 40))])
def test_random_mixes_of_values_before_and_behind_the_update_equal_those_of_one_device(seed, monkeypatch):
    monkeypatch.setattr(shards_module, "LARGE", 100 if seed % 2 else 64 << 20)
    g, fetches, feeds, (data, target) = late_program(seed, drawn(seed))
    fetches = list(dict.fromkeys(fetches))
    tensors, start = [data, target, torch.tensor(0.5, dtype=torch.float64)], values_of(g)
    program = lower(g, [as_value(f) for f in fetches], [as_value(f) for f in feeds])
    expected = []
    for run in range(2):
        out, pending = program.compute(tensors, [v.storage for v in program.variables], run)
        program.commit(pending)
        expected.append([None if o is None else o.clone() for o in out])
    want = values_of(g)
    for workers in (2, 3):
        restore(g, start)
        parts = Parts(g, fetches, feeds, shards=1 + (seed + workers) % 3, workers=workers)
        late = parts.split.late
        assert parts.split.divides and late is not None
        for run, theirs in enumerate(expected):
            for at, (a, b) in enumerate(zip(parts.run(tensors, run), theirs, strict=True)):
                if late.fetches[at] is not None or at == 1:  # others are means of the replicas' values
                    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        for a, b in zip(values_of(g), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("late", "why"),
    [
        (lambda x, w, grad: F.dropout(x, 0.5).sum() * grad.sum(), "draws random numbers"),
        (None, "rows of its own"),
        (lambda x, w, grad: tfnb.gradients((x @ w).square().mean(), [w])[0].sum(), "values behind an update"),
    ],
    ids=["draws", "gradient of rows", "gradient behind"],
)
def test_what_replicas_cannot_do_again_is_not_divided_and_says_why(late, why):
    w = tfnb.Variable(torch.randn(3, dtype=torch.float64), name="w")
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(6, 3, dtype=torch.float64), name="x")
        before, optimizer = w.read(), tfnb.train.SGD(0.1)
        pairs = optimizer.compute_gradients((x @ before).square().mean())
        if why == "rows of its own":
            grads = tfnb.gradients((x @ before).square().mean(), [x])[0].sum()
        train = optimizer.apply_gradients(pairs)
        value = late(x, w.read(), pairs[0][0]) if why != "rows of its own" else grads + w.read().sum()
    parts = compare(g, [train, value], [x], [torch.randn(6, 3, dtype=torch.float64)], workers=2, steps=2)
    assert not parts.split.divides and parts.split.late is None and why in parts.split.undivided


def test_a_buffer_that_counts_rows_is_written_apart_from_gradients() -> None:
    model = torch.nn.Linear(3, 1)
    model.register_buffer("seen", torch.zeros(()))
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(4, 3))
        model.seen += x.shape[0]
        train = tfnb.train.Adam(0.1).minimize(model(x).square().mean())
    step = tfnb.Session(graph)._prepare(train, (x,)).code.step
    homes = {variable.key: (Piece(0, variable.key),) for variable in step.variables}
    assert split(step, homes, parallel=True).placement.apart == ("seen",)
    about = weighed(step)
    placement = split(about.step, homes, parallel=True, weighed=about).placement
    assert placement.apart == () and placement.joined == ("seen",)
    assert {t.kind for t in placement.transfers if t.variable == "seen"} == {"sum"}


def test_gradients_of_complex_parameters_are_averaged():
    weight = nn.Parameter(torch.randn(3, dtype=torch.complex128))
    twin = weight.detach().clone().requires_grad_()
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.zeros(2, 3, dtype=torch.complex128), name="x")
        train = tfnb.train.SGD(0.1).minimize((x @ weight).abs().square().mean())
    rows = torch.randn(5, 3, dtype=torch.complex128)
    Parts(g, [train], [x], workers=2).run([rows])
    (rows @ twin).abs().square().mean().backward()
    torch.testing.assert_close(weight.detach(), (twin - 0.1 * twin.grad).detach(), rtol=1e-13, atol=1e-13)
