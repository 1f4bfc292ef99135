"""From a finished recording to new graph contents: pure functions.

Nodes of nothing but captured data that nobody can reach are dropped. The owner's earlier nodes are replaced in place,
with the letters of sizes that they had. Consumers in other cells are re-linked by name or become stale. So do
derivatives of what is not the same any more: a gradient stands on every node between, not only on those it uses.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tfnb.errors import StaleNode
from tfnb.graph import Contents, Guard, Node, Owner, Value
from tfnb.graph.device_request import map_groups
from tfnb.graph.node import leaves
from tfnb.graph.op_facts import facts_of
from tfnb.graph.subgraph import group_keys, map_nodes, uses_queues
from tfnb.recording.cells.size_letters import Letters, matched, substitute, unified_guards
from tfnb.recording.values.workspace import Derivative

_SOURCES = ("tfnb.placeholder", "tfnb.read", "tfnb.assign", "tfnb.group", "tfnb.guard")


def drop_unreachable_data(nodes: Iterable[Node], live: set[int]) -> list[Node]:
    """Without the nodes made of constants and factories alone that no kept node, by a size either, or live handle uses.

    A placeholder's sample is often cut out of a data set in the cell itself; the data set must not stay in the graph.
    """
    nodes = list(nodes)
    known = {node.id for node in nodes}
    real: set[int] = set()
    for node in nodes:
        earlier = any(v.node not in known or v.node in real for v in node.inputs)
        if node.op in _SOURCES or earlier or node.id in live or uses_queues(node):
            real.add(node.id)
    shown = {symbol: node.id for node in reversed(nodes) for spec in node.outputs for symbol in spec.symbols}
    needed: set[int] = set()
    for node in reversed(nodes):
        if node.id in real or node.id in needed:
            needed.add(node.id)
            needed.update(v.node for v in node.inputs)
            needed.update(node.control)
            needed.update(shown[symbol] for symbol in node.symbols if symbol in shown)
    return [node for node in nodes if node.id in needed]


@dataclass(frozen=True, slots=True)
class Replacement:
    """New contents, the nodes that are gone and why, the values that took the place of others.

    relinked: nodes of others that compute from such a value or have a size of the block. derivatives: those that still
    hold. letters: those of sizes that changed.
    """

    contents: Contents
    gone: dict[int, str]
    moved: Mapping[Value, Value]
    relinked: frozenset[int]
    derivatives: tuple[Derivative, ...]
    letters: Letters


def replaced(
    old: Contents, new: list[Node], guards: list[Guard], bindings: Mapping[str, tuple[Value, ...]], owner: Owner, *,
    append: bool, derivatives: Iterable[Derivative] = (), opaque: Container[int] = (), live: Container[int] = (),
    chosen: Collection[str] = (), assigned: Mapping[int, Mapping[str, int]],
) -> Replacement:  # fmt: skip
    """Contents with ``owner``'s block replaced by ``new``.

    The block keeps its place in program order unless it uses nodes recorded later. bindings: the values that it bound
    to names, which are the latest of these. derivatives: what was differentiated before. opaque: nodes that count as
    changed whenever their cell runs again. live: nodes that somebody holds. chosen: letters of sizes that the user
    gave. assigned: of nodes whose name is the user's, the names that their own cell assigned, with the numbers of their
    outputs. Raises StaleNode for a block that uses what is computed from its own earlier run.
    """
    mine = [] if append else [n for n in old.nodes if n.owner is not None and n.owner.key == owner.key]
    gone = {n.id: _replaced_text(n) for n in mine}
    others = [n for n in old.nodes if n.id not in gone]
    letters = matched(mine, new, old, others, chosen) if mine else Letters()
    new, guards = _lettered(new, letters.block), unified_guards(guards, letters.block)
    mine, others = _lettered(mine, letters.below), _lettered(others, letters.below)
    place = _place(old, others, mine, new)
    before, after = others[:place], others[place:]
    _refuse_circles(before, gone, old)
    moved = _relinked(mine, new, assigned)
    same = _same(mine, new, moved, opaque)
    before = [_regrouped(node, moved) for node in before]
    after = [_regrouped(_relink(node, moved), moved) for node in after]
    kept_by = {d.moved(moved): d.ways(old.nodes) for d in derivatives if d.nodes.isdisjoint(gone)}
    while True:
        after = _possible([*before, *new], after, gone, old)
        nodes = (*before, *new, *after)
        wrong = _wrong(kept_by, nodes, same) if mine else []
        if not wrong:
            break
        for derivative in wrong:
            del kept_by[derivative]
            changed = f"what it differentiates was changed when {_label(mine[0])} ran again"
            gone |= {n.id: _dropped_text(n, changed) for n in after if n.id in derivative.nodes}
    gone |= _left_behind(after, gone, old, live)
    nodes = tuple(n for n in nodes if n.id not in gone)
    lost = {owner.key, *_owners(old.nodes)} - _owners(nodes)
    kept_guards = unified_guards(
        (g for g in old.guards if append or g.owner is None or g.owner.key not in {owner.key, *lost}), letters.below
    )
    ids = {n.id for n in nodes}
    contents = Contents(nodes, (*kept_guards, *guards), _bound(old.bindings, moved, bindings, ids))
    relinked = _downstream(after, {v.node for v in moved.values()}, _symbols(mine))
    return Replacement(contents, gone, moved, relinked, tuple(kept_by), letters)


def _bound(
    before: Mapping[str, tuple[Value, ...]], moved: Mapping[Value, Value], now: Mapping[str, tuple[Value, ...]],
    ids: Container[int],
) -> dict[str, tuple[Value, ...]]:  # fmt: skip
    """The values of each name in order of execution: values of existing nodes, each at its last position.

    A name that another cell bound to a replaced value means the new one, as a node of that cell uses the new one.
    """
    found = {}
    for name in dict.fromkeys((*before, *now)):
        latest = now.get(name, ())
        earlier = (moved.get(value, value) for value in before.get(name, ()))
        values = (*(value for value in earlier if value not in latest), *latest)
        if kept := tuple(value for value in dict.fromkeys(values) if value.node in ids):
            found[name] = kept
    return found


def _lettered(nodes: Sequence[Node], letters: Mapping[str, str]) -> list[Node]:
    return [substitute(node, letters) for node in nodes] if letters else list(nodes)


def _owners(nodes: Iterable[Node]) -> set[str]:
    return {node.owner.key for node in nodes if node.owner is not None}


def _symbols(nodes: Iterable[Node]) -> set[str]:
    return {symbol for node in nodes for spec in node.outputs for symbol in spec.symbols}


def _left_behind(after: Iterable[Node], gone: Mapping[int, str], old: Contents, live: Container[int]) -> dict[int, str]:
    """Nodes that served dropped nodes alone, such as reads of variables, with the reason of one dropped consumer."""
    left: dict[int, str] = {}
    for node in reversed(list(after)):
        users = [at for i in range(len(node.outputs)) for at in old.consumers.get(Value(node.id, i), ())]
        is_held = node.id in live and node.op != "tfnb.read"  # a recording holds reads until the collector comes
        is_kept = is_held or node.op in ("tfnb.placeholder", "tfnb.assign") or uses_queues(node)
        if users and not is_kept and all(_is_gone_too(old.by_id[at], node, gone, left) for at in users):
            left[node.id] = gone.get(users[0]) or left[users[0]]
    return left


def _is_gone_too(user: Node, node: Node, gone: Container[int], left: Container[int]) -> bool:
    """Whether a node of the same cell was dropped."""
    return user.owner == node.owner and (user.id in gone or user.id in left)


def _refuse_circles(before: list[Node], gone: Container[int], old: Contents) -> None:
    """Raise StaleNode if an operand of the block depends on a node replaced by the block."""
    for node in before:
        for at in (*(v.node for v in node.inputs), *node.control):
            if at in gone:
                raise StaleNode(
                    f"{_label(old.by_id[at])} now uses what {_label(node)} recorded, and {node.name} of "
                    f"{_label(node)} is computed from {old.by_id[at].name}, which this run replaces: give the results "
                    f"of one of them other names in a cell below both"
                )


def _possible(before: list[Node], after: list[Node], gone: dict[int, str], old: Contents) -> list[Node]:
    """The nodes of ``after`` whose operands all exist; the others join ``gone``."""
    available = {n.id for n in before}
    bound = {s for n in (*before, *after) if n.op == "tfnb.placeholder" for s in n.outputs[0].symbols}
    kept: list[Node] = []
    for node in after:
        if node.id in gone:
            continue
        bound.update(s for spec in node.outputs for s in spec.symbols if s not in node.symbols)
        missing = next((i for i in (*(v.node for v in node.inputs), *node.control) if i not in available), None)
        missing = next((i for i in node.effects if i in gone), missing)
        missing = next((i for i in map(int, filter(str.isdecimal, group_keys(node))) if i in gone), missing)
        if missing is not None:
            gone[node.id] = (
                gone[missing] if old.by_id[missing].owner == node.owner else _missing_text(node, old, missing)
            )
        elif not bound.issuperset(node.symbols):
            sizes = ", ".join(sorted(set(node.symbols) - bound))
            gone[node.id] = _dropped_text(node, f"it uses the size {sizes}, which no placeholder has any more")
        else:
            available.add(node.id)
            kept.append(node)
    if any(i in gone for node in kept for i in node.effects):  # effects may stand behind their node
        return _possible(before, kept, gone, old)
    return kept


def _wrong(
    kept: Mapping[Derivative, frozenset[int]], nodes: Sequence[Node], same: Mapping[int, int]
) -> list[Derivative]:
    """The derivatives whose ys no longer depend on their xs by the same nodes."""
    return [derivative for derivative, ways in kept.items() if derivative.ways(nodes) != {same.get(i, i) for i in ways}]


def _downstream(nodes: list[Node], ids: set[int], symbols: set[str]) -> frozenset[int]:
    """The nodes that compute from values of ``ids``, or have a size of ``symbols``."""
    found: set[int] = set()
    for node in nodes:
        if any(v.node in ids or v.node in found for v in node.inputs) or symbols.intersection(node.symbols):
            found.add(node.id)
    return frozenset(found)


def _label(node: Node) -> str:
    return node.source.label if node.source else "a cell"


def _replaced_text(node: Node) -> str:
    return (
        f"node {node.name} was recorded by an earlier run of {_label(node)}; that cell has been run again or removed "
        "since: use what its last run gave"
    )


def _dropped_text(node: Node, why: str) -> str:
    return f"node {node.name} of {_label(node)} was dropped because {why}; run {_label(node)} again"


def _missing_text(node: Node, old: Contents, missing: int) -> str:
    lost, is_operand = old.by_id[missing], str(missing) not in group_keys(node)
    how = "uses" if is_operand else "is colocated with"
    return _dropped_text(node, f"it {how} {lost.name} of {_label(lost)}, which is not recorded any more")


def _relinked(
    mine: list[Node], new: list[Node], assigned: Mapping[int, Mapping[str, int]]
) -> dict[Value, Value]:  # fmt: skip
    """Old value -> new value for nodes of the same name and specs; of the same op, too, unless the name is the user's.

    assigned: of nodes whose name is the user's, all names that were assigned to them.
    """
    fresh = {n.name: n for n in new}
    moved: dict[Value, Value] = {}
    for node in mine:
        twin = fresh.get(node.name)
        if twin is None or twin.outputs != node.outputs:
            continue
        before, now = assigned.get(node.id), assigned.get(twin.id)
        agrees = before is not None and now is not None and before.items() <= now.items()
        if twin.op == node.op or (agrees and _is_plain(node) and _is_plain(twin)):
            moved.update({Value(node.id, i): Value(twin.id, i) for i in range(max(1, len(node.outputs)))})
    return moved


def _is_plain(node: Node) -> bool:
    """Whether a node allocates its outputs: a write into them reaches no other value."""
    return node.op.startswith("aten.") and not facts_of(node.op).shares_memory


def _same(mine: list[Node], new: list[Node], moved: Mapping[Value, Value], opaque: Container[int]) -> dict[int, int]:
    """Old id -> new id for nodes that a derivative cannot tell apart: same op, arguments and inputs."""
    fresh = {n.id: n for n in new}
    same: dict[int, int] = {}
    for node in mine:
        twin = fresh.get(moved.get(Value(node.id), Value(node.id)).node)
        if twin is None or twin.op != node.op or node.id in opaque or node.tags != twin.tags:
            continue
        inputs = tuple(Value(same.get(v.node, v.node), v.index) for v in node.inputs)
        if inputs == twin.inputs and _equal(node.attrs, twin.attrs):
            same[node.id] = twin.id
    return same


def _equal(one: object, other: object) -> bool:
    """Whether two trees of arguments are equal; of constants only the kind counts."""
    pairs = list(zip(leaves(one), leaves(other), strict=False))
    return len(pairs) == len(list(leaves(one))) == len(list(leaves(other))) and all(
        isinstance(b, torch.Tensor) if isinstance(a, torch.Tensor) else type(a) is type(b) and (a is b or a == b)
        for a, b in pairs
    )


def _relink(node: Node, moved: Mapping[Value, Value]) -> Node:
    if not any(v in moved for v in node.inputs) and not any(Value(c) in moved for c in node.control):
        return node
    return replace(
        node,
        inputs=tuple(moved.get(v, v) for v in node.inputs),
        control=tuple(moved.get(Value(c), Value(c)).node for c in node.control),
        forward=node.forward if node.forward is None else moved.get(Value(node.forward), Value(node.forward)).node,
    )


def _regrouped(node: Node, moved: Mapping[Value, Value]) -> Node:
    """The node in the colocation groups of what took the place of replaced nodes."""
    keys = (key for key in group_keys(node) if key.isdecimal())
    now = {key: str(moved[Value(int(key))].node) for key in keys if Value(int(key)) in moved}

    def changed(each: Node) -> Node:
        return replace(each, device=map_groups(each.device, lambda name, key: f"{name}#{now.get(key, key)}"))

    return map_nodes(changed, node) if now else node


def _place(old: Contents, others: list[Node], mine: list[Node], new: list[Node]) -> int:
    """Position of the block among the other nodes: its old position, or after the last operand."""
    if not mine:
        return len(others)
    first = old.position[mine[0].id]
    place = sum(old.position[n.id] < first for n in others)
    used = {v.node for n in new for v in n.inputs} | {c for n in new for c in n.control}
    last = max((i for i, n in enumerate(others) if n.id in used), default=-1)
    return max(place, last + 1)
