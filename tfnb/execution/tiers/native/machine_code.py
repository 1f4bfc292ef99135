"""From the C++ of a step to a library that this machine loads, with as little work for the compiler as can be.

What all steps of a machine share is made once, see `machine_files`: ``step.h`` in the compiler's own form, which is most
of what a step includes; the functions of `call.c` and `direct.c`; and the programs by which inductor finds out what the
processor can do. Their names hold their sources and the compiler's flags. The header is made anew as well where a file
that it includes has another size or time, and g++ takes none that another g++ made.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
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
_HERE = Path(__file__).parent


def build_library(source: StepSource, folder: Path) -> None:
    """Put the library of a step into a folder, and the functions that call it."""
    drafts, header, objects = folder / "objects", _header(), []
    drafts.mkdir()
    for name, text, is_wrapper in (("wrapper", source.wrapper, True), ("kernels", source.kernels, False)):
        (drafts / f"{name}.cpp").write_text(text)
        options = _options(compile_only=True, min_optimize=is_wrapper)
        options.precompiled_header = shlex.quote(str(header))
        objects.append(_built(name, [drafts / f"{name}.cpp"], drafts, options))
    _built(Path(STEP).stem, objects, folder, _options())
    shutil.copyfile(_caller(), folder / CALL)
    shutil.rmtree(drafts)


def _built(name: str, sources: list[Path], folder: Path, options: CppTorchDeviceOptions) -> Path:
    builder = CppBuilder(name, [*map(str, sources)], options, str(folder))
    builder.build()
    return Path(builder.get_target_file_path())


def _options(**more: Any) -> CppTorchDeviceOptions:
    """The compiler's flags, as AOTInductor sets them for a step on the CPU."""
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
    header = folder / HEADER
    shutil.copyfile(_HERE / HEADER, header)
    listing = f"-MD -MF {shlex.quote(str(folder / INCLUDED))}"
    CppBuilder(str(header), str(header), _options(precompiling=True, extra_flags=[listing])).build()
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
