"""Python numbers taken of recorded values in staged code: each run has its own, or stops where Python needed it."""

from __future__ import annotations

import linecache
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tfnb
from tests.control_flow.written import blocks, compared, function
from tfnb.errors import BranchChanged, ShapeError

FED = [
    torch.tensor([[0.5, 1.25]]),
    torch.tensor([[3.0, 1.5]]),
    torch.tensor([[-4.75, 1.0]]),
    torch.tensor([[9.0, 0.0]]),
]

STAGED = """
# item of a tensor
if x.sum().item() > 2:
    return x * 2
return x - 1

# item of one element, in arithmetic
n = x[0, 0].item()
k = 2 * n + 1
if k > 3 and not n > 8:
    k += x[0, 1].item()
return k, x * n

# float and int
a, b = float(x[0, 0]), int(x[0, 0])
a += 0.5
return a, b, b // 2 if b > 1 else b - 1

# bool
seen = bool(x[0, 0] > 1)
if seen:
    return x + 1
return x

# a while
n, count = x.sum().item(), 0
while n > 1:
    n = n / 2
    count += 1
return n, count

# in a function
def large(y):
    return y.sum().item() > 2
return x * 3 if large(x) else x

# how often a range goes on
total = x.sum() * 0
for i in range(int(x[0, 0])):
    total = total + i
return total

# rounded
return round(x[0, 0].item()), round(float(x[0, 1]), 1), round(x.sum().item() * 2, 1)

# written below
y = x.clone()
n = y[0, 0].item()
y += 1
return n, y

# said
n = x.sum().item()
assert f"{n:.1f}" != ""
return n

# a parameter
n = weight.item()
return x * 2 if n > 0 else x * 3

# its type
n, k = x[0, 0].item(), int(x[0, 1])
kinds = isinstance(n, float), isinstance(k, int), isinstance(k, (float, str)), isinstance(n, torch.Tensor)
z = torch.complex(x, x).sum().item()
numbers = isinstance(z, complex), type(z) is complex
return numbers, kinds, type(n) is float, type(k) is int, type(k > 1) is bool, {float: 2, torch.Tensor: 3}[type(n)]

# the type of a recorded tensor
return type(x) is torch.Tensor, isinstance(x, torch.Tensor), type(x * 2) in (torch.Tensor,)

# the type of a size
n = x.shape[0]
return isinstance(n, int), type(n) is int, isinstance(n, (float, torch.Tensor)), isinstance(n / 2, float)

# whole parts
n = x.sum().item()
k, large = int(x[0, 1]), bool(x.sum() > 1)
whole = math.floor(k), math.ceil(large), math.floor(n), math.ceil(n)
return whole, math.trunc(n), divmod(n, 2), divmod(int(n), 3), divmod(x.shape[0], 2)[1] * x

# functions of math
n, k = x.abs().sum().item(), int(x[0, 1])
many = math.sqrt(n), math.exp(-n), math.log(n), math.log(n, 2), math.log1p(n), math.cos(k), math.tanh(n), math.fabs(k)
pairs = math.pow(0.9, k), math.pow(n, 0.5), math.hypot(n, k), math.atan2(k, n), math.copysign(n, k)
return many, pairs, math.isfinite(n), math.degrees(n), x * math.sqrt(1 - math.pow(0.9, n)), 2 if math.cos(n) > 0 else 3
"""

