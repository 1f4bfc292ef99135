"""Random loops over numbers, integers of two sizes, floats of two and truth values, that Python runs as well."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from tests.control_flow.random_programs import Branch, Loop

KINDS = (torch.int64, torch.int32, torch.float64, torch.float32, torch.bool)
_INTEGERS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a // (b | 1), lambda a, b: a % (b | 1),
    lambda a, b: torch.fmod(a, b | 1), lambda a, b: a & b, lambda a, b: a ^ b, torch.maximum, torch.minimum,
    lambda a, b: torch.div(a, b | 1, rounding_mode="trunc"), lambda a, b: (a << 3) - (b >> 2), lambda a, b: -a + 7 * b,
    lambda a, b: a.abs() - b.sign(), lambda a, b: torch.where(a > b, a, ~b), lambda a, b: a % 7 + b // -3,
    lambda a, b: a.clamp(-100, 100) * b, lambda a, b: (3 - a) ** 2,
)  # fmt: skip
_FLOATS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda a, b: a + b * 0.5, lambda a, b: a - b, lambda a, b: a * b.tanh(), lambda a, b: a / (b.abs() + 1),
    lambda a, b: a.sin() + b.cos(), lambda a, b: (a.abs() + b.abs()).sqrt(), torch.maximum, torch.minimum,
    lambda a, b: (-a.abs()).exp() - b.sigmoid(), torch.atan2, lambda a, b: a.floor() - b.round() * 0.1,
    lambda a, b: torch.where(a < b, a, b * 2), lambda a, b: torch.remainder(a, b.abs() + 0.5),
    lambda a, b: a.relu() - b,
    lambda a, b: torch.nn.functional.softplus(a.clamp(-5, 5)) - b, lambda a, b: a.trunc() + b.clamp(-1, 1) ** 3,
    lambda a, b: torch.lerp(a, b, 0.3), lambda a, b: torch.nn.functional.gelu(a.clamp(-3, 3)) + b.sign(),
)  # fmt: skip
_TRUTHS: tuple[Callable[[Any, Any], Any], ...] = (
    lambda a, b: a & b, lambda a, b: a | b, lambda a, b: a ^ b, lambda a, b: ~a, torch.logical_or,
)  # fmt: skip

Program = Callable[[Any, list[torch.Tensor], Loop, Branch], list[torch.Tensor]]


def start(seed: int) -> list[torch.Tensor]:
    """Two numbers of each kind."""
    rng = random.Random(seed)
    return [torch.tensor(rng.uniform(-9, 9)).to(kind) for kind in KINDS for _ in "ab"]


def program(seed: int, statements: int = 12) -> Program:
    """A loop of at most ``n`` iterations: a function of n and two numbers of each kind to its count, and as many."""
    rng = random.Random(seed)
    body, which = _block(rng, statements, depth=0), rng.randrange(4, 8)

    def run(n: Any, start: list[torch.Tensor], loop: Loop, branch: Branch) -> list[torch.Tensor]:
        def test(i: Any, *xs: Any) -> Any:
            return (i < n) & (xs[which].abs() < 1e6)

        def iteration(i: Any, *xs: Any) -> Any:
            return (i + 1, *body(list(xs), loop, branch))

        return list(loop(test, iteration, (0, *start)))

    return run


Block = Callable[[list[torch.Tensor], Loop, Branch], list[torch.Tensor]]


def _block(rng: random.Random, statements: int, depth: int) -> Block:
    kinds = ["number"] * 8 + (["branch", "loop"] if depth < 2 else [])
    steps = [_STEPS[rng.choice(kinds)](rng, statements, depth) for _ in range(statements)]

    def run(xs: list[torch.Tensor], loop: Loop, branch: Branch) -> list[torch.Tensor]:
        for step in steps:
            xs = step(xs, loop, branch)
        return xs

    return run


def _number(rng: random.Random, statements: int, depth: int) -> Block:
    """One of the numbers becomes a function of two of its kind, or of another kind."""
    to, a, b = rng.randrange(10), rng.randrange(2), rng.randrange(2)
    kind = KINDS[to // 2]
    table = _TRUTHS if kind is torch.bool else _FLOATS if kind.is_floating_point else _INTEGERS
    compute, converts, source = rng.choice(table), rng.random() < 0.25, rng.randrange(10)

    def run(xs: list[torch.Tensor], loop: Loop, branch: Branch) -> list[torch.Tensor]:
        first = to // 2 * 2
        value = compute(xs[first + a], xs[first + b])
        if converts:
            other = xs[source].clamp(-1000, 1000) if source < 8 else xs[source]
            value = (xs[source] > 0) ^ value if kind is torch.bool else value + other.to(kind)
        return [*xs[:to], value.to(kind), *xs[to + 1 :]]

    return run


def _branch(rng: random.Random, statements: int, depth: int) -> Block:
    which = rng.randrange(10)
    then, other = (_block(rng, max(2, statements // 3), depth + 1) for _ in "ab")

    def run(xs: list[torch.Tensor], loop: Loop, branch: Branch) -> list[torch.Tensor]:
        return list(branch(xs[which] > 0, lambda: then(xs, loop, branch), lambda: other(xs, loop, branch)))

    return run


def _loop(rng: random.Random, statements: int, depth: int) -> Block:
    body, most = _block(rng, max(2, statements // 3), depth + 1), rng.randint(0, 4)

    def run(xs: list[torch.Tensor], loop: Loop, branch: Branch) -> list[torch.Tensor]:
        _, *left = loop(lambda i, *ys: i < most, lambda i, *ys: (i + 1, *body(list(ys), loop, branch)), (0, *xs))
        return left

    return run


_STEPS = {"number": _number, "branch": _branch, "loop": _loop}
