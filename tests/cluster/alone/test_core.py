"""The parameter-server core: exactly once, all or nothing, never a live reference. No cluster, no thread."""

from __future__ import annotations

import ast
import mmap
import random
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import tfnb.cluster.server.core as core_module
from tfnb.cluster.server.core import Core
from tfnb.cluster.server.core_events import RequestArrival
from tfnb.cluster.server.ledger import WINDOW, Ledger
from tfnb.cluster.wire import sparse_values
from tfnb.cluster.wire.messages import Failure, Ok, OpId, Refusal, Request
from tfnb.graph import lazy_memory
from tfnb.passes.flow.merges import ROWS, mean
from tfnb.state.store import Store


class Add:
    """A server program: w += grad; writes in place like a fused kernel."""

    kinds = ("grad",)
    weights = (ROWS,)
    nbytes = None
    reads = writes = ("w",)

    def __init__(self, fail: str = "") -> None:
        self.fail = fail

    def fitting(self, feeds):
        return tuple(feeds)

    def compute(self, feeds, storages, run_index):
        if self.fail == "compute":
            raise ValueError("kernel")
        return storages[0], feeds[0]

    def commit(self, pending):
        if self.fail == "commit":
            raise RuntimeError("half")
        pending[0].add_(pending[1])


class Server:
    """A core with one variable w and the plan "add", called like a client would."""

    def __init__(self, fail="", budget=None, size=3):
        self.core = Core(Store(budget=budget), lambda meta, tensors: Add(fail), epoch=1, incarnation=7)
        self.seq = 0
        self("create", [torch.zeros(size)], keys=["w"])
        self("register_shard", plan="add")

    def __call__(self, method, tensors=(), *, op=None, epoch=1, incarnation=7, **meta):
        self.seq += 1
        op = op or OpId("client", self.seq)
        (reply,) = self.core.on(
            RequestArrival(self.seq, Request(method, op, epoch, incarnation, meta, list(tensors))), 0.0
        )
        assert reply.ticket == self.seq
        return reply.answer

    def push(self, value, **kwargs):
        return self("push", [torch.full((3,), float(value))], plan="add", **kwargs)

    def stage(self, number, worker, value, rows=1):
        return self("stage", [torch.full((3,), float(value))], plan="add", round=number, worker=worker, rows=rows)

    def commit(self, number, workers, **kwargs):
        return self("commit", round=number, workers=list(workers), **kwargs)

    @property
    def w(self):
        return self("pull", keys=["w"]).tensors[0]


SERVER = ("core", "core_events", "courses", "ledger", "lines", "objects", "parts", "staged_rounds", "trainings")


def test_c17_core_imports_neither_dask_nor_asyncio():
    allowed = {
        "__future__",
        "bisect",
        "collections",
        "contextlib",
        "dataclasses",
        "functools",
        "itertools",
        "math",
        "statistics",
        "typing",
        "torch",
        "tfnb",
    }
    room = Path(core_module.__file__).parents[1]
    pure = [room / "wire/messages.py", *(room / f"server/{name}.py" for name in SERVER)]
    for file in (*pure, *room.glob("modes/*.py")):
        tree = ast.parse(file.read_text())
        names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert {name.split(".")[0] for name in names} <= allowed, file


def test_push_applies_at_once():
    server = Server()
    assert server.push(2).meta["version"] == 2
    assert server.w.tolist() == [2, 2, 2]


def test_c19_a_push_sent_k_times_is_applied_once_and_all_answers_agree():
    server = Server()
    answers = [server.push(1, op=OpId("a", 3)) for _ in range(5)]
    assert server.w.tolist() == [1, 1, 1]
    assert {a.meta["version"] for a in answers} == {2}
    assert [a.dup for a in answers] == [False, True, True, True, True]


def test_c20_a_sequence_number_below_the_window_is_refused():
    server = Server()
    server.push(1, op=OpId("a", WINDOW + 10))
    assert server.push(1, op=OpId("a", 10)).reason == "too-old"
    assert isinstance(server.push(1, op=OpId("a", 11)), Ok)
    assert server.w.tolist() == [2, 2, 2]


