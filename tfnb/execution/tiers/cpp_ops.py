"""torch's ops as C++ written by inductor: values of one shape, op after op, in variables and arrays.

Each op is lowered by inductor, after its decompositions, and inductor's kernel for the CPU writes the arithmetic of an
element. Imported late, as inductor takes seconds to load (tried with torch 2.11 and 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch._inductor import ir
from torch._inductor.codegen.common import KernelArgs
from torch._inductor.codegen.cpp import CppKernel, CppOverrides, reduction_combine, reduction_init
from torch._inductor.codegen.cpp_utils import DTYPE_TO_CPP, cexpr_index, value_to_cpp
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import FixedLayout, InputBuffer, StorageBox, TensorBox
from torch._inductor.lowering import lowerings
from torch._inductor.virtualized import V
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tfnb.errors import Unimplemented
from tfnb.graph import Ref
from tfnb.graph.node import map_leaves
from tfnb.graph.op_facts import facts

LARGEST = 4096  # elements of a value inside: arrays on the stack
MOST_SUMMED = 256  # elements, added one after the other
_DTYPES = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64,
})  # fmt: skip
_SUMS = frozenset({"sum", "prod", "max", "min", "any", "xor_sum"})
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class TensorLayout:
    """A tensor that the loop is given."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLayout:
        """The layout of a tensor; raises Unimplemented for tensors without a form in C++."""
        if (
            tensor.device != _CPU
            or tensor.layout is not torch.strided
            or tensor.dtype not in _DTYPES
            or tensor.is_neg()
        ):
            raise Unimplemented(f"a {str(tensor.dtype)[6:]} tensor on {tensor.device} is no number of C++")
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride())


class _SafeDivisions(CppOverrides):
    """Divisions of integers by zero end the run, as they do in torch, and not the process."""

    @staticmethod
    def floordiv(a: object, b: object) -> str:
        _unless_zero(b)
        return CppOverrides.floordiv(a, b)

    @staticmethod
    def truncdiv(a: object, b: object) -> str:
        _unless_zero(b)
        return CppOverrides.truncdiv(a, b)

    @staticmethod
    def mod(a: object, b: object) -> str:
        _unless_zero(b)
        return CppOverrides.mod(a, b)


def _unless_zero(divisor: object) -> None:
    V.kernel.compute.writeline(f"if ({divisor} == 0) throw Stopped();")


class _Kernel(CppKernel):
    """Inductor's kernel, with loads from the loop's variables and arrays."""

    overrides = _SafeDivisions

    def __init__(self, places: Mapping[str, str]) -> None:
        super().__init__(KernelArgs(), 1)
        self.places = places

    def load(self, name: str, index: sympy.Expr) -> Any:
        """An element of an array, or a C++ variable."""
        place = self.places[name].replace("INDEX", cexpr_index(self.rename_indexing(index)))
        made = self.cse.generate(self.compute, place, dtype=V.graph.get_dtype(name))
        made.update_on_args("load", (self, name, index), {})
        return made


@contextmanager
def lowering() -> Iterator[GraphLowering]:
    """The lowering context of inductor, while code is written."""
    empty = fx.Graph()
    empty.output(())
    graph = GraphLowering(fx.GraphModule({}, empty))
    with V.set_graph_handler(graph), graph.set_current_device(_CPU):
        yield graph


