"""The table of what is compared: one row a workload, with its targets and who computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.benchmarks.peers.nets import LAYERS
from tests.benchmarks.peers.programs import FORWARD, SHAPES, image

TORCH = ("torch_eager", "torch_compiled", "tfnb_off", "tfnb_now")
ALL = (*TORCH, "tf_v1", "tf_function", "jax_jit")
NETS = (*TORCH, "tfnb_last", "tf_v1", "tf_function", "jax_jit")
COLD = (*ALL, "tfnb_auto")
OURS = ("tfnb_off", "tfnb_now", "tfnb_auto", "tfnb_loop", "tfnb_loop_now", "tfnb_last")
UNROLLED = ("torch_eager", "torch_compiled", "tfnb_off", "tfnb_loop", "jax_jit")
COMPILERS = ("torch_compiled", "tfnb_now", "tfnb_auto", "tfnb_loop_now")  # long until their steps are quick


@dataclass(frozen=True)
class Target:
    """At most ``limit`` times what ``of`` has: a library, "fastest peer", or "one" for seconds themselves."""

    what: str  # "time", "first" or "peak"
    limit: float
    of: str


OVERHEAD = (Target("time", 0.85, "fastest peer"), Target("time", 0.62, "torch_eager"))
FIRST = (Target("first", 1.2, "torch_eager"),)
KERNEL = (Target("time", 1.0, "fastest peer"), Target("peak", 0.9, "torch_eager"))
ON_DEVICE = (Target("time", 0.95, "fastest peer"), Target("peak", 0.9, "torch_eager"))
LSTM = (Target("time", 1.0, "jax_jit"), Target("time", 0.85, "fastest peer"), Target("time", 0.62, "torch_eager"),
        Target("first", 1.5, "torch_eager"))  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A workload. ``mode``: "forward", "gradients" or "step"; ``entry``: through a callable or through `run`."""

    name: str
    program: str
    sizes: dict[str, int]
    targets: tuple[Target, ...]
    libraries: tuple[str, ...] = ALL
    mode: str = "step"
    entry: str = "call"
    rate: float = 0.01
    cold: bool = False  # a sample is the first step of a fresh process
    checked: int = 3  # steps compared before anything is timed
    tolerance: float = 1e-3  # of the loss, and of the length of what each weight moved
    full: bool = False  # the published batch, for an accelerator

    def runs_on(self, device: str) -> bool:
        """Whether the row is for this device: full batches are not for the CPU, small ones of the same nets only."""
        return device != "cpu" if self.full else device == "cpu" or self.program not in FULL


def _null(name: str) -> Row:
    nodes = 100_000
    limit = (Target("time", nodes / 10e6, "one"),)
    return Row(name, name, {"nodes": nodes}, limit, ("tfnb_off", "tf_v1"), mode="forward")


