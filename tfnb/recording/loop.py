"""One loop node from functions: what `tfnb.control_flow` and the gradients of loops are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tfnb.errors import InvalidArgument, ShapeError, Unsupported
from tfnb.graph import Dim, Ref, Spec, Value, ops
from tfnb.graph.spec import Size
from tfnb.recording.recorder import Recorder
from tfnb.recording.regions import Function, Given, Region, append, captures, record_region, subgraph, write_back
from tfnb.recording.tensor import Base, Entry, Tensor


@dataclass(frozen=True, slots=True)
class Result:
    """What a loop gives: the carried values after the last turn, the number of turns, the stacked rows."""

    carried: list[Tensor]
    turns: Tensor
    rows: list[Tensor]


@dataclass(slots=True)
class Loop:
    """A loop to be recorded with `record`.

    names: of the carried values, for messages. specs: of the carried values inside, by default those of ``init``; an
    axis that is another symbol there may change from turn to turn. cond, limit, reverse: see `tfnb.graph.subgraph`.
    """

    recorder: Recorder
    init: Sequence[Tensor]
    names: Sequence[str]
    xs: Sequence[Tensor] = ()
    specs: Sequence[Spec] | None = None
    limit: int | Tensor | None = None
    reverse: bool = False
    back_prop: bool = True
    parallel: int = 10
    what: str = "while_loop"
    held: list[Base] = field(default_factory=list)  # what the body writes of outside: carried as well
    path: str = ""

    def record(self, cond: Function | None, body: Function) -> Result:
        """The loop of ``body(*carried, *one row of each of xs)``, which returns the next carried values, then rows.

        Raises ShapeError for a carried value that changes its shape, InvalidArgument for one that changes its dtype.
        """
        with self.recorder.scope(self.what) as self.path:
            return self._recorded(cond, body)

    def _recorded(self, cond: Function | None, body: Function) -> Result:
        recorder, count = self.recorder, len(self.init)
        entries = [recorder._entry(tensor) for tensor in self.init]
        sequences = [recorder._entry(x) for x in self.xs]
        inner = list(self.specs or map(self._spec, entries))
        given = [self._given(e, spec, name) for e, spec, name in zip(entries, inner, self.names, strict=True)]
        turns = self._turns(sequences)
        region = self._body(body, given, [self._row(e, i) for i, e in enumerate(sequences)])
        test = None if cond is None else self._test(cond, given)
        written = [base.entry for base in self.held]
        before = [e.value for e in (*entries, *written)]
        inner += map(self._spec, written)
        rows = [self._inside(region, value) for value in region.outputs[len(inner) :]]
        self._check(inner, before, region)
        captured = captures(recorder, [region] if test is None else [test, region])
        stop = [recorder._entry(self.limit).value] if isinstance(self.limit, Tensor) else []
        inputs = [*before, *(e.value for e in sequences), *captured, *stop]
        refs = iter(map(Ref, range(len(inputs))))
        attrs: dict[str, Any] = {
            "init": tuple(next(refs) for _ in before), "xs": tuple(next(refs) for _ in sequences),
            "captures": tuple(next(refs) for _ in captured), "limit": next(refs) if stop else self.limit,
            "cond": None if test is None else subgraph(recorder, test, captured, test.outputs),
            "body": subgraph(recorder, region, captured, region.outputs), "rows": tuple(spec.shape for spec in rows),
            "reverse": self.reverse, "back_prop": self.back_prop, "parallel_iterations": self.parallel,
        }  # fmt: skip
        outer = [self._outer(spec, value) for spec, value in zip(inner, before, strict=True)]
        stacked = [replace(spec, shape=(turns, *spec.shape)) for spec in rows]
        found = append(recorder, ops.WHILE, inputs, attrs, [*outer, Spec(torch.int64, ()), *stacked])
        for base, tensor in zip(self.held, found[count : len(inner)], strict=True):
            write_back(recorder, base, tensor)
        return Result(found[:count], found[len(inner)], found[len(inner) + 1 :])

    # -- regions ----------------------------------------------------------------------------------------------

    def _body(self, body: Function, given: list[Given], rows: list[Given]) -> Region:
        """The body; what it writes of outside is carried behind the other carried values."""
        while True:
            kept = self._kept()
            region = record_region(
                self.recorder, body, [*given, *rows, *kept], scope=self.path, turns=True, held=self.held
            )
            more = [base for base in region.written if base not in self.held]
            if not more:
                break
            region.undo()
            self.held += more
        count, at = len(given), len(given) + len(rows)
        region.inputs = (*region.inputs[:count], *region.inputs[at:], *region.inputs[count:at])
        last = len(region.outputs) - len(self.held)
        region.outputs = [*region.outputs[:count], *region.outputs[last:], *region.outputs[count:last]]
        return region

    def _test(self, cond: Function, given: list[Given]) -> Region:
        region = record_region(
            self.recorder, cond, [*given, *self._kept()], scope=self.path, turns=True, held=self.held
        )
        if region.written:
            raise Unsupported(f"the condition of {self.what} writes a tensor of outside{self.recorder.tape.at()}")
        region.outputs = region.outputs[:1]
        return region

    def _kept(self) -> list[Given]:
        bases = enumerate(self.held)
        return [Given(self._spec(base.entry), f"written_{i}", base.entry.sample) for i, base in bases]

    # -- specs ------------------------------------------------------------------------------------------------

    def _spec(self, entry: Entry) -> Spec:
        return self.recorder.node(entry.value.node).outputs[entry.value.index]

    def _inside(self, region: Region, value: Value | None) -> Spec:
        assert value is not None
        inner = next((node for node in region.nodes if node.id == value.node), None)
        return (inner or self.recorder.node(value.node)).outputs[value.index]

    def _given(self, entry: Entry, spec: Spec, name: str) -> Given:
        """A carried value in the first turn; without a sample where its size there stands for no other."""
        symbols, sample = self.recorder.symbols, entry.sample
        sizes = [symbols.hint(symbols.get(d.expr)) if isinstance(d, Dim) and d.is_symbol else None for d in spec.shape]
        if sample is not None and any(s not in (None, n) for s, n in zip(sizes, sample.shape, strict=True)):
            sample = None
        return Given(spec, name, sample)

    def _row(self, entry: Entry, place: int) -> Given:
        spec = self._spec(entry)
        sample = entry.sample[0] if entry.sample is not None and len(entry.sample) else None
        return Given(replace(spec, shape=spec.shape[1:]), f"row_{place}", sample)

    def _turns(self, sequences: Sequence[Entry]) -> Size:
        """The size of the axis along which rows are stacked."""
        lengths = [self._spec(e).shape[0] for e in sequences]
        if len({n for n in lengths if isinstance(n, int)}) > 1:
            at = self.recorder.tape.at()
            raise ShapeError(f"{self.what} takes sequences of one length, and was given {lengths}{at}")
        return lengths[0] if lengths else self._fresh()

    def _fresh(self) -> Size:
        """A size that only a run knows."""
        symbols = self.recorder.symbols
        return symbols.size(symbols.env.create_unbacked_symint())

    def _outer(self, spec: Spec, value: Value) -> Spec:
        """A carried value after the loop: axes that change are of a size that only a run knows."""
        before = self.recorder.node(value.node).outputs[value.index].shape
        pairs = zip(spec.shape, before, strict=True)
        return replace(spec, shape=tuple(size if size == old else self._fresh() for size, old in pairs))

    def _check(self, inner: Sequence[Spec], before: Sequence[Value], region: Region) -> None:
        """Each carried value leaves the body as it came, and every row has the same shape."""
        at = self.recorder.tape.at()
        names = [*self.names, *(f"a tensor written inside ({base.entry.value})" for base in self.held)]
        for name, spec, value, out in zip(names, inner, before, region.outputs, strict=False):
            found = self._inside(region, out)
            if found.dtype != spec.dtype:
                raise InvalidArgument(f"{self.what}: {name} enters as {spec} and is {found} after one turn{at}")
            old = self.recorder.node(value.node).outputs[value.index].shape
            fits = len(found.shape) == len(spec.shape) and all(
                a == b or b != c for a, b, c in zip(found.shape, spec.shape, old, strict=True)
            )
            if not fits:
                raise ShapeError(
                    f"{self.what}: {name} enters as {spec} and is {found} after one turn: keep its shape, or let an "
                    f"axis vary with shape_invariants{at}"
                )
        own = {s for spec, v in zip(inner, before, strict=True) for s in spec.symbols} - {
            s for v in before for s in self.recorder.node(v.node).outputs[v.index].symbols
        }
        for place, value in enumerate(region.outputs[len(inner) :]):
            spec = self._inside(region, value)
            if own & set(spec.symbols) or not self._known(spec):
                raise ShapeError(f"{self.what}: result {place} is {spec}, which may be another shape each turn{at}")

    def _known(self, spec: Spec) -> bool:
        """Whether the sizes are those of something outside."""
        symbols = self.recorder.symbols
        return all(symbols.hint(symbols.get(s)) is not None for s in spec.symbols)
