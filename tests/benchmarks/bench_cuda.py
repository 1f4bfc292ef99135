"""A step on a CUDA device: tfnb beside PyTorch eager, torch.compile and its CUDA graphs, in one process and one run.

The networks of OSDI table 1 with the published batches, ResNet-50 and GPT-2's smallest, as forward pass, gradients and
step of SGD; float32 to the last bit ("strict"), with TF32 products, and bfloat16 under autocast; channels last. Losses
and weights are compared with eager's first; who differs is not timed. Then all take turns, block by block. Peaks are
those of torch's allocator, above what was there before; the predicted one is `tfnb.passes.peak`.

Networks run in a process each, which compile at the same time and then measure one after the other. Results go to
DIR/cuda-steps.json, a network at a time.

    python -m tests.benchmarks.bench_cuda [--nets NAME ...] [--ways NAME ...] [--compiling SECONDS] [--out DIR]
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import torch
from torch import nn

import tfnb
from tests.benchmarks import report
from tests.benchmarks.peers.programs import SHAPES, image
from tests.benchmarks.peers.torch_ops import Classified, Net
from tests.benchmarks.rows import FULL
from tests.models.sequence import GPT
from tests.models.vision import resnet50
from tfnb.execution import lower
from tfnb.execution.tiers import tiered
from tfnb.passes import peak

RESULTS = Path(__file__).parent / "results"
TARGET = 0.95  # of the fastest peer
RATE, BLOCK = 0.01, 0.06  # of SGD; seconds
CHECKED = {"resnet50": 1}  # steps that are compared, elsewhere 3: batch norm makes much of roundings
PATIENCE = 240.0  # seconds until code that compiles in the background is there
TOLERANCE = {"strict": 2e-3, "tf32": 1e-2, "bf16": 5e-2}  # of losses, and of how far weights moved
GRAPHS = "reduce-overhead"  # torch's name of CUDA graphs
PEERS, OURS = ("eager", "compiled", "graphs"), ("off", "captured", "fused")
WAYS = ("eager", "off", "captured", "fused", "compiled", "graphs")  # in this order, while there is time
Data = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Cell:
    """What is measured: mode is "forward", "gradients" or "step"."""

    mode: str
    precision: str
    layout: str = "contiguous"


STEPS = (Cell("step", "bf16"), Cell("step", "tf32"), Cell("step", "strict"))
LAST = Cell("step", "bf16", "channels_last")
CELLS = (LAST, *STEPS, Cell("gradients", "tf32"), Cell("forward", "tf32"))


def published(name: str) -> tuple[nn.Module, Data]:
    """A network of OSDI table 1 with its batch; weights are normal and scaled, as ReLU layers like them."""
    net = Net(name, {"batch": FULL[name]})
    for shape in SHAPES[name]():
        fan = torch.Size(shape[1:]).numel()
        net.weights.append(
            nn.Parameter(torch.randn(shape) * (2 / fan) ** 0.5 if len(shape) > 1 else torch.zeros(shape))
        )
    size = image(name)
    return net, (0.1 * torch.randn(FULL[name], 3, size, size), torch.randint(1000, (FULL[name],)))


def residual() -> tuple[nn.Module, Data]:
    """ResNet-50, 64 images."""
    return Classified(resnet50()), (0.1 * torch.randn(64, 3, 224, 224), torch.randint(1000, (64,)))


def language() -> tuple[nn.Module, Data]:
    """GPT-2's smallest, four texts of 1,024 tokens."""
    return Classified(GPT()), (torch.randint(50257, (4, 1024)), torch.randint(50257, (4, 1024)))


NETS: dict[str, tuple[Callable[[], tuple[nn.Module, Data]], tuple[Cell, ...]]] = {
    **{name: (lambda name=name: published(name), CELLS) for name in FULL},  # type: ignore[misc]
    "resnet50": (residual, (LAST, *STEPS)),
    "gpt2": (language, STEPS),
}


