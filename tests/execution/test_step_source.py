"""Canary: the private parts of inductor that a step's source comes from are as `step_source` and `machine_code` expect.

Where one of these fails with another torch, packages of steps would not be built, or not as quick.
"""

from __future__ import annotations

import inspect
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import codecache
from torch._inductor.codegen.common import device_codegens, init_backend_registration
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.cpp_builder import CppBuilder, is_gcc
from torch.fx.experimental.proxy_tensor import make_fx

from tfnb.execution.tiers.compiled_loops import obstacle
from tfnb.execution.tiers.native import machine_code
from tfnb.execution.tiers.native.call import Package
from tfnb.execution.tiers.native.exportable import ExtraOperands
from tfnb.execution.tiers.native.machine_code import INCLUDED, build_library, vector_instructions
from tfnb.execution.tiers.native.manifest import About
from tfnb.execution.tiers.native.request import Operand
from tfnb.execution.tiers.native.step_arguments import CONSTANTS, save_arguments
from tfnb.execution.tiers.native.step_source import StepSource, StepWrapper, step_source

pytestmark = [
    pytest.mark.skipif(obstacle() is not None, reason="there is no C++ compiler"),
    pytest.mark.filterwarnings("ignore"),  # inductor's own
]
SETTINGS = {"compile_threads": 1, "cpp.threads": 1, "cpp.vec_isa_ok": True}


def source(function: Callable[..., Any], *examples: torch.Tensor) -> StepSource:
    vector_instructions()
    with torch.no_grad():
        return step_source(make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples),
                           examples, SETTINGS)  # fmt: skip


def test_what_is_overridden_is_there() -> None:
    """A method that inductor has renamed would be overridden in vain."""
    ours = [name for name in vars(StepWrapper) if inspect.isfunction(getattr(StepWrapper, name))]
    assert "create" in ours
    assert [name for name in ours if not callable(getattr(CppWrapperCpu, name, None))] == []


@pytest.mark.slow
def test_a_source_is_one_function_and_inductor_is_left_as_it_was() -> None:
    init_backend_registration()
    before = codecache.AotCodeCompiler, device_codegens["cpu"].cpp_wrapper_codegen
    found = source(lambda x, y: ((x * 2).sin() + y, x @ y), torch.ones(4, 4), torch.ones(4, 4))
    assert (codecache.AotCodeCompiler, device_codegens["cpu"].cpp_wrapper_codegen) == before
    assert (found.inputs, found.outputs, found.constants) == (2, 2, ())
    assert found.wrapper.count("void AOTInductorModel::run_impl(") == 1 and "tfnb_run" in found.wrapper
    assert "aoti_torch_cpu_mm_out" in found.wrapper and "void  cpp_fused" in found.kernels
    for more in ("Container", "check_input_", "assert_size_stride", "inputs_info_", "aoti_include"):
        assert more not in found.wrapper, f"inductor generates more than the step: {more}"


@pytest.mark.slow
def test_constants_that_inductor_makes_are_kept_with_the_package(tmp_path: Path) -> None:
    turned = torch.arange(6.0).reshape(2, 3).t()
    found = source(lambda x: (x + turned * 2,), torch.ones(3, 2))
    assert len(found.constants) == 1
    (tmp_path / "objects").mkdir()  # of a first try that died
    build_library(found, tmp_path)
    (tmp_path / CONSTANTS).mkdir()
    save_arguments([*found.constants, 0], tmp_path / CONSTANTS)
    x = torch.randn(3, 2)
    package = Package(tmp_path, About((Operand.of(x),), (), (0,), False), ExtraOperands((), ()))
    for _ in range(2):
        (result,) = package([x], [], 0)
        assert torch.equal(result, x + turned * 2)


@pytest.mark.slow
@pytest.mark.skipif(not is_gcc(), reason="only g++ gets a precompiled header")
def test_the_precompiled_header_is_taken_for_the_wrapper_and_for_kernels(tmp_path: Path) -> None:
    """g++ silently reads the header itself where it cannot take the precompiled one."""
    header = machine_code._header()
    assert header.with_name("step.h.gch").exists()
    (tmp_path / "code.cpp").write_text("int nothing;\n")
    for is_wrapper in (True, False):
        options = machine_code._options(compile_only=True, min_optimize=is_wrapper, extra_flags=["-H"])
        options.precompiled_header = shlex.quote(str(header))
        command = CppBuilder("code", "code.cpp", options).get_command_line()
        said = subprocess.run(shlex.split(command), capture_output=True, text=True, check=True, cwd=tmp_path).stderr
        assert f"! {header}.gch" in said.splitlines(), said[:500]


@pytest.mark.slow
def test_without_its_precompiled_header_a_step_compiles_with_the_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_code, "_header", lambda: tmp_path / "gone" / "step.h")
    text = "AtenTensorHandle given(at::vec::Vectorized<float>);\n"  # both of the header
    folder = tmp_path / "with a space"
    folder.mkdir()
    build_library(StepSource(text, text, (), 0, 0), folder)
    assert {path.name for path in folder.iterdir()} == {"step.so", "call.so"}


def test_a_header_is_of_the_files_that_it_includes(tmp_path: Path) -> None:
    included = tmp_path / "a header.h"
    included.write_text("int before;")
    escaped = str(included).replace(" ", "\\ ")
    (tmp_path / INCLUDED).write_text(f"step.h.gch: \\\n {tmp_path}/step.h \\\n {escaped}\n")
    facts = {INCLUDED: machine_code._included(tmp_path)}
    assert machine_code._is_current(tmp_path, facts)
    included.write_text("int after;")
    assert not machine_code._is_current(tmp_path, facts)
    included.unlink()
    assert not machine_code._is_current(tmp_path, facts)
