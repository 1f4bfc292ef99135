"""Scalars among the fetches of fit are watched on a cluster as here; the oracle is plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

from tests.test_fitting import assert_fetched_scalars_are_watched
from tfnb.cluster.driver import Cluster


def test_scalars_among_the_fetches_are_watched_there(connect: Callable[..., Cluster]) -> None:
    with connect(2):
        assert_fetched_scalars_are_watched()
