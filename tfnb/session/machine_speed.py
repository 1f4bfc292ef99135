"""The speed of this machine's kernels, measured once and kept in the cache folder of compiled steps."""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from tfnb.errors import TfnbError
from tfnb.execution.compiling.package_cache import packages
from tfnb.graph.files import replace_file
from tfnb.placement.costs import Roofline

FILE = "speed.json"
WIDE, LONG = 384, 1 << 20  # of the product and of the sum that are timed
TURNS = 7


@cache
def machine_speed() -> Roofline:
    """The roofline of this machine by one thread, as a task has. To measure takes some tenths of a second, once."""
    path, machine = packages().folder.parent / FILE, f"{platform.node()} {platform.machine()} {torch.__version__}"
    known = _known(path)
    if machine not in known:
        known[machine] = [*_measured()]
        with suppress(TfnbError, OSError):  # measured again in the next process
            text = json.dumps(known)
            replace_file(path, lambda draft: draft.write_text(text))
    return Roofline(*known[machine])


def _known(path: Path) -> dict[str, list[float]]:
    """The speeds in a file, by machine; none where the file is not there, or is no file of ours."""
    try:
        found = {name: [*map(float, numbers)] for name, numbers in json.loads(path.read_text()).items()}
        return {name: each for name, each in found.items() if len(each) == 3 and all(0 < n < math.inf for n in each)}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _measured() -> Roofline:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one, row, square = torch.ones(1), torch.ones(LONG), torch.ones(WIDE, WIDE)
        start = _seconds(lambda: one + one, 100)
        flops = 2 * WIDE**3 / _seconds(lambda: square @ square, 1)
        rate = 3 * 4 * LONG / _seconds(lambda: row + row, 1)
    finally:
        torch.set_num_threads(threads)
    return Roofline(start, flops, rate)


def _seconds(call: Callable[[], object], times: int) -> float:
    """The least seconds of a call over several turns."""
    found = []
    for _ in range(TURNS):
        begin = time.perf_counter()
        for _ in range(times):
            call()
        found.append((time.perf_counter() - begin) / times)
    return min(found)
