"""Shapes of custom ops that came without a fake implementation.

The op's own Python code is tried on fake tensors, which gives sizes that vary as the inputs' do. Where that code is no
torch code, the sample's sizes serve, if no input has a varying axis. Uses private names of torch (tried with torch
2.11 and 2.13).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch._library.utils import has_fake_kernel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from tfnb.errors import Unsupported
from tfnb.graph.op_facts import Op, op_name
from tfnb.graph.ops import overload
from tfnb.graph.pure import on_copies, original
from tfnb.interrupts import from_signal_handler
from tfnb.recording.shapes.symbols import Symbols

_PYTHON = re.compile(r"^(CPU|CUDA|CompositeExplicitAutograd)(?:\[alias\])?: registered at \S+\.py:\d+", re.MULTILINE)


@lru_cache(maxsize=4096)
def lacks_shapes(op: Op) -> bool:
    """Whether torch cannot infer the output shapes of this custom op."""
    source = original(op_name(op))
    if source is not None:
        return lacks_shapes(overload(source))
    return op.namespace not in ("aten", "prims") and not has_fake_kernel(op)


class SampledTensor(Protocol):
    """A fake tensor and its sample, if there is one."""

    @property
    def fake(self) -> torch.Tensor: ...

    @property
    def sample(self) -> torch.Tensor | None: ...


def shapes(
    symbols: Symbols, op: Op, args: Any, kwargs: Any, inputs: Sequence[SampledTensor], at: Callable[[], str]
) -> Any:
    """The fake results of ``op``; raises Unsupported if unknown. at: the user's line."""
    error: Exception | None = None
    for kernel in _kernels(op):
        try:
            return kernel(*args, **kwargs)
        except Exception as found:  # not torch code, or code that needs values
            if from_signal_handler(found):
                raise
            error = found
    samples = {id(entry.fake): entry.sample for entry in inputs}
    varies = any(isinstance(size, torch.SymInt) for entry in inputs for size in entry.fake.shape)
    if varies or any(sample is None for sample in samples.values()):
        what = "inputs whose size varies" if varies else "inputs without samples"
        raise Unsupported(
            f"{op_name(op)} has no fake implementation, and its code does not run on shapes alone: for {what} the "
            f"shape of its result is not known{at()}; give it one with torch.library.register_fake, or "
            "the placeholders samples and a fixed shape=", op=op_name(op),
        ) from error  # fmt: skip

    def sample(x: object) -> Any:
        return samples.get(id(x), x)

    with _disable_current_modes(), torch.no_grad():
        result = op(*tree_map(sample, args), **tree_map(sample, kwargs))
    return tree_map(lambda x: symbols.fake_like(x) if isinstance(x, torch.Tensor) else x, result)


def _kernels(op: Op) -> list[Callable[..., Any]]:
    """The op's own implementations in Python."""
    source = original(op_name(op))
    if source is not None:
        return [on_copies(overload(source), kernel) for kernel in _kernels(overload(source))]
    keys = _PYTHON.findall(torch._C._dispatch_dump(op._name))
    return [partial(op._op_dk, getattr(torch._C.DispatchKey, key)) for key in keys]