@contextmanager
def computing(precision: str) -> Iterator[None]:
    """Products and convolutions in TF32, or not."""
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [flag.allow_tf32 for flag in flags]
    for flag in flags:
        flag.allow_tf32 = precision != "strict"
    try:
        yield
    finally:
        for flag, was in zip(flags, before, strict=True):
            flag.allow_tf32 = was


def cast(precision: str) -> Any:
    """The block in which a model runs."""
    return torch.autocast("cuda", torch.bfloat16) if precision == "bf16" else nullcontext()


class Way:
    """One way to compute a cell: ``run`` starts a step and gives its loss."""

    note = ""

    def __init__(self, run: Callable[[], torch.Tensor], moved: Callable[[], list[torch.Tensor]]) -> None:
        self.run, self.moved = run, moved


def peer(net: nn.Module, data: Data, cell: Cell, loss_of: Callable[..., torch.Tensor]) -> Way:
    """PyTorch as users write it."""
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, RATE)

    def forward() -> torch.Tensor:
        with torch.no_grad(), cast(cell.precision):
            return loss_of(*data)

    def step() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad()
        with cast(cell.precision):
            loss = loss_of(*data)
        loss.backward()
        if cell.mode == "step":
            optimizer.step()
        return loss.detach()

    def moved() -> list[torch.Tensor]:
        if cell.mode == "forward":
            return []
        return [p.detach() if cell.mode == "step" else p.grad for p in parameters]  # type: ignore[misc]

    return Way(forward if cell.mode == "forward" else step, moved)


class Recorded:
    """A cell as a graph of tfnb."""

    def __init__(self, net: nn.Module, data: Data, cell: Cell) -> None:
        self.data, self.mode = data, cell.mode
        self.parameters = list(net.parameters())
        with tfnb.record(device="cuda") as self.graph:
            self.fed = [tfnb.placeholder(sample, shape=tuple(sample.shape)) for sample in data]
            with cast(cell.precision):
                loss = net(*self.fed)
            self.fetches: list[Any] = [loss]
            if cell.mode == "step":
                self.fetches.append(tfnb.train.SGD(RATE).minimize(loss))
            elif cell.mode == "gradients":
                self.fetches += tfnb.gradients(loss, self.parameters)

    def predicted(self) -> int:
        """Bytes at the most, as tfnb plans them."""
        values, feeds = [item.value for item in self.fetches], [item.value for item in self.fed]
        return peak(lower(self.graph, values, feeds).graph, values, feeds)

    def way(self, name: str) -> Way:
        """With generated code, that launched whole, or kernels that were fused and launched whole."""
        mode = {"off": "off", "captured": "auto", "fused": "now"}[name]
        session = tfnb.Session(self.graph, compile=mode)
        call, last = session.make_callable(self.fetches, self.fed), list[torch.Tensor]()

        def run() -> torch.Tensor:
            last.clear()
            last.extend(call(*self.data))
            return last[0]

        way = Way(run, lambda: self.parameters if self.mode == "step" else last[1:])
        way.session = session  # type: ignore[attr-defined]
        return way


def compared(
    way: Way, start: list[torch.Tensor], parameters: list[torch.Tensor], steps: int
) -> tuple[list[float], list[Any]]:  # fmt: skip
    """Losses and what moved after the first steps, from these weights."""
    with torch.no_grad():
        for parameter, value in zip(parameters, start, strict=True):
            parameter.copy_(value)
    losses = [float(way.run()) for _ in range(steps)]
    return losses, [value.detach().float().clone() for value in way.moved()]


def difference(got: Any, wanted: Any, start: list[torch.Tensor], cell: Cell) -> str:
    """What differs, in words; empty where nothing does."""
    tolerance = TOLERANCE[cell.precision]
    for place, (a, b) in enumerate(zip(got[0], wanted[0], strict=True)):
        if not abs(a - b) <= tolerance * max(abs(b), 1e-3):
            return f"loss {a:.6g} instead of {b:.6g} at step {place + 1}"
    bases = start if cell.mode == "step" else [torch.zeros((), device="cuda")] * len(start)
    moves = [(a - s, b - s) for a, b, s in zip(got[1], wanted[1], bases, strict=False)]
    largest = max((float(b.norm()) for _, b in moves), default=0.0)
    for place, (a, b) in enumerate(moves):
        off = float((a - b).norm())
        if not off <= 10 * tolerance * max(float(b.norm()), 1e-2 * largest):
            return f"weight {place} is {off:.3g} off, and moved {float(b.norm()):.3g}"
    return ""


