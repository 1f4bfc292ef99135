"""Numbers of bytes as people write them: ``"512MB"``, ``"1.5 GiB"``."""

from __future__ import annotations

import re

from tfnb.errors import InvalidArgument

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def byte_count(size: int | str) -> int:
    """The bytes that a budget names: an int of at least 1, or text with a unit. Raises InvalidArgument for others.

    >>> byte_count("512MB"), byte_count("1.5 KiB"), byte_count("12"), byte_count(4096)
    (512000000, 1536, 12, 4096)
    """
    found = (
        re.fullmatch(r"([0-9]*\.?[0-9]+) *([kmgt]?i?)b?", size.strip(), re.IGNORECASE) if type(size) is str else None
    )
    known = found is not None and found[2].lower() in _UNITS
    count = int(float(found[1]) * _UNITS[found[2].lower()]) if found is not None and known else size
    if type(count) is not int or count < 1:
        raise InvalidArgument(f"a memory budget is a number of bytes, 512MB or 1.5GiB for example, not {size!r}")
    return count