NEEDED = """
# an element of a list
return x * [1.0, 2.0, 3.0][int(x[0, 1])]

# an element of a list, by a tensor
return x * [1.0, 2.0, 3.0][x.argmax()]

# a key
return x * {0: 1.0, 1: 2.0}[int(x[0, 1])]

# a key that may be there
return x * {0: 1.0, 1: 2.0}.get(int(x[0, 1]), 5.0)

# a key that a dict has
return x * (2.0 if int(x[0, 1]) in {1: "one", 7: "seven"} else 3.0)

# an element that a set has
return x * (2.0 if int(x[0, 1]) in {1, 7} else 3.0)

# elements of a set
return x * len({int(x[0, 1]), int(x[0, 1] * 1), 1})

# a count
seen = {}
for k in (int(x[0, 1]), 1):
    seen[k] = seen.get(k, 0) + 1
return x * seen[1]

# part of a list
return x * sum([1.0, 2.0, 3.0][: int(x[0, 1])])

# a size
return torch.ones(int(x[0, 1]) + 1) * x.sum()

# a function of Python
return x * math.gamma(x[0, 1].item())

# a function of a package
return x * float(np.linalg.norm(x[0, 1].item()))

# a number of torch
return torch.nn.functional.threshold(x, x[0, 1].item(), 0.0)
"""


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("name", "body"), blocks(STAGED), ids=[name for name, _ in blocks(STAGED)])
def test_a_number_of_a_recorded_value_is_each_runs_own(name: str, body: str) -> None:
    notes, refused = compared(body, FED[0], FED, weight=torch.nn.Parameter(torch.ones(())), math=math)
    assert refused == 0
    assert not any("stays Python" in note or "a run must have" in note for note in notes), notes


@pytest.mark.filterwarnings("ignore:.*Python took the")  # dicts and sets compare what has the same hash
@pytest.mark.parametrize(("name", "body"), blocks(NEEDED), ids=[name for name, _ in blocks(NEEDED)])
def test_a_number_that_python_needs_is_guarded(name: str, body: str) -> None:
    notes, refused = compared(body, FED[0], FED, (BranchChanged,), math=math, np=np)
    assert 0 < refused < len(FED)
    assert any("a run must have the sample" in note for note in notes), notes


@pytest.mark.parametrize(("text", "how"), [
    ("str(n)", "str()"), ("repr(n)", "repr()"), ("f'{n}'", "format()"), ("format(n, 'd')", "format()"),
    ("print(n) or '3'", "print()"),
])  # fmt: skip
def test_the_text_of_a_number_is_that_of_the_sample_and_noted(
    text: str, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.tensor([2.0, 1.0]), name="x")
        assert tfnb.autograph(function(f"n = int(x.sum())\nreturn {text}"))(x) == "3"
    assert capsys.readouterr().out.strip() == ("3" if "print" in text else "")
    (note,) = graph.notes
    assert f"`{how}` took the sample's value" in note and "line" in note


@pytest.mark.parametrize(("text", "how"), [
    ("str(n)", "str()"), ("repr(n)", "repr()"), ("f'{n}'", "format()"), ("f'{n:d}'", "format()"),
    ("'{}'.format(n)", "format()"),
])  # fmt: skip
def test_the_text_of_a_size_is_that_of_the_sample_and_noted(text: str, how: str) -> None:
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3), name="x")
        assert tfnb.autograph(function(f"n = x.shape[0]\nreturn {text}"))(x) == "3"
        y = x * 2
    (note,) = graph.notes
    assert f"`{how}` took the sample's value" in note and "line" in note
    assert tfnb.run(y, {x: torch.ones(5)}).tolist() == [2.0] * 5  # the text fixes no size


@pytest.mark.parametrize("owner", ["[x * 2, x * 3]", "(x * 2, x * 3)", "{False: x * 2, True: x * 3}"])
def test_a_test_of_sizes_as_an_index_is_guarded(owner: str) -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(3), name="x")
        y = tfnb.autograph(function(f"return {owner}[len(x) > 2]"))(x)
    assert tfnb.run(y, {x: torch.ones(4)}).tolist() == [3.0] * 4
    with pytest.raises(ShapeError, match="recorded for B > 2"):
        tfnb.run(y, {x: torch.ones(2)})


