"""Copies of syntax trees, which conversions change. Imports nothing of tfnb."""

from __future__ import annotations

import ast
from typing import Any


def copied(tree: Any) -> Any:
    """A copy of a parsed tree, or of a list of trees. `copy.deepcopy` asks each node how it is pickled.

    >>> tree = ast.parse("y = [x, 2]")
    >>> copied(tree) is tree, ast.dump(copied(tree)) == ast.dump(tree)
    (False, True)
    """
    if isinstance(tree, list):
        return [copied(each) if isinstance(each, ast.AST) else each for each in tree]
    new = ast.AST.__new__(type(tree))
    new.__dict__.update(tree.__dict__)
    for name in tree._fields:
        field = getattr(tree, name, None)
        if isinstance(field, (list, ast.AST)) and not isinstance(field, ast.expr_context):  # the parser has one Load()
            setattr(new, name, copied(field))
    return new
