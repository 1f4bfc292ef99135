"""Sizes and specs: a Dim is arithmetic over names and nothing else."""

from __future__ import annotations

import ast
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tfnb.errors import GraphFormatError, InvalidArgument, ShapeError
from tfnb.graph import Dim, Spec
from tfnb.graph.spec import device_name

SYMBOLS = {"B": 5, "T": 3}


@pytest.mark.parametrize(
    ("expr", "value"),
    [
        ("B", 5),
        ("2*B + 1", 11),
        ("B - T", 2),
        ("B//2", 2),
        ("-B//2", -3),
        ("B % T", 2),
        ("B**2", 25),
        ("B/2", 2.5),
        ("floor(B/2)", 2),
        ("ceil(B/2)", 3),
        ("trunc(-B/2)", -2),
        ("max(B, T)", 5),
        ("min(B, T, 1)", 1),
        ("abs(T - B)", 2),
        ("int(float(B))", 5),
        ("B if B > T else T", 5),
        ("B if B < T else T", 3),
        ("B > 2 and T != 3", False),
        ("B > 9 or not T == 2", True),
        ("B >= 5 and B <= 5", True),
        ("7", 7),
        ("True", True),
    ],
)
def test_expression_is_evaluated(expr: str, value: float) -> None:
    found = Dim(expr).evaluate(SYMBOLS)
    assert found == value
    assert isinstance(found, type(value))


EXPRESSIONS = st.recursive(
    st.sampled_from(["B", "T", "1", "3"]),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(st.sampled_from(["max", "min"]), inner, inner).map(lambda t: f"{t[0]}({t[1]}, {t[2]})"),
        inner.map(lambda e: f"(-{e})"),
    ),
    max_leaves=12,
)


@given(EXPRESSIONS)
def test_evaluation_is_that_of_python(expr: str) -> None:
    allowed = {"max": max, "min": min, **SYMBOLS}
    try:
        expected = eval(expr, {"__builtins__": {}}, allowed)
    except ZeroDivisionError:
        with pytest.raises(ShapeError, match="divides by zero"):
            Dim(expr).evaluate(SYMBOLS)
        return
    assert Dim(expr).evaluate(SYMBOLS) == expected
    names = {node.id for node in ast.walk(ast.parse(expr)) if isinstance(node, ast.Name)}
    assert set(Dim(expr).symbols) == names - {"max", "min"}


@pytest.mark.parametrize(
    "expr",
    [
        "",
        "B +",
        "B = 1",
        "import os",
        "__import__('os')",
        "open('x')",
        "B.real",
        "B[0]",
        "[B]",
        "(B,)",
        "{B}",
        "lambda: B",
        "[x for x in B]",
        "(x := 1)",
        "'a'",
        "b'a'",
        "1j",
        "...",
        "None",
        "f'{B}'",
        "max(*B)",
        "max(B)",
        "max(B, key=T)",
        "floor(B, T)",
        "abs()",
        "print(B)",
        "B @ T",
        "B << T",
        "B ^ T",
        "~B",
        "1 < B < 3",
        "B is T",
        "B in T",
        "await B",
        "yield",
        "B\x00",
        "(" * 5000 + "B" + ")" * 5000,
        "-" * 3000 + "B",
        "+".join(["B"] * 1500),
        "B" * 5000,
    ],
)
def test_what_is_no_size_expression_is_refused(expr: str) -> None:
    with pytest.raises(GraphFormatError, match="size expression"):
        Dim(expr).checked()
    with pytest.raises(GraphFormatError, match="size expression"):
        Dim(expr).evaluate(SYMBOLS)


def test_message_about_a_long_expression_is_short() -> None:
    with pytest.raises(GraphFormatError) as caught:
        Dim("f(" * 500).checked()
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("expr", ["9**9**9**9", "B**65", "2**-1000", "10**(10**10)"])
def test_large_powers_are_refused_quickly(expr: str) -> None:
    start = time.perf_counter()
    with pytest.raises(ShapeError, match="raises to the power"):
        Dim(expr).evaluate(SYMBOLS)
    assert time.perf_counter() - start < 5


def test_unbound_symbol_is_named() -> None:
    with pytest.raises(ShapeError, match=r"size 2\*Q needs a value for Q"):
        Dim("2*Q").evaluate(SYMBOLS)


def test_symbols_are_in_order_of_appearance_and_without_functions() -> None:
    assert Dim("max(T, B) + T*abs").symbols == ("T", "B", "abs")


@pytest.mark.parametrize("expr", ["B", "u0", "batch_size"])
def test_bare_symbol_is_one(expr: str) -> None:
    assert Dim(expr).is_symbol


@pytest.mark.parametrize("expr", ["2*B", "3", "True", "if", ""])
def test_other_expressions_are_no_bare_symbol(expr: str) -> None:
    assert not Dim(expr).is_symbol


def test_rename_replaces_symbols_by_names_and_numbers() -> None:
    assert Dim("s0*2 + s1").rename({"s0": "B", "s1": 4}) == Dim("B*2 + 4")


def test_dims_are_equal_by_text_and_hash() -> None:
    assert Dim("B") == Dim("B") and len({Dim("B"), Dim("B"), Dim("T")}) == 2


def test_dim_is_evaluated_with_symbolic_ints() -> None:
    env = ShapeEnv()
    size = env.create_unbacked_symint()
    assert isinstance(Dim("2*B + 1").evaluate({"B": size}), torch.SymInt)
    assert isinstance(Dim("max(B, 2)").evaluate({"B": size}), torch.SymInt)


def test_spec_forms() -> None:
    spec = Spec(torch.float32, (Dim("B"), 784))
    assert (str(spec), spec.short()) == ("float32[B, 784]", "f32[B, 784]")
    assert str(Spec(torch.int64, (), "cuda")) == "int64[] on cuda:0"
    assert Spec(torch.float8_e5m2, (1,)).short() == "float8_e5m2[1]"
    assert Spec(torch.float32, (Dim("B"), Dim("2*T"), Dim("B"))).symbols == ("B", "T")
    assert Spec(torch.float32, (Dim("2*B"), 3)).sizes(SYMBOLS) == (10, 3)


@pytest.mark.parametrize(
    ("given", "name"),
    [("cpu", "cpu"), ("cpu:0", "cpu"), ("meta", "meta"), ("cuda:1", "cuda:1"), (torch.device("cuda", 2), "cuda:2")],
)
def test_a_device_has_one_text(given: Any, name: str) -> None:
    assert device_name(given) == name == Spec(torch.float32, (), given).device


def test_a_device_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert [device_name(kind) for kind in ("cuda", "xpu", "cuda:1")] == ["cuda:3", "xpu:0", "cuda:1"]


def test_what_is_no_device_is_said() -> None:
    with pytest.raises(InvalidArgument, match="'gpu' is no device"):
        device_name("gpu")
