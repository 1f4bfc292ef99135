"""Agreement of compiled code with generated code, and their comparison in speed.

It rounds in other places, which some steps make much of: Adam takes a whole step along a gradient that is zero but for
rounding, as that of the bias of attention's keys is. So where code differs, generated code runs once more on
arguments that are changed by a rounding each. The differences are accepted if, sorted, none is larger than `ROUNDINGS`
times the change that this rounding causes: a few elements that mean nothing pass so, and a wrong value does not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from tfnb.errors import DeadlineExceeded
from tfnb.execution.commit import commit
from tfnb.execution.lowering.program import Program
from tfnb.execution.running import Running
from tfnb.execution.tiers.interface import Forward, first_line
from tfnb.execution.tiers.native.request import Axis
from tfnb.execution.tiers.operand_checks import OperandRefused

TURNS = 10  # timed steps of each kind
CLEAR_TURNS = 3  # that are enough where one is always twice as fast
CLEAR = 0.8  # of the pairs of steps agree on which kind is faster
MOST_TURNS = 40  # then what there is decides
LONGEST_COMPARED = 5.0  # seconds of a step that compiled code is compared with
RELATIVE, ABSOLUTE = 1e-3, 1e-4  # what any value may differ by
TF32 = 2.0**-10  # what numbers are rounded by
ROUNDINGS = 4  # times what a rounding of each argument changes: code that rounds elsewhere may change so much more


def compared(
    program: Program, generated: Forward, compiled: Forward, samples: Iterable[Sequence[Any]]
) -> dict[str, Any]:  # fmt: skip
    """Facts about compiled code: it ``agrees``, with its ``seconds_a_step``; or the difference in words.

    samples: arguments as in a run, which nobody else writes; they are written into.
    """
    timed = TimedCode(compiled)
    differs = next(filter(None, (difference(program, generated, timed, args) for args in samples)), None)
    if differs is not None:
        return {"agrees": False, "is_faster": False, "status": f"compiled code differs: {differs}"}
    return {"agrees": True, "seconds_a_step": timed.seconds}


def difference(program: Program, generated: Forward, compiled: Forward, args: Sequence[Any]) -> str | None:
    """The difference between compiled and generated code in a few words; None if they agree, if generated code takes
    longer than 5 s, or if compiled code refuses the operands.

    Code that writes is compared by what it leaves in ``args``; generated code then writes into copies.
    """
    writes = getattr(compiled, "writes", False)
    run = _written if writes else _computed
    given = copied(args) if writes else args
    try:
        late = LONGEST_COMPARED, lambda _: DeadlineExceeded("")
        wanted = Running().compute(run, program, generated, copied(args) if writes else args, until=late)
    except DeadlineExceeded:
        return None
    try:
        found = run(program, compiled, args)
    except OperandRefused:  # it would have given way
        return None
    rounded: list[Any] | None = None
    wanted, found = wanted[::-1], found[::-1]
    while found:  # what was compared is free
        here, there, place = found.pop(), wanted.pop(), len(found)
        try:
            _ensure_close(here, there)
        except AssertionError as error:
            if rounded is None:
                rounded = run(program, generated, _rounded(given, _epsilon(program)))[::-1]
            if not _is_rounding(here, there, rounded[place]):
                return first_line(error)
    return None


def _computed(program: Program, forward: Forward, args: Sequence[Any]) -> list[Any]:
    """The outputs of a step, with the values to write."""
    return list(forward(*args))


def _written(program: Program, forward: Forward, args: Sequence[Any]) -> list[Any]:
    """The outputs of a step, and all operands after its writes, without notice to Variables."""
    *tensors, run = args
    feeds, storages = tensors[: len(program.feeds)], tensors[len(program.feeds) :]
    if getattr(forward, "writes", False):
        return [*forward(feeds, storages, run), *storages]
    fetched, pending = program.compute(feeds, storages, run, forward)
    commit(replace(pending, variables=()))
    return [*fetched, *storages]


def copied(args: Sequence[Any]) -> list[Any]:
    """Arguments that nobody else writes."""
    return [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]


def _ensure_close(found: Any, wanted: Any) -> None:
    """Generated code may give a number where compiled code gives a tensor."""
    if wanted is not None and not isinstance(wanted, torch.Tensor) and isinstance(found, torch.Tensor):
        wanted = torch.full_like(found, wanted)
    if found is not wanted:
        torch.testing.assert_close(found, wanted, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True)


def _epsilon(program: Program) -> float:
    """The largest rounding among the dtypes of a step; on CUDA float32 may be rounded to TF32 in products."""
    kinds = {(spec.dtype, spec.device) for node in program.graph.nodes for spec in node.outputs}
    found = [torch.finfo(dtype).eps for dtype, _ in kinds if dtype.is_floating_point]
    folds = any("convolution" in node.op for node in program.graph.nodes)
    in_tf32 = torch.backends.cuda.matmul.allow_tf32 or (folds and torch.backends.cudnn.allow_tf32)
    if in_tf32 and any(dtype is torch.float32 and device.startswith("cuda") for dtype, device in kinds):
        found.append(TF32)
    return max(found, default=0.0)


def _rounded(args: Sequence[Any], epsilon: float) -> list[Any]:
    """The arguments, each number changed by at most a rounding, always the same."""
    draws = torch.Generator().manual_seed(0)

    def moved(x: object) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if not (x.is_floating_point() or x.is_complex()):
            return x.clone()
        return x * (1 + epsilon * (2 * torch.rand(x.shape, generator=draws) - 1).to(x.device))

    return [moved(x).to(x.dtype) if isinstance(x, torch.Tensor) else x for x in args]


def _is_rounding(found: Any, wanted: Sequence[Any], rounded: Any) -> bool:
    """Whether two values differ by no more than generated code does from itself under rounded operands."""
    tensors = [found, wanted, rounded]
    if not all(isinstance(x, torch.Tensor) and (x.shape, x.dtype) == (found.shape, found.dtype) for x in tensors):
        return False
    real = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in tensors]
    here, there, moved = (x.double().flatten() for x in real)
    if not torch.equal(here.isfinite(), there.isfinite()):
        return False
    differs, moves = ((x - there).nan_to_num(0.0, 0.0, 0.0).abs() for x in (here, moved))
    beyond = differs - ABSOLUTE - RELATIVE * there.nan_to_num(0.0, 0.0, 0.0).abs()
    return bool((beyond.clamp(min=0).sort().values <= ROUNDINGS * moves.sort().values).all())


class TimedCode:
    """Code that knows how long its last call took, if there was one."""

    def __init__(self, code: Forward) -> None:
        self._code, self.seconds = code, float("inf")
        self.writes: bool = getattr(code, "writes", False)

    def __call__(self, *args: object) -> Any:
        start = time.perf_counter()
        outs = self._code(*args)
        self.seconds = time.perf_counter() - start
        return outs


def verdict(generated: Sequence[float], compiled: Sequence[float]) -> float | None:
    """Time of compiled code relative to generated code; None until significant.

    Steps are compared in pairs, one right after the other, so that a machine which gets slower or faster in the
    meantime, or stumbles, decides nothing.

    >>> verdict([1, 1, 1, 5, 5, 5, 5, 5, 5, 5], [1.1, 1.1, 1.1, 5.5, 5.5, 5.5, 5.5, 5.5, 5.5, 9])
    1.1
    """
    ratios = [b / a for a, b in zip(generated, compiled, strict=False)]
    count, faster = len(ratios), sum(ratio < 1 for ratio in ratios)
    if count >= CLEAR_TURNS and (2 * max(compiled) < min(generated) or 2 * max(generated) < min(compiled)):
        return statistics.median(ratios)
    clear = count >= TURNS and max(faster, count - faster) >= CLEAR * count
    return statistics.median(ratios) if clear or count >= MOST_TURNS else None


def at_other_sizes(axes: Sequence[Axis], args: Sequence[Any]) -> Iterator[list[Any]]:
    """Arguments of a run for other sizes of these axes, made of the given elements; none without axes."""
    for factor, more in ((1, 1), (2, 3), (0, 2)) if axes else ():
        given = copied(args)
        for place, axis, _ in axes:
            size = args[place].shape[axis]
            given[place] = given[place].index_select(axis, torch.arange(factor * size + more) % size)
        yield given
