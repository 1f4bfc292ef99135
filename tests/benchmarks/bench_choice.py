"""The choice whether to compile, beside what that saved: `python -m tests.benchmarks.bench_choice [NAME ...]`.

For each step the gain and the cost that `tfnb.execution.tiers.gain` predicts, and those that were measured: seconds of
a processor, by one thread, of generated and of compiled steps in turns, so that other programs on the machine move them
little. NAME is a row of `rows.py`, a model of `tests/models`, or one of `OWN`. Each is measured in a process of its own
with an empty cache. Results are added to results/compile-choice.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tfnb
from tests.benchmarks.peers import tfnb_off
from tests.benchmarks.peers.serve import arrays
from tests.benchmarks.peers.torch_ops import network, tensors
from tests.benchmarks.rows import ROWS, write
from tests.models.test_models import CASES as MODELS
from tests.models.test_packages import CASES as PACKAGES
from tfnb.execution.tiers.gain import LEAST_GAIN, CallCost, Gain, compile_seconds
from tfnb.execution.tiers.step_profile import StepProfile

RESULTS = Path(__file__).parent / "results" / "compile-choice.json"
TURNS, SECONDS, MOST = 9, 0.15, 2000  # blocks of each kind of code; their length; steps in a block
ROWS_OF = 4  # of a batch for a model

Step = tuple[Any, list[Any], dict[Any, torch.Tensor]]  # graph, fetches, feeds


def row(name: str) -> Step:
    """A row of `rows.py`; of one that ends in ``(loop)`` as a loop of the graph."""
    found, ops = ROWS[name.removesuffix("(loop)")], None
    if name.endswith("(loop)"):
        ops = tfnb_off.VARIANTS["tfnb_loop"]["ops"]
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        write(found, file.name)
        weights, data = arrays(file.name)
    task = {"program": found.program, "sizes": found.sizes, "device": "cpu"}
    net, batch = network(task, weights, ops), tensors(task, data)
    with tfnb.record() as graph:
        fed = [tfnb.placeholder(sample, shape=tuple(sample.shape)) for sample in batch]
        loss = net(*fed)
        fetches: list[Any] = [loss]
        if found.mode == "step":
            fetches.append(tfnb.train.SGD(1e-6).minimize(loss))
        elif found.mode == "gradients":
            fetches += tfnb.gradients(loss, list(net.parameters()))
    return graph, fetches, dict(zip(fed, batch, strict=True))


def model(name: str) -> Step:
    """A training step of a model of `tests/models`."""
    make, objective, draw = (PACKAGES | MODELS)[name]
    torch.manual_seed(0)
    net, sample = make().train(), draw(ROWS_OF)
    with tfnb.record() as graph:
        fed = [tfnb.placeholder(x, shape=("B", *x.shape[1:])) for x in sample]
        _, loss = objective(net, *fed)
        step = tfnb.train.Adam(1e-6).minimize(loss)
    return graph, [loss, step], dict(zip(fed, sample, strict=True))


def chain(op: Callable[..., torch.Tensor]) -> Callable[[], Step]:
    """A million elements, by element-wise ops one after the other."""

    def made() -> Step:
        data = torch.rand(1000, 1000)
        with tfnb.record() as graph:
            x = tfnb.placeholder(data, shape=(1000, 1000))
            y = x
            for _ in range(8):
                y = op(y * 0.5 - x * 0.25, x)
        return graph, [y], {x: data}

    return made


def activations(size: int, length: int) -> Callable[[], Step]:
    """A sum of hyperbolic tangents of tangents."""

    def made() -> Step:
        torch.manual_seed(0)
        data = torch.randn(size, size)
        with tfnb.record() as graph:
            x = tfnb.placeholder(data, shape=(size, size))
            y = x
            for _ in range(length):
                y = (y * 0.9 + 0.1).tanh() - x * 0.5
            total = y.sum()
        return graph, [total], {x: data}

    return made


def numbers() -> Step:
    """A loop over single numbers."""
    with tfnb.record() as graph:
        n = tfnb.placeholder(torch.tensor(3), name="n")
        _, x = tfnb.while_loop(lambda i, x: i < n, lambda i, x: (i + 1, x * 0.5 + 1), (0, 0.0))
    return graph, [x], {n: torch.tensor(1000)}


def trained(rate: Any, data: Callable[[], torch.Tensor], *layers: Callable[[], nn.Module]) -> Callable[[], Step]:
    """A training step of layers."""

    def made() -> Step:
        torch.manual_seed(0)
        net, sample = nn.Sequential(*(layer() for layer in layers)), data()
        with tfnb.record() as graph:
            x = tfnb.placeholder(sample, shape=tuple(sample.shape))
            loss = net(x).square().mean()
            step = rate.minimize(loss)
        return graph, [loss, step], {x: sample}

    return made


def folded(width: int, places: int = 4) -> tuple[Callable[[], nn.Module], ...]:
    """Convolutions with batch norm, and a linear layer."""
    layers: list[Callable[[], nn.Module]] = []
    for place in range(places):
        layers.append(lambda given=width if place else 3: nn.Conv2d(given, width, 3, padding=1))
        layers += [lambda: nn.BatchNorm2d(width), nn.ReLU]
    return *layers, nn.Flatten, lambda: nn.Linear(width * 32 * 32, 10)


OPS = {
    "relu": lambda y, _: y.relu(), "exp": lambda y, _: y.exp(), "sigmoid": lambda y, _: y.sigmoid(),
    "erf": lambda y, _: y.erf(), "log": lambda y, _: (y.abs() + 1).log(), "div": lambda y, x: y / (x + 1.5),
}  # fmt: skip
OWN: Mapping[str, Callable[[], Step]] = {
    **{f"chain of {name}": chain(op) for name, op in OPS.items()},
    "activations": activations(1000, 12), "small activations": activations(32, 30), "loop of numbers": numbers,
    "products": trained(
        tfnb.train.SGD(1e-6), lambda: torch.randn(256, 512),
        *(layer for _ in range(6) for layer in (lambda: nn.Linear(512, 512), nn.ReLU)),
    ),
    "adam": trained(
        tfnb.train.Adam(1e-6), lambda: torch.randn(32, 256), lambda: nn.Linear(256, 1024), nn.GELU,
        lambda: nn.LayerNorm(1024), lambda: nn.Linear(1024, 10),
    ),
    "batch norm": trained(tfnb.train.SGD(1e-6), lambda: torch.randn(16, 3, 32, 32), *folded(16)),
}  # fmt: skip


def step_of(name: str) -> Step:
    """The step of a name."""
    if name in OWN:
        return OWN[name]()
    return row(name) if name.removesuffix("(loop)") in ROWS else model(name)


def prediction(
    fetches: list[Any], feeds: Mapping[Any, torch.Tensor], session: tfnb.Session
) -> tuple[Gain, list[CallCost]]:
    """The gain of a step that ran, and its calls."""
    (code,) = session._codes()
    program, tensors = code.program, list(feeds.values())
    profile, storages = StepProfile(program), [variable.storage for variable in program.variables]
    for run in range(5):
        _, pending = program.compute(tensors, storages, run, profile.forward)
        start = time.thread_time()
        program.commit(pending)
        profile.commits.append(time.thread_time() - start)
    calls = profile.calls([*tensors, *storages, 0])
    return profile.gain(calls), calls


def measured(name: str) -> dict[str, Any]:
    """One step: predicted, then compiled, then timed."""
    torch.set_num_threads(1)
    graph, fetches, feeds = step_of(name)
    values, keys = list(feeds.values()), list(feeds)
    slow, fast = (tfnb.Session(graph, compile=mode) for mode in ("off", "now"))
    generated = slow.make_callable(fetches, keys)
    generated(*values)
    gain, calls = prediction(fetches, feeds, slow)
    compiled = fast.make_callable(fetches, keys)
    for _ in range(3):
        compiled(*values)
    steps = max(1, min(MOST, round(SECONDS / min(block(generated, values, 1) for _ in range(3)))))
    pairs = [(block(generated, values, steps), block(compiled, values, steps)) for _ in range(TURNS)]
    status = fast.status()[0].partition("]: ")[2]
    fast.close()
    return {
        "name": name, "generated": statistics.median(a for a, _ in pairs),
        "ratio": statistics.median(b / a for a, b in pairs), "predicted": gain.compiled / gain.seconds,
        "processor": sum(os.times()[2:4]), "status": status,
        "seconds": gain.seconds, "library": gain.library, "calls": len(calls), "cost": compile_seconds(calls),
    }  # fmt: skip


def block(call: Callable[..., object], values: list[torch.Tensor], steps: int) -> float:
    """Seconds of a processor of a step."""
    start = time.process_time()
    for _ in range(steps):
        call(*values)
    return (time.process_time() - start) / steps


def is_right(found: Mapping[str, Any]) -> bool:
    """Whether the share of a step that was predicted to be saved, and the one that was saved, lead to one choice."""
    return bool((1 - found["predicted"] < LEAST_GAIN) == (1 - found["ratio"] < LEAST_GAIN))


def line(found: Mapping[str, Any]) -> str:
    """A row of the table."""
    return (
        f"| {found['name']} | {found['generated'] * 1e3:.3g} | {found['ratio']:.2f} | {found['predicted']:.2f} | "
        f"{found['processor']:.0f} | {found['cost']:.0f} | {'yes' if is_right(found) else '**no**'} |"
    )


HEAD = (
    "| step | generated ms | compiled | predicted | s to compile | predicted | right |\n|---|---|---|---|---|---|---|"
)


def main(argv: list[str]) -> None:
    """Measure each name in a process of its own, or print what is stored."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        print(json.dumps(measured(options.names[0])))
        return
    stored = {found["name"]: found for found in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    for name in options.names:
        with tempfile.TemporaryDirectory() as folder:
            ended = subprocess.run(
                [sys.executable, "-W", "ignore", "-m", "tests.benchmarks.bench_choice", "--one", name],
                stdout=subprocess.PIPE, text=True, check=True, env=os.environ | {"TFNB_CACHE_DIR": folder},
            )  # fmt: skip
        stored[name] = json.loads(ended.stdout.splitlines()[-1])
        RESULTS.write_text(json.dumps(list(stored.values()), indent=0) + "\n")
    print(HEAD, *map(line, stored.values()), sep="\n")
    wrong = [found for found in stored.values() if not is_right(found)]
    print(f"right: {len(stored) - len(wrong)} of {len(stored)}")


if __name__ == "__main__":
    main(sys.argv[1:])
