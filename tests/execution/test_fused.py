"""Steps whose kernels inductor fused, as devices other than the CPU get them; the device here is the CPU."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tfnb
from tests.execution.test_captured import Kept
from tfnb.execution import lower
from tfnb.execution.tiers import captured_steps, fused, tiered
from tfnb.execution.tiers.captured_steps import WARM
from tfnb.execution.tiers.interface import Unfit
from tfnb.execution.tiers.native.request import NativeRequest


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU is a device that captures, and whose steps the fused tier compiles."""
    monkeypatch.setattr(fused, "device_of", lambda program: types.SimpleNamespace(type="xpu"))
    monkeypatch.setattr(tiered, "COMPILED", (fused.FusedTier(),))
    monkeypatch.setitem(captured_steps.DEVICES, "cpu", Kept)
    monkeypatch.setattr(captured_steps, "FEWEST", 1)
    Kept.made = []
    yield
    Kept.made = []


def recorded(*layers: nn.Module) -> tuple[Any, list[Any], list[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), *layers, nn.Linear(144, 3))
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(2, 1, 8, 8), name="x")
        y = tfnb.placeholder(torch.tensor([0, 1]), name="y")
        loss = F.cross_entropy(model(x), y)
        train = tfnb.train.Adam(0.01).minimize(loss)
    return g, [train, loss], [x, y]


def batch(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 1, 8, 8, generator=made), torch.randint(3, (rows,), generator=made)


def losses(mode: str, steps: int) -> tuple[list[float], list[str]]:
    g, fetches, keys = recorded()
    session = tfnb.Session(g, compile=mode)
    feeds = [dict(zip(keys, batch(5, step), strict=True)) for step in range(steps)]
    return [float(session.run(fetches, feed)[1]) for feed in feeds], session.status()


@pytest.mark.slow
@pytest.mark.usefixtures("on_a_device")
def test_a_step_is_compiled_in_another_process_and_launched_whole() -> None:
    got, status = losses("now", WARM + 4)
    assert "]: compiled; " in status[0] and status[0].endswith(", launched whole"), status
    assert Kept.made[0].launches, "the compiled step is what is launched"
    assert got == pytest.approx(losses("off", WARM + 4)[0], rel=1e-5)
    again, status = losses("now", 2)
    assert "from the cache" in status[0] and again == pytest.approx(got[:2], rel=1e-5)


@pytest.mark.slow
def test_operands_that_lie_another_way_are_not_taken(tmp_path: Path) -> None:
    from tfnb.execution.tiers import fusing

    g, (train, loss), (x, y) = recorded()
    program = lower(g, [loss.value, train.value], [x.value, y.value]).undonated()
    images, labels = batch(5, 0)
    args = [images, labels, *(variable.storage for variable in program.variables), 0]
    request = NativeRequest.of(program, args)
    fusing.build(program, request.operands, tmp_path)
    step = fused.opened(types.SimpleNamespace(folder=tmp_path, drop=None), program, request.operands)
    torch.testing.assert_close(list(step(*args))[:1], list(program.forward(*args))[:1])
    with pytest.raises(Unfit):
        step(images.transpose(2, 3), *args[1:])
    (tmp_path / fused.CODE).write_bytes(b"no code")
    dropped: list[str] = []
    package = types.SimpleNamespace(folder=tmp_path, drop=lambda: dropped.append("dropped"))
    with pytest.raises(Exception, match=None):  # what torch raises for what is no code
        fused.opened(package, program, request.operands)
    assert dropped == ["dropped"]


@pytest.mark.usefixtures("on_a_device")
def test_what_is_not_compiled_says_why() -> None:
    g, (train, _), (x, y) = recorded(nn.Dropout(0.5))
    assert fused.obstacle(lower(g, [train.value], [x.value, y.value])).endswith(" draws")
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(4, 3), name="x")
        total = tfnb.fold(lambda s, row: s + row, torch.zeros(3), x)
    assert fused.obstacle(lower(g, [total.value], [x.value])).endswith(" is a loop")
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(4), name="x")
        y = x + 1
    assert fused.obstacle(lower(g, [y.value], [x.value])) is None


def test_the_cpu_has_no_fused_steps() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(4), name="x")
        y = x + 1
    assert fused.obstacle(lower(g, [y.value], [x.value])) == "it runs on the CPU"
