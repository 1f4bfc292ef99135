"""The rates of a machine that runs a step: bytes of its link, bytes and arithmetic of its kernels. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MachineRates:
    """A device and its host, by published or measured constants.

    link: bytes a second that go one way between the device and the host, while as many may come the other way. memory:
    bytes a second that kernels move. flops: floating-point operations a second. start: seconds that a kernel takes to
    start.
    """

    name: str
    link: float
    memory: float
    flops: float
    start: float


CPU = MachineRates("CPU", link=0.5, memory=1.0, flops=8.0, start=32 << 10)
"""A core and a file in the system's cache, in units of the time in which kernels move one byte; see `prices`."""
