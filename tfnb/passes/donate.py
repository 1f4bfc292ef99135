"""Donation: a pointwise op writes into the memory of its first operand where nobody needs that any more.

The tag IN_PLACE says so; lowering takes the op's variant that writes. Semantics S-141. Nobody can see it: what is fed,
fetched, written or saved, Variables and constants are never written into, nor memory in which another living value
lies, nor what an op of another library saw, which may keep it, nor what is not made by an op of torch. Only ops of one
elementwise kernel, whose result lies in memory as the first operand does, so that later kernels find the same strides.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache
from typing import cast

import torch

from tfnb.graph import Graph, Node, Value
from tfnb.graph.op_facts import facts_of
from tfnb.graph.ops import CALL, IN_PLACE, REGIONS, overload
from tfnb.passes.liveness import Memory, first_operand
from tfnb.passes.rewrite import is_pure, with_nodes

LEAST = 64 << 10  # bytes; to allocate less costs no more than to write it
_ELEMENTWISE = frozenset({"aten.relu.default"})
"""Ops of one elementwise kernel that have only the variant that writes into the first operand."""


def donate(
    graph: Graph, fetches: Collection[Value] = (), feeds: Collection[Value] = (), *, least: int = LEAST
) -> Graph:  # fmt: skip
    """Nodes that may write into their first operand, of ``least`` bytes, get the tag IN_PLACE; the order is final."""
    memory = Memory(graph, fetches, feeds)
    last = memory.last()
    whole = _whole(graph, memory)
    seen = {
        owner for place, node in enumerate(graph.nodes) if not node.op.startswith("aten.") or _passes_on(node)
        for owner in (memory.made if _is_ours(node) else memory.touched)[place]
    }  # fmt: skip

    def gives(place: int, node: Node) -> bool:
        given = first_operand(node)
        if given is None or not is_pure(node) or given not in whole or overwriting(node.op) is None:
            return False
        owner = memory.owner[given]
        spec = graph.contents.by_id[given.node].outputs[given.index]
        others = (memory.owner.get(value) for value in node.inputs if value != given)
        return (
            memory.size[owner] >= least and last[owner] == place and owner not in memory.kept and owner not in seen
            and node.outputs == (spec,) and owner not in others
        )  # fmt: skip

    def tagged(place: int, node: Node) -> Node:
        tags = node.tags | {IN_PLACE} if gives(place, node) else node.tags - {IN_PLACE}  # a file may hold any tag
        return node if tags == node.tags else replace(node, tags=tags)

    return with_nodes(graph, [tagged(place, node) for place, node in enumerate(graph.nodes)])


def _whole(graph: Graph, memory: Memory) -> set[Value]:
    """Values that are all of a piece of memory that the step makes."""
    found: set[Value] = set()
    for node in graph.nodes:
        if not facts_of(node.op).whole_view:
            found.update(value for index in range(len(node.outputs)) if (value := node.value(index)) in memory.size)
        elif node.inputs[0] in found:
            found.add(node.value())
    return found


def _is_ours(node: Node) -> bool:
    """Whether the node's use of memory is known: ops of other libraries, loops and branches may return their inputs."""
    return node.op.startswith(("aten.", "tfnb.")) and not _passes_on(node)


def _passes_on(node: Node) -> bool:
    """Whether the node may return an input, unknown to its schema."""
    own = facts_of(node.op)
    return node.op in REGIONS or node.op == CALL or (own.unsaid_alias and not own.whole_view)


@cache
def overwriting(op: str) -> tuple[torch._ops.OpOverload, str | None] | None:
    """The overload that computes ``op`` into its first operand, and the keyword for the output if there is one.

    None where the op is no single elementwise kernel: those have a variant that writes into a tensor of the caller's.
    """
    functional = overload(op)
    if torch.Tag.pointwise not in functional.tags or not op.startswith("aten."):
        return None
    schema = functional._schema
    names = [argument.name for argument in schema.arguments]
    packet, inner = functional.overloadpacket, getattr(torch.ops.aten, f"{schema.name.partition('::')[2]}_", None)
    if op in _ELEMENTWISE and inner is not None:
        return cast(torch._ops.OpOverload, getattr(inner, functional._overloadname)), None
    for kind in packet.overloads():
        out = getattr(packet, kind)
        written = [a.name for a in out._schema.arguments if a.is_out]
        rest = [a.name for a in out._schema.arguments if not a.is_out]
        if len(written) == 1 and rest == names and torch.Tag.generated not in out.tags and _kinds(out, functional):
            same = getattr(inner, functional._overloadname, None) if inner is not None else None
            if same is not None and [a.name for a in same._schema.arguments] == names:
                return same, None
            return out, written[0]
    return None


def _kinds(out: torch._ops.OpOverload, functional: torch._ops.OpOverload) -> bool:
    """Whether the arguments have the same types."""
    types = [str(argument.type) for argument in functional._schema.arguments]
    return [str(argument.type) for argument in out._schema.arguments][: len(types)] == types
