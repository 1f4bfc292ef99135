"""The chooser of tiers: generated torch.fx code runs at once, compiled code where that turns out faster.

The calls of a choice of feed sizes that has used two seconds of computing are timed in a few steps. Where these predict
that compiled code saves a tenth of a step, and over the steps to come more than compiling costs
(`tfnb.execution.tiers.gain`), it is compiled in the background, and compared with generated code. It is swapped in
between steps: both take turns until it is clear which one is faster. A package that an earlier process compiled and
found faster runs from the first step. Code that fails has written nothing; it is dropped and the step computed again.
On CUDA nothing is predicted, and either code is captured and launched whole (`tfnb.execution.tiers.captured_steps`).
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import queue
import statistics
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from tfnb.errors import InvalidArgument, Unimplemented
from tfnb.execution.compiling.compiled_packages import PREDICTED, PackageFolder, machine_scale
from tfnb.execution.compiling.compiler_process import COMPILER, END
from tfnb.execution.lowering.program import Program
from tfnb.execution.running import Stop
from tfnb.execution.tiers.agreement import at_other_sizes, compared, copied, verdict
from tfnb.execution.tiers.captured_steps import CapturedCode, Captures, device_of
from tfnb.execution.tiers.compiled_loops import CompiledLoops, obstacle
from tfnb.execution.tiers.fused import FusedTier
from tfnb.execution.tiers.gain import QUIET, ExpectedSteps, Gain, compile_seconds, reason, worth
from tfnb.execution.tiers.interface import Abandoned, Forward, Tier, TierRequest, Unfit, first, words
from tfnb.execution.tiers.native.manifest import LEAST
from tfnb.execution.tiers.native.request import Axis, varying_axes
from tfnb.execution.tiers.native.tier import NativeTier
from tfnb.execution.tiers.operand_checks import OperandRefused
from tfnb.execution.tiers.scalarize import ScalarTier
from tfnb.execution.tiers.step_profile import StepProfile
from tfnb.execution.tracing.clocks import counter
from tfnb.execution.tracing.live_memory import devices, room, wait
from tfnb.graph.collector import frozen
from tfnb.interrupts import from_signal_handler
from tfnb.recording.marks.notes import user_level

Mode = Literal["auto", "quiet", "off", "now"]
MODES = ("auto", "quiet", "off", "now")
WORTH_COMPILING = 2.0  # seconds of computing with the same sizes, before anybody asks whether to compile
POWER = Path("/sys/class/power_supply")  # where Linux tells of batteries
PROFILED = 3  # steps whose calls are timed, one by one
MOST = 2  # sizes that code of their own is compiled for, of one program; then one piece of code for all others
REMEMBERED = 1024  # choices of sizes: rows that are looked up are another number in each step
TURN = 0.05  # seconds; Python raises nothing in a thread that waits for longer
MOST_UNFIT = 3  # steps of other layouts, after which they are what is to be expected
MOST_COPIED = 1 << 30  # bytes of what a step reads, on the CPU
FAR = 10  # times what a step takes: a deadline that far away needs no step that can be stopped

NATIVE, VARYING = NativeTier(), NativeTier(varies=True)
AT_ONCE: tuple[Tier, ...] = (ScalarTier(),)
COMPILED: tuple[Tier, ...] = (CompiledLoops(), NATIVE)
FUSED: tuple[Tier, ...] = (FusedTier(),)
"""The tables of tiers: `AT_ONCE` is asked before the first step, `COMPILED` on the CPU once steps have taken long,
`FUSED` on other devices. CUDA graphs launch the code of any of these."""

_LOG = logging.getLogger(__name__)


def limit_copies(bytes: int) -> None:
    """Compile no step in this process that reads more bytes: comparisons work on copies."""
    global MOST_COPIED
    MOST_COPIED = max(0, min(MOST_COPIED, bytes))


def mode(wanted: str) -> Mode:
    """The meaning of ``compile=``: for ``"auto"`` the environment's TFNB_COMPILE, if set."""
    found = os.environ.get("TFNB_COMPILE", wanted) if wanted == "auto" else wanted
    if found not in MODES:
        raise InvalidArgument(f"compile is one of {', '.join(map(repr, MODES))}, not {found!r}")
    return found  # type: ignore[return-value]


