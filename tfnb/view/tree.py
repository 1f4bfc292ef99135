"""Contents -> a tree of boxes: cell line, module path, torch function, ATen nodes.

A group is a run of neighbours that share a line, a pass or a scope, so the boxes of one level never depend on each
other in a circle. A box that holds one thing is merged with it, equal neighbours become one box xN, and a level that
is too long is cut into parts: every level can be laid out, and read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from tfnb.graph import Contents, Node, SourceLine
from tfnb.view import facts
from tfnb.view.box import Box
from tfnb.view.inside import ARGUMENT
from tfnb.view.repeats import fold_repeats

LEVEL = 60  # boxes of one level
PART = 40  # boxes of one part of a longer level


class PathStep(NamedTuple):
    """One step of the way from the root to a node."""

    kind: str
    label: str
    where: str = ""


class Item(NamedTuple):
    """A node and its way."""

    node: Node
    steps: tuple[PathStep, ...]


def tree(contents: Contents, *, cell: str | None = None) -> Box:
    """The root box of a graph; with ``cell`` (a label or an owner's key) other cells are one box each."""
    items = _ordered(contents, cell)
    children = _level([_collapse(box) for box in _group(items, 0)])
    return Box("root", "", tuple(item.node for item in items), tuple(children)).number()


# -- the way to a node ----------------------------------------------------------------------------------------


def _ordered(contents: Contents, cell: str | None) -> list[Item]:
    """Program order, but a read or constant before its first user and an optimizer's assign behind its update."""
    first_user = _first_users(contents)
    after: dict[int, list[Node]] = {}
    before: dict[int, list[Node]] = {}
    for node in contents.nodes:
        if node.op in facts.SMALL and node.id in first_user:
            before.setdefault(first_user[node.id], []).append(node)
        elif "step" in node.tags and node.inputs and node.inputs[0].node in contents.by_id:
            after.setdefault(node.inputs[0].node, []).append(node)
    moved = {node.id for nodes in (*before.values(), *after.values()) for node in nodes}

    def take(node: Node, steps: tuple[PathStep, ...]) -> list[Item]:
        around = [Item(small, steps) for small in before.get(node.id, ())]
        behind = [item for late in after.get(node.id, ()) for item in take(late, steps)]
        return [*around, Item(node, steps), *behind]

    items = (take(node, _steps(node, contents, cell)) for node in contents.nodes if node.id not in moved)
    return _adopted([item for taken in items for item in taken], contents)


def _adopted(items: list[Item], contents: Contents) -> list[Item]:
    """Place sums of partial gradients, without a forward node, beside their neighbouring gradients."""
    for place in range(1, len(items) - 1):
        node, before, behind = items[place].node, items[place - 1].steps, items[place + 1].steps
        if _is_sum(node, contents) and "gradient" in items[place - 1].node.tags:
            least = 1 + next(k for k, step in enumerate(before) if step.kind == "pass")
            shared = next((k for k, (a, b) in enumerate(zip(before, behind, strict=False)) if a != b), len(before) - 1)
            shared += before[shared].label.isdigit()  # an item of a Sequential or ModuleList keeps its own sums
            items[place] = Item(node, (*before[: max(least, shared)], PathStep("function", facts.label(node))))
    return items


def _is_sum(node: Node, contents: Contents) -> bool:
    sources = (contents.by_id.get(value.node) for value in node.inputs)
    return "gradient" in node.tags and node.forward is None and any(n and "gradient" in n.tags for n in sources)


def _first_users(contents: Contents) -> dict[int, int]:
    users: dict[int, int] = {}
    for node in contents.nodes:
        if node.op not in facts.SMALL:
            for value in node.inputs:
                users.setdefault(value.node, node.id)
    return users


def _steps(node: Node, contents: Contents, cell: str | None) -> tuple[PathStep, ...]:
    if node.op == "tfnb.placeholder":
        return ()
    steps = []
    if cell is not None and not _of_cell(node, cell):
        steps.append(PathStep("cell", node.source.label if node.source else "elsewhere"))
    if node.source:
        steps.append(_line(node.source))
    return (*steps, *_scopes(node, contents))


def _of_cell(node: Node, cell: str) -> bool:
    return cell in (node.source and node.source.label, node.owner and node.owner.key)


def _line(source: SourceLine) -> PathStep:
    where = f"{source.label}:{source.line}"
    return PathStep("line", source.text.strip(), where) if source.text.strip() else PathStep("line", where)


def _scopes(node: Node, contents: Contents) -> tuple[PathStep, ...]:
    """Steps below the line. A gradient goes under its forward node's scope, an update under its variable's name."""
    scope = node.scope
    if _is_update(node, contents):
        name = scope[0] if scope else "update"
        ways = [] if node.op == "tfnb.group" else [PathStep("scope", _updated(node, contents))]
        return (PathStep("pass", name), *ways, *(PathStep("function", part) for part in scope[1:]))
    if "gradient" in node.tags:
        inner = scope[1:] if scope and re.fullmatch(r"gradients(_\d+)?", scope[0]) else scope
        forward = contents.by_id.get(node.forward) if node.forward is not None else None
        depth = len(forward.scope) - 1 if forward else 0
        return (PathStep("pass", "gradients"), *_kinds(inner, depth))
    return _kinds(scope, len(scope) - 1)


def _kinds(scope: Sequence[str], modules: int) -> tuple[PathStep, ...]:
    """Steps of a scope path whose first ``modules`` parts are modules or name scopes."""
    return tuple(PathStep("scope" if place < modules else "function", part) for place, part in enumerate(scope))


def _is_update(node: Node, contents: Contents) -> bool:
    if node.op == "tfnb.group":
        return any("step" in contents.by_id[value.node].tags for value in node.inputs if value.node in contents.by_id)
    return bool(node.tags & {"update", "step"})


def _updated(node: Node, contents: Contents) -> str:
    users = (contents.by_id[user] for user in contents.consumers.get(node.value(), ()))
    return next((facts.variable_name(user) for user in (node, *users) if user.op == "tfnb.assign"), facts.label(node))


# -- grouping -------------------------------------------------------------------------------------------------


def _group(items: Iterable[Item], depth: int) -> list[Box]:
    """Runs of items with the same step at ``depth``; items whose way ends here are leaves."""
    boxes = []
    for step, run in groupby(items, lambda item: item.steps[depth] if len(item.steps) > depth else None):
        members = list(run)
        if step is None:
            boxes += [Box("op", facts.label(item.node), (item.node,)) for item in members]
        else:
            children = tuple(_group(members, depth + 1))
            boxes.append(Box(step.kind, step.label, tuple(item.node for item in members), children, where=step.where))
    return boxes


def _collapse(box: Box) -> Box:
    """Merge boxes that hold one thing, fold repeats and cut long levels, from the inside out."""
    if not box.children:
        return box
    children = [_collapse(child) for child in box.children]
    box.children = tuple(
        _level([part for child in children for part in (child.children if _is_fed(child) else [child])])
    )
    if len(box.children) == 1:
        return _merged(box, box.children[0])
    computing = [child for child in box.children if not _only_writes(child)]
    if box.kind == "scope" and len(computing) == 1 and computing[0].kind == "function" and not computing[0].is_module:
        box.detail = computing[0].title  # a batch norm also counts its batches
    return box


def _only_writes(box: Box) -> bool:
    """Whether all that is computed in a box is written to Variables there."""
    written = {value for node in box.nodes if node.op == "tfnb.assign" for value in node.inputs}
    return all(
        node.op in facts.STATE or {node.value(index) for index in range(len(node.outputs))} <= written
        for node in box.nodes
    )


def _is_fed(box: Box) -> bool:
    """Whether a group consists of a loop's or branch's arguments, with their constants and variables."""
    *others, last = box.children or (box,)
    return bool(others) and last.kind == "op" and last.node.op == ARGUMENT and all(each.is_small for each in others)


def _merged(outer: Box, inner: Box) -> Box:
    """Merge an only child with its parent: a line gives its code, a scope or pass its name."""
    if outer.kind in ("line", "cell"):
        inner.code, inner.where = inner.code or outer.title, inner.where or outer.where
        return inner
    if outer.kind == "scope":
        path = inner.kind == "scope" or inner.is_module
        title = f"{outer.title}/{inner.title}" if path and inner.times == 1 else outer.title
        inner.detail = inner.detail if path or inner.title == outer.title else inner.title
        inner.title, inner.is_module = title, True
        return inner
    if outer.kind == "pass" and inner.kind != "repeat" and inner.children:
        inner.kind = "pass"
    elif outer.kind == "function" and inner.kind == "op":
        inner.kind = "function"
    inner.title, inner.detail = outer.title, inner.detail if inner.kind == "repeat" else ""
    return inner


def _level(boxes: Sequence[Box]) -> Sequence[Box]:
    folded = fold_repeats(boxes)
    for box in folded:
        if box.kind == "repeat":
            box.children = tuple(_cut(box.children))
    return _cut(folded)


def _cut(boxes: Sequence[Box]) -> Sequence[Box]:
    """Parts of equal length for a level that is too long."""
    if len(boxes) <= LEVEL:
        return boxes
    count = min(PART, math.ceil(len(boxes) / PART))
    size = math.ceil(len(boxes) / count)
    return [_part(boxes[start : start + size], start, len(boxes)) for start in range(0, len(boxes), size)]


def _part(boxes: Sequence[Box], start: int, total: int) -> Box:
    nodes = tuple(node for box in boxes for node in box.nodes)
    title = f"{start + 1} to {start + len(boxes)} of {total}"
    return Box("part", title, nodes, tuple(_cut(boxes)), detail=f"{boxes[0].title} … {boxes[-1].title}")
