"""How long calls take, by kind of device: the host's clock, or events that the device itself notes.

A call on an accelerator returns before its kernels have run, so the host's clock would tell the time to start them.
Events are read when they have come, so that nobody waits for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

T = TypeVar("T")


class Counter(Protocol):
    """Seconds of calls: in all, and of the last one that is known."""

    total: float
    last: float

    def of(self, call: Callable[..., T], *args: object) -> T:
        """``call(*args)``, counted."""


class HostTimer:
    """By the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.total = self.last = 0.0

    def of(self, call: Callable[..., T], *args: object) -> T:
        """``call(*args)``, counted."""
        start = time.perf_counter()
        found = call(*args)
        self.last = time.perf_counter() - start
        self.total += self.last
        return found


class DeviceTimer:
    """Time by events of the device; late calls' events may still be pending."""

    def __init__(self, device: torch.device) -> None:
        self.total = self.last = 0.0
        self._device = device
        self._pairs: deque[tuple[Any, Any]] = deque()

    def of(self, call: Callable[..., T], *args: object) -> T:
        """``call(*args)``, counted."""
        start = moment(self._device)
        found = call(*args)
        self._pairs.append((start, moment(self._device)))
        while self._pairs and self._pairs[0][1].query():
            start, end = self._pairs.popleft()
            self.last = 1e-3 * start.elapsed_time(end)
            self.total += self.last
        return found


def moment(device: torch.device) -> Any:
    """An event of an accelerator, noted where its current stream is; ``a.elapsed_time(b)`` in milliseconds."""
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


class Clock:
    """Seconds since its creation, minus intervals set back."""

    def __init__(self, *, true: bool = False) -> None:
        self._true, self._zero = true, time.perf_counter_ns()

    def now(self) -> float:
        """Seconds since the start."""
        return (time.perf_counter_ns() - self._zero) * 1e-9

    def back(self, to: float) -> float:
        """Set the clock back to ``to``, unless it is ``true``, that is, compared with other clocks; returns
        the time.
        """
        if self._true:
            return self.now()
        self._zero = time.perf_counter_ns() - round(to * 1e9)
        return to


_COUNTERS: dict[str, Callable[[torch.device], Counter]] = {"cpu": HostTimer, "meta": HostTimer}


def counter(device: torch.device) -> Counter:
    """The counter of seconds for calls on this device."""
    return _COUNTERS.get(device.type, DeviceTimer)(device)


def begun(device: torch.device) -> Callable[[], float]:
    """Start a timer; the returned function stops it, waits for the device, and returns the seconds."""
    if device.type in _COUNTERS:
        start = time.perf_counter()
        return lambda: time.perf_counter() - start
    first = moment(device)

    def seconds() -> float:
        last = moment(device)
        last.synchronize()
        return 1e-3 * float(first.elapsed_time(last))

    return seconds
