"""What recordings change in torch: there while any thread records, gone afterwards, whichever thread ends first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tfnb
from tfnb.errors import Unsupported
from tfnb.recording.marks.while_recording import SharedContext, swapped


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy * 3


def _places() -> list[Any]:
    kinds = nn.Parameter, torch.autograd.Function.__mro__[1], torch.amp.GradScaler, nn.LSTM
    owners = *kinds, torch.optim.lr_scheduler.StepLR, torch.utils.checkpoint, torch.random, torch.cuda
    hooks = nn.modules.module._global_forward_pre_hooks, nn.modules.module._global_forward_hooks
    known = [{name: id(value) for name, value in vars(owner).items() if callable(value)} for owner in owners]
    return [*known, *map(dict, hooks), torch.compile, torch._C._get_graph_executor_optimize()]


def _program() -> Any:
    """Each of its lines needs something of torch to be other than it is."""
    layer = nn.Linear(2, 2)
    x = tfnb.placeholder(torch.ones(3, 2))
    y = checkpoint(lambda z: Sign.apply(layer(z)), x, use_reentrant=False).sum()
    assert isinstance(layer.weight, nn.Parameter)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    with pytest.raises(Unsupported, match="StepLR"):
        torch.optim.lr_scheduler.StepLR(optimizer, 1).step()
    optimizer.zero_grad()
    y.backward()
    return layer, x, optimizer.step()


def _turns(first: Callable[[], None], second: Callable[[], None]) -> None:
    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_two_threads_record_at_once_and_end_in_the_order_they_began() -> None:
    before = _places()
    open_, ended = threading.Event(), threading.Event()
    both, failed = threading.Event(), []

    def early() -> None:
        with tfnb.record():
            open_.set()
            if not both.wait(60):
                failed.append("the other thread did not record")
        ended.set()

    def late() -> None:
        try:
            open_.wait(60)
            with tfnb.record():
                both.set()
                ended.wait(60)
                layer, x, train = _program()
            weight = layer.weight.detach().clone()
            tfnb.run(train, {x: torch.ones(4, 2)})
            assert torch.allclose(layer.weight, weight - 0.5 * 3 * 4)
        except BaseException as error:
            failed.append(error)

    _turns(early, late)
    assert failed == []
    assert _places() == before


def test_a_thread_that_does_not_record_finds_torch_as_it_is() -> None:
    failed: list[BaseException] = []

    def other() -> None:
        try:
            layer = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            checkpoint(lambda z: Sign.apply(layer(z)), torch.ones(3, 2), use_reentrant=False).sum().backward()
            optimizer.step()
            schedule.step()
            assert layer.bias.grad.tolist() == [9.0]
        except BaseException as error:
            failed.append(error)

    with tfnb.record() as graph:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(60)
    assert failed == []
    assert len(graph.nodes) == 0


def test_what_is_swapped_comes_back_after_an_error() -> None:
    class Thing:
        own = 1

    class Child(Thing):
        pass

    def broken() -> None:
        with swapped((Thing, "own", 2), (Child, "own", 3), (Child, "other", 4)):
            assert (Thing.own, Child.own) == (2, 3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken()
    assert (Thing.own, "own" in vars(Child), hasattr(Child, "other")) == (1, False, False)


def test_the_first_enters_and_the_last_leaves() -> None:
    class Thing:
        own = 1

    both = SharedContext(lambda: swapped((Thing, "own", 2)))
    first, second = both(), both()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert Thing.own == 2
    second.__exit__(None, None, None)
    assert Thing.own == 1
