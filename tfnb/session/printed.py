"""The prints of a graph whose values a step computes or can derive.

A print is a group of values with text between them. It adds no node to the step: its values are further fetches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfnb.graph import Node, Ref, ops
from tfnb.passes.prune import StepGraph

PRINT = "print"  # attr of a group that is a print: text, and Refs of values
_OF_THE_STEP = frozenset({"tfnb.placeholder", "tfnb.read", "tfnb.assign", ops.CALL}) | ops.QUEUES


def printing(step: StepGraph) -> list[Node]:
    """The prints that take part in a step, in program order.

    A print takes part if the step needs nothing more for it than calculations that only prints use: no feed, no
    Variable, no queue, and no value of another computation.
    """
    prints = [node for node in step.whole.nodes if PRINT in node.attrs]
    free = step.graph.contents.by_id.keys() | (_only_printed(step) if prints else set())
    return [node for node in prints if step.also(node.inputs).graph.contents.by_id.keys() <= free]


def _only_printed(step: StepGraph) -> set[int]:
    """Nodes whose values nothing but prints takes, directly or through other such nodes."""
    found: set[int] = set()
    users: dict[int, list[int]] = {}
    for node in reversed(step.whole.nodes):  # takers stand behind what they take
        mine = users.get(node.id, [])
        is_free = node.op not in _OF_THE_STEP and (not mine or found.issuperset(mine))
        if PRINT in node.attrs or (mine and is_free):
            found.add(node.id)
        for before in (*(value.node for value in node.inputs), *node.control):
            users.setdefault(before, []).append(node.id)
    return found


def line(node: Node, values: Sequence[Any]) -> str:
    """The line of a print, formatted like Python's ``print``."""
    return " ".join(str(values[piece.input]) if isinstance(piece, Ref) else piece for piece in node.attrs[PRINT])
