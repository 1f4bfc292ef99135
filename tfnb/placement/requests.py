"""Whether the available places meet the requests of nodes (``tfnb.device``), and the tasks that a step runs on.

A server holds Variables and computes their updates. A request for one of a node that reads or writes a Variable says
where that lies; one of another node is met where the step's cut has it done there (`tfnb.placement.partition`).

Pure; imports the graph. A kind of device is met where the node's values lie on it: tensors say where they are, a
request moves none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from tfnb.errors import InvalidArgument, Unimplemented
from tfnb.graph import Node, Variable
from tfnb.graph.device_request import DeviceRequest, parse, readable
from tfnb.graph.ops import QUEUES
from tfnb.graph.subgraph import subgraphs, with_inner
from tfnb.passes.flow.places import Place
from tfnb.placement.placement import Homes, server

HERE = "this process"
_JOBS = (None, "worker", "localhost", "task")
_STATE = ("tfnb.read", "tfnb.assign")
_ANYWHERE = (*QUEUES, *_STATE, "tfnb.constant", "tfnb.group")  # for these a server is no place that computes


class NodeRequest(NamedTuple):
    """A node with a request."""

    node: Node
    request: DeviceRequest


def asked(nodes: Iterable[Node]) -> tuple[NodeRequest, ...]:
    """The nodes that ask for a place, also inside of loops, branches and recursive functions.

    A node that asks for a server and uses a queue or Variable says where that lies.

    >>> asked([Node(id=1, name="a", op="tfnb.group")])
    ()
    """
    found = [NodeRequest(node, parse(node.device)) for node in with_inner(nodes) if node.device is not None]
    found = [each for each in found if each.request.has_place]  # a colocation group may ask for nothing
    return tuple(each for each in found if not (each.node.op in _ANYWHERE and each.request.job == "ps"))


def numbers_of(tasks: Sequence[str]) -> list[int]:
    """The numbers of the named tasks; this process is task 0.

    >>> numbers_of(["task:0", "task:2"]), numbers_of([HERE])
    ([0, 2], [0])
    """
    return [int(name.rpartition(":")[2]) if ":" in name else 0 for name in tasks]


def tasks_of(found: Sequence[NodeRequest], tasks: Sequence[str] = (HERE,), servers: int = 0) -> tuple[int, ...]:
    """The tasks that requests name, in order.

    ``tasks``: names of the existing tasks; ``servers``: the number of parameter servers. A soft request that nothing
    here meets is ignored; any other one raises InvalidArgument.
    """
    chosen: set[int] = set()
    there = ", ".join([*tasks, *(str(server(shard)) for shard in range(servers))])
    for each in found:
        node, request = each
        if request.job == "ps":
            if not request.soft and (request.task or 0) >= servers:
                text = f"there are {there}: connect with ps={(request.task or 0) + 1}, or ask with soft=True"
                raise InvalidArgument(_said(each, text), node=node.name)
            continue
        is_there = request.task is None or request.task in numbers_of(tasks)
        if not request.soft:
            if request.job not in _JOBS or request.replica not in (None, 0) or not is_there:
                how = ": connect a cluster, or ask with soft=True" if HERE in tasks else ""
                raise InvalidArgument(_said(each, f"there are {there}{how}"), node=node.name)
            _ensure_kind(each)
        if request.task is not None and is_there:
            chosen.add(request.task)
    return tuple(sorted(chosen))


def ensure_stages(found: Sequence[NodeRequest], tasks: Sequence[str], replicas: int = 1) -> None:
    """Raise InvalidArgument where nodes do not ask for two tasks at least, the stages of a pipeline.

    Or where there are too few for each stage of each of several replicas, which soft requests would drop. tasks: names
    of those there are.
    """
    asked_for = _stages(found)
    if len(asked_for) < 2:
        some = f"all that do ask for task:{asked_for[0]}" if asked_for else "none of its nodes asks for a task"
        raise InvalidArgument(
            f"mode='pipeline' takes a step in stages, and {some}: record each stage inside of "
            "tfnb.device('task:0'), tfnb.device('task:1') ..., let tfnb.place(step, stages=2) choose, or use another "
            "mode"
        )
    needed, there = 1 + asked_for[-1], len(tasks)
    if replicas > 1 and not {*range(needed)} <= {*numbers_of(tasks)}:
        stages = needed // replicas
        fewer = there // stages
        remedy = f"or use replicas={fewer}" if fewer > 1 else "or leave out replicas"
        raise InvalidArgument(
            f"replicas={replicas} of {stages} stages take {needed} tasks, one for each stage of each replica, and "
            f"there are {there} ({', '.join(tasks)}): connect({needed}), {remedy}"
        )


def _stages(found: Sequence[NodeRequest]) -> list[int]:
    """The numbers of the tasks that nodes ask for."""
    return sorted({each.request.task for each in found if each.request.job != "ps" and each.request.task is not None})


def idle_tasks(found: Sequence[NodeRequest], tasks: Sequence[str], replicas: int = 1) -> str:
    """What to say of tasks that have no stage of a pipeline; empty where each one has.

    found: of all its replicas. tasks: names of those there are.
    """
    stages, numbers = _stages(found), numbers_of(tasks)
    idle = [f"task:{number}" for number in sorted(numbers) if number not in stages]
    if not idle:
        return ""
    each = len(stages) // replicas
    more = len(numbers) // each if each else 0
    cure = f"; replicas={more} gives {more * each} of them work" if more > replicas else ""
    have = "have no stage of this pipeline and are" if len(idle) > 1 else "has no stage of this pipeline and is"
    return f"{', '.join(idle)} {have} idle: {len(numbers)} tasks, {len(stages)} stages{cure}"


def ensure_on_servers(
    found: Sequence[NodeRequest], places: Mapping[int, Sequence[Place]], undivided: str | None
) -> None:
    """Raise Unimplemented for the first node that asks for a server and is not done there.

    places: of each node, by its id (`tfnb.placement.placement.Placement`); undivided: as of
    `tfnb.placement.partition.Split`.
    """
    has_updates = any(place.job == "ps" for each in places.values() for place in each)
    for each in found:
        node, request = each
        if request.job != "ps" or request.soft:
            continue
        servers = [place for place in places.get(node.id, ()) if place.job == "ps"]
        if servers and (request.task is None or server(request.task) in servers):
            continue
        if node.id not in places or [*subgraphs(node)]:
            why = "loops and branches, and what is inside of them, are done by tasks"
        elif servers:
            why = f"it is done where the Variable lies that it updates, at {', '.join(map(str, servers))}"
        elif undivided is not None and not has_updates:
            why = f"one task does all of the step: {undivided}"
        else:
            why = (
                "a server computes updates of the Variables that it holds whole, by optimizers or number by number, "
                "from the value before to the one after; ask for a task, or for soft=True"
            )
        raise Unimplemented(_said(each, why), node=node.name)


class _Wish(NamedTuple):
    """A server requested for a Variable, and a text with the source of the request."""

    shard: int
    who: str


def shards_asked(
    nodes: Iterable[Node], groups: Iterable[Sequence[Variable]], held: Homes, servers: int
) -> dict[Variable, int]:
    """The requested shard of each Variable, by a request at its making, or by nodes that read or write the Variable.

    groups: Variables that lie together; held: where they lie already. Raises InvalidArgument for requests that
    contradict each other or ``held``, naming both lines, or that ask for a server that is not there.
    """
    wishes: dict[Variable, list[_Wish]] = {}
    variables = [variable for group in groups for variable in group]
    asking = [
        (v, v.request, f"{v.name} was made under {readable(v.request)!r}") for v in variables if v.request is not None
    ]
    for node in nodes:
        if node.op in _STATE and node.device is not None:
            at = f" at {node.source}" if node.source else ""
            asking.append((node.attrs["variable"], node.device, f"{node.name} asks for {readable(node.device)!r}{at}"))
    for variable, text, who in asking:
        request = parse(text)
        if request.job != "ps" or request.task is None or (request.soft and request.task >= servers):
            continue
        if request.task >= servers:
            there = ", ".join(str(server(shard)) for shard in range(servers))
            raise InvalidArgument(
                f"variable {variable.name} cannot lie on {server(request.task)}: {who}, and there are {there}; connect "
                f"with ps={request.task + 1}, or ask with soft=True"
            )
        wishes.setdefault(variable, []).append(_Wish(request.task, who))
    found: dict[Variable, int] = {}
    for group in groups:
        all_of_it = [wish for variable in group for wish in wishes.get(variable, ())]
        lies = [
            _Wish(piece.shard, f"{variable.name} lies on {server(piece.shard)} already")
            for variable in group for piece in held.get(variable.key, ())
        ]  # fmt: skip
        if not all_of_it:
            continue
        first = all_of_it[0]
        other = next((wish for wish in (*all_of_it, *lies) if wish.shard != first.shard), None)
        if other is not None:
            names = ", ".join(variable.name for variable in group)
            raise InvalidArgument(f"{names}: what is updated together lies together; {first.who}, and {other.who}")
        found |= dict.fromkeys(group, first.shard)
    return found


def _ensure_kind(each: NodeRequest) -> None:
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


def _said(each: NodeRequest, why: str) -> str:
    node = each.node
    at = f"\n  recorded at {node.source}" if node.source else ""
    return f"could not satisfy explicit device specification {readable(node.device)!r} of node {node.name}: {why}{at}"
