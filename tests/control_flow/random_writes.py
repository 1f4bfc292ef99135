"""Random functions as text, as people write them, that write in place: names of the same tensor, views, items, buffers.

Python runs the same text. Names: ``u, v, w`` vectors of three, ``a, b, c`` numbers, ``m`` a matrix like ``x``, ``k`` a
count of Python's, and others that are views of those.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
VECTORS = ("u", "v", "w")
NUMBERS = ("a", "b", "c")
SLICES = ("k:", ":k", "-k:", ":-k", "k:k + 2", "k - 2:k", "k::2", "n - 1:", ":n", "k // 2:n", "torch.arange(min(k, 1))")
END = "return a, b, c, u, v, w, m, k, box.v, box.s, net.seen * 1, net.total * 1"


def source(seed: int, *, writes: bool = True) -> str:
    """``program(x, n, net)`` of a matrix with three columns, a whole number and a module with two buffers."""
    return _Writer(seed, writes).text()


def _in(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


class _Writer:
    def __init__(self, seed: int, writes: bool) -> None:
        self.rng, self.writes, self.names = random.Random(seed), writes, 0

    def among(self, written: Sequence[T], *others: T) -> T:
        """One of these, or of those that write."""
        return self.rng.choice((*others, *written) if self.writes else others)

    def text(self) -> str:
        rng = self.rng
        body = [
            "m, k = x * 1, 0", "a, b, c = x.sum(), x.max(), x.min()", "u, v, w = x.sum(0), x[0] * 1, x.mean(0)",
            "box = Box(x.mean(), w * 0.5)",
        ]  # fmt: skip
        for _ in range(rng.randint(2, 4)):
            body += self.statement(0)
            if rng.random() < 0.1:
                body += [f"if {self.test()}:", f"    {END}"]
        head = ["class Box:", "    def __init__(self, s, v):", "        self.s, self.v = s, v"]
        return "\n".join([*head, *self.helper(0), *self.helper(1), "def program(x, n, net):", *_in([*body, END]), ""])

    def new(self, name: str) -> str:
        self.names += 1
        return f"{name}{self.names}"

    def helper(self, number: int) -> list[str]:
        """Called with a vector, into which it may write, and a number."""
        rng = self.rng
        inner = self.among(
            (["p += q"], ["p[0] = q"], ["p[1:].mul_(0.5)"]), ["p = p * 0.5 + q"], ["p, q = p * 0.5, p.sum() * 0.1"]
        )
        leave = [f"if p.sum() {rng.choice('<>')} q:", f"    return {rng.choice(('p', 'p * 0.5', 'p + q'))}"]
        loop = rng.choice(("for i in range(3):", "for j in range(2):", "for z in (p * 0.5, p):"))
        nested = ["for e in p:", "    if e > q:", "        return p - e", "    q = q + 0.25"]
        nested = nested if rng.random() < 0.4 else []
        iteration = [*inner, *(leave if rng.random() < 0.6 else []), *nested]
        return [f"def helper{number}(p, q):", *_in([loop, *_in(iteration), f"return {rng.choice(('p', 'p.tanh()'))}"])]

    # -- expressions --------------------------------------------------------------------------------------------------

    def vector(self) -> str:
        return self.rng.choice((*VECTORS, *VECTORS, "box.v", "m[0]", "m[-1]", "net.seen"))

    def number(self) -> str:
        return self.rng.choice((*NUMBERS, *NUMBERS, "box.s", "u[0]", "v[k % 3]", "net.total", "w.sum()"))

    def vectors(self) -> str:
        """An expression with three elements."""
        rng, one, other = self.rng, self.vector(), self.vector()
        return rng.choice(
            (f"{one} * 0.5", f"({one} + {other})", f"({one} - {other}) * 0.5", f"{one} * {self.number()}.tanh()",
             f"{one}.clone()", f"{one}.flip(0)", f"torch.cat([{one}[1:], {other}[:1]])",
             f"torch.where({one} > 0, {one}, {other})",
             f"helper{rng.randrange(2)}({one}, {self.number()})",
             f"helper{rng.randrange(2)}({one} * 1, {self.number()})",
             f"({one} if {self.test()} else {other})", f"({one} > {other}).to(x.dtype)",
             f"({one} * 3).long().to(x.dtype)",
             f"torch.stack([{self.number()} for _ in range(3)])", f"{one}.float().double()",
             "torch.zeros(3, dtype=x.dtype)",
             "m.sum(0)", f"{one}.detach()", f"torch.outer({one}, {other}).diagonal()", "sum(row for row in m) * 0.5")
        )  # fmt: skip

    def numbers(self) -> str:
        rng, one, other = self.rng, self.number(), self.number()
        if not self.writes and rng.random() < 0.2:
            return f"(m[{rng.choice(SLICES)}] * {one}).sum()"
        return rng.choice(
            (f"{one} * 0.5", f"({one} + {other})", f"({one} - {other})", f"{one}.tanh() * {other}",
             f"{self.vector()}.sum()",
             f"({one} if {self.test()} else {other} * 0.5)", f"{self.vector()}.max()",
             f"({one} > {other}).to(x.dtype) * 0.5",
             f"{one}.round().long().to(x.dtype) * 0.25", f"max({one}, {other})",
             "torch.stack([r.sum() for r in m]).mean()",
             f"({one} and {other})", f"{one}.clone()", "torch.tensor(0.5, dtype=x.dtype)", "k * 0.5 + a * 0",
             f"abs({one})", f"{one}.detach()", f"{one}.float().double()")
        )  # fmt: skip

    def test(self) -> str:
        rng, one, other = self.rng, self.number(), self.number()
        return rng.choice(
            (f"{one} < {other}", f"{one} > 0", f"not {one} > 0", f"({one} > 0 and {other} < 1)",
             f"(k % 2 == 0 or {one} < 0)",
             f"{self.vector()}.sum() > {other}", f"({self.vector()} > 0).any()", "n < 2", "n > 2",
             f"-1 < {one} < 2",
             f"{one} * 2 > {other}", f"({self.vector()} > {other}).all()", "n % 2 == 0", "k > 1",
             f"({one}).round() != 0")
        )  # fmt: skip

    # -- statements ---------------------------------------------------------------------------------------------------

    def block(self, depth: int) -> list[str]:
        return [line for _ in range(self.rng.randint(1, 3)) for line in self.statement(depth)]

    def statement(self, depth: int) -> list[str]:
        kinds = [self.assign, self.alias, self.tuples]
        kinds += [self.write, self.write, self.parts] if self.writes else [self.assign, self.assign]
        if depth < 2:
            kinds += [
                self.branch,
                self.branch,
                self.rows,
                self.rows,
                self.iterations,
                self.function,
                self.quiet,
                self.lists,
            ]
        return self.rng.choice(kinds)(depth)

    def assign(self, depth: int) -> list[str]:
        rng = self.rng
        if rng.random() < 0.15:
            return ["k += 1"]  # of a tensor it would be in place, which autograd may refuse
        if rng.random() < 0.5:
            return [f"{rng.choice((*VECTORS, 'box.v'))} = ({self.vectors()}).clamp(-9, 9)"]
        return [f"{rng.choice((*NUMBERS, 'box.s'))} = ({self.numbers()}).clamp(-9, 9)"]

    def write(self, depth: int) -> list[str]:
        """In place: a whole tensor, or a part of it."""
        rng, to = self.rng, self.vector()
        whole, one = f"({self.vectors()}).clamp(-5, 5)", f"({self.numbers()}).clamp(-5, 5)"
        written = rng.choice(
            (f"{to} += {whole}", f"{to} -= {whole}", f"{to} *= 0.5", f"{to} += {one}", f"{to}.add_({whole})",
             f"{to}.mul_(0.5).add_({one})", f"{to}.copy_({whole})", f"{to}.clamp_(-2, 2)", f"{to}.zero_()",
             f"{to}.fill_(0.5)",
             f"{to}[0] = {one}", f"{to}[k % 3] = {one}", f"{to}[1:] = {self.vector()}[:2]", f"{to}[1:] += {one}",
             f"{to}[{to} > 0] = {one}", f"{to}[-1] *= 0.5", f"{to}[:] = {whole}", f"{to}[::2] -= {one}",
             "m[:, 1] *= 0.5", f"m[0] += {whole}", f"m[-1, 0] = {one}", f"m += {whole}", "m.t()[2].neg_()",
             "m.T[0] += 1",
             "m[m > 0] *= 0.5", f"m.view(-1)[1] = {one}", f"net.total += {one} * 0.1", "net.total.mul_(0.5)",
             f"net.seen.copy_({whole})", f"box.v += {whole}", f"box.s = {one}",
             f"{rng.choice(NUMBERS)} += {one}", f"{rng.choice(NUMBERS)} *= 0.5")
        )  # fmt: skip
        return [written, *([f"{to}.clamp_(-9, 9)"] if rng.random() < 0.5 else [])]

    def alias(self, depth: int) -> list[str]:
        rng, to, of = self.rng, self.rng.choice((*VECTORS, "box.v")), self.vector()
        return [
            rng.choice(
                (f"{to} = {of}", f"{to} = {of}.view(3)", f"{to} = {of}[:]", f"{to} = m[0]", f"{to} = m[-1]",
                 f"{rng.choice(NUMBERS)} = {of}[0]", f"{rng.choice(NUMBERS)} = {rng.choice(NUMBERS)}",
                 f"{to} = {of}.contiguous()")
            )
        ]  # fmt: skip

    def tuples(self, depth: int) -> list[str]:
        one, other = self.rng.sample(VECTORS, 2)
        a, b, c = self.rng.sample(NUMBERS, 3)
        return [
            self.rng.choice(
                (f"{one}, {other} = {other}, {one}", f"{a}, {b} = {b}, ({self.numbers()}).clamp(-9, 9)",
                 f"({a}, {one}), {b} = ({b}, {other}), {c}", f"{a}, {b}, {c} = {one}",
                 f"{one}, *rest = {other}, {b}, {c}", f"{a}, *rest = {b}, {one}, {c}",
                 f"{one}, {a} = (({self.vectors()}).clamp(-9, 9), {b})",
                 f"{a} = {b} = ({self.numbers()}).clamp(-9, 9)",
                 f"{one} = {other} = ({self.vectors()}).clamp(-9, 9)", f"{a}, {b} = torch.stack([{b}, {c}])")
            )
        ]  # fmt: skip

    def parts(self, depth: int) -> list[str]:
        """A name for a part, which is written."""
        part, of = self.new("part"), self.vector()
        how = self.rng.choice((f"{of}[1:]", f"{of}[:2]", f"{of}[::2]", "m[:, 0]", "m[0, 1:]", f"{of}.view(3)[:2]"))
        value = f"({self.numbers()}).clamp(-5, 5)"
        return [f"{part} = {how}", *self.block_of_writes(part, value, depth)]

    def block_of_writes(self, part: str, value: str, depth: int) -> list[str]:
        write = self.rng.choice((f"{part} += {value}", f"{part}.mul_(0.5)", f"{part}[0] = {value}", f"{part} *= 0.5"))
        kind = self.rng.randrange(4)
        if kind == 0 and depth < 2:
            return [f"if {self.test()}:", *_in([write])]
        if kind == 1 and depth < 2:
            return [f"for {self.rng.choice(('i in range(n)', 'row in x'))}:", *_in([write])]
        return [write]

    def branch(self, depth: int) -> list[str]:
        found = [f"if {self.test()}:", *_in(self.block(depth + 1))]
        if self.rng.random() < 0.25:
            found += [f"elif {self.test()}:", *_in(self.block(depth + 1))]
        return found + (["else:", *_in(self.block(depth + 1))] if self.rng.random() < 0.6 else [])

    def left(self) -> list[str]:
        if self.rng.random() < 0.6:
            return []
        return [f"if {self.test()}:", f"    {self.rng.choice(('break', 'continue'))}"]

    def rows(self, depth: int) -> list[str]:
        over, used = self.among(
            (("i in range(3)", "u[i] += 1"), ("i in range(len(x))", "m[i] *= 0.5"), ("row in m.flip(0)", "u += row"),
             ("row in (u, v)", "row += 0.25")),
            ("i in range(n)", "k += i"), ("i, row in enumerate(x)", "u = (u + row * i).clamp(-9, 9)"),
            ("row in x", "v = v + row"), ("row in m", "w = w - row * 0.5"), ("i in reversed(range(n))", "k += i"),
            ("one, row in zip(x, m)", "u = (one - row).clamp(-9, 9)"), ("i in range(1, n)", "b = b * 0.5 + i"),
            ("i, (one, row) in enumerate(zip(m, x))", "a = (a + row[i % 3]).clamp(-9, 9)"),
            ("e in u", "a = (a + e).clamp(-9, 9)"), ("i in range(n - 1, -1, -1)", "k += i"),
            ("e in (a, b)", "c = c * 0.5 + e"),
        )  # fmt: skip
        found = [f"for {over}:", *_in([used, *self.left(), *self.block(depth + 1)])]
        return found + (["else:", *_in(self.statement(depth + 1))] if self.rng.random() < 0.2 else [])

    def iterations(self, depth: int) -> list[str]:
        count = self.new("t")
        body = [*self.left(), *self.block(depth + 1)]
        if self.rng.random() < 0.3:  # it ends also where it goes on before its end
            leave = [f"{count} += 1", f"if {count} > 3 or {self.test()}:", "    break"]
            return [f"{count} = 0", "while True:", *_in([*leave, *body])]
        body = [f"{count} += 1", *body]
        found = [f"{count} = 0", f"while {self.test()} and {count} < 3:", *_in(body)]
        return found + (["else:", *_in(self.statement(depth + 1))] if self.rng.random() < 0.25 else [])

    def function(self, depth: int) -> list[str]:
        """A function in a function, which sees names of around it, and may set them."""
        rng, name, sets = self.rng, self.new("inner"), self.rng.choice((*VECTORS, *NUMBERS))
        arg = "p"
        body = self.among(
            ([f"{self.vector()}.add_(p)", "return p"],),
            [f"return p * 0.5 + {self.number()}"],
            [f"if p > {self.number()}:", "    return p * 0.5", f"return {self.number()}"],
            [f"nonlocal {sets}",
             f"{sets} = ({self.vectors() if sets in VECTORS else self.numbers()}).clamp(-9, 9)", "return p + 1"],
            ["for row in m:", f"    if row.sum() > {self.number()}:", "        return row.sum()", "return p"],
        )  # fmt: skip
        call = f"{rng.choice(NUMBERS)} = ({name}({rng.choice(NUMBERS)})).clamp(-9, 9)"
        used = [f"for i in range({rng.choice(('2', 'n'))}):", f"    {call}"] if rng.random() < 0.5 else [call]
        return [f"def {name}({arg}):", *_in(body), *used]

    def quiet(self, depth: int) -> list[str]:
        return [f"with torch.{self.rng.choice(('no_grad', 'no_grad', 'enable_grad'))}():", *_in(self.block(depth + 1))]

    def lists(self, depth: int) -> list[str]:
        """What a loop collects."""
        rng, name = self.rng, self.new("ys")
        over = rng.choice(("row in x", "i in range(n)", "row in m", "i in range(2)"))
        kept = rng.choice((self.vector(), f"{self.vectors()}", "u", "v.clone()"))
        after = rng.choice(
            (f"w = (torch.stack({name}).sum(0) if {name} else u).clamp(-9, 9)",
             f"a = ((torch.stack({name}).sum() if {name} else 0) + a).clamp(-9, 9)",
             f"for y in {name}:\n    b = (b * 0.5 + y[0]).clamp(-9, 9)", f"k += len({name})")
        )  # fmt: skip
        body = [*self.left(), f"{name}.append({kept})", *(self.statement(depth + 1) if rng.random() < 0.6 else [])]
        return [f"{name} = []", f"for {over}:", *_in(body), *after.split("\n")]
