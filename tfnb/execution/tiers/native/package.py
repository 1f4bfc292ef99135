"""Packages: folders with the code that inductor made of a request. `build` needs torch and a C++ compiler only.

A folder holds ``step.so`` (the step), ``call.so`` (`call.c`, `direct.c`), ``about.json`` and the constants of the code.
To load one runs its code: only folders that this user's tfnb wrote are loaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo.convert_frame import compile_lock
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.dependencies import WeakDep
from torch._inductor.ir import FallbackKernel
from torch._inductor.virtualized import V
from torchgen.aoti.fallback_ops import inductor_fallback_ops

from tfnb.errors import Unimplemented
from tfnb.execution.compiling.compiled_packages import REQUEST
from tfnb.execution.tiers.decompositions import decompositions
from tfnb.execution.tiers.native.exportable import exportable
from tfnb.execution.tiers.native.machine_code import build_library, vector_instructions
from tfnb.execution.tiers.native.manifest import LEAST, About
from tfnb.execution.tiers.native.product_kernels import choose_products
from tfnb.execution.tiers.native.request import FORMLESS, NativeRequest
from tfnb.execution.tiers.native.step_arguments import CONSTANTS, save_arguments
from tfnb.execution.tiers.native.step_source import StepSource, step_source
from tfnb.execution.tiers.native.trial import tried
from tfnb.execution.tiers.native.unrolling import unroll_scans


def build_in(folder: Path) -> dict[str, Any]:
    """Run `build` for the request in the folder, then try the package; called by the compiler's process."""
    request = NativeRequest.load(folder / REQUEST)
    request.as_asked()
    try:
        build(request, folder)
    except Formless as error:
        return {FORMLESS: sorted(error.args[0])}
    return tried(request, folder, folder / REQUEST)


class Formless(Exception):
    """The names of ops that have no form in C."""


def build(request: NativeRequest, folder: Path) -> None:
    """Compile a request into an existing folder; raises Unimplemented, Formless, or an error of torch."""
    program = request.program().undonated()
    if len(program.feeds) + len(program.variables) != len(request.operands):
        raise Unimplemented("the step was read back as another one")
    missing: set[str] = set()

    def prepared(nodes: list[Any]) -> list[Any]:
        """Check and reorder inductor's nodes before kernels are fused."""
        missing.update(str(op) for node in nodes if (op := _called(node)) is not None and not _has_form(op))
        if missing:
            raise Formless(missing)
        return _writes_last(nodes)

    settings: dict[str, Any] = {
        "compile_threads": 1, "cpp.threads": request.threads, "layout_optimization": False,
        "post_grad_custom_pre_pass": _before_kernels, "_pre_fusion_custom_pass": prepared, "cpp.vec_isa_ok": True,
    }  # fmt: skip
    with compile_lock, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        vector_instructions()
        table = decompositions(select_decomp_table())
        module, examples, about = exportable(program, request.operands, table, request.varying)
        try:
            source = step_source(_sized(module, examples, about), examples, settings)
        except Exception:  # inductor makes other errors of one
            if missing:
                raise Formless(missing) from None
            raise
        _check(source, about)
        build_library(source, folder)
    if source.constants:
        (folder / CONSTANTS).mkdir(exist_ok=True)
        save_arguments([*source.constants, 0], folder / CONSTANTS)
    about.save(folder)


def _check(source: StepSource, about: About) -> None:
    """Raise Unimplemented for a source with other operands or results than the module that it was made of."""
    found, wanted = (source.inputs, source.outputs), (len(about.operands), about.outputs)
    if found != wanted:
        raise Unimplemented(f"its code takes and gives {found} tensors, not {wanted}")


def _before_kernels(graph: fx.Graph) -> None:
    """Rewrite the step's graph before inductor makes kernels."""
    unroll_scans(graph)
    choose_products(graph)


def _sized(module: fx.GraphModule, examples: Sequence[torch.Tensor], about: About) -> fx.GraphModule:
    """The module for all sizes of its varying axes; torch raises if code specializes a named size."""
    if not about.varying:
        return module
    names = dict.fromkeys(symbol for _, _, symbol in about.varying)
    sizes = {symbol: torch.export.Dim(f"size{place}", min=LEAST) for place, symbol in enumerate(names)}
    axes: list[dict[int, Any]] = [{} for _ in about.operands]
    for place, axis, symbol in about.varying:
        axes[place][axis] = sizes[symbol]
    exported = torch.export.export(module, tuple(examples), dynamic_shapes=tuple(each or None for each in axes))
    return exported.module(check_guards=False)


def _called(node: Any) -> torch._ops.OpOverload | None:
    """The op of an inductor fallback call."""
    op = getattr(node.node, "op_overload", None) if isinstance(node.node, FallbackKernel) else None
    return op if isinstance(op, torch._ops.OpOverload) else None


def _has_form(op: torch._ops.OpOverload) -> bool:
    return op.namespace == "aten" and str(op) in inductor_fallback_ops


def _writes_last(nodes: list[Any]) -> list[Any]:
    """Let each kernel that writes an operand wait for all that can fail: memory may be lacking, a library may refuse.

    What makes values for such kernels only may become one with them.
    """
    operands = V.graph.graph_inputs.keys()
    writes = {
        node.get_name()
        for node in nodes
        for buffer in node.get_outputs()
        if not operands.isdisjoint(buffer.get_mutations())
    }
    writers = [node for node in nodes if node.get_name() in writes]
    if not writers:
        return nodes
    rest = [node for node in nodes if node.get_name() not in writes]
    fallible = [node for node in rest if node.is_extern() or node.is_reduction() or not _users(node) <= writes]
    for writer in writers:
        known = {dependency.name for dependency in writer.read_writes.reads}
        for node in fallible:
            made = node.get_buffer_names()
            if made and known.isdisjoint(made) and writer.get_name() not in node.ancestors:
                writer.add_fake_dep(WeakDep(next(iter(made)), mutating_buf=writer.get_name(), is_fake=True))
    scheduler = nodes[0].scheduler
    ordered: list[Any] = scheduler.topological_sort_schedule(nodes)
    scheduler.nodes = ordered
    scheduler.compute_ancestors()
    return ordered


def _users(node: Any) -> set[str]:
    return {user.get_name() for buffer in node.get_outputs() for user in buffer.users}
