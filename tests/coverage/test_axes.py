"""Every OpInfo entry for which batching is meaningful, recorded at one batch and run at others: values and gradients.

A quick sweep tries one sample of every sixth entry, the slow one three of each. None may be silently wrong.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from tests.coverage.axes import REFUSED, WRONG, case_of, varies

TALL = "tall and wide matrices have different formulas: the recording says which it holds, and refuses the others"
DATA = "the size of the result is read from the data"
NUMBERS = "torch's composite asks for numbers: the size is fixed, and said"
LINES = "the call means something else at that size, and is refused there"
WRITES = "writes in place without an out-of-place form, or gives its memory another size"
SHAPE = "torch has no shape rule for symbolic sizes"
SPARSE = "sparse layout"

KNOWN = {
    name: reason
    for reason, names in {
        TALL: """linalg.matrix_rank linalg.norm linalg.pinv linalg.pinv.singular linalg.qr linalg.svd pca_lowrank
            pinverse qr svd svd_lowrank""",
        DATA: "nn.functional.one_hot unique_consecutive",
        NUMBERS: "fft.hfftn fft.irfftn gradient hash_tensor nn.functional.embedding_bag",
        LINES: "__getitem__ cross diff tensor_split vsplit",
        WRITES: "_batch_norm_with_update nn.functional.rrelu resize_ resize_as_",
        SHAPE: "histogramdd linalg.lstsq linalg.lstsq.grad_oriented",
        SPARSE: "to_sparse",
    }.items()
    for name in names.split()
}


def _name(info: Any) -> str:
    return info.name + (f".{info.variant_test_name}" if info.variant_test_name else "")


INFOS = {_name(info): info for info in sorted(op_db, key=_name)}
NO_CPU = "torch has no kernel or no sample for the CPU"


def _samples(info: Any, count: int) -> list[Any]:
    """A few samples for which batching is meaningful, spread over all."""
    known = info.supported_dtypes("cpu")
    dtype = next((d for d in (torch.float64, torch.float32, torch.int64, torch.bool, *known) if d in known), None)
    if dtype is None or (dtype.itemsize == 1 and dtype.is_floating_point):
        pytest.skip(NO_CPU)
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(0)
    try:
        found = list(info.sample_inputs("cpu", dtype, requires_grad=info.supports_autograd and dtype == torch.float64))
    except RuntimeError:
        pytest.skip(NO_CPU)
    spread = found[:: max(1, len(found) // (2 * count))] + found
    return [sample for sample in spread[: 8 * count] if case_of(info, sample)][:count]


def _check(name: str, count: int) -> None:
    info = INFOS[name]
    samples = _samples(info, count)
    if not samples:
        pytest.skip("batching means nothing here")
    for said in (varies(info, sample) for sample in samples):
        assert said is None or name in KNOWN, said
        assert said is None or not said.startswith(WRONG), said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(INFOS)[::6])
def test_one_sample_runs_at_other_sizes(name: str) -> None:
    _check(name, 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", INFOS)
def test_samples_run_at_other_sizes(name: str) -> None:
    _check(name, 3)


# -- the check can fail -----------------------------------------------------------------------------------------------


class _Entry:
    """As much of an OpInfo as the check looks at."""

    name = "made up"

    def __init__(self, op: Any) -> None:
        self.op = op


class _Sample:
    def __init__(self, *tensors: torch.Tensor) -> None:
        self.input, self.args, self.kwargs = tensors[0], tensors[1:], {}


@pytest.mark.filterwarnings("ignore")
def test_a_frozen_size_or_gradient_is_found() -> None:
    sample = _Sample(torch.rand(5, 3, dtype=torch.float64).requires_grad_())
    rows: list[int] = []

    def frozen(x: torch.Tensor) -> torch.Tensor:
        is_recorded = type(x) is not torch.Tensor
        rows.append(int(x.sample.shape[0]) if is_recorded else x.shape[0])  # type: ignore[attr-defined]
        return x.sum() / rows[-1]

    assert str(varies(_Entry(frozen), sample)).startswith(WRONG)
    assert str(varies(_Entry(lambda x: x * len(x)), sample)).startswith(REFUSED)
    assert varies(_Entry(lambda x: x.sum() / x.shape[0]), sample) is None
