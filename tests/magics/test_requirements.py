"""REQUIREMENTS.md: each requirement of the notebook has a test that exists, or a reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
ROW = re.compile(r"^\| U-(\d+) \| (.+?) \| (none|`(.+?)::(\w+)`) \| (.*?) ?\|$", re.MULTILINE)
ROWS = ROW.findall((Path(__file__).parent / "REQUIREMENTS.md").read_text(encoding="utf-8"))


def test_no_row_is_missing() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, 53))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"U-{row[0]}")
def test_the_test_of_a_requirement_exists_or_there_is_a_reason(row: tuple[str, ...]) -> None:
    _, _, test, file, name, rest = row
    if test == "none":
        assert len(rest) > 20
        return
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)], f"{file} has no {name}"
