"""From JSON text to nodes: a strict parser and reader of the files of `tfnb.graph.forms.serial`.

Nothing in a file is trusted: sizes over the caps, unknown fields, wrong types and ops that are not admitted are
errors that name the path inside the file. Recursion is bounded by the depth that `strict_json` takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import Any

import torch

from tfnb.errors import GraphCycleError, GraphFormatError, InvalidArgument, UnknownOp, UntrustedOp
from tfnb.graph import strict_json
from tfnb.graph.check import check
from tfnb.graph.contents import Contents, Guard
from tfnb.graph.device_request import map_groups
from tfnb.graph.node import Node, Owner, Ref, SourceLine, Value
from tfnb.graph.op_facts import admit
from tfnb.graph.ops import QUEUES as QUEUE_OPS
from tfnb.graph.queue import QUEUES, Queue
from tfnb.graph.spec import Dim, Spec, numbered
from tfnb.graph.subgraph import Recursion, Subgraph
from tfnb.graph.tensor_files import RANK_CAP, SIZE_CAP
from tfnb.graph.variable import Variable

FORMAT, VERSION = "tfnb-graph", 1
FILE_CAP = 64 * 2**20  # bytes
NODE_CAP = 10**6
ATTR_CAP = 10**3  # per node
STRING_CAP = 2**20  # characters
OUTPUT_CAP = 10**4  # of a node
SCOPE_CAP = 100  # parts of a scope: each is a box inside of another one


NEEDED: Mapping[str, Mapping[str, type]] = {
    "tfnb.read": {"variable": Variable}, "tfnb.assign": {"variable": Variable},
    "tfnb.constant": {"value": torch.Tensor},
    **{op: {"queue": Queue} for op in QUEUE_OPS},
}  # fmt: skip
"""What attrs of ops are, that text and drawings of a graph rely on."""


# -- parsing ------------------------------------------------------------------------------------------------


def parse(text: str) -> dict[str, Any]:
    """Parse a JSON object; raises GraphFormatError where strict JSON or the caps are violated."""
    if len(text) > FILE_CAP:
        raise GraphFormatError(f"the graph has {len(text)} characters; at most {FILE_CAP} are allowed")
    try:
        document = strict_json.read(text)
    except ValueError as error:
        raise GraphFormatError(str(error)) from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise GraphFormatError(f"not a graph file: its format is not {FORMAT!r}")
    if document.get("version") != VERSION or isinstance(document["version"], bool):
        raise GraphFormatError(f"version: {document.get('version')!r} is unknown; this tfnb reads version {VERSION}")
    return document


# -- reading ------------------------------------------------------------------------------------------------

_ABSENT: object = object()


def field(record: Mapping[str, Any], key: str, kind: Any, path: str, default: Any = _ABSENT) -> Any:
    """``record[key]`` if its type is ``kind``; a bool is no int."""
    value = record.get(key, default)
    if value is _ABSENT:
        raise GraphFormatError(f"{path}: the field {key!r} is missing")
    if value is not default and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise GraphFormatError(f"{path}.{key}: found {_short(value)}, expected {_kind(kind)}")
    if isinstance(value, str) and len(value) > STRING_CAP:
        raise GraphFormatError(f"{path}.{key}: a string of {len(value)} characters; at most {STRING_CAP} are allowed")
    return value


def _kind(kind: Any) -> str:
    return " or ".join(k.__name__ for k in kind) if isinstance(kind, tuple) else kind.__name__


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}..."


def only(record: object, fields: frozenset[str], path: str) -> dict[str, Any]:
    """``record`` if it is an object with no fields beyond ``fields``."""
    if not isinstance(record, dict):
        raise GraphFormatError(f"{path}: found {_short(record)}, expected an object")
    extra = sorted(record.keys() - fields)
    if extra:
        raise GraphFormatError(f"{path}: unknown field {extra[0][:60]!r}")
    return record


def _strings(record: Mapping[str, Any], key: str, path: str) -> list[str]:
    found = field(record, key, list, path, [])
    if not all(isinstance(item, str) and len(item) <= STRING_CAP for item in found):
        raise GraphFormatError(f"{path}.{key}: expected a list of strings")
    return found


def _ints(values: object, path: str, count: int | None = None) -> list[int]:
    if not isinstance(values, list) or not all(type(item) is int for item in values):
        raise GraphFormatError(f"{path}: expected a list of ints, found {_short(values)}")
    if count is not None and len(values) != count:
        raise GraphFormatError(f"{path}: expected {count} ints, found {len(values)}")
    return values


DOCUMENT = frozenset({
    "format", "version", "name", "seed", "constants", "variables", "sources", "owners", "guards", "aliases", "nodes",
})  # fmt: skip
NODE = frozenset({
    "name", "op", "in", "out", "attrs", "control", "effects", "scope", "source", "owner", "device", "tags", "stream",
    "forward", "fixed",
})  # fmt: skip
SPEC = frozenset({"dtype", "shape", "device"})
RECURSION = frozenset({"id", "name", "limit", "body"})
SUBGRAPH = frozenset({"in", "out", "guards", "nodes"})


def build(
    document: dict[str, Any], tensors: Mapping[str, torch.Tensor], new_id: Callable[[], int],
    variables: Mapping[str, Variable], trusted: bool,
) -> tuple[str, int, Contents]:  # fmt: skip
    only(document, DOCUMENT, "file")
    reader = _Reader(document, tensors, new_id, variables, trusted)
    nodes = reader.nodes(field(document, "nodes", list, "file"), "nodes")
    guards = tuple(reader.guard(r, f"guards[{i}]") for i, r in enumerate(field(document, "guards", list, "file", [])))
    bindings = {
        name: tuple(reader.value(value, f"aliases.{name[:60]}") for value in _values(found))
        for name, found in field(document, "aliases", dict, "file", {}).items()
    }
    contents = Contents(nodes, guards, bindings)
    try:
        check(contents)
    except GraphCycleError:
        raise
    except InvalidArgument as error:
        place = next((place for place, node in enumerate(nodes) if node.name == error.node), None)
        where = "file" if place is None else f"nodes[{place}]"
        raise GraphFormatError(f"{where}: {error}", node=error.node, op=error.op) from error
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise GraphFormatError(f"file: an attr has another form than its op takes: {error!r}") from error
    return field(document, "name", str, "file"), field(document, "seed", int, "file"), contents


def _values(found: object) -> list[Any]:
    """The values bound to a name; files of an earlier release hold a single value without a list."""
    return found if isinstance(found, list) and all(isinstance(value, list) for value in found) and found else [found]


class _Reader:
    """Turns JSON records into nodes, given the tables of the file."""

    def __init__(
        self, document: dict[str, Any], tensors: Mapping[str, torch.Tensor], new_id: Callable[[], int],
        variables: Mapping[str, Variable], trusted: bool,
    ) -> None:  # fmt: skip
        self.tensors, self.new_id, self.trusted = tensors, new_id, trusted
        self.ids: list[int] = []
        self.tags = self._tags()
        self.sources = [self._source(s, f"sources[{i}]") for i, s in enumerate(self._table(document, "sources"))]
        self.recursions: dict[int, Recursion] = {}
        self.owners = [self._owner(o, f"owners[{i}]") for i, o in enumerate(self._table(document, "owners"))]
        declared = field(document, "variables", dict, "file", {})
        self.queues: dict[int, Queue] = {}
        self.variables = {label: self._declared(label, record, variables) for label, record in declared.items()}
        self.groups = {f"v{place}": self.variables[label].key for place, label in enumerate(sorted(self.variables))}

    def _tags(self) -> dict[str, tuple[Any, Callable[..., Any]]]:
        """Type and reader of the content of each ``$`` key."""
        return {
            "$subgraph": (dict, self.subgraph),
            "$recursion": (dict, self.recursion),
            "$ref": (int, lambda body, path: Ref(body)),
            "$dim": (str, self.dim),
            "$tuple": (list, self.sequence),
            "$map": (list, self.mapping),
            "$float": (str, self.non_finite),
            "$complex": (list, self.complex),
            "$dtype": (str, partial(self.constant, torch.dtype)),
            "$layout": (str, partial(self.constant, torch.layout)),
            "$memory_format": (str, partial(self.constant, torch.memory_format)),
            "$device": (str, self.device),
            "$variable": (str, self.variable),
            "$queue": (list, self.queue),
            "$tensor": (str, self.tensor),
        }

    @staticmethod
    def _table(document: dict[str, Any], key: str) -> list[Any]:
        return field(document, key, list, "file", [])

    @staticmethod
    def _source(record: object, path: str) -> SourceLine:
        match record:
            case [str(label), int(line), str(text)] if not isinstance(line, bool):
                return SourceLine(label, line, text)
        raise GraphFormatError(f"{path}: expected [label, line, text], found {_short(record)}")

    @staticmethod
    def _owner(record: object, path: str) -> Owner:
        match record:
            case [str(key), int(index)] if not isinstance(index, bool):
                return Owner(key, index)
        raise GraphFormatError(f"{path}: expected [key, index], found {_short(record)}")

    def _declared(self, label: str, record: object, given: Mapping[str, Variable]) -> Variable:
        path = f"variables.{label[:60]}"
        fields = dict(only(record, SPEC | {"trainable", "partitions", "partition_bytes"}, path))
        trainable = field(fields, "trainable", bool, path)
        fields.pop("trainable")
        divided = [fields.pop(name, None) for name in ("partitions", "partition_bytes")]
        spec = self.spec(fields, path)
        if spec.symbols:
            raise GraphFormatError(f"{path}.shape: a variable has fixed sizes, found {spec}")
        found = given.get(label)
        if found is None:
            made = Variable.declared(spec, name=label, trainable=trainable)
            try:
                made.divide(*divided)
            except InvalidArgument as error:
                raise GraphFormatError(f"{path}: {error}") from None
            return made
        if (found.spec.dtype, tuple(found.spec.shape)) != (spec.dtype, spec.shape):
            raise InvalidArgument(f"variable {label} is {found.spec}, but the graph needs {spec}")
        return found

    def spec(self, record: Any, path: str) -> Spec:
        only(record, SPEC, path)
        dtype = self.constant(torch.dtype, field(record, "dtype", str, path), f"{path}.dtype")
        shape = field(record, "shape", list, path)
        if len(shape) > RANK_CAP:
            raise GraphFormatError(f"{path}.shape: {len(shape)} axes; at most {RANK_CAP} are allowed")
        sizes = tuple(self.size(size, f"{path}.shape[{axis}]") for axis, size in enumerate(shape))
        device = field(record, "device", str, path, "cpu")
        return Spec(dtype, sizes, str(self.device(device, f"{path}.device")))

    def size(self, size: object, path: str) -> int | Dim:
        if type(size) is int and 0 <= size < SIZE_CAP:
            return size
        if isinstance(size, str):
            return self.dim(size, path)
        raise GraphFormatError(f"{path}: expected a size, found {_short(size)}")

    @staticmethod
    def dim(expr: object, path: str) -> Dim:
        if not isinstance(expr, str):
            raise GraphFormatError(f"{path}: expected a size expression, found {_short(expr)}")
        try:
            return Dim(expr).checked()
        except GraphFormatError as error:
            raise GraphFormatError(f"{path}: {error}") from error

    @staticmethod
    def constant(kind: type, name: str, path: str) -> Any:
        """``torch.float32`` and the like, by name."""
        found = getattr(torch, name, None) if name.isidentifier() else None
        if not isinstance(found, kind):
            raise GraphFormatError(f"{path}: {name[:60]!r} is no torch.{kind.__name__}")
        return found

    def place(self, place: object, path: str) -> int:
        """Id of the node at that position."""
        if type(place) is not int or not 0 <= place < len(self.ids):
            raise GraphFormatError(f"{path}: {_short(place)} is no position of a node; there are {len(self.ids)}")
        return self.ids[place]

    def value(self, pair: object, path: str) -> Value:
        place, index = _ints(pair, path, 2)
        return Value(self.place(place, path), index)

    def entry(self, record: dict[str, Any], key: str, table: list[Any], path: str) -> Any:
        """The entry of a table at index ``record[key]``, if the key is present."""
        number = field(record, key, int, path, None)
        if number is None:
            return None
        if not 0 <= number < len(table):
            raise GraphFormatError(f"{path}.{key}: {number} is outside of the table of {len(table)}")
        return table[number]

    def guard(self, record: Any, path: str) -> Guard:
        only(record, frozenset({"expr", "source", "owner", "local"}), path)
        expr = self.dim(field(record, "expr", str, path), f"{path}.expr").expr
        source = self.entry(record, "source", self.sources, path)
        owner = self.entry(record, "owner", self.owners, path)
        return Guard(expr, source, owner, field(record, "local", bool, path, False))

    def nodes(self, records: list[Any], path: str) -> tuple[Node, ...]:
        if len(records) > NODE_CAP:
            raise GraphFormatError(f"{path}: {len(records)} nodes; at most {NODE_CAP} are allowed")
        self.ids = [self.new_id() for _ in records]
        return tuple(self.node(record, f"{path}[{place}]", place) for place, record in enumerate(records))

    def subgraph(self, record: dict[str, Any], path: str) -> Subgraph:
        """Read a subgraph of `tfnb.graph.forms.encode.GraphWriter.subgraph`; nodes are named by their position
        inside.
        """
        only(record, SUBGRAPH, path)
        inner = copy(self)
        inner.tags = inner._tags()
        nodes = inner.nodes(field(record, "nodes", list, path), f"{path}.nodes")
        guards = [inner.guard(g, f"{path}.guards[{i}]") for i, g in enumerate(field(record, "guards", list, path, []))]
        inputs = tuple(Value(inner.place(place, f"{path}.in")) for place in field(record, "in", list, path))
        outs = field(record, "out", list, path)
        outputs = tuple(None if v is None else inner.value(v, f"{path}.out[{i}]") for i, v in enumerate(outs))
        return Subgraph(Contents(nodes, tuple(guards)), inputs, outputs)

    def recursion(self, record: dict[str, Any], path: str) -> Recursion:
        """Read a function of `tfnb.graph.forms.encode.GraphWriter.recursion`; the body may name the function."""
        only(record, RECURSION, path)
        number = field(record, "id", int, path)
        if "body" not in record:
            if number not in self.recursions:
                raise GraphFormatError(f"{path}: names function {number}, which was not written before")
            return self.recursions[number]
        made = Recursion(field(record, "name", str, path), field(record, "limit", int, path))
        self.recursions[number] = made
        made.define(self.subgraph(field(record, "body", dict, path), f"{path}.body"))
        return made

    def node(self, record: Any, path: str, place: int) -> Node:
        only(record, NODE, path)
        op = field(record, "op", str, path)
        try:
            admit(op, trusted=self.trusted)
        except (UnknownOp, UntrustedOp) as error:
            error.message = f"{path}: {error.message}"
            raise
        attrs = self.attrs(field(record, "attrs", dict, path, {}), f"{path}.attrs")
        for key, kind in NEEDED.get(op, {}).items():
            field(attrs, key, kind, f"{path}.attrs")
        forward = field(record, "forward", int, path, None)
        outs, scope = field(record, "out", list, path, []), _strings(record, "scope", path)
        for key, found, most in (("out", outs, OUTPUT_CAP), ("scope", scope, SCOPE_CAP)):
            if len(found) > most:
                raise GraphFormatError(f"{path}.{key}: a list of {len(found)}; at most {most} are allowed")
        return Node(
            id=self.ids[place],
            name=field(record, "name", str, path),
            op=op,
            inputs=tuple(self.value(v, f"{path}.in[{i}]") for i, v in enumerate(field(record, "in", list, path, []))),
            outputs=tuple(self.spec(s, f"{path}.out[{i}]") for i, s in enumerate(outs)),
            attrs=attrs,
            control=tuple(self.place(p, f"{path}.control") for p in field(record, "control", list, path, [])),
            effects=tuple(self.place(p, f"{path}.effects") for p in field(record, "effects", list, path, [])),
            scope=tuple(scope),
            source=self.entry(record, "source", self.sources, path),
            owner=self.entry(record, "owner", self.owners, path),
            device=self.request(field(record, "device", str, path, None), self.ids[place]),
            tags=frozenset(_strings(record, "tags", path)),
            stream=field(record, "stream", int, path, None),
            forward=None if forward is None else self.place(forward, f"{path}.forward"),
            fixed=tuple(_strings(record, "fixed", path)),
        )

    def request(self, text: str | None, number: int) -> str | None:
        """The request of the node with this id. A colocation group is named after the first node that names it."""
        before, found, groups = (text or "").partition("with:")
        if text is None or not found:
            return text

        def known(name: str, key: str) -> str:
            return f"{name}#{self.groups.setdefault(key, str(number))}"

        mapped = (map_groups(group, known) for group in groups.split("+"))
        others = [group for group in mapped if group is not None and not group.endswith(f"#{number}")]
        before = before.rstrip("/")
        return f"{before}/with:{'+'.join(others)}" if others else before or None

    def attrs(self, record: dict[str, Any], path: str) -> dict[str, Any]:
        if len(record) > ATTR_CAP:
            raise GraphFormatError(f"{path}: {len(record)} attrs; at most {ATTR_CAP} are allowed")
        return {key: self.leaf(leaf, f"{path}.{key[:60]}") for key, leaf in record.items()}

    def leaf(self, leaf: object, path: str) -> Any:
        """One attr; nesting is bounded by `strict_json`."""
        if isinstance(leaf, list):
            return [self.leaf(item, f"{path}[{i}]") for i, item in enumerate(leaf)]
        if isinstance(leaf, dict):
            return self.tagged(leaf, path)
        if isinstance(leaf, str) and len(leaf) > STRING_CAP:
            raise GraphFormatError(f"{path}: a string of {len(leaf)} characters; at most {STRING_CAP} are allowed")
        return leaf

    def tagged(self, leaf: dict[str, Any], path: str) -> Any:
        """An object with one ``$`` key."""
        tag, body = next(iter(leaf.items())) if len(leaf) == 1 else ("", None)
        kind, read = self.tags.get(tag, ((), str))  # no type: never an instance
        if not isinstance(body, kind) or isinstance(body, bool):
            raise GraphFormatError(f"{path}: {_short(leaf)} is no value that a graph file holds")
        return read(body, f"{path}.{tag}")

    def sequence(self, body: list[Any], path: str) -> tuple[Any, ...]:
        return tuple(self.leaf(item, f"{path}[{i}]") for i, item in enumerate(body))

    @staticmethod
    def non_finite(body: str, path: str) -> float:
        if body not in ("inf", "-inf", "nan"):
            raise GraphFormatError(f"{path}: {_short(body)} is not inf, -inf or nan")
        return float(body)

    def complex(self, body: list[Any], path: str) -> complex:
        parts = self.sequence(body, path)
        if len(parts) != 2 or not all(type(part) in (int, float) for part in parts):
            raise GraphFormatError(f"{path}: expected two numbers, found {_short(body)}")
        return complex(*parts)

    def variable(self, label: str, path: str) -> Variable:
        if label not in self.variables:
            raise GraphFormatError(f"{path}: {_short(label)} is not in the table of variables")
        return self.variables[label]

    def queue(self, body: list[Any], path: str) -> Queue:
        """A queue of its own, empty; one for each number."""
        match body:
            case [int(number), str(name), int() | None as capacity, [_, *_] as parts, *more]:
                if number not in self.queues:
                    kinds = [self.component(part, f"{path}[3][{i}]") for i, part in enumerate(parts)]
                    kind, options = self.kind(more, path)
                    most = math.inf if capacity is None else capacity
                    self.queues[number] = Queue(name, most, kinds, kind=kind, options=options)
                return self.queues[number]
        raise GraphFormatError(f"{path}: expected number, name, capacity and components, found {_short(body)}")

    def kind(self, body: list[Any], path: str) -> tuple[str, dict[str, int | None]]:
        """The kind of a queue, and its options; nothing is said of one that is first in, first out."""
        match body:
            case []:
                return "fifo", {}
            case [str(kind), list(options)] if kind in QUEUES:
                found = {option[0]: option[1] for option in options if isinstance(option, list) and len(option) == 2}
                if (
                    len(found) == len(options)
                    and set(found) == QUEUES[kind].options
                    and all(value is None or type(value) is int for value in found.values())
                ):
                    return kind, found
        raise GraphFormatError(f"{path}: expected a kind of queue and its options, found {_short(body)}")

    def component(self, part: object, path: str) -> tuple[torch.dtype, tuple[int | None, ...] | None]:
        match part:
            case [str(dtype), None]:
                return self.constant(torch.dtype, dtype, path), None
            case [str(dtype), list(shape)] if all(size is None or type(size) is int for size in shape):
                return self.constant(torch.dtype, dtype, path), tuple(shape)
        raise GraphFormatError(f"{path}: expected a dtype and a shape, found {_short(part)}")

    def tensor(self, key: str, path: str) -> torch.Tensor:
        if key not in self.tensors:
            raise GraphFormatError(f"{path}: {_short(key)} is not among the constants")
        return self.tensors[key]

    def mapping(self, body: list[Any], path: str) -> dict[Any, Any]:
        try:
            return dict(self.sequence(body, path))
        except (TypeError, ValueError) as error:  # no pair, or a list as key
            if isinstance(error, GraphFormatError):
                raise
            raise GraphFormatError(f"{path}: expected a list of [key, value]") from error

    @staticmethod
    def device(name: str, path: str) -> torch.device:
        try:
            return numbered(torch.device(name))  # older files have no number
        except RuntimeError as error:
            raise GraphFormatError(f"{path}: {name[:60]!r} is no device") from error
