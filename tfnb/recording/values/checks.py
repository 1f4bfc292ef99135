"""Whether a Python branch is a mere check: ``if not valid.all(): raise ...``, ``assert ok``.

The other way of it ends the program, so a graph that holds this way only lacks nothing: the guard that stops a run
there is the check itself. Reads the line that asks and the one below it.
"""

from __future__ import annotations

import linecache
import re
from types import FrameType

_ASSERT = re.compile(r"assert\b(?!.*\bor\b)")  # where either of two is enough, no single one is a check
_IF = re.compile(r"(?:el)?if\b(?!.*\band\b).*:\s*(#.*)?$")
_RAISE = re.compile(r"raise\b")
_SEVERAL = re.compile(r"(?<![.\w])(any|all|max|min|sorted|filter|next)\(")  # asks many truths for one answer


def is_check(frame: FrameType | None) -> bool:
    """Whether ``frame``, asking for a truth value, would only raise on the opposite answer."""
    if frame is None or frame.f_globals.get("__name__", "").startswith("tfnb."):
        return False
    line, below = (_text(frame, frame.f_lineno + step) for step in (0, 1))
    if _SEVERAL.search(line):
        return False
    return bool(_ASSERT.match(line) or (_IF.match(line) and _RAISE.match(below)))


def _text(frame: FrameType, line: int) -> str:
    return linecache.getline(frame.f_code.co_filename, line, frame.f_globals).strip()
