"""Loops and branches in generated code: native Python around the generated functions of their subgraphs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, Protocol

import torch

from tfnb.execution.lowering.loop_products import Product, apart
from tfnb.execution.lowering.pass_through import passed_on
from tfnb.graph import Node, Ref, Value, ops
from tfnb.graph.setting import setting
from tfnb.graph.subgraph import row_places
from tfnb.kernels.control import Replay, call, while_loop
from tfnb.kernels.memory_budget import MemoryBudget, current_budget
from tfnb.kernels.offload import RowStack
from tfnb.kernels.random import mix
from tfnb.kernels.rows import KeptRows, RowProducts, Sums
from tfnb.memory.loop_rows import of_rows
from tfnb.recording.values.interpret import absent, number, too_deep


class LoweredSubgraph(Protocol):
    """A lowered subgraph."""

    @property
    def forward(self) -> Callable[..., tuple[Any, ...]]: ...

    @property
    def written(self) -> tuple[int, ...]: ...


Lower = Callable[..., LoweredSubgraph]  # of a subgraph, which outputs are wanted; how many inputs a call may write into


class Loop:
    """A ``tfnb.while``, without rows that nobody takes: called with the run's number and its attrs.

    kept: values that are rows of loops which only loops take, and are not stacked; which ones. counted: those of them
    whose bytes a run with a memory budget counts. zeros: whether a value is known to be zero. same: which inputs a
    result may be as it is, where that is known; of those in memory of the loop's own, none.
    """

    def __init__(
        self, node: Node, lower: Lower, taken: Set[int], kept: Mapping[Value, tuple[int, ...]], counted: Set[Value],
        zeros: Callable[[Value], bool],
    ) -> None:  # fmt: skip
        self.node, attrs = node, node.attrs
        carried = len(attrs["init"])
        places = row_places(attrs)
        self.rows = [row for row, at in enumerate(places) if not taken.isdisjoint(at)]
        self.kept = [kept.get(node.value(places[row][0])) for row in self.rows]
        self.counted = any(node.value(places[row][0]) in counted for row in self.rows)
        self.places = (*range(carried + 1), *(p for row in self.rows for p in places[row]))  # among the node's outputs
        outputs = attrs["body"].outputs
        wanted = [*outputs[:carried], *(outputs[carried + row] for row in self.rows)]
        plain = {i for i, x in enumerate(attrs["xs"]) if isinstance(x, Ref) and node.inputs[x.input] not in kept}
        self.apart = apart(attrs, wanted, plain)
        summed = {total.place for total in self.apart.totals}
        self.same: Mapping[int, tuple[Value, ...]] = dict.fromkeys(summed, ())
        self.zero = [zeros(node.inputs[attrs["init"][total.place].input]) for total in self.apart.totals]
        self.order = [i for i in range(carried) if i not in summed]  # of the carried values, those that iterations take
        self.body = self._body(lower, carried, wanted)
        self.cond = None if attrs["cond"] is None else lower(attrs["cond"], attrs["cond"].outputs)
        self.inner = (self.body,) if self.cond is None else (self.cond, self.body)
        firsts = [node.outputs[places[row][0]] for row in self.rows]
        self.kinds = [(spec.dtype, spec.device) for spec in firsts]
        self.reverse = attrs["reverse"]
        self.id, found = node.id, self.apart
        self.changing = len(self.order) + found.sequences + len(found.ahead)  # inputs that iterations change
        self.draws = attrs["body"].draws or (attrs["cond"] is not None and attrs["cond"].draws)
        self.replicas = attrs.get("replicas")
        self.__name__ = "loop"  # for the generated code

    def _body(self, lower: Lower, carried: int, wanted: Sequence[Value]) -> LoweredSubgraph:
        """Inputs of the body: carried values, rows, precomputed products, captures, accumulators.

        Outputs: carried values, rows, terms to accumulate.
        """
        found = self.apart
        inputs = found.body.inputs
        first = carried + found.sequences
        totals = [inputs[total.place] for total in found.totals]
        given = [*(inputs[i] for i in self.order), *inputs[carried:first], *(p.value for p in found.ahead),
                 *inputs[first:], *totals]  # fmt: skip
        outputs = [*(wanted[i] for i in self.order), *wanted[carried:], *found.summed]
        return lower(replace(found.body, inputs=tuple(given)), outputs, len(self.order))

    def __call__(self, run: int, init: Any, xs: Any, captures: Any, limit: object, rows: object) -> list[Any]:
        found, state = self.apart, [init[i] for i in self.order]
        for place in self.body.written:  # from here on they are the loop's own
            state[place] = state[place].clone()
        limit = number(limit)
        sums = self.sums(init)
        sequences = [*xs, *self.products(xs, captures)]
        captures = [*captures, *(init[total.place] for total in found.totals)]
        with self._functions() as (cond, body):
            space = current_budget() if self.counted else None
            columns, stacks = self._columns(rows), list[RowStack]()
            if space is not None:
                again = Replay(body, sequences, captures, len(state), (), self.body.written, limit, self.reverse, run,
                              self.draws, self.replicas)  # fmt: skip
                stacks = list(self._stacks(space, columns, rows, state, again))
            columns += [] if sums is None else sums.columns()
            for stack in stacks:
                body = stack.watching(body)
            out = while_loop(
                cond, body, state, sequences, captures, limit=limit, rows=columns, reverse=self.reverse, run=run,
                draws=self.draws, replicas=self.replicas,
            )  # fmt: skip
        return out if sums is None else self.united(out, len(init))

    def _columns(self, rows: Any) -> list[Any]:
        """The collector of each row output: stacked rows or kept rows."""
        return [
            (rows[row], *kind) if loops is None else KeptRows(pair=isinstance(rows[row], int), once=len(loops) == 1)
            for row, kind, loops in zip(self.rows, self.kinds, self.kept, strict=True)
        ]

    def _stacks(
        self, space: MemoryBudget, columns: list[Any], rows: Any, state: Sequence[torch.Tensor], again: Replay
    ) -> Iterator[RowStack]:
        """Yield row stacks for the kept rows within the memory of a run, in place of these columns."""
        lengths = [*(len(x[1] if type(x) is tuple else x) for x in again.xs[:1]), again.limit]
        iterations = min([n for n in lengths if n is not None], default=None) if self.cond is None else None
        leaves, held = self.node.attrs.get("swap_memory") is not False, space.again.get(self.id)
        for loops in dict.fromkeys(filter(None, self.kept)):
            places = [place for place, taken in enumerate(self.kept) if taken == loops]
            shapes = [rows[self.rows[place]] for place in places]
            sizes = [
                None if isinstance(shape, int) else prod(shape) * self.kinds[place][0].itemsize
                for place, shape in zip(places, shapes, strict=True)
            ]
            refuse = partial(self._refused, space, places, sum(size or 0 for size in sizes))
            taken = None if held is None else replace(again, rows=[len(state) + place for place in places])
            stack = RowStack(
                space,
                sizes,
                iterations,
                leaves,
                len(loops),
                refuse,
                taken,
                _bytes(state),
                _bytes(self._held(again, held)),
                on_cpu=all(self.kinds[place][1] == "cpu" for place in places),
            )
            for place, shape, column in zip(places, shapes, stack.columns, strict=True):
                column.results *= 2 if isinstance(shape, int) else 1
                columns[place] = column
            yield stack

    def _held(self, again: Replay, places: Collection[int] | None) -> Iterator[torch.Tensor]:
        """The sequences and captures that stand at these places among the node's inputs."""
        attrs = self.node.attrs
        for tensors, name in ((again.xs, "xs"), (again.captures, "captures")):
            for x, ref in zip(tensors, attrs[name], strict=False):  # products ahead and totals follow
                if places and isinstance(ref, Ref) and ref.input in places:
                    yield x

    def _refused(self, space: MemoryBudget, places: list[int], each: int, iteration: int, why: str) -> Exception:
        found = of_rows(self.node, [self.rows[place] for place in places], {})
        return replace(found, bytes=each, known=bool(each)).refused(iteration, space.bytes, why)

    def products(self, xs: object, captures: object) -> list[RowProducts]:
        """The sequences of products that no iteration makes."""
        return [self._ahead(product, xs, captures) for product in self.apart.ahead]

    def _ahead(self, product: Product, xs: Any, captures: Any) -> RowProducts:
        weight = captures[product.weight]
        bias = None if product.bias is None else captures[product.bias]
        return RowProducts(xs[product.rows], weight.t() if product.turned else weight, bias)

    def sums(self, init: Any) -> Sums | None:
        """The collector of the terms of sums taken out of the iterations."""
        found = self.apart
        if not found.totals:
            return None
        at = {value: i for i, value in enumerate(found.summed)}
        terms = [(None if total.a is None else at[total.a], at[total.b]) for total in found.totals]
        totals = [init[t.place].t() if t.turned else init[t.place] for t in found.totals]
        return Sums(terms, totals, self.zero, len(at))

    def united(self, out: list[Any], carried: int) -> list[Any]:
        """The carried values in order, with the sums inserted."""
        totals = self.apart.totals
        sums = {total.place: made.t() if total.turned else made
                for total, made in zip(totals, out[len(out) - len(totals) :], strict=True)}  # fmt: skip
        others = iter(out)
        state = [sums[i] if i in sums else next(others) for i in range(carried)]
        return [*state, *others][: len(out)]

    def _functions(self) -> AbstractContextManager[tuple[Any, Any]]:
        watch = _watching.watch
        if watch is not None:
            return watch.loop(self)
        return nullcontext((None if self.cond is None else self.cond.forward, self.body.forward))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


