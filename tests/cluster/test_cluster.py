"""Training and running on real processes: equal to local runs, and values come and go without loss."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tests.cluster.conftest import close_to, one_by_one, stats, until
from tfnb.cluster import connected
from tfnb.cluster.modes.joins import Join, join, joins
from tfnb.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InsecureAddress,
    InvalidArgument,
    NonFiniteGradient,
    NotFound,
    ShapeError,
    TfnbError,
    Unavailable,
    Unimplemented,
    VersionMismatch,
)  # fmt: skip
from tfnb.execution import lower
from tfnb.passes import step_graph
from tfnb.passes.flow.row_weights import WeighedStep

OPTIMIZERS = {
    "momentum": lambda: tfnb.train.SGD(0.1, momentum=0.9),
    "adam": lambda: tfnb.train.Adam(1e-2),
}


@pytest.mark.parametrize("tasks", [2, 1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_c52_c79_sync_equals_the_local_run(connect, problem, name, tasks):
    p = problem(OPTIMIZERS[name]())
    states, losses = p.local(8, last=5)
    cluster = connect(tasks)
    seen = list(one_by_one(cluster, p.program, p.batches(8, last=5)))
    assert [step for step, _ in seen] == list(range(1, 9))
    assert close_to([values[1] for _, values in seen], [torch.tensor(x, dtype=torch.float64) for x in losses])
    assert all(values[0] is None for _, values in seen)
    assert close_to(p.values(), states[-1]), "module storage is refreshed when training ends"
    assert cluster.pulled_step == 8


def test_a_batch_of_fewer_rows_than_tasks(connect, problem):
    p = problem()
    states, _ = p.local(2, last=2)
    list(connect(3).train(p.program, p.batches(2, last=2)))
    assert close_to(p.values(), states[-1])


def test_float32_within_tolerance(connect, problem):
    p = problem(OPTIMIZERS["momentum"](), dtype=torch.float32)
    states, _ = p.local(10)
    list(connect(3).train(p.program, p.batches(10)))
    assert close_to(p.values(), states[-1], rtol=1e-6)


def test_variables_move_there_and_back_in_the_middle_of_training(connect, problem):
    p = problem()
    states, _ = p.local(9)

    def local_steps(first, last):
        for batch in list(p.batches(last))[first:]:
            _, pending = p.program.compute(
                list(batch.tensors), [v.storage for v in p.program.variables], batch.run_index
            )
            p.program.commit(pending)

    local_steps(0, 3)
    cluster = connect(2)
    batches = list(p.batches(6))[3:]
    list(cluster.train(p.program, batches))
    cluster.close()
    assert connected.connected() is None
    local_steps(6, 9)
    assert close_to(p.values(), states[-1])


def test_run_equals_local_and_never_splits(connect, problem):
    p = problem()
    states, losses = p.local(3)
    cluster = connect(3)
    for run, batch in enumerate(p.batches(3)):
        fetched = cluster.run(p.program, batch.tensors, run=run)
        assert fetched[0] is None and fetched[1].item() == losses[run], "one task computes it: bitwise equal"
    cluster.pull()
    assert all(torch.equal(a, b) for a, b in zip(p.values(), states[-1], strict=True))


def test_session_and_fit_style_calls_go_to_the_connected_cluster(connect, problem):
    p = problem()
    x, y = p.feeds
    here = tfnb.run(p.loss, {x: p.data, y: p.labels})
    cluster = connect(2)
    assert tfnb.run(p.loss, {x: p.data, y: p.labels}).item() == here.item()
    tfnb.run(p.train, {x: p.data, y: p.labels})
    assert cluster.step == 1
    after = tfnb.run(p.loss, {x: p.data, y: p.labels})
    assert after < here
    cluster.close()
    assert tfnb.run(p.loss, {x: p.data, y: p.labels}).item() == pytest.approx(after.item(), rel=1e-12)


def test_variables_answer_for_their_servers(connect):
    v = tfnb.Variable(torch.tensor([1.0, 2.0]), name="v")
    with tfnb.record("counter"):
        double = v.read() * 2
    cluster = connect(2)
    tfnb.run(double)
    assert "ps:" in v.device
    v.assign_add(torch.ones(2))
    assert v.storage.tolist() == [2, 3], "no step writes it: the loss of a server does not undo the assignment"
    assert v.value().tolist() == [2, 3]
    assert tfnb.run(double).tolist() == [4, 6]
    with pytest.raises(ShapeError):
        v.assign(torch.ones(3))
    cluster.pull()
    assert v.storage.tolist() == [2, 3]
    v.assign(torch.tensor([7.0, 7.0]))
    cluster.close()
    assert v.storage.tolist() == [7, 7] and v.home is None and v.device == "cpu"


def test_run_with_writes_and_fetches_of_the_state_afterwards(connect):
    v, w = tfnb.Variable(torch.zeros(2), name="v"), tfnb.Variable(torch.ones(2), name="w")
    with tfnb.record("writes"):
        x = tfnb.placeholder(torch.ones(2), shape=(2,), name="x")
        before = v.read() * 1
        a = v.assign_add(x)
        b = w.assign(v.read() * 10)
        after = v.read() + w.read()
    connect(2)
    for step in (1, 2):
        got = tfnb.run([before, a, b, after], {x: torch.ones(2)})
        assert [t[0].item() for t in got] == [step - 1, step, 10 * step, 11 * step]
    assert v.value().tolist() == [2, 2]


def test_watched_values_of_the_state_after_the_step(connect, problem):
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    data, labels = torch.randn(24, 4, dtype=torch.float64), torch.randint(0, 3, (24,))
    with tfnb.record("later") as g:
        x, y = tfnb.placeholder(data[:5], name="x"), tfnb.placeholder(labels[:5], name="y")
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        train = tfnb.train.SGD(0.5).minimize(loss)
        later = F.cross_entropy(model(x), y)
        right = (logits.argmax(1) == y).sum()
    program = lower(g, [t.value for t in (train, loss, later, right, logits)], [x.value, y.value])
    start = [v.storage.clone() for v in g.variables]
    expected = []
    for run in range(3):
        out, pending = program.compute([data, labels], [v.storage for v in program.variables], run)
        expected.append([o.clone() for o in out[1:]])
        program.commit(pending)
    for v, value in zip(g.variables, start, strict=True):
        v.storage.copy_(value)
    feeds = tfnb.cluster.notebook.steps_there.batches(program, [([data, labels], r) for r in range(3)])
    from_cluster = one_by_one(connect(3), program, feeds)
    for (_, got), want in zip(from_cluster, expected, strict=True):
        for a, b in zip(got[1:], want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_random_draws_are_the_same_as_here(connect):
    with tfnb.record("random"):
        x = tfnb.placeholder(torch.ones(4), name="x")
        out = F.dropout(x, 0.5) + torch.rand_like(x)
    here = [tfnb.Session(out.graph).run(out, {x: torch.ones(4)}) for _ in range(1)]
    connect(2)
    there = [tfnb.Session(out.graph).run(out, {x: torch.ones(4)}) for _ in range(1)]
    assert torch.equal(here[0], there[0])


def test_async_trains_and_applies_each_batch_once(connect, problem):
    p = problem(tfnb.train.SGD(0.3))
    states, losses = p.local(90)
    cluster = connect(3)
    seen = [step for step, _ in one_by_one(cluster, p.program, p.batches(90), mode="async")]
    assert seen == list(range(1, 91))
    held = stats(cluster)
    assert sum(s["applied"] for s in held) == 90 + len(held), "one push for each batch, one creation"
    assert float(p.local(1, size=12)[1][0]) < losses[0]
    assert close_to(p.values(), states[-1], rtol=0.1), "staleness changes little at this rate"


def test_async_on_one_task_equals_local(connect, problem):
    p = problem()
    states, _ = p.local(6)
    list(connect(1).train(p.program, p.batches(6), mode="async"))
    assert close_to(p.values(), states[-1])


def test_breaking_out_of_training_brings_the_values_home(connect, problem):
    p = problem()
    states, _ = p.local(9)
    for mode in ("sync", "async"):
        p.reset()
        cluster = connect(2)
        steps = one_by_one(cluster, p.program, p.batches(9), mode=mode)
        for step, _ in steps:
            if step == 4:
                break
        steps.close()
        assert 4 <= cluster.pulled_step == cluster.step <= 9, "tasks work ahead of what is taken here"
        if mode == "sync":
            assert close_to(p.values(), states[cluster.step])
        cluster.close()


def test_two_threads_run_on_one_cluster(connect, problem):
    p = problem()
    x, y = p.feeds
    cluster = connect(2)
    total = tfnb.Variable(torch.tensor(0), name="total")
    with tfnb.record("count"):
        bump = total.assign_add(1)
    seen: list[int] = []

    def work():
        for _ in range(15):
            seen.append(int(tfnb.run(bump)))
            tfnb.run(p.loss, {x: p.data, y: p.labels})

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(seen) == list(range(1, 31)) and total.value() == 30 == cluster.step


def test_async_with_a_watch_of_the_state_after_the_step_sees_what_its_own_update_made(connect):
    v = tfnb.Variable(torch.zeros(2, dtype=torch.float64), name="v")
    with tfnb.record("after"):
        x = tfnb.placeholder(torch.ones(4, 2, dtype=torch.float64), name="x")
        train = tfnb.train.SGD(1.0).apply_gradients([(x.mean(0), v)])
        now = v.read() * 1
    program = lower(train.graph, [train.value, now.value], [x.value])
    feeds = [([torch.ones(4, 2, dtype=torch.float64)], run) for run in range(4)]
    cluster = connect(2)
    steps = one_by_one(cluster, program, cluster.batches(program, feeds), mode="async")
    assert sorted(values[1][0].item() for _, values in steps) == [-4, -3, -2, -1]


# -- errors ------------------------------------------------------------------------------------------------------


def test_a_kernel_error_names_node_line_and_shapes_and_writes_nothing(connect):
    v = tfnb.Variable(torch.zeros(()), name="v")
    with tfnb.record("bad"):
        rows = tfnb.placeholder(torch.tensor([0, 1, 2]), name="rows")
        out = F.embedding(rows, torch.ones(4, 2))
        bump = v.assign_add(1.0)
    cluster = connect(2)
    with pytest.raises(TfnbError) as caught:
        tfnb.run([out, bump], {rows: torch.tensor([9])})
    error = caught.value
    assert error.op == "aten.embedding.default" and error.line and error.task == "task:0"
    assert "out = F.embedding(rows" in error.message and "rows" in error.message
    assert v.value().item() == 0
    assert tfnb.run(bump).item() == 1 and cluster.step == 1


def test_c23_a_non_finite_gradient_stops_training_and_changes_nothing(connect, problem):
    p = problem()
    cluster = connect(2)
    bad = list(p.batches(3))
    bad[1].tensors[0][0, 0] = float("nan")
    with pytest.raises(NonFiniteGradient):
        list(cluster.train(p.program, bad))
    assert cluster.step == 1
    assert close_to(p.values(), p.local(0)[0][0])


def test_a_step_that_passes_its_deadline(connect, problem):
    p = problem()
    cluster = connect(2)
    list(cluster.train(p.program, p.batches(1)))

    def slow():
        yield from p.batches(1000)

    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        for _ in cluster.train(p.program, slow(), timeout=0.3):
            pass
    assert time.monotonic() - begin < 100
    step = cluster.step
    assert close_to(p.values(), [v.value() for v in p.graph.variables])
    list(cluster.train(p.program, p.batches(1)))
    assert cluster.step == step + 1


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"cluster": 0}, InvalidArgument), ({"cluster": True}, InvalidArgument), ({"cluster": 2.5}, InvalidArgument),
        ({"cluster": object()}, InvalidArgument), ({"cluster": "nonsense"}, InvalidArgument),
        ({"cluster": "gopher://127.0.0.1:1"}, InvalidArgument), ({"cluster": "missing.json"}, InvalidArgument),
        ({"cluster": 1, "ps": 0}, InvalidArgument), ({"cluster": "tcp://192.0.2.7:8786"}, InsecureAddress),
        ({"cluster": 1, "name": "run"}, Unimplemented),
    ],
)  # fmt: skip
def test_bad_arguments_of_connect(arguments, kind):
    begin = time.monotonic()
    with pytest.raises(kind):
        tfnb.connect(**arguments)
    assert time.monotonic() - begin < 100
    assert connected.connected() is None


def test_tls_needs_certificates():
    with pytest.raises(InvalidArgument, match="Security"):
        tfnb.connect("tls://127.0.0.1:8786")


def test_other_versions_on_the_workers_are_shown_as_a_table(dask, monkeypatch):
    monkeypatch.setattr("tfnb.cluster.members.deploy.versions", lambda: {"tfnb": "9.9", "torch": "1.0"})
    with pytest.raises(VersionMismatch, match=r"(?s)tfnb +here 9.9 .*torch +here 1.0"):
        tfnb.connect(dask)
    assert connected.connected() is None


@pytest.mark.slow
def test_an_address_where_nothing_listens(problem, capsys):
    begin = time.monotonic()
    # the last of Dask's attempts may have a millisecond left
    ends = r"127\.0\.0\.1:9 within [0-9.]+ s .*: (ConnectionRefused|Timeout)Error"
    with pytest.raises(Unavailable, match=ends) as error:
        tfnb.connect("tcp://127.0.0.1:9", timeout=3)
    assert error.value.__suppress_context__, "one error, not a chain of Dask's"
    assert "connect: nobody answers at tcp://127.0.0.1:9 yet" in capsys.readouterr().out
    assert time.monotonic() - begin < 100
    assert connected.connected() is None
    p = problem()
    assert tfnb.run(p.loss, {p.feeds[0]: p.data, p.feeds[1]: p.labels}) > 0, "the notebook goes on"


def test_a_closed_cluster_says_so(connect, problem):
    p = problem()
    cluster = connect(2)
    cluster.close()
    cluster.close()
    with pytest.raises(FailedPrecondition, match="closed"):
        cluster.run(p.program, p.batch(0, 12))
    assert "closed" in str(cluster.status())


def test_unknown_modes_are_named(connect, problem):
    p = problem()
    with pytest.raises(Unimplemented, match="sandblaster"):
        list(connect(2).train(p.program, p.batches(1), mode="sandblaster"))


def test_pull_of_a_key_that_no_server_has(connect):
    cluster = connect(2)
    with pytest.raises(NotFound):
        cluster._do("pull", 60, cluster._engine.pull, {0: ["nothing"]})


def test_a_variable_of_another_cluster(connect, problem):
    p = problem()
    first = connect(2)
    list(first.train(p.program, p.batches(1)))
    second = connect(2)
    with pytest.raises(FailedPrecondition, match="close that cluster first"):
        second.run(p.program, p.batch(0, 12))


# -- the card, the house ------------------------------------------------------------------------------------------


def test_c76_status_says_the_same_as_text_and_as_html(connect, problem):
    p = problem()
    cluster = connect(3)
    list(cluster.train(p.program, p.batches(2)))
    status = cluster.status()
    text, html = str(status), status._repr_html_()
    for fact in ("task:0", "ps:0", "alive", "16 variables", "step", "plain"):
        assert fact in text and fact in html
    assert "step: 2" in text
    assert "<script" not in html
    assert cluster._repr_html_().startswith("<div")


def test_the_card_has_how_full_the_queues_of_a_server_are(connect):
    bounded = tfnb.FIFOQueue(8, torch.float32, (), name="bounded")
    endless = tfnb.FIFOQueue(-1, torch.float32, (), name="endless")
    bounded.enqueue(1.0)
    cluster = connect(1)
    bounded.enqueue(2.0)
    endless.enqueue(3.0)
    queues = [queue for row in cluster.status().rows for queue in row.queues]
    assert sorted(queues) == [("bounded", 2, 8), ("endless", 1, None)]
    assert "queue bounded 2 of 8" in cluster._repr_html_()


def test_a_card_is_told_memory_lanes_and_steps_while_a_training_runs_and_its_end(connect, problem):
    p, seen = problem(), []
    cluster = connect(2)
    cluster.follow(lambda status: seen.append(str(status)))
    cluster.follow(lambda status: 1 / 0)  # one that fails is dropped
    with pytest.warns(UserWarning, match="a follower of the cluster failed: ZeroDivisionError"):
        end = time.monotonic() + 10
        while len(seen) < 3 and time.monotonic() < end:
            list(cluster.train(p.program, p.batches(20)))
    assert len(seen) >= 3
    steps = [int(re.search(r"^  step: (\d+)$", text, re.MULTILINE)[1]) for text in seen]
    assert steps == sorted(steps) and steps[-1] > steps[0]
    assert re.search(r"lanes of the servers: .*(sockets|shared memory) [\d.]+ .?B \([1-9][\d.]* .?B/s\)", seen[-1])
    assert len(re.findall(r"; memory [1-9][\d.]* .B", seen[-1])) >= 3
    start, told = time.monotonic(), len(seen)
    cluster.close()
    assert time.monotonic() - start < 10  # it is nothing that a close waits for
    assert len(seen) <= told + 2 and seen[-1].startswith("Dask cluster, closed")


def test_joins_follow_the_graph():
    v = tfnb.Variable(torch.ones(2), name="v")
    with tfnb.record("ways") as g:
        x = tfnb.placeholder(torch.ones(4, 2), name="x")
        fetches = [x * 2, x.mean(), (x > 0).sum(), (x > 0).all(), v.read() * 2]
        fetches += [x.amax(), x.long().min(), x.max(0).values, x.max(0).indices, x.long().median(), x.mean(0).max()]
        fetches += [(x > 0).any(), x.mean() > 0, torch.full((), x.shape[0])]
    step = step_graph(g, [f.value for f in fetches], [x.value])
    assert [how.way for how in joins(WeighedStep(step))] == [
        0, "mean", "sum", "min", "first", "max", "min", "max", "none", "none", "mean", "max", "first", "sum",
    ]  # fmt: skip
    assert join(Join("max"), [[one] for one in (torch.tensor(2), torch.tensor(3))], 0, [1, 1]).item() == 3
    assert join(Join("min"), [[one] for one in (torch.tensor(2.0), torch.tensor(3.0))], 0, [1, 1]).item() == 2
    assert join(Join("none"), [[one] for one in (torch.tensor(2), torch.tensor(3))], 0, [1, 1]).isnan()
    assert join(Join("sum"), [[one] for one in (torch.tensor(2), torch.tensor(3))], 0, [1, 1]).item() == 5
    assert join(Join(0), [[one] for one in (torch.ones(2, 1), torch.zeros(1, 1))], 0, [2, 1]).shape == (3, 1)


SPARSE = {
    "sgd": lambda: tfnb.train.SGD(0.5),
    "lazy adam": lambda: tfnb.train.LazyAdam(1e-2),
    "adagrad": lambda: tfnb.train.Adagrad(0.1),
    "exact adam": lambda: tfnb.train.Adam(1e-2),
}


@pytest.mark.parametrize("name", SPARSE)
def test_rows_of_a_table_go_to_its_server_and_equal_the_local_run(connect, name):
    def trained(tasks, clip):
        torch.manual_seed(0)
        table, head = nn.Embedding(50, 4, dtype=torch.float64), nn.Linear(4, 3, dtype=torch.float64)
        words = torch.randint(0, 9, (24, 2))
        with tfnb.record() as graph:
            i, y = tfnb.placeholder(words[:6]), tfnb.placeholder(words[:6, 0] % 3)
            loss = F.cross_entropy(head(table(i).mean(1)), y)
            optimizer = SPARSE[name]()
            pairs = optimizer.compute_gradients(loss)
            if clip:
                grads, _ = tfnb.clip_by_global_norm([g for g, _ in pairs], 0.1)
                pairs = list(zip(grads, (v for _, v in pairs), strict=True))
            step = optimizer.apply_gradients(pairs)
        if tasks:
            cluster = connect(tasks)
            placed = cluster._steps.place(lower(graph, [step.value], [i.value, y.value]), parallel=True)
            assert placed.divides
            assert any("rows" in plan.meta["kinds"] for plan in placed.servers.values())
        tfnb.fit(step, {i: words, y: words[:, 0] % 3}, epochs=2, batch_size=7, shuffle=False)
        if tasks:
            cluster.close()
        return [p.detach().clone() for p in (table.weight, *head.parameters())]

    for clip in (False, True):
        assert close_to(trained(2, clip), trained(0, clip))


def test_a_recorded_torch_optimizer_trains_there_with_the_rate_of_now(connect):
    models = [nn.Linear(4, 2).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizer, eager = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in models)
    rows = torch.randn(32, 4, dtype=torch.float64)
    with tfnb.record():
        x = tfnb.placeholder(rows[:8])
        optimizer.zero_grad()
        models[0](x).square().mean().backward()
        step = optimizer.step()
    connect(2)
    for rate in (0.1, 0.01):
        optimizer.param_groups[0]["lr"] = eager.param_groups[0]["lr"] = rate
        tfnb.fit(step, {x: rows}, batch_size=16, shuffle=False)
        for part in rows.split(16):
            eager.zero_grad()
            models[1](part).square().mean().backward()
            eager.step()
        assert close_to(models[0].parameters(), models[1].parameters())
    assert close_to(
        [s["momentum_buffer"] for s in optimizer.state.values()], [s["momentum_buffer"] for s in eager.state.values()]
    )


@pytest.mark.parametrize(("kind", "settings", "changed"), [
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}, {"momentum": 0.3, "weight_decay": 0.5}),
    (torch.optim.AdamW, {}, {"betas": (0.5, 0.9), "eps": 0.1, "weight_decay": 1.0}),
    (torch.optim.NAdam, {}, {"betas": (0.5, 0.9)}),
    (torch.optim.RMSprop, {}, {"alpha": 0.5, "eps": 0.1}),
], ids=str)  # fmt: skip
def test_numbers_of_groups_that_change_reach_the_servers(connect, kind, settings, changed):
    models = [nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizer, eager = (
        kind([{"params": m[0].parameters(), "lr": 0.05}, {"params": m[1].parameters()}], lr=0.01, **settings)
        for m in models
    )
    rows = torch.randn(32, 4, dtype=torch.float64)
    with tfnb.record():
        x = tfnb.placeholder(rows[:8])
        optimizer.zero_grad()
        models[0](x).square().mean().backward()
        step = optimizer.step()
    cluster = connect(2)
    data = {x: rows}

    def both(train, parts):
        train()
        for part in parts:
            eager.zero_grad()
            models[1](part).square().mean().backward()
            eager.step()
        cluster.pull()
        assert close_to(models[0].parameters(), models[1].parameters())

    both(lambda: tfnb.fit(step, data, batch_size=16, shuffle=False), rows.split(16))
    for one in (optimizer, eager):
        one.param_groups[1].update(changed)
    both(lambda: tfnb.fit(step, data, batch_size=16, shuffle=False), rows.split(16))
    for one in (optimizer, eager):
        one.param_groups[0].update(changed)
    both(lambda: tfnb.run(step, {x: rows[:8]}), [rows[:8]])
    optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(FailedPrecondition, match=r"maximize was False, and is True now \(group 0\)"):
        tfnb.fit(step, data, batch_size=16, shuffle=False)
    with pytest.raises(FailedPrecondition, match="maximize"):
        tfnb.run(step, {x: rows[:8]})


def test_a_graph_with_loops_and_branches_trains_there_as_it_does_here(connect):
    def trained(tasks):
        torch.manual_seed(0)
        cell, head = nn.GRUCell(2, 5).double(), nn.Linear(5, 3).double()
        rows, labels = torch.randn(24, 4, 2, dtype=torch.float64), torch.randint(0, 3, (24,))
        with tfnb.record():
            x = tfnb.placeholder(rows[:6], shape=("B", "T", 2))
            y = tfnb.placeholder(labels[:6], shape=("B",))

            def iteration(t, h, states):
                h = cell(x[:, t], h)
                h = tfnb.cond(t % 2 == 0, lambda: h.sin(), lambda: h * 2)
                return t + 1, h, states.write(t, h)

            init = (0, torch.zeros(x.shape[0], 5, dtype=torch.float64), tfnb.TensorArray(4))
            _, h, states = tfnb.while_loop(lambda t, *_: t < x.shape[1], iteration, init)
            loss = F.cross_entropy(head(h + states.stack().mean(0)), y)
            step = tfnb.train.Adam(1e-2).minimize(loss)
        cluster = connect(tasks) if tasks else None
        result = tfnb.fit(step, {x: rows, y: labels}, epochs=2, batch_size=7, shuffle=False, watch=[loss])
        if cluster:
            cluster.close()
        return result, [p.detach().clone() for p in (*cell.parameters(), *head.parameters())]

    (here, expected), (there, found) = trained(0), trained(2)
    assert there.steps == here.steps == 8
    assert close_to(found, expected)
    for mine, theirs in zip(there.history, here.history, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6)


def test_the_bytes_that_tasks_post_to_each_other_are_counted_for_each_pair(connect):
    cluster = connect(2)
    with tfnb.record("pair"):
        with tfnb.device("task:0"):
            x = tfnb.placeholder(torch.ones(8, 16), name="x")
            h = x.exp()
        with tfnb.device("task:1"):
            y = h.sum()
    for _ in range(5):
        tfnb.run(y, {x: torch.zeros(8, 16)})
    until(lambda: "task:1" in {name for name, _, _ in cluster.status().rows[0].links})  # rates need two looks
    assert cluster._overview._exchanges()["task:0", "task:1"] == 5 * 8 * 16 * 4
    assert "task:0 and task:1: " in cluster._repr_html_()
