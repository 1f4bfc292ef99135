"""Finds the frame and the line of the user that converted code stands in."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType

_HERE = str(Path(__file__).parent.parent)


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
