"""The slow tests for which one run of ``.ci/run`` has time. The same commit has the same tests.

``TFNB_SLOW_SECONDS=180`` turns the choice on. Tests of the rooms that changed since a base commit come first, then
those of the rooms directly above, by the table of ``tests/test_layers.py``, then a third of the others, which differs
from commit to commit. By ``tests/durations.json`` they fit into so many seconds of wall time; the others are left out.
``TFNB_SLOW_DEADLINE``, in seconds since the epoch, is for slow machines: no slow test is begun later.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from statistics import median
from typing import Any
from zlib import crc32

import pytest

from tests.durations import function_of, known, unit_of
from tests.scheduling import scope
from tests.test_layers import BELOW

ROOT = Path(__file__).parent.parent
SECONDS, DEADLINE = "TFNB_SLOW_SECONDS", "TFNB_SLOW_DEADLINE"
HISTORY = 20  # commits back to the base, where there is no other
SHARES = 3  # of the tests that no change calls for, each commit runs one share

# Rooms that tests are about, where the name of their folder or file is not that of a room.
ABOUT = {
    "benchmarks": "execution cluster",
    "breakpoints": "session",
    "checkpoints": "train fitting state",
    "command_line": "__main__ doctor demo",
    "comparing": "fitting",
    "coverage": "recording gradients",
    "escaping": "widgets view",
    "house": "__init__",
    "layers": "__init__",
    "models": "recording gradients",
    "notebooks": "magics fitting",
    "pages": "magics view",
    "programs": "control_flow execution",
    "readme": "magics fitting cluster",
    "reference": "magics __init__",
    "restored_optimizers": "train state",
    "resuming": "fitting state",
    "scheduling": "",
    "selection": "",
    "signal_handlers": "interrupts recording execution",
    "step": "session",
    "stored_outputs": "magics view widgets",
    "value_cache": "session",
    "wrong_arguments": "errors graph session fitting",
}

CHANGED, ROOM, ABOVE, SHARE = range(4)  # why a test is chosen; the first reasons are served first
OTHER_SHARE, NO_TIME = f"another commit's 1 of {SHARES}", "no time"
NOT_BEGUN = f"not begun: later than {DEADLINE}"


@dataclass(frozen=True)
class Change:
    """A commit and its changed files since the base. ``files=None``: no base, so all files count as changed."""

    commit: str
    base: str
    files: frozenset[str] | None


def change(root: Path = ROOT, base: str | None = None) -> Change:
    """The commit that is checked out, compared with ``base``, the branch point of main, or an older commit."""
    head = _git(root, "rev-parse", "HEAD")
    if head is None or _git(root, "rev-parse", "--show-prefix"):  # a folder of another project's checkout
        return Change("0" * 40, "none: not a git checkout", None)
    candidates = {
        "TFNB_CI_BASE": base and _git(root, "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}"),
        "merge-base with origin/main": _git(root, "merge-base", "HEAD", "origin/main"),
        f"HEAD~{HISTORY}": _git(root, "rev-parse", "--verify", "--quiet", f"HEAD~{HISTORY}"),
    }
    for name, commit in candidates.items():
        if commit and (commit != head or name == "TFNB_CI_BASE"):
            files = _git(root, "diff", "--name-only", "--no-renames", "-z", commit, head)
            if files is not None:
                return Change(head, f"{commit[:12]} ({name})", frozenset(filter(None, files.split("\0"))))
    return Change(head, f"none: the history has fewer than {HISTORY} commits", None)


def _git(root: Path, *args: str) -> str | None:
    """The output of git, or None where it fails or is not installed."""
    try:
        done = subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def room_of_source(path: str) -> str | None:
    """The room of a source file; None for tests, documents and files at the top level."""
    top, *below = PurePosixPath(path).parts
    if top == "tfnb" and below:
        return PurePosixPath(below[0]).stem
    return top if top in BELOW and below else None


def folder_of_tests(path: str) -> str | None:
    """``cluster`` for a file under ``tests/cluster/``, ``step`` for ``tests/test_step.py``; None for other files."""
    top, *below = PurePosixPath(path).parts
    if top == "notebooks":
        return top
    if top != "tests" or (len(below) == 1 and not below[0].startswith("test_")):
        return None
    return PurePosixPath(below[0]).stem.removeprefix("test_")


def rooms_of_test(path: str) -> set[str]:
    """Rooms that a file of tests is about."""
    folder = str(folder_of_tests(path))
    return set(ABOUT.get(folder, folder).split())


def is_test(path: str) -> bool:
    """Whether a file has tests, and is no helper of others."""
    name = PurePosixPath(path).name
    return name.startswith("test_") or name.endswith(".ipynb")


def above(rooms: Iterable[str]) -> set[str]:
    """Rooms directly above these rooms."""
    return {name for name, below in BELOW.items() if set(below.split()) & set(rooms)}


@dataclass(frozen=True)
class Reasons:
    """Why tests are chosen for a change."""

    change: Change

    @property
    def rooms(self) -> set[str]:
        """Rooms that changed."""
        files = self.change.files
        return set(BELOW) if files is None else {room for path in files if (room := room_of_source(path)) in BELOW}

    @property
    def helped(self) -> set[str]:
        """Folders of tests whose helpers changed."""
        return {str(folder_of_tests(path)) for path in self.change.files or () if not is_test(path)} - {"None"}

    def ranks(self, units: Iterable[str]) -> dict[str, int | None]:
        """The reason for each unit, a test or a notebook; None where there is none."""
        rooms, helped, files = self.rooms, self.helped, self.change.files or ()
        floor, share = above(rooms), int(self.change.commit[:8], 16) % SHARES

        def rank(unit: str) -> int | None:
            path = unit.partition("::")[0]
            about = rooms_of_test(path)
            if path in files:
                return CHANGED
            if about & rooms or folder_of_tests(path) in helped:
                return ROOM
            if about & floor:
                return ABOVE
            return SHARE if crc32(unit.encode()) % SHARES == share else None

        return {unit: rank(unit) for unit in units}

    def text(self) -> str:
        """The base and the rooms, for the head of a run."""
        rooms = self.rooms
        changed = "all" if self.change.files is None else " ".join(sorted(rooms | self.helped)) or "none"
        return (
            f"base: {self.change.base}; changed rooms: {changed}; "
            f"directly above: {' '.join(sorted(above(rooms) - rooms)) or 'none'}"
        )


def left_out(nodeids: Iterable[str], reasons: Reasons, durations: Mapping[str, float], seconds: float, processes: int,
             scope: Callable[[str], str] = scope) -> dict[str, str]:  # fmt: skip
    """The tests that are not run, each with the reason.

    The others take at most ``seconds`` on so many processes, by their durations. A scope is run by one process. Tests
    with the same rank come in an order that differs from commit to commit, so that none is always the last.
    """
    usual = median(durations.values()) if durations else 1.0
    units: defaultdict[str, list[str]] = defaultdict(list)
    for nodeid in nodeids:
        units[unit_of(nodeid)].append(nodeid)
    ranks = reasons.ranks(units)
    total, scopes, out = 0.0, Counter[str](), {}
    for unit in sorted(units, key=lambda unit: (ranks[unit] or 0, crc32(f"{reasons.change.commit} {unit}".encode()))):
        cost = sum(durations.get(function_of(nodeid), usual) for nodeid in units[unit])
        if ranks[unit] is None:
            out |= dict.fromkeys(units[unit], OTHER_SHARE)
        elif total + cost > seconds * processes or scopes[scope(unit)] + cost > seconds:
            out |= dict.fromkeys(units[unit], NO_TIME)
        else:
            total += cost
            scopes[scope(unit)] += cost
    return out


def summary(nodeids: Iterable[str], out: Mapping[str, str]) -> list[str]:
    """How many tests are left out of each file, and why."""
    nodeids = list(nodeids)
    why = Counter(out.values())
    lines = [f"{len(nodeids) - len(out)} of {len(nodeids)} slow tests chosen; left out: {_counts(why)}"]
    files: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for nodeid, reason in out.items():
        files[nodeid.partition("::")[0]][reason] += 1
    return [*lines, *(f"{path}: {_counts(files[path])}" for path in sorted(files))]


def _counts(why: Counter[str]) -> str:
    return ", ".join(f"{count} ({reason})" for reason, count in sorted(why.items())) or "none"


class Selection:
    """A plugin of pytest: leaves out the tests of `left_out`, and begins no slow test after the deadline."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self.seconds = float(environment.get(SECONDS, "inf"))
        self.deadline = float(environment.get(DEADLINE, "inf"))
        self.reasons = Reasons(change(base=environment.get("TFNB_CI_BASE"))) if SECONDS in environment else None
        self.processes = int(environment.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        self.lines: list[str] = []

    def pytest_report_header(self) -> str | None:
        return self.reasons and f"slow tests: {self.reasons.text()}"

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.reasons is None:
            return
        slow = [item.nodeid for item in items if item.get_closest_marker("slow")]
        out = left_out(slow, self.reasons, known(), self.seconds, self.processes)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
        items[:] = [item for item in items if item.nodeid not in out]
        self.lines = summary(slow, out)
        if hasattr(config, "workeroutput"):  # of pytest-xdist: a process that has no terminal
            config.workeroutput["selection"] = self.lines

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.lines = getattr(node, "workeroutput", {}).get("selection", self.lines)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        # A test that failed is run again by pytest-rerunfailures after the deadline, too: a skip would hide the failure
        again = getattr(item, "execution_count", 1) > 1
        if time.time() > self.deadline and item.get_closest_marker("slow") and not again:
            pytest.skip(NOT_BEGUN)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        late = sum(NOT_BEGUN in str(report.longrepr) for report in terminalreporter.getreports("skipped"))
        if self.lines or late:
            terminalreporter.section("slow tests left out", "-")
        for line in self.lines:
            terminalreporter.line(line)
        if late:
            terminalreporter.line(f"{late} chosen tests were not begun: the time was over")
