"""Compiles the requests of `tfnb.execution.tiers.fused`, in the compiler's process."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import _inductor, fx
from torch._dynamo.convert_frame import compile_lock
from torch._inductor import config, lowering  # noqa: F401  torch 2.11 takes the second for imported
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from tfnb.errors import Unimplemented
from tfnb.execution.compiling.compiled_packages import REQUEST
from tfnb.execution.lowering.program import Program
from tfnb.execution.tiers.decompositions import decompositions
from tfnb.execution.tiers.fused import CODE
from tfnb.execution.tiers.native.exportable import FORMS, ExtraOperands, pure
from tfnb.execution.tiers.native.request import NativeRequest, Operand
from tfnb.execution.tiers.operand_checks import OperandChecks


def build_in(folder: Path) -> dict[str, Any]:
    """Compile the request in the folder; called by the compiler's process."""
    request = NativeRequest.load(folder / REQUEST)
    request.as_asked()
    build(request.program().undonated(), request.operands, folder)
    return {}


def build(program: Program, operands: Sequence[Operand], folder: Path) -> None:
    """Compile a program for operands of these layouts; raises Unimplemented, or an error of torch."""
    if len(program.feeds) + len(program.variables) != len(operands):
        raise Unimplemented("the step was read back as another one")
    step = fx.GraphModule(program.module, pure(program, OperandChecks())[0])
    examples: list[Any] = [*(operand.empty() for operand in operands), *ExtraOperands.of(program, operands).constants]
    alone = config.patch(compile_threads=1)  # it would start a process for each core, for all that it may compile
    with compile_lock, torch.no_grad(), alone, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = {**decompositions(select_decomp_table()), **FORMS}
        module = make_fx(step, table, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)
        made = _inductor.standalone_compile(module, examples, dynamic_shapes="from_example_inputs")
        made.save(path=str(folder / CODE))