def test_c23_stale_epoch_or_wrong_incarnation_never_changes_state():
    server = Server()
    for wrong in ({"epoch": 0}, {"epoch": 2}, {"incarnation": 8}):
        assert server.push(1, **wrong).reason == "fenced"
    assert server.w.tolist() == [0, 0, 0]


def test_c21_a_pulled_value_never_changes():
    server = Server()
    seen = [server.w for _ in range(2)]
    for _ in range(3):
        server.push(1)
        seen.append(server.w)
    assert [s[0].item() for s in seen] == [0, 0, 1, 2, 3]
    assert seen[0].data_ptr() == seen[1].data_ptr(), "readers of one version share one generation"


def test_c21_what_is_prepared_is_not_seen_and_a_write_in_between_is_kept():
    server = Server()
    server.stage(5, 0, 10)
    seen = server.w
    server("prepare", round=5, workers=[0])
    assert server.w.tolist() == [0, 0, 0]
    server.push(1)
    assert server.w.tolist() == [1, 1, 1]
    server.commit(5, [0])
    assert server.w.tolist() == [11, 11, 11] and seen.tolist() == [0, 0, 0]


def test_rounds_prepared_one_after_the_other_both_count():
    server = Server()
    server("create", [torch.zeros(3)], keys=["v"])
    held = [server.w, server("pull", keys=["v"]).tensors[0]]
    server.stage(1, 0, 1)
    server("stage", [torch.full((3,), 5.0)], keys=["v"], round=2, worker=0)
    for number in (1, 2):
        server("prepare", round=number, workers=[0])
    for number in (1, 2):
        assert isinstance(server.commit(number, [0]), Ok)
    assert server.w.tolist() == [1, 1, 1] and server("pull", keys=["v"]).tensors[0].tolist() == [5, 5, 5]
    assert [h.tolist() for h in held] == [[0, 0, 0]] * 2


def test_pull_since_a_version_sends_what_changed():
    server = Server()
    server("create", [torch.ones(1)], keys=["frozen"])
    first = server("pull", keys=["frozen", "w"])
    server.push(1)
    second = server("pull", keys=["frozen", "w"], since=first.meta["versions"])
    assert len(first.tensors) == 2
    assert [t.tolist() for t in second.tensors] == [[1, 1, 1]]


def test_commit_averages_exactly_the_named_workers_by_rows():
    server = Server()
    for worker, value, rows in ((0, 1, 2), (1, 4, 1), (2, 100, 1)):
        assert isinstance(server.stage(1, worker, value, rows), Ok)
    assert server.w.tolist() == [0, 0, 0], "staging writes nothing"
    assert server.commit(1, [0, 1]).meta["step"] == 1
    assert server.w.tolist() == [2, 2, 2]
    assert server.stage(1, 2, 5).reason == "stale"
    assert server.core.rounds.staged == {}


@pytest.mark.parametrize("when", ["staged", "prepared"])
def test_values_that_replace_a_version_leave_alone_what_was_written_since(when):
    server = Server()
    server("create", [torch.zeros(3)], keys=["v"])
    values = [torch.full((3,), 5.0), torch.full((3,), 6.0)]
    since = [server.core.versions[key] for key in ("w", "v")]
    server("stage", values, plan=None, keys=["w", "v"], since=since, round=1, worker=0)
    if when == "prepared":
        server("prepare", round=1, workers=[0])
    server("assign", [torch.full((3,), 9.0)], keys=["w"])
    server("prepare", round=1, workers=[0])
    assert isinstance(server.commit(1, [0]), Ok)
    assert [float(server.core.store.get(key)[0]) for key in ("w", "v")] == [9.0, 6.0]


def test_commit_is_idempotent_by_operation_and_by_round():
    server = Server()
    server.stage(1, 0, 1)
    first = server.commit(1, [0], op=OpId("m", 1))
    again = server.commit(1, [0], op=OpId("m", 1))
    assert (first.meta, again.dup) == (again.meta, True)
    assert server.commit(1, [0]).reason == "stale"
    assert server.w.tolist() == [1, 1, 1]


