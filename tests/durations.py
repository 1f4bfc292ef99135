"""Measured durations of tests, and the choice of slow tests by duration.

``python -m tests.durations REPORT.xml ...`` writes the times in reports of ``pytest --junitxml`` to
``tests/durations.json``: seconds of each function, its fixtures included, on average over its parameters.
"""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parent.parent
DURATIONS = Path(__file__).with_name("durations.json")
ONCE, LONG = 0.12, 0.8  # seconds: of longer ones quick runs take one set of parameters, and none of still longer ones
LEAST = 0.1  # seconds; shorter ones are not written down


def known() -> dict[str, float]:
    """The durations that are committed."""
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


def unit_of(nodeid: str) -> str:
    """The unit of selection: a test, or all cells of a notebook, since each cell needs the earlier ones."""
    path = nodeid.partition("::")[0]
    return path if path.endswith(".ipynb") else nodeid


def function_of(nodeid: str) -> str:
    """The unit of durations: a test without its parameters, a notebook without the cell."""
    return unit_of(nodeid.partition("[")[0])


def long(nodeids: Iterable[str], durations: Mapping[str, float]) -> set[str]:
    """Tests left out of quick runs, in order: the first set of parameters stays, unless very long.

    >>> sorted(long(["a[1]", "a[2]", "b[1]", "b[2]", "c"], {"a": 0.5, "b": 0.1, "c": 9.0}))
    ['a[2]', 'c']
    """
    found, seen = set(), set()
    for nodeid in nodeids:
        function = function_of(nodeid)
        seconds = 0.0 if function.endswith(".ipynb") else durations.get(function, 0.0)
        if seconds > LONG or (seconds > ONCE and function in seen):
            found.add(nodeid)
        seen.add(function)
    return found


def measured(report: Path, root: Path = ROOT) -> dict[str, float]:
    """Seconds of each function in a JUnit report."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for case in ET.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            place, names = case.get("classname", "").removesuffix(".ipynb").split("."), [str(case.get("name"))]
            while place and (path := _file("/".join(place), root)) is None:
                names.insert(0, place.pop())  # a class
            if place:
                found[function_of("::".join([path, *names]))].append(float(case.get("time", "0")))
    return {name: round(mean(times), 2) for name, times in found.items()}


def _file(place: str, root: Path) -> str | None:
    return next((f"{place}{end}" for end in (".py", ".ipynb") if (root / f"{place}{end}").is_file()), None)


def merged(old: Mapping[str, float], new: Mapping[str, float], root: Path = ROOT) -> dict[str, float]:
    """The new durations, and the old ones of tests that were not run and still exist."""

    def exists(name: str) -> bool:
        path, _, test = name.partition("::")
        outer = test.partition("::")[0]  # a function, or a class, which hypothesis makes by an assignment
        return (root / path).exists() and (
            not test or re.search(rf"^((def|class) )?{outer}\b", (root / path).read_text(), re.MULTILINE) is not None
        )

    kept = {name: seconds for name, seconds in old.items() if name not in new and exists(name)}
    return dict(sorted((name, seconds) for name, seconds in (kept | dict(new)).items() if seconds >= LEAST))


if __name__ == "__main__":
    durations = known()
    for report in map(Path, sys.argv[1:]):
        durations = merged(durations, measured(report))
    DURATIONS.write_text(json.dumps(durations, indent=0) + "\n")
