"""Whether a Python branch is a mere check: ``if not valid.all(): raise ...``, ``assert ok``.

The other way of it ends the program, so a graph that holds this way only lacks nothing: the guard that stops a run
there is the check itself. Reads the bytecode of the frame that asks (tried with Python 3.11 to 3.13).
"""

from __future__ import annotations

import dis
from functools import lru_cache
from itertools import dropwhile
from types import CodeType, FrameType

_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "YIELD_VALUE", "FOR_ITER", "SEND"})
_RAISES = frozenset({"RAISE_VARARGS"})


def is_check(frame: FrameType | None, outcome: bool) -> bool:
    """Whether ``frame``, which asks for a truth and gets ``outcome``, would only raise if it got the other one."""
    return frame is not None and _only_raises(frame.f_code, frame.f_lasti, not outcome)


@lru_cache(maxsize=1024)
def _only_raises(code: CodeType, at: int, truth: bool) -> bool:
    """Whether the way that ``truth`` takes at an instruction goes straight to a raise."""
    found = list(dropwhile(lambda i: i.offset < at, dis.get_instructions(code)))
    jump = next((i for i in found[:3] if i.opname.startswith("POP_JUMP") and "NONE" not in i.opname), None)
    if jump is None or any(i.opname not in ("TO_BOOL", "CACHE") for i in found[: found.index(jump)]):
        return False
    start = jump.argval if jump.opname.endswith("IF_TRUE") is truth else jump.offset + 1
    if start <= at:  # a loop goes back
        return False
    for instruction in dropwhile(lambda i: i.offset < start, found):
        if instruction.opname in _RAISES:
            return True
        if instruction.opname in _ENDS or "JUMP" in instruction.opname or instruction.opname.startswith("STORE"):
            return False
    return False
