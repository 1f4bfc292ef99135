"""The events of ``torch.profiler`` from around a traced run: kernels on accelerators, or else torch's own calls."""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tfnb.execution.tracing.trace import Event
from tfnb.memory.profiler import torch_profiler

_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_CALL = "cpu_op"
_RUNNING = (
    "trace='kernels' starts torch.profiler, which is running already: use trace=True in its block, and "
    "trace.save(path, profile=...) with the file that it exports"
)


@dataclass(slots=True)
class Profile:
    """The JSON profile of ``torch.profiler``; empty until the block ends."""

    found: dict[str, Any] = field(default_factory=dict)


@contextmanager
def profiling(wanted: bool) -> Iterator[Profile]:
    """Run ``torch.profiler`` around the block, for all devices present. Raises FailedPrecondition inside another."""
    made = Profile()
    if not wanted:
        yield made
        return
    with torch_profiler(_RUNNING) as profile:
        yield made
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "torch.json"
        profile.export_chrome_trace(str(path))
        made.found = json.loads(path.read_text())


def kernels(found: Mapping[str, Any], began: int, events: tuple[Event, ...]) -> tuple[Event, ...]:
    """Kernels on accelerators, or torch's outermost calls if there are none, each with the node running at its start.

    found: as `Profile.found`. began: of the traced run, in nanoseconds.
    """
    all_of_it = [event for event in found.get("traceEvents", ()) if event.get("ph") == "X"]
    chosen = [event for event in all_of_it if event.get("cat") in _ON_DEVICE]
    if not chosen:
        chosen = _outermost([event for event in all_of_it if event.get("cat") == _CALL])
    base = found.get("baseTimeNanoseconds", began)
    starts = [event.start for event in events]
    made = []
    for event in chosen:
        start = (round(1000 * float(event["ts"])) + base - began) * 1e-9
        place = bisect_right(starts, start) - 1
        on_device = event["cat"] in _ON_DEVICE
        is_between = place < 0 or start > events[place].end  # a device may start a node's kernels after its time
        if is_between and not (on_device and 0 <= place < len(events) - 1):
            continue
        around, args = events[place], event.get("args", {})
        device = around.device if not on_device or ":" in around.device else f"{around.device}:{args.get('device', 0)}"
        thread = f"stream {args.get('stream', event['tid'])}" if on_device else "torch"
        end = start + 1e-6 * float(event["dur"])
        made.append(Event(around.node, start, end, 0, device, thread, kernel=str(event["name"])))
    return tuple(made)


def _outermost(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls that no other call of their thread made."""
    found, ends = [], dict[Any, float]()
    for call in sorted(calls, key=lambda call: (float(call["ts"]), -float(call["dur"]))):
        if float(call["ts"]) >= ends.get(call["tid"], float("-inf")):
            found.append(call)
            ends[call["tid"]] = float(call["ts"]) + float(call["dur"])
    return found