def test_prepare_writes_nothing_and_a_late_part_is_seen():
    server = Server()
    server.stage(1, 0, 1)
    assert isinstance(server("prepare", round=1, workers=[0]), Ok)
    server.stage(1, 0, 3)
    assert server.w.tolist() == [0, 0, 0]
    server.commit(1, [0])
    assert server.w.tolist() == [3, 3, 3]


def test_abort_drops_what_was_staged_and_late_messages():
    server = Server()
    server.stage(2, 0, 1)
    server("abort", round=2)
    assert server.stage(2, 1, 1).reason == "stale"
    assert server.commit(2, [0]).reason == "stale"
    assert server.w.tolist() == [0, 0, 0] and server("stat").meta["staged"] == 0


def test_commit_of_a_worker_that_staged_nothing_names_the_gap():
    server = Server()
    server.stage(1, 0, 1)
    answer = server.commit(1, [0, 2])
    assert answer.tag == "StepAborted" and "[2]" in answer.message


def test_c22_an_error_before_the_write_leaves_the_state_and_one_inside_poisons():
    server = Server(fail="compute")
    assert isinstance(server.push(1), Failure)
    assert server.w.tolist() == [0, 0, 0]
    server = Server(fail="commit")
    assert isinstance(server.push(1), Failure)
    assert server("stat").reason == "poisoned"


def test_a_failed_push_may_be_sent_again():
    server = Server()
    bad = server("push", [torch.zeros(3), torch.zeros(3)], plan="add", op=OpId("a", 1))
    assert bad.tag == "InvalidArgument"
    assert isinstance(server.push(1, op=OpId("a", 1)), Ok)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_gradient_is_rejected(value):
    server = Server()
    assert server.push(value).tag == "NonFiniteGradient"
    assert server.stage(1, 0, value).tag == "NonFiniteGradient"
    assert server.push(value, finite=False).tag == "NonFiniteGradient"
    assert server.w.tolist() == [0, 0, 0]
    assert isinstance(server.push(value, finite=True), Ok), "a task that says so has looked at it: nobody does twice"


def test_what_is_brought_changes_nothing_before_it_is_decided_and_then_all_of_it():
    server = Server(budget=60)  # 12 bytes of w
    server("bring", [torch.ones(3)], id="a", keys=["w"])
    assert server("bring", [torch.ones(12)], id="a", keys=["v"]).tag == "ResourceExhausted"
    server("thaw", id="a")
    server("bring", [torch.ones(9)], id="b", keys=["w"])  # there is room for it again
    assert server("freeze", id="f", keys=[], brought="b").tag == "ShapeError"
    assert server.w.tolist() == [0, 0, 0]
    server("thaw", id="b")
    server("bring", [torch.ones(3)], id="c", keys=["w"])
    server("freeze", id="g", keys=[], brought="c")
    server("thaw", id="g")  # as after a while
    for _ in range(2):  # the answer was lost
        assert server("refill", id="g", brought="c", void=[]).meta == {"void": []}
    assert server.w.tolist() == [1, 1, 1] and server.core.objects.nbytes == 0


def far_apart(step=64):
    """A table of 64 MB, of which every so many rows are not zero: with 64 one in each page. 0: none."""
    table = lazy_memory.zeros((1 << 20, 16), torch.float32)
    if step:
        table[::step] = 1.0
    return sparse_values.written({"t": table})


def test_c24_a_table_whose_rows_lie_apart_counts_their_pages_before_it_is_made():
    facts, tensors = far_apart()
    server = Server(budget=32 << 20)
    refused = server("create", tensors, **facts)
    assert refused.tag == "ResourceExhausted" and f"asked {64 << 20}" in refused.message
    assert server.w.tolist() == [0, 0, 0] and server("stat").meta["bytes"] == 12
    roomy = Server(budget=80 << 20)
    assert isinstance(roomy("create", tensors, **facts), Ok)
    assert roomy("stat").meta["bytes"] == 12 + (64 << 20)


