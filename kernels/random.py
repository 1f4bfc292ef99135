"""Random draws from a named stream instead of torch's global one.

A draw depends only on (graph seed, owner, stream, run), so it is reproducible and the same on every machine. Ops that
take a ``generator`` get one; for the others the default generator is borrowed under a lock and put back.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from tfnb.kernels.define import op

_borrow = threading.Lock()
_MASK = (1 << 64) - 1
REPLICA = 1 << 40  # between the random streams of the replicas of one step


def mix(*parts: int) -> int:
    """A 63-bit seed from integers (splitmix64 over the parts).

    >>> mix(1, 2) == mix(1, 2), mix(1, 2) == mix(2, 1)
    (True, False)
    """
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state + (part & _MASK) * 0xBF58476D1CE4E5B9 + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def seeded(op: Any, seed: int, device: torch.device, args: Any, kwargs: Any) -> Any:
    """``op(*args, **kwargs)`` with random draws from ``seed``; the global random state is restored."""
    generator = _default_generator(device)
    with _borrow:
        state = generator.get_state()
        generator.manual_seed(seed)
        try:
            return op(*args, **kwargs)
        finally:
            generator.set_state(state)


def drawn(op: OpOverload, generator: torch.Generator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``op(*args, **kwargs)`` with random draws from ``generator``, which advances.

    On CUDA no state is read or copied, so that this may be captured in a graph that knows the generator.
    """
    default = _default_generator(generator.device)
    get, put = (("graphsafe_get_state", "graphsafe_set_state") if generator.device.type == "cuda" else
                ("get_state", "set_state"))  # fmt: skip
    shares = generator.device.type == "cuda"
    with _borrow:
        before = getattr(default, get)()
        getattr(default, put)(generator if shares else generator.get_state())
        try:
            return op(*args, **kwargs)
        finally:
            if not shares:
                generator.set_state(default.get_state())
            getattr(default, put)(before)


def log_uniform(classes: Tensor, count: int) -> Tensor:
    """The probability of each class among ``count`` classes, float64: ``log((k + 2) / (k + 1)) / log(count + 1)``.

    >>> 4 * log_uniform(torch.tensor([0]), 10)
    tensor([1.1563], dtype=torch.float64)
    """
    return torch.log1p(1 / (classes.double() + 1)) / math.log(count + 1)


def _fake_draw(like: Tensor, count: int, classes: int, unique: bool) -> tuple[Tensor, Tensor]:
    return like.new_empty([count], dtype=torch.int64), like.new_empty([], dtype=torch.int64)


@op(
    "(Tensor like, int count, int classes, bool unique) -> (Tensor ids, Tensor tries)", _fake_draw,
    tags=(torch.Tag.nondeterministic_seeded,),
)  # fmt: skip
def log_uniform_draw(like: Tensor, count: int, classes: int, unique: bool) -> tuple[Tensor, Tensor]:
    """Classes drawn by their log-uniform probabilities, and the number of draws; ``like`` says the device.

    unique: a class that was drawn before is drawn again, until there are ``count`` distinct ones.
    """
    if not unique:
        return _drawn(like, count, classes), torch.tensor(count, device=like.device)
    seen: dict[int, None] = {}
    tries, block = 0, list[int]()
    while len(seen) < count:
        tries += len(block)
        block = _drawn(like, count, classes).tolist()
        seen |= dict.fromkeys(block)
    ids = [*seen][:count]
    tries += block.index(ids[-1]) + 1 if count else 0
    return torch.tensor(ids, dtype=torch.int64, device=like.device), torch.tensor(tries, device=like.device)


def _drawn(like: Tensor, count: int, classes: int) -> Tensor:
    draws = torch.rand(count, dtype=torch.float64, device=like.device)
    return (draws * math.log(classes + 1)).exp().long().sub_(1).clamp_(0, classes - 1)
