"""Tracebacks that end where the user wrote the mistake: frames of tfnb, and of libraries below them, are left out.

``%config TfnbMagics.full_tracebacks = True`` shows everything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import tfnb

_BESIDE = Path(__file__).parent.parent  # the checkout, or the installed package
_ROOMS = (*tfnb.__path__, *(_BESIDE / room for room in ("kernels", "magics", "widgets")))
_OURS = (*(f"{folder}{os.sep}" for folder in _ROOMS), "<eval_with_key>")  # torch.fx's name of generated code
_STANDARD = f"{Path(os.__file__).parent}{os.sep}"
_PACKAGES = tuple(f"{os.sep}site-packages{os.sep}{name}{os.sep}" for name in ("torch", "distributed", "tornado"))


def shorten(error: BaseException) -> None:
    """Drop inner frames from the traceback of an error and of its causes."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        current = todo.pop()
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            current.__traceback__ = _outer(current.__traceback__, is_cause=current is not error)
            todo += current.__cause__, current.__context__


def _outer(traceback: TracebackType | None, *, is_cause: bool = False) -> TracebackType | None:
    kept: list[TracebackType] = []
    tail: list[TracebackType] = []  # frames of libraries since the user's last one
    inner = False
    for entry in _entries(traceback):
        filename = entry.tb_frame.f_code.co_filename
        if is_ours(filename):
            inner = True
        elif is_library(filename):
            tail.append(entry)
        else:
            kept += [*tail, entry]
            tail, inner = [], False
    if not inner and not is_cause:  # torch itself complained, as it would outside a recording
        kept += tail
    chain = None
    for entry in reversed(_merged(kept)):
        chain = TracebackType(chain, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return chain


def _merged(entries: list[TracebackType]) -> list[TracebackType]:
    """Without frames whose statement goes on in the next one: AutoGraph makes functions of the bodies of statements."""
    inner = [entry.tb_frame.f_code for entry in entries[1:]]
    codes = [entry.tb_frame.f_code for entry in entries]
    goes_on = [b in a.co_consts and a.co_name == b.co_name for a, b in zip(codes, inner, strict=False)] + [False]
    return [entry for entry, is_left_out in zip(entries, goes_on, strict=False) if not is_left_out]


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def is_ours(filename: str) -> bool:
    """Whether a frame's file belongs to tfnb."""
    return filename.startswith(_OURS)


def is_library(filename: str) -> bool:
    """Whether a frame's file belongs to torch or Dask, or to Python itself."""
    standard = filename.startswith((_STANDARD, "<frozen ")) and f"{os.sep}site-packages{os.sep}" not in filename
    return standard or any(package in filename for package in _PACKAGES)
