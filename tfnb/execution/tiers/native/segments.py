"""Steps with generated code between packages: one package for each straight segment of `graph_split`.

A segment only computes; what the step writes is committed after it, as it is for generated code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from tfnb.execution.compiling.compiled_packages import PackageFolder
from tfnb.execution.lowering.program import written
from tfnb.execution.tiers.graph_split import StepSegment
from tfnb.execution.tiers.interface import Forward, Unfit
from tfnb.execution.tiers.native.call import PackageFailed
from tfnb.execution.tiers.native.request import Operand
from tfnb.execution.tiers.operand_checks import OperandRefused
from tfnb.interrupts import from_signal_handler

SEGMENTS = "segments"  # the fact how the operands of each lie; None of one that stays generated code


class SegmentedStep:
    """Computes a step like ``program.forward``. lacks: the reason why the step is not one package.

    Raises Unfit, OperandRefused or PackageFailed; an error of generated code is a refusal, since the code of the whole
    step raises it with its line.
    """

    writes = False

    def __init__(self, code: fx.GraphModule, lacks: str, package: PackageFolder) -> None:
        self.lacks, self.package, self._code = lacks, package, written(code)

    def __call__(self, *args: object) -> Sequence[Any]:
        try:
            return self._code(*args)  # type: ignore[no-any-return]
        except (Unfit, OperandRefused, PackageFailed):
            raise
        except Exception as error:
            if from_signal_handler(error):
                raise
            raise OperandRefused from error


def given(code: fx.GraphModule, segments: Sequence[StepSegment], args: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The arguments of each segment in a run of generated code."""
    found: dict[StepSegment, tuple[Any, ...]] = {}

    def noted(segment: StepSegment, *args: object) -> Sequence[Any]:
        found[segment] = args
        return segment.program.forward(*args)

    for segment in segments:
        segment.forward = partial(noted, segment)
    try:
        written(code)(*args)
    finally:
        for segment in segments:
            segment.forward = None
    return [found[segment] for segment in segments]


def operands(args: Sequence[Any]) -> tuple[Operand, ...] | None:
    """How the arguments of a segment lie, without the run's number; None where one is no tensor."""
    *tensors, _ = args
    return tuple(map(Operand.of, tensors)) if all(isinstance(x, torch.Tensor) for x in tensors) else None


def fitting(step: Forward, layouts: Sequence[Operand]) -> Callable[..., Sequence[Any]]:
    """A segment's step that copies crossing values of other layouts."""

    def forward(*args: Any) -> Sequence[Any]:
        try:
            return step(*args)
        except Unfit:
            *tensors, run = args
            return step(*map(_laid, tensors, layouts), run)

    return forward


def _laid(x: torch.Tensor, like: Operand) -> torch.Tensor:
    if tuple(x.shape) != like.shape:
        return x.contiguous()  # of a size that varies
    return x if x.stride() == like.stride else torch.empty_strided(x.shape, like.stride, dtype=x.dtype).copy_(x)
