"""Results of a comparison as JSON and as one Markdown table."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.benchmarks.rows import COMPILERS, OURS, ROWS, Result, Row, Target

HEAD = (
    "row", "library", "median", "p10", "p90", "of the fastest peer", "of eager", "first step s", "steady after s",
    "0.9 of the final rate after s", "peak MiB", "targets of tfnb", "note",
)  # fmt: skip


def machine(device: str = "cpu") -> dict[str, Any]:
    """Where and when this runs."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": models[0].partition(": ")[2] if models else platform.processor(), "processors": os.cpu_count(),
        "memory GiB": round(memory, 1), "system": platform.platform(), "python": platform.python_version(),
        "load at the start": os.getloadavg(),
    } | ({} if device == "cpu" else {"accelerator": torch.cuda.get_device_name(device)})  # fmt: skip


def measured(result: Result, what: str) -> float | None:
    """A library's figure: the median of its samples, its first step, its peak."""
    if what == "time":
        return float(np.median(result.samples)) if result.samples else None
    return result.first if what == "first" else result.peak


def fastest(results: dict[str, Result]) -> float | None:
    """The median of the fastest library that is not ours."""
    times = [measured(result, "time") for library, result in results.items() if library not in OURS]
    return min((time for time in times if time is not None), default=None)


def missed(row: Row, library: str, results: dict[str, Result]) -> list[str]:
    """What a library of ours did not keep: "time", "first", "peak"."""
    if library not in OURS or not results[library].samples:
        return []
    targets = [t for t in _asked(row, library) if verdict(t, results[library], results).endswith("MISS")]
    return list(dict.fromkeys("first" if row.cold else target.what for target in targets))


def verdict(target: Target, result: Result, results: dict[str, Result]) -> str:
    """One target: what was asked, what was found."""
    got = measured(result, target.what)
    if target.of == "one":
        base: float | None = 1.0
    elif target.of == "fastest peer":
        base = fastest(results)
    else:
        base = measured(results[target.of], target.what) if target.of in results else None
    asked = f"{target.what} <= {duration(target.limit) if target.of == 'one' else f'{target.limit} of {target.of}'}"
    if not got or not base:
        return f"{asked}: not measured"
    found = duration(got) if target.of == "one" else f"{got / base:.2f}"
    return f"{asked}: {found} {'pass' if got <= target.limit * base else 'MISS'}"


def duration(seconds: float | None) -> str:
    """In a unit that reads well."""
    if seconds is None:
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def steady(result: Result) -> str:
    """Seconds until the code of a step no longer changes, or one took at most half as long again as later ones do."""
    if result.settled is not None:
        return f"{result.settled:.3f}"
    usual = min(filter(None, (measured(result, "time"), *result.begun)), default=None)
    total = 0.0
    for seconds in result.begun:
        if usual and seconds <= 1.5 * usual:
            return f"{total:.3f}"
        total += seconds
    return ""


def _asked(row: Row, library: str) -> list[Target]:
    """What is asked of a library: its first step too, unless it compiles in it, which tfnb does only when told to."""
    return [target for target in row.targets if target.what != "first" or library not in COMPILERS]


def _ratio(result: Result, base: float | None) -> str:
    time = measured(result, "time")
    return f"{time / base:.2f}" if time and base else ""


def markdown_rows(row: Row, results: dict[str, Result]) -> str:
    """The row's lines of the table."""
    lines = []
    eager = measured(results["torch_eager"], "time") if "torch_eager" in results else None
    for library, result in results.items():
        low, high = np.percentile(result.samples, [10, 90]) if result.samples else (None, None)
        targets = "; ".join(verdict(t, result, results) for t in _asked(row, library)) if library in OURS else ""
        cells = (
            row.name, library, duration(measured(result, "time")), duration(low), duration(high),
            _ratio(result, fastest(results)), _ratio(result, eager),
            f"{result.first:.3f}" if result.first else "", steady(result),
            "" if result.reached is None else f"{result.reached:.3f}", f"{result.peak:.0f}" if result.peak else "",
            targets if result.samples else "", f"not timed: {result.absent}" if result.absent else result.note,
        )  # fmt: skip
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines)


def profiles(table: dict[str, dict[str, Result]]) -> list[str]:
    """A line for each target that was missed: where the time goes, under a profiler."""
    found = [
        f"- {name}, {library}: {line}" for name, row in table.items() for library, result in row.items()
        for line in result.profile
    ]  # fmt: skip
    return ["", "Where it goes in the rows that miss a target, as profilers see it:", "", *found] if found else []


def write(facts: dict[str, Any], table: dict[str, dict[str, Result]], folder: Path) -> None:
    """compare.json with every sample, compare.md to read."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = {name: {library: asdict(result) for library, result in row.items()} for name, row in table.items()}
    (folder / "compare.json").write_text(json.dumps({"machine": facts, "rows": rows}, indent=1))
    versions = sorted({result.version for row in table.values() for result in row.values() if result.version})
    lines = [f"- {key}: {value}" for key, value in facts.items()] + [f"- versions: {'; '.join(versions)}", ""]
    lines += ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += [markdown_rows(ROWS[name], results) for name, results in table.items()]
    lines += profiles(table)
    (folder / "compare.md").write_text("\n".join(lines) + "\n")
