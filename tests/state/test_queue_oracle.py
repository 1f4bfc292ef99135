"""Scripted uses of queues give what TensorFlow gives: as recorded, and where TensorFlow is installed as it says now."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import tfnb
from tests.state.distance import queues_at
from tests.state.queue_scenarios import SCENARIOS, Player, lists
from tfnb.errors import Cancelled, DeadlineExceeded, InvalidArgument, OutOfRange, TfnbError

pytestmark = pytest.mark.filterwarnings("ignore:still waiting", "ignore:an accumulator at step")

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PEERS = ROOT / ".venv-peers" / "bin" / "python"
ANSWERS: Mapping[str, list[Any]] = json.loads((HERE / "queue_answers.json").read_text())
CODES = (Cancelled, DeadlineExceeded, InvalidArgument, OutOfRange)

# The contract differs from TensorFlow here, on purpose: what our queues give, and why.
OURS: Mapping[str, tuple[list[Any], str]] = {
    "ranks that are put in one batch": (
        [None, None, [[-2, 3, 4], [2.0, 3.0, 1.0]], "OutOfRange"],
        "TensorFlow's PriorityQueue gives no batch that is smaller; ours takes what is left, like all kinds",
    ),
    "tuples come in the order of their keys": (
        [None, None, None, [[1, 2, 3], [[1.0, 2.0, 3.0], [10, 20, 30]]], [[], [[], []]]],
        "TensorFlow gives keys of one insert_many in the order in which they became whole",
    ),
    "a shuffled batch of what may be taken": (
        [None, "DeadlineExceeded", 4, None, [5, 5, 5, 5], "OutOfRange"],
        "TensorFlow loses the element that a dequeue_up_to had taken before its deadline",
    ),
    "parts of a wrong shape": (
        ["InvalidArgument", "InvalidArgument", 0, 0],
        "TensorFlow's Barrier takes a part of another shape, which fits no batch later",
    ),
    "barriers end who waits for too many": (
        [None, None, "OutOfRange", None, "OutOfRange", None, [[2], [[2.0], [20]]], "Cancelled"],
        "TensorFlow ends a take with OutOfRange that comes after the close, and lets one wait on that came before it",
    ),
    "two means of rows are waited for": (
        [None, [[0, 4], [[2.0], [8.0]]], None, None, 1, None, [[1, 2], [[3.0], [5.0]]], 0],
        "TensorFlow gives the rows of a single gradient in its order; ours rise",
    ),
    "rows named twice": (
        [None, [[1, 3], [[2.0], [5.0]]], None, None, [[1, 3], [[2.0], [4.0]]]],
        "TensorFlow keeps rows apart that one gradient names twice, and adds another gradient to one of them",
    ),
}


def made(about: Mapping[str, Any]) -> Any:
    kinds = [getattr(torch, dtype) for dtype in about["dtypes"]]
    dtypes: Any = kinds[0] if len(kinds) == 1 else kinds
    shapes = about["shapes"] if about["shapes"] is None or len(kinds) > 1 else about["shapes"][0]
    capacity = about.get("capacity", -1)
    match about["kind"]:
        case "fifo":
            return tfnb.FIFOQueue(capacity, dtypes, shapes)
        case "shuffle":
            return tfnb.RandomShuffleQueue(capacity, about["least"], dtypes, shapes)
        case "padding":
            return tfnb.PaddingFIFOQueue(capacity, dtypes, shapes)
        case "priority":
            return tfnb.PriorityQueue(capacity, dtypes, shapes)
        case "barrier":
            return tfnb.Barrier(dtypes, shapes)
        case "mean":
            return tfnb.ConditionalAccumulator(dtypes, shapes)
        case "sparse_mean":
            return tfnb.SparseConditionalAccumulator(dtypes, shapes, sparse_mean="per_row")


def called(queue: Any, name: str, args: tuple[Any, ...], timeout: float | None) -> Any:
    """The call of a scenario on one of our queues."""
    limit = {} if timeout is None else {"timeout": timeout}
    match name:
        case "put" | "put_many":
            kinds = [kind for kind, _ in queue.components]
            tensors = [torch.tensor(part, dtype=kind) for part, kind in zip(args, kinds, strict=True)]
            tensors = [
                t.reshape(0, *shape) if name == "put_many" and not t.numel() and shape else t
                for t, (_, shape) in zip(tensors, queue.components, strict=True)
            ]
            element = tensors[0] if len(tensors) == 1 else tuple(tensors)
            return (queue.enqueue if name == "put" else queue.enqueue_many)(element, **limit)
        case "take":
            return queue.dequeue(**limit)
        case "take_many":
            return queue.dequeue_many(*args, **limit)
        case "take_up_to":
            return queue.dequeue_up_to(*args, **limit)
        case "size":
            return queue.size()
        case "close" | "cancel":
            return queue.close(cancel_pending_enqueues=name == "cancel", **limit)
        case _:
            return called_of_others(queue, name, args, limit)


def called_of_others(queue: Any, name: str, args: tuple[Any, ...], limit: dict[str, float]) -> Any:
    """The call of a scenario on a barrier or an accumulator."""
    match name:
        case "insert":
            part, keys, values = args
            dtype = queue.components[1 + part][0]
            return queue.insert_many(part, torch.tensor(keys), torch.tensor(values, dtype=dtype), **limit)
        case "take_keys" | "take_some":
            return list(queue.take_many(*args, allow_small_batch=name == "take_some", **limit)[1:])
        case "begun":
            return queue.incomplete_size()
        case "apply":
            *grad, step = args
            dtype = torch.float32
            if len(grad) == 1:
                return queue.apply_grad(torch.tensor(grad[0], dtype=dtype), step)
            indices, values = grad
            return queue.apply_grad(slices(torch.tensor(values, dtype=dtype), torch.tensor(indices)), step)
        case "take_grad":
            found = queue.take_grad(*args, **limit)
            return [found.indices, found.values] if isinstance(found, tfnb.IndexedSlices) else found
        case "set_step":
            return queue.set_global_step(*args)
        case "count":
            return queue.count()


def slices(values: torch.Tensor, indices: torch.Tensor) -> tfnb.IndexedSlices:
    return tfnb.IndexedSlices(values, indices, (5, *values.shape[1:]))


def ours(name: str, *, recorded: bool, machine: Callable[[Any], Any]) -> list[Any]:
    """The outcomes of a scenario with our queues, each call recorded and run, or at once.

    machine: finds what holds a queue, None where nobody does yet.
    """
    about, steps = SCENARIOS[name]
    try:
        queue = made(about)
    except InvalidArgument:
        return ["InvalidArgument"]

    def call(method: str, *args: Any, timeout: float) -> Any:
        try:
            if not recorded:
                found = called(queue, method, args, timeout)
            else:
                with tfnb.record() as graph:
                    fetch = called(queue, method, args, None)
                found = tfnb.Session(graph).run(fetch, timeout=timeout)
            return None if method == "apply" else lists(found)  # TensorFlow does not say whether it was kept
        except TfnbError as error:
            return next(kind.__name__ for kind in CODES if isinstance(error, kind))

    begun: set[Any] = set()

    def settle(thread: threading.Thread) -> None:
        """Until a new attempt stands in its line, or the call is over."""
        end = time.monotonic() + 60
        while not (new := standing(machine(queue)) - begun) and thread.is_alive():
            assert time.monotonic() < end
            time.sleep(0.002)
        begun.update(new)

    return Player(call, settle).play(steps)


def standing(machine: Any) -> set[Any]:
    """The attempts that wait in a queue."""
    lines = {} if machine is None else machine.lines
    return {attempt for line in lines.values() for attempt in list(line)}


@pytest.mark.parametrize("where", ["here", "there"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_ends_as_tensorflow_recorded(name: str, where: str, *, recorded: bool = False) -> None:
    expected = OURS[name][0] if name in OURS else ANSWERS[name]
    with queues_at(where, loss=0.2) as machine:
        assert ours(name, recorded=recorded, machine=machine) == expected


@pytest.mark.slow
@pytest.mark.parametrize("where", ["here", "there"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_in_graphs_ends_as_tensorflow_recorded(name: str, where: str) -> None:
    test_a_scenario_ends_as_tensorflow_recorded(name, where, recorded=True)


def test_every_scenario_has_an_answer_and_no_difference_is_left_over() -> None:
    assert set(ANSWERS) == set(SCENARIOS) and all(OURS[name][0] != ANSWERS[name] for name in OURS)


@pytest.mark.slow
@pytest.mark.skipif(not PEERS.exists(), reason="make bench-peers installs TensorFlow")
def test_the_recorded_answers_are_tensorflows() -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [PEERS, HERE / "queue_scenarios.py"], capture_output=True, text=True, timeout=280, check=True, env=environment
    )
    assert json.loads(done.stdout) == ANSWERS
