"""A signature of a session, ready to run: what was fetched and fed, the code of it, and what becomes of the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tfnb.execution.step_code import StepCode
from tfnb.execution.tiers import tiered as tiers
from tfnb.graph import Graph, Node, Value, Variable
from tfnb.graph.variable_locks import Cut
from tfnb.passes import StepGraph, step_graph
from tfnb.passes.printed import lines, printing
from tfnb.placement.requests import Asked, asked
from tfnb.session.breakpoints import Stop, stopping
from tfnb.session.feeding import Feeder
from tfnb.session.structures import fed_by, flat, places_of, structure, value_of, variable_of


@dataclass(slots=True)
class Prepared:
    """One signature, ready to run."""

    code: StepCode
    feeder: Feeder
    values: tuple[Value, ...]
    rebuild: Callable[[Sequence[Any]], Any]
    trailing: tuple[Variable, ...]  # variables fetched as such: their value after the step
    version: int
    asked: tuple[Asked, ...] = ()  # nodes that ask for a place
    prints: tuple[Node, ...] = ()  # whose values are fetched behind ``values``
    stops: tuple[Stop, ...] = ()  # breakpoints, whose values are fetched behind those of prints
    direct: Callable[..., list[Any] | None] | None = None  # the whole step, where nothing is in the way
    guarded: tiers.Guarded | None = None  # what that is of

    @property
    def is_plain(self) -> bool:
        """Whether it asks for nothing beside the step itself."""
        return not (self.trailing or self.asked or self.feeder.repeats or self.stops)

    def after(self, cut: Cut | None = None) -> list[torch.Tensor]:
        """The values of the fetched Variables after the step; those that it did not write are of the cut."""
        copies, writes = {} if cut is None else cut.copies, self.code.step.writes
        return [v.value() if v in writes or v not in copies else copies[v] for v in self.trailing]


def prepare(
    graph: Graph, fetches: Any, feed_keys: tuple[Any, ...], code: Callable[[StepGraph], StepCode]
) -> Prepared:  # fmt: skip
    """Resolve what is fetched and fed; ``code`` makes what runs the step."""
    version = graph.version
    leaves: list[Any] = []
    rebuild = structure(fetches, leaves)
    variables = [variable_of(graph, leaf) for leaf in leaves]
    trailing = tuple(variable for variable in variables if variable is not None)
    values = tuple(value_of(graph, leaf) for leaf, var in zip(leaves, variables, strict=True) if var is None)
    places = places_of([variable is not None for variable in variables])
    if trailing:
        made = lambda results: rebuild([results[p] for p in places])  # noqa: E731
    else:
        made = type(fetches) if flat(fetches, leaves) else rebuild
    feeder = Feeder(graph, [(key, fed_by(graph, key)) for key in feed_keys])
    step, prints = printing(step_graph(graph, values, feeder.values))
    step, stops = stopping(step)
    if prints or stops:
        made = _printed(prints, made, len(values), len(step.fetches))
    feeder.narrow(step.graph.nodes)
    return Prepared(
        code(step), feeder, values, made, trailing, version,
        asked(step.graph.nodes), prints, stops,
    )  # fmt: skip


def same_step(old: StepGraph, new: StepGraph) -> bool:
    """Whether code of the one computes the other."""
    is_same = old.fetches == new.fetches and old.feeds == new.feeds and old.graph.seed == new.graph.seed
    return is_same and old.graph.nodes == new.graph.nodes


def _printed(prints: tuple[Node, ...], rebuild: Callable[[list[Any]], Any], start: int, end: int) -> Any:
    """``rebuild``, which prints the results from ``start`` to ``end`` and leaves them out."""

    def rebuilt(results: Sequence[Any]) -> Any:
        for text in lines(prints, results[start:end]):
            print(text)  # noqa: T201  the user asked for it
        return rebuild([*results[:start], *results[end:]])

    return rebuilt
