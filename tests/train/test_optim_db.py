"""PyTorch's own table of optimizers: every configuration takes torch's steps, or is refused with class and line."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_optimizers import optim_db

import tfnb
from tfnb.errors import Unsupported

OPTIMIZERS = {info.optim_cls.__name__: info.optim_cls for info in optim_db}
SUPPORTED = ("SGD", "Adagrad", "RMSprop", "Adam", "AdamW")
STEPS = 3


def configurations(name: str) -> Iterator[dict[str, Any]]:
    """What torch's table passes to the optimizer, and what each of its implementations takes."""
    info = next(info for info in optim_db if info.optim_cls is OPTIMIZERS[name])
    implementations = [{}, *({flag: True} for flag in info.supported_impls if flag != "differentiable")]
    for sample in info.optim_inputs_func(device=torch.device("cpu"), dtype=torch.float64):
        for flags in implementations:
            if not isinstance(sample.kwargs.get("lr"), torch.Tensor) or flags != {"foreach": True}:  # torch refuses it
                yield {**sample.kwargs, **flags}


def matrix() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2, bias=False).double()  # Muon takes matrices alone


@pytest.mark.parametrize("name", SUPPORTED)
def test_every_configuration_takes_the_steps_of_torch(name: str) -> None:
    for options in configurations(name):
        model = matrix()
        twin = copy.deepcopy(model)
        mine, theirs = (OPTIMIZERS[name](m.parameters(), **copy.deepcopy(options)) for m in (model, twin))
        batches = torch.randn(STEPS, 4, 3, dtype=torch.float64)
        with tfnb.record() as graph:
            x = tfnb.placeholder(batches[0])
            mine.zero_grad()
            model(x).square().mean().backward()
            step = mine.step()
        session = tfnb.Session(graph)
        for batch in batches:
            session.run(step, {x: batch})
            theirs.zero_grad()
            twin(batch).square().mean().backward()
            theirs.step()
        torch.testing.assert_close(model.weight, twin.weight, rtol=1e-9, atol=0, msg=lambda s, o=options: f"{o}: {s}")


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - set(SUPPORTED)))
def test_other_classes_are_refused_with_class_and_line(name: str) -> None:
    for options in configurations(name):
        model = matrix()
        optimizer = OPTIMIZERS[name](model.parameters(), **options)
        with pytest.raises(Unsupported, match=f"{name} has no twin.*\n.*test_optim_db.py line"), tfnb.record():
            model(tfnb.placeholder(torch.ones(4, 3, dtype=torch.float64))).square().mean().backward()
            optimizer.step()
