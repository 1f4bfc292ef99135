"""The choice of library for matrix products: torch's own or oneDNN, timed at these very sizes.

Torch takes MKL for float32, which uses half of the lanes of processors of another maker: oneDNN takes half of its time
there (Zen 5, [256, 784] @ [784, 128] on one thread: 240 us, not 500). Of small products MKL is the quicker one. So
each product of a step is timed both ways where the step is compiled, and oneDNN's are ops of ours from there on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.ir import FixedLayout, TensorBox
from torch._inductor.lowering import permute, register_lowering
from torch._inductor.mkldnn_ir import LinearUnary, _create_output_node
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.kernels.define import op

QUICKER = 0.97  # of the time of torch's own: what is nearer differs by noise alone
ROUNDS, LEAST = 7, 1e-3  # timed blocks of each, and the seconds that one takes at least

aten = torch.ops.aten
Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides."""


def is_available() -> bool:
    """Whether torch has oneDNN with the op used here."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _fake(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


@op("(Tensor a, Tensor b) -> Tensor", _fake)
def onednn_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of two float32 matrices on the CPU; ``b`` may have any strides, a transposed ``a`` is copied.

    >>> onednn_product(torch.ones(2, 3), torch.ones(3, 1)).tolist()
    [[3.0], [3.0]]
    """
    return torch.ops.mkldnn._linear_pointwise.default(a, b.t(), None, "none", [], "")  # type: ignore[no-any-return]


_product = torch.ops.tfnb.onednn_product.default


def choose_products(graph: fx.Graph) -> None:
    """The pass of inductor's: products that oneDNN computes quicker become `onednn_product`."""
    if not is_available():
        return
    for target in (aten.mm.default, aten.addmm.default):
        for node in graph.find_nodes(op="call_function", target=target):
            *bias, a, b = node.args
            layouts = [_layout(x.meta.get("val")) for x in (a, b)]
            if node.kwargs or None in layouts or not _is_quicker(*layouts, torch.get_num_threads()):
                continue
            with graph.inserting_before(node):
                new = graph.call_function(_product, (a, b))
                new.meta.update(node.meta)
                if bias:
                    new = graph.call_function(aten.add.Tensor, (new, *bias))
                    new.meta.update(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def _layout(x: object) -> Layout | None:
    """How a matrix in float32 on the CPU lies, with examples for sizes that vary; None for another value."""
    if not isinstance(x, Tensor) or x.dtype is not torch.float32 or x.device.type != "cpu":
        return None
    sizes, strides = ([n if isinstance(n, int) else n.node.hint for n in given] for given in (x.shape, x.stride()))
    return None if None in (*sizes, *strides) or 0 in sizes else (tuple(sizes), tuple(strides))


@cache
def _is_quicker(first: Layout, second: Layout, threads: int) -> bool:
    """Whether oneDNN is, for matrices that lie so: timed without the hooks that the compiler adds to each op."""
    with _disable_current_modes(), torch._C._DisablePythonDispatcher(), torch.no_grad():
        a, b = (torch.empty_strided(*layout).fill_(0.5) for layout in (first, second))
        calls: Sequence[Callable[[], Tensor]] = (lambda: torch.mm(a, b), lambda: onednn_product(a, b))
        for call in calls:
            call()  # kernels are made for a size when it comes first
        count = max(1, round(LEAST / max(_seconds(calls[0], 1), 1e-7)))
        theirs, ours = zip(*([_seconds(call, count) for call in calls] for _ in range(ROUNDS)), strict=True)
    return min(ours) < QUICKER * min(theirs)


def _seconds(call: Callable[[], Tensor], count: int) -> float:
    """Processor seconds, so that other load does not decide. With one torch thread, time of this thread alone."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.process_time
    start = clock()
    for _ in range(count):
        call()
    return clock() - start


@register_lowering(_product, type_promotion_kind=None)  # type: ignore[untyped-decorator]
def _lowered(a: Any, b: object) -> Any:
    """Inductor's lowering of torch's op, which accepts constant weights only, here for weights of any strides."""
    x = LinearUnary.require_contiguous(LinearUnary.realize_input(a))
    w = LinearUnary.require_stride1(LinearUnary.realize_input(permute(b, [1, 0])))
    layout = FixedLayout(device=x.get_device_or_error(), dtype=x.get_dtype(), size=[x.get_size()[0], w.get_size()[0]])
    return TensorBox.create(_create_output_node(LinearUnary(layout, [x, w], [None, "none", [-1], ""])))
