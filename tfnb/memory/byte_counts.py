"""Numbers of bytes as people write them, ``"512MB"`` or ``"1.5 GiB"``, and as plans tell them."""

from __future__ import annotations

import re

from tfnb.errors import InvalidArgument

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_TOLD = {"GB": 10**9, "MB": 10**6, "KB": 10**3}


def byte_count(size: int | str) -> int:
    """The bytes that a budget names: an int of at least 1, or text, with a unit or without. Raises InvalidArgument for
    others.

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


def told(count: float) -> str:
    """Bytes in the decimal units of `byte_count`.

    >>> told(2_000_000_000), told(90_400_000), told(12)
    ('2.0 GB', '90.4 MB', '12 bytes')
    """
    unit, size = next(((unit, size) for unit, size in _TOLD.items() if count >= size), ("bytes", 1))
    return f"{count / size:,.{0 if size == 1 else 1}f} {unit}"