def test_the_guard_names_its_line() -> None:
    source = "def f(x):\n    n = int(x.sum())\n    return x * [1.0, 2.0, 3.0][n]\n"
    linecache.cache["<guarded>"] = (len(source), None, source.splitlines(keepends=True), "<guarded>")
    names: dict[str, object] = {}
    exec(compile(source, "<guarded>", "exec"), names)
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(()), name="x")
        y = tfnb.autograph(names["f"])(x)  # type: ignore[type-var]
    assert tfnb.run(y, {x: 1.5}) == 3
    with pytest.raises(BranchChanged, match=r"(?s)needs this number.*the sample's is 1.*line 3"):
        tfnb.run(y, {x: 2.0})
    assert any("line 3" in note for note in graph.notes)


def test_outside_of_staged_code_the_samples_number_is_taken_and_noted() -> None:
    with pytest.warns(UserWarning, match="took the sample"), tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(3), name="x")
        y = x * x.sum().item()
    assert tfnb.run(y, {x: torch.zeros(3) + 2}).tolist() == [6.0] * 3
    (note,) = graph.notes
    assert "took the sample's value" in note


def test_gradients_do_not_pass_through_a_number() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x * x.sum().item()).sum()

    with tfnb.record():
        x = tfnb.placeholder(torch.ones(2), shape=(2,), name="x")
        (dx,) = tfnb.gradients(tfnb.autograph(f)(x), [x])
    assert tfnb.run(dx, {x: torch.tensor([1.0, 4.0])}).tolist() == [5.0, 5.0]


NUMBERS = {
    "of integers": lambda s, x: (torch.arange(3) * s, torch.arange(3)[1] * s, torch.arange(3) / s),
    "without axes": lambda s, x: (torch.ones((), dtype=torch.float32) * s, torch.ones((), dtype=torch.float64) + s),
    "in half": lambda s, x: (x.half() * s, torch.ones((), dtype=torch.float16) - s, (s * 1024) * x.half()),
    "complex": lambda s, x: (torch.ones(2, dtype=torch.complex64) * s,),
    "of tensors made of them": lambda s, x: (torch.tensor(s), torch.tensor([s, 2 * s]), torch.tensor([s, 1])),
    "as an operand": lambda s, x: (torch.clamp(x.float(), max=s), x.half().masked_fill(x > 1, s)),
}


