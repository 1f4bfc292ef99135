"""The C++ of a step as inductor generates it, without what AOTInductor puts around the code of one step.

`StepWrapper` is inductor's generator of C++ that calls kernels, with the class of ``step.h`` in place of AOTInductor's.
Inductor would compile and pack what it has generated; here that is handed back instead, as a `StepSource`. Both are
private parts of torch: `tests/execution/test_step_source.py` tells when they have changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor import aot_compile, codecache
from torch._inductor.codegen.common import device_codegens, init_backend_registration
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

from tfnb.errors import Unimplemented
from tfnb.graph.setting import setting

ENTRY = Path(__file__).with_name("entry.h")


@dataclass(frozen=True)
class StepSource:
    """wrapper: the C++ that allocates, and calls libraries and kernels; kernels: theirs.

    constants: tensors that inductor made of the step, which the wrapper takes beside its operands.
    """

    wrapper: str
    kernels: str
    constants: tuple[torch.Tensor, ...]
    inputs: int
    outputs: int


def step_source(module: fx.GraphModule, examples: Sequence[torch.Tensor], settings: dict[str, Any]) -> StepSource:
    """The source of a module whose operands lie as the examples; raises Unimplemented, or an error of torch."""
    init_backend_registration()
    found = _SourceCapture()
    with (
        setting(device_codegens["cpu"], cpp_wrapper_codegen=StepWrapper),
        setting(codecache, AotCodeCompiler=found),
    ):
        aot_compile(module, tuple(examples), options={"aot_inductor.package": True, **settings})
    made = found.source
    if "proxy_executor_call_function(" in made.wrapper:
        raise Unimplemented("an op of it has no form in C")
    if any(x.layout is not torch.strided or x.device.type != "cpu" or x.storage_offset() for x in made.constants):
        raise Unimplemented("a constant of it has no form in C")
    return made


class _SourceCapture:
    """Stands where inductor compiles what it has generated, and keeps it."""

    source: StepSource

    def compile(self, graph: Any, wrapper: str, kernels: str, *_: object, **__: object) -> list[str]:
        """Keep the source; gives the names of no files."""
        constants = tuple(graph.get_original_value_of_constant(name) for name in graph.constants)
        code = f"{wrapper}\n{ENTRY.read_text()}"
        self.source = StepSource(code, kernels, constants, len(graph.graph_inputs), len(graph.graph_outputs))
        return []


class StepWrapper(CppWrapperCpu):  # type: ignore[misc]
    """Generates ``AOTInductorModel::run_impl`` for ``step.h``: no class, no checks, which `call.c` makes."""

    @staticmethod
    def create(*_: object, **__: object) -> StepWrapper:
        """As inductor makes one, also for the body of a loop."""
        return StepWrapper()

    def add_device_include(self, device: str) -> None:
        """Nothing: ``step.h`` is included ahead of all."""
        self.included_devices.add(device)

    def _write_aoti_interface_header(self) -> None:
        return

    def generate_input_output_runtime_checks(self) -> None:
        """Nothing."""

    def _codegen_assert_size_stride(self, *_: object, **__: object) -> None:
        return

    def _write_entry_point_postamble(self) -> None:
        self.prefix.writeline_aot("inputs.clear();")

    def _codegen_aoti_model_class(self) -> None:
        self.prefix.writeline("using namespace torch::aot_inductor;")