def ready(way: Way) -> None:
    """Run until code that is made in the background is there."""
    session, end = getattr(way, "session", None), time.monotonic() + PATIENCE
    for _ in range(8):
        way.run()
    while session is not None and "not captured yet" in str(session.status()) and time.monotonic() < end:
        way.run()
    torch.cuda.synchronize()
    if session is not None:
        way.note = "; ".join(line.rpartition("]: ")[2] for line in session.status() if "]: " in line)


def block(way: Way, steps: int) -> float:
    """Seconds a step."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        loss = way.run()
    float(loss)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def held(way: Way) -> int:
    """The most bytes that a step holds above what there was."""
    way.run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    way.run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


class Network:
    """A network in all its cells. Compiled modules live as long as it does, what graphs hold as long as a cell."""

    def __init__(self, name: str, ways: list[str]) -> None:
        self.name, self.ways = name, ways
        self.known: dict[tuple[Cell, str], str] = {}  # what was made in time, or why it was not
        self._nets: dict[tuple[bool, str], tuple[nn.Module, Data, dict[str, Any]]] = {}

    def net(self, cell: Cell) -> tuple[nn.Module, Data, dict[str, Any]]:
        """Module, data and compiled modules; TF32 or not, the code is the same."""
        key = cell.precision == "bf16", cell.layout
        if key not in self._nets:
            torch.manual_seed(0)
            made, data = NETS[self.name][0]()
            net, (x, labels) = made.cuda(), data
            if cell.layout == "channels_last":
                net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                x = x.to(memory_format=torch.channels_last)
            compiled = {"eager": net, "compiled": torch.compile(net), "graphs": torch.compile(net, mode=GRAPHS)}
            self._nets[key] = net, (x.cuda(), labels.cuda()), compiled
        return self._nets[key]

    def made(self, cell: Cell, end: float) -> tuple[dict[str, Any], dict[str, Way]]:
        """The ways of a cell, each compared and warm, until that time; and what is known of them."""
        net, data, compiled = self.net(cell)
        parameters = list(net.parameters())
        start = [p.detach().clone() for p in parameters]
        found: dict[str, Any] = {}
        recorded: Recorded | None = None
        wanted: Any = None
        running: dict[str, Way] = {}
        for name in self.ways:
            row = found[name] = {}
            if time.monotonic() > end and (why := self.known.get((cell, name), "no time was left to compile it")):
                row["fails"] = why
                continue
            try:
                began = time.perf_counter()
                if name in PEERS:
                    way = peer(net, data, cell, compiled[name])
                else:
                    recorded = recorded or Recorded(net, data, cell)
                    way = recorded.way(name)
                got = compared(way, start, parameters, CHECKED.get(self.name, 3))
                row["begin s"] = time.perf_counter() - began
                wanted = wanted or got
                different = difference(got, wanted, start, cell)
                if different:
                    row["differs"] = different
                    continue
                ready(way)
                row["note"], row["peak"] = way.note, held(way)
                if name == "fused" and not way.note.startswith("compiled"):
                    row["fails"] = way.note
                    continue
                running[name] = way
            except Exception as error:
                row["fails"] = f"{type(error).__name__}: {str(error).strip()[:400]}"
            finally:
                self.known[cell, name] = row.get("fails", "") or row.get("differs", "")
        if recorded is not None:
            found["predicted"] = recorded.predicted()
        with torch.no_grad():
            for parameter, value in zip(parameters, start, strict=True):
                parameter.copy_(value)
        return found, running

    def measured(self, cell: Cell, rounds: int) -> dict[str, Any]:
        """One cell: the ways that were compiled take turns."""
        with computing(cell.precision):
            found, running = self.made(cell, 0.0)
            steps = {way: max(1, round(BLOCK / min(block(run, 2) for _ in range(2)))) for way, run in running.items()}
            samples: dict[str, list[float]] = {way: [] for way in running}
            for _ in range(rounds):
                for way, run in running.items():
                    samples[way].append(block(run, steps[way]))
        for way, seconds in samples.items():
            found[way]["ms"] = 1e3 * statistics.median(seconds)
            found[way]["samples"] = [round(1e3 * s, 4) for s in seconds]
        return found


def freed() -> None:
    """Give back what dropped steps hold; torch's graphs of compiled modules stay as long as these."""
    gc.collect()
    torch.cuda.empty_cache()


