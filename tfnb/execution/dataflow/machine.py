"""The dataflow machine: frames, iterations, dead values. Semantics S-126 to S-133, EuroSys'18 §4.3.

A pure state machine over one `Template` a frame: no thread, clock or queue. `Machine.run` does everything that is
ready, in whatever order it is asked to; what takes long or waits is handed out as `Task`, and comes back with
`Machine.finish`. A value's tag is the iteration it is delivered to, so values of different tags cannot meet. A part of
a graph meets the other parts by its SEND and RECV steps (semantics S-150 to S-152), which fire also when they are dead.
Imports nothing of tfnb.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

WINDOW, WINDOW_BYTES = 256, 64 << 20  # iterations, and bytes, that a loop may be ahead of another part
EACH, EACH_BYTES = 64, 16 << 20  # iterations, or bytes, after which a part says how far it is
ACKNOWLEDGE = -1  # the edge of these messages
CALL, SWITCH, MERGE, ENTER, EXIT, NEXT, SHORT, SINK, WORK, WAIT, SEND, RECV = range(12)
_PASSING = frozenset({SWITCH, MERGE, NEXT, SHORT})
_ENDS = frozenset({EXIT, NEXT})  # a dead value stops there


class Dead:
    """A dead value; ``switch``: number of the Switch that killed the value, ``pred``: its predicate.

    Of a loop that never ran ``switch`` is the number of its Exit, and ``pred`` None.
    """

    __slots__ = ("pred", "switch")

    def __init__(self, switch: int, pred: object = None) -> None:
        self.switch, self.pred = switch, pred


class Peers(Protocol):
    """The other parts of the same graph, in one round of theirs.

    A message has an edge and a tag: (frame, iteration) from the outermost in.
    """

    @property
    def round(self) -> int:
        """The number of the round."""

    def tell(self, edge: int, to: int, tag: tuple[int, ...], value: object, dead: tuple[int, int] | None) -> None:
        """Send a value to part number ``to`` without waiting; of a dead value, `Dead.switch` and `Dead.pred`."""

    def want(self, edge: int, tag: tuple[int, ...], deliver: Callable[[Any, tuple[int, int] | None], None]) -> None:
        """Register ``deliver`` to receive a value once, possibly in another thread."""


class Step:
    """One op of a template.

    call: of the slots from ``base`` to ``stop``, of which the first ``count`` are inputs; gives a tuple with a value
    for each of ``outs``, lists of edges (step, slot). A slot of -1 is a control edge. waits: inputs and control inputs
    until it is ready; of a Merge, control inputs alone. inner: the template that an Enter goes to. constant: an Enter's
    value is there in each iteration. rank: the work that lies behind it. lane: where it runs, if it is WORK. phase: of
    WORK of a stage; a lower one comes before earlier iterations (`tfnb.passes.flow.microbatch_schedules`).
    """

    __slots__ = (
        "base", "call", "constant", "count", "frame", "index", "inner", "kills", "kind", "lane", "none",
        "number", "op", "outs", "phase", "rank", "stop", "to", "waits",
    )  # fmt: skip

    def __init__(self, kind: int, frame: Template, call: Callable[..., Sequence[Any]] | None = None) -> None:
        self.kind, self.frame, self.call = kind, frame, call
        self.outs: list[list[tuple[Step, int]]] = []
        self.kills: list[list[tuple[Step, int]]] = []  # where dead values go
        self.base = self.count = self.stop = self.waits = self.number = self.to = 0
        self.none: list[None] = []
        self.inner: Template | None = None
        self.constant = False
        self.rank = 0.0
        self.phase = 0
        self.lane: str | None = None
        self.op: Any = None  # what the plan says of it
        self.index = len(frame.steps)
        frame.steps.append(self)


class Template:
    """The steps of a frame, and the initial state of each iteration.

    number: of the frame, alike in all parts; place: of the part. to, sources: parts that its iterations send to, and
    receive from.
    """

    __slots__ = ("enters", "exits", "number", "parallel", "pending", "place", "slots", "sources", "steps", "to")

    def __init__(self, parallel: int, number: int = 0, place: int = 0) -> None:
        self.parallel, self.number, self.place = parallel, number, place
        self.to: tuple[int, ...] = ()
        self.sources: tuple[int, ...] = ()
        self.steps: list[Step] = []
        self.enters = 0
        self.exits: list[Step] = []
        self.pending: list[int] = []
        self.slots: list[Any] = []

    def seal(self) -> None:
        """Said when all steps have their inputs."""
        self.pending = [2 * step.waits + 1 if step.kind == MERGE else step.waits for step in self.steps]
        self.exits = [step for step in self.steps if step.kind == EXIT]
        self.to = tuple(sorted({step.to for step in self.steps if step.kind == SEND}))
        self.sources = tuple(sorted({step.to for step in self.steps if step.kind == RECV}))
        for step in self.steps:
            step.none = [None] * step.count
            step.kills = [[edge for edge in edges if edge[0].kind not in _ENDS] for edges in step.outs]


class Iteration:
    """One iteration of a frame: its pending inputs, and its values."""

    __slots__ = ("busy", "children", "dead", "frame", "merged", "number", "pending", "slots")

    def __init__(self, frame: Frame, number: int) -> None:
        self.frame, self.number = frame, number
        template = frame.template
        self.pending, self.slots = template.pending.copy(), template.slots.copy()
        self.busy = 0  # steps that are ready, handed out or waiting
        self.children: dict[Template, Frame] = {}
        self.dead: dict[int, Dead] = {}
        self.merged: dict[int, int] = {}  # dead inputs of each Merge


class Frame:
    """A running loop, started by ``parent``, an iteration of the enclosing frame."""

    __slots__ = ("constants", "enters", "iterations", "left", "next", "parent", "template", "waiting", "window")

    def __init__(self, template: Template, parent: Iteration | None) -> None:
        self.template, self.parent = template, parent
        self.enters = template.enters  # still to come
        self.iterations: dict[int, Iteration] = {}
        self.next = 0
        self.constants: list[tuple[Step, Any]] = []
        self.waiting: list[tuple[Step, Any]] = []  # what goes to an iteration that may not start yet
        self.left: set[int] = set()  # Exits that passed a live value on
        self.window = Window(self) if parent is not None and (template.to or template.sources) else None


class Window:
    """Flow control of a loop that spans parts: how far a part may run ahead of the acknowledgements of the others.

    An iteration needs nothing of later iterations of other parts, so to hold back a later one cannot block it.
    """

    __slots__ = ("acknowledged", "asked", "at", "frame", "held", "sent", "settled", "taken", "told", "unsettled")

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.settled = dict.fromkeys(frame.template.to, -1)  # the last iteration that is over there
        self.sent = dict.fromkeys(frame.template.to, 0)  # bytes in iterations that are not
        self.unsettled: dict[int, deque[tuple[int, int]]] = {to: deque() for to in frame.template.to}
        self.acknowledged = dict.fromkeys(frame.template.to, 0)  # how often they said so
        self.asked: set[int] = set()  # of whom the next word is waited for
        self.held = False  # whether an iteration waits for them
        self.told = self.taken = 0  # how often this part said so; bytes since then
        self.at = -1

    def send(self, to: int, number: int, nbytes: int) -> None:
        """A message of an iteration was sent."""
        self.unsettled[to].append((number, nbytes))
        self.sent[to] += nbytes

    def settle(self, to: int, number: int) -> None:
        """Process a part's acknowledgement of its iterations up to ``number``."""
        self.asked.discard(to)
        self.acknowledged[to] += 1
        self.settled[to] = max(self.settled[to], number)
        messages = self.unsettled[to]
        while messages and messages[0][0] <= number:
            self.sent[to] -= messages.popleft()[1]

    def full(self) -> list[int]:
        """The parts whose acknowledgements the next iteration must await."""
        ahead = self.frame.next
        return [to for to, last in self.settled.items() if ahead - last > WINDOW or self.sent[to] > WINDOW_BYTES]


