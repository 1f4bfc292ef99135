"""Through which inputs of a node a gradient passes to which outputs: of branches and loops, through their subgraphs.

Plain torch has no gradient of a Parameter that a loop or branch uses only where none passes: detached, in a comparison,
in its condition, or in a value that the loss does not use.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakKeyDictionary

from tfnb.gradients.rule_table import NOGRAD, RULES
from tfnb.graph import Node, Ref, Subgraph, Value
from tfnb.graph.node import leaves
from tfnb.graph.ops import COND, WHILE, WITH_GRADIENT
from tfnb.graph.spec import flows
from tfnb.graph.subgraph import row_places

Places = frozenset[int]  # of inputs, or of outputs
_known: WeakKeyDictionary[Subgraph, dict[Places, Places]] = WeakKeyDictionary()


def has_own_rule(node: Node) -> bool:
    """Whether the node's gradient is not that of its op."""
    return node.op == WITH_GRADIENT or "override" in node.tags


def ways(node: Node) -> tuple[Value, ...]:
    """The inputs that a gradient may reach.

    None through ops declared so, optimizer updates and what was recorded with grad mode off; but a write in place with
    grad mode off passes the gradient straight to what was there before, as torch does.
    """
    if "no_grad" in node.tags:
        return node.inputs[:1] if "in_place" in node.tags else ()
    if has_own_rule(node):
        return node.inputs[: len(node.attrs["args"])] if node.op == WITH_GRADIENT else node.inputs
    return () if node.op in NOGRAD or "update" in node.tags else node.inputs


def _conducting(node: Node) -> int | None:
    """Number of outputs that carry gradients: outputs saved for the gradient alone carry none, as in torch."""
    rule = RULES.get(node.op)
    return rule.outputs if rule is not None and rule.saves else None


def conducted(node: Node, active: Places) -> Places:
    """The places of the outputs that a gradient may take to the inputs at these places."""
    if node.op == COND and not has_own_rule(node):
        found = _of_branch(node, active)
    elif node.op == WHILE and not has_own_rule(node):
        found = _of_loop(node, active)
    else:
        found = frozenset(range(len(node.outputs[: _conducting(node)])))
    return frozenset(i for i in found if flows(node.outputs[i].dtype))


def _of_branch(node: Node, active: Places) -> Places:
    inner = frozenset(i for i, ref in enumerate(node.attrs["operands"]) if isinstance(ref, Ref) and ref.input in active)
    return _through(node.attrs["then"], inner) | _through(node.attrs["else"], inner)


def _of_loop(node: Node, active: Places) -> Places:
    """The outputs on a path of any number of iterations: a carried value is an input of the next one."""
    attrs, count = node.attrs, len(node.attrs["init"])
    given = [*attrs["init"], *attrs["xs"], *attrs["captures"]]
    inputs = ({ref.input for ref in leaves(each) if isinstance(ref, Ref)} for each in given)
    inner = frozenset(i for i, each in enumerate(inputs) if not active.isdisjoint(each))
    while True:
        found = _through(attrs["body"], inner)
        carried = frozenset(i for i in found if i < count)
        if carried <= inner:
            break
        inner |= carried
    rows = (places[0] for i, places in enumerate(row_places(attrs)) if count + i in found)
    return frozenset((*(i for i in inner if i < count), *rows))


def _through(part: Subgraph, active: Places) -> Places:
    """The outputs of a subgraph on a path from the inputs at these places."""
    known = _known.setdefault(part, {})
    if active not in known:
        reached = _reached(part.contents.nodes, {part.inputs[i] for i in active})
        known[active] = frozenset(i for i, value in enumerate(part.outputs) if value in reached)
    return known[active]


def _reached(nodes: Iterable[Node], reached: set[Value]) -> set[Value]:
    for node in nodes if reached else ():
        active = frozenset(i for i, value in enumerate(ways(node)) if value in reached)
        if active:
            reached.update(node.value(i) for i in conducted(node, active))
    return reached
