"""Syntax trees of source files, parsed once in a process: several tests look at all of them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file. Collections of garbage meanwhile would take three times as long as the parser does."""
    from tfnb.graph.collector import uncollected  # loads torch, which nobody needs who only reads a table of rooms

    with uncollected():
        return ast.parse(path.read_text())
