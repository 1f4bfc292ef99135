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
REFUSED = {"LBFGS": "LBFGS has no twin"}
STEPS = 3


def configurations(name: str) -> Iterator[dict[str, Any]]:
    """What torch's table passes to the optimizer, and what each of its implementations takes."""
    info = next(info for info in optim_db if info.optim_cls is OPTIMIZERS[name])
    implementations = [{}, *({flag: True} for flag in info.supported_impls if flag != "differentiable")]
    for sample in info.optim_inputs_func(device=torch.device("cpu"), dtype=torch.float64):
        for flags in implementations:
            if not isinstance(sample.kwargs.get("lr"), torch.Tensor) or flags != {"foreach": True}:  # torch refuses it
                yield {**sample.kwargs, **flags}


class Rows(nn.Module):
    """A matrix alone, which Muon takes; of a table the gradients have rows, which SparseAdam takes."""

    def __init__(self, by_rows: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(5, 3, generator=generator, dtype=torch.float64))
        self.by_rows = by_rows

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(rows, self.weight, sparse=self.by_rows).square().sum(1).log1p().mean()


def close(name: str, options: dict[str, Any], mine: Any, theirs: Any) -> None:
    # torch's ASGD by foreach is that far from its other one; a rate that is a tensor is a float32, of which torch's own
    # arithmetic is not the same in all optimizers
    rough = name == "ASGD" or isinstance(options.get("lr"), torch.Tensor)
    torch.testing.assert_close(
        mine, theirs, rtol=2e-7 if rough else 1e-9, atol=1e-12, msg=lambda s: f"{name} {options}: {s}"
    )


def assert_same_state(name: str, options: dict[str, Any], mine: Any, theirs: Any) -> None:
    for ours, eager in zip(mine.state_dict()["state"].values(), theirs.state_dict()["state"].values(), strict=True):
        kept = {key: value for key, value in eager.items() if value is not None}
        close(name, options, {key: torch.as_tensor(value).double() for key, value in ours.items()},
              {key: torch.as_tensor(value).double() for key, value in kept.items()})  # fmt: skip


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - REFUSED.keys()))
def test_every_configuration_takes_the_steps_of_torch(name: str) -> None:
    for options in configurations(name):
        model = Rows(by_rows=name == "SparseAdam")
        twin = copy.deepcopy(model)
        mine, theirs = (OPTIMIZERS[name](m.parameters(), **copy.deepcopy(options)) for m in (model, twin))
        batches = torch.randint(0, 5, (STEPS, 4), generator=torch.Generator().manual_seed(1))
        with tfnb.record() as graph:
            x = tfnb.placeholder(batches[0])
            mine.zero_grad()
            model(x).backward()
            step = mine.step()
        session = tfnb.Session(graph)

        def eager(batch: torch.Tensor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()

        for batch in batches:
            session.run(step, {x: batch})
            eager(batch, twin, theirs)
        close(name, options, model.weight, twin.weight)
        if name != "SGD":  # whose state has no count
            assert_same_state(name, options, mine, theirs)
        theirs.load_state_dict(copy.deepcopy(theirs.state_dict()))
        mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
        session.run(step, {x: batches[0]})  # from torch's state to the graph
        eager(batches[0], twin, theirs)
        eager(batches[1], twin, theirs)
        eager(batches[1], model, mine)  # and from the graph's to torch
        close(name, options, model.weight, twin.weight)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_other_classes_are_refused_with_class_and_line(name: str) -> None:
    for options in configurations(name):
        model = Rows(by_rows=False)
        optimizer = OPTIMIZERS[name](model.parameters(), **options)
        with pytest.raises(Unsupported, match=f"{REFUSED[name]}.*\n.*test_optim_db.py line"), tfnb.record():
            model(tfnb.placeholder(torch.arange(4))).backward()
            optimizer.step()
