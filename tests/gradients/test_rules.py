"""Every rule against torch autograd in float64: PyTorch's own samples of every operator, first and second order.

An operator's samples reach the rules of the ATen ops it is made of. torch's autograd is a fair oracle: no rule calls
it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.gradients.reference import compare
from tests.gradients.test_overloads import ROWS
from tfnb.gradients.table import NOGRAD, RULES

RANDOM = "draws its own numbers: torch's global generator is not ours (tested in test_models.py)"
SPARSE = "sparse tensors have no gradient here"
RECORDER = "not recordable: the shape or the branch depends on data, or it writes metadata in place"
TORCH = "torch's own gradient is wrong or NaN there"

SKIPPED = {
    RANDOM: """
        bernoulli nn.functional.alpha_dropout nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d
        nn.functional.feature_alpha_dropout.with_train nn.functional.fractional_max_pool2d
        nn.functional.fractional_max_pool3d nn.functional.multi_head_attention_forward normal normal.number_mean
        nn.functional.rrelu pca_lowrank svd_lowrank""",
    RECORDER: """
        as_strided.partial_views""",
    SPARSE: """
        sparse.mm.reduce sparse.sampled_addmm to_sparse""",
    TORCH: "as_strided_scatter",
}
WHY = {name: reason for reason, names in SKIPPED.items() for name in names.split()}
FIRST_ORDER = {  # torch's second order is NaN there, or torch has none
    "linalg.norm.subgradients_at_zero", "masked.logaddexp", "nn.functional.ctc_loss",
}  # fmt: skip

ELSEWHERE = {
    "aten._ctc_loss.Tensor",
    "aten.as_strided_scatter.default",  # test_overloads.py: not through autograd
    "aten.native_dropout.default", "tfnb.assign", "tfnb.gru_layer.default", "tfnb.lstm_layer.default",
    "tfnb.rnn_layer.default", "tfnb.slices.default", "tfnb.coalesce.default",
    "tfnb.densify.default",  # test_slices.py
    "aten._native_batch_norm_legit_no_training.default",  # test_models.py
}  # fmt: skip
REACHED: set[str] = set()


def _name(info: Any) -> str:
    return info.name + (f".{info.variant_test_name}" if info.variant_test_name else "")


INFOS = {_name(i): i for i in op_db if i.supports_autograd and torch.float64 in i.supported_dtypes("cpu")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(INFOS))
def test_gradients_equal_autograd(name: str) -> None:
    if name in WHY:
        pytest.skip(WHY[name])
    info = INFOS[name]
    samples = [s for s in info.sample_inputs("cpu", torch.float64, requires_grad=True) if _has_elements(s.input)]
    for sample in samples[:: max(1, len(samples) // 2)][:2]:
        _compare(info, sample, second=info.supports_gradgrad and name not in FIRST_ORDER)


def _compare(info: Any, sample: Any, *, second: bool) -> None:
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))

    def function(*leaves: Any) -> Any:
        first, args, kwargs = tree_unflatten(leaves, spec)
        return info.op(first, *args, **kwargs)

    REACHED.update(node.op for node in compare(function, leaves, second=second).nodes)


def _has_elements(first: Any) -> bool:
    return not isinstance(first, torch.Tensor) or first.numel() > 0


def test_every_rule_is_reached() -> None:
    """Runs after the samples: a rule is met by them, by a row of test_overloads.py, or by a test named here."""
    if len(REACHED) < 300:
        pytest.skip("only part of the samples ran")
    unreached = sorted(set(RULES) - REACHED - set(ROWS) - ELSEWHERE)
    assert not unreached, "\n".join(unreached)


def test_no_rule_is_declared_without_gradient() -> None:
    assert sorted(set(RULES) & NOGRAD) == []
