"""The end of a loop that the machine of a training asks for: what the machine hears of the last word of the task."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from tfnb.cluster.engine.training import Training, _Listening
from tfnb.cluster.modes import events as e
from tfnb.cluster.modes.leases import LoopEnd
from tfnb.cluster.wire.messages import Ok, Refusal

TASK = 3


class EndingTraining(Training):
    """A training whose tasks answer at once, and whose machine only listens."""

    def __init__(self, last, follower=None):
        self._last, self._follower = last, follower
        self.loop = _Listening("loop")
        self._loops = {TASK: self.loop}
        self.engine = SimpleNamespace(peers=SimpleNamespace(lost=e.TaskLoss))
        self.heard = []

    async def _left(self, task, loop):
        if self._follower is not None:
            self._loops[task] = self._follower
        return self._last

    def feed(self, event):
        self.heard.append(event)


@pytest.mark.parametrize(
    ("last", "event"),
    [
        (Ok({"failure": None}), LoopEnd(TASK)),
        (Ok({"failure": {"status": "failed"}}), LoopEnd(TASK, has_failed=True)),
        (Refusal("stale", "this loop is over"), LoopEnd(TASK)),
        (None, e.TaskLoss(TASK)),
    ],
)
def test_the_machine_hears_how_a_loop_ended(last, event):
    training = EndingTraining(last)
    asyncio.run(training._stopped(TASK, training.loop))
    assert training.heard == [event]
    assert (TASK in training._loops) is (last is None), "a lost task is dropped by the event"


def test_a_task_without_a_loop_has_ended_it():
    training = EndingTraining(None)
    training._loops.clear()
    asyncio.run(training._stopped(TASK, None))
    assert training.heard == [LoopEnd(TASK)]


def test_a_loop_that_was_replaced_meanwhile_was_told_already():
    training = EndingTraining(Ok({"failure": None}), follower=_Listening("next"))
    asyncio.run(training._stopped(TASK, training.loop))
    assert training.heard == [] and training._loops[TASK].name == "next"
