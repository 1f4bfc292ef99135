"""The text form: golden texts, stability, and hostile names."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given

from tests.graph.build import Builder, dense
from tests.graph.strategies import graphs
from tfnb.graph import Contents, Dim, Graph, Guard, Ref, SourceLine, Spec, Variable
from tfnb.graph.forms.text import one_line, text

DENSE = """\
graph net(x: f32[B, 4]) {
  fc   # In[3]:2
    linear
      %1 = aten.addmm(fc.bias: var f32[3], %x, fc.weight: var f32[4, 3])   f32[B, 3]
  %2 = aten.relu(%1)   f32[B, 3]
} -> y: %2"""


def test_golden_text_of_a_dense_layer() -> None:
    assert text("net", dense()) == DENSE


def test_golden_text_of_a_step() -> None:
    b = Builder()
    w = Variable(torch.ones(3), name="w")
    old = b.read(w)
    scaled = b.op("aten.mul.Tensor", w.spec, self=old, other=0.5)
    written = b.assign(w, scaled)
    new = b.read(w)
    late = b.op("aten.add.Tensor", w.spec, self=old, other=new)
    b.node("done", "tfnb.group", inputs=(written, late), control=(old.node,))
    assert text("step", b.contents()) == (
        "graph step() {\n"
        "  %1 = tfnb.read(w: var f32[3])   f32[3]\n"
        "  %2 = aten.mul.Tensor(%1, other=0.5)   f32[3]\n"
        "  %3 = tfnb.assign(w: var f32[3], %2)   f32[3]\n"
        "  %4 = aten.add.Tensor(%1, w: var f32[3])   f32[3]\n"
        "  tfnb.group(%3, %4) after %1\n"
        "}"
    )


def test_golden_text_of_every_kind_of_attr() -> None:
    b = Builder()
    b.node(
        "n", "aten.topk.default", (Spec(torch.float64, (Dim("B"),), "cuda"), Spec(torch.int64, ())), device="cuda:0",
        attrs={
            "none": None, "flag": True, "text": "a\n", "list": [1, Dim("2*B")], "one": (1,), "dtype": torch.int8,
            "device": torch.device("cpu"), "layout": torch.strided, "form": torch.channels_last, "big": torch.zeros(9),
            "small": torch.tensor([1, 2]), "inf": float("inf"),
        },
    )  # fmt: skip
    line = text("g", b.contents(guards=(Guard("B > 1", SourceLine("In[1]", 2)),))).splitlines()[1:]
    assert line == [
        r"  %1 = aten.topk(none=None, flag=True, text='a\n', list=[1, 2*B], one=(1,), dtype=int8, device=cpu, "
        "layout=torch.strided, form=torch.channels_last, f32[9], i64[2] [1, 2], inf=inf) @cuda:0"
        "   (float64[B] on cuda:0, i64[])".replace("float64", "f64"),
        "  guard B > 1   # In[1]:2",
        "} -> n:0: %1:0, n:1: %1:1",
    ]


def test_second_output_is_named_by_its_index() -> None:
    b = Builder()
    spec = Spec(torch.float32, (2,))
    pair = b.node("pair", "aten.aminmax.default", (spec, spec))
    b.op("aten.relu.default", spec, self=pair._replace(index=1))
    assert "aten.relu(%1:1)" in text("g", b.contents())


def test_two_variables_of_one_name_get_two_labels() -> None:
    b = Builder()
    for _ in range(2):
        b.read(Variable(torch.zeros(1), name="w"))
    assert "w: var" in text("g", b.contents())
    assert "w_1: var" in text("g", b.contents())


@pytest.mark.parametrize("hostile", ["a\nb", "\x00", "\u2028", "\x1b[31m", "a\r\nb"])
def test_unprintable_text_stays_on_its_line(hostile: str) -> None:
    x, node = dense().nodes[0], dense().nodes[4]
    where = {"scope": (hostile,), "source": SourceLine(hostile, 1, hostile)}
    node = replace(node, inputs=(x.value(),), attrs={"self": Ref(0), "k": hostile}, **where)
    written = text(hostile, Contents((x, node)))
    assert hostile not in written
    assert all(line.isprintable() for line in written.split("\n"))


def test_printable_text_is_kept() -> None:
    assert one_line("<script> & \"näme\" 'x'") == "<script> & \"näme\" 'x'"


@given(graphs())
def test_text_has_one_line_per_node_and_no_ids(contents: Contents) -> None:
    written = text("g", contents)
    assert written.isprintable() or all(line.isprintable() for line in written.split("\n"))
    renumbered = {node.id: 10**9 + place for place, node in enumerate(contents.nodes)}
    moved = Contents(
        tuple(
            replace(
                node,
                id=renumbered[node.id],
                inputs=tuple(value._replace(node=renumbered[value.node]) for value in node.inputs),
                control=tuple(renumbered[i] for i in node.control),
            )
            for node in contents.nodes
        ),
    )
    assert text("g", moved) == written


def test_diff_of_equal_graphs_is_empty_and_of_others_names_the_line() -> None:
    a, b = Graph("a", dense()), Graph("a", dense())
    assert a.diff(b) == ""
    nodes = dense().nodes
    other = Graph("a", Contents((*nodes[:4], replace(nodes[4], op="aten.tanh.default"))))
    assert "-  %2 = aten.relu(%1)   f32[B, 3]" in a.diff(other)
    assert "+  %2 = aten.tanh(%1)   f32[B, 3]" in a.diff(other)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["1", "2"])
def test_text_does_not_depend_on_the_hash_seed(seed: str) -> None:
    program = "from tests.graph.build import dense; from tfnb.graph.forms.text import text; print(text('net', dense()))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": seed},
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.rstrip("\n") == DENSE, done.stderr