def test_c24_rows_of_a_table_beside_each_other_count_the_pages_that_they_share():
    table = lazy_memory.zeros((1 << 20, 16), torch.float32)
    table[: 1 << 15] = 1.0  # 2 MB
    facts, tensors = sparse_values.written({"t": table})
    server = Server(budget=6 << 20)
    assert isinstance(server("create", tensors, **facts), Ok)
    assert server("stat").meta["bytes"] == 12 + (4 << 20)


class AddToTable(Add):
    reads = writes = ("t",)


def with_table(budget):
    server = Server(budget=budget)
    server.core.compile = lambda meta, tensors: AddToTable()
    facts, tensors = far_apart(0)
    assert isinstance(server("create", tensors, **facts), Ok)
    server("register_shard", plan="table")
    assert server("stat").meta["bytes"] == 12
    return server


def test_c24_a_table_that_is_written_densely_counts_as_a_whole_value():
    ones = torch.ones(1 << 20, 16)
    small, roomy = with_table(8 << 20), with_table(80 << 20)
    assert small("assign", [ones], keys=["t"]).tag == "ResourceExhausted"
    assert small("push", [torch.ones(1, 16)], plan="table").tag == "ResourceExhausted"
    assert small.w.tolist() == [0, 0, 0] and small("stat").meta["bytes"] == 12
    assert isinstance(roomy("assign", [ones], keys=["t"]), Ok)
    assert roomy("stat").meta["bytes"] == 12 + (64 << 20)
    roomy.core.store.release()
    assert roomy("stat").meta["bytes"] == 12 + (64 << 20)
    (seen,) = roomy("pull", keys=["t"], tables=True).tensors
    del ones
    assert isinstance(roomy("push", [torch.ones(1, 16)], plan="table"), Ok)
    assert seen.unique().tolist() == [1] and roomy("pull", keys=["t"]).tensors[0].unique().tolist() == [2]


def test_c24_values_of_a_table_that_are_given_up_or_sparse_count_what_they_take():
    table = lazy_memory.zeros((1 << 20, 16), torch.float32)
    table[5] = 1.0
    facts, tensors = sparse_values.written({"t": table})
    server = with_table(8 << 20)
    for _ in range(3):
        assert isinstance(server("assign", tensors, **facts), Ok)
    assert server("stat").meta["bytes"] <= 12 + 2 * 3 * mmap.PAGESIZE
    server.core.store.open(["t"])
    assert server("stat").meta["bytes"] > 8 << 20
    assert isinstance(server("assign", tensors, **facts), Ok)
    assert server("stat").meta["bytes"] <= 12 + 2 * 4 * mmap.PAGESIZE
    assert server.core.store.is_table("t")


class AddRows(AddToTable):
    kinds = ("rows",)
    weights = (ROWS,)

    def commit(self, pending):
        pending[0][: len(pending[1])] += pending[1]


def with_rows(budget):
    server = with_table(budget)
    server.core.compile = lambda meta, tensors: AddRows()
    server("register_shard", plan="rows")
    return server


def test_a_push_that_was_applied_is_acknowledged_with_its_values_where_memory_is_short(monkeypatch):
    server = with_rows(80 << 20)
    monkeypatch.setattr(lazy_memory, "free", lambda: 0)
    op = OpId("other", 1)
    for _ in range(2):
        answer = server("push", [torch.ones(3, 16)], plan="rows", reads=["t"], op=op)
        assert isinstance(answer, Ok) and answer.tensors[0].sum() == 48


def test_c21_a_pulled_table_never_changes_whatever_is_known_of_its_memory(monkeypatch):
    server = with_rows(200 << 20)
    server("push", [torch.ones((1 << 19) + 99, 16)], plan="rows")  # more than half of it
    assert server.core.store.is_table("t"), "rows never make it an ordinary value"
    monkeypatch.setattr(lazy_memory, "_made", {})
    seen = server("pull", keys=["t"], tables=True).tensors[-1]
    server("push", [torch.ones(3, 16)], plan="rows")
    assert seen.unique().tolist() in ([1], [0, 1])


