"""The trial of a package in its building process, on arguments of its step, beside generated code.

So the process that runs steps holds no second copy of them, and a package that ends its process ends the compiler's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfnb.execution.tiers.agreement import at_other_sizes, compared
from tfnb.execution.tiers.native.request import NativeRequest
from tfnb.execution.tiers.native.step_arguments import load_arguments
from tfnb.execution.tiers.native.tier import loaded


def tried(request: NativeRequest, folder: Path, arguments: Path) -> dict[str, Any]:
    """The findings of `compared` for the package of a request. arguments: a folder with operands."""
    program = request.program().undonated()
    step = loaded(folder, program)
    return compared(program, program.forward, step, _samples(request, arguments))


def _samples(request: NativeRequest, folder: Path) -> Iterator[list[Any]]:
    yield load_arguments(folder)
    if request.varying:
        yield from at_other_sizes(request.varying, load_arguments(folder))
