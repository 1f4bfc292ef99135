"""Processor time of packages, by stage: `python -m tests.benchmarks.bench_compile [NAME ...] [--beside FOLDER]`.

Each step of `STEPS` is built as the compiler's process builds it: from a request in files, in a process that has built
the steps before it. ``first`` comes first, in a process with an empty cache. Seconds are those of a processor, of the
process and of the compilers that it starts; ``call`` is a call of the package, and ``results`` a digest of its results.
FOLDER: another checkout, whose processes take turns with those of this one. The medians of all turns go to
results/compile-seconds.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

RESULTS = Path(__file__).parent / "results" / "compile-seconds.json"
CALLS, BLOCKS = 0.1, 9  # seconds of a block of calls, and how many blocks
NATIVE = "tfnb.execution.tiers.native"
STAGES = {
    (f"{NATIVE}.package", "exportable"): "trace", ("torch.export", "export"): "export",
    ("torch._inductor", "aoti_compile_and_package"): "inductor", (f"{NATIVE}.package", "step_source"): "inductor",
    (f"{NATIVE}.package", "tried"): "trial",
}  # fmt: skip
"""Functions whose time is a stage, without that of the compilers which they start; a checkout may lack some."""
MADE = {
    "wrapper.o": "g++ wrapper", "kernel.o": "g++ kernels", "kernels.o": "g++ kernels", "call.so": "g++ call.c",
    ".gch": "g++ header", "step.so": "g++ link", "wrapper.so": "g++ link", ".o": "g++ constants", ".so": "g++ probes",
}  # fmt: skip
"""Stages by how the name of a compiler's result ends, the first one that fits."""

Step = tuple[Any, list[Any], dict[Any, torch.Tensor]]  # graph, fetches, feeds


def trained(net: nn.Module, *sizes: int) -> Step:
    """A step of gradient descent of a classifier."""
    import tfnb

    samples = torch.randn(*sizes), torch.randint(10, sizes[:1])
    with tfnb.record() as graph:
        x, y = (tfnb.placeholder(sample, shape=tuple(sample.shape)) for sample in samples)
        loss = F.cross_entropy(net(x), y)
        step = tfnb.train.SGD(1e-3).minimize(loss)
    return graph, [loss, step], {x: samples[0], y: samples[1]}


