"""Random draws from a named stream instead of torch's global one.

A draw depends only on (graph seed, owner, stream, run), so it is reproducible and the same on every machine. Ops that
take a ``generator`` get one; for the others the default generator is borrowed under a lock and put back.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

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
