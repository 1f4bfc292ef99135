"""The fused tier: for devices that are not the CPU, a step whose kernels inductor fused, in the code that calls them.

It computes as generated code does and writes nothing: the commit is the same, and CUDA graphs launch it as they launch
generated code (`tfnb.execution.tiers.captured_steps`). A package is torch's own file of compiled code
(``torch._inductor.standalone_compile``); to load one runs its code: only those that this user's tfnb wrote are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tfnb.execution.compiling.compiled_packages import PackageFolder, compiled
from tfnb.execution.compiling.compiler_process import NOBODY, OverBudget
from tfnb.execution.lowering.checked_calls import RandomCall
from tfnb.execution.lowering.control_flow_code import Loop
from tfnb.execution.lowering.program import Program
from tfnb.execution.tiers.captured_steps import device_of
from tfnb.execution.tiers.interface import Abandoned, TierRequest, Unfit
from tfnb.execution.tiers.native.exportable import ExtraOperands, obstacles, pure
from tfnb.execution.tiers.native.request import NativeRequest, Operand
from tfnb.execution.tiers.operand_checks import OperandChecks

CODE = "step.bin"
BUILD = "tfnb.execution.tiers.fusing:build_in"


class FusedTier:
    """The tier: a whole step for one choice of sizes."""

    name = "compiled"

    def made(self, request: TierRequest) -> FusedStep | str:
        """The code for operands that lie as these do."""
        program = request.program.undonated()
        if (why := obstacle(program)) is not None:
            return why
        wanted, device = NativeRequest.of(program, request.args), device_of(program)
        model = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        try:
            key = f"fused for {model} {wanted.key()}"
            package = compiled(key, wanted.save, BUILD, request.owner, urgent=request.urgent)
        except OverBudget as error:
            raise Abandoned(f"{error} to compile") from None
        if isinstance(package, PackageFolder):
            return opened(package, program, wanted.operands)
        if package == NOBODY:
            raise Abandoned(NOBODY)
        return package


def obstacle(program: Program) -> str | None:
    """The reason why a program has no fused code: the CPU, or ops not given to inductor."""
    if device_of(program).type == "cpu":
        return "it runs on the CPU"
    for node in program.module.graph.nodes:
        if isinstance(node.target, Loop | RandomCall):
            kind = "is a loop" if isinstance(node.target, Loop) else "draws"
            return f"{program.node_of[node.name].name} {kind}"
    return next(iter(obstacles(program).values()), None)


def opened(package: PackageFolder, program: Program, operands: Sequence[Operand]) -> FusedStep:
    """The step of a package; one that cannot be loaded is dropped."""
    from torch import _inductor

    try:
        with _inductor.config.patch(compile_threads=1):  # else loading starts a process for each core
            code = _inductor.CompiledArtifact.load(path=str(package.folder / CODE))
    except Exception:
        package.drop()
        raise
    return FusedStep(code, program, operands, package)


class FusedStep:
    """Computes a step as ``program.forward`` does, for operands that lie so; raises Unfit for others."""

    def __init__(
        self, code: Callable[..., Any], program: Program, operands: Sequence[Operand], package: PackageFolder | None
    ) -> None:
        self._code, self.package = code, package
        self._strides = [operand.stride for operand in operands]
        self._places = pure(program, OperandChecks())[1]
        self._constants = ExtraOperands.of(program, operands).constants

    def __call__(self, *args: Any) -> Sequence[Any]:
        tensors = args[:-1]  # the last one is the run's number
        if any(x.stride() != stride for x, stride in zip(tensors, self._strides, strict=True)):
            raise Unfit
        found = self._code(*tensors, *self._constants)
        return [None if at is None else found[at] if at >= 0 else args[~at] for at in self._places]
