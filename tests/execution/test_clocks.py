"""Seconds by kind of device: the host's clock, or events of the device, of which nobody waits for late ones."""

from __future__ import annotations

import time

import pytest
import torch

from tfnb.execution.tracing import clocks


class Noted:
    """An event of a device that is some steps behind; it says so."""

    now, done = 0.0, 0.0  # milliseconds: what was started by then, and what the device has come to

    def __init__(self, device: torch.device) -> None:
        self.at = Noted.now

    def query(self) -> bool:
        return self.at <= Noted.done

    def elapsed_time(self, other: Noted) -> float:
        return other.at - self.at

    def synchronize(self) -> None:
        Noted.done = max(Noted.done, self.at)


def work(milliseconds: float) -> None:
    Noted.now += milliseconds


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(clocks, "moment", Noted)
    Noted.now = Noted.done = 0.0
    return torch.device("cuda", 1)


def test_the_host_counts_what_a_call_takes() -> None:
    clock = clocks.counter(torch.device("cpu"))
    assert clock.of(lambda seconds: time.sleep(seconds) or 3, 0.01) == 3
    assert clock.total == clock.last >= 0.01


def test_a_device_counts_what_it_has_come_to_and_waits_for_nothing(late: torch.device) -> None:
    clock = clocks.counter(late)
    clock.of(work, 5.0)
    assert (clock.total, clock.last) == (0.0, 0.0)  # started, not done
    Noted.done = 5.0
    clock.of(work, 2.0)
    assert (clock.total, clock.last) == pytest.approx((0.005, 0.005))
    Noted.done = 7.0
    clock.of(work, 1.0)
    assert (clock.total, clock.last) == pytest.approx((0.007, 0.002))


def test_a_span_ends_when_the_device_is_done(late: torch.device) -> None:
    seconds = clocks.begun(late)
    work(4.0)
    assert seconds() == pytest.approx(0.004) and Noted.done == 4.0