def on_battery() -> bool:
    """Whether a battery of this machine gives its power."""
    with suppress(OSError):
        return any(path.read_text().strip() == "Discharging" for path in POWER.glob("BAT*/status"))
    return False


@cache
def say_once() -> None:
    """Warn once, at the first compilation, if this machine has no compiler."""
    if (why := obstacle()) is not None:
        warnings.warn(f"{why}; steps run as generated code", stacklevel=user_level(None) - 1)


class GeneratedCode:
    """The generated code of a program, written at the first run, and so never for a step found in the cache."""

    def __init__(self, program: Program) -> None:
        self._program = program

    @cached_property
    def code(self) -> Forward:
        """The code."""
        program = self._program
        found = first(AT_ONCE, TierRequest(program, program.forward))[0] if isinstance(program, Program) else None
        return found or program.forward  # type: ignore[no-any-return]


class Tiers:
    """The code of one program, by the sizes of its feeds: of the first tier in `AT_ONCE`, `COMPILED` or
    `FUSED` that fits.
    """

    def __init__(self, program: Program, mode: Mode, expected: ExpectedSteps | None = None) -> None:
        self.program, self.mode, self._generated = program, mode, GeneratedCode(program)
        self._sizes: dict[tuple[torch.Size, ...], Sizes] = {}
        self._own, self._axes = 0, tuple[Axis, ...]()
        self._varying: Sizes | None = None
        with suppress(Unimplemented):
            self._axes = varying_axes(program) if isinstance(program, Program) else ()
        self._captures = None if mode == "off" else Captures.of(program)
        self._expected = expected

    def forward(self, shapes: tuple[torch.Size, ...]) -> Forward:
        """The function of the next step, for feeds of these shapes."""
        if self.mode == "off":
            return self._generated.code
        found = self._sizes.get(shapes)
        if found is None:
            found = self._found(shapes)
            if len(self._sizes) < REMEMBERED:
                self._sizes[shapes] = found
        timed = found.timed
        return found.forward if timed is None else timed(shapes)

    def _found(self, shapes: tuple[torch.Size, ...]) -> Sizes:
        """Code for these shapes: specialized code, the code for varying sizes, or generated code."""
        is_single = any(shapes[place][axis] < LEAST for place, axis, _ in self._axes)
        if self._own < MOST or (is_single and self._own == MOST):  # the size one is a number of its own for torch
            self._own += 1
            found = Sizes(self.program, self._generated, self.mode, self._captures, expected=self._expected)
        elif is_single or not self._axes or self._captures is not None or device_of(self.program).type != "cpu":
            return Sizes(self.program, self._generated, "off", self._captures)
        elif self._varying is not None:
            return self._varying
        else:
            found = self._varying = Sizes(
                self.program, self._generated, self.mode, varies=True, expected=self._expected
            )
        found.recall(shapes)
        return found

    def close(self) -> None:
        """Release the compiler: no caller waits for its results."""
        for sizes in list(self._sizes.values()):
            COMPILER.release(sizes)

    def status(self) -> list[str]:
        """A line for each choice of sizes: the running code and the reason."""
        names = [self.program.whole.contents.by_id[value.node].name for value in self.program.feeds]
        lines = [
            ", ".join(f"{name} {list(shape)}" for name, shape in zip(names, key, strict=True)) + f": {sizes.status}"
            for key, sizes in self._sizes.items() if sizes is not self._varying
        ]  # fmt: skip
        return lines if self._varying is None else [*lines, f"other sizes [...]: {self._varying.status}"]

    def code(self, shapes: tuple[torch.Size, ...] | None = None) -> str:
        """The running code and the reason, for feeds of these shapes or of the first run; empty before any run."""
        if self.mode == "off":
            return "generated code"
        found = self._sizes.get(shapes) if shapes is not None else next(iter(self._sizes.values()), None)
        return "" if found is None else found.status


