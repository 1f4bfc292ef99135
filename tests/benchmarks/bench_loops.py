"""Loops: iterations per second of an empty one, and iterations that overlap on eight devices (EuroSys'18, figure 12).

The counting loop runs as generated code, by the dataflow executor, in plain Python over torch scalars, compiled, and
where their interpreter is given in TensorFlow and JAX. All take turns, and the best round of each counts; generated
code against Python is the median of rounds. `compiled, two variables` is the loop that JAX runs, whose compiler would
find the result of the other one without counting. The pipeline has eight
stages, each on a device of its own and fed by the one before it and by its own last iteration; a stage is a sleep, or a
product of matrices. Values have to be the same to the last bit whatever `parallel_iterations` is.

    python tests/benchmarks/bench_loops.py [--rounds 5] [--peers .venv-peers/bin/python]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tfnb
from tfnb.execution.tiers.compiled_loops import obstacle

ITERATIONS, COMPILED_ITERATIONS = 20_000, 20_000_000
SAMPLES = 3  # of each loop in a round
DEVICES = 8
PARALLEL = (1, 2, 4, 8, 16, 32)
TARGETS = {"native / python": 0.8, "frames, iterations per second": 20_000,
            "compiled, iterations per second": 10_000_000, "speed-up at 8": 5.0, "32 against 8": 0.95}  # fmt: skip


@torch.library.custom_op("tfnb_bench::nap", mutates_args=())
def nap(x: torch.Tensor, seconds: float) -> torch.Tensor:
    """x + 1 after a sleep, in which other threads run."""
    time.sleep(seconds)
    return x + 1


nap.register_fake(lambda x, seconds: torch.empty_like(x))


def python_loop(n: torch.Tensor) -> torch.Tensor:
    """Counts to n."""
    i = torch.tensor(0)
    while i < n:
        i = i + 1
    return i


def counting(*, is_compiled: bool = True) -> dict[str, tuple[Callable[[torch.Tensor], Any], int]]:
    """Loops of n iterations, and how many they shall take; with compiled ones where they are wanted and can be had."""
    with tfnb.record() as graph:
        n = tfnb.placeholder(torch.tensor(3), name="n")
        (i,) = tfnb.while_loop(lambda i: i < n, lambda i: (i + 1,), (0,))
        _, x = tfnb.while_loop(lambda i, x: i < n, lambda i, x: (i + 1, x * 0.5 + 1.0), (0, 0.0))

    def call(value: Any, **options: Any) -> Callable[[torch.Tensor], Any]:
        return tfnb.Session(graph, **options).make_callable(value, [n])

    loops = {
        "python": (python_loop, ITERATIONS), "native": (call(i, compile="off"), ITERATIONS),
        "frames": (call(i, compile="off", executor="dataflow"), ITERATIONS),
    }  # fmt: skip
    if is_compiled and obstacle() is None:
        loops["compiled"] = call(i, compile="now"), COMPILED_ITERATIONS
        loops["compiled, two variables"] = call(x, compile="now"), COMPILED_ITERATIONS
    for name, (loop, _) in loops.items():
        assert loop(torch.tensor(10)) == (10 if "two" not in name else 2 - 2 ** torch.tensor(-9.0)), name
    return loops


def iterations_per_second(rounds: int, peers: Path) -> tuple[dict[str, Any], float]:
    """The best of each; and of generated code against Python the median."""
    loops = counting()
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    found: dict[str, Any] = {}
    for _ in range(rounds * SAMPLES):
        for name, (loop, iterations) in loops.items():
            n = torch.tensor(iterations)
            start = time.perf_counter()
            loop(n)
            seconds[name].append(time.perf_counter() - start)
    found |= {name: iterations / min(seconds[name]) for name, (_, iterations) in loops.items()}
    against = statistics.median(a / b for a, b in zip(seconds["python"], seconds["native"], strict=True))
    if peers.exists():
        script = Path(__file__).parent / "peers" / "loops.py"
        done = subprocess.run([peers, script, str(rounds)], capture_output=True, text=True, check=True)
        found |= json.loads(done.stdout.splitlines()[-1])
    return found, against


def pipeline(kind: str, iterations: int, parallel: int) -> Callable[[], list[torch.Tensor]]:
    """The loop over eight devices."""
    size = () if kind == "sleep" else (512, 512)
    weight = torch.eye(*size) if size else torch.zeros(())
    with tfnb.record() as graph:

        def body(i: Any, *state: Any) -> Any:
            x, new = i.to(torch.float32).expand(size) * 1e-3, []
            for device, mine in enumerate(state):
                with tfnb.device(f"cpu:{device}"):
                    x = torch.ops.tfnb_bench.nap(x + mine, 0.005) if kind == "sleep" else (x + mine) @ weight
                new.append(x)
            return (i + 1, *new)

        start = [torch.zeros(size) for _ in range(DEVICES)]
        _, *outs = tfnb.while_loop(lambda i, *s: i < iterations, body, (0, *start), parallel_iterations=parallel)
    return tfnb.Session(graph, executor="dataflow").make_callable(outs)


def overlapping(kind: str, iterations: int, rounds: int) -> dict[int, float]:
    """Seconds for each number of parallel iterations; raises AssertionError if a value differs."""
    runs = {parallel: pipeline(kind, iterations, parallel) for parallel in PARALLEL}
    seconds: dict[int, list[float]] = {parallel: [] for parallel in PARALLEL}
    first = runs[1]()
    for _ in range(rounds):
        for parallel, run in runs.items():
            start = time.perf_counter()
            found = run()
            seconds[parallel].append(time.perf_counter() - start)
            assert all(map(torch.equal, found, first)), f"parallel_iterations={parallel} changes values"
    return {parallel: min(times) for parallel, times in seconds.items()}


def main() -> None:
    """Print both tables; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=100, help="of the pipeline")
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers/bin/python"), help="has TensorFlow and JAX")
    parser.add_argument("--kinds", nargs="*", default=["sleep", "matmul"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rates, against = iterations_per_second(options.rounds, options.peers)
    for name, rate in rates.items():
        print(f"{name:>32}  {rate:>14,.0f} iterations/s" if isinstance(rate, float) else f"{name:>32}  {rate}")
    result: dict[str, Any] = {"iterations": rates, "native / python": against}
    print(f"native / python {against:.2f}, frames / python {rates['frames'] / rates['python']:.2f}")
    for kind in options.kinds:
        iterations = options.iterations // (1 if kind == "sleep" else 10)  # no faster than the machine has cores
        seconds = overlapping(kind, iterations, max(1, options.rounds // 2))
        gains = {parallel: seconds[1] / seconds[parallel] for parallel in PARALLEL}
        result[kind] = gains
        print(f"{kind:>8}: " + "  ".join(f"{parallel}: {gain:.2f}x" for parallel, gain in gains.items()))
    print(json.dumps(result | {"targets": TARGETS}))


if __name__ == "__main__":
    main()
