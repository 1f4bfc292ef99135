"""A process that trains a net whose weights, gradients and Adam state are larger than the memory it may have.

room: bytes of data that the process may have beside those after a small training, by RLIMIT_DATA, which does not count
pages of files; those are counted by the peak of its resident set, `most`. Prints a line of JSON.

    python -m tests.memory.larger_than_memory --how mapped --width 512 --layers 12 --room 120e6 --budget 60e6
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tfnb.graph import mapped_files

MICROBATCHES = 4
RATE = 1e-3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def net(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(layers)))


def status(name: str) -> int:
    """Bytes of this process, as the system counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


class Training:
    """A step of Adam in microbatches, by tfnb or by plain torch."""

    def __init__(self, how: str, width: int, layers: int, budget: int | None, folder: str | None) -> None:
        self.how = how
        with tfnb.mapped_memory(folder) if how == "mapped" else nullcontext():
            self.net = net(width, layers)
        if how == "torch":
            self.optimizer = torch.optim.Adam(self.net.parameters(), RATE)
            return
        with tfnb.record(lazy=True) as self.graph:
            x = tfnb.placeholder(shape=("B", width), name="x")
            loss = self.net(x).square().mean()
            train = tfnb.train.Adam(RATE).minimize(loss)
        self.session = tfnb.Session(self.graph, compile="off", memory_budget=budget)
        self.call = self.session.make_callable([loss, train], [x], microbatches=MICROBATCHES)

    def step(self, rows: torch.Tensor) -> float:
        if self.how != "torch":
            return self.call(rows)[0].item()  # type: ignore[no-any-return]
        total = 0.0
        for part in rows.chunk(MICROBATCHES):
            loss = self.net(part).square().mean() / MICROBATCHES
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def digest(self) -> str:
        """Of all weights and slots, read piece by piece."""
        summed = hashlib.sha256()
        for variable in self.graph.variables:
            for piece in mapped_files.pieces(variable.kept):
                summed.update(piece)
        return summed.hexdigest()


def main(asked: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, asked.dtype))
    warm = Training("plain", 64, 2, 10**9, None)
    warm.step(torch.randn(asked.rows, 64))
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before, data = status("VmRSS"), status("VmData")
    if asked.room:
        resource.setrlimit(resource.RLIMIT_DATA, (data + asked.room,) * 2)
    made = Training(asked.how, asked.width, asked.layers, asked.budget, asked.folder)
    torch.manual_seed(1)
    rows = torch.randn(asked.rows, asked.width)
    found: dict[str, Any] = {"losses": [], "seconds": [], "processor": []}
    for _ in range(asked.steps):
        began = time.perf_counter(), time.process_time()
        found["losses"].append(made.step(rows))
        found["seconds"].append(time.perf_counter() - began[0])
        found["processor"].append(time.process_time() - began[1])
    found["most"] = status("VmHWM") - before
    found["weights"] = sum(p.nbytes for p in made.net.parameters())
    if asked.how == "torch":
        return found
    found["digest"] = made.digest()
    plans = [plan for _, plan in made.session.plans()]
    if asked.how == "mapped":
        (plan,) = plans
        found |= {"planned": plan.schedule.moved, "moved": plan.last.loaded + plan.last.stored, "held": plan.last.most}
        found["status"] = made.session.status()[0]
    if asked.save:
        began = time.perf_counter()
        made.session.save(asked.save)
        found["saving"] = time.perf_counter() - began
        later = made.step(rows), made.digest()
        began = time.perf_counter()
        made.session.restore(asked.save)
        found["restoring"] = time.perf_counter() - began
        found["is_restored"] = made.digest() == found["digest"] and (made.step(rows), made.digest()) == later
        found["most"] = status("VmHWM") - before
    return found


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, kind, default in (
        ("how", str, "mapped"), ("width", int, 512), ("layers", int, 12), ("rows", int, 16), ("steps", int, 2),
        ("room", float, 0), ("budget", float, None), ("dtype", str, "float32"), ("folder", str, None),
        ("save", str, None),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, default=default)
    asked = parser.parse_args(given)
    asked.room, asked.budget = int(asked.room), None if asked.budget is None else int(asked.budget)
    return asked


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(arguments(sys.argv[1:]))) + "\n")
