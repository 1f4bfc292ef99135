"""Steps that are captured and launched whole: the same values, from memory that stays, whatever happens in between.

The device here is the CPU: capturing keeps a call and the tensors it gave, launching runs it into those again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tfnb
from tfnb.execution import lower
from tfnb.execution.tiers import captured_steps as captured
from tfnb.execution.tiers import tiered as tiers
from tfnb.execution.tiers.captured_steps import MOST, TRIES, WARM
from tfnb.session.structures import value_of


class Kept:
    """Launches by running what was captured once more, into the memory of its results."""

    made: list[Kept] = []

    def __init__(self, device: torch.device) -> None:
        self.captures = self.launches = self.turns = 0
        self.fails: type[BaseException] | None = None
        self.differs = False
        Kept.made.append(self)

    def generator(self) -> torch.Generator:
        return torch.Generator()

    def warm(self, call: Callable[[], Any]) -> Any:
        return call()

    def capture(self, call: Callable[[], Any], generators: Sequence[torch.Generator]) -> tuple[Any, Callable[[], None]]:
        if self.fails is not None:
            raise self.fails("operation not permitted when stream is capturing")
        self.captures += 1
        outs = call()

        def launch() -> None:
            self.launches += 1
            for out, new in zip(outs, call(), strict=True):
                if isinstance(out, torch.Tensor) and out is not new:
                    out.copy_(new if not self.differs else new + 1)

        return outs, launch

    def after(self) -> None:
        self.turns += 1


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(captured.DEVICES, "cpu", Kept)
    monkeypatch.setattr(captured, "FEWEST", 1)
    Kept.made = []
    yield
    Kept.made = []


def device() -> Kept:
    (found,) = Kept.made
    return found


def classifier(drop: float = 0.0) -> tuple[Any, list[Any], list[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(drop), nn.Linear(5, 3))
    with tfnb.record() as g:
        x, y = tfnb.placeholder(torch.randn(4, 6), name="x"), tfnb.placeholder(torch.tensor([0, 1, 2, 0]), name="y")
        loss = F.cross_entropy(model(x), y)
        train = tfnb.train.Adam(0.1).minimize(loss)
    return g, [train, loss], [x, y]


def batch(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=made), torch.randint(3, (rows,), generator=made)


def losses(mode: str, rows: Sequence[int], drop: float = 0.0) -> tuple[list[float], tfnb.Session]:
    g, fetches, keys = classifier(drop)
    session = tfnb.Session(g, compile=mode)
    feeds = [dict(zip(keys, batch(n, place), strict=True)) for place, n in enumerate(rows)]
    return [float(session.run(fetches, feed)[1]) for feed in feeds], session


@pytest.fixture
def auto(monkeypatch: pytest.MonkeyPatch) -> str:
    """The mode that captures, without compiling."""
    monkeypatch.setenv("TFNB_COMPILE", "auto")
    monkeypatch.setattr(tiers, "WORTH_COMPILING", float("inf"))
    return "auto"


def test_captured_steps_train_as_others_do(auto: str) -> None:
    rows = [4] * (WARM + 5)
    got, session = losses(auto, rows)
    assert got == losses("off", rows)[0]
    assert device().captures == 1 and device().launches == 5
    assert session.status() == ["x [4, 6], y [4]: generated code, launched whole"]


def test_random_draws_are_those_of_the_code(auto: str) -> None:
    rows = [8] * (WARM + 4)
    got, session = losses(auto, rows, drop=0.5)
    assert got == losses("off", rows, drop=0.5)[0]
    assert len(set(got)) == len(got) and "launched whole" in session.status()[0]


def test_other_sizes_are_captured_for_themselves(auto: str) -> None:
    rows = [4, 7] * (WARM + 3)
    got, session = losses(auto, rows)
    assert got == losses("off", rows)[0]
    assert device().captures == 2
    assert [status.rpartition(", ")[2] for status in session.status()] == ["launched whole"] * 2


def test_results_stay_what_they_were_after_the_next_launch(auto: str) -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.zeros(3), name="x")
        y, z = x.exp(), x.view(-1, 1)
    session = tfnb.Session(g, compile=auto)
    kept = [session.run([y, z], {x: torch.full((3,), float(i))}) for i in range(WARM + 4)]
    assert device().launches == 4
    for i, (made, view) in enumerate(kept):
        assert torch.equal(made, torch.full((3,), float(i)).exp()) and torch.equal(view, torch.full((3, 1), float(i)))


def test_a_feed_may_change_after_the_run(auto: str) -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.zeros(3), name="x")
        y = x + 1
    session, given = tfnb.Session(g, compile=auto), torch.zeros(3)
    for i in range(WARM + 3):
        assert torch.equal(session.run(y, {x: given.fill_(i)}), torch.full((3,), i + 1.0))
    assert device().launches == 3


def linear() -> tuple[nn.Linear, tfnb.Graph, Any, Any]:
    model = nn.Linear(6, 3)
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 6), name="x")
        y = model(x).exp()
    return model, g, x, y


def test_a_parameter_that_lies_elsewhere_is_captured_again(auto: str) -> None:
    model, g, x, y = linear()
    session, data = tfnb.Session(g, compile=auto), torch.randn(4, 6)
    for _ in range(WARM + 2):
        session.run(y, {x: data})
    model.weight.data = torch.randn(3, 6)
    for _ in range(2):
        torch.testing.assert_close(session.run(y, {x: data}), model(data).exp().detach(), rtol=0, atol=0)
    assert device().captures == 2


def test_memory_that_moved_behind_the_same_tensor_is_noticed(auto: str) -> None:
    v = tfnb.Variable(torch.ones(3), name="v")
    with tfnb.record() as g:
        y = v.read() * 2
    session = tfnb.Session(g, compile=auto)
    for _ in range(WARM + 2):
        session.run(y)
    v.storage.set_(torch.full((3,), 5.0))
    assert torch.equal(session.run(y), torch.full((3,), 10.0)) and device().captures == 2


def test_what_is_read_from_another_place_each_time_is_copied_like_a_feed(auto: str) -> None:
    _, g, x, y = linear()
    session, data = tfnb.Session(g, compile=auto), torch.randn(4, 6)
    wanted = tfnb.Session(g, compile="off").run(y, {x: data})
    for _ in range(WARM + 8):
        assert torch.equal(session.run(y, {x: data}, isolation="snapshot"), wanted)
    assert device().captures == TRIES - 1 and "launched whole" in session.status()[0]


def test_at_most_so_many_captures_are_kept_and_the_oldest_goes(auto: str) -> None:
    _, g, x, y = linear()
    session = tfnb.Session(g, compile=auto)
    for rows in range(2, MOST + 4):
        for _ in range(WARM + 1):
            session.run(y, {x: torch.randn(rows, 6)})
    kept = ["launched whole" in status for status in session.status()]
    assert kept == [False] * 2 + [True] * MOST
    for _ in range(WARM + 1):
        session.run(y, {x: torch.randn(2, 6)})
    assert ["launched whole" in status for status in session.status()][:4] == [True, False, False, True]


def test_a_capture_that_fails_is_not_tried_again_and_changes_nothing(auto: str) -> None:
    g, fetches, keys = classifier()
    session, feed = tfnb.Session(g, compile=auto), dict(zip(keys, batch(4), strict=True))
    session.run(fetches, feed)
    device().fails = RuntimeError
    got = [float(session.run(fetches, feed)[1]) for _ in range(WARM + 3)]
    device().fails = None
    got.append(float(session.run(fetches, feed)[1]))
    other, fetches, keys = classifier()
    plain, feed = tfnb.Session(other, compile="off"), dict(zip(keys, batch(4), strict=True))
    assert got == [float(plain.run(fetches, feed)[1]) for _ in range(WARM + 5)][1:]
    assert device().captures == 0
    assert "not captured: RuntimeError: operation not permitted" in session.status()[0]


def test_an_interrupt_while_capturing_writes_nothing_and_the_next_step_captures(auto: str) -> None:
    g, fetches, keys = classifier()
    session, feed = tfnb.Session(g, compile=auto), dict(zip(keys, batch(4), strict=True))
    for _ in range(WARM):
        session.run(fetches, feed)
    before = {variable: variable.value() for variable in g.variables}
    device().fails = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        session.run(fetches, feed)
    assert all(torch.equal(variable.value(), value) for variable, value in before.items())
    device().fails = None
    for _ in range(WARM + 1):
        session.run(fetches, feed)
    assert device().captures == 1


def test_a_launch_that_gives_something_else_than_the_code_is_dropped(auto: str) -> None:
    _, g, x, y = linear()
    session, data = tfnb.Session(g, compile=auto), torch.randn(4, 6)
    wanted = session.run(y, {x: data})
    device().differs = True
    for _ in range(WARM + 2):
        assert torch.equal(session.run(y, {x: data}), wanted)
    assert "not captured: RuntimeError: a launch gives another value" in session.status()[0]


def test_steps_of_other_threads_do_not_launch(auto: str) -> None:
    _, g, x, y = linear()
    session, data = tfnb.Session(g, compile=auto), torch.randn(4, 6)
    for _ in range(WARM + 1):
        wanted = session.run(y, {x: data})
    got: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: got.extend(session.run(y, {x: data}) for _ in range(3)))
    thread.start()
    thread.join()
    assert device().launches == 1 and all(torch.equal(one, wanted) for one in got) and len(got) == 3


def test_every_launch_comes_after_the_one_before(auto: str) -> None:
    losses(auto, [4] * (WARM + 5))
    assert device().turns == device().launches == 5


def branch(x: Any) -> Any:
    return tfnb.cond(x.sum() > 0, lambda: x + 1, lambda: x - 1)


def loop(x: Any) -> Any:
    return tfnb.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h * 2), (torch.tensor(0), x))[1]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (branch, "decides what runs next"),
        (loop, "decides what runs next"),
        (lambda x: x[x > 0].sum(), "data decide the sizes"),
        (lambda x: torch.linalg.cholesky(x.outer(x) + torch.eye(4)), "reads on the host"),
        (lambda x: x.index_put((x > 0,), torch.tensor(3.0)), "reads on the host"),
    ],
)
def test_what_waits_for_the_host_is_not_captured_and_says_why(make: Callable[[Any], Any], why: str, auto: str) -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(4), shape=[4], name="x")
        y = make(x * 2)
    session = tfnb.Session(g, compile=auto)
    for _ in range(WARM + 2):
        session.run(y, {x: torch.ones(4)})
    assert device().captures == 0
    (status,) = session.status()
    assert "not captured: " in status and why in status


def test_few_calls_are_not_worth_it(auto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "FEWEST", 100)
    _, session = losses(auto, [4] * (WARM + 2))
    assert device().captures == 0 and "not captured: it is " in session.status()[0]


def test_nothing_is_captured_with_compile_off() -> None:
    losses("off", [4] * (WARM + 3))
    assert not Kept.made


def test_a_program_on_two_devices_is_not_captured() -> None:
    with tfnb.record(lazy=True) as g:  # shapes need no device
        a = tfnb.placeholder(shape=(None, 3), device="cuda:1", name="a")
        b = tfnb.placeholder(shape=(None, 3), name="b")
        both = [a.exp(), b.sin()]
    program = lower(g, [value_of(g, one) for one in both], [value_of(g, one) for one in (a, b)])
    found = captured.device_of(program)
    assert found == torch.device("cuda:1")
    assert captured.obstacle(program, found) == "sin runs on cpu"