class Code:
    """C++ under construction. A value is a box of inductor's; computed values are named buffers."""

    def __init__(self, graph: GraphLowering) -> None:
        self.graph = graph
        self.lines: list[str] = []
        self.depth = 1
        self.places: dict[str, str] = {}  # of a buffer's name: its element INDEX
        self.given: list[torch.Tensor] = []
        self.pointers = 0
        self.names = 0
        self.buffers = 0  # of inductor's, that are in room of their own
        self.table = select_decomp_table()

    # -- text ------------------------------------------------------------------------------------------------------

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        self.line(f"{head} {{")
        self.depth += 1
        yield
        self.depth -= 1
        self.line("}")

    def name(self, prefix: str) -> str:
        self.names += 1
        return f"{prefix}{self.names}"

    # -- values ----------------------------------------------------------------------------------------------------

    def buffer(self, name: str, place: str, layout: TensorLayout) -> TensorBox:
        """A value whose elements are at ``place``."""
        sizes, strides = ([sympy.Integer(n) for n in numbers] for numbers in (layout.shape, layout.stride))
        made = TensorBox.create(InputBuffer(name=name, layout=FixedLayout(_CPU, layout.dtype, sizes, strides)))
        self.graph.graph_inputs[name] = made
        self.places[name] = place
        return made

    def declared(self, dtype: torch.dtype, shape: Sequence[int], prefix: str = "v") -> tuple[str, TensorBox]:
        """Declare storage for a value: a variable for a single number, else an array."""
        count = math.prod(shape)
        if dtype not in _DTYPES or count > LARGEST:
            raise Unimplemented(f"a {str(dtype)[6:]} tensor of {count} elements is not small")
        name = self.name(prefix)
        self.line(f"{DTYPE_TO_CPP[dtype]} {name}{'' if count == 1 else f'[{max(count, 1)}]'};")
        stride = tuple(torch.empty(shape, device="meta").stride())
        return name, self.buffer(
            name, name if count == 1 else f"{name}[INDEX]", TensorLayout(dtype, tuple(shape), stride)
        )

    def argument(self, layout: TensorLayout, row: str = "") -> TensorBox:
        """One of the tensors that the function is called with; ``row``: the number of the row that is meant."""
        pointer = f"static_cast<const {DTYPE_TO_CPP[layout.dtype]}*>(data[{self.pointers}])"
        self.pointers += 1
        name = self.name("x")
        self.line(f"const {DTYPE_TO_CPP[layout.dtype]}* const {name} = {pointer};")
        if row:
            inner = TensorLayout(layout.dtype, layout.shape[1:], layout.stride[1:])
            return self.buffer(name, f"{name}[{row} * {layout.stride[0]} + INDEX]", inner)
        return self.buffer(name, f"{name}[INDEX]", layout)

    def kept(self, value: TensorBox) -> TensorBox:
        """The value in room of its own."""
        name, room = self.declared(value.get_dtype(), shape_of(value))
        self.store(name, value)
        return room

    def store(self, name: str, value: TensorBox, at: str = "") -> None:
        """Write a value's elements one after the other, to a variable, an array, or ``at`` in a larger one."""
        shape = shape_of(value)
        count = math.prod(shape)
        indices = [sympy.Symbol(f"i{axis}", integer=True, nonnegative=True) for axis in range(len(shape))]
        data = _inside(value)
        with self.loops(indices, shape):
            kernel = _Kernel(self.places)
            with kernel:
                is_sum = isinstance(data, ir.Reduction)
                made = self.reduced(data, indices, kernel) if is_sum else data.make_loader()(indices)
            self.lines += ["  " * self.depth + text for text in kernel.compute.getvalue().splitlines()]
            flat = cexpr_index(_flat(indices, shape))
            target = f"{name}[{at} + {flat}]" if at else name if count == 1 else f"{name}[{flat}]"
            self.line(f"{target} = {made};")

    @contextmanager
    def loops(self, indices: Sequence[sympy.Symbol], shape: Sequence[int]) -> Iterator[None]:
        heads = [f"for (int64_t {i} = 0; {i} < {size}; ++{i})" for i, size in zip(indices, shape, strict=True)]
        with self.block(" ".join(heads)):
            yield

    def reduced(self, data: ir.Reduction, indices: Sequence[sympy.Symbol], kernel: _Kernel) -> str:
        """An element of a reduction: a loop over the reduced axes."""
        kind, shape = data.reduction_type, [int(size) for size in data.reduction_ranges]
        if kind not in _SUMS or math.prod(shape) > MOST_SUMMED:
            raise Unimplemented(f"a {kind} over {math.prod(shape)} elements")
        inner = [sympy.Symbol(f"r{axis}", integer=True, nonnegative=True) for axis in range(len(shape))]
        total, dtype = self.name("sum"), data.get_dtype()
        self.line(f"{DTYPE_TO_CPP[dtype]} {total} = {reduction_init(kind, dtype)};")
        with self.loops(inner, shape):
            value = data.inner_fn(indices, inner)
            self.lines += ["  " * self.depth + text for text in kernel.compute.getvalue().splitlines()]
            combined = reduction_combine(kind, total, value, src_dtype=data.src_dtype)
            self.line(f"{total} = {combined};")
        kernel.compute.clear()
        return total

    # -- ops -------------------------------------------------------------------------------------------------------

    def op(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The value of an overload's call."""
        return (self.decomposed if op in self.table else self.lowered)(op, args, kwargs)

    def lowered(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Views as they are, anything else computed."""
        if op not in lowerings:
            raise Unimplemented(f"{op}, for which inductor has no C++")
        try:
            return self.kept_or_view(op, lowerings[op](*args, **kwargs))
        except Unimplemented:
            raise
        except Exception as error:  # what inductor can only do where it plans memory and kernels itself
            raise Unimplemented(f"{op}, which is no arithmetic ({type(error).__name__})") from error

    def kept_or_view(self, op: OpOverload, made: Any) -> Any:
        """The result of an op in storage of its own, or as a view."""
        self.computed()
        if facts(op).is_view:
            return made
        if isinstance(made, (list, tuple)):
            return [self.kept(value) for value in made]
        if not isinstance(_inside(made), _ARITHMETIC):
            raise Unimplemented(f"{op}, which has a kernel of its own")
        return self.kept(made)

    def computed(self) -> None:
        """Give intermediate results of inductor, such as the sum of a mean, storage of their own."""
        for buffer in self.graph.buffers[self.buffers :]:
            self.buffers += 1
            if isinstance(buffer, ir.ComputedBuffer) and isinstance(buffer.data, _ARITHMETIC):
                buffer.freeze_layout()
                shape = tuple(int(size) for size in buffer.get_size())
                name, _ = self.declared(buffer.get_dtype(), shape)
                self.places[buffer.get_name()] = self.places[name]
                self.store(name, TensorBox(StorageBox(buffer)))

    def decomposed(self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """An op that inductor decomposes before lowering."""
        boxes: list[TensorBox] = []

        def fake(leaf: object) -> Any:
            if not isinstance(leaf, TensorBox):
                return leaf
            boxes.append(leaf)
            return Ref(len(boxes) - 1)

        form = map_leaves(fake, {"args": list(args), "kwargs": dict(kwargs)})

        def call(*tensors: torch.Tensor) -> Any:
            filled = map_leaves(lambda leaf: tensors[leaf.input] if isinstance(leaf, Ref) else leaf, form)
            return op(*filled["args"], **filled["kwargs"])

        with FakeTensorMode():
            tensors = [torch.empty_strided(shape_of(b), strides_of(b), dtype=b.get_dtype()) for b in boxes]
            traced = make_fx(call, self.table)(*tensors)
        return self.interpreted(traced, boxes)

    def interpreted(self, module: fx.GraphModule, inputs: Sequence[TensorBox]) -> Any:
        """The code of a graph of overloads."""
        values: dict[fx.Node, Any] = {}
        given = iter(inputs)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = self.constant(getattr(module, node.target))
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                if node.op == "output":
                    return args[0]
                is_op = isinstance(node.target, torch._ops.OpOverload)  # else operator.getitem
                values[node] = self.lowered(node.target, args, kwargs) if is_op else node.target(*args, **kwargs)
        raise AssertionError("a graph without an output")

    def constant(self, value: torch.Tensor) -> TensorBox:
        """A constant: its number, or one more tensor that the function is given."""
        layout = TensorLayout.of(value)
        name = self.name("c")
        if value.numel() == 1:
            number = value.item()
            text = value_to_cpp(int(number) if isinstance(number, bool) else number, DTYPE_TO_CPP[layout.dtype])
            self.line(f"const {DTYPE_TO_CPP[layout.dtype]} {name} = {text};")
            return self.buffer(name, name, layout)
        self.given.append(value)
        kind = f"const {DTYPE_TO_CPP[layout.dtype]}*"
        self.line(f"{kind} const {name} = static_cast<{kind}>(data[CONSTANTS + {len(self.given) - 1}]);")
        return self.buffer(name, f"{name}[INDEX]", layout)


_ARITHMETIC = (ir.Pointwise, ir.Reduction, ir.BaseView, InputBuffer)


def _inside(value: TensorBox) -> Any:
    """The IR node that computes a value."""
    data = value.data.data if isinstance(value.data, StorageBox) else value.data
    return data.data if isinstance(data, ir.ComputedBuffer) else data


def shape_of(value: TensorBox) -> tuple[int, ...]:
    return tuple(int(size) for size in value.get_size())


def strides_of(value: TensorBox) -> tuple[int, ...]:
    return tuple(torch.empty(shape_of(value), device="meta").stride())


def _flat(indices: Sequence[sympy.Expr], shape: Sequence[int]) -> sympy.Expr:
    at = sympy.Integer(0)
    for index, size in zip(indices, shape, strict=True):
        at = at * size + index
    return at
