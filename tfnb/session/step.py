"""A step computed in parts (TensorFlow's partial run): semantics S-58, S-59.

The generated program's nodes are computed when a fetch first needs them and kept as long as somebody may still ask.
Nothing is written before the last fetch, which raises Aborted if another step wrote what this one read: S-57.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from tfnb.errors import InvalidArgument, TfnbError
from tfnb.execution import Program
from tfnb.execution.casts import uncast
from tfnb.execution.explain import explained
from tfnb.graph.current import unrecorded
from tfnb.graph.variable_locks import LOCKS, ensure_unchanged, versions
from tfnb.interrupts import from_signal_handler
from tfnb.session.feeding import Feeder
from tfnb.session.structures import Fetches


class PartialRun:
    """One step in pieces: `fetch` and `feed` declared names, each once. Leaving the block early writes nothing."""

    def __init__(
        self, program: Program, feeder: Feeder, run: int, *, fetch: Callable[[Any], int | None],
        feed: Callable[[Any], int | None],
    ) -> None:  # fmt: skip
        program = program.undonated()  # fetches choose the order of its nodes
        self._program, self._feeder = program, feeder
        self._fetch_place, self._feed_place = fetch, feed
        self._symbols: dict[str, int] = {}
        self._fed: set[int] = set()
        self._fetched: set[int] = set()
        self._ended: str | None = None
        inputs = program.module.graph.find_nodes(op="placeholder")
        self._inputs = inputs[: len(program.feeds)]
        self._results: Any = program.module.graph.output_node().args[0]  # a tuple, as lowering made it
        self._seen = {} if program.access is None else versions(program.access.variables)
        self._storages = [variable.storage for variable in program.variables]
        rest = inputs[len(program.feeds) :]
        self._known: dict[fx.Node, Any] = dict(zip(rest, [*self._storages, run], strict=True))
        self._ran: set[fx.Node] = set()  # also those whose values were dropped
        self._interpreter = fx.Interpreter(program.module, garbage_collect_values=False)
        recorded = {program.node_of[n.name].id: n for n in program.module.graph.nodes if n.name in program.node_of}
        self._with = {  # guards of branches have no outputs: nodes name them as control inputs, or as effects
            recorded[node.id]: [recorded[i] for i in (*node.control, *node.effects) if i in recorded]
            for node in program.node_of.values()
            if node.id in recorded
        }

    @unrecorded
    def feed(self, feed_dict: Mapping[Any, Any]) -> None:
        """Give values for some of the declared feeds; all or none. Raises InvalidArgument, FeedError, ShapeError."""
        self._ensure_open()
        symbols, given = dict(self._symbols), {}
        places = set()
        for key, value in feed_dict.items():
            place = self._feed_place(key)
            if place is None:
                raise InvalidArgument(f"feed {_name(key)} was not specified when the step was made")
            if place in self._fed or place in places:
                raise InvalidArgument(f"feed {_name(key)} has already been fed in this step")
            places.add(place)
            given.update(self._feeder.take(place, value, symbols))
        self._symbols = symbols
        self._fed |= places
        given = self._program.apart(given, self._storages)  # before the commit writes
        self._known.update({self._inputs[i]: tensor for i, tensor in given.items()})

    @unrecorded
    def fetch(self, fetches: Fetches, feed_dict: Mapping[Any, Any] | None = None) -> Any:
        """The values of some of the declared fetches, with their structure, after feeding ``feed_dict``.

        Raises InvalidArgument for one that was fetched already or not declared, or that needs a feed not given yet;
        Aborted at the last fetch if another step wrote what this one read.
        """
        __tracebackhide__ = True
        self._ensure_open()
        leaves, structure = tree_flatten(fetches)
        places = [self._declared(leaf) for leaf in leaves]
        if feed_dict:
            self.feed(feed_dict)
        for leaf, place in zip(leaves, places, strict=True):
            self._check_feeds(leaf, place)
        try:
            with uncast():
                values = [self._value(self._results[place]) for place in places]
            if len(self._fetched | set(places)) == len(self._program.fetches):
                self._commit()
        except Exception as error:
            if isinstance(error, TfnbError) or from_signal_handler(error):
                raise
            raise explained(self._program, error, [self._known.get(i) for i in self._inputs]) from error
        self._fetched |= set(places)
        self._forget()
        return tree_unflatten(values, structure)

    def _declared(self, leaf: object) -> int:
        place = self._fetch_place(leaf)
        if place is None:
            raise InvalidArgument(f"fetch {_name(leaf)} was not specified when the step was made")
        if place in self._fetched:
            raise InvalidArgument(f"fetch {_name(leaf)} has already been fetched in this step")
        return place

    def _check_feeds(self, leaf: object, place: int) -> None:
        needed = self._needed(self._results[place])
        by_id = self._program.whole.contents.by_id
        missing = [
            by_id[value.node].name for value, node in zip(self._program.feeds, self._inputs, strict=True)
            if node in needed
        ]  # fmt: skip
        if missing:
            raise InvalidArgument(
                f"fetch {_name(leaf)} can't be computed from the feeds given so far; missing: {', '.join(missing)}"
            )

    def _needed(self, result: object) -> dict[fx.Node, None]:
        """Nodes that are not known and that ``result`` depends on."""
        found: dict[fx.Node, None] = {}
        stack = [result] if isinstance(result, fx.Node) else []
        while stack:
            node = stack.pop()
            if node not in self._known and node not in found:
                found[node] = None
                stack.extend((*node.all_input_nodes, *(n for n in self._with.get(node, ()) if n not in self._ran)))
        return found

    def _value(self, result: object) -> Any:
        if not isinstance(result, fx.Node):
            return result
        needed = self._needed(result)
        self._interpreter.env = self._known
        for node in self._program.module.graph.nodes:
            if node in needed:
                self._known[node] = self._run(node)
                self._ran.add(node)
        return self._known[result]

    def _run(self, node: fx.Node) -> Any:
        try:
            return self._interpreter.run_node(node)
        except Exception as error:
            if isinstance(error, TfnbError) or from_signal_handler(error):
                raise
            error.node = self._program.node_of.get(node.name)  # type: ignore[attr-defined]
            raise

    def _commit(self) -> None:
        program = self._program

        def rest(*_: object) -> tuple[Any, ...]:
            fetched = [None] * program.n_fetches  # handed out already
            with uncast():
                return (*fetched, *(self._value(result) for result in self._results[program.n_fetches :]))

        _, pending = program.compute([], self._storages, 0, rest)
        self._end("step is finished: everything was fetched")
        if program.access is not None and program.writes:
            late = program.commit_access
            with LOCKS.held(program.access), nullcontext() if late is None else LOCKS.held(late):
                ensure_unchanged(self._seen)
                program.commit(pending)

    def _forget(self) -> None:
        """Drop values that nothing left to compute takes."""
        wanted = {node for place, node in enumerate(self._results) if place not in self._fetched}

        def is_over(node: fx.Node) -> bool:
            return node not in wanted and all(user in self._known or user.op == "output" for user in node.users)

        for node in list(filter(is_over, self._known)):
            del self._known[node]

    def _ensure_open(self) -> None:
        if self._ended is not None:
            raise InvalidArgument(self._ended)

    def _end(self, why: str) -> None:
        self._ended = why
        self._known.clear()

    def __enter__(self) -> PartialRun:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._ended is None:
            unfed = [name for place, name in enumerate(self._feeder.names) if place not in self._fed]
            never = f"; never fed: {', '.join(unfed)}" if unfed else ""
            self._end(f"step is finished: its block was left early, nothing was written{never}")

    def __repr__(self) -> str:
        state = self._ended or f"{len(self._fetched)} of {len(self._program.fetches)} fetched"
        return f"<Step of {self._program.whole.name}: {state}>"


def _name(item: object) -> str:
    if isinstance(item, torch.Tensor) and not hasattr(item, "node"):
        return f"of shape {list(item.shape)}"
    return str(getattr(item, "name", item))
