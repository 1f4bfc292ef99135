"""Random programs: recorded, run, batched, saved and differentiated as torch does it."""

from __future__ import annotations

from collections.abc import Callable

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


@pytest.mark.parametrize("check", [checks.files, checks.passes, checks.donates])
@slow_draws
@given(program=programs(size=8))
def test_files_passes_and_donated_memory_change_nothing(check: Callable[[Program], str], program: Program) -> None:
    note(check(program))


@pytest.mark.slow
@slow_draws
@given(programs(size=8, dtypes=SMOOTH))
def test_gradients_are_those_of_autograd(program: Program) -> None:
    note(checks.differentiates(program))
