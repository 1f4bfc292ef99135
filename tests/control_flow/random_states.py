"""Random functions with state, as text: Variables, parameters, buffers and arrays, which loops and branches write.

The same text is recorded, and run by plain Python on the stand-ins of this file, which autograd differentiates. Writes
in place are other text there, since autograd refuses to go back over what was overwritten.
"""

from __future__ import annotations

import random
from typing import Any

import torch

F64 = torch.float64
NAMES = ("a", "b", "c")


def source(seed: int, *, plain: bool) -> str:
    """``program(x, n, v, u, net, arrays, loop)`` to three numbers, a count and what was read of the state."""
    return _Writer(seed, plain).text()


class _Writer:
    def __init__(self, seed: int, plain: bool) -> None:
        self.rng, self.plain, self.names = random.Random(seed), plain, 0

    def text(self) -> str:
        rng = self.rng
        body = ["a, b, c, k = x.sum(), x.max(), x.min(), 0"]
        for _ in range(rng.randint(2, 4)):
            body += self.statement(0)
        end = "return a, b, c, k, v.read(), u.read(), net.w * 1, net.s * 1, net.seen * 1, net.table * 1"
        return "\n".join(["def program(x, n, v, u, net, arrays, loop):", *_in([*body, end]), ""])

    def new(self, name: str) -> str:
        self.names += 1
        return f"{name}{self.names}"

    # -- expressions ------------------------------------------------------------------------------------------

    def name(self) -> str:
        return self.rng.choice(NAMES)

    def read(self) -> str:
        """A number of the state."""
        return self.rng.choice(
            ("v.read()", "(v * 1.0)", "u.sum()", "u.read()[k % 3]", "net.w.sum()", "net.w[k % 3]", "net.s", "net.seen",
             "net.table.mean()", "net.table[k % 3]")
        )  # fmt: skip

    def value(self) -> str:
        rng = self.rng
        one = rng.choice((self.name(), self.read()))
        kind = rng.randrange(5)
        if kind == 0:
            return f"(x * {one}).tanh().sum()"
        if kind == 1:
            return f"({one} if {self.test()} else {self.read()} * 0.5)"
        return f"({one} {rng.choice('+-*')} {rng.choice((self.name(), self.read(), '0.5', '2.0'))})"

    def test(self) -> str:
        one = self.rng.choice((self.name(), self.name(), self.read()))
        return self.rng.choice(
            (f"{one} < {self.rng.choice((self.name(), self.read(), '1.0', '-1.0'))}", f"not {one} > 0",
             f"({one} > 0 and {self.name()} < 1)", f"(k % 2 == 0 or {one} < 0)", "n < 2", "n > 2")
        )  # fmt: skip

    # -- statements -------------------------------------------------------------------------------------------

    def block(self, depth: int) -> list[str]:
        return [line for _ in range(self.rng.randint(1, 2)) for line in self.statement(depth)]

    def statement(self, depth: int) -> list[str]:
        kinds: list[Any] = [self.assign, self.write, self.write]
        if depth < 2:
            kinds += [self.branch, self.branch, self.rows, self.iterations, self.call, self.array, self.elements]
        return self.rng.choice(kinds)(depth)

    def assign(self, depth: int) -> list[str]:
        if self.rng.random() < 0.2:
            return ["k += 1"]
        return [f"{self.name()} = ({self.value()}).clamp(-9, 9)"]

    def write(self, depth: int) -> list[str]:
        """To a Variable, a parameter or a buffer."""
        rng, value = self.rng, f"({self.value()}).clamp(-5, 5)"
        place = rng.choice(("k % 3", "0", "2"))
        kind = rng.randrange(10)
        if kind == 0:
            return self.quiet([f"v.assign({value})"])
        if kind == 1:
            return self.quiet([f"v.{rng.choice(('assign_add', 'assign_sub'))}({value} * 0.1)"])
        if kind == 2:
            return self.quiet([f"u.assign(u.read() * 0.5 + {value})"])
        if kind == 3:
            return self.quiet(
                [f"u.scatter_{rng.choice(('add', 'update'))}([{rng.randrange(3)}], ({value}).reshape(1))"]
            )
        if kind == 4:
            return [f"{self.name()} = v.assign({value}) * 0.5"]
        if kind == 5:
            to = rng.choice(("net.w", "net.s"))
            if self.plain:
                return [f"{to} = through({to}, {to} * 0.9)", f"{to} = through({to}, {to} + {value} * 0.1)"]
            return ["with torch.no_grad():", f"    {to}.mul_(0.9).add_(({value}).detach() * 0.1)"]
        if kind == 6:
            return [f"net.table = put(net.table, {place}, {value})" if self.plain else f"net.table[{place}] = {value}"]
        if kind == 7:
            if self.plain:
                return ["net.table = net.table * 0.5", f"net.table = net.table + {value}"]
            return [f"net.table.mul_(0.5).add_({value})"]
        if kind == 8:
            return [f"net.seen = net.seen + {value} * 0.1" if self.plain else f"net.seen += {value} * 0.1"]
        return [f"net.seen = {value} * 1" if self.plain else f"net.seen.copy_({value})"]

    def quiet(self, lines: list[str]) -> list[str]:
        return ["with torch.no_grad():", *_in(lines)] if self.rng.random() < 0.2 else lines

    def branch(self, depth: int) -> list[str]:
        found = [f"if {self.test()}:", *_in(self.block(depth + 1))]
        return found + (["else:", *_in(self.block(depth + 1))] if self.rng.random() < 0.6 else [])

    def left(self) -> list[str]:
        if self.rng.random() < 0.6:
            return []
        return [f"if {self.test()}:", f"    {self.rng.choice(('break', 'continue'))}"]

    def rows(self, depth: int) -> list[str]:
        over = self.rng.choice(("i in range(n)", "i, row in enumerate(x)", "row in x", "i in range(3)"))
        used = ["a = (a + row).clamp(-9, 9)"] if "row" in over else ["k += i"]
        return [f"for {over}:", *_in([*used, *self.left(), *self.block(depth + 1)])]

    def iterations(self, depth: int) -> list[str]:
        count = self.new("t")
        body = [f"{count} += 1", *self.left(), *self.block(depth + 1)]
        return [f"{count} = 0", f"while {self.test()} and {count} < 3:", *_in(body)]

    def call(self, depth: int) -> list[str]:
        """A loop that is called, with a number of iterations at a time."""
        iteration, rng = self.new("iteration"), self.rng
        to, most = self.name(), rng.choice(("n", "3"))
        writes = self.write(depth + 1) + (self.write(depth + 1) if rng.random() < 0.5 else [])
        test = rng.choice(("p.abs() < 8", f"p < {self.read()} + 4"))
        return [
            f"def {iteration}(at, p, k=k, a=a, b=b, c=c):", *_in(writes),
            f"    return at + 1, (p * 0.5 + {self.read()}).clamp(-9, 9)",
            f"_, {to} = loop(lambda at, p: (at < {most}) & ({test}), {iteration}, (0, {to}), "
            f"parallel_iterations={rng.choice((1, 2, 10))})",
        ]  # fmt: skip

    # -- arrays -----------------------------------------------------------------------------------------------

    def array(self, depth: int) -> list[str]:
        """An element written in each iteration, and read after it, or in the next one."""
        rng, name, to = self.rng, self.new("ys"), self.name()
        vector = rng.random() < 0.4
        element = f"({self.value()}).clamp(-9, 9)"
        element = f"torch.stack([{element}, {self.name()}])" if vector else element
        used = rng.choice(
            (f"{name}.stack().sum()", f"{name}.read(0).sum() * 0.5", f"{name}.gather([0, 2]).sum()",
             f"{name}.stack()[1].sum() + {name}.size()")
        )  # fmt: skip
        before = (
            ["if i > 0:", f"    {to} = ({to} + {name}.read(i - 1).sum()).clamp(-9, 9)"] if rng.random() < 0.4 else []
        )
        skipped = [f"if {self.test()}:", "    continue"] if rng.random() < 0.2 and not before else []
        more = self.write(depth + 1) if rng.random() < 0.5 else []
        if skipped or rng.random() < 0.3:
            shape = "(2,)" if vector else "()"
            make = f"{name} = arrays(3, shape={shape}, dtype=torch.float64)"
        else:
            make = f"{name} = arrays(3)"
        return [
            make, "for i in range(3):", *_in([*before, *skipped, f"{name} = {name}.write(i, {element})", *more]),
            f"{to} = ({used}).clamp(-9, 9)",
        ]  # fmt: skip

    def elements(self, depth: int) -> list[str]:
        """Elements of several sizes, of an array in an array, or the rows of ``x``."""
        rng, name, to = self.rng, self.new("zs"), self.name()
        kind = rng.randrange(3)
        if kind == 0:
            return [
                f"{name} = arrays(3)", "for i in range(3):",
                f"    {name} = {name}.write(i, x * {self.name()} * 0.1 * i * {self.read()})",
                *_in(self.write(depth + 1) if rng.random() < 0.5 else []),
                f"{to} = ({name}.concat().sum() + {name}.read({rng.randrange(3)}).sum()).clamp(-9, 9)",
            ]  # fmt: skip
        if kind == 1:
            inner = self.new("in")
            return [
                f"{name} = arrays(2)", "for i in range(2):", f"    {inner} = arrays(n)", "    for j in range(n):",
                f"        {inner} = {inner}.write(j, ({self.value()} + j * i).clamp(-9, 9))",
                *_in(_in(self.write(depth + 1) if rng.random() < 0.3 else [])),
                f"    {name} = {name}.write(i, {inner}.stack().sum())", f"{to} = {name}.stack().prod().clamp(-9, 9)",
            ]  # fmt: skip
        return [
            f"{name} = arrays(0, dtype=torch.float64).unstack(x * {self.read()})", "for i in range(x.shape[0]):",
            f"    {to} = ({to} + {name}.read(i)).clamp(-9, 9)", *_in(self.write(depth + 1)),
        ]  # fmt: skip