class Acknowledgement:
    """An acknowledgement by a part of its progress in a loop."""

    __slots__ = ("frame", "to")

    def __init__(self, frame: Frame, to: int) -> None:
        self.frame, self.to = frame, to


class Task:
    """A step handed out: its call on ``args`` is made outside, and the result given back. Less: more urgent."""

    __slots__ = ("args", "iteration", "step")

    def __init__(self, step: Step, iteration: Iteration, args: list[Any]) -> None:
        self.step, self.iteration, self.args = step, iteration, args

    def __lt__(self, other: Task) -> bool:
        return self._key < other._key

    @property
    def _key(self) -> tuple[int, int, float]:
        return self.step.phase, self.iteration.number, -self.step.rank


class Machine:
    """One step of a plan: ``roots``, one for each part, with an iteration each.

    submit: begins what a WAIT step waits for, and gives a key for it, which is the step's last output. peers: the other
    parts; what a RECV step wants comes back as ``arrived(task, value, dead)``, and goes to `came`. ``most``: iterations
    of one frame that were live at once; ``receiving``: RECV steps whose value has not come; ``sent``, ``got``: how many
    messages; ``holding``: loops that wait for other parts to come up with them.
    """

    def __init__(
        self, roots: Sequence[Template], results: int, submit: Callable[[Step, list[Any]], Any] | None = None,
        peers: Peers | None = None, arrived: Callable[[Any, Any, tuple[int, int] | None], None] | None = None,
    ) -> None:  # fmt: skip
        self.submit, self.peers, self.arrived = submit, peers, arrived
        self.ready: deque[tuple[Step, Iteration]] = deque()
        self.results: list[Any] = [None] * results
        self.tasks: list[Task] = []
        self.waits: dict[Any, Task] = {}  # by what ``submit`` gave
        self.most = self.frames = self.receiving = self.sent = self.got = self.holding = 0
        self.at: Step | None = None  # what it does now
        self.roots = [Frame(root, None) for root in roots]
        for root in self.roots:
            self._start(root).busy = 1  # until it was fed

    @property
    def is_over(self) -> bool:
        """Whether everything was done, and no frame or iteration is left."""
        return not any(root.iterations for root in self.roots)

    def feed(self, *given: Sequence[tuple[list[tuple[Step, int]], Any]]) -> None:
        """The values that each root starts with."""
        for root, values in zip(self.roots, given, strict=True):
            first = root.iterations[0]
            for edges, value in values:
                self._send(edges, value, first)
            for step in root.template.steps:
                if step.waits == 0 and step.kind not in (MERGE, EXIT, NEXT):
                    self.ready.append((step, first))
                    first.busy += 1
            self._end(first)

    def finish(self, task: Task, outputs: Sequence[Any]) -> None:
        """The result of a step that was handed out: values for its first outputs."""
        for edges, value in zip(task.step.outs, outputs, strict=False):
            self._send(edges, value, task.iteration)
        self._end(task.iteration)

    def run(self, choose: Callable[[int], int] | None = None) -> None:
        """Run all ready steps. choose: picks the next among so many, by default the first."""
        ready = self.ready
        while ready:
            if choose is not None:
                ready.rotate(-choose(len(ready)))
            step, iteration = ready.popleft()
            self.at = step
            if iteration.dead and step.index in iteration.dead:
                if not self._die(step, iteration, iteration.dead.pop(step.index)):
                    continue
            elif not self._fire(step, iteration):
                continue
            iteration.busy -= 1
            if not iteration.busy:
                self._settle(iteration)

    # -- steps ------------------------------------------------------------------------------------------------

    def _fire(self, step: Step, iteration: Iteration) -> bool:
        """Execute a step; False if the step is not complete afterwards."""
        kind, slots, base, count = step.kind, iteration.slots, step.base, step.count
        if kind == CALL:
            args = slots[base : step.stop]
            slots[base : base + count] = step.none
            for edges, value in zip(step.outs, step.call(*args), strict=False):  # type: ignore[misc]
                self._send(edges, value, iteration)
        elif kind == ENTER:
            self._enter(step, slots[base], iteration)
            slots[base] = None
        elif kind == EXIT:
            frame = iteration.frame
            frame.left.add(step.index)
            assert frame.parent is not None
            self._send(step.outs[0], slots[base], frame.parent)
        elif kind == SINK:
            self.results[step.number] = slots[base] if count else None
        else:
            return self._hand_out(step, iteration)
        return True

    def came(self, task: Task | Acknowledgement, value: Any, dead: tuple[int, int] | None) -> None:
        """Process the value of a RECV step, or a loop's acknowledgement."""
        if isinstance(task, Acknowledgement):
            self._acknowledged(task.frame, task.to, value)
            return
        self.receiving -= 1
        self.got += 1
        if (window := task.iteration.frame.window) is not None:
            window.taken += getattr(value, "nbytes", 0)
        if dead is None:
            self._send(task.step.outs[0], value, task.iteration)
        else:
            self._kill(task.step.kills[0], Dead(*dead), task.iteration)
        self._end(task.iteration)

    def _meet(self, step: Step, iteration: Iteration, dead: Dead | None) -> bool:
        """Execute a SEND, or begin a RECV; False if the step is not complete afterwards."""
        assert self.peers is not None
        tag = _tag(iteration)
        if step.kind == SEND:
            base = step.base
            value, iteration.slots[base] = iteration.slots[base], None
            self.sent += 1
            if (window := iteration.frame.window) is not None:
                window.send(step.to, iteration.number, getattr(value, "nbytes", 0))
            if dead is None:
                assert step.call is not None
                self.peers.tell(step.number, step.to, tag, step.call(value), None)
            else:
                self.peers.tell(step.number, step.to, tag, None, (dead.switch, int(bool(dead.pred))))
            return True
        self.receiving += 1
        assert self.arrived is not None
        self.peers.want(step.number, tag, partial(self.arrived, Task(step, iteration, [])))
        return False

    def _hand_out(self, step: Step, iteration: Iteration) -> bool:
        if step.kind >= SEND:
            return self._meet(step, iteration, None)
        slots, base, count = iteration.slots, step.base, step.count
        task = Task(step, iteration, slots[base : step.stop])
        slots[base : base + count] = step.none
        if step.kind == WORK:
            self.tasks.append(task)
        else:
            assert self.submit is not None
            waits = self.submit(step, task.args)
            self.waits[waits] = task
            self._send(step.outs[-1], waits, iteration)
        return False

    def _enter(self, step: Step, value: object, iteration: Iteration) -> None:
        frame = self._frame(step, iteration)
        frame.enters -= 1
        if not step.constant:
            self._send(step.outs[0], value, frame.iterations[0])
        else:
            frame.constants.append((step, value))
            for live in list(frame.iterations.values()):
                self._send(step.outs[0], value, live)
        first = frame.iterations.get(0)
        if not frame.enters and first is not None and not first.busy:
            self._settle(first)

    def _frame(self, step: Step, iteration: Iteration) -> Frame:
        assert step.inner is not None
        frame = iteration.children.get(step.inner)
        if frame is None:
            frame = iteration.children[step.inner] = Frame(step.inner, iteration)
            self.frames += 1
            self._start(frame)
        return frame

    def _next(self, step: Step, value: object, iteration: Iteration) -> Iteration | None:
        """The iteration that receives a value sent on to the next one; None if the value must wait."""
        frame = iteration.frame
        target = frame.iterations.get(iteration.number + 1)
        if target is None:
            if len(frame.iterations) >= frame.template.parallel or frame.waiting or self._is_ahead(frame):
                frame.waiting.append((step, value))
                return None
            target = self._start(frame)
        return target

    def _start(self, frame: Frame) -> Iteration:
        """The next iteration of a frame, with its constants."""
        iteration = frame.iterations[frame.next] = Iteration(frame, frame.next)
        frame.next += 1
        if len(frame.iterations) > self.most:
            self.most = len(frame.iterations)
        for step, value in frame.constants:
            self._send(step.outs[0], value, iteration)
        return iteration

    # -- values -----------------------------------------------------------------------------------------------

    def _send(self, edges: list[tuple[Step, int]], value: object, iteration: Iteration) -> None:
        """Deliver a value. Forwarding steps (Merge, Switch, NextIteration) and short calls are executed at once."""
        more: list[tuple[list[tuple[Step, int]], Any, Iteration]] = []
        while True:
            pending, slots = iteration.pending, iteration.slots
            for step, slot in edges:
                index, kind = step.index, step.kind
                if slot >= 0:
                    if kind == MERGE and not pending[index] & 1:
                        continue  # it has a live input
                    slots[slot] = value
                left = pending[index] = pending[index] - (2 if kind == MERGE and slot < 0 else 1)
                if left:
                    continue
                if kind not in _PASSING or (iteration.dead and index in iteration.dead):
                    self.ready.append((step, iteration))
                    iteration.busy += 1
                elif kind == SWITCH:
                    more.append(self._switch(step, iteration))
                elif kind == SHORT:
                    (found,) = step.call(*slots[step.base : step.stop])  # type: ignore[misc]
                    more.append((step.outs[0], found, iteration))
                elif kind == NEXT:
                    base = step.base
                    passed, slots[base] = slots[base], None
                    target = self._next(step, passed, iteration)
                    if target is not None:
                        more.append((step.outs[0], passed, target))
                else:
                    which = step.base
                    while slots[which] is EMPTY:
                        which += 1
                    passed, slots[which] = slots[which], None
                    more.append((step.outs[0], passed, iteration))
                    if len(step.outs) > 1:
                        more.append((step.outs[1], which - step.base, iteration))
            if not more:
                return
            edges, value, iteration = more.pop()

    def _switch(self, step: Step, iteration: Iteration) -> tuple[list[tuple[Step, int]], Any, Iteration]:
        """Kill one side; where the value goes on the other."""
        slots, base = iteration.slots, step.base
        value, pred = slots[base], slots[base + 1]
        slots[base] = None
        live = 1 if pred else 0
        if step.kills[1 - live]:
            self._kill(step.kills[1 - live], Dead(step.number, pred), iteration)
        return step.outs[live], value, iteration

    def _kill(self, edges: list[tuple[Step, int]], dead: Dead, iteration: Iteration, *, entering: bool = False) -> None:
        """Send a dead value."""
        pending = iteration.pending
        for step, slot in edges:
            index = step.index
            if step.kind == MERGE and slot >= 0:
                merged = iteration.merged[index] = iteration.merged.get(index, 0) + 1
                if not (entering or merged == step.count) or not pending[index] & 1:
                    continue
                pending[index] -= 1
            else:
                pending[index] -= 2 if step.kind == MERGE else 1
            iteration.dead[index] = dead
            if not pending[index]:
                self.ready.append((step, iteration))
                iteration.busy += 1

    def _die(self, step: Step, iteration: Iteration, dead: Dead) -> bool:
        """Execute a step with a dead input: propagate deadness without computing. False if the step is not complete."""
        if step.kind >= SEND:
            return self._meet(step, iteration, dead)
        iteration.slots[step.base : step.base + step.count] = step.none
        if step.kind == SINK:
            self.results[step.number] = dead
        elif step.kind == ENTER:
            frame = self._frame(step, iteration)
            frame.enters -= 1
            first = frame.iterations.get(0)
            if first is not None:
                self._kill(step.kills[0], dead, first, entering=True)
                if not first.busy:
                    self._settle(first)
        else:
            for edges in step.kills:
                self._kill(edges, dead, iteration)
        return True

    # -- the ends of iterations and frames ----------------------------------------------------------------------

    def _end(self, iteration: Iteration) -> None:
        iteration.busy -= 1
        if not iteration.busy:
            self._settle(iteration)

    def _settle(self, iteration: Iteration) -> None:
        """Free completed iterations, and frames without iterations."""
        while not (iteration.busy or iteration.children):
            frame, number = iteration.frame, iteration.number
            if frame.enters if number == 0 else number - 1 in frame.iterations:
                return
            if frame.iterations.pop(number, None) is None:
                return
            if frame.window is not None:
                self._tell_settled(frame, number)
            if frame.waiting and not self._is_ahead(frame):
                self._resume(frame)
            following = frame.iterations.get(number + 1)
            if following is None and (frame.iterations or frame.waiting or frame.parent is None):
                return
            iteration = following or self._leave(frame)

    def _resume(self, frame: Frame) -> None:
        waiting, frame.waiting = frame.waiting, []
        target = self._start(frame)
        for step, value in waiting:
            self._send(step.outs[0], value, target)

    # -- loops that lie on several parts -------------------------------------------------------------------------

    def _is_ahead(self, frame: Frame) -> bool:
        """Whether the next iteration has to wait until another part has come up; then its word is asked for."""
        window = frame.window
        if window is None or not window.settled:
            return False
        full = window.full()
        for to in full:
            if to not in window.asked:
                window.asked.add(to)
                assert self.peers is not None and self.arrived is not None
                tag = (*_instance(frame), window.acknowledged[to], frame.template.place, to)
                self.peers.want(ACKNOWLEDGE, tag, partial(self.arrived, Acknowledgement(frame, to)))
        self.holding += bool(full) - window.held
        window.held = bool(full)
        return window.held

    def _acknowledged(self, frame: Frame, to: int, number: int) -> None:
        assert frame.window is not None
        frame.window.settle(to, number)
        if not self._is_ahead(frame) and frame.waiting and len(frame.iterations) < frame.template.parallel:
            self._resume(frame)

    def _tell_settled(self, frame: Frame, number: int) -> None:
        """Acknowledge progress in a loop, at intervals, to the parts that send to the loop."""
        window = frame.window
        assert window is not None and self.peers is not None
        if number - window.at >= EACH or window.taken >= EACH_BYTES:
            for source in frame.template.sources:
                tag = (*_instance(frame), window.told, source, frame.template.place)
                self.peers.tell(ACKNOWLEDGE, source, tag, number, None)
            window.at, window.taken, window.told = number, 0, window.told + 1

    def _leave(self, frame: Frame) -> Iteration:
        """A frame without iterations is done: Exits that had no live value pass a dead one."""
        parent = frame.parent
        assert parent is not None
        del parent.children[frame.template]
        for step in frame.template.exits:
            if step.index not in frame.left:
                self._kill(step.kills[0], Dead(step.number), parent)
        return parent


def _instance(frame: Frame) -> tuple[int, ...]:
    """The tag of a frame's loop run: the tag of the enclosing iteration, and the frame's number."""
    return () if frame.parent is None else (*_tag(frame.parent), frame.template.number)


def _tag(iteration: Iteration) -> tuple[int, ...]:
    """(frame, iteration) of each frame around a step, from the outermost in; of the root nothing."""
    path: list[int] = []
    while (frame := iteration.frame).parent is not None:
        path += (iteration.number, frame.template.number)
        iteration = frame.parent
    return tuple(reversed(path))


class _Empty:
    """In a slot of a Merge: no input yet."""


EMPTY = _Empty()
