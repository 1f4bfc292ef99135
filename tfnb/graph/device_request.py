"""The device request of a node: ``/job:J/replica:R/task:T/device:TYPE:I``, any part may be missing.

Short forms are ``cpu``, ``cuda:1``, ``task:0`` and ``ps:0``. Text and fields only: `tfnb.placement.requests` says
whether a place meets a request.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from tfnb.errors import InvalidArgument

if TYPE_CHECKING:
    from tfnb.graph.node import Node

KINDS = ("cpu", "cuda", "gpu", "meta", "mps", "xpu")
_FORM = "expected parts of /job:NAME/replica:0/task:0/device:TYPE:0, or one of cpu, cuda:0, task:0, ps:0"


class DeviceRequest(NamedTuple):
    """The fields of a device string; None for a field that the string leaves open.

    >>> str(DeviceRequest(job="worker", task=1, kind="cpu", number=0))
    '/job:worker/task:1/device:CPU:0'
    """

    job: str | None = None
    replica: int | None = None
    task: int | None = None
    kind: str | None = None
    number: int | None = None
    soft: bool = False  # what cannot be met is not asked for

    def __str__(self) -> str:
        fields = {"job": self.job, "replica": self.replica, "task": self.task}
        number = "" if self.number is None else f":{self.number}"
        device = [] if self.kind is None else [f"/device:{self.kind.upper()}{number}"]
        parts = [f"/{name}:{field}" for name, field in fields.items() if field is not None]
        return "".join([*parts, *device, *(["/soft"] if self.soft else [])])

    def within(self, outer: DeviceRequest) -> DeviceRequest:
        """This request, completed field by field by the scope around it; a device kind brings its number along."""
        of_kind = self if self.kind is not None else outer
        return DeviceRequest(
            outer.job if self.job is None else self.job, outer.replica if self.replica is None else self.replica,
            outer.task if self.task is None else self.task, of_kind.kind, of_kind.number, self.soft or outer.soft,
        )  # fmt: skip


@lru_cache(maxsize=1024)
def parse(text: str) -> DeviceRequest:
    """The fields of a device string. Raises InvalidArgument naming the part that is none.

    >>> parse("/job:worker/task:1/device:CPU:0")
    DeviceRequest(job='worker', replica=None, task=1, kind='cpu', number=0, soft=False)
    >>> parse("ps:1").job, parse("cuda").kind, parse("task:1/soft").soft
    ('ps', 'cuda', True)
    """
    if not isinstance(text, str):
        raise InvalidArgument(f"device {text!r} is no string; {_FORM}")
    fields: dict[str, str | int | bool | None] = {}
    for part in text.strip("/").split("/"):
        for name, value in _part(part, text).items():
            if name in fields:
                raise InvalidArgument(f"device {text[:60]!r} says {name} twice; {_FORM}")
            fields[name] = value
    return DeviceRequest(**fields)  # type: ignore[arg-type]


Scope = str | Callable[["Node"], str | None] | None
"""What a scope asks for: a device string, a function of the node that gives one, or nothing."""


def softened(of_node: Callable[[Node], str | None]) -> Callable[[Node], str | None]:
    """A device function whose requests are soft: ignored where no place can meet them."""

    def soft(node: Node) -> str | None:
        text = of_node(node)
        return str(parse(text)._replace(soft=True)) if text else text

    return soft


def nested(inner: Scope, outer: Scope) -> Scope:
    """Combine the device scopes of two nested blocks: fields of the inner scope win, and None requests nothing.

    Of a function of the node, None leaves the node to the scope around.

    >>> nested("/task:2/device:CPU:0", "/job:w/task:1"), nested(None, "task:1"), nested("cpu", None)
    ('/job:w/task:2/device:CPU:0', None, 'cpu')
    """
    if inner is None or (outer is None and isinstance(inner, str)):
        return inner
    if isinstance(inner, str) and isinstance(outer, str):
        return str(parse(inner).within(parse(outer)))

    def of_node(node: Node) -> str | None:
        mine = inner(node) if callable(inner) else inner
        around = outer(node) if callable(outer) else outer
        if not mine:
            return around
        parse(mine)
        found = nested(mine, around)
        assert not callable(found)
        return found

    return of_node


def _part(part: str, text: str) -> dict[str, str | int | bool | None]:
    name, _, rest = part.partition(":")
    match name.lower(), rest:
        case "job", job if job.isidentifier():
            return {"job": job}
        case "replica" | "task" as field, number if number.isdecimal():
            return {field: int(number)}
        case "soft", "":
            return {"soft": True}
        case "ps", number if number.isdecimal():
            return {"job": "ps", "task": int(number)}
        case "device", typed if typed.partition(":")[0].lower() in KINDS:
            return _part(typed, text)
        case kind, number if kind in KINDS and (number.isdecimal() or part == name):
            return {"kind": "cuda" if kind == "gpu" else kind, "number": int(number) if number else None}
    raise InvalidArgument(f"device {text[:60]!r}: {part[:60]!r} is no part of a device; {_FORM}")
