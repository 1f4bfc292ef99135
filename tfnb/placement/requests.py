"""Whether the places there are meet what nodes ask for (``tfnb.device``), and which tasks a step runs on.

Pure; imports the graph. A kind of device is met where the node's values lie on it: tensors say where they are, a
request moves none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from tfnb.errors import InvalidArgument, Unimplemented
from tfnb.graph import Node
from tfnb.graph.device_request import Request, parse
from tfnb.graph.ops import QUEUES
from tfnb.graph.subgraph import nested

HERE = "this process"
_JOBS = (None, "worker", "localhost", "task")


class Asked(NamedTuple):
    """A node with a request."""

    node: Node
    request: Request


def asked(nodes: Iterable[Node]) -> tuple[Asked, ...]:
    """The nodes that ask for a place, also inside of loops and branches.

    A node that asks for a server and uses a queue says where the queue lies.

    >>> asked([Node(id=1, name="a", op="tfnb.group")])
    ()
    """
    every = (inner for node in nodes for inner in (node, *nested(node)))
    found = [Asked(node, parse(node.device)) for node in every if node.device is not None]
    return tuple(each for each in found if not (each.node.op in QUEUES and each.request.job == "ps"))


def numbers_of(tasks: Sequence[str]) -> list[int]:
    """The numbers of tasks of these names; this process is task 0.

    >>> numbers_of(["task:0", "task:2"]), numbers_of([HERE])
    ([0, 2], [0])
    """
    return [int(name.rpartition(":")[2]) if ":" in name else 0 for name in tasks]


def tasks_of(found: Sequence[Asked], tasks: Sequence[str] = (HERE,)) -> tuple[int, ...]:
    """The tasks that requests name, in order.

    ``tasks``: names of those there are. A soft request that none of them meets asks for nothing. Raises InvalidArgument
    for another that none of them meets, and Unimplemented for nodes on a parameter server.
    """
    chosen: set[int] = set()
    for each in found:
        node, request = each
        if request.job == "ps":
            raise Unimplemented(_said(each, "parameter servers compute updates only; ask for a task"), node=node.name)
        is_there = request.task is None or request.task in numbers_of(tasks)
        if not request.soft:
            if request.job not in _JOBS or request.replica not in (None, 0) or not is_there:
                raise InvalidArgument(_said(each, f"there are {', '.join(tasks)}"), node=node.name)
            _ensure_kind(each)
        if request.task is not None and is_there:
            chosen.add(request.task)
    return tuple(sorted(chosen))


def _ensure_kind(each: Asked) -> None:
    """Raise InvalidArgument where the node's values lie on another device."""
    node, request = each
    for spec in node.outputs if request.kind is not None else ():
        device = torch.device(spec.device)
        other = request.kind != "cpu" and request.number not in (None, device.index)
        if device.type != request.kind or other:
            raise InvalidArgument(
                _said(each, f"its value lies on {spec.device}; a tensor goes elsewhere with .to(device)"),
                node=node.name,
            )


def _said(each: Asked, why: str) -> str:
    node = each.node
    at = f"\n  recorded at {node.source}" if node.source else ""
    return f"could not satisfy explicit device specification {node.device!r} of node {node.name}: {why}{at}"
