"""The checker: the invariants of every graph, as a table of (name, predicate, message).

Runs at each commit of a recording and, under pytest, after each pass, so it is linear in nodes and quick: the
predicates look up facts that one sweep collected. The message says what is wrong, where, and what causes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from tfnb.errors import GraphCycleError, InvalidArgument, TfnbError
from tfnb.graph.contents import Contents
from tfnb.graph.node import Node, Ref
from tfnb.graph.ops import COND, QUEUES, REGIONS
from tfnb.graph.queue import Queue
from tfnb.graph.spec import Dim
from tfnb.graph.subgraph import Subgraph, row_places, subgraphs

NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")
SHOWN = 12  # nodes of a cycle that the message names
GATHERS = frozenset({"tfnb.group"})  # take inputs without naming them in attrs
STATEFUL = frozenset({"tfnb.read", "tfnb.assign", "tfnb.group"})  # never stand in a subgraph


def check(contents: Contents) -> None:
    """Raise InvalidArgument, or GraphCycleError with the path, for the first rule that ``contents`` breaks."""
    facts = _Facts(contents)
    for rule in RULES:
        holds = rule.holds
        for place, node in enumerate(contents.nodes):
            if not holds(node, place, facts):
                raise _error(rule, node, place, facts)
    _check_guards(contents, facts)
    _check_bindings(contents, facts)
    for node in contents.nodes:
        for subgraph in subgraphs(node):
            check(subgraph.contents)


class _Facts:
    """Facts for the predicates, collected in one sweep over the nodes."""

    def __init__(self, contents: Contents) -> None:
        nodes = contents.nodes
        self.contents = contents
        self.position = {node.id: place for place, node in enumerate(nodes)}
        self.outputs = {node.id: len(node.outputs) for node in nodes}
        self.first = {nodes[place].name: place for place in range(len(nodes) - 1, -1, -1)}
        self.unnamed = {node.name for node in nodes if not NAME.fullmatch(node.name)}
        self.used = [_used(node) for node in nodes]  # refs and sizes of each node
        sizes = {size for _, dims in self.used for size in dims}
        bound = contents.symbols.keys()
        self.unbound = {size for size in sizes if not bound >= set(size.symbols)}


def _used(node: Node) -> tuple[set[int], list[Dim]]:
    """Numbers of the inputs that the attrs refer to, and all symbolic sizes of attrs and outputs."""
    refs: set[int] = set()
    dims = [size for spec in node.outputs for size in spec.shape if type(size) is Dim]
    pending: list[Any] = list(node.attrs.values())
    for leaf in pending:  # grows while it is read
        kind = type(leaf)
        if kind is Ref:
            refs.add(leaf.input)
        elif kind is Dim:
            dims.append(leaf)
        elif kind is list or kind is tuple:
            pending.extend(leaf)
        elif kind is dict:
            pending.extend(leaf.values())
    return refs, dims


class Invariant(NamedTuple):
    """An invariant: ``holds(node, place, facts)`` must be true of every node; ``message`` names the fault and its
    cause.
    """

    name: str
    holds: Callable[[Node, int, _Facts], bool]
    message: Callable[[Node, int, _Facts], str]


def _earlier(node: Node, place: int, facts: _Facts) -> bool:
    position = facts.position
    for source, _ in node.inputs:  # plain loops: these two predicates are half the cost of the checker
        if position[source] >= place:
            return False
    return not node.control or all(position[i] < place for i in node.control)


def _inputs_known(node: Node, place: int, facts: _Facts) -> bool:
    outputs = facts.outputs
    for source, index in node.inputs:
        if not 0 <= index < outputs.get(source, 0) and not (
            node.op == "tfnb.group" and index == 0 and source in outputs  # a group of operations
        ):
            return False
    return True


def _refs_match(node: Node, place: int, facts: _Facts) -> bool:
    refs, count = facts.used[place][0], len(node.inputs)
    if not refs:
        return not count or node.op in GATHERS
    return len(refs) == count and min(refs) == 0 and max(refs) == count - 1


def _bad_input(node: Node, place: int, facts: _Facts) -> str:
    value = next(v for v in node.inputs if not 0 <= v.index < facts.outputs.get(v.node, 0))
    if value.node not in facts.outputs:
        return f"takes a value of node id {value.node}, which is not in the graph; re-run the cell that recorded it"
    owner = facts.contents.by_id[value.node].name
    return f"takes output {value.index} of node {owner}, which has {facts.outputs[value.node]} outputs"


def _bad_refs(node: Node, place: int, facts: _Facts) -> str:
    refs, count = facts.used[place][0], len(node.inputs)
    outside = sorted(refs - set(range(count)))
    if outside:
        return f"refers to input {outside[0]} in its attrs, but has {count} inputs"
    return f"has {count} inputs, but its attrs name only {sorted(refs)}"


def _later(node: Node, place: int, facts: _Facts) -> str:
    wanted = [*(value.node for value in node.inputs), *node.control]
    late = next(i for i in wanted if facts.position[i] >= place)
    return f"needs node {facts.contents.by_id[late].name}, which comes later in program order"


def _unbound(node: Node, place: int, facts: _Facts) -> str:
    size = next(size for size in facts.used[place][1] if size in facts.unbound)
    missing = next(symbol for symbol in size.symbols if symbol not in facts.contents.symbols)
    return f"uses the size {size}, but no value has an axis {missing}: feed a placeholder of that size"


def _misfit(node: Node) -> str:
    """Describe the misfit between a node and its subgraphs; empty if they fit."""
    attrs, count = node.attrs, len(node.outputs)
    try:
        if node.op == COND:
            parts, taken = {"then": count, "else": count}, len(attrs["operands"])
            given = {"then": taken, "else": taken}
        else:
            carried, captured = len(attrs["init"]), len(attrs["captures"])
            parts = {"body": carried + len(attrs["rows"])} | ({} if attrs["cond"] is None else {"cond": 1})
            given = {"body": carried + len(attrs["xs"]) + captured, "cond": carried + captured}
            wanted = carried + 1 + sum(map(len, row_places(attrs)))
            if count != wanted:
                return f"has {count} outputs, and its attrs tell of {wanted}"
    except (KeyError, TypeError) as error:
        return f"lacks the attr {error}, or has another there"
    return next(filter(None, (_ill_formed(attrs.get(part), part, given[part], parts[part]) for part in parts)), "")


def _ill_formed(subgraph: object, part: str, given: int, gives: int) -> str:
    if not isinstance(subgraph, Subgraph):
        return f"has no subgraph under {part!r}"
    contents = subgraph.contents
    if (len(subgraph.inputs), len(subgraph.outputs)) != (given, gives):
        found = f"{len(subgraph.inputs)} inputs and {len(subgraph.outputs)} outputs"
        return f"has a subgraph {part!r} with {found}; it needs {given} and {gives}"
    if {value.node for value in subgraph.inputs} != {node.id for node in contents.placeholders}:
        return f"has a subgraph {part!r} whose inputs are not its placeholders"
    for value in filter(None, subgraph.outputs):
        if value.node not in contents.by_id or not 0 <= value.index < len(contents.by_id[value.node].outputs):
            return f"has a subgraph {part!r} with an output that none of its nodes gives"
    state = next((inner for inner in contents.nodes if inner.op in STATEFUL), None)
    return "" if state is None else f"has a subgraph {part!r} with the node {state.name} ({state.op}), which has state"


RULES = (
    Invariant(
        "ids are unique",
        lambda node, place, facts: facts.position[node.id] == place,
        lambda node, place, facts: f"has the id {node.id} of another node; take ids from new_id()",
    ),
    Invariant(
        "names are well formed",
        lambda node, place, facts: node.name not in facts.unnamed,
        lambda node, place, facts: f"has a bad name; names match ^{NAME.pattern}$",
    ),
    Invariant(
        "names are unique",
        lambda node, place, facts: facts.first[node.name] == place,
        lambda node, place, facts: f"has the name of node number {facts.first[node.name]}; see contents.unique()",
    ),
    Invariant("inputs exist", _inputs_known, _bad_input),
    Invariant(
        "control inputs exist",
        lambda node, place, facts: not node.control or all(i in facts.position for i in node.control),
        lambda node, place, facts: (
            f"waits for node id {next(i for i in node.control if i not in facts.position)}, which is not in the graph"
        ),
    ),
    Invariant(
        "effects exist",
        lambda node, place, facts: not node.effects or all(i in facts.position for i in node.effects),
        lambda node, place, facts: (
            f"also runs node id {next(i for i in node.effects if i not in facts.position)}, which is not in the graph"
        ),
    ),
    Invariant("inputs come earlier", _earlier, _later),
    Invariant("attrs name every input", _refs_match, _bad_refs),
    Invariant(
        "subgraphs fit their node",
        lambda node, place, facts: node.op not in REGIONS or not _misfit(node),
        lambda node, place, facts: _misfit(node),
    ),
    Invariant(
        "queue operations name their queue",
        lambda node, place, facts: node.op not in QUEUES or isinstance(node.attrs.get("queue"), Queue),
        lambda node, place, facts: "names no queue; its attr 'queue' is one",
    ),
    Invariant(
        "placeholders take no inputs",
        lambda node, place, facts: node.op != "tfnb.placeholder" or (not node.inputs and len(node.outputs) > 0),
        lambda node, place, facts: (
            f"is a placeholder with {len(node.inputs)} inputs and {len(node.outputs)} outputs; it has outputs alone"
        ),
    ),
    Invariant(
        "symbols are bound",
        lambda node, place, facts: not facts.unbound or facts.unbound.isdisjoint(facts.used[place][1]),
        _unbound,
    ),
)


def _error(rule: Invariant, node: Node, place: int, facts: _Facts) -> TfnbError:
    source = f"\n  {node.source}" if node.source else ""
    where: dict[str, Any] = {"node": node.name, "op": node.op}
    if node.source:
        where |= {"cell": node.source.label, "line": node.source.line}
    cycle = find_cycle(facts.contents) if rule.name == "inputs come earlier" else ()
    if cycle:
        path = " -> ".join(cycle if len(cycle) <= SHOWN else (*cycle[: SHOWN - 1], "...", cycle[-1]))
        return GraphCycleError(f"node {node.name} depends on itself: {path}{source}", peers=cycle, **where)
    message = rule.message(node, place, facts)
    return InvalidArgument(f"node {node.name!r} ({node.op}) {message}{source}  [{rule.name}]", **where)


def find_cycle(contents: Contents) -> tuple[str, ...]:
    """Names along one cycle of inputs and control inputs, first = last; empty if there is none. Iterative."""
    by_id = contents.by_id
    done: set[int] = set()
    for root in by_id:
        path: dict[int, Any] = {}  # node id -> what is left of its inputs, in order of descent
        current: int | None = root
        while current is not None:
            if current not in path:
                node = by_id[current]
                path[current] = iter([*(value.node for value in node.inputs), *node.control])
            following = next((i for i in path[current] if i in by_id and i not in done), None)
            if following in path:
                ids = list(path)
                return tuple(by_id[i].name for i in [*ids[ids.index(following) :], following])
            if following is None:
                done.add(current)
                del path[current]
                following = next(reversed(path), None)
            current = following
        done.add(root)
    return ()


def _check_guards(contents: Contents, facts: _Facts) -> None:
    for guard in contents.guards:
        missing = [symbol for symbol in guard.symbols if symbol not in contents.symbols]
        if missing:
            raise InvalidArgument(f"guard {guard} uses {missing[0]}, but no value has an axis of that size")


def _check_bindings(contents: Contents, facts: _Facts) -> None:
    for name, value in ((name, value) for name, values in contents.bindings.items() for value in values):
        if not 0 <= value.index < max(1, facts.outputs.get(value.node, 0)) or value.node not in facts.outputs:
            raise InvalidArgument(f"the name {name!r} stands for {value}, which the graph does not have")
