"""Branches and loops: the gradient of a branch is a branch, the gradient of a loop a loop in reverse order.

The values that a subgraph's rules ask for are saved by a copy of the forward node that gives them as further outputs:
of a loop, one row for each iteration. The pass that merges duplicates makes one node of both. All of it are ordinary
nodes, so gradients of gradients are no special case. Semantics S-120, S-121.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import torch

from tfnb.errors import NoGradient
from tfnb.gradients.rule_table import COMPLEX, RULES, Cotangents, Forward, Rule
from tfnb.gradients.slices import IndexedSlices
from tfnb.gradients.sums import plus
from tfnb.gradients.walker import Walk
from tfnb.graph import Dim, Guard, Node, Ref, Spec, Subgraph, Value, ops
from tfnb.graph.contents import unique
from tfnb.graph.graph import new_id
from tfnb.graph.spec import Size
from tfnb.graph.subgraph import row_places
from tfnb.recording import Tensor
from tfnb.recording.cells.size_letters import substitute
from tfnb.recording.subgraphs.capture import (
    AGAIN,
    Inner,
    Region,
    Retry,
    append,
    axes,
    captures,
    record_region,
    retried,
    subgraph,
)
from tfnb.recording.subgraphs.loop_node import LoopRecorder, Sequences, gathered
from tfnb.recording.subgraphs.own_gradient import open_recorder
from tfnb.recording.values.recording import Recording

Optional = Sequence[torch.Tensor | None]


class ForwardPart:
    """A subgraph of a forward node to be differentiated.

    known: the tensors of outside that inputs are in every iteration; None for others. active: which inputs' cotangents
    are wanted.
    """

    def __init__(
        self, recorder: Recording, part: Subgraph, known: Sequence[Tensor | None], active: Sequence[bool]
    ) -> None:
        self.recorder, self.part, self.active = recorder, part, active
        self.known = {v: t for v, t in zip(part.inputs, known, strict=True) if t is not None}
        nodes = {node.id for node in part.contents.nodes} - {v.node for v in self.known}
        self.inner = Inner(nodes, {v: recorder._entry(t).value for v, t in self.known.items()})
        self.letters = self._letters()
        self.moved: list[Node] = []

    def _letters(self) -> dict[str, int | str]:
        """The sizes inside, by the symbols of outside that stand for them there and that no input has inside."""
        own = {v: self.part.contents.by_id[v.node].outputs[v.index] for v in self.part.inputs}
        inside, pairs = axes(own.values()), [(self.spec(self.inner.same[v]), own[v]) for v in self.known]
        sizes = [pair for outer, inner in pairs for pair in zip(outer.shape, inner.shape, strict=True)]
        return {
            out.expr: size.expr if isinstance(size, Dim) else size
            for out, size in reversed(sizes) if isinstance(out, Dim) and out.is_symbol and out.expr not in inside
        }  # fmt: skip

    def targets(self) -> list[Value]:
        """The inputs whose cotangents are wanted."""
        return [v for v, active in zip(self.part.inputs, self.active, strict=True) if active]

    def reached(self) -> list[bool]:
        """For each output, whether it depends on the active inputs."""
        walk = Walk(self.recorder, self.targets())
        walk.reach(self.part.contents.nodes)
        return [v in walk.reached for v in self.part.outputs]

    def walk(self, dys: Optional, tables: Iterable[int] = ()) -> list[Any]:
        """Cotangents of the inputs from cotangents of the outputs, recorded here and now.

        tables: places of the inputs whose cotangents may be row-sparse.
        """
        walk = Walk(self.recorder, self.targets())
        walk.tables.update(self.part.inputs[i] for i in tables if self.active[i])
        walk.tensors.update(self.known)
        walk.hook()
        before, self.recorder.lazy = self.recorder.lazy, True  # values inside have no samples
        try:
            pairs = zip(self.part.outputs, dys, strict=True)
            walk.run(self.part.contents.nodes, [(v, dy) for v, dy in pairs if v is not None and dy is not None])
            return [walk.total(v) if active else None for v, active in zip(self.part.inputs, self.active, strict=True)]
        finally:
            self.recorder.lazy = before

    def guards(self) -> list[Guard]:
        """Size assumptions of the forward subgraph, shared by its gradient."""
        entering = {s for v in self.part.inputs for s in self.spec(v).symbols}
        return [guard for guard in self.part.contents.guards if entering.issuperset(guard.symbols)]

    def adopt(self, nodes: Sequence[Node]) -> None:
        """Move copies of this subgraph's nodes with further outputs into it, with its inputs and symbols."""
        inputs = {outer: v for v, outer in self.inner.same.items()}
        own = (replace(node, inputs=tuple(inputs.get(v, v) for v in node.inputs)) for node in nodes)
        self.moved += [substitute(node, self.letters) if self.letters else node for node in own]
        self.inner.nodes.update(node.id for node in nodes)
        self.recorder.tape.by_id.update({node.id: node for node in nodes})

    def giving(self, outputs: Sequence[Value | None]) -> Subgraph:
        """The subgraph with further outputs."""
        contents = self.part.contents
        if self.moved:
            taken = {node.name for node in contents.nodes}
            named = []
            for node in self.moved:
                named.append(replace(node, name=unique(node.name, taken)))
                taken.add(named[-1].name)
            contents = replace(contents, nodes=(*contents.nodes, *named))
        return replace(self.part, contents=contents, outputs=(*self.part.outputs, *outputs))

    def spec(self, value: Value | None) -> Spec:
        """The spec of a value inside."""
        assert value is not None
        return self.recorder.node(value.node).outputs[value.index]

    @contextmanager
    def named(self) -> Iterator[None]:
        """Values inside can be named, as if they were recorded here.

        In a function that calls itself the same subgraph may be named already, further out.
        """
        tape, before = self.recorder.tape, (*self.part.contents.nodes, *self.moved)
        outer = {node.id for node in before if node.id in tape.by_id}
        tape.by_id.update({node.id: node for node in before})
        try:
            yield
        finally:
            nodes = [node for node in (*self.part.contents.nodes, *self.moved) if node.id not in outer]
            for node in nodes:
                tape.by_id.pop(node.id, None)
            self.recorder.space.release(nodes)


