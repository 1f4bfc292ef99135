"""Some histories of `tests.cluster.chaos.moments`: kills in all modes, one after the other, and into recoveries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from distributed import Client

from tests.cluster.chaos import moments
from tests.cluster.conftest import worker_processes

SEEDS = [103, 109, 189]  # a pipeline, a bounded training, and one that loses a server after its last step


@pytest.fixture(scope="module")
def struck() -> Iterator[Client]:
    """Worker processes of their own, with copies that come soon."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on tasks: bits of a pipeline are compared
    with ExitStack() as stack:
        for name, value in moments.QUICK.items():
            stack.enter_context(patch(name, value))
        moments.whole()
        yield stack.enter_context(worker_processes(moments.PROCESSES))
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.filterwarnings("ignore")
def test_each_step_counts_once_and_values_are_those_of_a_replay(struck: Client, seed: int) -> None:
    found = moments.history(struck, seed)
    assert not found.wrong, (found.wrong, found.done)
    assert found.done, "a strike came"
