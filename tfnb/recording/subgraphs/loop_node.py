"""One loop node from functions: the common base of `tfnb.control_flow` and of the gradients of loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.errors import InvalidArgument, ShapeError, Unsupported
from tfnb.graph import Dim, Node, Ref, Spec, Value, ops
from tfnb.graph.spec import Size
from tfnb.recording.subgraphs.capture import (
    Argument,
    Function,
    Inner,
    Region,
    append,
    argument,
    bound_outside,
    captures,
    record_region,
    same_shape,
    subgraph,
    write_back,
)  # fmt: skip
from tfnb.recording.values.recording import Recording
from tfnb.recording.values.tensor import Base, Entry, Tensor

DISAGREE = "branches or iterations disagree"  # details of such an error


@dataclass(frozen=True, slots=True)
class Result:
    """Results of a loop: the carried values after the last iteration, the number of iterations, the stacked rows."""

    carried: list[Tensor]
    iterations: Tensor
    rows: list[Tensor]


Sequences = Sequence[Tensor | tuple[Tensor, Tensor]]  # stacked rows, or elements and shapes


class ValueSaver(Protocol):
    """The loop or branch differentiated by a body: provides intermediate values that are no inputs, one row an
    iteration.
    """

    @property
    def inner(self) -> Inner:
        """Its values."""

    def adopt(self, nodes: Sequence[Node]) -> None:
        """These nodes belong there."""

    def sized(self, value: Value, symbol: str) -> Value:
        """A value with an axis of this size, as ``value`` has one, and no elements."""

    def save(self, values: Sequence[Value]) -> Sequences:
        """The rows of these values."""


@dataclass(slots=True)
class LoopRecorder:
    """A loop to be recorded with `record`.

    names: of the carried values, for messages. specs: of the carried values inside, by default those of ``init``; an
    axis that is another symbol there may change from iteration to iteration. rows: specs of a row of each of xs. cond,
    limit,
    reverse: see `tfnb.graph.subgraph`. saver: of the loop that this one goes back through. results: specs of the
    carried values after the loop, where they are known although the values change their shapes on the way. recompute:
    the gradient of a loop around this one does not keep what this one makes. swap: whether what is kept
    for gradients moves out of a run's memory; None: as the memory plan chooses. entered: whether the samples take an
    iteration.
    """

    recorder: Recording
    init: Sequence[Tensor]
    names: Sequence[str]
    xs: Sequences = ()
    rows: Sequence[Spec] | None = None
    specs: Sequence[Spec] | None = None
    limit: int | Tensor | None = None
    reverse: bool = False
    back_prop: bool = True
    parallel: int = 10
    what: str = "while_loop"
    saver: ValueSaver | None = None
    results: Sequence[Spec] = ()
    recompute: bool = False
    swap: bool | None = None
    entered: bool = True
    held: list[Base] = field(default_factory=list)  # what the body writes of outside: carried as well
    late: list[Tensor] = field(default_factory=list)  # arguments that the body asked for, see `begun`
    late_specs: list[Spec] = field(default_factory=list)
    path: str = ""

    def record(self, cond: Function | None, body: Function) -> Result:
        """Record the loop of ``body(*carried, *one row of each of xs)``, which returns the next carried values, then
        rows.

        Raises ShapeError for a carried value that changes its shape, InvalidArgument for one that changes its dtype.
        """
        with self.recorder.scope(self.what) as self.path:
            return self._recorded(cond, body)

    def begun(self, spec: Spec, name: str) -> Tensor:
        """Inside the body: one more carried value, zeros of this spec before the first iteration.

        The body gives what it is after the iteration behind the other carried values, in the order of these calls.
        """
        self.late.append(argument(self.recorder, Argument(spec, name)))
        self.late_specs.append(spec)
        return self.late[-1]

    def _recorded(self, cond: Function | None, body: Function) -> Result:
        recorder = self.recorder
        entries = [recorder._entry(tensor) for tensor in self.init]
        sequences = list(map(self._sequence, self.xs))
        inner = list(self.specs or map(self._spec, entries))
        given = [self._given(e, spec, name) for e, spec, name in zip(entries, inner, self.names, strict=True)]
        region = self._body(body, given, [self._row(e, i) for i, e in enumerate(sequences)])
        late = self.late_specs
        inner += late
        entries += [recorder._entry(zeros(recorder, spec)) for spec in late]
        given += [Argument(spec, "first_set") for spec in late]
        count = len(entries)
        test = None if cond is None else self._test(cond, given)
        written = [base.entry for base in self.held]
        before = [e.value for e in (*entries, *written)]
        inner += map(self._spec, written)
        rows = [self._inside(region, value) for value in region.outputs[len(inner) :]]
        self._check(inner, before, region)
        sized = None if self.saver is None else self.saver.sized
        captured = captures(recorder, [region] if test is None else [test, region], sized)
        saved = [] if self.saver is None else [v for v in captured if v.node in self.saver.inner.nodes]
        captured = [v for v in captured if v not in saved]
        if self.saver is not None and saved:
            sequences += map(self._sequence, self.saver.save(saved))
        same = {} if self.saver is None else self.saver.inner.same  # what stands for a value of outside tells sizes
        inputs, attrs = self._operands(before, sequences, [same.get(v, v) for v in captured])
        shapes = tuple(spec.shape if bound_outside(recorder, spec) else len(spec.shape) for spec in rows)
        iterations = self._iterations(sequences)
        iterations = iterations if cond is None else self.fresh()  # it may stop before the last of them
        attrs |= {
            "cond": None if test is None else subgraph(recorder, test, captured, test.outputs),
            "body": subgraph(recorder, region, [*saved, *captured], region.outputs), "rows": shapes,
            "reverse": self.reverse, "back_prop": self.back_prop, "parallel_iterations": self.parallel,
            "recompute": self.recompute, "swap_memory": self.swap,
        }  # fmt: skip
        outer = [self._outer(spec, value) for spec, value in zip(inner, before, strict=True)]
        outer[: len(self.results)] = self.results
        stacked = [
            spec for row, shape in zip(rows, shapes, strict=True) for spec in gathered(self, row, shape, iterations)
        ]
        found = append(recorder, ops.WHILE, inputs, attrs, [*outer, Spec(torch.int64, ()), *stacked])
        write_back(recorder, self.held, found[count : len(inner)], [region])
        return Result(found[:count], found[len(inner)], found[len(inner) + 1 :])

    def _operands(
        self, before: Sequence[Value], sequences: Sequence[Sequence[Entry]], captured: Sequence[Value]
    ) -> tuple[list[Value], dict[str, Any]]:
        """The inputs of the loop's node, and the attributes that refer to the inputs by their places."""
        stop = [self.recorder._entry(self.limit).value] if isinstance(self.limit, Tensor) else []
        inputs = [*before, *(entry.value for entries in sequences for entry in entries), *captured, *stop]
        refs = iter(map(Ref, range(len(inputs))))
        return inputs, {
            "init": tuple(next(refs) for _ in before),
            "xs": tuple(tuple(next(refs) for _ in s) if len(s) > 1 else next(refs) for s in sequences),
            "captures": tuple(next(refs) for _ in captured), "limit": next(refs) if stop else self.limit,
        }  # fmt: skip

    # -- regions ----------------------------------------------------------------------------------------------

    def _body(self, body: Function, given: list[Argument], rows: list[Argument]) -> Region:
        """Record the body; outside tensors written in the body are appended to the carried values."""
        apart: set[Base] = set()
        while True:
            self.late.clear()
            self.late_specs.clear()
            region = record_region(
                self.recorder, body, [*given, *rows, *self._kept()], scope=self.path, iterations=True, held=self.held,
                inner=None if self.saver is None else self.saver.inner, entered=self.entered, more=self.late,
            )  # fmt: skip
            if self.saver is not None:
                self.saver.adopt(region.moved)
            late = [rebound.binding for base, rebound in region.rebound.items() if base not in apart]
            if late:
                region.undo()
                apart.update(map(self.recorder.buffers.set_apart, late))
                self.held = [base for base in self.held if base.variable is not None or base not in region.rebound]
                continue
            more = [base for base in region.written if base not in self.held]
            if not more:
                break
            region.undo()
            self.held += more
        first, at, end = len(given), len(given) + len(rows), len(given) + len(rows) + len(self.held)
        carried, last = first + len(self.late), len(region.outputs) - len(self.held)
        region.inputs = (
            *region.inputs[:first], *region.inputs[end:], *region.inputs[at:end], *region.inputs[first:at]
        )  # fmt: skip
        region.outputs = [*region.outputs[:carried], *region.outputs[last:], *region.outputs[carried:last]]
        return region

    def _test(self, cond: Function, given: list[Argument]) -> Region:
        region = record_region(
            self.recorder, cond, [*given, *self._kept()], scope=self.path, iterations=True, held=self.held
        )
        if region.written:
            raise Unsupported(f"the condition of {self.what} writes an outside tensor{self.recorder.tape.at()}")
        region.outputs = region.outputs[:1]
        return region

    def _kept(self) -> list[Argument]:
        bases = enumerate(self.held)
        return [Argument(self._spec(base.entry), f"written_{i}", base.entry.sample) for i, base in bases]

    # -- specs ------------------------------------------------------------------------------------------------

    def _spec(self, entry: Entry) -> Spec:
        return self.recorder.node(entry.value.node).outputs[entry.value.index]

    def _inside(self, region: Region, value: Value | None) -> Spec:
        assert value is not None
        inner = next((node for node in region.nodes if node.id == value.node), None)
        return (inner or self.recorder.node(value.node)).outputs[value.index]

    def _given(self, entry: Entry, spec: Spec, name: str) -> Argument:
        """A carried value in the first iteration; without a sample where its size there stands for no other."""
        symbols, sample = self.recorder.symbols, entry.sample
        sizes = [symbols.hint(symbols.get(d.expr)) if isinstance(d, Dim) and d.is_symbol else None for d in spec.shape]
        if sample is not None and any(s not in (None, n) for s, n in zip(sizes, sample.shape, strict=True)):
            sample = None
        return Argument(spec, name, None if self.results else sample)

    def _sequence(self, x: Tensor | tuple[Tensor, Tensor]) -> list[Entry]:
        return [self.recorder._entry(tensor) for tensor in (x if isinstance(x, tuple) else (x,))]

    def _row(self, entries: list[Entry], place: int) -> Argument:
        if self.rows is not None:
            return Argument(self.rows[place], f"row_{place}")
        spec, stack = self._spec(entries[0]), entries[0].sample
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            sample = stack[0] if stack is not None and len(stack) else None
        return Argument(replace(spec, shape=spec.shape[1:]), f"row_{place}", sample)

    def _iterations(self, sequences: Sequence[list[Entry]]) -> Size:
        """Length of the axis along which rows are stacked."""
        lengths = [self._spec(entries[-1]).shape[0] for entries in sequences]
        if len({n for n in lengths if isinstance(n, int)}) > 1:
            at = self.recorder.tape.at()
            raise ShapeError(f"{self.what} takes sequences of one length, and was given {lengths}{at}")
        return lengths[0] if lengths else self.fresh()

    def fresh(self) -> Size:
        """A size that only a run knows."""
        symbols = self.recorder.symbols
        return symbols.size(symbols.env.create_unbacked_symint())

    def _outer(self, spec: Spec, value: Value) -> Spec:
        """A carried value after the loop: axes that change are of a size that only a run knows."""
        before = self.recorder.node(value.node).outputs[value.index].shape
        pairs = zip(spec.shape, before, strict=True)
        return replace(spec, shape=tuple(size if size == old else self.fresh() for size, old in pairs))

    def _check(self, inner: Sequence[Spec], before: Sequence[Value], region: Region) -> None:
        """Check that each carried value keeps its spec, and that every row has the same shape."""
        recorder, at = self.recorder, self.recorder.tape.at()
        names = [
            *self.names,
            *("a name that the body sets first" for _ in self.late),
            *(f"a tensor written inside ({base.entry.value})" for base in self.held),
        ]
        for name, spec, value, out in zip(names, inner, before, region.outputs, strict=False):
            found = self._inside(region, out)
            if found.dtype != spec.dtype:
                raise InvalidArgument(
                    f"{self.what}: {name} enters as {spec} and is {found} after one iteration{at}", details=DISAGREE
                )
            old = self.recorder.node(value.node).outputs[value.index].shape
            kept = [axis for axis, sizes in enumerate(zip(spec.shape, old, strict=True)) if sizes[0] == sizes[1]]
            if len(found.shape) != len(old) or not same_shape(recorder, _axes(found, kept), _axes(spec, kept)):
                raise ShapeError(
                    f"{self.what}: {name} enters as {spec} and is {found} after one iteration: keep its shape, or let "
                    f"an axis vary with shape_invariants of tfnb.while_loop{at}", details=DISAGREE,
                )  # fmt: skip
        own = {s for spec, v in zip(inner, before, strict=True) for s in spec.symbols} - {
            s for v in before for s in self.recorder.node(v.node).outputs[v.index].symbols
        }
        for place, row in enumerate(region.outputs[len(inner) :] if self.saver is None else ()):
            spec = self._inside(region, row)
            if own & set(spec.symbols) or not bound_outside(self.recorder, spec):
                raise ShapeError(
                    f"{self.what}: result {place} is {spec}, which may be another shape each iteration{at}"
                )


def _axes(spec: Spec, axes: Sequence[int]) -> Spec:
    return replace(spec, shape=tuple(spec.shape[axis] for axis in axes))


def zeros(recorder: Recording, spec: Spec) -> torch.Tensor:
    """Recorded zeros of a spec."""
    sizes = spec.sizes(recorder.symbols.bindings(spec.shape))
    return recorder.fresh(torch.zeros(sizes, dtype=spec.dtype, device=spec.device))


def gathered(loop: LoopRecorder, row: Spec, shape: tuple[Size, ...] | int, iterations: Size) -> list[Spec]:
    """Specs of the outputs for rows of one spec: stacked, or the elements and shapes of ragged rows."""
    if not isinstance(shape, int):
        return [replace(row, shape=(iterations, *shape))]
    return [replace(row, shape=(loop.fresh(),)), Spec(torch.int64, (iterations, shape))]
