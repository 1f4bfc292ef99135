"""A net whose weights, gradients and Adam state are 2.8 times the memory of its process, in a mapped file.

Each training is a process of its own under RLIMIT_DATA (`tests.memory.larger_than_memory`): one whose 4.3 GB lie in a
file, with 1.5 GB of data beside those of a small training and a budget of 1.2 GB; plain torch under the same limit,
which ends; and, where both fit, a smaller one in the file and in memory in turn: seconds a step, processor time, the
bits. The last line is JSON.

    python -m tests.benchmarks.bench_mapped [--width 2048] [--layers 8] [--room 1.5e9] [--budget 1.2e9] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.report import machine

ROOT = Path(__file__).parent.parent.parent
FITTING = {"width": 1024, "layers": 8, "rows": 256, "steps": 3}


def ran(**options: object) -> subprocess.CompletedProcess[str]:
    """One training."""
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "tests.memory.larger_than_memory", *given]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def told(**options: object) -> dict[str, Any]:
    """Its figures."""
    done = ran(**options)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def large(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The training that does not fit."""
    sizes = {"width": options.width, "layers": options.layers, "room": options.room, "rows": options.rows}
    found = told(budget=options.budget, folder=folder, save=folder / "saved", **sizes)
    found["gigabytes"] = 4 * found["weights"] / 1e9
    found["times the limit"] = 4 * found["weights"] / options.room
    found["peak of the resident set beside the start, MB"] = found["most"] / 1e6
    found["torch"] = "ran" if not (done := ran(how="torch", **sizes)).returncode else done.stderr.splitlines()[-1]
    return found


def fitting(rounds: int, folder: Path) -> dict[str, Any]:
    """Both kinds in turn: medians of their last steps, and whether all bits are the same."""
    kinds = {"mapped": {"budget": 250e6, "folder": folder}, "plain": {}, "torch": {}}
    found: dict[str, list[dict[str, Any]]] = {how: [] for how in kinds}
    for _ in range(rounds):
        for how, options in kinds.items():
            found[how].append(told(how=how, **FITTING, **options))
    rows: dict[str, Any] = {
        how: {
            "seconds": statistics.median(each["seconds"][-1] for each in runs),
            "processor": statistics.median(each["processor"][-1] for each in runs),
            "most MB": max(each["most"] for each in runs) / 1e6,
        }
        for how, runs in found.items()
    }
    pairs = zip(found["mapped"], found["plain"], strict=True)
    ratios = [one["processor"][-1] / other["processor"][-1] for one, other in pairs]
    rows["processor time, mapped / plain"] = statistics.median(ratios)
    rows["same bits"] = len({each["digest"] for how in ("mapped", "plain") for each in found[how]}) == 1
    return rows


def main(arguments: list[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--room", type=float, default=1.5e9)
    parser.add_argument("--budget", type=float, default=1.2e9)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args(arguments)
    result = {"machine": machine()}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for title, measured in (
            ("larger than the memory", lambda: large(options, Path(name))),
            ("where both fit", lambda: fitting(options.rounds, Path(name))),
        ):
            result[title] = measured()
            for key, value in result[title].items():
                print(f"{title}: {key}: {value}", flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