def _again(recorder: Recording, node: Node, inputs: Sequence[Any], attrs: Any, outputs: Sequence[Spec]) -> list[Tensor]:
    """A copy of a forward node with other attrs and outputs."""
    with recorder.tape.enclosed(control=node.control, device=node.device):
        values = [recorder._entry(t).value for t in inputs]
        return append(recorder, node.op, values, attrs, outputs, frozenset({AGAIN}))


# -- branches ---------------------------------------------------------------------------------------------------


def _cond(n: Forward, dys: Cotangents) -> list[Any]:
    recorder = open_recorder()
    forms: dict[int, bool] = {}  # of operands, by their places: whether their gradients are rows, and not dense
    with recorder.scope("cond") as path:
        return retried(forms, lambda: _branches(n, dys, forms, path))


def _branches(n: Forward, dys: Cotangents, forms: dict[int, bool], path: str) -> list[Any]:
    recorder, node = open_recorder(), n.outs[0].node  # type: ignore[attr-defined]  # recorded
    operands: list[Any] = list(n.inputs[1:])
    given, active = [dys.given(i) for i in range(len(n.outs))], list(n.needed[1:])
    parts = [ForwardPart(recorder, n.attrs[name], operands, active) for name in ("then", "else")]
    wanted = {i: operands[i] for i, needed in enumerate(active) if needed}

    def backward(part: ForwardPart) -> Region:
        def call() -> list[torch.Tensor]:
            dys = [_of_lengths(recorder, dy, part, v) for dy, v in zip(given, part.part.outputs, strict=True)]
            found = part.walk(dys, tables=wanted)
            _check_forms({i: found[i] for i in wanted}, forms)
            return [x for i, of in wanted.items() for x in _outputs(found[i], of, forms.get(i))]

        with part.named():  # alone, so that no size is told by a value of the other branch
            guards = part.guards()
            region = record_region(recorder, call, [], scope=path, iterations=False, inner=part.inner)
            part.adopt(region.moved)
            region.guards = list(dict.fromkeys((*guards, *region.guards)))
        return region

    regions = [backward(part) for part in parts]
    with parts[0].named(), parts[1].named():
        captured = captures(recorder, regions)
        outer = _branch_values(n, node, parts, captured)
        then, other = (subgraph(recorder, region, captured, region.outputs) for region in regions)
        results = [spec for i, of in wanted.items() for spec in _output_specs(recorder, _spec(of), forms.get(i))]
        attrs = {
            "pred": Ref(0), "operands": tuple(Ref(i + 1) for i in range(len(captured))), "then": then, "else": other,
            "shapes": (None,) * len(results),
        }  # fmt: skip
        outer = parts[0].inner.same | parts[1].inner.same | outer
        inputs = [recorder._entry(n.inputs[0]).value, *(outer.get(v, v) for v in captured)]
        found = iter(append(recorder, ops.COND, inputs, attrs, results))
    entries: list[Any] = [None] * len(n.inputs)
    for i, of in wanted.items():
        entries[i + 1] = _all_rows(of, next(found), next(found)) if forms.get(i) else next(found)
    return entries


