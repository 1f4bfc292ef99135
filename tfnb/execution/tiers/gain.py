"""The gain and the cost of compiling a step on the CPU, predicted before anything is compiled. Pure.

A generated step is a list of calls with measured seconds. Compiled code makes the same calls of libraries (products,
convolutions, attention), which take as long as before. Element-wise calls and reductions become fused kernels: what
one of them hands to another never goes through memory. Views and the Python between calls cost nothing any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["library", "fused", "loop", "view"]
Decision = Literal["now", "later", "never"]

LEAST_GAIN = 0.1  # of a step: less is lost in what measurements of whole steps vary by
QUIET = 60.0  # seconds within which compiling has to pay where a machine is to be left alone

# Constants of compiled code, fitted to the steps of `tests/benchmarks/results/compile-choice.json`: one thread of a
# Xeon with AVX-512, torch 2.13, seconds of a processor, generated and compiled steps in turns.
RATE = 13e9  # bytes a second that fused kernels read and write
WRITE_RATE = 8e9  # bytes a second of Variables, which are larger than caches
DISPATCH = 2e-6  # seconds of a call of a library from Python, beyond the same call from compiled code
KERNEL = 2e-7  # seconds to enter a fused loop
LOOP_GAIN = 0.5  # of loops and branches, of which only the whole is measured
BASE, EACH_LIBRARY, EACH = 4.5, 0.25, 0.01  # seconds to compile: any step, each call of a library, each other call
REPEATS = 20  # times that a step's work is done while it is compiled: kernels are tried, and the step is compared
BASE_LOOP = 2.5  # seconds to compile what is loops only
SLOW: Mapping[str, float] = {
    "_log_softmax": 1.0e-9, "_softmax": 1.0e-9, "div": 2e-10, "erf": 1.6e-9, "exp": 1.0e-9, "gelu": 1.6e-9,
    "gelu_backward": 2.6e-9, "log": 1.7e-9, "sigmoid": 1.3e-9, "silu": 1.3e-9, "silu_backward": 1.3e-9, "tanh": 4.0e-9,
}  # fmt: skip
"""Seconds that compiled code takes for an element of these ops beyond its memory, for which eager kernels are quicker.
Measured of chains of one op; gelu, silu and softmax take what the erf, sigmoid and exp in them do."""


class CallCost(NamedTuple):
    """One call of a generated step.

    seconds: of a processor, measured. bytes, elements: of its result. sources: places of the calls whose results it
    takes; operands that come from outside have none, their bytes are ``given``. taken: whether the step returns its
    result. slow: seconds that one element of the result takes in compiled code beyond its memory.
    """

    kind: Kind
    seconds: float
    bytes: int = 0
    sources: tuple[int, ...] = ()
    given: int = 0
    taken: bool = False
    slow: float = 0.0
    elements: int = 0


@dataclass(frozen=True)
class Gain:
    """The prediction: seconds of a step as generated code, and as compiled code.

    library: seconds of its ``calls`` calls of libraries, which stay.
    """

    seconds: float
    compiled: float
    library: float = 0.0
    calls: int = 0

    @property
    def saved(self) -> float:
        """Seconds saved by each step; none where compiled code is predicted to be slower."""
        return max(0.0, self.seconds - self.compiled)

    @property
    def share(self) -> float:
        """The saved part of a step, from 0 to 1."""
        return self.saved / self.seconds if self.seconds > 0 else 0.0


@dataclass
class ExpectedSteps:
    """The further steps of a program: what a caller ``announced``, else as many as were taken.

    taken: steps with feeds of all sizes about which it was not yet decided.

    >>> ExpectedSteps(taken=400).after(300), ExpectedSteps(lambda: 1000, taken=400).after(300)
    (300, 750.0)
    """

    announced: Callable[[], int] | None = None
    taken: int = 0

    def after(self, taken: int) -> float:
        """The further steps with feeds of one size, with which so many were taken: their share of all."""
        return taken if self.announced is None else self.announced() * taken / max(1, self.taken)


def predicted(calls: Sequence[CallCost], commit: float = 0.0, written: int | None = None) -> Gain:
    """The gain of a step of these calls, which then writes Variables for ``commit`` seconds.

    written: the bytes of these, where compiled code writes them itself.

    >>> round(predicted([CallCost("library", 8e-3), CallCost("view", 2e-3)]).share, 3)
    0.2
    """
    library = [call.seconds for call in calls if call.kind == "library"]
    loops = sum(call.seconds for call in calls if call.kind == "loop")
    kept = sum(max(0.0, seconds - DISPATCH) for seconds in library)
    writes = commit if written is None else min(commit, 2 * written / WRITE_RATE)  # read and written
    compiled = kept + (1 - LOOP_GAIN) * loops + fused_seconds(calls) + writes
    return Gain(sum(call.seconds for call in calls) + commit, compiled, sum(library), len(library))


def fused_seconds(calls: Sequence[CallCost]) -> float:
    """Seconds of the fused kernels: for the memory that goes into and out of them, and for slow elements."""
    fused = {place for place, call in enumerate(calls) if call.kind == "fused"}
    makers = _makers(calls)
    read, left = set[int](), {place for place in fused if calls[place].taken}
    for place, call in enumerate(calls):
        sources = {makers[source] for source in call.sources}
        if place in fused:
            read |= sources - fused
        elif call.kind != "view" or call.taken:
            left |= sources & fused
    moved = sum(calls[place].bytes for place in read | left) + sum(calls[place].given for place in fused)
    slow = sum(calls[place].slow * calls[place].elements for place in fused)
    return moved / RATE + slow + KERNEL * len(left)


def _makers(calls: Sequence[CallCost]) -> list[int]:
    """For each call the place of the call that made its memory: of a view that of its first source."""
    found: list[int] = []
    for place, call in enumerate(calls):
        found.append(found[call.sources[0]] if call.kind == "view" and call.sources else place)
    return found


def compile_seconds(calls: Sequence[CallCost]) -> float:
    """Seconds of a processor to compile a step: of loops only by `tfnb.execution.tiers.compiled_loops`, which is
    quicker.

    >>> compile_seconds([CallCost("library", 1e-3)] * 8), compile_seconds([CallCost("loop", 1e-3)])
    (6.66, 2.5)
    """
    if all(call.kind in ("loop", "view") for call in calls):
        return BASE_LOOP
    libraries = sum(call.kind == "library" for call in calls)
    again = REPEATS * sum(call.seconds for call in calls)
    return BASE + EACH_LIBRARY * libraries + EACH * (len(calls) - libraries) + again


def worth(gain: Gain, cost: float, steps: float, *, within: float = math.inf) -> Decision:
    """Whether to compile for so many further steps, or to ask again after more. within: seconds in which it has to pay.

    >>> [worth(Gain(1e-3, 4e-4), 12.0, steps) for steps in (1000, 100_000)], worth(Gain(1e-3, 0.95e-3), 12.0, 1e9)
    (['later', 'now'], 'never')
    """
    if gain.share < LEAST_GAIN or gain.share * within < cost:
        return "never"
    return "now" if gain.saved * steps >= cost else "later"


def reason(gain: Gain, cost: float, decision: Decision, *, within: float = math.inf) -> str:
    """Why a step is not compiled, as a clause for messages, without a full stop.

    >>> reason(Gain(12.1e-3, 11.6e-3, 11.4e-3, 14), 30.0, "never")
    'compiling would save about 4 % of a step (12.1 ms, of which 11.4 ms are in 14 library calls), and cost about 30 s'
    """
    libraries = f", of which {_time(gain.library)} are in {gain.calls} library call{'s' * (gain.calls != 1)}"
    said = f"compiling would save about {100 * gain.share:.0f} % of a step ({_time(gain.seconds)}"
    said += f"{libraries if gain.calls else ''}), and cost about {cost:.0f} s"
    if decision == "later":
        return f"{said}: not yet, it pays after {cost / gain.saved:,.0f} steps"
    if gain.share >= LEAST_GAIN:
        return f"{said}: more than it saves within {within:.0f} s (quiet, or on battery)"
    return said


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