def test_what_a_table_takes_is_looked_at_once_for_what_was_written(monkeypatch):
    looks, look = [], lazy_memory.taken
    monkeypatch.setattr(lazy_memory, "taken", lambda table: looks.append(1) or look(table))
    server = with_rows(1 << 20)
    server("push", [torch.ones(64, 16)], plan="rows")
    looks.clear()
    for _ in range(5):
        assert server("push", [torch.ones(1 << 18, 16)], plan="rows").tag == "ResourceExhausted"
    assert len(looks) == 1
    for _ in range(20):  # the same page again and again: room that was counted too high is had again
        assert isinstance(server("push", [torch.ones(32, 16)], plan="rows"), Ok)
    assert 1 < len(looks) < 20


def test_c24_what_is_written_counts_though_others_looked_for_room_before_it_was():
    server = with_rows(80 << 20)
    assert isinstance(server("stage", [torch.ones(640, 16)], plan="rows", round=1, worker=0), Ok)
    assert isinstance(server("prepare", round=1, workers=[0]), Ok)
    server.core.store.release()
    assert isinstance(server.commit(1, [0]), Ok)
    assert server("stat").meta["bytes"] >= 12 + 2 * 640 * 64


def test_c24_over_budget_is_refused_and_the_core_lives():
    server = Server(budget=30)
    assert server("create", [torch.zeros(100)], keys=["big"]).tag == "ResourceExhausted"
    assert isinstance(server.stage(1, 0, 1), Ok)
    assert server.stage(1, 1, 1).tag == "ResourceExhausted"
    assert isinstance(server.stage(1, 0, 2), Ok), "staging again replaces, it does not add"
    assert isinstance(server.commit(1, [0]), Ok)
    assert server.w.tolist() == [2, 2, 2]


def test_generations_that_are_read_never_take_the_room_of_values():
    server = Server(budget=100)
    first = server.w
    server.push(1)
    assert server("stat").meta["spare"] == 64
    assert server("create", [torch.zeros(7)], keys=["v"]).tag == "ResourceExhausted", "12 + 64 held, 28 more asked"
    assert first.tolist() == [0, 0, 0]
    del first
    assert isinstance(server("create", [torch.zeros(7)], keys=["v"]), Ok), "nobody reads the other generation now"
    assert server("stat").meta["spare"] == 0
    assert server.w.tolist() == [1, 1, 1]


@pytest.mark.parametrize("method", ["push", "assign"])
def test_generations_that_are_made_for_readers_count(method):
    server, held = Server(budget=200), []
    for value in range(4):
        held.append(server.w)
        server.push(value) if method == "push" else server("assign", [torch.full((3,), float(value))], keys=["w"])
        assert server("stat").meta["spare"] > 0 and server.core.used + server.core.room._left <= 200


def test_bad_requests_are_typed_errors():
    server = Server()
    assert server("create", [torch.zeros(1)], keys=["w"]).tag == "AlreadyExists"
    assert server("assign", [torch.zeros(4)], keys=["w"]).tag == "ShapeError"
    assert server("assign", [torch.zeros(3).double()], keys=["w"]).tag == "ShapeError"
    assert server("assign", [torch.zeros(3)] * 2, keys=["w", "w"]).tag == "InvalidArgument"
    assert server("pull", keys=["x"]).tag == "NotFound"
    assert server("push", [torch.zeros(3)], plan="other").reason == "unknown-plan"
    assert server("stage", [torch.zeros(3)], plan="other", round=1, worker=0).reason == "unknown-plan"


def test_whole_values_are_staged_and_committed():
    server = Server()
    server("create", [torch.zeros(1)], keys=["v"])
    server("stage", [torch.ones(3), torch.ones(1)], keys=["w", "v"], round=1, worker=0)
    server.commit(1, [0])
    assert server("pull", keys=["w", "v"]).tensors[1].tolist() == [1] and server.w.tolist() == [1, 1, 1]
    server("drop", keys=["v", "never"])
    assert server("pull", keys=["v"]).tag == "NotFound"


def test_c27_weighted_mean_equals_a_float64_reference():
    torch.manual_seed(0)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-15), (torch.bfloat16, 1e-2)):
        values = [torch.randn(100, dtype=dtype) for _ in range(5)]
        rows = [3, 3, 3, 2, 1]
        expected = sum(v.double() * r for v, r in zip(values, rows, strict=True)) / 12
        torch.testing.assert_close(mean(values, ROWS.shares(rows)).double(), expected, rtol=tolerance, atol=tolerance)


