"""JSON values and bytes that were changed at random places, as strangers and broken memory change them.

``TFNB_FUZZ=COUNT`` says how many are tried of each kind; `make fuzz` tries a thousand.
"""

from __future__ import annotations

import json
import math
import os
import random
from copy import deepcopy
from typing import Any


def tries(few: int) -> int:
    """How many are tried: a few, unless TFNB_FUZZ says otherwise."""
    return int(os.environ.get("TFNB_FUZZ", few))


ODD: list[Any] = [
    None, True, -1, 0, 2, 2**31, 2**63, 10**30, 10**400, 1e308, math.inf, "", "x", "B", "B**64", "-B", "1/0", "B//0",
    "\ud800", "\u202e", "x" * 5000, [], [[]], [0, 0], [None], {}, {"$ref": 0}, {"$dim": "B**B"}, {"$tuple": []},
    {"$tensor": "0"}, {"$float": "nan"}, {"$variable": "w"}, {"a": {}},
]  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Each place of a JSON value, as (container, key)."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [pair for key in keys for pair in ((value, key), *places(value[key]))]


def changed(value: Any, chance: random.Random) -> Any:
    """A JSON value with some places replaced, removed or repeated."""
    made = deepcopy(value)
    for _ in range(chance.choice((1, 1, 2, 4))):
        found = places(made)
        if not found:
            break
        inside, key = chance.choice(found)
        match chance.randrange(4):
            case 0 if isinstance(inside, list):
                inside.insert(key, inside[key])
            case 1:
                del inside[key]
            case 2:
                inside[key] = deepcopy(chance.choice(found)[0])
            case _:
                inside[key] = deepcopy(chance.choice(ODD))
    return made


def torn(data: bytes, chance: random.Random) -> bytes:
    """Bytes with random changes, cuts or repetitions."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 2, 8))):
        at = chance.randrange(len(found))
        length = chance.choice((1, 8, 100))
        match chance.randrange(4):
            case 0:
                found[at] ^= 1 << chance.randrange(8)
            case 1:
                del found[at : at + length]
            case 2:
                found[at:at] = found[at : at + length]
            case _:
                found[at : at + length] = chance.randbytes(length)
        found = found or bytearray(b"x")
    return bytes(found)


def written(value: Any) -> bytes:
    """A JSON value as bytes; an infinite number is one that JSON allows and no float holds."""
    return json.dumps(value).replace("Infinity", "1e999").encode()
