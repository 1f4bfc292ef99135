"""The device request of a node: ``/job:J/replica:R/task:T/device:TYPE:I``, any part may be missing.

Short forms are ``cpu``, ``cuda:1``, ``task:0`` and ``ps:0``. A request may also name colocation groups, as `with_group`
writes them: ``/with:h#7`` is the group of the node, or Variable, with key 7, whose name is h. Text and fields only:
`tfnb.placement.requests` says whether a place meets a request, `tfnb.graph.colocation_groups` merges those of a group.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tfnb.errors import InvalidArgument

if TYPE_CHECKING:
    from tfnb.graph.node import Node

KINDS = ("cpu", "cuda", "gpu", "meta", "mps", "xpu")
_GROUP = re.compile(r"([\w.>-]*)#(\w+)")  # name of a colocation group, and its key
_UNNAMEABLE = re.compile(r"[^\w.>-]")
_TASKS = ("worker", "localhost")  # jobs that are the tasks, as is none beside a number
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
    groups: tuple[str, ...] = ()  # colocation groups, each as name#key

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the colocation groups.

        >>> parse("task:1/with:h#7+w#v2").keys
        ('7', 'v2')
        """
        return tuple(group.rpartition("#")[2] for group in self.groups)

    @property
    def has_place(self) -> bool:
        """Whether any field but soft and the groups is given."""
        return any(field is not None for field in self[:5])

    def __str__(self) -> str:
        fields = {"job": self.job, "replica": self.replica, "task": self.task}
        number = "" if self.number is None else f":{self.number}"
        device = [] if self.kind is None else [f"/device:{self.kind.upper()}{number}"]
        parts = [f"/{name}:{field}" for name, field in fields.items() if field is not None]
        beside = [f"/with:{'+'.join(self.groups)}"] if self.groups else []
        return "".join([*parts, *device, *(["/soft"] if self.soft else []), *beside])

    def within(self, outer: DeviceRequest) -> DeviceRequest:
        """This request, completed field by field by the scope around it; a device kind brings its number along."""
        of_kind = self if self.kind is not None else outer
        return DeviceRequest(
            outer.job if self.job is None else self.job, outer.replica if self.replica is None else self.replica,
            outer.task if self.task is None else self.task, of_kind.kind, of_kind.number, self.soft or outer.soft,
            tuple(dict.fromkeys((*outer.groups, *self.groups))),
        )  # fmt: skip

    def agrees(self, other: DeviceRequest) -> bool:
        """Whether one place can meet both requests.

        >>> parse("task:1").agrees(parse("cpu")), parse("task:1").agrees(parse("ps:1"))
        (True, False)
        """
        pairs = [*zip(self[1:5], other[1:5], strict=True), (self._job, other._job)]
        return all(one is None or two is None or one == two for one, two in pairs)

    def joined(self, other: DeviceRequest) -> DeviceRequest:
        """The fields of both of two requests that agree; without colocation groups."""
        both = self._replace(groups=()).within(other._replace(groups=()))
        return both._replace(number=other.number if self.number is None else self.number)

    @property
    def _job(self) -> str | None:
        """The job, one name for the tasks."""
        return "task" if self.job in _TASKS or (self.job is None and self.task is not None) else self.job


@lru_cache(maxsize=1024)
def parse(text: str) -> DeviceRequest:
    """The fields of a device string. Raises InvalidArgument naming the part that is none.

    >>> parse("/job:worker/task:1/device:CPU:0")
    DeviceRequest(job='worker', replica=None, task=1, kind='cpu', number=0, soft=False, groups=())
    >>> parse("ps:1").job, parse("cuda").kind, parse("task:1/soft").soft
    ('ps', 'cuda', True)
    """
    if not isinstance(text, str):
        raise InvalidArgument(f"device {text!r} is no string; {_FORM}")
    fields: dict[str, str | int | bool | tuple[str, ...] | None] = {}
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
    """Combine the device scopes of two nested blocks: fields of the inner scope win, and None requests no place.

    Of a function of the node, None leaves the node to the scope around. Colocation groups are those of both.

    >>> nested("/task:2/device:CPU:0", "/job:w/task:1"), nested(None, "task:1"), nested("cpu", None)
    ('/job:w/task:2/device:CPU:0', None, 'cpu')
    >>> nested(None, "task:1/with:h#7")
    '/with:h#7'
    """
    if inner is None:
        return _mapped(outer, lambda request: DeviceRequest(groups=request.groups))
    if outer is None and isinstance(inner, str):
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


def without_groups(scope: Scope) -> Scope:
    """A device scope without its colocation groups.

    >>> without_groups("task:1/with:h#7"), without_groups("/with:h#7")
    ('/task:1', None)
    """
    return _mapped(scope, lambda request: request._replace(groups=()))


def _mapped(scope: Scope, change: Callable[[DeviceRequest], DeviceRequest]) -> Scope:
    """A device scope with a change of each request; a request without fields becomes None."""
    if scope is None or isinstance(scope, str):
        request = parse(scope) if scope else DeviceRequest()
        changed = change(request)
        return scope if changed == request else str(changed) or None

    def of_node(node: Node) -> str | None:
        found = _mapped(scope(node), change)
        assert not callable(found)
        return found

    return of_node


def with_group(name: str, key: str | int) -> str:
    """The request to be at the place of a colocation group.

    name: of the node or Variable with that key, for people; characters that no request has become ``_``.

    >>> with_group("h/sum", 7)
    '/with:h_sum#7'
    """
    return str(DeviceRequest(groups=(f"{_UNNAMEABLE.sub('_', name)}#{key}",)))


Text = TypeVar("Text", str, str | None)


def readable(device: Text) -> Text:
    """A device request for people: colocation groups by name.

    >>> readable("/task:1/with:h#7")
    '/task:1/with:h'
    """
    return map_groups(device, lambda name, key: name)


def map_groups(device: Text, change: Callable[[str, str], str]) -> Text:
    """A device request with ``change`` of the name and key of each colocation group in its place.

    >>> map_groups("/task:1/with:h#7", lambda name, key: f"{name}#8")
    '/task:1/with:h#8'
    """
    if device is None or "#" not in device:
        return device
    return _GROUP.sub(lambda group: change(group[1], group[2]), device)


def _part(part: str, text: str) -> dict[str, str | int | bool | tuple[str, ...] | None]:
    name, _, rest = part.partition(":")
    match name.lower(), rest:
        case "job", job if job.isidentifier():
            return {"job": job}
        case "replica" | "task" as field, number if number.isdecimal():
            return {field: int(number)}
        case "soft", "":
            return {"soft": True}
        case "with", groups if all(map(_GROUP.fullmatch, groups.split("+"))):
            return {"groups": tuple(groups.split("+"))}
        case "ps", number if number.isdecimal():
            return {"job": "ps", "task": int(number)}
        case "device", typed if typed.partition(":")[0].lower() in KINDS:
            return _part(typed, text)
        case kind, number if kind in KINDS and (number.isdecimal() or part == name):
            return {"kind": "cuda" if kind == "gpu" else kind, "number": int(number) if number else None}
    raise InvalidArgument(f"device {text[:60]!r}: {part[:60]!r} is no part of a device; {_FORM}")
