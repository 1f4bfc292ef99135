"""Words about nodes: labels, specs, arguments, sizes, and the lines of a tooltip."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch

from tfnb.errors import ShapeError
from tfnb.graph import Contents, Dim, Node, Ref, Spec, Value, Variable
from tfnb.graph.device_request import readable
from tfnb.widgets.escaping import shorten

SMALL = frozenset({"tfnb.read", "tfnb.constant"})  # drawn as small nodes, beside their first user
STATE = frozenset({"tfnb.read", "tfnb.assign"})
BATCH = 32  # what an axis that varies counts for in the thickness of an edge
MOST = 2**63  # bytes: a file may tell of any size
PREVIEW = 64  # numbers; tensor data beyond this never enters a page


def label(node: Node) -> str:
    """The short name of a node's operation.

    >>> label(Node(id=1, name="c", op="aten.convolution.default"))
    'convolution'
    """
    match node.op:
        case "tfnb.read" | "tfnb.assign":
            return variable_name(node)
        case "tfnb.constant":
            return constant(node)
        case "tfnb.placeholder":
            return node.name
        case "tfnb.argument":
            return node.name.rpartition("/")[2]
    parts = node.op.split(".")
    return parts[1] if len(parts) > 1 else node.op


def variable_name(node: Node) -> str:
    """Name of the Variable that a read or an assign touches."""
    variable = node.attrs.get("variable")
    return variable.name if isinstance(variable, Variable) else node.name


def constant(node: Node) -> str:
    """A constant's number, or the word ``constant``."""
    value = node.attrs.get("value")
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return f"{value.item():.6g}"
    return "constant"


def tone(node: Node) -> str:
    """The name of the colour of a node."""
    if node.op == "tfnb.placeholder":
        return "input"
    if node.op == "tfnb.read":
        return "variable"
    if node.op == "tfnb.constant":
        return "constant"
    if node.op == "tfnb.group" or "step" in node.tags:
        return "update"
    return next((tag for tag in ("update", "gradient") if tag in node.tags), "forward")


def is_densified(node: Node) -> bool:
    """Whether a node makes a row-sparse gradient dense."""
    return "densified" in node.tags


def specs(node: Node, places: Iterable[int]) -> str:
    """The short specs of these outputs: ``f32[B, 10]``."""
    return ", ".join(node.outputs[place].short() for place in places)


def short_name(node: Node) -> str:
    """The name of a distant node on a card: its given name, or the end of its scope."""
    if node.op == "tfnb.read":
        return variable_name(node)
    if node.op == "tfnb.constant":
        return constant(node)
    return given_name(node) or " ".join(node.scope[-2:]) or node.name


def given_name(node: Node) -> str:
    """The Python name the user gave a node's value, or nothing for a name that was made up."""
    stem = node.name.rstrip("0123456789").rstrip("_")
    made_up = {label(node).lstrip("_"), *node.scope, *node.op.split("."), *(part.lower() for part in node.scope)}
    return "" if {node.name, stem, stem.rpartition("/")[2]} & made_up else node.name


def bytes_of(out: Spec) -> int:
    """Bytes of a value, an axis that varies counted as `BATCH`."""
    return min(MOST, math.prod([_estimate(size) for size in out.shape]) * out.dtype.itemsize)


def _estimate(size: int | Dim) -> int:
    """A size, with `BATCH` for all varying axes; 1 for an expression without a value there."""
    try:
        return max(1, int(size.evaluate(dict.fromkeys(size.symbols, BATCH)))) if isinstance(size, Dim) else size
    except (ShapeError, OverflowError, ValueError):  # of a stranger's file; an infinity, or not a number
        return 1


def amount(count: float) -> str:
    """Bytes for people.

    >>> amount(37_632)
    '36.8 KB'
    """
    for unit in ("bytes", "KB", "MB", "GB"):
        if count < 1024 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def counts(contents: Contents) -> str:
    """``41 nodes · 8 variables · 2,410 parameters``."""
    variables = contents.variables.values()
    parameters = sum(math.prod(v.shape) for v in variables if v.trainable)
    words = [plural(len(contents.nodes), "node")]
    if contents.variables:
        words.append(plural(len(contents.variables), "variable"))
    if parameters:
        words.append(plural(parameters, "parameter"))
    return " · ".join(words)


def plural(count: int, noun: str) -> str:
    """``1 node``, ``1,200 nodes``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def arguments(node: Node, contents: Contents) -> str:
    """The call in the user's notation: ``x, weight, stride=[1, 1]``."""
    words = []
    for name, item in node.attrs.items():
        if name == "value" and isinstance(item, torch.Tensor):
            continue
        text = _argument(item, node, contents)
        words.append(text if isinstance(item, Ref) else f"{name}={text}")
    return ", ".join(words)


def _argument(item: object, node: Node, contents: Contents) -> str:
    match item:
        case Ref(input=place):
            return value_name(node.inputs[place], contents) if place < len(node.inputs) else "?"
        case Variable(name=name):
            return name
        case torch.Tensor():
            return "tensor"
        case torch.dtype():
            return str(item).removeprefix("torch.")
        case list() | tuple():
            return "[" + ", ".join(_argument(each, node, contents) for each in item) + "]"
        case Mapping():
            return "{" + ", ".join(f"{k}={_argument(v, node, contents)}" for k, v in item.items()) + "}"
    return str(item)


def value_name(value: Value, contents: Contents) -> str:
    """``split:1`` for the second output of ``split``."""
    node = contents.by_id.get(value.node)
    if node is None:
        return "?"
    stem = variable_name(node) if node.op == "tfnb.read" else contents.shown(node)
    return stem if value.index == 0 else f"{stem}:{value.index}"


def describe(node: Node, contents: Contents) -> list[str]:
    """Lines of a node's tooltip: name, op and arguments, specs, device, the quoted line."""
    lines = [contents.shown(node) if node.op != "tfnb.read" else f"variable {variable_name(node)}"]
    call = arguments(node, contents)
    lines.append(shorten(f"{node.op}({call})" if call else node.op, 160))
    lines += outputs(node)
    if node.op == "tfnb.constant":
        lines += preview(node.attrs.get("value"))
    if node.device:
        lines.append(f"on {readable(node.device)}")
    if node.scope and "/".join(node.scope) not in node.name:
        lines.append("in " + "/".join(node.scope))
    lines += quoted(node)
    return lines


def outputs(node: Node) -> Iterator[str]:
    """One line per output: its spec, and its bytes where they are known."""
    for place, out in enumerate(node.outputs):
        size = "" if out.symbols else f"  {amount(bytes_of(out))}"
        yield f"{f':{place} ' if len(node.outputs) > 1 else ''}{out.readable()}{size}"


def quoted(node: Node) -> list[str]:
    """The node's line in the user's code."""
    return [shorten(str(node.source), 160)] if node.source else []


def preview(value: object) -> list[str]:
    """The first numbers of a constant."""
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return []
    numbers = value.detach().flatten()[:8].tolist()
    more = ", …" if value.numel() > len(numbers) else ""
    return ["[" + ", ".join(map(number, numbers)) + more + "]"]


def number(item: object) -> str:
    """A number in at most six digits."""
    return f"{item:.6g}" if isinstance(item, float) else str(item)


def joined(words: Iterable[str], limit: int) -> str:
    """Words with commas, the rest counted.

    >>> joined(["a", "b", "c"], 2)
    'a, b +1'
    """
    unique = list(dict.fromkeys(words))
    rest = f" +{len(unique) - limit}" if len(unique) > limit else ""
    return ", ".join(unique[:limit]) + rest
