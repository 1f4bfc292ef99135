"""Random functions as text: statements that AutoGraph stages, as people write them, which Python runs as well."""

from __future__ import annotations

import random

NAMES = ("a", "b", "c")
SLICES = ("k:", ":k", "-k:", ":-k", "k:k + 2", "k - 2:k", "k::2", "n - 1:", ":n", "k // 2:n", "torch.arange(min(k, 1))")


def source(seed: int) -> str:
    """``program(x, n)`` of a vector and a whole number, with helpers, to three numbers, a counter and an attribute."""
    rng = random.Random(seed)
    body = ["a, b, c, k = x.sum(), x.max(), x.min(), 0", "box = Box(x.mean())"]
    for _ in range(rng.randint(2, 4)):
        body += _statement(rng, 0)
        if rng.random() < 0.15:
            body += [f"if {_test(rng)}:", "    return a, b, c, k, box.v"]
    helpers = [line for number in range(2) for line in _helper(rng, number)]
    head = ["class Box:", "    def __init__(self, v):", "        self.v = v"]
    return "\n".join([*head, *helpers, "def program(x, n):", *_in(body), "    return a, b, c, k, box.v", ""])


def _in(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


def _name(rng: random.Random) -> str:
    return rng.choice((*NAMES, "box.v"))


def _value(rng: random.Random) -> str:
    kind = rng.randrange(6)
    one, other = _name(rng), rng.choice((*NAMES, "0.5", "2.0"))
    if kind == 0:
        return f"(x * {one}).tanh().sum()"
    if kind == 1:
        return f"helper{rng.randrange(2)}({one}, {rng.choice(NAMES)})"
    if kind == 2:
        return f"({one} if {_test(rng)} else {rng.choice(NAMES)} * 0.5)"
    if kind == 3:
        return f"(x[{rng.choice(SLICES)}] * {one}).sum()"
    return f"({one} {rng.choice('+-*')} {other})"


def _test(rng: random.Random) -> str:
    one, other = rng.choice(NAMES), rng.choice((*NAMES, "1.0", "-1.0"))
    return rng.choice(
        (f"{one} < {other}", f"{one} > {other}", f"not {one} > 0", f"({one} > 0 and {rng.choice(NAMES)} < 1)",
         f"(k % 2 == 0 or {one} < {other})", f"-1 < {one} < 2", "n < 2", "n > 2")
    )  # fmt: skip


def _block(rng: random.Random, depth: int) -> list[str]:
    return [line for _ in range(rng.randint(1, 2)) for line in _statement(rng, depth)]


def _statement(rng: random.Random, depth: int) -> list[str]:
    kinds = [_assign] * 3 + ([_if, _if, _for, _while, _forever, _list] if depth < 2 else [])
    return rng.choice(kinds)(rng, depth)


def _assign(rng: random.Random, depth: int) -> list[str]:
    if rng.random() < 0.2:
        return ["k += 1"]  # of a tensor it would be in place, which autograd may refuse
    return [f"{_name(rng)} = ({_value(rng)}).clamp(-9, 9)"]


def _if(rng: random.Random, depth: int) -> list[str]:
    found = [f"if {_test(rng)}:", *_in(_block(rng, depth + 1))]
    if rng.random() < 0.3:
        found += [f"elif {_test(rng)}:", *_in(_block(rng, depth + 1))]
    return found + (["else:", *_in(_block(rng, depth + 1))] if rng.random() < 0.6 else [])


def _left(rng: random.Random) -> list[str]:
    if rng.random() < 0.4:
        return []
    return [f"if {_test(rng)}:", f"    {rng.choice(('break', 'continue'))}"]


def _for(rng: random.Random, depth: int) -> list[str]:
    over = rng.choice(
        ("i in range(n)", "i in reversed(range(n))", "i, row in enumerate(x)", "row in x", "i in range(3)")
    )
    used = ["a = (a + row).clamp(-9, 9)"] if "row" in over else ["k += i"]
    found = [f"for {over}:", *_in([*used, *_left(rng), *_block(rng, depth + 1)])]
    return found + (["else:", *_in(_assign(rng, depth))] if rng.random() < 0.2 else [])


def _while(rng: random.Random, depth: int) -> list[str]:
    iterations = f"w{depth}"
    body = [f"{iterations} += 1", *_left(rng), *_block(rng, depth + 1)]
    return [f"{iterations} = 0", f"while {_test(rng)} and {iterations} < 3:", *_in(body)]


def _forever(rng: random.Random, depth: int) -> list[str]:
    iterations = f"w{depth}"
    body = [f"{iterations} += 1", f"if {iterations} > 3 or {_test(rng)}:", "    break", *_block(rng, depth + 1)]
    return [f"{iterations} = 0", "while True:", *_in(body)]


def _list(rng: random.Random, depth: int) -> list[str]:
    name = f"ys{depth}"
    to = rng.choice(NAMES)
    return [
        f"{name} = []", "for row in x:", f"    {name}.append((row * {_name(rng)}).sin())",
        f"{to} = torch.stack({name}).sum() * 0.5 + len({name})",
    ]  # fmt: skip


def _helper(rng: random.Random, number: int) -> list[str]:
    iteration = rng.choice(("for i in range(3):", "while p < 3:"))
    return [
        f"def helper{number}(p, q):", f"    if p {rng.choice('<>')} q:", "        return p * 0.5 + q",
        f"    {iteration}", "        p = p + 0.75", f"        if p * 0.5 > q + {rng.choice((0, 1))}:",
        "            return (p - q).tanh()", f"    return {rng.choice(('p', 'q.cos()', 'p * q'))}",
    ]  # fmt: skip
