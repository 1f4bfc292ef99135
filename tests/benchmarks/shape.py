"""The shape of the code, per folder: printed by `make shape`, so that a drift is seen. Fails nothing."""

from __future__ import annotations

import ast
import io
import statistics
import tokenize
from collections import defaultdict
from pathlib import Path

from tests.benchmarks import prose
from tests.benchmarks.mechanisms import report

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
    print()
    print(*prose.lines(), sep="\n")
    print()
    print(*report(), sep="\n")


if __name__ == "__main__":
    main()
