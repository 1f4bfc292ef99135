"""What a node asks of the place where it runs: ``/job:J/replica:R/task:T/device:TYPE:I``, any part may be missing.

Short forms are ``cpu``, ``cuda:1``, ``task:0`` and ``ps:0``. Text and fields only: `tfnb.placement.requests` says
whether a place meets a request.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tfnb.errors import InvalidArgument

KINDS = ("cpu", "cuda", "gpu", "meta", "mps", "xpu")
_FORM = "expected parts of /job:NAME/replica:0/task:0/device:TYPE:0, or one of cpu, cuda:0, task:0, ps:0"


class Request(NamedTuple):
    """The fields of a device string; None where it leaves one open."""

    job: str | None = None
    replica: int | None = None
    task: int | None = None
    kind: str | None = None
    number: int | None = None


@lru_cache(maxsize=1024)
def parse(text: str) -> Request:
    """The fields of a device string. Raises InvalidArgument naming the part that is none.

    >>> parse("/job:worker/task:1/device:CPU:0")
    Request(job='worker', replica=None, task=1, kind='cpu', number=0)
    >>> parse("ps:1"), parse("cuda").kind
    (Request(job='ps', replica=None, task=1, kind=None, number=None), 'cuda')
    """
    if not isinstance(text, str):
        raise InvalidArgument(f"device {text!r} is no string; {_FORM}")
    fields: dict[str, str | int | None] = {}
    for part in text.strip("/").split("/"):
        for name, value in _part(part, text).items():
            if name in fields:
                raise InvalidArgument(f"device {text[:60]!r} says {name} twice; {_FORM}")
            fields[name] = value
    return Request(**fields)  # type: ignore[arg-type]


def _part(part: str, text: str) -> dict[str, str | int | None]:
    name, _, rest = part.partition(":")
    match name.lower(), rest:
        case "job", job if job.isidentifier():
            return {"job": job}
        case "replica" | "task" as field, number if number.isdecimal():
            return {field: int(number)}
        case "ps", number if number.isdecimal():
            return {"job": "ps", "task": int(number)}
        case "device", typed if typed.partition(":")[0].lower() in KINDS:
            return _part(typed, text)
        case kind, number if kind in KINDS and (number.isdecimal() or part == name):
            return {"kind": "cuda" if kind == "gpu" else kind, "number": int(number) if number else None}
    raise InvalidArgument(f"device {text[:60]!r}: {part[:60]!r} is no part of a device; {_FORM}")
