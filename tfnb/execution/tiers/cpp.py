"""A loop as C++, for numbers and small tensors of one shape each: control flow is written here.

What its ops compute is written by inductor (`tfnb.execution.tiers.cpp_ops`): pointwise ops, small sums, views. Imported
late, as inductor takes seconds to load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor.codecache import CppCodeCache
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP
from torch._inductor.ir import TensorBox

from tfnb.errors import Unimplemented
from tfnb.execution.tiers.cpp_ops import Code, TensorLayout, lowering, shape_of, strides_of
from tfnb.graph import Dim, Graph, Node, Ref, Subgraph, Value, ops
from tfnb.graph.node import map_leaves
from tfnb.graph.op_facts import kernel, unbind
from tfnb.graph.ops import overload
from tfnb.passes import optimize
from tfnb.recording.values.interpret import sizes_hold

MOST_NODES = 1000

WENT_ON, ENDED, REFUSED, STOPPED = range(4)
"""What the function returns: the iterations are done; the condition does not hold; a division by zero, an index out of
bounds, another branch than recorded; Python raised something."""

_HEAD = """
#include <torch/csrc/inductor/cpp_prefix.h>
#include <chrono>
#include <cstring>
extern "C" {
void* PyEval_SaveThread(void);
void PyEval_RestoreThread(void*);
void* PyObject_CallNoArgs(void*);
void Py_DecRef(void*);
}
namespace {
// Runs without Python's lock; now and then lets Python raise what a signal or another thread wants.
struct Watch {
  using Clock = std::chrono::steady_clock;
  void* call;
  void* thread = PyEval_SaveThread();
  int left = 256;
  Clock::time_point next = Clock::now() + std::chrono::milliseconds(20);
  bool raised = false;
  explicit Watch(void* call) : call(call) {}
  ~Watch() { if (thread) PyEval_RestoreThread(thread); }
  bool stops() { return --left == 0 && looks(); }
  __attribute__((noinline)) bool looks() {
    left = 256;
    if (Clock::now() < next) return false;
    PyEval_RestoreThread(thread);
    thread = nullptr;
    void* found = PyObject_CallNoArgs(call);
    raised = !found;
    if (raised) return true;
    Py_DecRef(found);
    thread = PyEval_SaveThread();
    next = Clock::now() + std::chrono::milliseconds(20);
    return false;
  }
};
struct Stopped {};
}
"""


Row = tuple[int, tuple[int, ...]]
"""Which of a loop's rows, and its shape."""


@dataclass(frozen=True)
class LoopSource:
    """The code of a loop; called with pointers to the state, the operands, and the row outputs."""

    text: str
    constants: list[torch.Tensor]  # their pointers come last


def source(
    node: Node,
    init: Sequence[TensorLayout],
    xs: Sequence[TensorLayout],
    captures: Sequence[TensorLayout],
    rows: Sequence[Row],
) -> LoopSource:
    """The code of a ``tfnb.while`` for tensors of these layouts; ``rows``: the requested ones.

    Raises Unimplemented, or whatever inductor raises, where it has to be run in another way.
    """
    with lowering() as graph:
        return _Loops(graph).function(node, init, xs, captures, rows)


def build(text: str) -> str:
    """Compile; the path of the library. Overflowing integers wrap around, as they do in torch."""
    return CppCodeCache.load(text, extra_flags=("-fwrapv", "-fsigned-zeros"))._name


