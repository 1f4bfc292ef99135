"""Copies of syntax trees share no node with the tree that they were made of, and keep its lines."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.syntax import parsed
from tfnb.control_flow.frontend.tree_copies import copied

FILES = [Path(__file__), *sorted((Path(__file__).parents[2] / "tfnb/control_flow/frontend").glob("*.py"))]


def nodes(tree: ast.AST) -> set[int]:
    """The identities of all nodes; of ``ast.Load()`` the parser has one for all trees."""
    return {id(node) for node in ast.walk(tree) if not isinstance(node, ast.expr_context)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_copy_is_equal_and_shares_no_node(path: Path) -> None:
    tree = parsed(path)
    copy = copied(tree)
    assert ast.dump(copy, include_attributes=True) == ast.dump(tree, include_attributes=True)
    assert not nodes(copy) & nodes(tree)


def test_a_list_of_statements_is_another_list() -> None:
    body = ast.parse("a = 1\nb = a").body
    copy = copied(body)
    copy[0].lineno = 7
    copy.pop()
    assert [statement.lineno for statement in body] == [1, 2]