def test_a_number_far_ahead_takes_no_memory():
    ledger = Ledger()
    ledger.record(OpId("a", 1), Ok({"version": 1}))
    ledger.record(OpId("a", 1 << 62), Ok())  # a bit for each number between would be more memory than there is
    assert ledger.has(OpId("a", 1 << 62)) and ledger.is_too_old(OpId("a", 1))
    assert len(ledger.clients["a"].acks) == 1 and ledger.clients["a"].seen == 1


def test_ledger_survives_any_order_within_the_window():
    source = random.Random(0)
    ledger, sent = Ledger(), list(range(900)) * 2
    source.shuffle(sent)
    applied = 0
    for seq in sent:
        op = OpId("a", seq)
        assert not ledger.is_too_old(op)
        if ledger.ack(op) is None:
            ledger.record(op, Ok())
            applied += 1
    assert (applied, ledger.dups) == (900, 900)
    for seq in range(900, 5000):
        ledger.record(OpId("a", seq), Ok())
    assert len(ledger.clients["a"].acks) <= WINDOW + 1


class Shard(RuleBasedStateMachine):
    """Pushes, duplicates, reorderings, rounds, aborts, fences: the value is the replay of what was acked."""

    def __init__(self):
        super().__init__()
        self.server = Server()
        self.expected = 0.0
        self.sent: list[tuple[OpId, int]] = []
        self.acked: dict[OpId, object] = {}
        self.round = 1
        self.parts: dict[int, tuple[int, int]] = {}
        self.version = self.server.core.version
        self.held: list[tuple[torch.Tensor, list[float]]] = []

    @rule(keep=st.booleans())
    def read(self, keep):
        seen = self.server.w
        self.held = [*self.held, (seen, seen.tolist())] if keep else []

    @rule(client=st.sampled_from("abc"), seq=st.integers(0, 3000), value=st.integers(1, 9))
    def push(self, client, seq, value):
        op = OpId(client, seq)
        if any(op == other for other, _ in self.sent):
            return
        self.sent.append((op, value))
        self._deliver(op, value)

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 1000))
    def push_again(self, which):
        self._deliver(*self.sent[which % len(self.sent)])

    def _deliver(self, op, value):
        answer = self.server.push(value, op=op)
        if isinstance(answer, Refusal):
            assert answer.reason == "too-old"
        elif op in self.acked:
            assert answer.dup and answer.meta == self.acked[op]
        else:
            assert not answer.dup
            self.acked[op] = answer.meta
            self.expected += value

    @rule(worker=st.integers(0, 3), value=st.integers(1, 9), rows=st.sampled_from([1, 2, 4]))
    def stage(self, worker, value, rows):
        assert isinstance(self.server.stage(self.round, worker, value, rows), Ok)
        self.parts[worker] = (value, rows)

    @rule(worker=st.integers(0, 3), back=st.integers(1, 3))
    def stage_late(self, worker, back):
        assert self.server.stage(self.round - back, worker, 99).reason == "stale"

    @precondition(lambda self: self.parts)
    @rule(twice=st.booleans(), prepare=st.booleans())
    def commit(self, twice, prepare):
        workers = sorted(self.parts)
        if prepare:
            self.server("prepare", round=self.round, workers=workers)
        op = OpId("master", self.round)
        for _ in range(1 + twice):
            assert isinstance(self.server.commit(self.round, workers, op=op), Ok)
        rows = sum(r for _, r in self.parts.values())
        self.expected += sum(v * r / rows for v, r in self.parts.values())
        self._next()

    @rule()
    def abort(self):
        self.server("abort", round=self.round)
        self._next()

    def _next(self):
        self.parts = {}
        self.round += 1

    @rule(epoch=st.sampled_from([0, 2]))
    def fenced(self, epoch):
        assert self.server.push(1, epoch=epoch).reason == "fenced"

    @invariant()
    def value_is_the_replay_and_version_never_falls(self):
        assert self.server.w[0].item() == pytest.approx(self.expected, rel=1e-4)
        assert self.server.core.version >= self.version
        self.version = self.server.core.version
        assert all(tensor.tolist() == values for tensor, values in self.held)