class _Loops(Code):
    """The code of a loop under construction."""

    nodes = 0

    def function(
        self,
        node: Node,
        init: Sequence[TensorLayout],
        xs: Sequence[TensorLayout],
        captures: Sequence[TensorLayout],
        rows: Sequence[Row],
    ) -> LoopSource:
        """The whole: the state is read, run from iteration ``iteration`` to ``end``, and written back."""
        attrs, carried = node.attrs, len(init)
        state = [self.declared(layout.dtype, layout.shape, "s") for layout in init]
        pointers = []
        for (name, room), layout in zip(state, init, strict=True):
            pointers.append(f"static_cast<{DTYPE_TO_CPP[layout.dtype]}*>(data[{self.pointers}])")
            self.store(name, self.argument(TensorLayout(layout.dtype, layout.shape, strides_of(room))))
        row = "(last - *iteration)" if attrs["reverse"] else "*iteration"
        taken = [self.argument(layout, row) for layout in xs]
        given = [self.argument(layout) for layout in captures]
        outs = [f"data[{self.pointers + place}]" for place in range(len(rows))]
        self.pointers += len(rows)
        outputs = attrs["body"].outputs
        wanted = [*outputs[:carried], *(outputs[carried + place] for place, _ in rows)]
        self.line("int32_t result = 0;")
        with self.block("try"), self.block("for (; *iteration < end; ++*iteration)"):
            if attrs["cond"] is not None:
                (goes,) = self.inlined(attrs["cond"], attrs["cond"].outputs, [*_rooms(state), *given])
                self.leave(goes, f"result = {ENDED}; break;")
            made = self.inlined(attrs["body"], wanted, [*_rooms(state), *taken, *given])
            for out, value, (_, shape) in zip(outs, made[carried:], rows, strict=True):
                self.row(out, value, shape)
            self.assign(state, made[:carried])
            self.line("if (watch.stops()) throw Stopped();")
        self.line(f"catch (...) {{ return watch.raised ? {STOPPED} : {REFUSED}; }}")
        for room, pointer in zip(_rooms(state), pointers, strict=True):
            target = self.name("out")
            self.line(f"auto* const {target} = {pointer};")
            self.store(target, room, at="0")
        self.line("return result;")
        code = "\n".join(self.lines).replace("CONSTANTS", str(self.pointers))
        head = 'extern "C" int32_t loop(void** data, int64_t* iteration, int64_t end, int64_t last, void* python) {'
        start = "  const int64_t first = *iteration;\n  Watch watch(python);"
        return LoopSource("\n".join([_HEAD, head, start, code, "}\n"]), self.given)

    def row(self, out: str, value: TensorBox, shape: tuple[int, ...]) -> None:
        """Write a row of the result."""
        if shape_of(value) != shape:
            raise Unimplemented("a row of another shape")
        count, kind = math.prod(shape_of(value)), DTYPE_TO_CPP[value.get_dtype()]
        self.store(f"static_cast<{kind}*>({out})", value, at=f"(*iteration - first) * {count}")

    def assign(self, state: Sequence[tuple[str, TensorBox]], values: Sequence[TensorBox]) -> None:
        """The state becomes these values, all at once."""
        for room, value in zip(_rooms(state), values, strict=True):
            if shape_of(room) != shape_of(value) or room.get_dtype() != value.get_dtype():
                raise Unimplemented("a loop variable changes its shape")
        made = [value if value is room else self.kept(value) for (_, room), value in zip(state, values, strict=True)]
        for (name, room), value in zip(state, made, strict=True):
            if value is not room:
                self.store(name, value)

    def leave(self, goes: TensorBox, how: str) -> None:
        """Leave the loop unless the condition holds."""
        self.line(f"if (!{self.truth(goes)}) {{ {how} }}")

    def truth(self, value: TensorBox) -> str:
        """A value of one element, as a truth value."""
        name, _ = self.declared(torch.bool, ())
        self.store(name, self.op(torch.ops.aten.ne.Scalar, (self.one(value), 0), {}))
        return name

    def one(self, value: TensorBox) -> TensorBox:
        """A value of one element, as a number."""
        if math.prod(shape_of(value)) != 1:
            raise Unimplemented("a condition of several elements")
        return self.op(torch.ops.aten.reshape.default, (value, []), {}) if shape_of(value) else value

    def inlined(
        self, part: Subgraph, outputs: Sequence[Value | None], inputs: Sequence[TensorBox]
    ) -> list[TensorBox]:  # fmt: skip
        """The code of a subgraph; returns its present outputs."""
        wanted = [value for value in outputs if value is not None]
        contents = part.contents
        values: dict[Value, TensorBox] = {}
        symbols: dict[str, int] = {}

        def meet(node: Node, outs: Sequence[TensorBox]) -> None:
            for index, (spec, box) in enumerate(zip(node.outputs, outs, strict=True)):
                values[node.value(index)] = box
                if box.get_dtype() != spec.dtype or len(shape_of(box)) != len(spec.shape):
                    raise Unimplemented(f"{node.op} of another kind: {box.get_dtype()}{shape_of(box)} for {spec}")
                for size, found in zip(spec.shape, shape_of(box), strict=True):
                    if isinstance(size, Dim) and size.is_symbol:
                        symbols.setdefault(size.expr, found)

        for value, box in zip(part.inputs, inputs, strict=True):
            meet(contents.by_id[value.node], [box])
        for guard in contents.guards:
            sizes_hold(guard, symbols)
        pruned = optimize(Graph("subgraph", contents), (*wanted, *part.guards), part.inputs, ())
        for node in pruned.nodes:
            if node.op != "tfnb.placeholder":
                self.nodes += 1
                if self.nodes > MOST_NODES:
                    raise Unimplemented(f"more than {MOST_NODES} nodes")
                meet(node, self.node(node, [values[v] for v in node.inputs], symbols))
        return [values[value] for value in wanted]

    def node(self, node: Node, inputs: Sequence[TensorBox], symbols: Mapping[str, int]) -> Sequence[TensorBox]:
        """The code of a node; its outputs."""

        def argument(leaf: object) -> Any:
            if isinstance(leaf, Ref):
                return inputs[leaf.input]
            return leaf.evaluate(symbols) if isinstance(leaf, Dim) else leaf

        if node.op == "tfnb.constant":
            return [self.constant(node.attrs["value"])]
        attrs = map_leaves(argument, node.attrs)
        match node.op:
            case ops.WITH_GRADIENT:
                return list(attrs["values"])
            case ops.COND:
                return self.cond(node, attrs)
            case ops.WHILE:
                return self.nested(node, attrs)
            case "tfnb.guard":
                return self.guard(node, attrs)
        if not node.op.startswith("aten.") or node.stream is not None:
            raise Unimplemented(f"{node.op} is no arithmetic")
        op = overload(node.op)
        if kernel(op) not in (op, torch.ops.aten.reshape.default):
            raise Unimplemented(f"{op} looks at memory")
        args, kwargs = unbind(op, attrs)
        return _listed(self.op(op, args, kwargs))

    def guard(self, node: Node, attrs: Mapping[str, Any]) -> Sequence[TensorBox]:
        """A branch that Python took while recording: any other is for generated code to report."""
        self.line(f"if ({self.truth(attrs['value'])} != {int(node.attrs['outcome'])}) throw Stopped();")
        return []

    def cond(self, node: Node, attrs: Mapping[str, Any]) -> Sequence[TensorBox]:
        """The code of a branch: an output that one side lacks gets the right shape and arbitrary contents."""
        name = self.truth(attrs["pred"])
        shapes: list[tuple[int, ...] | None] = [None] * len(node.outputs)
        rooms: list[tuple[str, TensorBox]] = []
        made: dict[str, list[TensorBox | None]] = {}
        codes: dict[str, list[str]] = {}
        for part in ("then", "else"):
            before, self.lines = self.lines, []
            self.depth += 1
            branch = attrs[part]
            given = iter(self.inlined(branch, branch.outputs, attrs["operands"]))
            made[part] = [None if value is None else self.kept(next(given)) for value in branch.outputs]
            self.depth -= 1
            codes[part], self.lines = self.lines, before
        for index, spec in enumerate(node.outputs):
            found = [value for value in (made["then"][index], made["else"][index]) if value is not None]
            sizes = {shape_of(value) for value in found}
            if len(sizes) != 1:
                raise Unimplemented("branches give other shapes")
            shapes[index] = sizes.pop()
            rooms.append(self.declared(spec.dtype, shapes[index] or ()))
        for part, head in (("then", f"if ({name})"), ("else", "else")):
            with self.block(head):
                self.lines += codes[part]
                for (target, _), value in zip(rooms, made[part], strict=True):
                    if value is not None:
                        self.store(target, value)
        return _rooms(rooms)

    def nested(self, node: Node, attrs: Mapping[str, Any]) -> Sequence[TensorBox]:
        """A loop inside; rows that are stacked would need room of any size."""
        if attrs["rows"] or attrs["xs"]:
            raise Unimplemented("a loop inside over rows")
        state = []
        for value in attrs["init"]:
            name, room = self.declared(value.get_dtype(), shape_of(value), "s")
            self.store(name, value)
            state.append((name, room))
        iterations, room = self.declared(torch.int64, (), "iterations")
        limit = self.limit(attrs["limit"])
        self.line(f"{iterations} = 0;")
        with self.block(f"for (; {f'{iterations} < {limit}' if limit else ''}; ++{iterations})"):
            if attrs["cond"] is not None:
                (goes,) = self.inlined(attrs["cond"], attrs["cond"].outputs, [*_rooms(state), *attrs["captures"]])
                self.leave(goes, "break;")
            made = self.inlined(attrs["body"], attrs["body"].outputs, [*_rooms(state), *attrs["captures"]])
            self.assign(state, made)
            self.line("if (watch.stops()) throw Stopped();")
        return [*_rooms(state), room]

    def limit(self, limit: object) -> str:
        if not isinstance(limit, TensorBox):
            return "" if limit is None else str(limit)
        name, _ = self.declared(torch.int64, ())
        self.store(name, self.op(torch.ops.aten._to_copy.default, (self.one(limit),), {"dtype": torch.int64}))
        return name


def _rooms(named: Sequence[tuple[str, TensorBox]]) -> list[TensorBox]:
    return [room for _, room in named]


def _listed(made: Any) -> Sequence[TensorBox]:
    return list(made) if isinstance(made, (list, tuple)) else [made]
