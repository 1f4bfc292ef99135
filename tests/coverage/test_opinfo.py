"""Every OpInfo entry records, replays and differentiates, but for what `known.py` lists; what it lists fails.

A quick sweep takes a sample of each entry, and all where the entry is listed; test_samples.py and
test_gradients_of_samples.py all of all.
"""

from __future__ import annotations

import pytest
import torch

from tests.coverage import checks
from tests.coverage.known import KNOWN, TORCH_OF_PAGE
from tests.coverage.page import PAGE, TARGETS, fails, page, totals
from tests.coverage.sweep import COLUMNS, SAME_TORCH, applies, builds_on, failures, surprises
from tests.gradients.test_overloads import ROWS
from tfnb.gradients.rule_table import NOGRAD, RULES

MET_ELSEWHERE = {  # rules that no entry meets, and no row of test_overloads.py
    "aten.as_strided_scatter.default", "aten.native_dropout.default", "tfnb.assign", "tfnb.gru_layer.default",
    "aten.gru.input", "aten.lstm.input", "aten.rnn_relu.input", "aten.rnn_tanh.input", "tfnb.lstm_layer.default",
    "tfnb.rnn_layer.default", "tfnb.slices.default", "tfnb.coalesce.default", "tfnb.densify.default", "tfnb.call",
    "tfnb.cond", "tfnb.while", "tfnb.array_grown.default", "tfnb.array_read.default", "tfnb.array_write.default",
    "aten._native_batch_norm_legit_no_training.default", "tfnb.gru_layer_backward.default",
    "tfnb.lstm_layer_backward.default", "tfnb.rnn_layer_backward.default",
    "aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default",
    "aten._fused_moving_avg_obs_fq_helper_functional.default",
    "aten.fake_quantize_per_channel_affine_cachemask.default", "aten.fake_quantize_per_tensor_affine_cachemask.default",
}  # fmt: skip
FAILED: dict[str, dict[str, str]] = {}  # entry -> what the quick sweep found, in this process


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize_by("name", checks.entries)
def test_entry(name: str) -> None:
    whole = frozenset(column for column in COLUMNS if name in KNOWN[column])
    FAILED[name] = failures(checks.entries()[name], whole)
    assert surprises(name, FAILED[name]) == []


@pytest.mark.slow
@pytest.mark.parametrize("column", TARGETS)
def test_target_is_met(column: str) -> None:
    """In the table, and in this run: also on a torch for which the table was not made."""
    good, count = totals()[column]
    assert good >= TARGETS[column] * count, f"{good} of {count} by the table"
    if len(FAILED) < len(checks.entries()):
        return  # only part of the entries ran
    asked = [name for name, info in checks.entries().items() if column in applies(info)]
    good = sum(FAILED[name].keys().isdisjoint({column} | builds_on(column)) for name in asked)
    assert good >= TARGETS[column] * len(asked), f"{good} of {len(asked)} in this run"


def test_page_is_what_the_table_says() -> None:
    if not SAME_TORCH:
        pytest.skip(f"the page was made with torch {TORCH_OF_PAGE}")
    assert PAGE.read_text() == page(), "`make page` writes it anew"


def test_table_names_entries() -> None:
    if not SAME_TORCH:
        pytest.skip(f"the table was made with torch {TORCH_OF_PAGE}")
    listed = [(column, name) for column in COLUMNS for name in KNOWN[column]]
    assert [
        row for row in listed if row[1] not in checks.entries() or row[0] not in applies(checks.entries()[row[1]])
    ] == []
    assert all(fails(*row) for row in listed)


@pytest.mark.slow
def test_every_rule_is_reached() -> None:
    """Runs after the entries: a rule is met by them, by a row of test_overloads.py, or by a test named here."""
    if len(FAILED) < len(checks.entries()):
        pytest.skip("only part of the entries ran")
    unreached = sorted(set(RULES) - checks.MET - set(ROWS) - MET_ELSEWHERE)
    assert not unreached, "\n".join(unreached)


def test_no_rule_is_declared_without_gradient() -> None:
    assert sorted(set(RULES) & NOGRAD) == []


# -- the checks can fail ----------------------------------------------------------------------------------------------


class _Entry:
    """As much of an OpInfo as a check looks at."""

    name = "made up"

    def __init__(self, op: object) -> None:
        self.op = op


class _Sample:
    """As much of a SampleInput as a check looks at."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.input, self.args, self.kwargs = tensors[0], tensors[1:], {}


def _frozen(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.sum())


@pytest.mark.filterwarnings("ignore:.*took the sample")
def test_a_value_frozen_while_recording_is_found() -> None:
    sample, fresh = _Sample(torch.ones(3)), _Sample(torch.full((3,), 2.0))
    assert checks.records(_Entry(_frozen), sample) is None
    assert "close" in str(checks.replays(_Entry(_frozen), sample, fresh))
    assert checks.replays(_Entry(lambda x: x * x.sum()), sample, fresh) is None


def test_fresh_inputs_have_other_values() -> None:
    found = checks.pairs(checks.entries()["mul"], torch.float64)
    assert not any(torch.equal(sample.input, fresh.input) for sample, fresh in found if sample.input.numel())


def test_another_distribution_is_found() -> None:
    state = {"calls": 0}

    def drifting(x: torch.Tensor) -> torch.Tensor:
        state["calls"] += 1
        return torch.rand_like(x) + (0.3 if state["calls"] > 1 else 0.0)

    sample = _Sample(torch.zeros(8))
    assert "distribution" in str(checks.replays(_Entry(drifting), sample, sample))
    assert checks.replays(_Entry(torch.rand_like), sample, sample) is None


def test_a_wrong_gradient_is_found() -> None:
    def cut(x: torch.Tensor) -> torch.Tensor:
        return x * (x.sum() if type(x) is torch.Tensor else x.detach().sum())

    sample = _Sample(torch.arange(3.0, dtype=torch.float64).requires_grad_())
    assert checks.first(_Entry(cut), sample) and checks.second(_Entry(lambda x: x**3), sample) is None