class Watcher(Protocol):
    """Observes loops and branches: gives the functions to call in place of the generated ones."""

    def loop(self, loop: Loop) -> AbstractContextManager[tuple[Any, Any]]: ...

    def side(self, cond: Cond, way: bool) -> Callable[..., Sequence[torch.Tensor]]: ...


class _Watching(threading.local):
    watch: Watcher | None = None


_watching = _Watching()


def watched(watch: Watcher | None) -> AbstractContextManager[None]:
    """Loops and branches that this thread runs are looked at by ``watch``; None: they are not."""
    return setting(_watching, watch=watch)


class Cond:
    """A ``tfnb.cond``: called with the run's number and its attrs."""

    def __init__(self, node: Node, lower: Lower, taken: Set[int]) -> None:
        self.places = tuple(place for place in range(len(node.outputs)) if place in taken)
        self.specs = [node.outputs[place] for place in self.places]
        self.branches, self.id = {}, node.id
        for part in ("then", "else"):
            outputs = [node.attrs[part].outputs[place] for place in self.places]
            program = lower(node.attrs[part], [value for value in outputs if value is not None])
            self.branches[part == "then"] = program, [value is None for value in outputs]
        self.inner = tuple(program for program, _ in self.branches.values())
        self.optional = frozenset(node.attrs.get(ops.OPTIONAL, ()))
        self.same = passed_on(node, self.places, self.branches.values())
        self.__name__ = "cond"  # for the generated code

    def __call__(self, run: int, pred: object, operands: Any, shapes: object) -> list[torch.Tensor]:
        way, watch = bool(pred), _watching.watch
        program, missing = self.branches[way]
        forward = program.forward if watch is None else watch.side(self, way)
        given = forward(*operands, run)
        return self.complete(missing, given, shapes) if any(missing) else list(given)

    def complete(self, missing: Sequence[bool], given: Iterable[Any], shapes: Any) -> list[Any]:
        """The outputs of a branch, completed by placeholders for missing ones (None for optional outputs)."""
        found = iter(given)
        return [
            next(found) if not lacks else None if place in self.optional else absent(spec, shapes[place])
            for place, spec, lacks in zip(self.places, self.specs, missing, strict=True)
        ]


class RecursiveCall:
    """Calls of one function that calls itself: called with the run's number, that of the call, and its args.

    ``program`` is put in when it is lowered, as it holds this very object.
    """

    def __init__(self, node: Node) -> None:
        self.node, self.function = node, node.attrs["function"]
        self.program: LoweredSubgraph
        self.__name__ = "call"  # for the generated code

    def __call__(self, run: int, place: int, *args: object) -> Sequence[torch.Tensor]:
        function = self.function
        given: tuple[Any, ...] = (*args, mix(run, place))
        if _watching.watch is None:
            return call(function.name, function.limit, self.program.forward, given, self._explained)
        with watched(None):  # its calls inside have no places of their own
            return call(function.name, function.limit, self.program.forward, given, self._explained)

    def _explained(self, deep: RecursionError) -> Exception:
        return too_deep(self.node, deep)


REGIONS: dict[str, tuple[Any, tuple[str, ...]]] = {
    ops.WHILE: (Loop, ("init", "xs", "captures", "limit", "rows")),
    ops.COND: (Cond, ("pred", "operands", "shapes")),
}
"""The class of each op's calls, and the attrs that a call takes."""
