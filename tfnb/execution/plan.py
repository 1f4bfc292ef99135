"""From the dataflow form to the machine's templates: what nobody takes is dropped, cheap nodes become generated code.

Nodes that wait for the same things become one region, a generated function, so no node ever waits for more than its own
inputs. What takes long (products, convolutions, ops of other libraries) is a region of its own and goes to a pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tfnb.control_flow import frames
from tfnb.control_flow.frames import Flow, Op, Port
from tfnb.execution import machine
from tfnb.execution.lower import Program, subprogram
from tfnb.execution.machine import CALL, EMPTY, ENTER, EXIT, MERGE, NEXT, SINK, SWITCH, WAIT, WORK, Step, Template
from tfnb.graph import Contents, Node, Spec, Subgraph, Value, ops
from tfnb.graph.graph import new_id
from tfnb.graph.spec import Dim
from tfnb.graph.subgraph import row_places, subgraphs
from tfnb.kernels.control import gathered, row_of
from tfnb.kernels.random import mix
from tfnb.recording.interpret import absent, held, sizes_hold

LONG = 2**21  # multiplications of an op that is worth a thread
_NOMINAL = 32  # taken for a size that only a run knows
_OURS = frozenset({"aten", "prims", "tfnb", "tfnb_pure"})
_CONTROL = {
    frames.SWITCH: SWITCH, frames.MERGE: MERGE, frames.ENTER: ENTER, frames.EXIT: EXIT, frames.NEXT: NEXT,
}  # fmt: skip
_STATE = frozenset({"tfnb.read", "tfnb.assign", "tfnb.constant", "tfnb.group", "tfnb.placeholder", "tfnb.guard"})


@dataclass(slots=True)
class Plan:
    """What a machine runs: ``root``, and where its feeds, Variables and constants go."""

    root: Template
    feeds: list[list[tuple[Step, int]]]
    storages: dict[Any, list[tuple[Step, int]]]
    given: list[tuple[list[tuple[Step, int]], Any]]  # constants
    runs: list[tuple[Step, int]]  # the number of the run
    results: int
    writes: tuple[Any, ...]  # Variables: the last results
    programs: list[Program]


Submit = Callable[[Node], Callable[..., Any]]  # what a node that may wait does


class Planner:
    """One plan under construction."""

    def __init__(self, flow: Flow, specs: Callable[[Value], Spec], seed: int, submit: Submit) -> None:
        self.flow, self.root_spec, self.seed, self.submit = flow, specs, seed, submit
        self.same: dict[Port, Port] = {}  # ports that are other ports
        self.storage: dict[Port, Any] = {}  # reads that see what is stored
        self.written: dict[Any, Port] = {}
        self.steps: dict[int, Step] = {}  # by op, or by the first op of a region
        self.out: dict[Port, tuple[Step, int]] = {}
        self.templates = [Template(frame.parallel) for frame in flow.frames]
        self.programs: list[Program] = []
        self.truths: dict[Port, Port] = {}
        self.specs: dict[tuple[int, Value], Spec] = {}
        self.gives: dict[Port, list[tuple[Step, int]]] = {}

    def plan(self, fetches: Sequence[tuple[Port | None, Sequence[Port]]], feeds: Sequence[Port]) -> Plan:
        """The plan for fetches: a value each, or ports that only have to be there."""
        self._state()
        writes = tuple(self.written)
        wanted = [*fetches, *((self.written[variable], ()) for variable in writes)]
        wanted = [(None if port is None else self.real(port), [self.real(p) for p in after]) for port, after in wanted]
        kept = self._kept([p for port, after in wanted for p in (*([] if port is None else [port]), *after)])
        self._specs()
        for members in self._regions(kept):
            self._region(members, kept)
        for number in kept:
            if number not in self.steps:
                self._step(number)
        sinks = [self._sink(place, port, after) for place, (port, after) in enumerate(wanted)]
        self._wire([*((step, op) for step, op in self._inputs())], sinks)
        for template in self.templates:
            template.seal()
        _rank(self.templates)
        return Plan(
            self.templates[0], [self.edges(port) for port in feeds],
            {variable: edges for port, variable in self.storage.items() if (edges := self.edges(port))},
            [(edges, op.node.attrs["value"]) for n, op in enumerate(self.flow.ops)
             if op.node is not None and op.node.op == "tfnb.constant" and (edges := self.edges(Port(n)))],
            self.edges(Port(self._run_op())), len(wanted), writes, self.programs,
        )  # fmt: skip
