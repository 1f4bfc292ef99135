"""What a signal handler raises reaches the user as it is, from recordings and runs; what an op raises has its line."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch

import tfnb
from tfnb.errors import InvalidArgument, TfnbError
from tfnb.interrupts import from_signal_handler

X = torch.arange(6.0).reshape(2, 3)
OUT_OF_TIME = "^out of time"
pending: list[float] = []  # seconds of the alarm that `endless` sets when it begins


@torch.library.custom_op("signal_tests::endless", mutates_args=())
def endless(x: torch.Tensor, seconds: float) -> torch.Tensor:
    """A Python op that takes so long; with less than none it raises an error of its own."""
    if seconds < 0:
        raise TimeoutError("of the op")
    while pending:
        signal.setitimer(signal.ITIMER_REAL, pending.pop())
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(100))
    return x.clone()


@endless.register_fake
def _(x: torch.Tensor, seconds: float) -> torch.Tensor:
    return torch.empty_like(x)


class Late(Exception):
    """What a handler raises."""


def _raise(number: int, frame: FrameType | None) -> None:
    raise Late("out of time")


class _Handlers:
    """Handlers of other kinds."""

    def method(self, number: int, frame: FrameType | None) -> None:
        self._further()

    def _further(self) -> None:
        raise RuntimeError("out of time")

    def __call__(self, *args: Any) -> None:
        raise ValueError("out of time")


def _with_more(more: str, number: int, frame: FrameType | None) -> None:
    raise InvalidArgument(more)


HANDLERS: list[Callable[..., None]] = [_raise, _Handlers().method, _Handlers(), partial(_with_more, "out of time")]


@pytest.fixture
def alarm(request: pytest.FixtureRequest) -> Iterator[Callable[[float], None]]:
    """Sets a timer, so many seconds after `endless` has begun; its handler raises. Elsewhere, as in a ``__del__``,
    Python drops such an error."""
    before = signal.signal(signal.SIGALRM, getattr(request, "param", _raise))
    yield pending.append
    pending.clear()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def recorded(seconds: float) -> tuple[tfnb.Tensor, tfnb.Tensor]:
    with tfnb.record(lazy=True):
        x = tfnb.placeholder(X, name="x")
        y = endless(x, seconds) * 2
    return x, y


def assert_is_the_handlers(error: BaseException) -> None:
    assert str(error) == "out of time" and from_signal_handler(error)
    assert not getattr(error, "node", None) and not isinstance(error.__cause__, TfnbError)


def in_parts(x: tfnb.Tensor, y: tfnb.Tensor) -> None:
    with tfnb.Session(y.graph).step([y], [x]) as step:
        step.fetch(y, {x: X})


RUNS: dict[str, Callable[[Any, Any], object]] = {
    "run": lambda x, y: tfnb.run(y, {x: X}),
    "callable": lambda x, y: tfnb.Session(y.graph).make_callable(y, [x])(X),
    "step": lambda x, y: in_parts(x, y),
    "compiled": lambda x, y: tfnb.Session(y.graph, compile="now").run(y, {x: X}),
    "traced": lambda x, y: tfnb.run(y, {x: X}, trace=True),
    "fit": lambda x, y: tfnb.fit(y, [{x: X}]),
}


@pytest.mark.parametrize("way", RUNS)
def test_a_run(alarm: Callable[[float], None], way: str) -> None:
    x, y = recorded(20.0)
    alarm(0.2)
    with pytest.raises(Exception, match=OUT_OF_TIME) as caught:
        RUNS[way](x, y)
    assert_is_the_handlers(caught.value)
    x, y = recorded(0.0)
    assert torch.equal(tfnb.run(y, {x: X}), 2 * X)


@pytest.mark.parametrize("alarm", HANDLERS, indirect=True, ids=["function", "method", "callable", "partial"])
def test_a_recording(alarm: Callable[[float], None]) -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(X)
    before = graph.text()
    alarm(0.2)
    with pytest.raises(Exception, match=OUT_OF_TIME) as caught, tfnb.record(graph):
        endless(x, 1.0)
    assert_is_the_handlers(caught.value)
    assert graph.text() == before


@tfnb.autograph
def branch(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        x = endless(x, 1.0)
    return x


@tfnb.autograph
def loop(x: torch.Tensor) -> torch.Tensor:
    while x.sum() < 1000:
        x = endless(x, 1.0)
    return x


@pytest.mark.parametrize("function", [branch, loop])
def test_a_staged_branch_or_loop(function: Callable[..., Any], alarm: Callable[[float], None]) -> None:
    with pytest.raises(Exception, match=OUT_OF_TIME) as caught, tfnb.record():
        x = tfnb.placeholder(X)
        alarm(0.2)
        function(x)
    assert_is_the_handlers(caught.value)


def test_any_instant_of_a_recording() -> None:
    raised = []

    def late(number: int, frame: FrameType | None) -> None:
        raised.append(number)
        raise Late("out of time")

    before = signal.signal(signal.SIGALRM, late)
    try:
        for trial in range(40):
            with pytest.raises(Late, match=OUT_OF_TIME), tfnb.record():
                z = tfnb.placeholder(X)
                signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.0013 * trial)
                for _ in itertools.repeat(None, 10**6):
                    z = (z + 1).sin()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(raised) == 40


def test_an_error_of_an_op_has_its_line() -> None:
    x, y = recorded(-1.0)
    with pytest.raises(InvalidArgument, match=r"endless.* failed: of the op\n  node ") as caught:
        tfnb.run(y, {x: X})
    assert caught.value.node is not None and not from_signal_handler(caught.value)
    with pytest.raises(tfnb.errors.ShapeError, match=r"endless failed: of the op\n") as failed, tfnb.record():
        endless(tfnb.placeholder(X), -1.0)
    assert failed.value.op is not None and "test_signal_handlers" in str(failed.value)


def test_a_handler_that_raises_nothing_is_called_and_the_recording_goes_on() -> None:
    seen = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: seen.append(frame))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        with tfnb.record():
            x = tfnb.placeholder(X)
            z = x
            for _ in range(200):
                z = z + 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen and torch.equal(tfnb.run(z, {x: X}), X + 200)
