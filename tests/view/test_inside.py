"""Loops and branches are boxes that unfold: what they are given goes in, what they give comes out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tfnb
from tfnb.view.box import Box
from tfnb.view.drawing import Drawing


def recorded() -> tfnb.Graph:
    with tfnb.record("shown") as graph:
        x = tfnb.placeholder(torch.ones(3, 2), name="x")
        w = torch.nn.Parameter(torch.eye(2))
        _, y = tfnb.while_loop(
            lambda n, y: y.norm() > 1, lambda n, y: (n + 1, tfnb.cond(n > 2, lambda: y / 4, lambda: y @ w / 2)), (0, x)
        )
        tfnb.gradients(y.sum(), [w])
    return graph


def path(root: Box, *titles: str) -> Box:
    for title in titles:
        root = next(child for child in root.children if child.title.startswith(title))
    return root


def nodes(box: Box) -> Iterator[str]:
    return (node.op for node in box.nodes)


def test_a_loop_is_a_box_with_its_condition_and_its_body() -> None:
    root = Drawing(recorded()).root
    loop = path(root, "_, y = tfnb.while_loop", "while_loop")
    assert "aten.gt.Scalar" in nodes(path(loop, "cond"))
    branch = path(loop, "body", "cond")
    assert "aten.mm.default" not in nodes(path(branch, "then"))
    assert "aten.mm.default" in nodes(path(branch, "else"))


def test_edges_go_into_a_loop_and_come_out_of_it() -> None:
    drawing = Drawing(recorded())
    line = path(drawing.root, "_, y = tfnb.while_loop")
    body, test = path(line, "while_loop", "body"), path(line, "while_loop", "cond")
    assert {edge.head for edge in drawing.wiring.edges(body)}  # from what it was given to what it does
    assert all(any(link for link in drawing.wiring.links[node.id]) for box in (body, test) for node in box.nodes)
    assert drawing.root.children[0].node.name == "x"
    assert any(edge.tail == 0 for edge in drawing.wiring.edges(drawing.root))


def test_every_node_inside_has_a_place_of_its_own_and_every_box_a_picture() -> None:
    drawing = Drawing(recorded())
    leaves = [box.node.id for box in drawing.root.walk() if not box.children]
    assert len(leaves) == len(set(leaves))
    assert drawing.svg.startswith("<svg")
    for box in drawing.root.walk():
        if box.children and box.key:
            assert "<rect" in drawing.face(box.name, True)


def test_a_traced_run_lights_the_side_that_was_taken_and_greys_the_other() -> None:
    with tfnb.record("lit") as graph:
        x = tfnb.placeholder(torch.ones(3, 2), name="x")
        way = tfnb.placeholder(torch.tensor(1.0), name="way")
        y = tfnb.cond(way > 0, lambda: x.sin() * 2, lambda: x.cos() / 2)
        n = tfnb.fold(lambda total, row: tfnb.cond(row.sum() > 5, lambda: total + 1, lambda: total - 1), 0.0, x)

    def sides(fed: float, rows: torch.Tensor, line: str) -> list[tuple[str, bool]]:
        session = tfnb.Session(graph)
        session.run([y, n], {x: rows, way: fed}, trace=True)
        drawing = Drawing(graph, trace=session.trace)
        branch = path(drawing.root, line)
        found = [box for box in branch.walk() if box.title in ("then", "else")]
        return [(drawing.painter.tone(box)[:4], 'opacity="0.35"' in drawing.card(box).svg) for box in found]

    lit, dead, same = ("heat", False), ("plai", True), ("heat", False)
    few, some = torch.ones(2, 2), torch.tensor([[1.0, 1.0], [9.0, 9.0]])
    assert sides(1.0, few, "y =") == [lit, dead]
    assert sides(-1.0, few, "y =") == [dead, lit]
    assert sides(1.0, few, "n =") == [dead, lit]
    assert sides(1.0, some, "n =") == [same, same]


def test_guards_and_copies_of_the_user_stay() -> None:
    with tfnb.record("own") as graph:
        x = tfnb.placeholder(torch.ones(3), name="x")
        y = tfnb.cond(x.sum() > 0, lambda: x + 1, lambda: x - 1)
        with pytest.warns(UserWarning, match="Python took the True branch"):
            if y.sum() > 0:
                z = y.clone()
    drawn = [node.op for node in Drawing(graph).contents.nodes]
    assert drawn.count("tfnb.guard") == 1 and drawn.count("aten.clone.default") == 1 and z is not None


def test_constants_that_a_loop_is_given_stand_beside_its_arguments() -> None:
    drawing = Drawing(recorded())
    body = path(drawing.root, "_, y = tfnb.while_loop", "while_loop", "body")
    kinds = [(child.node.op, child.is_small) for child in body.children if not child.children]
    assert ("tfnb.constant", True) in kinds and ("tfnb.argument", False) in kinds
    assert all(child.title not in ("n", "w") for child in body.children if child.children)