def process(name: str, ways: list[str], cells: list[Cell], options: Any, together: Any, queue: Any) -> None:
    """A network: compile all, wait for the others, then measure while the device is this one's alone."""
    torch._dynamo.config.cache_size_limit = 64
    tiered.WORTH_COMPILING = float("inf")  # what is captured stays so
    network, end = Network(name, ways), time.monotonic() + options.compiling
    barrier, lock = together
    for cell in cells:
        with computing(cell.precision):
            try:
                network.made(cell, end)
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
        freed()
    print(f"{name} is compiled, {options.compiling - (end - time.monotonic()):.0f} s", flush=True)
    with suppress(BrokenBarrierError):
        barrier.wait(options.compiling + PATIENCE)
    over = time.monotonic() + options.measuring
    for cell in cells:
        with lock:
            if time.monotonic() > over:
                break
            try:
                row = network.measured(cell, options.rounds)
            except Exception as error:
                row = {"fails": f"{type(error).__name__}: {error}"[:400]}
            freed()
            queue.put((name, cell, row))
    queue.put((name, None, {}))


def shown(name: str, cell: Cell, row: dict[str, Any]) -> str:
    """A cell in a line."""
    parts = [f"{way} {r['ms']:.2f}" if "ms" in r else f"{way}: {r.get('differs') or r.get('fails')}"
             for way, r in row.items() if isinstance(r, dict)]  # fmt: skip
    peers = [row[way]["ms"] for way in PEERS if "ms" in row.get(way, ())]
    ours = [row[way]["ms"] for way in OURS if "ms" in row.get(way, ())]
    ratio = f"  = {min(ours) / min(peers):.2f}" if peers and ours else ""
    return f"{name} {cell.mode} {cell.precision} {cell.layout}: {', '.join(parts)}{ratio}"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", default=list(NETS), metavar="NAME")
    parser.add_argument("--ways", nargs="+", default=[*WAYS], metavar="NAME")
    parser.add_argument("--modes", nargs="+", default=["forward", "gradients", "step"])
    parser.add_argument("--precisions", nargs="+", default=list(TOLERANCE))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compiling", type=float, default=600.0, help="seconds in which networks compile")
    parser.add_argument("--measuring", type=float, default=3600.0, help="seconds in which cells begin to be measured")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    context, found = multiprocessing.get_context("spawn"), dict[str, dict[str, Any]]()
    queue, together = context.Queue(), (context.Barrier(len(options.nets)), context.Lock())
    waiting = []
    for name in options.nets:
        cells = [c for c in NETS[name][1] if c.mode in options.modes and c.precision in options.precisions]
        task = (name, options.ways, cells, options, together, queue)
        waiting.append(context.Process(target=process, args=task, daemon=False))
        waiting[-1].start()
    facts = report.machine("cuda") | {"torch": torch.__version__, "cuda": torch.version.cuda, "rounds": options.rounds}
    left = len(waiting)
    while left:
        name, cell, row = queue.get(timeout=900)
        if cell is None:
            left -= 1
            continue
        found.setdefault(name, {})[f"{cell.mode} {cell.precision} {cell.layout}"] = row
        print(shown(name, cell, row), flush=True)
        (options.out / "cuda-steps.json").write_text(json.dumps(facts | {"rows": found}, indent=1) + "\n")
    for running in waiting:
        running.join(60)


if __name__ == "__main__":
    main()
