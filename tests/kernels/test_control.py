"""Loops as kernels."""

from __future__ import annotations

import pytest
import torch

from tfnb.kernels.control import Replay, while_loop


def test_the_count_of_iterations_stays_on_the_cpu_wherever_factories_make_tensors() -> None:
    with torch.device("meta"):
        *_, iterations = while_loop(
            lambda x, run: (x < 3,), lambda x, run: (x + 1,), [torch.tensor(0, device="cpu")], [], [],
            limit=None, rows=[], reverse=False, run=0, draws=False,
        )  # fmt: skip
    assert (iterations.device.type, int(iterations)) == ("cpu", 3)


@pytest.mark.parametrize("replicas", [None, (0, 1), (1, 3)])
@pytest.mark.parametrize("reverse", [False, True])
def test_iterations_taken_again_have_the_same_draws(replicas: bool, reverse: bool) -> None:
    xs = [torch.arange(4)]

    def body(total: torch.Tensor, x: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return total + x, torch.tensor(number)

    options = {"limit": None, "reverse": reverse, "run": 7, "draws": True, "replicas": replicas}
    row = ((), torch.int64, "cpu")
    *_, rows = while_loop(None, body, [torch.tensor(0)], xs, [], rows=[row], **options)
    again = Replay(body, xs, [], 1, [1], [], **options)
    found = [int(each) for each in again.iterations([torch.tensor(0)], 0, 4)[0]]
    assert found == (rows.flip(0) if reverse else rows).tolist()
