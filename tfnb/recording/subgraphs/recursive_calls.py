"""Recursive functions while recording: a body is recorded until the results of its own calls are known.

A call inside of the body needs to know what the function returns and which values of outside it takes, which only the
body tells. So the body is recorded again with what the last time told, until nothing new comes. What it returns is told
first by the side of a branch that makes no such call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tfnb.errors import InvalidArgument, Unsupported
from tfnb.graph import Dim, Recursion, Ref, Spec, Value, ops
from tfnb.graph.spec import Size
from tfnb.recording.subgraphs.capture import (
    Argument,
    Region,
    Retry,
    append,
    bound_outside,
    captures,
    now,
    record_region,
    retried,
    subgraph,
)
from tfnb.recording.values.recording import Recording
from tfnb.recording.values.tensor import Tensor

Shape = tuple[Size | None, ...]  # None: another size in each call
_ROUNDS = 12


class Unfinished(BaseException):
    """A call whose result nothing tells yet; a branch takes the word of its other side."""


class RecursiveDefinition:
    """A recursive function, and the facts known of the function so far.

    specs: of what it is given, names: what that is called inside; each size that varies is one of its own in each call.
    results: what it returns, if that is known.
    """

    def __init__(
        self, recorder: Recording, name: str, limit: int, specs: Sequence[Spec], results: Sequence[Spec] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        self.recorder, self.function = recorder, Recursion(name, limit)
        self.names = [f"argument_{i}" for i in range(len(specs))] if names is None else names
        self.first, self.loose = list(specs), set[tuple[int, int]]()
        self.specs = list(specs)
        self.results = None if results is None else [(spec, self._shape(spec, self.specs)) for spec in results]
        self.captured: list[Value] = []
        self.form: Any = None  # how the results nest

    def generalise(self) -> None:
        """Sizes that vary become sizes of the function's own."""
        names: dict[Dim, Size] = {}
        self.specs = []
        for place, spec in enumerate(self.first):
            shape: list[Size] = []
            for axis, size in enumerate(spec.shape):
                if (place, axis) in self.loose:
                    size = self._fresh(size)
                elif isinstance(size, Dim):
                    size = names.setdefault(size, self._fresh(size))
                shape.append(size)
            self.specs.append(replace(spec, shape=tuple(shape)))

    def _fresh(self, size: Size) -> Size:
        symbols = self.recorder.symbols
        hint = symbols.hint(size.evaluate(symbols.bindings([size]))) if isinstance(size, Dim) else size
        return symbols.size(symbols.fresh(symbols.unused("L"), hint if hint is not None and hint > 1 else None))

    # -- the body ---------------------------------------------------------------------------------------------

    def define(self, body: Callable[..., Sequence[Any]], scope: str) -> None:
        """Record the body until nothing new comes. Raises InvalidArgument where that never happens."""
        for _ in range(_ROUNDS):
            try:
                region = retried(self, lambda: self._recorded(body, scope))
            except Unfinished:
                raise InvalidArgument(
                    f"{self.function.name} calls itself on every way through it, so it never ends: let a tfnb.cond "
                    f"decide{self.recorder.tape.at()}"
                ) from None
            if self._learnt(region):
                continue
            self.function.define(self._body(region))
            return
        raise InvalidArgument(
            f"the results of {self.function.name} change their shape with each recording of its body: {self.results}"
            f"{self.recorder.tape.at()}"
        )

    def _recorded(self, body: Callable[..., Sequence[Any]], scope: str) -> Region:
        recorder = self.recorder
        before, recorder.lazy = recorder.lazy, True  # what a call inside gives has no sample yet
        try:
            given = [Argument(spec, name) for spec, name in zip(self.specs, self.names, strict=True)]
            region = record_region(recorder, body, given, scope=scope, iterations=False)
        finally:
            recorder.lazy = before
        if region.written:
            raise Unsupported(
                f"{self.function.name} calls itself and writes a tensor or Variable of outside{recorder.tape.at()}"
            )
        return region

    def _learnt(self, region: Region) -> bool:
        """Whether the body told something new about itself."""
        by_id = {node.id: node for node in region.nodes}
        specs = [(by_id.get(v.node) or self.recorder.node(v.node)).outputs[v.index] for v in region.outputs if v]
        found = [(spec, self._shape(spec, self.specs)) for spec in specs]
        if self.results is not None:
            pairs = zip(found, self.results, strict=True)
            found = [(spec, _common(shape, known)) for (spec, shape), (_, known) in pairs]
        inner = [v for v in captures(self.recorder, [region]) if not self._is_constant(v)]
        more = [v for v in inner if v not in self.captured]
        told = self.results is not None and [shape for _, shape in found] == [shape for _, shape in self.results]
        self.results, self.captured = found, [*self.captured, *more]
        return bool(more) or not told

    def _is_constant(self, value: Value) -> bool:
        return self.recorder.node(value.node).op == "tfnb.constant"

    def _body(self, region: Region) -> Any:
        """The body as a function of its arguments, then of its captured values; constants are inside."""
        recorder = self.recorder
        used = dict.fromkeys(v for node in region.nodes for v in node.inputs)
        used |= dict.fromkeys(filter(None, region.outputs))
        ids = region.ids
        constants = {v.node: recorder.node(v.node) for v in used if v.node not in ids and self._is_constant(v)}
        region.nodes[:0] = constants.values()
        return subgraph(recorder, region, self.captured, region.outputs)

    def _shape(self, spec: Spec, given: Sequence[Spec]) -> Shape:
        """The sizes of a result; None for each size unknown from the arguments."""
        own = {s for known in given for s in known.symbols}
        shape = now(self.recorder, spec)

        def known(size: Size) -> bool:
            if not isinstance(size, Dim) or own.issuperset(size.symbols):
                return True
            return bound_outside(self.recorder, replace(spec, shape=(size,)))

        return tuple(size if known(size) else None for size in shape)

    # -- a call -----------------------------------------------------------------------------------------------

    def call(self, args: Sequence[Tensor], stream: int | None = None) -> list[Tensor]:
        """Record a call; ``stream``: the number among random nodes of the call that this one belongs to."""
        recorder = self.recorder
        entries = [recorder._entry(tensor) for tensor in args]
        sizes = self._sizes([recorder.node(e.value.node).outputs[e.value.index] for e in entries])
        if self.results is None:
            raise Unfinished
        inputs = [*(e.value for e in entries), *self.captured]
        attrs = {"function": self.function, "args": tuple(map(Ref, range(len(inputs))))}
        outputs = [replace(spec, shape=tuple(self._size(s, sizes) for s in shape)) for spec, shape in self.results]
        return append(recorder, ops.CALL, inputs, attrs, outputs, stream=stream, draws=True)

    def _sizes(self, specs: Sequence[Spec]) -> dict[str, Any]:
        """The function's own sizes in a call of these specs."""
        symbols, found = self.recorder.symbols, dict[str, Any]()
        for place, (wanted, spec) in enumerate(zip(self.specs, specs, strict=True)):
            if (wanted.dtype, len(wanted.shape), wanted.device) != (spec.dtype, len(spec.shape), spec.device):
                raise InvalidArgument(
                    f"{self.function.name} is recorded for {wanted} as argument {place}, and calls itself with {spec}"
                    f"{self.recorder.tape.at()}"
                )
            for axis, (mine, size) in enumerate(zip(now(self.recorder, wanted), now(self.recorder, spec), strict=True)):
                if isinstance(mine, Dim):
                    if mine.is_symbol and found.setdefault(mine.expr, size) != size:
                        self._widen(place, axis)
                elif mine != size:
                    self._widen(place, axis)
        return {
            name: size.evaluate(symbols.bindings([size])) if isinstance(size, Dim) else size
            for name, size in found.items()
        }

    def _widen(self, place: int, axis: int) -> None:
        """Let a size vary by call, after a call that did not fit the recorded body, and record the body again."""
        self.loose.add((place, axis))
        self.generalise()
        raise Retry(self)

    def _size(self, size: Size | None, sizes: dict[str, Any]) -> Size:
        symbols = self.recorder.symbols
        if size is None:
            return symbols.size(symbols.env.create_unbacked_symint())
        if not isinstance(size, Dim):
            return size
        return symbols.size(size.evaluate({**symbols.bindings([size]), **sizes}))


def _common(shape: Shape, other: Shape) -> Shape:
    return tuple(a if a == b else None for a, b in zip(shape, other, strict=True))


@contextmanager
def opened(recorder: Recording, key: Hashable, of: object) -> Iterator[None]:
    """Calls inside that have the key are told: of this definition, or of the call that is being recorded."""
    recorder.calls[key] = of
    try:
        yield
    finally:
        del recorder.calls[key]
