"""Scripted uses of queues, for any library: ours and TensorFlow. Imports neither.

A scenario is a kind of queue and its steps. A step is a call; ``start`` begins one in a thread and goes on when it
waits, ``join`` gives its outcome. An outcome is a value as lists, or the code of an error. Run as a program by an
interpreter that has TensorFlow, it prints TensorFlow's outcomes: ``tests/state/queue_answers.json``.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

FIFO = {"kind": "fifo", "capacity": 10, "dtypes": ["float32"], "shapes": [[]]}
PAIRS = {"kind": "fifo", "capacity": 10, "dtypes": ["float32", "int64"], "shapes": [[2], []]}
FREE = {"kind": "fifo", "capacity": 3, "dtypes": ["float32"], "shapes": None}
POOL = {"kind": "shuffle", "capacity": 10, "least": 3, "dtypes": ["int64"], "shapes": [[]]}
LINES = {"kind": "padding", "capacity": 10, "dtypes": ["int64"], "shapes": [[None]]}
GRIDS = {"kind": "padding", "capacity": 10, "dtypes": ["float32"], "shapes": [[None, None]]}
GRADS = {"kind": "mean", "dtypes": ["float32"], "shapes": [[2]]}
ANY_GRADS = {"kind": "mean", "dtypes": ["float32"], "shapes": [None]}
ROWS = {"kind": "sparse_mean", "dtypes": ["float32"], "shapes": [[5, 1]]}
BARRIER = {"kind": "barrier", "dtypes": ["float32", "int64"], "shapes": [[], []]}
RANKS = {"kind": "priority", "capacity": 10, "dtypes": ["float32"], "shapes": [[]]}


def small(about: Mapping[str, Any], capacity: int) -> dict[str, Any]:
    return {**about, "capacity": capacity}


SCENARIOS: dict[str, tuple[Mapping[str, Any], Sequence[tuple[Any, ...]]]] = {
    "first in, first out": (FIFO, [
        ("put", 1), ("put", 2), ("size",), ("take",), ("put", 3), ("take",), ("take",), ("size",),
    ]),
    "rows and batches": (PAIRS, [
        ("put_many", [[1, 2], [3, 4], [5, 6]], [7, 8, 9]), ("size",), ("take",), ("take_many", 2), ("size",),
    ]),
    "an empty batch": (FIFO, [("take_many", 0), ("put_many", []), ("size",), ("close",), ("take_many", 0)]),
    "rows come as there is room": (small(FIFO, 2), [
        ("start", "put_many", [1, 2, 3, 4]), ("size",), ("take",), ("take",), ("join", 0), ("take_many", 2), ("size",),
    ]),
    "rows that were put before the deadline stay": (small(FIFO, 2), [
        ("late", "put_many", [1, 2, 3]), ("size",), ("take",), ("take",), ("size",),
    ]),
    "a batch stands before a single element": (FIFO, [
        ("start", "take_many", 3), ("start", "take"), ("put", 1), ("put", 2), ("size",), ("put", 3), ("put", 4),
        ("join", 0), ("join", 1), ("size",),
    ]),
    "a batch larger than the queue": (small(FIFO, 2), [
        ("start", "take_many", 5), ("put_many", [1, 2, 3, 4, 5, 6]), ("join", 0), ("take",),
    ]),
    "a deadline": (small(FIFO, 1), [("late", "take"), ("put", 1), ("late", "put", 2), ("take",), ("size",)]),
    "a closed queue": (FIFO, [
        ("put", 1), ("close",), ("put", 2), ("close",), ("take",), ("take",), ("take_up_to", 2), ("size",),
    ]),
    "too few for a batch": (FIFO, [
        ("put_many", [1, 2, 3]), ("close",), ("take_many", 5), ("size",), ("take_up_to", 5), ("take_up_to", 5),
    ]),
    "a close ends who waits": (FIFO, [
        ("start", "take_many", 3), ("start", "take"), ("put", 1), ("close",), ("join", 0), ("join", 1), ("size",),
    ]),
    "a close gives what is left": (FIFO, [
        ("start", "take_up_to", 3), ("start", "take_up_to", 3), ("put_many", [1, 2]), ("close",), ("join", 0),
        ("join", 1), ("size",),
    ]),
    "a close stands behind the puts before it": (small(FIFO, 1), [
        ("put", 1), ("start", "put", 2), ("start", "close"), ("start", "put", 3), ("take",), ("join", 0), ("join", 1),
        ("join", 2), ("take",), ("take",),
    ]),
    "a close that cancels": (small(FIFO, 1), [
        ("put", 1), ("start", "put", 2), ("start", "close"), ("cancel",), ("join", 0), ("join", 1), ("put", 4),
        ("take",), ("take",),
    ]),
    "a close that cancels part of a batch": (small(FIFO, 2), [
        ("start", "put_many", [1, 2, 3]), ("cancel",), ("join", 0), ("size",), ("take_up_to", 9),
    ]),
    "a close that cancels after a plain one": (FIFO, [("close",), ("cancel",), ("cancel",), ("close",), ("take",)]),
    "elements of any shape": (FREE, [("put", [1, 2]), ("put", [3]), ("take",), ("take",), ("take_many", 2)]),
    "a wrong shape": (PAIRS, [("put", [1, 2, 3], 4), ("size",)]),
    "a batch of wrong lengths": (PAIRS, [("put_many", [[1, 2], [3, 4]], [5]), ("size",)]),
    "the least of a shuffled queue": (POOL, [
        ("put_many", [5, 5, 5, 5]), ("take",), ("late", "take"), ("size",), ("close",), ("take_many", 3), ("take",),
    ]),
    "a close lets the least go": (POOL, [
        ("put_many", [5, 5]), ("start", "take_many", 2), ("start", "take"), ("close",), ("join", 0), ("join", 1),
    ]),
    "a shuffled batch takes all but the least": (POOL, [
        ("put_many", [5, 5, 5, 5, 5]), ("start", "take_many", 4), ("size",), ("put_many", [5, 5]), ("join", 0),
        ("size",),
    ]),
    "shuffled elements that do not suffice": (POOL, [
        ("put_many", [5, 5]), ("close",), ("take_many", 3), ("size",), ("take_up_to", 3), ("take_up_to", 3),
    ]),
    "a minimum that is no less than the capacity": (small(POOL, 3), [("size",)]),
    "elements are filled up": (LINES, [
        ("put", [1]), ("put", [1, 2, 3]), ("put", []), ("take_many", 2), ("take",), ("put", [4, 5]), ("take",),
    ]),
    "elements are filled up along two axes": (GRIDS, [
        ("put", [[1, 2, 3]]), ("put", [[4], [5]]), ("close",), ("take_up_to", 5), ("take_up_to", 5),
    ]),
    "padded elements of another rank": (LINES, [("put", [[1, 2]]), ("size",)]),
    "the smallest number first": (RANKS, [
        ("put", 3, 0.3), ("put", 1, 0.1), ("put", 2, 0.2), ("take",), ("take_many", 2), ("size",),
    ]),
    "ranks that are put in one batch": (RANKS, [
        ("put_many", [4, -2, 3], [1, 2, 3]), ("close",), ("take_up_to", 9), ("take",),
    ]),
    "ranks that go back": (RANKS, [
        ("put_many", [4, -2], [1, 2]), ("close",), ("take_many", 3), ("take",), ("take",),
    ]),
    "a mean": (GRADS, [
        ("apply", [0, 0], 0), ("apply", [1, 2], 0), ("apply", [2, 4], 0), ("count",), ("take_grad", 2), ("count",),
        ("apply", [1, 2], 0), ("apply", [1, 2], 1), ("apply", [3, 2], 7), ("count",), ("take_grad", 1), ("count",),
    ]),
    "a mean is waited for": (GRADS, [
        ("start", "take_grad", 2), ("apply", [1, 2], 0), ("count",), ("apply", [3, 4], 0), ("join", 0), ("count",),
        ("apply", [5, 6], 0), ("apply", [5, 6], 1), ("late", "take_grad", 2), ("count",), ("take_grad", 1),
    ]),
    "means are given in the order in which they were asked for": (GRADS, [
        ("start", "take_grad", 2), ("start", "take_grad", 1), ("apply", [1, 1], 0), ("count",), ("apply", [3, 3], 0),
        ("join", 0), ("apply", [8, 8], 0), ("apply", [9, 9], 1), ("join", 1), ("count",),
    ]),
    "a mean of no gradient": (GRADS, [("apply", [1, 2], 0), ("take_grad", 0), ("take_grad", -1), ("count",)]),
    "steps that are set": (GRADS, [
        ("apply", [1, 2], 0), ("set_step", 7), ("count",), ("apply", [1, 2], 6), ("apply", [3, 4], 7),
        ("set_step", 2), ("apply", [5, 6], 2), ("apply", [5, 6], 1), ("count",), ("take_grad", 3), ("apply", [1, 1], 2),
        ("apply", [1, 1], 3),
    ]),
    "gradients of a wrong shape": (GRADS, [("apply", [1, 2, 3], 0), ("apply", [[1, 2]], 0), ("count",)]),
    "gradients of any shape": (ANY_GRADS, [
        ("apply", [1, 2], 0), ("apply", [1, 2, 3], 0), ("count",), ("take_grad", 1), ("apply", [1, 2, 3], 1),
        ("take_grad", 1),
    ]),
    "parts become tuples": (BARRIER, [
        ("insert", 0, [7, 5], [0.75, 0.5]), ("size",), ("begun",), ("insert", 1, [5], [50]), ("size",), ("begun",),
        ("take_keys", 1), ("insert", 1, [7], [70]), ("insert", 0, [5], [0.25]), ("insert", 1, [5], [51]),
        ("take_keys", 2), ("size",), ("begun",),
    ]),
    "tuples come in the order of their keys": (BARRIER, [
        ("insert", 0, [1, 2, 3], [1, 2, 3]), ("insert", 1, [3], [30]), ("insert", 1, [2, 1], [20, 10]),
        ("take_keys", 3), ("take_keys", 0),
    ]),
    "a part that a key has": (BARRIER, [
        ("insert", 0, [1], [1]), ("insert", 0, [1], [2]), ("begun",), ("insert", 1, [1], [10]),
        ("insert", 1, [1], [11]), ("size",), ("begun",),
    ]),
    "tuples are waited for": (BARRIER, [
        ("start", "take_keys", 2), ("insert", 0, [1, 2], [1, 2]), ("insert", 1, [1], [10]), ("insert", 1, [2], [20]),
        ("join", 0), ("late", "take_keys", 1), ("size",),
    ]),
    "a closed barrier takes no new key": (BARRIER, [
        ("insert", 0, [1, 2], [1, 2]), ("close",), ("insert", 0, [3], [3]), ("begun",), ("insert", 1, [1], [10]),
        ("size",), ("begun",), ("take_keys", 3), ("size",), ("start", "take_keys", 2), ("insert", 1, [2], [20]),
        ("join", 0), ("take_keys", 1),
    ]),
    "a closed barrier gives what is whole": (BARRIER, [
        ("insert", 0, [1, 2], [1, 2]), ("insert", 1, [1], [10]), ("close",), ("take_some", 5), ("take_some", 5),
        ("insert", 1, [2], [20]), ("take_some", 5), ("take_some", 5),
    ]),
    "a barrier that is closed and cancelled": (BARRIER, [
        ("insert", 0, [1, 2], [1, 2]), ("insert", 1, [1], [10]), ("cancel",), ("size",), ("begun",),
        ("insert", 1, [2], [20]), ("take_keys", 2), ("take_keys", 1), ("take_keys", 1),
    ]),
    "rows of means": (ROWS, [
        ("apply", [0, 2], [[4], [6]], 0), ("apply", [0], [[8]], 0), ("count",), ("take_grad", 2), ("count",),
        ("apply", [1], [[1]], 0), ("apply", [1, 4], [[1], [2]], 1), ("take_grad", 1),
    ]),
    "rows are waited for": (ROWS, [
        ("start", "take_grad", 2), ("apply", [3], [[4]], 0), ("apply", [3], [[8]], 5), ("join", 0), ("set_step", 9),
        ("apply", [3], [[8]], 8), ("count",),
    ]),
    "rows named twice": (ROWS, [
        ("apply", [3, 1, 3], [[1], [2], [4]], 0), ("take_grad", 1), ("apply", [3, 1, 3], [[1], [2], [4]], 1),
        ("apply", [3], [[3]], 1), ("take_grad", 2),
    ]),
    "a cancel with takes that wait": (FIFO, [
        ("start", "take_many", 3), ("put", 1), ("start", "take"), ("cancel",), ("join", 0), ("join", 1), ("size",),
    ]),
    "a take of a part is served when the queue opens up": (small(FIFO, 1), [
        ("start", "put_many", [1, 2, 3]), ("take_up_to", 2), ("take_up_to", 1), ("join", 0), ("late", "take_up_to", 1),
    ]),
    "no elements of a closed queue": (FIFO, [
        ("put", 1), ("close",), ("take_many", 0), ("take_up_to", 0), ("take",), ("take_many", 0), ("take_up_to", 0),
        ("put_many", []),
    ]),
    "a number of elements below none": (FIFO, [("put", 1), ("take_many", -1), ("take_up_to", -1), ("size",)]),
    "a full shuffled queue": (small(POOL, 4), [
        ("put_many", [5, 5, 5, 5]), ("start", "put", 5), ("size",), ("take",), ("join", 0),
        ("late", "put_many", [5, 5]), ("size",), ("start", "put", 5), ("cancel",), ("join", 1), ("take_up_to", 9),
    ]),
    "a shuffled batch of what may be taken": (POOL, [
        ("put_many", [5, 5, 5, 5]), ("late", "take_up_to", 2), ("size",), ("close",), ("take_up_to", 9),
        ("take_up_to", 9),
    ]),
    "rows of one length are filled up, too": (LINES, [
        ("put_many", [[1, 2], [3, 4]]), ("put", [5]), ("take_many", 3), ("late", "take_many", 1), ("close",),
        ("take_many", 1), ("put", [1]),
    ]),
    "a full queue of ranks": ({**RANKS, "capacity": 2}, [
        ("put_many", [2, 1], [0.2, 0.1]), ("start", "put", 0, 0.5), ("size",), ("take",), ("join", 0), ("take",),
        ("start", "take_many", 2), ("put", 9, 0.9), ("join", 1), ("late", "take"), ("cancel",), ("put", 1, 1),
        ("take",),
    ]),
    "ranks of a wrong shape": (RANKS, [("put", [3, 4], 0.3), ("put_many", [3, 4], [0.3]), ("size",)]),
    "parts of a wrong shape": (BARRIER, [
        ("insert", 0, [1, 2], [1]), ("insert", 0, [1], [[1, 2]]), ("size",), ("begun",),
    ]),
    "a key that is there twice": (BARRIER, [
        ("insert", 0, [4, 4], [1, 2]), ("begun",), ("insert", 1, [4], [40]), ("size",), ("take_keys", 1),
    ]),
    "barriers end who waits for too many": (BARRIER, [
        ("insert", 0, [1, 2], [1, 2]), ("start", "take_keys", 3), ("start", "take_some", 1), ("close",), ("join", 0),
        ("insert", 1, [2], [20]), ("join", 1), ("cancel",), ("take_some", 2), ("close",),
    ]),
    "rows that are outside": (ROWS, [("apply", [7], [[4]], 0), ("count",), ("take_grad", 0)]),
    "a step of the past": (ROWS, [
        ("set_step", 3), ("apply", [0], [[4]], 2), ("count",), ("apply", [0], [[4]], 3), ("set_step", 1),
        ("apply", [0], [[8]], 1), ("count",), ("take_grad", 2), ("late", "take_grad", 1),
    ]),
    "rows of a wrong shape": (ROWS, [("apply", [0], [[4, 5]], 0), ("apply", [0, 1], [[4]], 0), ("count",)]),
    "ranks are taken up as they come": (RANKS, [
        ("start", "take_many", 3), ("put", 5, 0.5), ("put", 1, 0.1), ("put", 3, 0.3), ("join", 0), ("size",),
    ]),
    "a close behind a batch that waits for room": (small(FIFO, 2), [
        ("start", "put_many", [1, 2, 3, 4, 5]), ("start", "close"), ("start", "put", 9), ("take_many", 4), ("join", 0),
        ("join", 1), ("join", 2), ("take_up_to", 4), ("take_up_to", 4), ("put", 9),
    ]),
    "two batches that wait for room are cancelled": (small(FIFO, 2), [
        ("start", "put_many", [1, 2, 3]), ("start", "put_many", [4, 5]), ("cancel",), ("join", 0), ("join", 1),
        ("size",), ("take_many", 2), ("take",),
    ]),
    "nothing is taken before who waits": (FIFO, [
        ("start", "take_many", 3), ("take_many", 0), ("take_up_to", 0), ("put_many", [1, 2, 3]), ("join", 0),
    ]),
    "a take of a part waits for the whole": (FIFO, [
        ("start", "take_up_to", 4), ("put_many", [1, 2, 3]), ("size",), ("cancel",), ("join", 0), ("size",),
    ]),
    "takes of parts after a close": (PAIRS, [
        ("put_many", [[1, 2], [3, 4], [5, 6]], [7, 8, 9]), ("close",), ("take_up_to", 2), ("take_up_to", 0),
        ("take_up_to", 2), ("take_up_to", 0), ("take_many", 0), ("take_up_to", 1),
    ]),
    "a batch of another length behind a closed queue": (PAIRS, [("close",), ("put_many", [[1, 2]], [5]), ("size",)]),
    "rows that do not fit their padding": (GRIDS, [("put", [1, 2]), ("put", [[]]), ("put", [[1]]), ("take_many", 2)]),
    "padded batches of batches": (LINES, [
        ("put_many", [[1, 2], [3, 4]]), ("put", [5]), ("take_many", 3), ("put_many", [[6]]), ("close",),
        ("take_up_to", 3),
    ]),
    "equal ranks and what is left of them": ({**RANKS, "capacity": 3}, [
        ("put", 2, 0.5), ("put", 1, 0.25), ("start", "put_many", [2, 1], [0.5, 0.25]), ("size",), ("take",),
        ("join", 0), ("take_many", 3), ("size",),
    ]),
    "ranks behind a close": (RANKS, [
        ("start", "take"), ("close",), ("join", 0), ("put", 1, 0.5), ("size",), ("take",),
    ]),
    "a shuffled queue is closed with takes and puts that wait": (small(POOL, 4), [
        ("put_many", [5, 5, 5, 5]), ("start", "put_many", [5, 5]), ("size",), ("start", "close"), ("take_many", 2),
        ("join", 0), ("join", 1), ("size",), ("take_many", 5), ("take_up_to", 5), ("take",),
    ]),
    "a shuffled batch that waits when all is cancelled": (POOL, [
        ("put_many", [5, 5, 5, 5]), ("start", "take_many", 5), ("size",), ("cancel",), ("join", 0), ("size",),
        ("take_up_to", 5),
    ]),
    "tuples that stay incomplete": (BARRIER, [
        ("insert", 0, [1, 2, 3], [1, 2, 3]), ("insert", 1, [2], [20]), ("start", "take_keys", 2), ("close",),
        ("insert", 1, [3], [30]), ("join", 0), ("begun",), ("size",), ("take_some", 2), ("insert", 1, [1], [10]),
        ("take_some", 2), ("take_some", 1),
    ]),
    "a cancelled barrier has what is whole": (BARRIER, [
        ("insert", 0, [1, 2], [1, 2]), ("insert", 1, [1], [10]), ("cancel",), ("begun",), ("insert", 1, [2], [20]),
        ("take_some", 2), ("take_keys", 1), ("close",),
    ]),
    "means of more than were asked for": (GRADS, [
        ("apply", [1, 2], 3), ("apply", [3, 4], 0), ("apply", [5, 6], 9), ("take_grad", 2), ("count",),
        ("set_step", 1), ("apply", [1, 1], 0), ("apply", [1, 1], 1), ("set_step", 5), ("count",), ("take_grad", 1),
        ("apply", [2, 2], 5), ("apply", [2, 2], 6), ("take_grad", 1),
    ]),
    "two means of rows are waited for": (ROWS, [
        ("start", "take_grad", 1), ("start", "take_grad", 2), ("apply", [4, 0], [[8], [2]], 0), ("join", 0),
        ("apply", [1], [[1]], 0), ("apply", [1], [[3]], 1), ("count",), ("apply", [2], [[5]], 4), ("join", 1),
        ("count",),
    ]),
}  # fmt: skip

LATE = 0.2  # seconds of a call that is to end late


class Player:
    """Plays one scenario with a library: ``call(name, *args, timeout)`` gives an outcome."""

    def __init__(self, call: Callable[..., Any], settle: Callable[[threading.Thread], None]) -> None:
        self.call, self.settle = call, settle
        self.threads: list[tuple[threading.Thread, list[Any]]] = []

    def play(self, steps: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What each step gives but those that start something."""
        return [found for step in steps if (found := self.step(*step)) != "started"]

    def step(self, name: str, *args: Any) -> Any:
        if name == "start":
            found: list[Any] = []
            thread = threading.Thread(target=lambda: found.append(self.call(*args, timeout=60.0)), daemon=True)
            self.threads.append((thread, found))
            thread.start()
            self.settle(thread)
            return "started"
        if name == "join":
            thread, found = self.threads[args[0]]
            thread.join(90)
            return found[0]
        return self.call(*args, timeout=LATE) if name == "late" else self.call(name, *args, timeout=60.0)


