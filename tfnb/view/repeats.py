"""Equal neighbours become one box xN: the layers of a transformer, the updates of all variables, an unrolled loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfnb.graph import Dim, Node
from tfnb.graph.node import leaves
from tfnb.view.box import Box

FEWEST = 3  # blocks
PERIOD = 8  # boxes of one block


def fold_repeats(boxes: Sequence[Box]) -> list[Box]:
    """The boxes with each run of equal blocks replaced by one box of kind ``repeat``."""
    if len(boxes) < FEWEST:
        return list(boxes)
    known: dict[Any, int] = {}
    marks = [known.setdefault(_signature(box.nodes), len(known)) for box in boxes]
    folded, place = [], 0
    while place < len(boxes):
        period, times = _longest(marks, place)
        run = boxes[place : place + max(1, period * times)]
        if times and sum(len(box.nodes) for box in run) > times:  # more than one node in a block
            folded.append(_repeat(run, period, times))
        else:
            folded += run
        place += len(run)
    return folded


def _longest(marks: Sequence[int], start: int) -> tuple[int, int]:
    """Period and count of the repetition at ``start`` that covers most boxes; (0, 0) without one."""
    best = (0, 0)
    for period in range(1, min(PERIOD, (len(marks) - start) // FEWEST) + 1):
        block = marks[start : start + period]
        times = 1
        while marks[start + times * period : start + (times + 1) * period] == block:
            times += 1
        if times >= FEWEST and times * period > best[0] * best[1]:
            best = (period, times)
    return best


def _repeat(run: Sequence[Box], period: int, times: int) -> Box:
    blocks = [run[at : at + period] for at in range(0, len(run), period)]
    children = [block[0] if period == 1 else _block(block) for block in blocks]
    first, last = children[0].title, children[-1].title
    title = first if first == last else f"{first} … {last}"
    return Box("repeat", title, _nodes(run), tuple(children), detail=children[0].detail, times=times)


def _block(boxes: Sequence[Box]) -> Box:
    title = ", ".join(box.title for box in boxes[:3]) + (" …" if len(boxes) > 3 else "")
    return Box("part", title, _nodes(boxes), tuple(boxes))


def _nodes(boxes: Sequence[Box]) -> tuple[Node, ...]:
    return tuple(node for box in boxes for node in box.nodes)


def _signature(nodes: Sequence[Node]) -> tuple[Any, ...]:
    """The signature shared by equal blocks: ops, arguments, specs and wiring. Updates are equal at all shapes."""
    place = {node.id: index for index, node in enumerate(nodes)}
    sized = not any("update" in node.tags for node in nodes)
    return tuple(
        (
            node.op,
            tuple((place[v.node], v.index) if v.node in place else None for v in node.inputs),
            tuple(leaf for leaf in leaves(node.attrs) if isinstance(leaf, (str, int, float, Dim))),
            node.outputs if sized else None,
        )
        for node in nodes
    )
