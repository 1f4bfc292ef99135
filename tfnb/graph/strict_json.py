"""Untrusted JSON texts: refuse duplicate keys, and texts that cost far more than their bytes, before parsing.

A parser makes an object of 50 bytes and more of three characters, and recurses where brackets are nested: both are
counted in the text first.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from itertools import accumulate
from typing import Any

DEPTH_CAP = 64  # nested lists and objects
VALUE_CAP = 2**22  # values of all lists and objects
DIGIT_CAP = 64  # of a whole number: more are no size, seed or count

_STEP = {"[": 1, "{": 1, "]": -1, "}": -1}
_NO_BRACKETS = re.compile(r"[^][{}]+")
_LONG = re.compile(rf"(?<![.\d])\d{{{DIGIT_CAP + 1}}}")


def read(text: str, *, finite: bool = True) -> Any:
    """Parse a JSON text. finite: refuse NaN and infinities; otherwise read them as Python writes them.

    Raises ValueError that says what is wrong, and the line where it is known.

    >>> read('{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    """
    _ensure_small(text)
    hooks = {"parse_constant": _no_constant, "parse_float": _finite} if finite else {}
    try:
        return json.loads(text, object_pairs_hook=_object, **hooks)  # type: ignore[arg-type]
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON at line {error.lineno} column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise ValueError(f"not JSON: {error}") from error


def _ensure_small(text: str) -> None:
    """Refuse a text with too many values, too long numbers or too deep nesting; strings are not counted."""
    outside = "".join(text.replace("\\\\", "").replace('\\"', "").split('"')[::2])
    values = outside.count(",") + outside.count("[") + outside.count("{")
    if values > VALUE_CAP:
        raise ValueError(f"it has {values} values; at most {VALUE_CAP} are allowed")
    if (found := _LONG.search(outside)) is not None:
        raise ValueError(f"the number {found[0]}... has more than {DIGIT_CAP} digits")
    brackets = _NO_BRACKETS.sub("", outside)
    if max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > DEPTH_CAP:
        raise ValueError(f"lists and objects are nested deeper than {DEPTH_CAP} levels")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice[:60]!r} occurs twice in one object")
    return found


def _no_constant(literal: str) -> float:
    raise ValueError(f"{literal} is not JSON; non-finite numbers are written as {{'$float': 'nan'}}")


def _finite(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise ValueError(f"the number {literal[:40]} is too large for a float")
    return value
