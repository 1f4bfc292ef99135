"""The shape of the code, per folder: what `make shape` prints so that a drift is seen. It fails nothing."""

from __future__ import annotations

import ast
import importlib
import io
import statistics
import tokenize
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent.parent
HEAD = ("folder", "files", "lines", "functions", "median", "p90", "longest", "docstring %", "comment %", "late imports")


def measured(path: Path) -> tuple[int, list[int], int, int, int]:
    """Lines, lengths of functions, docstring lines, comment lines, imports inside functions."""
    text = path.read_text()
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    documented = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef) or node in functions]
    strings = [n.body[0] for n in documented if ast.get_docstring(n, clean=False) is not None]
    late = sum(isinstance(inner, ast.Import | ast.ImportFrom) for node in functions for inner in ast.walk(node))
    comments = sum(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(text).readline))
    length = [node.end_lineno - node.lineno + 1 for node in functions]
    return text.count("\n"), length, sum(s.end_lineno - s.lineno + 1 for s in strings), comments, late


def row(folder: str, files: list[Path]) -> tuple[str, ...]:
    """One line of the table."""
    parts = [measured(path) for path in files]
    lines = sum(part[0] for part in parts) or 1
    lengths = sorted(length for part in parts for length in part[1]) or [0]
    p90 = lengths[int(0.9 * (len(lengths) - 1))]
    shares = [f"{100 * sum(part[i] for part in parts) / lines:.0f}" for i in (2, 3)]
    late = sum(part[4] for part in parts)
    median = f"{statistics.median(lengths):.0f}"
    return tuple(map(str, (folder, len(files), lines, len(lengths), median, p90, lengths[-1], *shares, late)))


RULES = ("tfnb/gradients/rules", "tfnb/gradients/table.py", "tfnb/recording/overrides")  # said once by op, by design


def op_tables(least: int = 3) -> list[tuple[str, str, int]]:
    """(file, name, members) of each table of a module that has so many ATen ops, but those of rules and overrides."""
    found = []
    for path in sorted((*(ROOT / "tfnb").rglob("*.py"), *(ROOT / "kernels").rglob("*.py"))):
        file = str(path.relative_to(ROOT))
        if file.startswith(RULES) or path.stem.startswith("__"):
            continue
        module = file.removesuffix(".py").replace("/", ".")
        tables = vars(importlib.import_module(module if module.startswith("tfnb") else f"tfnb.{module}"))
        for name in _assigned(ast.parse(path.read_text())):
            ops = _ops(tables.get(name))
            if ops >= least:
                found.append((file, name, ops))
    return found


def _assigned(tree: ast.Module) -> list[str]:
    """The names that a module's own statements assign to."""
    targets = [t for n in tree.body if isinstance(n, ast.Assign | ast.AnnAssign) for t in getattr(n, "targets", ())]
    targets += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    return list(dict.fromkeys(inner.id for t in targets for inner in ast.walk(t) if isinstance(inner, ast.Name)))


def _ops(table: Any) -> int:
    """How many ATen ops are members of a table: as overloads, packets or qualified names, also in its values."""
    if isinstance(table, str):
        return table.startswith("aten.")
    if isinstance(table, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(table).startswith("aten.")
    if isinstance(table, Mapping):
        return max(sum(map(_ops, table)), sum(map(_ops, table.values())))
    return sum(map(_ops, table)) if isinstance(table, tuple | list | set | frozenset) else 0


def main() -> None:
    """Print the table."""
    folders: dict[str, list[Path]] = defaultdict(list)
    for top in ("kernels", "widgets", "tfnb", "magics", "tests"):
        for path in sorted((ROOT / top).rglob("*.py")):
            folders[str(path.parent.relative_to(ROOT))].append(path)
    rows = [HEAD, *(row(folder, files) for folder, files in folders.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        print("  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))))
    tables = op_tables()
    print(f"\ntables of ops outside of rules and overrides: {len(tables)}")
    for file, name, ops in tables:
        print(f"  {file} {name}: {ops}")


if __name__ == "__main__":
    main()
