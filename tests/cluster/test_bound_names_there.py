"""Names mean the same values on a cluster as here; the oracle is plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.recording.test_bound_names import assert_equal, by_torch, trained
from tfnb.cluster.driver import Cluster


def test_training_there_goes_by_the_latest_names(connect: Callable[..., Cluster]) -> None:
    with connect(2):
        history, models = trained()
    plain_history, plain_models = by_torch()
    assert history == pytest.approx(plain_history)
    assert_equal(models, plain_models)