def _of_lengths(recorder: Recording, dy: object, part: ForwardPart, output: Value | None) -> Any:
    """A cotangent with the sizes of this branch, if sides differ: as rows of the cotangent, in full number.

    To say that the sizes are equal would say it of the other branch too.
    """
    if not isinstance(dy, torch.Tensor) or output is None:
        return dy
    spec = part.spec(output)
    for axis, size in enumerate(recorder.space.shapes.spec(recorder._entry(dy).fake).shape):
        wanted = spec.shape[axis]
        if size != wanted:
            count: Any = wanted.evaluate(recorder.symbols.bindings([wanted])) if isinstance(wanted, Dim) else wanted
            dy = dy.index_select(axis, torch.arange(count, device=dy.device))
    return dy


def _check_forms(found: Mapping[int, Any], forms: dict[int, bool]) -> None:
    """Both branches give a gradient in the same form: rows, unless one of them gives a dense tensor."""
    rows = {i: True for i, dx in found.items() if isinstance(dx, IndexedSlices) and i not in forms}
    dense = {i: False for i, dx in found.items() if isinstance(dx, torch.Tensor) and forms.get(i)}
    if rows or dense:
        forms |= rows | dense
        raise Retry(forms)


def _outputs(dx: Any, of: Any, is_rows: bool | None) -> tuple[torch.Tensor, ...]:
    """A branch's outputs for an operand's gradient ``dx``, None if the side does not use the operand."""
    if is_rows:
        no_rows = dx is None and IndexedSlices(of.new_zeros((0, *of.shape[1:])), _no_indices(of), tuple(of.shape))
        slices = (no_rows or dx).canonical()
        return slices.values, slices.indices
    if isinstance(dx, IndexedSlices):
        return (dx.called(of.node.name).to_dense("the other branch gives a dense gradient"),)
    return (torch.zeros_like(of) if dx is None else dx,)


def _no_indices(of: torch.Tensor) -> torch.Tensor:
    return torch.zeros(0, dtype=torch.int64, device=of.device)


def _output_specs(recorder: Recording, spec: Spec, is_rows: bool | None) -> tuple[Spec, ...]:
    if not is_rows:
        return (spec,)
    count = LoopRecorder(recorder, (), ()).fresh()  # as many as the branch that is taken looks up
    return replace(spec, shape=(count, *spec.shape[1:])), Spec(torch.int64, (count,), spec.device)


def _branch_values(
    n: Forward, node: Node, parts: Sequence[ForwardPart], captured: Sequence[Value]
) -> dict[Value, Value]:
    """Values inside of the branches, as outputs of a copy of their node."""
    recorder = parts[0].recorder
    saved = [[v for v in captured if v.node in part.inner.nodes] for part in parts]
    values = [*saved[0], *saved[1]]
    if not values:
        return {}
    specs = [parts[0].spec(v) for v in values]
    absent, told = [[None] * len(inner) for inner in saved], _told(recorder, n.inputs)
    attrs = {
        **node.attrs,
        "then": parts[0].giving([*saved[0], *absent[1]]), "else": parts[1].giving([*absent[0], *saved[1]]),
        "shapes": (*node.attrs["shapes"], *(_known(told, spec, lambda: 0) for spec in specs)),
    }  # fmt: skip
    fresh = LoopRecorder(recorder, (), ()).fresh
    outputs = [replace(spec, shape=_known(told, spec, fresh)) for spec in specs]
    found = _again(recorder, node, n.inputs, attrs, (*node.outputs, *outputs))[len(node.outputs) :]
    return {v: recorder._entry(t).value for v, t in zip(values, found, strict=True)}