def chain(length: int) -> Step:
    """Element-wise ops one after the other."""
    import tfnb

    data = torch.rand(64, 64)
    with tfnb.record() as graph:
        x = y = tfnb.placeholder(data, shape=(64, 64))
        for _ in range(length // 2):
            y = y * 0.99 + 0.01
    return graph, [y], {x: data}


class Recurrent(nn.Module):
    """A classifier of sequences: a small LSTM cell, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(16, 24), nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(4, 24), torch.zeros(4, 24)
        for place in range(8):
            state = self.cell(x[:, place], state)
        return self.out(state[0])


STEPS: dict[str, Callable[[], Step]] = {
    "first": lambda: trained(nn.Linear(5, 10), 3, 5),
    "two layers": lambda: trained(nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)), 32, 784),
    "chain of 1000": lambda: chain(1000),
    "lstm": lambda: trained(Recurrent(), 4, 8, 16),
}


def requested(name: str, folder: Path) -> None:
    """Write the request of a step into a folder."""
    import tfnb
    from tfnb.execution.tiers.native.request import NativeRequest
    from tfnb.execution.tiers.native.step_arguments import save_arguments

    torch.manual_seed(0)
    graph, fetches, feeds = STEPS[name]()
    session = tfnb.Session(graph, compile="off")
    session.run(fetches, feeds)
    (prepared,) = session._prepared.values()
    program = prepared.code.program.undonated()
    args = [*feeds.values(), *(variable.storage for variable in program.variables), 0]
    NativeRequest.of(program, args).save(folder)
    save_arguments(args, folder)


def built(requests: Path, names: list[str]) -> dict[str, Any]:
    """Build the steps in this process; gives for each its seconds by stage, its call and its results."""
    found: dict[str, Any] = {}
    stages: Counter[str] = Counter()
    with timed_stages(stages):
        before = used()
        package = import_module(f"{NATIVE}.package")
        import_module("torch._inductor.compile_fx")
        found["import"] = {"all": used() - before}
        for name in names:
            folder = requests / f"{name} built {os.getpid()}"
            (folder / "request").mkdir(parents=True)
            for file in (requests / name).iterdir():
                (folder / "request" / file.name).write_bytes(file.read_bytes())
            stages.clear()
            before = used()
            facts = package.build_in(folder)
            total = used() - before
            found[name] = {"all": total, **stages, "rest": total - sum(stages.values()), **called(folder)}
            assert facts["agrees"], facts
    return found


@contextmanager
def timed_stages(stages: Counter[str]) -> Iterator[None]:
    """Add the seconds of each of `STAGES`, and of each compiler by what it makes; they are not timed twice."""
    inner = [0.0]

    def timed(function: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before, outer, inner[0] = used(), inner[0], 0.0
            try:
                return function(*args, **kwargs)
            finally:
                spent = used() - before
                stages[name(*args)] += spent - inner[0]
                inner[0] = outer + spent

        return call

    run = subprocess.run
    subprocess.run = timed(run, made_by)  # type: ignore[assignment]
    try:
        for (module, function), name in STAGES.items():
            place = import_module(module)
            if hasattr(place, function):
                setattr(place, function, timed(getattr(place, function), lambda *_, name=name: name))
        yield
    finally:
        subprocess.run = run  # the process ends with the other ones


def made_by(command: list[str] | str, *_: Any) -> str:
    """The stage of a command."""
    words = command.split() if isinstance(command, str) else [*map(str, command)]
    made = next((words[at + 1] for at, word in enumerate(words[:-1]) if word == "-o"), "")
    return next((stage for end, stage in MADE.items() if made.endswith(end)), "other commands")


def called(folder: Path) -> dict[str, Any]:
    """Seconds of a processor of a call, and the digest of its results."""
    from tfnb.execution.tiers.native.request import NativeRequest
    from tfnb.execution.tiers.native.step_arguments import load_arguments
    from tfnb.execution.tiers.native.tier import loaded

    program = NativeRequest.load(folder / "request").program().undonated()
    step: Any = loaded(folder, program)
    *given, run = load_arguments(folder / "request")
    feeds, storages = given[: len(program.feeds)], given[len(program.feeds) :]
    args = (feeds, storages, run) if step.writes else (*given, run)
    results = hashlib.sha256()
    for x in (*(x for x in step(*args) if isinstance(x, torch.Tensor)), *storages):
        results.update(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    count = max(1, round(CALLS / max(block(step, args, 3), 1e-6)))
    return {"call": min(block(step, args, count) for _ in range(BLOCKS)), "results": results.hexdigest()[:16]}


def block(step: Callable[..., Any], args: tuple[Any, ...], count: int) -> float:
    """Seconds of this thread for one of so many calls."""
    start = time.thread_time()
    for _ in range(count):
        step(*args)
    return (time.thread_time() - start) / count


def used() -> float:
    """Seconds of a processor of this process and of those that it started and that ended."""
    return sum(os.times()[:4])


def turn(script: Path, checkout: Path, requests: Path, names: list[str]) -> dict[str, Any]:
    """`built` in a process of a checkout, with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ, "PYTHONPATH": str(checkout), "TFNB_CACHE_DIR": cache, "TMPDIR": cache,
            "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "-P", str(script), *names, "--requests", str(requests)]
        done = subprocess.run(command, env=environment, cwd=cache, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Write the requests, build them in turns, and print the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=[*STEPS])
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--requests", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.requests is not None:
        print(json.dumps(built(given.requests, given.names)))
        return
    script = Path(__file__).resolve()
    checkouts = {"this": script.parents[2]} | ({} if given.beside is None else {"other": given.beside.resolve()})
    names = ["first", *(name for name in given.names if name != "first")]
    turns: dict[str, list[dict[str, Any]]] = {checkout: [] for checkout in checkouts}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            (Path(folder) / name).mkdir()
            requested(name, Path(folder) / name)
        for _ in range(given.turns):
            for checkout, place in checkouts.items():
                turns[checkout].append(turn(script, place, Path(folder), names))
            found = {checkout: medians(rows) for checkout, rows in turns.items()}
            count = len(turns["this"])
            RESULTS.write_text(json.dumps({"torch": torch.__version__, "turns": count, **found}, indent=1) + "\n")
    for name in ("import", *names):
        for checkout, rows in found.items():
            stages = (f"{stage} {shown(value)}" for stage, value in rows[name].items())
            print(f"{name:14} {checkout:6}", *stages, sep="  ")


def medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each number of the turns; of what is no number the values that there were."""
    found: dict[str, Any] = {}
    for name in rows[0]:
        stages = dict.fromkeys(stage for row in rows for stage in row[name])
        values = {stage: [row[name].get(stage, 0.0) for row in rows] for stage in stages}
        found[name] = {
            stage: statistics.median(each) if not isinstance(each[0], str) else " ".join(dict.fromkeys(each))
            for stage, each in values.items()
        }
    return found


def shown(value: float | str) -> str:
    """A number of seconds, or another value, for the table."""
    return value if isinstance(value, str) else f"{value * 1e6:.1f}us" if value < 1e-2 else f"{value:.2f}"


if __name__ == "__main__":
    main()