def _in(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


# -- stand-ins in plain Python ----------------------------------------------------------------------------------------


class PlainVariable:
    """A Variable outside of a graph: a value that is replaced."""

    def __init__(self, value: torch.Tensor) -> None:
        self.now = value

    def read(self) -> torch.Tensor:
        return self.now * 1

    def assign(self, value: torch.Tensor) -> torch.Tensor:
        self.now = value * 1
        return self.now

    def assign_add(self, value: torch.Tensor) -> torch.Tensor:
        return self.assign(self.now + value)

    def assign_sub(self, value: torch.Tensor) -> torch.Tensor:
        return self.assign(self.now - value)

    def scatter_add(self, rows: list[int], value: torch.Tensor) -> torch.Tensor:
        return self.assign(self.now.index_add(0, torch.tensor(rows), value))

    def scatter_update(self, rows: list[int], value: torch.Tensor) -> torch.Tensor:
        return self.assign(self.now.index_copy(0, torch.tensor(rows), value))

    def sum(self) -> torch.Tensor:
        return self.now.sum()

    def __mul__(self, other: float) -> torch.Tensor:
        return self.now * other


class PlainNet:
    """A module whose tensors are replaced where the module's are written."""

    def __init__(self, net: torch.nn.Module) -> None:
        for name, tensor in (*net.named_parameters(), *net.named_buffers()):
            setattr(self, name, tensor.detach().clone().requires_grad_(isinstance(tensor, torch.nn.Parameter)))


class PlainArray:
    """A TensorArray as a list."""

    def __init__(self, size: Any, shape: Any = None, dtype: Any = None) -> None:
        self.items: list[Any] = [None] * int(size)
        self.zero = None if shape is None else torch.zeros([size or 0 for size in shape], dtype=dtype)

    def write(self, place: Any, value: torch.Tensor) -> PlainArray:
        assert self.items[int(place)] is None
        return self.made([*self.items[: int(place)], value, *self.items[int(place) + 1 :]])

    def made(self, items: list[Any]) -> PlainArray:
        made = PlainArray(0)
        made.items, made.zero = items, self.zero
        return made

    def unstack(self, values: torch.Tensor) -> PlainArray:
        return self.made(list(values))

    def read(self, place: Any) -> torch.Tensor:
        found = self.items[int(place)]
        if found is None:
            raise LookupError("not written")
        return found

    def filled(self) -> list[torch.Tensor]:
        known = next((item for item in self.items if item is not None), None)
        zero = self.zero if self.zero is not None else None if known is None else torch.zeros_like(known)
        return [zero if item is None else item for item in self.items]

    def stack(self) -> torch.Tensor:
        found = self.filled()
        return torch.stack(found) if found else torch.zeros(0, dtype=F64)

    def gather(self, places: list[int]) -> torch.Tensor:
        return torch.stack([self.read(place) for place in places])

    def concat(self) -> torch.Tensor:
        return torch.cat(self.filled())

    def size(self) -> int:
        return len(self.items)


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        return new.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return dy, None


def through(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """A parameter written where autograd does not look: it is the same leaf."""
    return _Through.apply(old, new.detach())


def put(old: torch.Tensor, place: Any, value: torch.Tensor) -> torch.Tensor:
    """``old`` with an element written."""
    return old.index_put((torch.tensor(int(place)),), value)
