"""From the C++ of a step to a library that this machine loads, with as little work for the compiler as can be.

What all steps of a machine share is made once, see `machine_files`: ``step.h`` in the compiler's own form, which is
most of what a step includes; the functions of `call.c` and `direct.c`; and the programs by which inductor finds out
what the processor can do. Their names hold their sources and the compiler's flags. The header is made anew as well
where a file that it includes has another size or time, and g++ takes none that another g++ made.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from torch._inductor import config, cpp_builder
from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
from torch._inductor.cpu_vec_isa import VecISA, pick_vec_isa
from torch._inductor.exc import CppCompileError
from torch._inductor.runtime.cache_dir_utils import cache_dir

from tfnb.execution.compiling.machine_files import machine_files
from tfnb.execution.compiling.package_cache import digest, packages
from tfnb.execution.tiers.native.step_source import StepSource

STEP, CALL = "step.so", "call.so"
HEADER, INCLUDED = "step.h", "included.d"  # the second: names of all files that the header includes
ROOM = 512 << 20  # bytes of the cache from which on it holds a precompiled header, of 150 MB
LEAN = {
    "aot_inductor.enable_line_tables": False,  # four fifths of the file, which is read before the first step
    "cpp_cache_precompile_headers": False,  # inductor's own
}
_HERE = Path(__file__).parent


def build_library(source: StepSource, folder: Path) -> None:
    """Put the library of a step into a folder, and the functions that call it."""
    drafts = folder / "objects"
    shutil.rmtree(drafts, ignore_errors=True)  # of a process that died
    drafts.mkdir()
    objects = [
        _object("wrapper", source.wrapper, drafts, min_optimize=True),
        _object("kernels", source.kernels, drafts),
    ]
    (drafts / _built("step", objects, drafts, _options())).rename(folder / STEP)
    shutil.copyfile(_caller(), folder / CALL)
    shutil.rmtree(drafts)


def _object(name: str, text: str, folder: Path, **more: bool) -> str:
    """The object of a source; with the plain header where the compiler cannot take the precompiled one."""
    (folder / f"{name}.cpp").write_text(text)
    options, plain = _options(compile_only=True, **more), _HERE / HEADER
    if (header := _header()) != plain:
        options.precompiled_header = shlex.quote(str(header))
        with suppress(CppCompileError):  # another process made room, or g++ finds its addresses taken
            return _built(name, [f"{name}.cpp"], folder, options)
    options.precompiled_header = shlex.quote(str(plain))
    return _built(name, [f"{name}.cpp"], folder, options)


def _built(name: str, sources: Sequence[str], folder: Path, options: CppTorchDeviceOptions) -> str:
    """Run the compiler in a folder, as inductor quotes no path; gives the name of the file that it makes there."""
    builder = CppBuilder(name, [*sources], options)
    cpp_builder.run_compile_cmd(builder.get_command_line(), str(folder))
    return builder.get_target_file_path()


def _options(**more: Any) -> CppTorchDeviceOptions:
    """The compiler's flags, as AOTInductor sets them for a step on the CPU."""
    with config.patch(LEAN):
        return CppTorchDeviceOptions(vec_isa=vector_instructions(), device_type="cpu", aot_mode=True, **more)


def _header() -> Path:
    """The header to include ahead of a step, with its precompiled form beside it if there is one."""
    plain = _HERE / HEADER
    if not cpp_builder.is_gcc() or packages().limit < ROOM:
        return plain
    flags = CppBuilder("o", "i", _options(precompiling=True)).get_command_line()
    try:
        folder = machine_files(f"header {flags} {plain.read_text()}", _precompile, _is_current)
    except CppCompileError:  # say there is no room
        return plain
    return folder / HEADER


def _precompile(folder: Path) -> Mapping[str, Any]:
    shutil.copyfile(_HERE / HEADER, folder / HEADER)
    _built(HEADER, [HEADER], folder, _options(precompiling=True, extra_flags=[f"-MD -MF {INCLUDED}"]))
    return {INCLUDED: _included(folder)}


def _is_current(folder: Path, facts: Mapping[str, Any]) -> bool:
    try:
        return bool(facts[INCLUDED] == _included(folder))
    except (OSError, KeyError):  # an included file is gone
        return False


def _included(folder: Path) -> str:
    """A digest of the sizes and times of the files that the header of a folder includes."""
    names = shlex.split((folder / INCLUDED).read_text().replace("\\\n", " "))[1:]
    found = [(name, os.stat(name)) for name in names if Path(name).name != HEADER]  # noqa: PTH116  hundreds
    return digest(repr([(name, each.st_size, each.st_mtime_ns) for name, each in found]).encode())


def _caller() -> Path:
    """The library of the functions that call a step."""
    sources = [_HERE / name for name in ("call.c", "direct.c")]
    flags = ["-O2", "-shared", "-fPIC", *(part for source in sources for part in ("-x", "c", str(source)))]

    def make(folder: Path) -> Mapping[str, Any]:
        command = [cpp_builder.get_cpp_compiler(), *flags, "-x", "none", "-o", str(folder / CALL)]
        subprocess.run(command, check=True, capture_output=True)
        return {}

    texts = [source.read_text() for source in (*sources, _HERE / "call.h")]
    return machine_files(f"caller {flags} {texts}", make) / CALL


@cache
def vector_instructions() -> VecISA:
    """What inductor finds out about the processor; programs that it would compile for that come from the cache.

    Inductor compiles no program that lies in its own folder.
    """
    programs = Path(cache_dir())

    def make(folder: Path) -> Mapping[str, Any]:
        before = {*programs.glob("??/*.so")}
        _picked()
        for program in {*programs.glob("??/*.so")} - before:
            shutil.copyfile(program, folder / program.name)
        return {}

    for program in machine_files("vector instructions", make).glob("*.so"):
        place = programs / program.name[1:3] / program.name
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            shutil.copyfile(program, place)
    return _picked()


def _picked() -> VecISA:
    with config.patch({"cpp.vec_isa_ok": True}):  # else there is one program more for each kind of processor
        return pick_vec_isa()
