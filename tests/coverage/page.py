"""Writes COVERAGE.md: what `known.py` lists, over the entries of OpInfo. Run by `make coverage`, after the tests.

The page is a function of the table and of torch's list alone: the tests prove the table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.coverage import checks
from tests.coverage.known import KNOWN, NO_CPU
from tests.coverage.sweep import BUILDS_ON, COLUMNS, VARYING, applies

PAGE = Path(__file__).with_name("COVERAGE.md")
HEADS = {
    "records": "records", "replays": "replays", "complex": "complex", "first": "first order",
    "second": "second order", "varying": "varying axis",
}  # fmt: skip
# column -> the least share of the entries it applies to
TARGETS = {"records": 0.98, "replays": 0.98, "first": 0.97, "second": 0.92, "varying": 0.90}
TORCH = torch.__version__.partition("+")[0]


def fails(column: str | None, name: str) -> str | None:
    """The reason why the entry fails the column, its own or that of a column it builds on."""
    while column is not None:
        if name in KNOWN[column]:
            return KNOWN[column][name]
        column = BUILDS_ON.get(column)
    return None


def totals() -> dict[str, tuple[int, int]]:
    """Column -> (entries that pass, entries it applies to)."""
    found = {}
    for column in COLUMNS:
        asked = [name for name, info in checks.entries().items() if column in applies(info)]
        found[column] = (sum(fails(column, name) is None for name in asked), len(asked))
    return found


def page() -> str:
    """The text of the page."""
    counts = totals()
    shares = [_share(column, *counts[column]) for column in COLUMNS if counts[column][1]]
    rows = [_row(name, info) for name, info in checks.entries().items()]
    heads = [HEADS[column] for column in COLUMNS]
    return "\n".join([
        "# What records, runs again and differentiates", "",
        f"Every entry of `op_db`, the operator database of PyTorch's own tests (torch {TORCH}, CPU). `make coverage`",
        "runs every sample of every entry and dtype, `make test` one of each, and all of those that",
        "fail: an entry that fails and is not listed in known.py, or is listed and passes, is an error.", "",
        "- **records**: recorded with a placeholder for each tensor, the values shown are torch's (float64, float32,",
        "  int64, bool where the operator takes them).",
        "- **replays**: run by a Session on other inputs of the same shapes, equal to torch's results, bitwise or to",
        "  1e-6. Random operators: equal for equal seeds, and distributed as torch's.",
        "- **complex**: both in complex128, counted apart.",
        "- **first, second order**: `tfnb.gradients`, and the gradients of these, equal torch.autograd's in float64",
        "  (complex128 where the operator takes nothing real).",
        "- **varying axis**: recorded with axis 0 of the arguments varying and run with four other sizes, values and",
        f"  gradients equal to torch's: up to {VARYING} samples for which torch itself takes these sizes.",
        "- A dash: torch does not do it either, or it means nothing there.", "",
        "| column | passes | of | share | target |", "|---|---|---|---|---|", *shares, "",
        f"Of the {len(rows)} entries {len(NO_CPU)} count nowhere: torch itself has no kernel for them on the",
        f"CPU. Of all of them {counts['replays'][0] / len(rows):.1%} replay.", "",
        f"| op | {' | '.join(heads)} | reason |", "|---" * (len(heads) + 2) + "|", *rows, "",
    ])  # fmt: skip


def _share(column: str, good: int, count: int) -> str:
    target = f"{TARGETS[column]:.0%}" if column in TARGETS else "-"
    return f"| {HEADS[column]} | {good} | {count} | {good / count:.1%} | {target} |"


def _row(name: str, info: Any) -> str:
    asked = applies(info)
    said = [fails(column, name) for column in COLUMNS if column in asked]
    cells = [("no" if fails(column, name) else "yes") if column in asked else "-" for column in COLUMNS]
    said += ["torch has no kernel for the CPU"] * (name in NO_CPU)
    return f"| {name} | {' | '.join(cells)} | {'; '.join(dict.fromkeys(filter(None, said)))} |"


if __name__ == "__main__":
    PAGE.write_text(page())
