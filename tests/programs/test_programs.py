"""Random programs: recorded, run, batched, saved and differentiated as torch does it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings

from tests.programs import checks
from tests.programs.program import Program
from tests.programs.strategies import programs

SMOOTH = (torch.float64, torch.complex128, torch.complex64, torch.float64, torch.int64)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns where an out= is resized
slow_draws = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@slow_draws
@given(programs(size=10))
def test_runs_equal_torch(program: Program) -> None:
    note(checks.replays(program))


@pytest.mark.slow
@slow_draws
@given(programs(size=8, batch=True))
def test_runs_at_other_batches_equal_torch(program: Program) -> None:
    note(checks.batches(program))


@slow_draws
@given(programs(size=8))
def test_loaded_graphs_run_alike(program: Program) -> None:
    note(checks.files(program))


@slow_draws
@given(programs(size=8))
def test_passes_and_fed_intermediate_values_change_nothing(program: Program) -> None:
    note(checks.passes(program))


@slow_draws
@given(programs(size=8))
def test_donated_memory_changes_nothing(program: Program) -> None:
    note(checks.donates(program))


@pytest.mark.slow
@slow_draws
@given(programs(size=8, dtypes=SMOOTH))
def test_gradients_are_those_of_autograd(program: Program) -> None:
    note(checks.differentiates(program))
