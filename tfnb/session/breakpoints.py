"""Breakpoints: a run stops at a node when a condition on its value holds, writes nothing, and hands over the values.

The node's value and its inputs are further fetches of the step, which is stopped between computing and committing.
"""

from __future__ import annotations

import ast
import builtins
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tfnb.errors import BreakpointReached, InvalidArgument, NotFound
from tfnb.execution.tracing.health import health
from tfnb.graph import Graph, Node, Spec, Value
from tfnb.graph.subgraph import subgraphs
from tfnb.interrupts import from_signal_handler
from tfnb.passes import StepGraph
from tfnb.recording import Operation
from tfnb.recording import graph as graph_named
from tfnb.session.structures import graph_of, value_of

_KEY = "breakpoints"  # in `Graph.attached`: name -> Breakpoint


@dataclass(frozen=True)
class Breakpoint:
    """A breakpoint of a graph: the name of a value, the condition, and its text."""

    name: str
    holds: Callable[[torch.Tensor], bool]
    text: str

    def __repr__(self) -> str:
        return f"{self.name}{self.text and f' if {self.text}'}"


@dataclass(frozen=True, slots=True)
class BreakpointStop:
    """A breakpoint in one step: its node, and the values to show by name: the node's inputs and output."""

    at: Breakpoint
    node: Node
    wanted: dict[str, Value]

    def ensure_passed(self, values: Sequence[Any]) -> None:
        """Raise BreakpointReached if its condition holds for the values of ``wanted``."""
        value = values[-1]
        if value is None or not self.at.holds(value):  # None: of a branch that was not taken
            return
        found = BreakpointValues(self.at, self.node, dict(zip(self.wanted, values, strict=True)))
        raise BreakpointReached(
            f"{found.title}; nothing was written. The error's `details`, in the next cell of a notebook `stopped`, has "
            f"the values of {', '.join(found)}",
            **self.node.where, details=found,
        )  # fmt: skip