def _told(recorder: Recording, inputs: Sequence[Any]) -> set[str]:
    """Symbols bound by a node's inputs, and so known to a copy of the node in any subgraph."""
    values = (recorder._entry(t).value for t in inputs)
    return axes(recorder.node(v.node).outputs[v.index] for v in values)


def _known(told: set[str], spec: Spec, other: Callable[[], Size]) -> tuple[Size, ...]:
    """The shape, with another size for each one that symbols outside of ``told`` are part of."""
    return tuple(size if not isinstance(size, Dim) or told.issuperset(size.symbols) else other() for size in spec.shape)


def _spec(x: Any) -> Spec:
    return x.node.outputs[x.index]


# -- loops ------------------------------------------------------------------------------------------------------


class _ForwardLoop:
    """The forward loop, saving the values requested by its gradient."""

    def __init__(self, n: Forward, node: Node, part: ForwardPart, xs: Sequences) -> None:
        self.n, self.node, self.part = n, node, part
        first = len(n.attrs["init"])
        self.witnesses: dict[tuple[Value, str], Value] = {}
        self.given = dict(zip(part.part.inputs[first : first + len(xs)], xs, strict=True))

    @property
    def inner(self) -> Inner:
        return self.part.inner

    def adopt(self, nodes: Sequence[Node]) -> None:
        self.part.adopt(nodes)

    def sized(self, value: Value, symbol: str) -> Value:
        if value.node not in self.inner.nodes:
            return value
        if (value, symbol) not in self.witnesses:
            spec = self.part.spec(value)
            size = Dim(symbol)
            node = Node(
                id=new_id(), name=f"size_{symbol}", op="aten.new_zeros.default", inputs=(value,),
                outputs=(replace(spec, shape=(size, 0)),), attrs={"self": Ref(0), "size": [size, 0]},
            )  # fmt: skip
            self.adopt([node])
            self.witnesses[value, symbol] = node.value()
        return self.witnesses[value, symbol]

    def save(self, values: Sequence[Value]) -> Sequences:
        """Rows of the loop's own sequences, and rows saved by a copy of the loop."""
        recorder, attrs = self.part.recorder, self.node.attrs
        more = [v for v in values if v not in self.given]
        found: dict[Value, Any] = {}
        if more:
            specs, told = [self.part.spec(v) for v in more], _told(recorder, self.n.inputs)
            shapes = [spec.shape if told.issuperset(spec.symbols) else len(spec.shape) for spec in specs]
            own = {**attrs, "body": self.part.giving(more), "rows": (*attrs["rows"], *shapes)}
            iterations = self._iterations()
            loop = LoopRecorder(recorder, (), ())
            outs = [
                s for spec, shape in zip(specs, shapes, strict=True) for s in gathered(loop, spec, shape, iterations)
            ]
            tensors = _again(recorder, self.node, self.n.inputs, own, (*self.node.outputs, *outs))
            places = row_places(own)[len(attrs["rows"]) :]
            rows = [tuple(tensors[p] for p in at) for at in places]
            found = {v: row if len(row) > 1 else row[0] for v, row in zip(more, rows, strict=True)}
            if self.node.forward is None:
                self._say(specs, iterations)
        return [self.given[v] if v in self.given else found[v] for v in values]

    def _say(self, specs: Sequence[Spec], iterations: Size) -> None:
        """Note the saved rows, with their bytes at the sizes of the samples."""
        symbols, source = self.part.recorder.symbols, self.node.source

        def size(dim: Size) -> int | None:
            return symbols.hint(dim.evaluate(symbols.bindings([dim]))) if isinstance(dim, Dim) else dim

        rows = [[size(dim) for dim in spec.shape] for spec in specs]
        sizes = [[n for n in row if n is not None] for row in rows]
        pairs = zip(sizes, specs, strict=True)
        known = [prod(row) * spec.dtype.itemsize for row, spec in pairs if len(row) == len(spec.shape)]
        count = size(iterations)
        total = "" if count is None else f", {count * sum(known):,} of the sample's {count} iterations"
        more = "" if len(known) == len(specs) else f", and {len(specs) - len(known)} more whose sizes a run decides"
        text = f"the gradient of {self.node.name} keeps {sum(known):,} bytes of each iteration{total}{more}"
        note = f"{source.label} line {source.line}: {text}" if source else text
        if note not in self.part.recorder.tape.notes:
            self.part.recorder.tape.notes.append(note)

    def _iterations(self) -> Any:
        """The size of the loop's row axis."""
        attrs, node = self.node.attrs, self.node
        if attrs["rows"]:
            return node.outputs[row_places(attrs)[0][-1]].shape[0]
        last = next((x[-1] if isinstance(x, tuple) else x for x in self.given.values()), None)
        stops = last is None or attrs["cond"] is not None
        return LoopRecorder(self.part.recorder, (), ()).fresh() if stops else _spec(last).shape[0]


