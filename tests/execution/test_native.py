"""Compiled loops give what plain Python gives, to the last bit where they count, and stop when they are told to."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import tfnb
from tests.compiling import compile_soon
from tests.control_flow.random_numbers import program, start
from tests.control_flow.random_programs import program as vector_program
from tests.control_flow.random_programs import python_branch, python_loop
from tfnb.errors import BranchChanged, Cancelled, DeadlineExceeded, InvalidArgument
from tfnb.execution.lowering.lower import lower
from tfnb.execution.tiers import compiled_loops
from tfnb.execution.tiers.compiled_loops import Permit, native

GRAPHS = int(os.environ.get("TFNB_GRAPHS", "0"))  # more random loops than the quick tests compile
pytestmark = [
    pytest.mark.skipif(compiled_loops.obstacle() is not None, reason="there is no C++ compiler"),
    pytest.mark.filterwarnings("ignore"),  # inductor's own
]


def compiled(fetches: Any, feeds: Sequence[Any]) -> tuple[Callable[..., list[torch.Tensor]], Permit]:
    """The fetches as a function of the feeds, with loops that compile when they are first called."""
    permit = Permit()
    graph = feeds[0].graph
    wanted = list(fetches) if isinstance(fetches, (list, tuple)) else [fetches]
    made = native(lower(graph, [y.value for y in wanted], [x.value for x in feeds]).undonated(), permit)
    assert not made.variables

    def call(*fed: torch.Tensor) -> list[torch.Tensor]:
        return list(made.forward(*fed, 0)[: len(wanted)])

    return call, permit


def check_random_numbers(seed: int) -> None:
    block = program(seed)
    with tfnb.record():
        n = tfnb.placeholder(torch.tensor(2))
        xs = [tfnb.placeholder(x) for x in start(seed)]
        outs = block(n, list(xs), tfnb.while_loop, tfnb.cond)
    call, permit = compiled(outs, [n, *xs])
    for iterations in (0, 1, 4, 9, 30):
        fed = start(seed + iterations)
        want = block(torch.tensor(iterations), list(fed), python_loop, python_branch)
        got = call(torch.tensor(iterations), *fed)
        torch.testing.assert_close(
            got, want, rtol=1e-6, atol=1e-6, equal_nan=True, msg=f"seed {seed}, {iterations} iterations"
        )
        exact = [(a, b) for a, b in zip(got, want, strict=True) if not a.is_floating_point()]
        assert all(torch.equal(a, b) for a, b in exact), f"seed {seed}, {iterations} iterations"
    assert permit.compiled == 1, permit.refused


def check_random_vectors(seed: int) -> int:
    block, draw = vector_program(seed), torch.Generator().manual_seed(seed)
    with tfnb.record():
        xs = [tfnb.placeholder(torch.rand(2, dtype=torch.float64) - 0.5, shape=(2,)) for _ in range(3)]
        outs = block(list(xs), tfnb.while_loop, tfnb.cond)
    call, permit = compiled(outs, xs)
    fed = [torch.rand(2, dtype=torch.float64, generator=draw) * 4 - 2 for _ in xs]
    want = block(list(fed), python_loop, python_branch)
    torch.testing.assert_close(call(*fed), want, rtol=1e-6, atol=1e-9, msg=f"seed {seed}")
    assert not permit.refused
    return permit.compiled


@pytest.mark.slow
def test_a_random_loop_over_numbers_is_that_of_python() -> None:
    check_random_numbers(0)


@pytest.mark.slow
def test_a_random_loop_over_vectors_is_that_of_python() -> None:
    assert check_random_vectors(1) == 1


@pytest.mark.slow
def test_many_random_loops_are_those_of_python() -> None:
    for seed in range(1, max(6, GRAPHS)):
        check_random_numbers(seed)
        check_random_vectors(seed)


OPS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: (x > 0).sum(), lambda x: (x > 1).any(), lambda x: x.mean(), lambda x: x.prod(), lambda x: x.amax(),
    lambda x: x.norm(), lambda x: x.softmax(0), lambda x: x.logsumexp(0), lambda x: x.flip(0), lambda x: x.roll(1),
    lambda x: x[:, None] * x, lambda x: (x[:, None] * x).sum(1), lambda x: x @ x, lambda x: x.view(5, 1),
    lambda x: x[1:4] * 2, lambda x: x[::2], lambda x: x[2], lambda x: x.double() * 0.1,
    lambda x: (x * 9).to(torch.int8), lambda x: (x.abs() * 9).to(torch.uint8) + 200,
    lambda x: (x / 0).isnan(), lambda x: (x[:, None] * x).tril(),
    lambda x: x.masked_fill(x > 0, 3.0), lambda x: torch.addcmul(x, x, x, value=0.5), lambda x: x.expand(3, 5),
    lambda x: x.unbind(0)[1], lambda x: x.split(2)[1], lambda x: torch.diag(x), lambda x: x // 0.3,
    lambda x: 1 / (x * -0.0), lambda x: F.mse_loss(x, x * 2),
    lambda x: F.gelu(x), lambda x: (x.abs() + 1).digamma(), lambda x: x.nan_to_num(),
)  # fmt: skip


@pytest.mark.slow
def test_ops_of_vectors_are_those_of_torch() -> None:
    with tfnb.record():
        xs = tfnb.placeholder(torch.rand(4, 5))
        _, rows = tfnb.scan(lambda c, x: (c + 1, tuple(op(x) for op in OPS)), torch.tensor(0), xs)
    call, permit = compiled(rows, [xs])
    fed = torch.randn(6, 5)
    for place, (op, got) in enumerate(zip(OPS, call(fed), strict=True)):
        want = torch.stack([op(row) for row in fed])
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, equal_nan=True, msg=f"op number {place}")
    assert permit.compiled == 1


def counting() -> tuple[tfnb.Session, Any, Any]:
    """Counts to n in steps of k."""
    with tfnb.record() as g:
        n, k = tfnb.placeholder(torch.tensor(3), name="n"), tfnb.placeholder(torch.tensor(1), name="k")
        (i,) = tfnb.while_loop(lambda i: i < n, lambda i: (i + k,), (0,))
    return tfnb.Session(g, compile="now"), i, (n, k)


@pytest.mark.slow
def test_a_loop_that_does_not_end_is_stopped_and_the_next_run_is_right() -> None:
    session, i, (n, k) = counting()
    assert session.run(i, {n: 10, k: 3}) == 12 and "compiled" in session.status()[0]
    begun = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        session.run(i, {n: 1, k: 0}, timeout=0.3)
    assert time.monotonic() - begun < 100  # it would never end
    timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        session.run(i, {n: 1, k: 0})
    timer.join()
    assert session.run(i, {n: 100_000_000, k: 1}) == 100_000_000  # minutes, if it were not compiled
    seen: list[BaseException] = []

    def endless() -> None:
        try:
            session.run(i, {n: 1, k: 0})
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=endless)
    thread.start()
    while not session._steps.running:
        time.sleep(0.01)
    session.close()
    thread.join(60)
    assert [type(error) for error in seen] == [Cancelled]


def test_other_threads_run_while_a_loop_does() -> None:
    session, i, (n, k) = counting()
    session.run(i, {n: 3, k: 1})
    thread = threading.Thread(target=session.run, args=(i, {n: 300_000_000, k: 1}))
    thread.start()
    iterations = 0
    while thread.is_alive():
        time.sleep(0.001)
        iterations += 1
    assert iterations > 20


@pytest.mark.slow
def test_what_generated_code_has_to_say_is_said() -> None:
    with tfnb.record() as g:
        table = tfnb.placeholder(torch.arange(1, 6), shape=(5,), name="table")
        n = tfnb.placeholder(torch.tensor(3), name="n")
        kept = n + 1 if n > 0 else n

        def body(i: Any, y: Any) -> Any:
            return i + 1, y + 60 // table[i]

        i, y = tfnb.while_loop(lambda i, y: i < kept, body, (0, 0))
    session = tfnb.Session(g, compile="now")
    fed = torch.tensor([1, 2, 3, 4, 5])
    assert session.run([i, y], {n: 3, table: fed}) == [4, 60 + 30 + 20 + 15]
    assert "compiled" in session.status()[0]
    with pytest.raises(InvalidArgument, match="index") as raised:
        session.run(y, {n: 7, table: fed})
    assert raised.value.line is not None
    with pytest.raises(InvalidArgument, match="ZeroDivisionError"):
        session.run(y, {n: 3, table: torch.tensor([1, 2, 0, 4, 5])})
    with pytest.raises(BranchChanged):
        session.run(y, {n: 0, table: fed})
    assert session.run(y, {n: 3, table: fed}) == 125


@pytest.mark.slow
def test_rows_and_gradients_are_those_of_generated_code() -> None:
    with tfnb.record() as g:
        xs = tfnb.placeholder(torch.rand(4, 3, dtype=torch.float64), name="xs")
        most = tfnb.placeholder(torch.tensor(9.0, dtype=torch.float64), name="most")
        start = torch.zeros(3, dtype=torch.float64)
        back, rows = tfnb.scan(lambda c, x: (c.sin() + x, (c * x).sum()), start, xs, reverse=True)
        _, z = tfnb.while_loop(lambda i, z: z.sum() < most, lambda i, z: (i + 1, z * 1.01 + 0.001 * i), (0, back))
        outs = [back, rows, z, *tfnb.gradients((rows * rows).sum() + z.sum(), [xs])]
    generated, made = tfnb.Session(g, compile="off"), tfnb.Session(g, compile="now")
    for length, limit in ((6, 1e6), (6, -100.0), (6, 9.0)):  # thousands of iterations, none, a few
        fed = {xs: torch.rand(length, 3, dtype=torch.float64), most: torch.tensor(limit, dtype=torch.float64)}
        torch.testing.assert_close(made.run(outs, fed), generated.run(outs, fed), rtol=1e-6, atol=1e-12)
    assert ": compiled; " in made.status()[0]


@pytest.mark.slow
def test_loops_that_do_not_fit_run_as_they_did_and_those_inside_may_fit() -> None:
    with tfnb.record() as g:
        a = tfnb.placeholder(torch.rand(3, 3), shape=(3, 3), name="a")

        def body(i: Any, x: Any) -> Any:
            j, _ = tfnb.while_loop(lambda j, s: s > 1e-3, lambda j, s: (j + 1, s * 0.5), (0, torch.ones(())))
            return i + j, a @ x

        _, x = tfnb.while_loop(lambda i, x: i < 50, body, (0, torch.eye(3)))
        _, drawn = tfnb.while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, x + torch.rand(())), (0, 0.0))
    call, permit = compiled([x], [a])
    torch.testing.assert_close(call(torch.eye(3) * 2)[0], torch.eye(3) * 2**5)
    assert permit.compiled == 1 and any("mm" in why for why in permit.refused)
    session = tfnb.Session(g, compile="now")
    torch.manual_seed(0)
    assert 0 < session.run(drawn) < 5
    assert "a loop has" in session.status()[0]


@pytest.mark.slow
def test_shapes_that_were_not_compiled_run_as_generated_code() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.rand(3), shape=(None,))
        _, y = tfnb.while_loop(lambda i, y: i < 5, lambda i, y: (i + 1, y * 2 - x), (0, x))
    call, permit = compiled(y, [x])
    for size in (4, 7, 0, 1):
        fed = torch.rand(size)
        torch.testing.assert_close(call(fed), [fed])
        permit.open = False
    strided = torch.rand(8)[::2]
    torch.testing.assert_close(call(strided), [strided])
    assert permit.compiled == 1


@pytest.mark.slow
def test_a_loop_is_compiled_behind_the_steps_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFNB_COMPILE", "auto")
    compile_soon(monkeypatch, 1e-3)
    with tfnb.record() as g:
        n = tfnb.placeholder(torch.tensor(3), name="n")
        _, x = tfnb.while_loop(lambda i, x: i < n, lambda i, x: (i + 1, x * 0.5 + 1), (0, 0.0))
    session = tfnb.Session(g, compile="auto")
    deadline = time.monotonic() + 200
    while "us" not in "".join(session.status()) and time.monotonic() < deadline:
        assert session.run(x, {n: 1000}) == 2
    assert "compiled:" in session.status()[0], session.status()
    assert session.run(x, {n: 50_000_000}) == 2  # minutes, if anything but compiled code ran once more