class BreakpointValues(dict[str, Any]):
    """The values at a breakpoint, by name: the inputs of the node, and behind them its own value."""

    def __init__(self, at: Breakpoint, node: Node, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.at, self.node = at, node

    @property
    def title(self) -> str:
        """Where the run stopped, and why."""
        return f"stopped at {self.at!r}{f', {self.node.source}' if self.node.source else ''}"

    def _repr_html_(self) -> str:
        from tfnb.view import values_html  # listed exception: a repr asks view

        return values_html(self)

    def __repr__(self) -> str:
        return "\n".join(
            [self.title, *(f"  {name}  {Spec.of(value)}  {health(value)}" for name, value in self.items())]
        )


def stopping(step: StepGraph) -> Iterator[BreakpointStop]:
    """The breakpoints of a graph that are in a step."""
    for at in step.whole.attached.get(_KEY, {}).values():
        value = _meant(step.whole, at.name)
        node = None if value is None else step.graph.contents.by_id.get(value.node)
        if value is not None and node is not None:
            inputs = dict(_inputs(step.whole, node))
            inputs.pop(at.name, None)
            yield BreakpointStop(at, node, {**inputs, at.name: value})


def _inputs(graph: Graph, node: Node) -> Iterator[tuple[str, Value]]:
    for value in node.inputs:
        source = graph.contents.by_id[value.node]
        if source.outputs:
            name = graph.contents.shown(source)
            yield f"{name}:{value.index}" if value.index else name, value


def break_at(
    node: torch.Tensor | Operation | Value | Node | str | None = None,
    condition: str | Callable[[torch.Tensor], Any] | None = None, *,
    graph: Graph | str | None = None, off: bool = False,
) -> list[Breakpoint]:  # fmt: skip
    """Stop runs of a graph, also those of `fit`, at a node when a condition on its value holds.

    Such a run raises BreakpointReached and writes nothing; ``error.details`` is a dict with the inputs of the node and
    its value. In a notebook the next cell has it as ``stopped``. Later runs stop there, too, until ``off``.

    node: a recorded tensor, or the name of one. condition: ``"nan"``, ``"inf"``, an expression of ``value`` such as
    ``"value.abs().max() > 10"`` (`torch` and `math` are known), or a function of the value; of several elements one is
    enough. Without it each run that computes the node stops. off: remove the breakpoint at ``node``, or all of them.
    Gives the breakpoints of the graph, also when called without arguments. A `fit` on a cluster takes one step after
    the other then, and does not divide the rows of a batch between tasks. Raises NotFound, with near names, for what is
    not in the graph. Raises InvalidArgument for a node without a value and for a condition of another kind; a run
    raises it where the condition itself fails.

    >>> import tfnb
    >>> with tfnb.record():
    ...     x = tfnb.placeholder(torch.ones(3), name="x")
    ...     y = x.log().sum()
    >>> tfnb.break_at(y, "inf")
    [y if inf]
    >>> try:
    ...     tfnb.run(y, {x: [1.0, 0.0]})
    ... except tfnb.errors.BreakpointReached as error:
    ...     error.details["log"]
    tensor([0., -inf])
    >>> tfnb.break_at(y, off=True)
    []
    """
    found = graph if isinstance(graph, Graph) else graph_named(graph) if graph or node is None else graph_of(node)
    points: dict[str, Breakpoint] = found.attached.setdefault(_KEY, {})
    if off and node is None:
        points.clear()
    elif node is not None:
        name = _name(found, node)
        earlier = [each for each in points if _meant(found, each) == found.value(name)]
        if off and not earlier:
            raise NotFound(f"graph {found.name} has no breakpoint at {name}; there are: {_listed(points)}")
        made = Breakpoint(name, _holds(name, condition), _text(condition))
        for each in earlier:
            del points[each]
        points |= {} if off else {name: made}
    found.version += 1  # steps that were prepared know others
    return list(points.values())


def _name(graph: Graph, item: object) -> str:
    try:
        value = value_of(graph, item)
    except NotFound as error:
        if not any(True for node in graph.nodes for _ in subgraphs(node)):
            raise
        raise NotFound(
            f"{error}; what is computed within a loop or branch has no name out here: stop at its result, or write "
            "tfnb.assert_(condition, message) beside the line"
        ) from None
    node = graph.contents.by_id[value.node]
    if not node.outputs:
        raise InvalidArgument(f"{node.name} has no value to stop at: take a node that has one")
    name = graph.contents.shown(node)
    return item if isinstance(item, str) else f"{name}:{value.index}" if value.index else name


def _meant(graph: Graph, name: str) -> Value | None:
    """The value at a breakpoint; None if its cell was recorded again without it."""
    try:
        return graph.value(name)
    except NotFound:
        return None


def _listed(points: dict[str, Breakpoint]) -> str:
    return ", ".join(map(repr, points.values())) or "none"


def _text(condition: Any) -> str:
    return "" if condition is None else condition if isinstance(condition, str) else condition.__name__


def _holds(name: str, condition: object) -> Callable[[torch.Tensor], bool]:
    """The condition as a function, whose failures become errors naming the breakpoint."""
    if condition is None:
        return lambda _: True
    if condition in _BAD:
        return _BAD[condition]
    test = _expression(name, condition) if isinstance(condition, str) else condition
    if not callable(test):
        raise InvalidArgument(f"a condition is 'nan', 'inf', an expression of value or a function, not {condition!r}")

    def holds(value: torch.Tensor) -> bool:
        try:
            found = test(value)
            return bool(found.any() if isinstance(found, torch.Tensor) else found)
        except Exception as error:
            if from_signal_handler(error):
                raise
            raise InvalidArgument(
                f"the condition of the breakpoint at {name} failed for a value of {list(value.shape)}: "
                f"{type(error).__name__}: {error}; nothing was written. %tfbreak {name} --off removes it"
            ) from error

    return holds


def _expression(name: str, text: str) -> Callable[[torch.Tensor], Any]:
    try:
        tree = ast.parse(text.strip(), mode="eval")
        code = compile(tree, f"<breakpoint at {name}>", "eval")
    except (SyntaxError, ValueError) as error:
        raise InvalidArgument(f"the condition {text!r} is no expression: {error}") from None
    names = [at for at in ast.walk(tree) if isinstance(at, ast.Name)]
    made = {at.id for at in names if isinstance(at.ctx, ast.Store)}
    if unknown := {at.id for at in names} - made - {"value", name, "torch", "math", *dir(builtins)}:
        raise InvalidArgument(
            f"the condition {text!r} knows value{f' (or {name})' * name.isidentifier()}, torch and math, "
            f"not {', '.join(sorted(unknown))}: tfnb.break_at takes a function of the value, too"
        )
    return lambda value: eval(code, {name: value, "torch": torch, "math": math, "value": value})


def _counts(*words: str) -> Callable[[torch.Tensor], bool]:
    def holds(value: torch.Tensor) -> bool:
        found = health(value)
        return found is not None and any(count for word, count in found.counts if word in words)

    return holds


_BAD = {"nan": _counts("nan"), "inf": _counts("-inf", "+inf")}
