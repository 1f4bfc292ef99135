"""Windows of steps: whatever fails, stops or is late, all shards write the same steps, and the notebook knows which."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tfnb.cluster.modes import events as e
from tfnb.cluster.modes import windows as w
from tfnb.cluster.wire.messages import Failure

BROKEN = Failure("Internal", "it broke")


class Stage:
    """A stage as the task has it: it computes, prepares, agrees and writes step after step."""

    def __init__(self, here: int, stages: tuple[int, ...], count: int, fails_at: int | None) -> None:
        self.here, self.stages, self.count, self.fails_at = here, stages, count, fails_at
        self.written = self.prepared = 0
        self.inbox: deque[tuple[int, w.StageWord]] = deque()
        self.early: list[tuple[int, w.StageWord]] = []
        self.agreement: w.Agreement | None = None
        self.is_over = False

    def may_act(self) -> bool:
        return not self.is_over and (self.agreement is None or bool(self.inbox))

    def act(self) -> tuple[list[tuple[int, int, w.StageWord]], w.WindowAnswer | None]:
        """Do one thing: messages (to, step, word), and the answer at the end."""
        if self.agreement is None:
            if self.written == self.fails_at:
                self.is_over = True
                return [], w.WindowAnswer(self.here, BROKEN)
            self.agreement = w.Agreement(self.here, self.stages)
            self.prepared = self.written + 1
            self.inbox.extendleft(self.early)
            self.early = []
            return self._carried(self.agreement.prepared())
        step, word = self.inbox.popleft()
        if step > self.written:
            self.early.append((step, word))
            return [], None
        assert step == self.written, "a word of a step that is over"
        assert word in self.agreement.awaited
        return self._carried(self.agreement.heard(word))

    def _carried(self, effects: list[Any]) -> tuple[list[tuple[int, int, w.StageWord]], w.WindowAnswer | None]:
        sent = [(each.to, self.written, each.word) for each in effects if isinstance(each, w.TellStage)]
        if any(isinstance(each, w.WriteStep) for each in effects):
            self.written += 1
            self.agreement = None
            if self.written == self.count:
                self.is_over = True
                return sent, w.WindowAnswer(self.here)
        return sent, None


@given(
    stages=st.integers(1, 5), count=st.integers(1, 6), seed=st.integers(0, 1 << 30),
    fails=st.dictionaries(st.integers(0, 4), st.integers(0, 5), max_size=2),
    stops_after=st.one_of(st.none(), st.integers(0, 60)),
)  # fmt: skip
def test_all_shards_write_the_same_steps_whenever_a_window_ends(
    stages: int, count: int, seed: int, fails: dict[int, int], stops_after: int | None
) -> None:
    order, names = random.Random(seed), tuple(range(stages))
    there = [Stage(at, names, count, fails.get(at)) for at in names]
    machine = w.WindowMachine(names, count)
    on_the_way: list[tuple[int, int, w.StageWord]] = []
    answers: list[w.Event] = []
    todo = machine.on(e.Start(), 0.0)
    assert todo == [w.RunWindow()]
    todo, turns = [], 0
    while not todo:
        turns += 1
        assert turns < 10_000, "it hangs"
        if turns == stops_after:
            todo = machine.on(e.Interrupt(), 0.0)
            break
        choices: list[Any] = [stage for stage in there if stage.may_act()]
        choices += ["message"] * bool(on_the_way) + ["answer"] * bool(answers)
        assert choices, "nothing can go on, and the window is not over"
        match order.choice(choices):
            case "message":
                to, step, word = on_the_way.pop(order.randrange(len(on_the_way)))
                there[to].inbox.append((step, word))
            case "answer":
                todo = machine.on(answers.pop(order.randrange(len(answers))), 0.0)
            case stage:
                sent, answer = stage.act()
                on_the_way += sent
                answers += [] if answer is None else [answer]
        assert max(s.written for s in there) - min(s.written for s in there) <= 1
        assert max(s.written for s in there) <= min(s.prepared for s in there)
    cause: Any = None
    if todo == [w.StopWindow()]:
        cause = machine.cause
        for stage in there:
            stage.is_over = True
        todo = machine.on(w.WindowExit(), 0.0)
        assert todo == [w.AskApplied()]
        todo = machine.on(w.WindowCounts({stage.here: stage.written for stage in there}), 0.0)
        if isinstance(todo[0], w.CommitLast):
            for shard in todo[0].shards:
                assert there[shard].written == todo[0].step < there[shard].prepared
                there[shard].written += 1
            todo = machine.on(w.LastCommit(), 0.0)
    (end,) = todo
    assert isinstance(end, w.WindowEnd) and machine.state == "over"
    assert {stage.written for stage in there} == {end.steps}
    assert end.cause == cause and (cause is not None) == (end.steps < count or stops_after == turns or bool(cause))
    assert machine.on(e.Interrupt(), 0.0) == machine.on(w.WindowAnswer(0, BROKEN), 0.0) == []


@given(st.lists(st.sampled_from(["answer", "failed", "missed", "stopped", "applied", "decided", "lost", "late"])))
def test_a_lost_shard_ends_a_window_in_every_state_and_late_events_change_nothing(names: list[str]) -> None:
    machine = w.WindowMachine((0, 1), 3, deadline=5.0)
    events = {
        "answer": w.WindowAnswer(0), "failed": w.WindowAnswer(1, BROKEN), "missed": w.WindowAnswer(1, BROKEN, True),
        "stopped": w.WindowExit(), "applied": w.WindowCounts({0: 2, 1: 1}), "decided": w.LastCommit(),
        "late": e.Tick(),
    }  # fmt: skip
    ends: list[Any] = []
    machine.on(e.Start(), 0.0)
    for name in names:
        was_over = machine.state == "over"
        found = machine.on(events.get(name, e.ShardLost(1)), 9.0)
        assert not (was_over and found)
        ends += [each for each in found if isinstance(each, w.WindowEnd)]
        if name == "lost" and not was_over:
            assert found == [w.WindowEnd(0, e.ServerLost(1))]
    assert len(ends) == (machine.state == "over")


@given(st.lists(st.floats(0, 100), max_size=30))
def test_windows_grow_by_twice_and_take_about_a_second(seconds: list[float]) -> None:
    sizes = w.WindowSizes()
    for each in seconds:
        steps = sizes.next
        assert 1 <= steps <= w.STEPS
        sizes.took(steps, each)
        assert sizes.next <= 2 * steps
        assert sizes.next == 1 or sizes.next * each / steps <= w.SECONDS + 1e-6