class Sizes:
    """One choice of sizes, or all that have no code of their own: ``forward`` runs now, replaced as the state changes.

    timed: makes the code of a step that is timed, in place of ``forward``. turns: seconds of timed steps of generated
    and of compiled code, while they take turns; of steps of about the same size together. varies: it is many sizes.
    expected: the further steps of the program.
    """

    def __init__(
        self, program: Program, written: GeneratedCode, mode: Mode, captures: Captures | None = None, *,
        varies: bool = False, expected: ExpectedSteps | None = None,
    ) -> None:  # fmt: skip
        self._varies, self._expected = varies, ExpectedSteps() if expected is None else expected
        self.program, self._mode, self._captures = program, mode, captures
        self._written, self._why = written, ""  # why generated code is not captured
        self.forward: Forward = self.generated if mode == "off" else self._now if mode == "now" else self._counted
        self.code = "generated code"
        self.turns: dict[Any, dict[Forward, list[float]]] | None = None
        self.timed: Callable[[Sequence[torch.Size]], Forward] | None = None
        self.profile: StepProfile | None = None
        self._gain: Gain | None = None
        self._cost_ahead = 0.0  # of compiling, in seconds, as predicted for the machine of the constants
        self._is_free = False  # a package is there, and costs nothing
        self._steps, self._asked_at = 0, 0  # steps taken; after how many it is asked whether to compile
        self._device = device_of(program)
        self._clock = counter(self._device)
        self._fast: GuardedCode | None = None
        self._package: PackageFolder | None = None
        self.cost = ""  # of compiling
        self._job: threading.Event | None = None  # that of "now", for which steps wait
        self._busy: list[torch.device] | None = None  # devices that go on when a call of them has returned

    @cached_property
    def generated(self) -> Forward:
        """Generated code, replaced by a captured launch after a few steps, where possible."""
        if self._captures is None:
            return self._plain
        found, self._why = first([self._captures], TierRequest(self.program, self._plain))
        return found or self._plain

    @property
    def _plain(self) -> Forward:
        return self._written.code

    @property
    def status(self) -> str:
        """The running code and the reason."""
        if self._captures is None:
            return self.code
        runs = self._fast.code if self._fast is not None and self.forward is self._fast else self.generated
        return f"{self.code}, {runs.status if isinstance(runs, CapturedCode) else f'not captured: {self._why}'}"

    def recall(self, shapes: Sequence[torch.Size]) -> None:
        """Load code compiled by an earlier process, if it agreed and was faster, or if compilation is mandatory."""
        if self._device.type != "cpu" or not isinstance(self.program, Program):
            return
        try:
            found = (VARYING if self._varies else NATIVE).recalled(self.program, shapes)
        except Exception as error:  # it is compiled anew then
            if from_signal_handler(error):
                raise
            _LOG.info("a package of the cache was not loaded: %s", words(error))
            return
        if found is None or found.package is None:
            return
        self._is_free = True
        facts = found.package.facts
        said = facts.get("status", "")
        if facts.get("is_faster") or (self._mode == "now" and facts.get("agrees")):
            self._fast = GuardedCode(self, found, facts.get("seconds_a_step"))
            self._keep(f"{said or 'compiled'}; from the cache")
        elif "is_faster" in facts and self._mode != "now":
            self.forward, self.code = self.generated, f"generated code ({said}; measured before)"

    def _counted(self, *args: object) -> Sequence[Any]:
        outs = self._clock.of(self.generated, *args)
        self._stepped()
        is_asked = self.forward == self._counted  # else another thread has decided while this step went on
        if is_asked and self._clock.total > WORTH_COMPILING and self._steps >= self._asked_at:
            self._consider(args)
        return outs

    def _stepped(self) -> None:
        self._steps += 1
        self._expected.taken += 1

    def _consider(self, args: Sequence[Any]) -> None:
        """Compile where that is free or cannot be predicted; else decide, once the calls of the step are timed."""
        is_predicted = self._device.type == "cpu" and isinstance(self.program, Program) and obstacle() is None
        if self._is_free or not is_predicted:
            self.forward = self.generated
            self._begin(args)
        elif self._gain is None:
            self.profile = StepProfile(self.program)
            self.forward, self.timed = self.generated, lambda _: ProfiledStep(self)
        else:
            self._choose(self._gain, args)

    def profiled(self, args: Sequence[Any], commit: float) -> None:
        """A profiled step is over: after some, decide."""
        self._stepped()
        profile = self.profile
        if profile is None:  # another thread has decided
            return
        profile.commits.append(commit)
        if len(profile.commits) < PROFILED:
            return
        self.timed = self.profile = None
        try:
            calls = profile.calls(args)
            gain = profile.gain(calls)
        except Exception as error:  # the step has committed, and is no failure
            if from_signal_handler(error):
                self.unprofiled()
                raise
            _LOG.info("not predicted: %s", words(error))
            self._begin(args)
            return
        except BaseException:  # an interrupt: it is asked again
            self.unprofiled()
            raise
        self._cost_ahead = compile_seconds(calls)
        self._choose(gain, args)

    def unprofiled(self) -> None:
        """A profiled step failed: go on without, and ask again later."""
        self.timed = self.profile = None
        self.forward, self._asked_at = self._counted, 2 * self._steps

    def _choose(self, gain: Gain, args: Sequence[Any]) -> None:
        """Compile now, later or never."""
        self._gain, cost = gain, machine_scale() * self._cost_ahead
        within = QUIET if self._mode == "quiet" or on_battery() else math.inf
        decision = worth(gain, cost, self._expected.after(self._steps), within=within)
        if decision == "now":
            self.forward = self.generated
            self._begin(args)
            return
        self.code = f"generated code ({reason(gain, cost, decision, within=within)})"
        _LOG.info("not compiled: %s", self.code)
        self._asked_at = 2 * self._steps
        self.forward = self._counted if decision == "later" else self.generated

    def _begin(self, args: Sequence[Any]) -> threading.Event:
        """Let the worker compile; the returned event is set at its decision."""
        self.code = "generated code; compiling in the background"
        say_once()
        return WORKER.submit(self, args)

    def _now(self, *args: object) -> Sequence[Any]:
        """Wait for the compiler; an interrupt or deadline ends the wait, and later runs use the result."""
        if self._job is None:
            self._job = self._begin(args)
        start = time.monotonic()
        try:
            while not self._job.wait(TURN):
                pass
        except Stop as stop:
            stop.waits = (f"the compiler (compile='now'), for {time.monotonic() - start:.1f} s",)
            raise
        return self.generated(*args) if getattr(self.forward, "writes", False) else self.forward(*args)

    def compile(self, args: Sequence[Any]) -> None:
        """The worker's job: build, compare with generated code, and decide at once where possible."""
        start = time.perf_counter()
        try:
            if (lacks := obstacle()) is not None:
                return self.drop(lacks)
            if sum(arg.nbytes for arg in args if isinstance(arg, torch.Tensor)) > room(self._device, MOST_COPIED):
                return self.drop("compiled code is compared on copies, and there is no room for what the step reads")
            with frozen():
                tiers = (VARYING,) if self._varies else COMPILED if self._device.type == "cpu" else FUSED
                found, why = first(tiers, TierRequest(self.program, self._plain, args, self, self._mode == "now"))
            if found is None:
                return self.drop(why)
            self._package = getattr(found, "package", None)
            cost = f"{time.perf_counter() - start:.1f} s to compile"
            self.cost = cost if self._package is None else self._package.cost
            if self._package is not None and not self._package.is_cached and self._cost_ahead:
                self._note(**{PREDICTED: self._cost_ahead})
            self.code = f"generated code; compiled code is not compared yet ({self.cost})"
            facts: Mapping[str, Any] = {} if self._package is None else self._package.facts
            if "agrees" not in facts:
                axes = varying_axes(self.program) if self._varies else ()
                samples = [copied(args), *at_other_sizes(axes, args)]
                facts = compared(self.program, self._plain, found, samples)
                self._note(**facts)
        except Abandoned as why:
            return self.drop(str(why))
        except BaseException as error:  # inductor raises anything; generated code goes on
            return self.drop(words(error))
        if not facts["agrees"]:
            return self.drop(facts["status"])
        launched = None if self._captures is None else first([self._captures], TierRequest(self.program, found))[0]
        self._fast = GuardedCode(self, launched or found, None if self._varies else facts["seconds_a_step"])
        if self._mode == "now":
            return self._keep(f"compiled; {self.cost}")
        self.forward, self.turns, self.timed = self.generated, {}, self.turn
        if not self.program.variables and not self._varies:
            self._time_once(self._fast, args)

    def _time_once(self, fast: Forward, args: Sequence[Any]) -> None:
        """Decide at once, by the step that caused the compilation: no other step writes its operands.

        A loop may take a thousand times as long in the next step as in this one.
        """
        self.wait(args)
        start = time.perf_counter()
        fast(*args)
        self.wait(args)
        seconds = time.perf_counter() - start
        if 2 * seconds < self._clock.last and self.turns is not None:
            self._decide(f"compiled: {seconds * 1e6:.0f} instead of {self._clock.last * 1e6:.0f} us")

    def drop(self, why: str) -> None:
        """Stay with generated code."""
        self.forward, self.turns, self.timed = self.generated, None, None
        self.code = f"generated code ({why})"
        _LOG.info("compiled code dropped: %s", why)

    def turn(self, shapes: Sequence[torch.Size]) -> Forward:
        """Generated and compiled code take turns, timed."""
        turns = self.turns
        if turns is None or self._fast is None:  # another thread has decided
            return self.forward
        about = tuple(size.bit_length() for shape in shapes for size in shape)
        seconds = turns.setdefault(about, {self.generated: [], self._fast: []})
        return TimedStep(self, min(seconds, key=lambda code: len(seconds[code])), seconds)

    def took(self, code: Forward, seconds: float, among: Mapping[Forward, list[float]]) -> None:
        """A timed step is over. among: the seconds of steps of about the same size."""
        turns = self.turns
        runs = getattr(code, "code", code)
        if turns is None or (isinstance(runs, CapturedCode) and runs.is_settling):
            return
        among[code].append(seconds)
        pairs = [pair for each in turns.values() for pair in zip(*each.values(), strict=False)]
        generated, compiled = zip(*pairs, strict=True) if pairs else ((), ())
        found = verdict(generated, compiled)
        if found is not None:
            slow = statistics.median(generated) * 1e6
            if found < 1:
                self._decide(f"compiled: {found * slow:.0f} instead of {slow:.0f} us")
            else:
                self.drop(why := f"compiled code is not faster: {found * slow:.0f} against {slow:.0f} us")
                self._note(is_faster=False, status=why)

    def wait(self, args: Sequence[Any]) -> None:
        """Until devices that go on when a call has returned are done."""
        if self._busy is None:
            self._busy = [device for device in devices(args) if device.type not in ("cpu", "meta")]
        wait(self._busy)

    def _decide(self, status: str) -> None:
        """Choose compiled code, and report its cost."""
        self._note(is_faster=True, status=status)
        self._keep(f"{status}; {self.cost}")

    def _note(self, **facts: object) -> None:
        """Store findings for other processes."""
        if self._package is not None:
            self._package.note(**facts)

    def _keep(self, status: str) -> None:
        assert self._fast is not None
        if lacks := getattr(self._fast.code, "lacks", ""):
            status = f"{status}; the rest is generated code: {lacks}"
        if self._captures is not None and self._captures.is_mine and isinstance(self.generated, CapturedCode):
            self.generated.release()  # what a capture holds is free
        self.forward, self.turns, self.timed, self.code = self._fast, None, None, status


