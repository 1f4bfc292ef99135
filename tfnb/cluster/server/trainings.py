"""Trainings on a shard: rounds that commit without the notebook, and the clocks of loops; see `courses`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tfnb.cluster.server.core_events import Send
from tfnb.cluster.server.courses import HOLD, Course, OpenRound
from tfnb.cluster.server.ledger import Ledger
from tfnb.cluster.server.parts import PartWriter
from tfnb.cluster.wire.messages import Ok, Refusal, Request


class Trainings:
    """The open trainings of one shard."""

    def __init__(self, shard: PartWriter, ledger: Ledger) -> None:
        self._shard, self._ledger = shard, ledger
        self.courses: dict[str, Course] = {}
        self._sends: list[Send] = []
        self.decisions = 0  # how often something happened that requests may wait for
        self.methods: dict[str, Callable[[Request], Ok | Refusal]] = {
            "open_training": self.begin, "end_training": self.end, "enter": self.enter, "depart": self.depart,
            "decided": self.decided, "cut": self.cut, "standing": self.standing,
        }  # fmt: skip
        self.timed: dict[str, Callable[[Request, float], Ok | Refusal | None]] = {
            "contribute": self.contribute, "staged": self.staged, "hold": self.hold, "go": self.go,
        }  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of staged parts and averages."""
        return sum(course.nbytes for course in self.courses.values())

    def told(self) -> list[Send]:
        """Pending messages to other shards."""
        sends, self._sends = self._sends, []
        return sends

    def tick(self, now: float) -> None:
        """Write decided rounds whose hold has expired."""
        for course in self.courses.values():
            self._commit_decided(course, now)

    def given_up(self, request: Request) -> Refusal | None:
        """The refusal of a request of a closed training, or of a loop that was given up; else None."""
        training = request.meta.get("training")
        if training is not None and training not in self.courses:
            return Refusal("stale", f"training {training} is over")
        if "loop" in request.meta and request.method in ("push", "pull"):
            loop, course = request.meta["loop"], self._course(request.meta)
            has_clock = "clock" in request.meta or "staleness" in request.meta
            if loop in course.gone or (has_clock and loop not in course.clocks):
                return Refusal("given-up", f"loop {loop} was given up")
        return None

    def is_ahead(self, meta: Mapping[str, Any]) -> bool:
        """Whether a loop reads too far ahead of the slowest one."""
        return "staleness" in meta and self._course(meta).lead(str(meta["loop"])) > int(meta["staleness"])

    def ticked(self, meta: Mapping[str, Any]) -> int:
        """Count an applied step of a loop; returns the loop's lead over the slowest one."""
        course, loop = self._course(meta), str(meta["loop"])
        self.decisions += course.tick(loop, int(meta["clock"]))
        return course.lead(loop)

    def enter(self, request: Request) -> Ok | Refusal:
        """Register a loop that goes to work; answers with its clock."""
        course, loop = self._course(request.meta), str(request.meta["loop"])
        if loop in course.gone:
            return Refusal("given-up", f"loop {loop} was given up")
        self.decisions += 1  # the loop may have been the slowest one
        return Ok({"clock": course.enter(loop, int(request.meta["clock"]))})

    def depart(self, request: Request) -> Ok:
        """Remove the clock of a loop that stands still. With ``gone`` the loop is given up: later calls are refused."""
        course, loop = self._course(request.meta), str(request.meta["loop"])
        course.leave(loop)
        self.decisions += 1  # also for a read of the loop itself, which is refused
        if "gone" in request.meta:
            course.gone.add(loop)
        return self._shard.ack()

    def contribute(self, request: Request, now: float) -> Ok | Refusal | None:
        """Keep a worker's part of a round; answered when the round is written, with current values and whether the part
        counts.

        With ``spare`` workers the first shard also answers with the worker's next place, and answers a copy at once
        while the part of another place is missing. The other shards answer at once: a part kept by them may be a copy
        that the first shard drops.
        """
        meta, course = request.meta, self._course(request.meta)
        number, worker, has_spare = int(meta["round"]), int(meta["worker"]), "spare" in meta
        is_first = self._shard.shard == meta["shards"][0]
        is_wanted = False
        if number > course.latest:
            if number <= course.floor:
                return Refusal("stale", f"round {number} is over; the last one was {course.floor}")
            turn = course.turn(number)
            if "absent" not in meta:
                refused = self._keep(course, turn, request, now)
                if refused is not None:
                    return refused
                is_copy = turn.owners[int(meta["place"])] != worker
                is_wanted = is_copy and not turn.is_whole
            if turn.error is not None:
                raise turn.error
            may_leave = is_wanted if is_first else "absent" not in meta
            if number > course.latest and not (has_spare and may_leave):
                return None
        about = {"latest": course.latest, "counts": course.counted.get(worker, (0, 0))[0] == number}
        if has_spare and is_first:
            about["place"] = course.place_for(worker)
        answer = self._shard.with_values(Ok({**self._shard.ack().meta, **about}), request)
        if meta.get("shown") and course.latest == number:
            answer = replace(answer, meta={**answer.meta, "shown": True}, tensors=[*answer.tensors, *course.averages])
        return answer

    def _keep(self, course: Course, turn: OpenRound, request: Request, now: float) -> Refusal | None:
        """Keep the part of a place that has none yet; the last one makes the round whole.

        Another part for the place is dropped: the answer of `contribute` says that it does not count, and the loop of
        its task adds it to ``late`` of its reports.
        """
        meta, place = request.meta, int(request.meta["place"])
        if place in turn.parts:
            return None
        part = self._shard.part(request)
        if isinstance(part, Refusal):
            return part
        self._shard.afford(part.nbytes)
        course.places = int(meta["places"])
        turn.shown = tuple(map(int, meta.get("shown", turn.shown)))
        turn.add(place, int(meta["worker"]), part, tuple(map(int, meta["shards"])), int(meta["parts"]))
        if turn.is_whole:
            self._make(turn, meta)
            self._commit_decided(course, now)
        return None

    def _make(self, turn: OpenRound, meta: Mapping[str, Any]) -> None:
        """Compute the write of a round, and tell the first shard. The first shard lets the others write when all are
        ready.

        An error is kept, and raised for every contribution.
        """
        try:
            self._compute(turn)
        except Exception as error:
            turn.error = error
            self.decisions += 1
            return
        first, *others = turn.shards
        if self._shard.shard == first:
            turn.ready.add(first)
            decided = {"training": str(meta["training"]), "decided": int(meta["round"])}
            turn.sends = [Send(other, "decided", decided) for other in others]
        else:
            about = {"training": str(meta["training"]), "round": int(meta["round"]), "by": self._shard.shard}
            self._sends.append(Send(first, "staged", about))

    def _compute(self, turn: OpenRound) -> None:
        """The write of a round, in the order of its places."""
        made = self._shard.prepared([turn.parts[place] for place in sorted(turn.parts)])
        turn.write, turn.writes = made.write, made.keys
        turn.averages = tuple(made.feeds[at] for at in turn.shown)
        turn.is_computed, turn.opening = True, self._shard.opening

    def staged(self, request: Request, now: float) -> Ok:
        """Another shard has computed its write of a round."""
        course, number = self._course(request.meta), int(request.meta["round"])
        if number > max(course.latest, course.floor):
            course.turn(number).ready.add(int(request.meta["by"]))
            self._commit_decided(course, now)
        return self._shard.ack()

    def _commit_decided(self, course: Course, now: float) -> None:
        """On the first shard: write the round that all shards are ready for, unless held."""
        number = min(course.turns, default=0)
        if number and course.turns[number].is_decided and now >= course.held_until:
            self._sends += course.turns[number].sends
            self._write(course, number)

    def hold(self, request: Request, now: float) -> Ok:
        """On the first shard: stop commits for a while; answers with the last committed round."""
        course = self._course(request.meta)
        course.held_until = now + HOLD
        return Ok({"latest": course.latest})

    def go(self, request: Request, now: float) -> Ok:
        """On the first shard: end a hold; answers with the last committed round."""
        course = self._course(request.meta)
        course.held_until = 0.0
        self._commit_decided(course, now)
        return Ok({"latest": course.latest})

    def standing(self, request: Request) -> Ok:
        """Answer with the last round written on this shard."""
        return Ok({"latest": self._course(request.meta).latest})

    def cut(self, request: Request) -> Ok:
        """End undecided rounds up to ``upto``; answers with the last round written."""
        course = self._course(request.meta)
        if "decided" in request.meta:
            self.decided(request)
        course.end(int(request.meta["upto"]))
        self.decisions += 1
        return Ok({"latest": course.latest})

    def begin(self, request: Request) -> Ok:
        """Open a training."""
        self.courses.setdefault(str(request.meta["training"]), Course())
        return self._shard.ack()

    def end(self, request: Request) -> Ok:
        """Close a training, and forget the ledgers of its clients: later requests of the training are refused."""
        self.courses.pop(str(request.meta["training"]), None)
        self.decisions += 1
        for client in request.meta["clients"]:
            self._ledger.clients.pop(str(client), None)
        return self._shard.ack()

    def decided(self, request: Request) -> Ok:
        """Write every round that the first shard has decided."""
        course, decided = self._course(request.meta), int(request.meta["decided"])
        for number in sorted(course.turns):
            if number <= decided and course.turns[number].is_computed:
                self._write(course, number)
        return self._shard.ack()

    def _write(self, course: Course, number: int) -> None:
        turn = course.turns.pop(number)
        if turn.write is None or turn.opening != self._shard.opening:  # somebody else wrote since it was computed
            self._compute(turn)
        assert turn.write is not None
        with self._shard.writing(turn.writes):
            turn.write()
        self._shard.step += 1
        course.latest, course.averages = number, turn.averages
        self.decisions += 1
        course.counted |= {worker: (number, place) for place, worker in turn.owners.items()}

    def _course(self, meta: Mapping[str, Any]) -> Course:
        """The open training of a request; requests of closed trainings were refused before."""
        return self.courses[str(meta["training"])]