TestShard = Shard.TestCase
TestShard.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_what_is_sent_for_a_training_that_is_over_changes_nothing():
    server = Server()
    server("open_training", training="t")
    assert isinstance(server.push(1, op=OpId("t-1", 0), training="t"), Ok)
    server("end_training", training="t", clients=["t-1"])
    assert server.push(1, op=OpId("t-1", 0), training="t").reason == "stale"
    about = {"training": "t", "round": 1, "worker": 0, "shards": [0], "reads": ["w"]}
    about |= {"place": 0, "places": 1, "parts": 1}
    assert server("contribute", [torch.ones(3)], plan="add", **about).reason == "stale"
    assert server.w.tolist() == [1, 1, 1] and not server.core.ledger.clients.get("t-1")


def test_nothing_is_taken_of_a_loop_that_was_given_up():
    server = Server()
    server("open_training", training="t")
    for loop in ("a", "b"):
        assert isinstance(server.push(1, op=OpId(loop, 0), training="t", loop=loop), Ok), "it need not enter"
    server("depart", training="t", loop="a", gone=True)
    assert server.push(1, op=OpId("a", 1), training="t", loop="a").reason == "given-up"
    assert isinstance(server.push(1, op=OpId("a", 1), training="t", loop="b"), Ok), "another loop completes the step"
    assert server.w.tolist() == [3, 3, 3]


def test_a_push_answers_with_the_values_after_it_also_when_repeated():
    server = Server()
    first = server.push(1, op=OpId("a", 1), reads=["w"], since=[-1])
    assert first.tensors[0].tolist() == [1, 1, 1] and first.meta["versions"] == [2]
    server.push(2)
    again = server.push(1, op=OpId("a", 1), reads=["w"], since=first.meta["versions"])
    assert again.dup and again.tensors[0].tolist() == [3, 3, 3]
    assert not server.push(0, op=OpId("a", 2), reads=["w"], since=[4]).tensors[1:]
    assert all(not ack.tensors for ack in server.core.ledger.clients["a"].acks.values()), "no values in the ledger"


def test_a_restore_has_its_memory_before_it_is_decided(monkeypatch):
    server = Server()
    (seen,) = server("pull", keys=["w"]).tensors  # while it is held, a write needs another generation
    server("bring", [torch.full((3,), 5.0)], id="x", keys=["w"])

    def none_left(nbytes):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("tfnb.state.store.memory", none_left)
        assert isinstance(server("freeze", id="y", keys=[], brought="x"), Failure)
        assert server.core.poisoned is None
    assert isinstance(server("freeze", id="z", keys=[], brought="x"), Ok)
    monkeypatch.setattr("tfnb.state.store.memory", none_left)
    assert isinstance(server("refill", id="z", brought="x", void=[]), Ok)
    monkeypatch.undo()
    assert server.w.tolist() == [5.0] * 3 and seen.tolist() == [0.0] * 3


def test_a_pin_holds_the_values_of_one_instant_while_writes_go_on() -> None:
    server = Server()
    server("pin", pinned=7, keys=["w"])
    server("assign", [torch.full((3,), 5.0)], keys=["w"])
    server("assign", [torch.full((3,), 6.0)], keys=["w"])
    before = server("pull", pinned=7).tensors[0]
    assert before.tolist() != [6, 6, 6] and before.tolist() == server("pull", pinned=7).tensors[0].tolist()
    assert server.w.tolist() == [6, 6, 6]
    for number in range(20, 30):
        server("pin", pinned=number, keys=["w"])
    assert len(server.core.pins) == 4, "who forgets to let go keeps no generations"
    assert "given up for later pins" in server("pull", pinned=7).message
    server("unpin", pinned=29)
    assert [number for _, number in server.core.pins] == [26, 27, 28]
    server("gone", client="client")
    assert not server.core.pins
