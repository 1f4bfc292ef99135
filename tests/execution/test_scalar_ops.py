"""Torch's ops on integers and truth values as arithmetic of Python: the same numbers, also where int64 ends."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tfnb.execution.tiers.scalar_ops import HIGH, LOW, Number, expression, literal
from tfnb.graph.ops import overload

WHOLE = [LOW, LOW + 1, -(2**32), -65, -8, -1, 0, 1, 2, 7, 64, 2**31, 2**53 + 1, HIGH - 1, HIGH]
POSITIVE = [n for n in WHOLE if n > 0]
TRUTHS = [False, True]
LONG, BOOL, FLOAT = torch.int64, torch.bool, torch.float32

ROWS: list[tuple[str, list[list[Any]]]] = [
    *((f"{op}.Tensor", [WHOLE, WHOLE]) for op in ("add", "sub", "mul", "eq", "ge", "gt", "le", "lt", "ne")),
    *((f"{op}.Tensor", [TRUTHS, WHOLE]) for op in ("add", "mul", "eq", "ge", "gt", "le", "lt", "ne")),
    *((f"{op}.Tensor", [TRUTHS, TRUTHS]) for op in ("bitwise_and", "bitwise_or", "bitwise_xor", "eq", "lt")),
    *((f"{op}.default", [TRUTHS, TRUTHS]) for op in ("logical_and", "logical_or", "logical_xor")),
    ("bitwise_not.default", [TRUTHS]), ("logical_not.default", [TRUTHS]), ("neg.default", [WHOLE]),
    ("floor_divide.default", [WHOLE, POSITIVE]), ("remainder.Tensor", [WHOLE, POSITIVE]),
    ("where.self", [TRUTHS, [3, LOW], [HIGH, 0]]), ("clone.default", [WHOLE]),
]  # fmt: skip


def value(made: Any) -> Any:
    """What an expression comes to."""
    if not isinstance(made, tuple):
        return made
    function, args = made
    return function(*map(value, args))


@pytest.mark.parametrize(("op", "columns"), ROWS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_row_gives_torchs_numbers(op: str, columns: list[list[Any]]) -> None:
    for numbers in itertools.product(*columns):
        tensors = [torch.tensor(n) for n in numbers]
        wanted = overload(f"aten.{op}")(*tensors)
        for known in TRUTHS:  # of a literal the value is known, of another number its type
            args = [
                literal(n) if known or place else Number(n, t.dtype)
                for place, (n, t) in enumerate(zip(numbers, tensors, strict=True))
            ]
            found = expression(f"aten.{op}", args, {}, wanted.dtype)
            assert found is not None, (op, numbers)
            got = value(found.made)
            assert (got, type(got)) == (wanted.item(), type(wanted.item())), (op, numbers)
            assert found.dtype is wanted.dtype


@pytest.mark.parametrize("bounds", [(0, 7), (None, 7), (-3, None), (5, 2)])
def test_clamp_is_torchs(bounds: tuple[int | None, int | None]) -> None:
    for n in WHOLE:
        args = [Number(n, LONG), *(None if b is None else literal(b) for b in bounds)]
        found = expression("aten.clamp.default", args, {}, LONG)
        assert found is not None and value(found.made) == torch.clamp(torch.tensor(n), *bounds).item()


@pytest.mark.parametrize(
    ("source", "target"),
    [(BOOL, LONG), (LONG, BOOL), (BOOL, FLOAT), (LONG, FLOAT), (LONG, torch.float64)],
)
def test_casts_are_torchs(source: torch.dtype, target: torch.dtype) -> None:
    for n in TRUTHS if source is BOOL else WHOLE:
        found = expression("aten._to_copy.default", [Number(n, source)], {"dtype": target}, target)
        assert found is not None and value(found.made) == torch.tensor(n).to(target).item()


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "dtype"),
    [
        ("add.Tensor", [Number(1, LONG), literal(1)], {"alpha": 2}, LONG),
        ("add.Tensor", [Number(True, BOOL), literal(True)], {}, BOOL),
        ("sub.Tensor", [Number(True, BOOL), literal(1)], {}, LONG),
        ("add.Tensor", [Number(1, LONG), literal(0.5)], {}, torch.float32),
        ("eq.Scalar", [Number(1, LONG), literal(0.1)], {}, BOOL),
        ("floor_divide.default", [Number(1, LONG), Number(0, LONG)], {}, LONG),
        ("remainder.Scalar", [Number(1, LONG), literal(-3)], {}, LONG),
        ("bitwise_and.Tensor", [Number(6, LONG), literal(3)], {}, LONG),
        ("_to_copy.default", [Number(1, LONG)], {"dtype": torch.int32}, torch.int32),
        ("_to_copy.default", [Number(1, LONG)], {"dtype": LONG, "device": "meta"}, LONG),
        ("exp.default", [Number(1, LONG)], {}, torch.float32),
    ],
)
def test_what_is_not_exact_or_may_fail_stays_torchs(op: str, args: Any, kwargs: Any, dtype: torch.dtype) -> None:
    assert expression(f"aten.{op}", args, kwargs, dtype) is None
