"""Loops as kernels."""

from __future__ import annotations

import torch

from tfnb.kernels.control import while_loop


def test_the_count_of_iterations_stays_on_the_cpu_wherever_factories_make_tensors() -> None:
    with torch.device("meta"):
        *_, iterations = while_loop(
            lambda x, run: (x < 3,), lambda x, run: (x + 1,), [torch.tensor(0, device="cpu")], [], [],
            limit=None, rows=[], reverse=False, run=0, draws=False,
        )  # fmt: skip
    assert (iterations.device.type, int(iterations)) == ("cpu", 3)
