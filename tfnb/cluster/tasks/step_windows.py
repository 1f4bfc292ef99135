"""A window of steps at one stage of a pipeline, whose shard lies in this process: `tfnb.cluster.modes.windows`.

A thread of `ClusterTask.waiting` takes the steps by itself: it reads the Variables of its stage where they lie,
computes its part, lets the shard prepare the write, agrees with the other stages, and lets the shard write. The
notebook hears of the window when it is over.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tfnb.cluster.modes.windows import Agreement, StageWord, TellStage, WriteStep
from tfnb.cluster.tasks.computing import Compute
from tfnb.cluster.tasks.exchange import Exchange
from tfnb.cluster.tasks.part_programs import PartProgram
from tfnb.cluster.tasks.programs import Push
from tfnb.cluster.wire.messages import GIVEN_UP, Ask, Failure, Ok, OpId, Outcome, Peer, failed, raised
from tfnb.cluster.wire.transport import outcome_header
from tfnb.errors import DeadlineExceeded, StepAborted, Unavailable
from tfnb.execution.dataflow.machine import Peers

LOOK = 0.5  # seconds
READY, GO = -2, -3  # edges of the words of an agreement; those of values are counted from 0
CLIENT = "stages"  # the identity of the commit of a round, whoever asks for it

AskShard = Callable[[Ask, Callable[[Outcome], None]], None]


def commit_of(number: int) -> OpId:
    """The identity of a round's commit: by a stage, and by the notebook where a stage did not get so far."""
    return OpId(CLIENT, number)


def missed(answer: Failure, error: Exception) -> Failure:
    """The failure of a part; if caused by a lost connection, marked for the notebook to find out whether a task is
    lost.
    """
    if isinstance(error, Unavailable) and error.peers:
        return replace(answer, details={"missed": True, "peer": error.peers[0]})
    return answer


def _put(inbox: queue.SimpleQueue[StageWord | BaseException], word: StageWord, value: object, dead: object) -> None:
    inbox.put(word)


class StageWindow:
    """The steps of a window at this stage, and their fetches.

    ask: asks the shard here, which calls back. parts: the task of each stage. steps: of each step its run index, its
    number of feeds, and the sizes of those of which sizes are enough. tensors: the feeds of all steps.
    """

    def __init__(
        self, exchange: Exchange, ask: AskShard, program: PartProgram, parts: Mapping[int, Peer],
        meta: Mapping[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        self._exchange, self._ask_shard, self._program, self._parts = exchange, ask, program, parts
        self._here, self._first = int(program.meta["part"]), int(meta["round"])
        self._worker, self._floor, self._steps = int(meta["worker"]), int(meta["floor"]), meta["steps"]
        self._feeds, self.rounds = iter(tensors), range(self._first, self._first + len(meta["steps"]))
        self.found: list[list[torch.Tensor | None]] = []  # of each computed step
        self.seconds = 0.0
        self.failure: Failure | None = None

    @property
    def answer(self) -> Ok:
        """The fetches of all steps that were computed, and the failure that ended the window."""
        facts: dict[str, Any] = {"some": [[value is not None for value in out] for out in self.found]}
        facts["timings"] = {"compute": self.seconds / max(1, len(self.found))}
        if self.failure is not None:
            facts["failure"] = outcome_header(self.failure)
        return Ok(facts, [value for out in self.found for value in out if value is not None])

    def take(self, compute: Compute) -> None:
        """Take all steps, in a thread that may wait; what fails is kept as the window's failure."""
        try:
            for number, step in zip(self.rounds, self._steps, strict=True):
                self._take(compute, number, step)
        except Exception as error:
            self.failure = missed(failed(error, self._exchange.name), error)

    def _take(self, compute: Compute, number: int, step: Mapping[str, Any]) -> None:
        inbox: queue.SimpleQueue[StageWord | BaseException] = queue.SimpleQueue()
        joined: list[Peers] = []

        def meet(failed: Callable[[BaseException], None]) -> Peers:
            def both(cause: BaseException) -> None:
                inbox.put(cause)
                failed(cause)

            joined.append(self._exchange.begin(number, self._parts, both))
            return joined[0]

        try:
            begin = time.monotonic()
            out, pushes = compute(lambda: self._computed(step, meet))
            self.seconds += time.monotonic() - begin
            for push in pushes:
                self._stage(push, number, int(step["run_index"]))
            compute(lambda: self._agree(number, joined[0], inbox))
            self.found.append(out)
            for shard in {push.shard for push in pushes}:
                self._ask(shard, "commit", {**self._round(number), "workers": [self._worker]}, op=commit_of(number))
        except BaseException as error:
            self._exchange.end(number, error)
            raise
        self._exchange.end(number)

    def _computed(self, step: Mapping[str, Any], meet: Any) -> tuple[list[torch.Tensor | None], list[Push]]:
        """The part's fetches and pushes. Variables are read where they lie, and let go of, to be written in place."""
        values: dict[str, torch.Tensor] = {}
        for shard, keys in self._program.reads.items():
            answer = self._ask(shard, "pull", {"keys": keys})
            values.update(zip(keys, answer.tensors, strict=True))
        tensors = [next(self._feeds) for _ in range(int(step["feeds"]))]
        feeds = self._program.fed(tensors, step)
        return self._program.run(feeds, values, int(step["run_index"]), self._exchange.name, meet=meet)

    def _round(self, number: int) -> dict[str, int]:
        return {"round": number, "floor": self._floor}

    def _stage(self, push: Push, number: int, run_index: int) -> None:
        """Let the shard compute the write."""
        about = {"round": number, "worker": self._worker, "rows": 1, "run_index": run_index, "plan": push.plan}
        self._ask(push.shard, "stage", about, push.sent)
        self._ask(push.shard, "prepare", {**self._round(number), "workers": [self._worker]})

    def _agree(self, number: int, peers: Peers, inbox: queue.SimpleQueue[StageWord | BaseException]) -> None:
        """Return when all stages have prepared the step. Raises the error that ends the round."""
        agreement = Agreement(self._here, sorted(self._parts))
        for word in agreement.awaited:
            edge = GO if word.is_go else READY
            peers.want(edge, (word.stage,), partial(_put, inbox, word))
        effects = agreement.prepared()
        while True:
            for effect in effects:
                match effect:
                    case TellStage(to, word):
                        peers.tell(GO if word.is_go else READY, to, (word.stage,), None, None)
                    case WriteStep():
                        return
            found = None
            while found is None:  # a call that is stopped ends between two looks
                with suppress(queue.Empty):
                    found = inbox.get(timeout=LOOK)
            if isinstance(found, BaseException):
                raise found
            effects = agreement.heard(found)

    def _ask(
        self, shard: int, method: str, meta: Mapping[str, Any], tensors: Sequence[torch.Tensor] = (),
        op: OpId | None = None,
    ) -> Ok:  # fmt: skip
        """The answer of the shard here. Raises its failure."""
        answered: Future[Outcome] = Future()

        def reply(answer: Outcome) -> None:
            with suppress(Exception):  # the first answer counts
                answered.set_result(answer)

        self._ask_shard(Ask(shard, method, meta, tensors, op), reply)
        try:
            answer = answered.result(GIVEN_UP)
        except TimeoutError:
            raise DeadlineExceeded(f"shard {shard} did not answer {method!r} within {GIVEN_UP:g} s") from None
        match answer:
            case Ok():
                return answer
            case Failure():
                raise raised(answer)
        raise StepAborted(f"shard {shard} refused {method!r}: {getattr(answer, 'message', answer)}")
