"""Ctrl-C at random instants of recordings: ``python -m tests.recording.presses PRESSES SEED`` in a process of its own.

Each press ends what it comes into by one KeyboardInterrupt; the graph is as before, or whole where the press came after
the commit; torch is as before, and the next recording works.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable

import torch

import tfnb
from tests.each_test import _left_open

started = threading.Event()
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))


def ops(x: torch.Tensor) -> None:
    while True:
        x * 2


def dead_tensors(x: torch.Tensor) -> None:
    kept = [x] * 4
    while True:
        kept = [kept[-1] + 1, *kept[:3]]


def modules(x: torch.Tensor) -> None:
    while True:
        model(x)


def steps(x: torch.Tensor) -> None:
    loss = model(x).mean()
    while True:
        tfnb.train.SGD(0.1).minimize(loss)


def hands(x: torch.Tensor) -> None:
    while True:
        model(x).sum().backward()


def blocks(x: torch.Tensor) -> None:
    while True:
        with tfnb.name_scope("a"), torch.no_grad():
            x + 1


def branches(x: torch.Tensor) -> None:
    while True:
        tfnb.cond(x.sum() > 0, lambda: x * 2, lambda: x * 3)


def inside_of_a_branch(x: torch.Tensor) -> None:
    tfnb.cond(x.sum() > 0, lambda: ops(x), lambda: x * 3)


def a_sample_that_never_comes(x: torch.Tensor) -> None:
    tfnb.while_loop(lambda i: i < 10**15, lambda i: i + 1, [torch.tensor(0)])


@tfnb.autograph
def staged(x: torch.Tensor) -> None:
    turns = 0
    while True:
        turns += 1


def mapped(x: torch.Tensor) -> None:
    while True:
        torch.vmap(lambda row: row * 2)(x)


def nested(x: torch.Tensor) -> None:
    while True:
        with tfnb.record():
            tfnb.placeholder(torch.ones(2)) + 1


class Endless(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ops(x)

    @staticmethod
    def backward(ctx, dy):
        return dy


def inside_of_a_function(x: torch.Tensor) -> None:
    Endless.apply(x)


def asleep(x: torch.Tensor) -> None:
    time.sleep(1000)


def short(x: torch.Tensor) -> None:
    """Ends by itself: the press comes before, while or after the recording is committed."""
    weakref.finalize(x + 1, int)
    tfnb.gradients(model(x).sum(), [x])


BODIES = (
    ops, dead_tensors, modules, steps, hands, blocks, branches, inside_of_a_branch, a_sample_that_never_comes, staged,
    mapped, nested, inside_of_a_function, asleep, short,
)  # fmt: skip


class Presser:
    """One press at a random instant, which counts only while the call runs that it is meant for."""

    def __init__(self) -> None:
        self.armed, self.counted = False, 0
        signal.signal(signal.SIGINT, self.handle)

    def handle(self, number: int, frame: object) -> None:
        if self.armed:
            self.counted += 1
            raise KeyboardInterrupt

    def stops(self, call: Callable[[], None], seconds: float) -> bool:
        """Whether the press ended the call."""

        def press() -> None:
            started.wait()
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGINT)

        started.clear()
        thread = threading.Thread(target=press)
        try:
            try:
                self.armed = True
                thread.start()
                call()
            finally:
                self.armed = False  # a press just before this line is the last one, and caught below
        except KeyboardInterrupt:
            return True
        finally:
            thread.join()
        return False


def pressed(presser: Presser, body: Callable[[torch.Tensor], None], seconds: float, whole: int) -> str:
    """What came of one press."""
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(2, 3), name="x")
        x * 2
    before, around, presser.counted = graph.text(), _left_open(), 0

    def call() -> None:
        with tfnb.record(graph):
            started.set()
            body(x)

    stopped = presser.stops(call, seconds)
    assert presser.counted == stopped, f"{presser.counted} interrupts for one press"
    assert stopped or body is short
    assert graph.text() == before or (body is short and len(graph.nodes) == whole), graph.text()
    assert _left_open() == around, _left_open()
    assert signal.getsignal(signal.SIGINT) == presser.handle and sys.gettrace() is None
    with tfnb.record(graph):
        y = x + 3
    assert tfnb.run(y, {x: torch.ones(1, 3)}).tolist() == [[4.0, 4.0, 4.0]]
    return "stopped" if stopped else "too late"


def main(presses: int, seed: int) -> None:
    torch.set_num_threads(1)
    source, presser = random.Random(seed), Presser()
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(2, 3), name="x")
        x * 2
    begin = time.perf_counter()
    with tfnb.record(graph):
        short(x)
    lasts, whole, found = time.perf_counter() - begin, len(graph.nodes), Counter[str]()
    for turn in range(presses):
        body = BODIES[turn % len(BODIES)]
        faulthandler.dump_traceback_later(60, exit=True)  # a press was lost
        seconds = source.uniform(0, lasts if body is short else 0.02)
        try:
            found[pressed(presser, body, seconds, whole)] += 1
        except AssertionError as error:
            error.add_note(f"{body.__name__}, press {turn} of seed {seed}, after {seconds:.4f} s")
            raise
    faulthandler.cancel_dump_traceback_later()
    assert found["stopped"] >= presses - presses // len(BODIES) - 1


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