_CELL = {"time": 100, "batch": 16, "width": 64}
_BATCHES = {"alexnet": 16, "overfeat": 8, "vgg": 4, "googlenet": 8}
FULL = {"alexnet": 128, "overfeat": 128, "vgg": 64, "googlenet": 128}  # batches as published
_GPT = {"layers": 6, "vocabulary": 256, "width": 192, "heads": 6, "time": 128, "batch": 4}
ROWS: dict[str, Row] = {row.name: row for row in (
    Row("run-1", "chain", {"nodes": 1}, (Target("time", 20e-6, "one"), Target("time", 0.2, "tf_v1")),
        ("torch_eager", "tfnb_off", "tf_v1"), mode="forward", entry="run"),
    *(Row(f"mlp-{batch}", "mlp", {"batch": batch}, (*OVERHEAD, *FIRST), checked=20) for batch in (1, 32, 256)),
    Row("chain-1000", "chain", {"nodes": 1000}, (*OVERHEAD, *FIRST), mode="forward"),
    _null("null-chain"), _null("null-fan"),
    Row("lstm-100", "lstm", _CELL, LSTM, (*ALL, "tfnb_loop", "tfnb_loop_now"), checked=5),
    *(Row(f"loop-{batch}", "lstm", {"time": 100, "batch": batch, "width": 256}, (Target("time", 1.05, "tfnb_off"),),
          UNROLLED, checked=5) for batch in (16, 32, 64, 128)),
    *(Row(f"{net}-{mode}", net, {"batch": batch}, (*KERNEL, *FIRST), NETS, mode=mode, checked=2,
           tolerance=1e-2) for net, batch in _BATCHES.items() for mode in ("gradients", "step")),
    *(Row(f"{net}-full-{mode}", net, {"batch": batch}, (*ON_DEVICE, *FIRST), TORCH, mode=mode, checked=2,
           tolerance=1e-2, full=True) for net, batch in FULL.items() for mode in ("forward", "gradients", "step")),
    Row("gpt-6", "gpt", _GPT, (*KERNEL, *FIRST), TORCH, checked=2),
    # Batch norm of four images is ill-conditioned: against float64 the first gradient of eager is off by 2e-3, that of
    # compiled code (torch's and ours) by 5e-3, and each step after makes ten times as much of it.
    Row("resnet-18", "resnet18", {"batch": 4}, (*KERNEL, *FIRST), TORCH, checked=1, tolerance=1e-2),
    Row("cold-mlp", "mlp", {"batch": 32}, (Target("time", 1.2, "torch_eager"),), COLD, cold=True, checked=1),
    Row("cold-lstm", "lstm", _CELL, (Target("time", 1.5, "torch_eager"),), COLD, cold=True, checked=1),
    Row("cold-gpt", "gpt", _GPT, (Target("time", 1.2, "torch_eager"),), (*TORCH, "tfnb_auto"), cold=True, checked=1),
    Row("cold-chain", "chain", {"nodes": 1000}, (), COLD, mode="forward", cold=True, checked=1),
    Row("cold-resnet", "resnet18", {"batch": 4}, (Target("time", 1.2, "torch_eager"),), (*TORCH, "tfnb_auto"),
        cold=True, checked=1, tolerance=1e-2),
    Row("cold-alexnet", "alexnet", {"batch": 16}, (Target("time", 1.2, "torch_eager"),), COLD, cold=True, checked=1),
)}  # fmt: skip
QUICK = ("run-1", "mlp-32")


def _weights(row: Row) -> list[np.ndarray]:
    """Normal, scaled so that a ReLU layer keeps the size of its input; biases are zero."""
    rng = np.random.default_rng(0)

    def weight(shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) < 2:
            return np.zeros(shape, np.float32)
        return rng.standard_normal(shape, np.float32) * np.float32((2 / np.prod(shape[1:])) ** 0.5)

    if row.program in FORWARD:
        return [weight(shape) for shape in SHAPES[row.program](**row.sizes)]
    if row.program.startswith("null"):
        return []
    from tests.benchmarks.peers.torch_ops import MODULES  # torch's own initial weights

    return [p.detach().numpy() for p in MODULES[row.program](**row.sizes).parameters()]


def _data(row: Row) -> list[np.ndarray]:
    rng, sizes, batch = np.random.default_rng(1), row.sizes, row.sizes.get("batch", 1)
    normal: Callable[..., np.ndarray] = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    if row.program == "mlp":
        return [normal(batch, 784), rng.integers(10, size=batch)]
    if row.program == "lstm":
        state = batch, sizes["width"]
        return [normal(sizes["time"], *state), np.zeros(state, np.float32), normal(*state)]
    if row.program == "chain":
        return [np.array(value, np.float32) for value in (0.5, 0.999, 0.001)]
    if row.program == "gpt":
        return [rng.integers(sizes["vocabulary"], size=(batch, sizes["time"])) for _ in "xy"]
    if row.program.startswith("null"):
        return []
    size = image(row.program) if row.program in LAYERS else 224
    return [0.1 * normal(batch, 3, size, size), rng.integers(1000, size=batch)]


def write(row: Row, file: Any) -> None:
    """Initial weights and data of the row, for every library."""
    weights, data = _weights(row), _data(row)
    named = {f"w{i}": array for i, array in enumerate(weights)} | {f"d{i}": array for i, array in enumerate(data)}
    np.savez(file, **named)


@dataclass
class Result:
    """What one library did with one row."""

    samples: list[float] = field(default_factory=list)  # seconds a step, one of each block
    first: float | None = None  # seconds from source to the first completed step, imports not counted
    begun: list[float] = field(default_factory=list)  # seconds of the first steps, the first one among them
    settled: float | None = None  # seconds from source until the code of a step no longer changes
    reached: float | None = None  # seconds from source until steps run at 0.9 of their final rate
    imported: float | None = None
    peak: float | None = None  # MiB above the process after its imports
    version: str = ""
    note: str = ""
    absent: str = ""  # why there are no samples
    profile: list[str] = field(default_factory=list)  # where time and memory go, if a target was missed