class _Back:
    """The iterations of a loop, backwards.

    Carried are the cotangents of the carried values that matter, and the sums of those of the captures; rows are the
    cotangents of the loop's rows, and then of its sequences.
    """

    def __init__(self, n: Forward, node: Node) -> None:
        self.n, self.node, self.recorder = n, node, open_recorder()
        self.xs, self.kept = list(n["xs"]), list(n["captures"])
        self.count = len(n.attrs["init"])
        self.taken: dict[int, torch.Tensor] = {}  # of sequences, which rows the loop came to before it stopped
        if n.attrs["cond"] is not None:
            self.xs = [x if isinstance(x, tuple) else self._taken(i, x) for i, x in enumerate(self.xs)]
        places = [*n.places("init"), *self.firsts(), *n.places("captures")]
        known = [*[None] * (self.count + len(self.xs)), *self.kept]
        self.part = ForwardPart(self.recorder, n.attrs["body"], known, [n.needed[place] for place in places])
        self._spread()
        active, ends = self.part.active, self.count + len(self.xs)
        self.carried = [i for i in range(self.count) if active[i]]
        self.sequences = [i for i in range(len(self.xs)) if active[self.count + i]]
        self.shared = [i for i in range(len(self.kept)) if active[ends + i]]
        self.rows: list[int] = []  # of the shared ones, those whose cotangents are row-sparse

    def _taken(self, place: int, x: torch.Tensor) -> Any:
        iterations, rows = self.n.outs[self.count], torch.arange(x.shape[0], device=x.device)
        self.taken[place] = rows >= x.shape[0] - iterations if self.n.attrs["reverse"] else rows < iterations
        return x[self.taken[place]]

    def firsts(self) -> list[int]:
        """Of each sequence, the place among the inputs of its rows' elements."""
        places = iter(self.n.places("xs"))
        return [min(next(places) for _ in (x if isinstance(x, tuple) else (x,))) for x in self.xs]

    def _spread(self) -> None:
        """Mark carried values as active if they depend on active ones, in this iteration or an earlier one."""
        part, count = self.part, self.count
        while True:
            reached = part.reached()[:count]
            active = [a or b for a, b in zip(part.active[:count], reached, strict=True)]
            if active == list(part.active[:count]):
                return
            part.active = [*active, *part.active[count:]]

    def record(self, dys: Cotangents) -> list[Any]:
        """The cotangents of the node's inputs."""
        return retried(self, lambda: self._recorded(dys))

    def _recorded(self, dys: Cotangents) -> list[Any]:
        n, part, count = self.n, self.part, self.count
        rows = [(count + i, at) for i, at in enumerate(row_places(n.attrs)) if dys.given(at[0]) is not None]
        asked = self._asked([*(i for i in range(count) if dys.given(i) is not None), *(i for i, _ in rows)])
        self.carried = [i for i in self.carried if i in asked]
        given: list[Any] = [(dys[at[0]], n.outs[at[1]]) if len(at) > 1 else dys[at[0]] for _, at in rows]
        sums = [i for i in self.shared if i not in self.rows]
        start: list[Any] = [*(dys[i] for i in self.carried), *(_zeros(self.kept[i]) for i in sums)]
        totals = [_spec(self.kept[i]) for i in sums]
        with part.named():
            loop = LoopRecorder(
                self.recorder, start, [f"gradient {i}" for i in range(len(start))], given,
                rows=[part.spec(part.part.outputs[i]) for i, _ in rows], limit=n.outs[count],  # type: ignore[arg-type]
                reverse=not n.attrs["reverse"], what="while", swap=n.attrs.get("swap_memory"),
                parallel=n.attrs["parallel_iterations"], saver=_ForwardLoop(n, self.node, part, self.xs),
                specs=[*(part.spec(part.part.outputs[i]) for i in self.carried), *totals],
                results=[*(_spec(n.inputs[n.places("init")[i]]) for i in self.carried), *totals],
            )  # fmt: skip
            result = loop.record(None, lambda *values: self._iteration([*self.carried, *(i for i, _ in rows)], values))
        entries: list[Any] = [None] * len(n.inputs)
        inits, kept, firsts = n.places("init"), n.places("captures"), self.firsts()
        places = [*(inits[i] for i in self.carried), *(kept[i] for i in sums)]
        for place, total in zip(places, result.carried, strict=True):
            entries[place] = total
        found = [
            self.recorder.tensor(result.iterations.node.value(at[0])) for at in row_places(result.iterations.node.attrs)
        ]
        for i, dx in zip(self.sequences, found, strict=False):
            # of a sequence of which iterations took some rows, nothing comes from the others
            entries[firsts[i]] = _zeros(n["xs"][i]).index_put([self.taken[i]], dx) if i in self.taken else dx
        pairs = iter(found[len(self.sequences) :])
        for i in self.rows:
            entries[kept[i]] = _all_rows(self.kept[i], next(pairs), next(pairs))
        return entries

    def _asked(self, outputs: Sequence[int]) -> set[int]:
        """The carried values on which these outputs of the body depend, in any number of iterations."""
        body, count = self.part.part, self.count
        by_id = body.contents.by_id
        places = {value: i for i, value in enumerate(body.inputs[:count])}
        asked, seen = set[int](), set[int]()
        stack = [value for i in outputs if (value := body.outputs[i]) is not None]
        asked.update(i for i in outputs if i < count)
        while stack:
            value = stack.pop()
            if (place := places.get(value)) is not None and place not in asked:
                asked.add(place)
                stack += filter(None, [body.outputs[place]])
            if value.node not in seen and value.node in by_id:
                seen.add(value.node)
                stack += by_id[value.node].inputs
        return asked

    def _iteration(self, outputs: Sequence[int], values: Sequence[Tensor]) -> list[torch.Tensor]:
        """One iteration: cotangents of its inputs from cotangents of its outputs, and the running sums."""
        part, count = self.part, self.count
        last, at = len(self.carried), self.count + len(self.xs)
        shared = [i for i in self.shared if i not in self.rows]
        sums = values[last : last + len(shared)]
        seeds: list[Any] = [None] * len(part.part.outputs)
        for place, dy in zip(outputs, (*values[:last], *values[last + len(sums) :]), strict=True):
            seeds[place] = dy
        found = part.walk(seeds, tables=range(at, at + len(self.kept)))
        added = []
        for i, total in zip(shared, sums, strict=True):
            dx = found[at + i]
            if isinstance(dx, IndexedSlices):
                self.rows.append(i)  # its gradient is the rows of all iterations
                raise Retry(self)
            added.append(total if dx is None else plus(self.recorder, total, dx))
        wanted = [*self.carried, *(count + i for i in self.sequences)]
        own = [_zeros(self.recorder.tensor(part.part.inputs[i])) if (dx := found[i]) is None else dx for i in wanted]
        slices = [found[at + i].canonical() for i in self.rows]
        return [*own[:last], *added, *own[last:], *(x for rows in slices for x in (rows.values, rows.indices))]


def _all_rows(of: Any, values: torch.Tensor, indices: torch.Tensor) -> IndexedSlices:
    """The rows of all iterations behind each other."""
    shape = tuple(of.shape)
    return IndexedSlices(values.reshape(-1, *shape[1:]), indices.reshape(-1), shape).called(of.node.name)


def _zeros(x: torch.Tensor) -> torch.Tensor:
    """Zeros of this shape; of the value nothing else is used."""
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)


def _while(n: Forward, dys: Cotangents) -> list[torch.Tensor | None]:
    node = n.outs[0].node  # type: ignore[attr-defined]  # recorded
    if not n.attrs["back_prop"]:
        raise _refused(node, "a gradient is taken through a loop that was recorded with back_prop=False")
    return _Back(n, node).record(dys)


def _refused(node: Node, why: str) -> NoGradient:
    return NoGradient(f"{why}\n  node {node.name}, {node.source}", **node.where)


RULES.update({ops.COND: Rule(_cond), ops.WHILE: Rule(_while)})
COMPLEX.update({ops.COND, ops.WHILE})
