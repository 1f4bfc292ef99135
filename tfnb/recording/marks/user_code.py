"""Classify files: the user's code, or code of Python, tfnb or an installed package."""

from __future__ import annotations

import os
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path

import torch

_FOREIGN = tuple({
    *(f"{Path(__file__).parents[3] / room}{os.sep}" for room in ("tfnb", "kernels", "magics", "widgets")),
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")),
    f"{Path(torch.__file__).parent}{os.sep}", "<frozen", "<string>",
})  # fmt: skip


@lru_cache(4096)
def is_foreign(filename: str) -> bool:
    """Whether a file is of Python, of tfnb, or of an installed package."""
    return filename.startswith(_FOREIGN) or is_of_package(filename)


def is_of_package(filename: str) -> bool:
    """Whether a file is of an installed package."""
    return f"{os.sep}site-packages{os.sep}" in filename


def is_of_program(kind: type) -> bool:
    """Whether a class is of the user's program: of a notebook, a script or a module that is no installed package."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and not is_foreign(file))