@pytest.mark.parametrize("of", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_promote_as_those_of_python_do(name: str, of: torch.dtype) -> None:
    program = NUMBERS[name]

    @tfnb.autograph
    def staged(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return program(x.to(of).sum().item(), x)

    with tfnb.record():
        x = tfnb.placeholder(FED[0], shape=(1, 2))
        found = staged(x)
    for fed in FED[1:]:
        for value, wanted in zip(tfnb.run(found, {x: fed}), program(fed.to(of).sum().item(), fed), strict=True):
            torch.testing.assert_close(value, wanted, rtol=2e-3 if value.dtype.itemsize < 4 else 1e-6, atol=1e-6)


@pytest.mark.parametrize("of", [torch.uint8, torch.int8, torch.bool])
def test_whole_numbers_beside_short_integers(of: torch.dtype) -> None:
    @tfnb.autograph
    def staged(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        s = x.sum().int().item()
        return torch.ones(2, dtype=of) * s, torch.ones((), dtype=of) + s

    with tfnb.record():
        x = tfnb.placeholder(FED[0], shape=(1, 2))
        found = staged(x)
    for value, wanted in zip(
        tfnb.run(found, {x: FED[1]}), (torch.ones(2, dtype=of) * 4, torch.ones((), dtype=of) + 4), strict=True
    ):
        assert value.dtype is wanted.dtype and torch.equal(value, wanted)


def test_what_an_error_of_the_program_decides_is_guarded_where_the_program_catches_it() -> None:
    @tfnb.autograph
    def checked(x: torch.Tensor) -> torch.Tensor:
        try:
            if x.sum() > 2:
                raise ValueError
            y = x * 1
        except ValueError:
            y = x * 10
        return y

    for sample, other in ((FED[1], FED[0]), (FED[0], FED[1])):
        with tfnb.record():
            x = tfnb.placeholder(sample, shape=(1, 2))
            y = checked(x)
        assert torch.equal(tfnb.run(y, {x: sample}), checked(sample))
        with pytest.raises(BranchChanged):
            tfnb.run(y, {x: other})


COUNTED = (
    "k / 3", "1 / k", "0.9**k", "1 - 0.999**k", "math.sqrt(k) / 3", "math.log(k + 1)", "k**0.5", "k**-1", "k**-2.0",
    "10 ** -(k // 2)", "2 ** (1 - k)", "pow(2, -k)", "2**k", "2 ** (k - 1)", "(k % 3 - 2) ** 2", "min(1.0, k / 7)",
    "max(k / 3, 0.5) * x.mean()", "(0.1 if k < 2 else 0.1 / k) * x.mean()", "round(k / 3, 2)", "float(k) * 0.1",
    "0.5 * (1 + math.cos(math.pi * k / 10))", "(k > 1) + (k > 2)", "(k > 1) - (k > 2)", "-(k > 1)", "True + (k > 1)",
    "(k > 1) * (k > 2)", "(k > 1) | (k > 3)", "x.mean() * (k > 1)", "x.mean() * k / 3", "(x * (1 - 0.9**k)).mean()",
    "torch.tensor(k / 3)", "x.new_tensor(k / 3)", "torch.lerp(x, x * 2, k / 3).mean()", "x.clamp(max=k / 3).mean()",
    "(torch.arange(3) * (k / 3)).sum()", "x.mean() ** (k / 3)", "torch.where(x > 0, k / 3, 0.0).mean()",
    "torch.full((2,), k / 3).sum()", "x.new_full((2,), k).sum()", "torch.full_like(x, k / 3).sum()",
    "torch.tensor(k / 3, dtype=torch.float64)", "torch.full((), k / 3, dtype=torch.float64)",
    "x.mean().item() / 3", "(x / x.norm().item()).sum() * k",
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("expression", COUNTED)
def test_a_taken_number_has_the_digits_and_the_dtype_of_pythons(expression: str, dtype: torch.dtype) -> None:
    """A count that each step raises: what Python computes of it is computed in float64, and promotes as a number."""
    lines = "module.n += 1", "k = module.n.item()", f"return x.sum() * 0 + ({expression})"
    source = "\n    ".join(["def counted(module, x):", *lines]) + "\n"
    name = f"<counted {expression}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space: dict[str, Any] = {"torch": torch, "math": math, "__name__": "counted"}
    exec(compile(source, name, "exec"), space)
    data, (module, twin) = torch.tensor([1.0, 0.5], dtype=dtype), (nn.Module(), nn.Module())
    for each in (module, twin):
        each.register_buffer("n", torch.tensor(0))
    with tfnb.record():
        x = tfnb.placeholder(data)
        y = tfnb.autograph(space["counted"])(module, x)
        everything = tfnb.effects()
    for _ in range(4):
        want = space["counted"](twin, data)
        found, _ = tfnb.run([y, everything], {x: data})
        torch.testing.assert_close(found, want, rtol=4e-16 if dtype is torch.float64 else 0, atol=0)


@pytest.mark.parametrize("lines", [
    "a = k * 2; b = a; a += 1; d = b", "a = k * 2; b = a; a *= 3; d = b + a", "d = k > 1; d += k > 2",
])  # fmt: skip
def test_an_augmented_number_is_a_new_number(lines: str) -> None:
    source = f"def counted(x):\n    k = x.sum().int().item()\n    {lines}\n    return x.sum() * 0 + d\n"
    name = f"<augmented {lines}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space: dict[str, Any] = {"__name__": "augmented"}
    exec(compile(source, name, "exec"), space)
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(2))
        y = tfnb.autograph(space["counted"])(x)
    for fed in (torch.ones(2), torch.ones(2) * 2):
        assert tfnb.run(y, {x: fed}) == space["counted"](fed)
