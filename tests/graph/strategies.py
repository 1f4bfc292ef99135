"""Hypothesis strategies: random well-formed graphs that also run (see `tests.graph.build.evaluate`)."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from tests.graph.build import Builder
from tfnb.graph import Contents, Dim, Owner, Ref, SourceLine, Spec, Value, Variable

MATRIX = Spec(torch.float32, (Dim("B"), 3))  # every value is one of these three
FLAT = Spec(torch.float32, (Dim("3*B"),))
ROW = Spec(torch.float32, (1, 3))

UNARY = ("relu", "tanh", "neg", "sigmoid", "abs", "sin")
BINARY = ("add.Tensor", "sub.Tensor", "mul.Tensor", "maximum.default")
NASTY = ("plain", "<script>alert(1)</script>", "a\nb", "\"q'", "&amp;", "näme", "\u2028", "\x00", "%s{}", "")

labels = st.sampled_from(NASTY) | st.text(max_size=8)
sources = st.none() | st.builds(SourceLine, labels, st.integers(0, 99), labels)
owners = st.none() | st.builds(Owner, labels, st.integers(0, 3))


@st.composite
def graphs(draw: st.DrawFn, *, size: int = 12, stateful: bool = True) -> Contents:
    """Contents with a placeholder ``x`` [B, 3], up to ``size`` further nodes, and if ``stateful`` variables."""
    b = Builder()
    b.placeholder("x", ("B", 3))
    variables = [Variable(torch.full((1, 3), float(i)), name=draw(labels)) for i in range(draw(st.integers(1, 2)))]
    kinds = [_unary, _binary, _flatten, _reduce, _constant, *([_read, _assign, _group] if stateful else [])]
    for _ in range(draw(st.integers(0, size))):
        draw(st.sampled_from(kinds))(b, draw, variables)
    values = [value for node in b.nodes for value in map(node.value, range(len(node.outputs)))]
    bound = st.lists(st.sampled_from(values), min_size=1, max_size=3).map(tuple)
    names = draw(st.dictionaries(labels, bound, max_size=2))
    return b.contents(bindings=names)


def _pick(b: Builder, draw: st.DrawFn, *specs: Spec) -> Value | None:
    """An earlier value of one of these specs."""
    found = [node.value() for node in b.nodes if node.outputs and node.outputs[0] in specs]
    return draw(st.sampled_from(found)) if found else None


def _fields(b: Builder, draw: st.DrawFn) -> dict[str, Any]:
    """What does not change the meaning of a node."""
    ids = [node.id for node in b.nodes]
    return {
        "scope": tuple(draw(st.lists(labels, max_size=2))),
        "source": draw(sources),
        "owner": draw(owners),
        "tags": frozenset(draw(st.sets(labels, max_size=2))),
        "control": tuple(draw(st.lists(st.sampled_from(ids), max_size=1))),
        "forward": draw(st.none() | st.sampled_from(ids)),
        "stream": draw(st.none() | st.integers(0, 9)),
        "device": draw(st.sampled_from([None, "cpu"])),
    }


def _unary(b: Builder, draw: st.DrawFn, variables: list[Variable]) -> None:
    x = _pick(b, draw, MATRIX, FLAT, ROW)
    op = draw(st.sampled_from(UNARY))
    assert x is not None
    b.node(op, f"aten.{op}.default", (b.spec(x),), inputs=(x,), attrs={"self": Ref(0)}, **_fields(b, draw))


def _binary(b: Builder, draw: st.DrawFn, variables: list[Variable]) -> None:
    x = _pick(b, draw, MATRIX, FLAT)
    assert x is not None
    y = _pick(b, draw, b.spec(x), *([ROW] if b.spec(x) == MATRIX else []))
    assert y is not None
    op = draw(st.sampled_from(BINARY))
    attrs = {"self": Ref(0), "other": Ref(1)}
    b.node(op.split(".")[0], f"aten.{op}", (b.spec(x),), inputs=(x, y), attrs=attrs, **_fields(b, draw))


def _flatten(b: Builder, draw: st.DrawFn, variables: list[Variable]) -> None:
    x = _pick(b, draw, MATRIX, FLAT)
    assert x is not None
    out = FLAT if b.spec(x) == MATRIX else MATRIX
    attrs = {"self": Ref(0), "size": list(out.shape)}
    b.node("view", "aten.view.default", (out,), inputs=(x,), attrs=attrs, **_fields(b, draw))


def _reduce(b: Builder, draw: st.DrawFn, variables: list[Variable]) -> None:
    x = _pick(b, draw, MATRIX)
    attrs = {"self": Ref(0), "dim": [0], "keepdim": True}
    b.node("sum", "aten.sum.dim_IntList", (ROW,), inputs=(x,), attrs=attrs, **_fields(b, draw))


def _constant(b: Builder, draw: st.DrawFn, variables: list[Variable]) -> None:
    value = torch.tensor([draw(st.lists(st.floats(width=32), min_size=3, max_size=3))])
    b.node("constant", "tfnb.constant", (ROW,), attrs={"value": value}, **_fields(b, draw))


def _read(b: Builder, draw: st.DrawFn, variables: list[Variable]) -> None:
    b.node("read", "tfnb.read", (ROW,), attrs={"variable": draw(st.sampled_from(variables))}, **_fields(b, draw))


def _assign(b: Builder, draw: st.DrawFn, variables: list[Variable]) -> None:
    x = _pick(b, draw, ROW)
    if x is not None:
        b.assign(draw(st.sampled_from(variables)), x, **_fields(b, draw))


def _group(b: Builder, draw: st.DrawFn, variables: list[Variable]) -> None:
    x = _pick(b, draw, MATRIX, FLAT, ROW)
    assert x is not None
    b.node("group", "tfnb.group", inputs=(x,), **_fields(b, draw))
