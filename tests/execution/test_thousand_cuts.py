"""A thousand pairs of a random program with gradients and a random placement, in `make fuzz` and each ``.ci/run``.

Programs are small, so that a pair takes a tenth of a second; `tests.execution.test_cut_programs` has larger ones.
"""

from __future__ import annotations

import os

import pytest

from tests.control_flow.random_programs import small_program
from tests.execution.test_cut_programs import check_random_program

PLACEMENTS = 10  # of each program
PAIRS = 1000 if "TFNB_FUZZ" in os.environ else PLACEMENTS


@pytest.mark.parametrize("seed", range(PAIRS // PLACEMENTS))
def test_small_programs_and_their_gradients_in_parts_give_the_bits_of_one_part(seed: int) -> None:
    assert check_random_program(seed, 1, PLACEMENTS, small_program) > 0
