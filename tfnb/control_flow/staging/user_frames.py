"""Finds the user's code: the frame and line that converted code stands in, and which files are not the user's."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType

import torch

_HERE = str(Path(__file__).parent.parent)

_FOREIGN = tuple({
    *(f"{Path(__file__).parents[3] / room}{os.sep}" for room in ("tfnb", "kernels", "magics", "widgets")),
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")),
    f"{Path(torch.__file__).parent}{os.sep}", "<frozen", "<string>",
})  # fmt: skip


def user_frame() -> FrameType:
    """The frame of the converted code that called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_HERE, "<string>")):
        frame = frame.f_back
    return frame or sys._getframe(1)


def user_line() -> str:
    """The line of the converted code that called, for messages."""
    frame = user_frame()
    return f"line {frame.f_lineno} `{linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()}`"


def is_foreign(filename: str) -> bool:
    """Whether a file is of Python, of tfnb, or of an installed package."""
    return filename.startswith(_FOREIGN) or is_of_package(filename)


def is_of_package(filename: str) -> bool:
    """Whether a file is of an installed package."""
    return f"{os.sep}site-packages{os.sep}" in filename