class TimedStep:
    """One timed step."""

    def __init__(self, sizes: Sizes, code: Forward, among: Mapping[Forward, list[float]]) -> None:
        self._sizes, self._code, self._among, self._start = sizes, code, among, 0.0
        self.writes = getattr(code, "writes", False)

    def __call__(self, *args: object) -> Any:
        self._sizes.wait(args)
        self._start = time.perf_counter()
        outs = self._code(*args)
        if self.writes and outs is not None:
            self.done()
        return outs

    def done(self) -> None:
        """The step has committed."""
        self._sizes.wait(())
        self._sizes.took(self._code, time.perf_counter() - self._start, self._among)


class ProfiledStep:
    """One step of generated code whose calls are timed."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes, self._profile, self._args = sizes, sizes.profile, tuple[Any, ...]()
        self._computed: float | None = None  # when, by this thread's clock of the processor

    def __call__(self, *args: object) -> Sequence[Any]:
        if self._profile is None:  # other threads have taken the last one
            return self._sizes.generated(*args)
        try:
            outs = self._profile.forward(*args)
        except Exception as error:  # nothing was written; the code itself raises it with its line
            if from_signal_handler(error):
                raise
            self._sizes.unprofiled()
            return self._sizes.generated(*args)
        self._args, self._computed = args, time.thread_time()
        return outs

    def done(self) -> None:
        """The step has committed."""
        if self._computed is not None:
            self._sizes.profiled(self._args, time.thread_time() - self._computed)


class GuardedCode:
    """Compiled code that gives way to generated code; one that ``writes`` gives None then, and did nothing.

    seconds: what a step took, if that is known. direct: gives the whole step as one call without any of this, once it
    ran; None where there is no such call.
    """

    def __init__(self, sizes: Sizes, code: Forward, seconds: float | None) -> None:
        self._sizes, self.code, self._unfit, self.seconds = sizes, code, 0, seconds
        self.writes: bool = getattr(code, "writes", False)
        self.direct: Callable[[], Callable[..., Any] | None] = getattr(code, "direct", _nothing)

    def __call__(self, *args: object) -> Any:
        try:
            return self.code(*args)
        except OperandRefused:  # as a rule these arguments are wrong, which generated code says with the line
            pass
        except Unfit:
            self._unfit += 1
            if self._unfit == MOST_UNFIT:
                self._sizes.drop("what it reads lies in memory another way than when it was compiled")
        except Exception as error:  # nothing was written, so compute it again
            if from_signal_handler(error):
                raise
            self._sizes.drop(f"compiled code failed: {type(error).__name__}")
        return None if self.writes else self._sizes.generated(*args)

    def is_over_within(self, timeout: float | None) -> bool:
        """Whether an uninterruptible call ends long before a deadline."""
        return timeout is None or (self.seconds is not None and FAR * self.seconds < timeout)


def _nothing() -> None:
    """There is none."""


class Worker:
    """A daemon thread that compiles one thing after the other.

    Nothing is compiled in a thread of the user's: an interrupt between two of inductor's imports leaves it half loaded
    for the rest of the process. The interpreter's end waits for it: Python ends daemon threads inside of C++, which
    aborts the process, and drafts would stay on disk.
    """

    def __init__(self) -> None:
        self._is_over = False
        atexit.register(self.close)
        self._jobs = queue.SimpleQueue[tuple[Callable[[], Sizes | None], Sequence[Any], threading.Event]]()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def submit(self, sizes: Sizes, args: Sequence[Any]) -> threading.Event:
        """Compile for these arguments, some time; the event is set afterwards."""
        done = threading.Event()
        self._jobs.put((weakref.ref(sizes), args, done))
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # a forked process has none
                self._thread = threading.Thread(target=self._work, name="tfnb-compiler", daemon=True)
                self._thread.start()
        return done

    def close(self) -> None:
        """Let nobody wait for the compiler any more, and the thread come to its end."""
        self._is_over = True
        COMPILER.close()
        thread = self._thread
        if thread is not None and thread.is_alive():
            self._jobs.put((_nothing, (), threading.Event()))
            thread.join(END)

    def _work(self) -> None:
        while not self._is_over:
            reference, args, done = self._jobs.get()
            sizes = None if self._is_over else reference()
            try:
                if sizes is not None:
                    sizes.compile(args)
            finally:
                done.set()
            del sizes, args


WORKER = Worker()
