"""Outputs of a branch: new memory, or an input unchanged. So an untaken side costs no copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfnb.graph import Node, Ref, Value
from tfnb.graph.op_facts import facts_of
from tfnb.graph.ops import overload
from tfnb.kernels.optim import FUSED


def passed_on(node: Node, places: Sequence[int], programs: Iterable[Any]) -> Mapping[int, tuple[Value, ...]]:
    """For outputs of a ``tfnb.cond`` that are new memory or an unchanged input: the possible inputs.

    programs: of both sides, each with the outputs it lacks, which are made.
    """
    found: dict[int, set[Value]] = {place: set() for place in places}
    for program, missing in programs:
        given = iter(program.fetches)
        for place in (place for place, lacks in zip(places, missing, strict=True) if not lacks):
            sources = _sources(next(given), program, node)
            if sources is None:
                found.pop(place, None)
            elif place in found:
                found[place].update(sources)
    return {place: tuple(sources) for place, sources in found.items()}


def _sources(value: Value, program: Any, node: Node) -> list[Value] | None:
    """The input that a side returns unchanged; none for new memory, None if unknown."""
    if value in program.feeds:
        operand = node.attrs["operands"][program.feeds.index(value)]
        return [node.inputs[operand.input]] if isinstance(operand, Ref) else None
    made = program.graph.contents.by_id.get(value.node)
    return [] if made is not None and _is_new(made) else None


def _is_new(node: Node) -> bool:
    """Whether an op's outputs are memory of their own."""
    if node.op in FUSED:
        return True
    if not node.op.startswith("aten.") or facts_of(node.op).shares_memory:
        return False
    schema = overload(node.op)._schema
    return not schema.is_mutable and all(each.alias_info is None for each in schema.returns)
