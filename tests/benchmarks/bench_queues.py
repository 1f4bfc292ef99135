"""Elements per second through a queue, beside TensorFlow's: ``python tests/benchmarks/bench_queues.py``.

Both libraries run in processes of their own, in turns, so that what else the machine does meets both. Each measures two
ways: a call for each element (put one, take one), and rows put and taken 100 at a time. TensorFlow's is a Session of
``.venv-peers`` (``make bench-peers``).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PEER = Path(os.environ.get("TFNB_PEERS", ROOT / ".venv-peers" / "bin" / "python"))
SIZES = {"small": (8, 2000), "1 MB": (250_000, 200)}  # float32 numbers of an element, and elements of a round
ROUNDS = 5
TARGETS = {"small": 1.0, "1 MB": 1.5}

Act = Callable[[], object]


def seconds(put: Act, take: Act, count: int) -> float:
    """Of so many elements, put and taken."""
    begin = time.perf_counter()
    for _ in range(count):
        put()
        take()
    return time.perf_counter() - begin


def ours(length: int) -> dict[str, tuple[Act, Act, int]]:
    """Put, take, and elements of each, of our queues: at once and by recorded steps."""
    import torch

    import tfnb

    queue = tfnb.FIFOQueue(400, torch.float32, (length,))
    x, xs = torch.ones(length), torch.ones(100 if length < 1000 else 4, length)
    with tfnb.record() as graph:
        given, many = tfnb.placeholder(x, shape=(length,)), tfnb.placeholder(xs)
        ops = queue.enqueue(given), queue.dequeue(), queue.enqueue_many(many), queue.dequeue_many(len(xs))
    session = tfnb.Session(graph)
    put, take = session.make_callable(ops[0], [given]), session.make_callable(ops[1])
    put_many, take_many = session.make_callable(ops[2], [many]), session.make_callable(ops[3])
    return {
        "at once": (lambda: queue.enqueue(x), queue.dequeue, 1),
        "at once, batches": (lambda: queue.enqueue_many(xs), lambda: queue.dequeue_many(len(xs)), len(xs)),
        "steps": (lambda: put(x), take, 1),
        "steps, batches": (lambda: put_many(xs), take_many, len(xs)),
    }


def theirs(length: int) -> dict[str, tuple[Act, Act, int]]:
    """The same of TensorFlow: its fastest calls, callables that take arrays."""
    import numpy as np
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    rows = 100 if length < 1000 else 4
    x, xs = np.ones(length, np.float32), np.ones((rows, length), np.float32)
    graph = tf.Graph()
    with graph.as_default():
        queue = tf.FIFOQueue(400, tf.float32, [[length]])
        given, many = tf.placeholder(tf.float32, [length]), tf.placeholder(tf.float32, [rows, length])
        ops = queue.enqueue(given), queue.dequeue(), queue.enqueue_many(many), queue.dequeue_many(rows)
    session = tf.Session(graph=graph)
    put, take = session.make_callable(ops[0], [given]), session.make_callable(ops[1])
    put_many, take_many = session.make_callable(ops[2], [many]), session.make_callable(ops[3])
    return {"steps": (lambda: put(x), take, 1), "steps, batches": (lambda: put_many(xs), take_many, rows)}


def answer(library: Callable[[int], dict[str, tuple[Act, Act, int]]]) -> None:
    """Measure a round for each line that comes in."""
    made = {size: library(length) for size, (length, _) in SIZES.items()}
    for size, ways in made.items():
        for put, take, rows in ways.values():
            seconds(put, take, max(1, SIZES[size][1] // rows // 4))
    for _ in sys.stdin:
        rates = {}
        for size, ways in made.items():
            for way, (put, take, rows) in ways.items():
                turns = max(5, SIZES[size][1] // rows)
                rates[f"{size}: {way}"] = turns * rows / seconds(put, take, turns)
        sys.stdout.write(json.dumps(rates) + "\n")
        sys.stdout.flush()


def main() -> None:
    """Rounds in turns; medians and ratios."""
    who = {"ours": sys.executable, "theirs": str(PEER)}
    players = {
        name: subprocess.Popen(
            [python, __file__, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for name, python in who.items()
    }
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in who}
    for _ in range(ROUNDS):
        for name, player in players.items():
            assert player.stdin is not None and player.stdout is not None
            player.stdin.write("\n")
            player.stdin.flush()
            rounds[name].append(json.loads(player.stdout.readline()))
    for player in players.values():
        assert player.stdin is not None
        player.stdin.close()
        player.wait(60)
    for key in rounds["ours"][0]:
        size, way = key.split(": ")
        beside = f"{size}: {way.replace('at once', 'steps')}"
        rates = [(mine[key], other[beside]) for mine, other in zip(rounds["ours"], rounds["theirs"], strict=True)]
        ratio = statistics.median(mine / other for mine, other in rates)
        mine, other = (statistics.median(column) for column in zip(*rates, strict=True))
        sys.stdout.write(f"{key:28} {mine:12,.0f}/s  TensorFlow {other:12,.0f}/s  {ratio:5.2f} of {TARGETS[size]}\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        answer({"ours": ours, "theirs": theirs}[sys.argv[1]])
    else:
        main()
