"""``tfnb.colocate_with``: nodes at the place of another node or of a Variable.

A node asks for that in its device request (`tfnb.graph.device_request`); `tfnb.graph.colocation_groups` merges these
requests.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tfnb.errors import InvalidArgument, NotFound
from tfnb.graph import Node, Variable
from tfnb.graph.device_request import DeviceRequest, nested, parse, readable, with_group, without_groups
from tfnb.recording.api import open_recorder, value_in
from tfnb.recording.dispatch.recorder import Recorder
from tfnb.recording.values.tensor import Operation, Tensor


@contextmanager
def colocate_with(target: object) -> Iterator[None]:
    """Nodes recorded inside are done at the place of another node, or of the reads and writes of a Variable.

    target: a recorded tensor, an Operation, a Variable, a Parameter, or the name of a node or Variable. None: nodes
    inside are in no colocation group of the scopes around. Nested scopes join their groups.

    A group has one request, that of its members and of `device` merged field by field, wherever they say it; a run
    raises InvalidArgument where hard requests contradict each other, naming the members and their lines. A group
    that asks for nothing is placed as a whole, by `tfnb.place` or beside its first member's operands. Nodes of
    gradients go with their forward nodes. A Variable that is made inside lies on the server of the ``target``
    Variable. A target that its cell records again stays the target; without it, what was recorded inside is stale.

    Raises FailedPrecondition outside of a recording, NotFound for a name that is not there, InvalidArgument for a
    tensor that is not of this graph and for a Variable made elsewhere than the scopes around ask for.

    >>> import torch, tfnb
    >>> with tfnb.record() as graph:
    ...     x = tfnb.placeholder(torch.ones(2))
    ...     with tfnb.device("task:1"):
    ...         h = x.exp()
    ...     with tfnb.colocate_with(h):
    ...         y = x * 2
    >>> str(graph.why(y)).splitlines()[0]
    'y is done at task:1: colocated with h, which asks for task:1'
    """
    recorder = open_recorder("colocate_with")
    outer = recorder.tape.marks.device
    with recorder.placed(without_groups(outer) if target is None else nested(_beside(target, recorder), outer)):
        yield


def _beside(target: object, recorder: Recorder) -> str:
    """The request to be with a target. Raises InvalidArgument for a Variable that was made elsewhere than here."""
    found = _named(target, recorder) if isinstance(target, str) else target
    if isinstance(found, torch.Tensor) and not isinstance(found, Tensor):
        found = recorder.variable_of(found)
    if isinstance(found, (Tensor, Operation)) and found.graph is not recorder.graph:
        raise InvalidArgument(
            f"colocate_with: {found.name} is of graph {found.graph.name}, and this recording is of another one, "
            f"{recorder.graph.name}{recorder.tape.at()}"
        )
    if isinstance(found, (Tensor, Operation)):
        found = recorder.node(value_in(found, recorder).node)
    if isinstance(found, Node):
        if found.id not in recorder.tape.by_id:
            where = recorder.graph.stale.get(found.id, f"it is not in graph {recorder.graph.name}")
            raise InvalidArgument(f"colocate_with: node {found.name}: {where}{recorder.tape.at()}")
        if "variable" not in found.attrs:
            return with_group(found.name, found.id)
        found = found.attrs["variable"]  # a read or write of it
    if not isinstance(found, Variable):
        raise InvalidArgument(
            "colocate_with takes a recorded tensor, an Operation, a Variable, a Parameter, the name of one of these, "
            f"or None, not {target!r:.60}{recorder.tape.at()}"
        )
    return _made_at(found, recorder)


def _named(name: str, recorder: Recorder) -> Node | Variable:
    """The node or Variable with a name; of this recording, else of earlier ones."""
    nodes, contents = recorder.tape.by_id, recorder.graph.contents
    mine = {node.name: node for node in recorder.tape.new}
    meant = contents.names.get(name)
    found: Node | Variable | None = mine.get(name) or (None if meant is None else nodes.get(meant.node))
    variables = [node.attrs["variable"] for node in nodes.values() if node.op == "tfnb.read"]
    found = found or next((each for each in variables if each.name == name), None)
    if found is None:
        names = [*mine, *contents.names, *(each.name for each in variables)]
        near = difflib.get_close_matches(name, names, 3)
        hint = f"; near: {', '.join(near)}" if near else ""
        raise NotFound(
            f"colocate_with: graph {recorder.graph.name} has no node {name[:60]!r}{hint}; a Python name of this block "
            f"is one for the blocks below: give the value itself{recorder.tape.at()}"
        )
    return found


def _made_at(variable: Variable, recorder: Recorder) -> str:
    """The request to be with a Variable, and where it was made to lie."""
    group, outer = with_group(variable.name, variable.key), recorder.tape.marks.device
    if variable.request is None:
        return group
    mine, around = parse(variable.request), parse(outer) if isinstance(outer, str) else DeviceRequest()
    if not mine.agrees(around) and not (mine.soft or around.soft):
        raise InvalidArgument(
            f"colocate_with: variable {variable.name} was made under {readable(variable.request)!r}, and the scopes "
            f"around ask for {readable(str(around))!r}{recorder.tape.at()}"
        )
    if mine.soft and not mine.agrees(around):
        return group
    found = nested(group, variable.request)
    assert isinstance(found, str)
    return found
