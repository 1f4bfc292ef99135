"""Published figures beside what runs here: tables for the notebooks of `notebooks/evaluation`, JSON, one results page.

A `Figure` has columns of published values, each with the mark of how they are known, and columns of samples taken here,
of which the median with the 10th and the 90th percentile is shown. Nothing of other hardware is compared as speed: what
may be compared, a shape or a ratio, is said by ``compares``. What was simulated is a column of its own, marked virtual.

The notebooks run in a quick form; `make evaluate` runs them in full, writes a JSON file for each figure, and builds
`notebooks/evaluation/results.md` from all of these files.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.benchmarks.report import machine

FOLDER = Path(__file__).parents[2] / "notebooks" / "evaluation"
FULL = os.environ.get("TFNB_EVALUATE") == "full"
MARKS = {
    "src": "read in a published script or log",
    "txt": "as reported",
    "fig": "read off the figure, 2 % on its axis",
    "log": "read off the figure, 10 % on its logarithmic axis",
    "calc": "calculated from definitions or published values",
    "table": "the published table",
}
"""How a published value is known."""
LIBRARIES = ("torch", "numpy")


def sized(quick: Any, full: Any) -> Any:
    """A size of a benchmark in the form that runs."""
    return full if FULL else quick


@dataclass
class Column:
    """A column of a figure: samples by row; one for a published value."""

    name: str
    samples: Mapping[str, Sequence[float]]
    mark: str = ""  # of a published column
    is_virtual: bool = False

    @property
    def head(self) -> str:
        """The title, with what kind of numbers these are."""
        kind = f" ({MARKS[self.mark]})" if self.mark else " (virtual clock)" if self.is_virtual else ""
        return self.name + kind

    def cell(self, row: str) -> str:
        """The median of a row's samples, with percentiles if there are several."""
        found = self.samples.get(row, ())
        if not found:
            return ""
        middle = f"{statistics.median(found):.4g}"
        if len(found) < 3:
            return middle
        low, *_, high = statistics.quantiles(found, n=10, method="inclusive")
        return f"{middle} ({low:.4g} to {high:.4g}, n={len(found)})"


@dataclass
class Figure:
    """A published figure or table. compares: what of it may be compared; equal: which values were found equal first."""

    key: str
    title: str
    unit: str
    compares: str
    rows: Sequence[str]
    columns: list[Column] = field(default_factory=list)
    equal: str = "nothing to compare"

    def add(self, name: str, samples: Mapping[Any, Any], *, mark: str = "", is_virtual: bool = False) -> Figure:
        """Add a column. samples: by row one number or several."""
        each = {str(row): [*found] if isinstance(found, Iterable) else [found] for row, found in samples.items()}
        self.columns.append(Column(name, {row: [*map(float, found)] for row, found in each.items()}, mark, is_virtual))
        return self

    def saved(self) -> Figure:
        """Write the JSON file and the results page, in the full form; nothing in the quick one."""
        if FULL:
            about = machine() | {name: version(name) for name in LIBRARIES}
            FOLDER.mkdir(parents=True, exist_ok=True)
            (FOLDER / f"{self.key}.json").write_text(json.dumps({"machine": about, **asdict(self)}, indent=1) + "\n")
            (FOLDER / "results.md").write_text(page(FOLDER))
        return self

    def markdown(self) -> str:
        """The figure as a table."""
        table = [["", *(column.head for column in self.columns)], ["---"] * (1 + len(self.columns))]
        table += [[row, *(column.cell(row) for column in self.columns)] for row in self.rows]
        lines = [f"**{self.title}** ({self.unit})", "", *(f"| {' | '.join(cells)} |" for cells in table)]
        return "\n".join([*lines, "", f"Compared: {self.compares}. Equal first: {self.equal}."])

    def _repr_markdown_(self) -> str:
        return self.markdown() + ("" if FULL else "\n\n*The quick form: small sizes, few samples.*")


def page(folder: Path) -> str:
    """The results page: all figures whose JSON files lie in a folder."""
    parts = ["# Results"]
    parts.append(
        "Built by `make evaluate` from the files beside this page. Other hardware is never compared as speed. "
        "Other work ran on the machine, too: compare times within a table only."
    )
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        about = found.pop("machine")
        columns = [Column(**column) for column in found.pop("columns")]
        where = f"{about['processor']}, {about['processors']} processors, {about['system']}, torch {about['torch']}"
        parts += [Figure(**found, columns=columns).markdown(), f"On {where}."]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Build the page anew."""
    (FOLDER / "results.md").write_text(page(FOLDER))
    sys.stdout.write(f"{FOLDER / 'results.md'}\n")


if __name__ == "__main__":
    main()
