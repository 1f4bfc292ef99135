"""Facts about operators beside what torch does when it runs them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.coverage.checks import entries
from tfnb.graph.op_facts import facts

aten = torch.ops.aten
COPIES = (
    aten.clone.default, aten.reshape.default, aten.contiguous.default, aten.view_copy.default, aten.expand_copy.default,
    aten.select_copy.int, aten.slice_copy.Tensor, aten.unbind_copy.int, aten.diagonal_copy.default,
)  # fmt: skip
COMPUTED = (aten.add.Tensor, aten.relu.default, aten.sum.default, aten.mm.default, aten._to_copy.default,
            aten.slice_scatter.default, aten.select_scatter.default)  # fmt: skip


class ViewsSeen(TorchDispatchMode):
    """The ops that gave memory of their first operand while they ran, and wrote nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch._ops.OpOverload] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if args and isinstance(args[0], torch.Tensor) and not func._schema.is_mutable and func.namespace == "aten":
            memory = args[0].untyped_storage()._cdata
            tensors = [result for result in tree_leaves(results) if isinstance(result, torch.Tensor)]
            if any(result.numel() and result.untyped_storage()._cdata == memory for result in tensors):
                self.found.add(func)
        return results


@pytest.mark.slow  # torch's table of operators takes seconds to load
@pytest.mark.filterwarnings("ignore")
def test_each_op_that_looks_at_its_operand_is_known_to_keep_its_elements() -> None:
    seen = ViewsSeen()
    for info in entries().values():
        if torch.float32 in info.supported_dtypes("cpu"):
            sample = next(iter(info.sample_inputs("cpu", torch.float32)))
            with seen, suppress(AssertionError, RuntimeError):  # an op for devices that are not here
                info.op(sample.input, *sample.args, **sample.kwargs)
    assert len(seen.found) > 20, "hardly a view was seen"
    assert {str(op) for op in seen.found if not facts(op).keeps_elements} == set()


def test_copies_keep_the_elements_and_computed_values_do_not() -> None:
    assert {str(op) for op in COPIES if not facts(op).keeps_elements} == set()
    assert {str(op) for op in COMPUTED if facts(op).keeps_elements} == set()
