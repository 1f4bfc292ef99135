"""tfnb.print on a cluster: it prints in the notebook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tfnb


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_runs_and_trainings_print_here(
    connect: Callable[..., Any], capsys: pytest.CaptureFixture[str], mode: str
) -> None:  # fmt: skip
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    with tfnb.record():
        x, y = tfnb.placeholder(torch.ones(8, 4)), tfnb.placeholder(torch.zeros(8, 1))
        loss = torch.nn.functional.mse_loss(model(x), y)
        tfnb.print("loss", loss)
        train = tfnb.train.SGD(0.1).minimize(loss)
    a, b = torch.randn(6, 4), torch.randn(6, 1)
    wanted = torch.nn.functional.mse_loss(model(a), b).detach()
    with connect(2):
        tfnb.run(loss, {x: a, y: b})
        assert capsys.readouterr().out == f"loss {wanted!r}\n"
        tfnb.fit(train, {x: torch.ones(12, 4), y: torch.ones(12, 1)}, epochs=1, batch_size=4, mode=mode)
        said = [each for each in capsys.readouterr().out.splitlines() if each.startswith("loss tensor(")]
        assert len(said) == 3