def tensorflow_outcomes() -> dict[str, list[Any]]:
    """Of all scenarios, with TensorFlow's queues of graphs."""
    import tensorflow.compat.v1 as tf
    from tensorflow.python.ops import data_flow_ops

    tf.disable_v2_behavior()
    kinds = {
        "fifo": lambda a, d: tf.FIFOQueue(a["capacity"], d, a["shapes"]),
        "shuffle": lambda a, d: tf.RandomShuffleQueue(a["capacity"], a["least"], d, a["shapes"]),
        "padding": lambda a, d: tf.PaddingFIFOQueue(a["capacity"], d, a["shapes"]),
        "priority": lambda a, d: tf.PriorityQueue(a["capacity"], d, a["shapes"]),
        "barrier": lambda a, d: data_flow_ops.Barrier(d, a["shapes"]),
        "mean": lambda a, d: tf.ConditionalAccumulator(d[0], a["shapes"][0]),
        "sparse_mean": lambda a, d: tf.SparseConditionalAccumulator(d[0], a["shapes"][0]),
    }

    def played(about: Mapping[str, Any], steps: Sequence[tuple[Any, ...]]) -> list[Any]:
        graph, lock = tf.Graph(), threading.Lock()
        dtypes = [getattr(tf, dtype) for dtype in about["dtypes"]]
        with graph.as_default():
            queue = kinds[about["kind"]](about, dtypes)
        session = tf.Session(graph=graph)
        full = [tf.int64, *dtypes] if about["kind"] == "priority" else dtypes

        def slices(indices: Any, values: Any) -> Any:
            return tf.IndexedSlices(tf.constant(values, dtypes[0]), tf.constant(indices, tf.int64))

        def apply(*args: Any) -> Any:
            if about["kind"] == "mean":
                return queue.apply_grad(tf.placeholder_with_default(tf.constant(args[0], dtypes[0]), None), args[1])
            return queue.apply_indexed_slices_grad(slices(*args[:2]), args[2])

        def take_grad(n: int) -> Any:
            if about["kind"] == "mean":
                return queue.take_grad(n)
            found = queue.take_indexed_slices_grad(n)
            return [found.indices, found.values]

        def call(name: str, *args: Any, timeout: float) -> Any:
            try:
                with lock, graph.as_default():
                    given = args if "put" in name else ()
                    parts = [tf.constant(part, dtype) for part, dtype in zip(given, full, strict=False)]
                    op = {
                        "put": lambda: queue.enqueue(parts), "put_many": lambda: queue.enqueue_many(parts),
                        "take": lambda: queue.dequeue(), "take_many": lambda: queue.dequeue_many(args[0]),
                        "take_up_to": lambda: queue.dequeue_up_to(args[0]), 
                        "size": lambda: queue.ready_size() if about["kind"] == "barrier" else queue.size(),
                        "close": lambda: queue.close(), "cancel": lambda: queue.close(cancel_pending_enqueues=True),
                        "apply": lambda: apply(*args), "take_grad": lambda: take_grad(*args),
                        "insert": lambda: queue.insert_many(
                            args[0], tf.as_string(tf.constant(args[1], tf.int64)), tf.constant(args[2], dtypes[args[0]])
                        ),
                        "take_keys": lambda: queue.take_many(*args), "begun": lambda: queue.incomplete_size(),
                        "take_some": lambda: queue.take_many(*args, allow_small_batch=True),
                        "set_step": lambda: queue.set_global_step(*args), "count": lambda: queue.num_accumulated(),
                    }[name]()  # fmt: skip
                found = session.run(op, options=tf.RunOptions(timeout_in_ms=int(timeout * 1000)))
            except tf.errors.OpError as error:
                return type(error).__name__.removesuffix("Error")
            except ValueError:
                return "InvalidArgument"
            if name in ("take_keys", "take_some"):
                _, keys, values = found
                return lists([[int(key) for key in keys], values])
            return lists(found)

        return Player(call, lambda thread: time.sleep(0.3)).play(steps)

    outcomes = {}
    for name, (about, steps) in SCENARIOS.items():
        try:
            outcomes[name] = played(about, steps)
        except tf.errors.OpError as error:
            outcomes[name] = [type(error).__name__.removesuffix("Error")]
    return outcomes


def lists(found: Any) -> Any:
    """A value as lists of numbers, rounded."""
    if isinstance(found, (list, tuple)):
        return [lists(part) for part in found]
    if hasattr(found, "tolist"):
        return lists(found.tolist())
    return round(found, 4) if isinstance(found, float) else found


if __name__ == "__main__":
    json.dump(tensorflow_outcomes(), sys.stdout, indent=1)
