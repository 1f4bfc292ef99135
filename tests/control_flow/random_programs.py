"""`while_loop` and `cond` in plain Python, and random programs of nested loops and branches that either runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

_DEEPEST = 3  # levels of loops and branches
Loop = Callable[..., Any]
Branch = Callable[..., Any]
Block = Callable[[list[torch.Tensor], Loop, Branch], list[torch.Tensor]]

UNARY: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (torch.tanh, torch.sin, lambda x: x * 0.5, lambda x: -x)
BINARY: tuple[Callable[[Any, Any], torch.Tensor], ...] = (
    lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b.tanh(), torch.maximum,
)  # fmt: skip


def python_loop(cond: Callable[..., Any], body: Callable[..., Any], init: Any, **_: Any) -> Any:
    """`tfnb.while_loop` in plain Python."""
    state = tuple(torch.as_tensor(v) for v in init)
    while cond(*state):
        state = tuple(torch.as_tensor(v) for v in body(*state))
    return state


def python_branch(pred: Any, then: Callable[..., Any], other: Callable[..., Any], *operands: Any) -> Any:
    """`tfnb.cond` in plain Python."""
    return then(*operands) if pred else other(*operands)


def program(seed: int, width: int = 3) -> Block:
    """A function of ``width`` vectors to as many, made of at most three levels of loops and branches."""
    rng = random.Random(seed)
    return _block(rng, width, depth=0)


def small_program(seed: int, width: int = 3) -> Block:
    """A function of ``width`` vectors to as many, that ends in a loop or branch with two assignments at most."""
    rng = random.Random(seed)
    kinds = rng.choice(["assign", "loop", "branch"]), rng.choice(["loop", "branch"])
    return _in_turn([_STEPS[kind](rng, width, _DEEPEST - 1) for kind in kinds])


def _block(rng: random.Random, width: int, depth: int) -> Block:
    kinds = ["assign"] * 3 + (["loop", "branch"] if depth < _DEEPEST else [])
    steps = [_STEPS[rng.choice(kinds)](rng, width, depth) for _ in range(rng.randint(1, 2 if depth else 3))]
    if depth == 0:
        steps.append(_STEPS[rng.choice(["loop", "branch"])](rng, width, depth))
    return _in_turn(steps)


def _in_turn(steps: list[Block]) -> Block:
    def run(xs: list[torch.Tensor], loop: Loop, branch: Branch) -> list[torch.Tensor]:
        for step in steps:
            xs = step(xs, loop, branch)
        return xs

    return run


def _assign(rng: random.Random, width: int, depth: int) -> Block:
    to, a, b = (rng.randrange(width) for _ in range(3))
    unary, binary = rng.choice(UNARY), rng.choice(BINARY)

    def run(xs: list[torch.Tensor], loop: Loop, branch: Branch) -> list[torch.Tensor]:
        return [*xs[:to], unary(binary(xs[a], xs[b])), *xs[to + 1 :]]

    return run


def _branch(rng: random.Random, width: int, depth: int) -> Block:
    which, limit = rng.randrange(width), rng.uniform(-0.5, 0.5)
    then, other = _block(rng, width, depth + 1), _block(rng, width, depth + 1)

    def run(xs: list[torch.Tensor], loop: Loop, branch: Branch) -> list[torch.Tensor]:
        return list(branch(xs[which].sum() > limit, lambda: then(xs, loop, branch), lambda: other(xs, loop, branch)))

    return run


def _loop(rng: random.Random, width: int, depth: int) -> Block:
    body, most, which = _block(rng, width, depth + 1), rng.randint(0, 4), rng.randrange(width)
    by_value = rng.random() < 0.5
    parallel = rng.choice([1, 2, 3, 10])
    outer = rng.randrange(width)

    def run(xs: list[torch.Tensor], loop: Loop, branch: Branch) -> list[torch.Tensor]:
        captured = xs[outer]

        def test(i: Any, *ys: Any) -> Any:
            return (i < most) & (ys[which].sum() < 2.5) if by_value else i < most

        def iteration(i: Any, *ys: Any) -> Any:
            found = body(list(ys), loop, branch)
            return (i + 1, found[0] + 0.1 * captured, *found[1:])

        _, *left = loop(test, iteration, (0, *xs), parallel_iterations=parallel)
        return left

    return run


_STEPS = {"assign": _assign, "branch": _branch, "loop": _loop}
