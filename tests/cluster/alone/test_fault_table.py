"""The table of faults names tests that exist; and no deadline of a cluster goes by the clock on the wall."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[2]
CLUSTER = TESTS.parent / "tfnb" / "cluster"
SHOWN = {"driver.py", "queues_there.py", "peers.py"}  # when something happened, for people; who was used last


def test_every_row_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", (TESTS / "cluster" / "FAULTS.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 33))
    files = {path.stem: path.read_text() for path in TESTS.rglob("test_*.py")}
    named = re.findall(r"`(test_\w+)::(test_\w+)`", "".join(text for _, text in rows))
    assert len(named) >= 50
    assert [f"{file}::{test}" for file, test in named if f"def {test}(" not in files.get(file, "")] == []


def test_no_deadline_goes_by_the_clock_on_the_wall() -> None:
    by_wall = re.compile(r"\btime\.time\(|datetime\.|\butcnow\(")
    found = {path.name for path in CLUSTER.rglob("*.py") if by_wall.search(path.read_text())}
    assert found <= SHOWN
