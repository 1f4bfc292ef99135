"""State that a session saves and restores, of one moment: Variables, queues, positions of sources, optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from tfnb.cluster.connected import connected
from tfnb.errors import InvalidArgument, InvalidType
from tfnb.graph import Contents, Graph, Variable, lazy_memory
from tfnb.graph.forms.serial import graph_hash
from tfnb.graph.queue import Queue
from tfnb.graph.subgraph import queues_of
from tfnb.graph.variable_locks import LOCKS, versions
from tfnb.interrupts import no_interrupt
from tfnb.recording.marks.notes import user_level
from tfnb.session.checkpoint_graphs import settable
from tfnb.session.step_runner import StepRunner
from tfnb.state import checkpoint, param_groups, queue_contents
from tfnb.state.input_sources import Source
from tfnb.state.queue_contents import QueueSnapshot
from tfnb.state.queue_elements import QueueElements
from tfnb.state.queues import TensorQueue
from tfnb.state.source_puts import position_behind, standing
from tfnb.state.steps_taken import StepsTaken, StepsThere, TakenSteps

if TYPE_CHECKING:
    from tfnb.cluster.driver import Cluster

_NO_QUEUES: Mapping[str, QueueSnapshot] = MappingProxyType({})
_OF_OPTIMIZERS = "optimizers", "schedulers"  # positions that only a whole restore takes


class Moment(NamedTuple):
    """A session's state at one moment: values and queue contents by label, and its `positions`.

    ``pinned``: values held by servers, which are not among these.
    """

    values: Mapping[str, torch.Tensor]
    positions: Mapping[str, Any]
    queues: Mapping[str, QueueSnapshot]
    pinned: checkpoint.ShardWriter | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(one.nbytes for one in self.values.values()) + sum(one.nbytes for one in self.queues.values())

    def copy(self) -> Moment:
        """The same in memory of its own."""
        values = {label: lazy_memory.clone(value) for label, value in self.values.items()}
        return self._replace(values=values, queues={label: one.copy() for label, one in self.queues.items()})


class NewerCheckpoint(NamedTuple):
    """A checkpoint newer than the values here: its file; and, as of the loss, the steps of the training and the number
    of writes of each Variable, by which later writes are noticed.
    """

    file: Path | str
    trained: int
    versions: Mapping[Variable, int]


@dataclass
class Inputs:
    """Inputs shared by the sessions of a graph.

    sources: by name; positions: restored ones of sources not known yet. queues: those that no node uses; contents:
    restored ones, by label, of queues not known yet. schedulers: of torch optimizers; states: restored ones, by label,
    of schedulers not known yet. trained: steps of an unfinished training of `fit`; ended: so many at the last end of an
    epoch, with validation and callbacks; training: the one in progress. ahead: a checkpoint newer than the values here,
    after the loss of the cluster that had newer ones.
    """

    sources: dict[str, Source] = field(default_factory=dict)
    positions: dict[str, dict[str, int]] = field(default_factory=dict)
    queues: WeakKeyDictionary[Queue, None] = field(default_factory=WeakKeyDictionary)
    contents: dict[str, queue_contents.SavedQueue] = field(default_factory=dict)
    schedulers: list[Any] = field(default_factory=list)
    states: dict[str, Any] = field(default_factory=dict)
    trained: int = 0
    ended: int = 0
    has_gaps: bool = False  # other steps than the first ones are among those
    training: StepsTaken | None = None
    ahead: NewerCheckpoint | None = None


class SavedState:
    """The state written by `Session.save` and read by `restore`: Variables, queues, positions of sources and random
    streams.

    The sessions of a graph share `Inputs`; ``steps``, which numbers its runs, and ``cluster``, if it has one of
    its own, are of one session.
    """

    def __init__(self, graph: Graph, steps: StepRunner, cluster: Cluster | None) -> None:
        self._graph, self._steps, self._cluster = graph, steps, cluster
        self.inputs: Inputs = graph.attached.setdefault("inputs", Inputs())
        self._hashed: tuple[Contents, str] | None = None

    def save(self, path: str | Path) -> checkpoint.Checkpoint:
        """Write the state to one file, as of one moment: `Session.save`."""
        variables, about, tensors, _ = self.unwritten()
        return checkpoint.save(path, variables, about, tensors)

    def unwritten(self, *, pins: bool = False) -> checkpoint.Unwritten:
        """The state to `save`, in memory, of one moment. pins: without values pinned by servers, which write them."""
        moment = self.moment(pins=pins)
        with checkpoint.released_on_error(moment.pinned):
            return self._unwritten(moment)

    def _unwritten(self, moment: Moment) -> checkpoint.Unwritten:
        queued, tensors = queue_contents.written(self._queues(), moment.queues)
        for label, (facts, kept) in self.inputs.contents.items():
            if label not in queued:
                queued[label], tensors = facts, tensors | kept
        if self._hashed is None or self._hashed[0] is not self._graph.contents:
            self._hashed = self._graph.contents, graph_hash(self._graph.contents)
        about = {"graph": self._graph.name, "graph_hash": self._hashed[1], **moment.positions, "queues": queued}
        return checkpoint.Unwritten(moment.values, about, tensors, moment.pinned)

    def moment(self, *, pins: bool = False) -> Moment:
        """Copies of all that `save` writes, of one moment; with ``pins`` values stay on the servers that have them."""
        while True:
            training = self.inputs.training
            with self._standing(training):
                found = self._moment(training, pins)
                if self.inputs.training is training:  # else another thread began, or ended, one
                    return found
            if found.pinned is not None:
                found.pinned.release()

    @contextmanager
    def _standing(self, training: StepsTaken | None) -> Iterator[None]:
        """A block in which no element is in transit to a queue or drawn by a training."""
        source = None if training is None else training.source
        drawn = source.standing() if isinstance(source, QueueElements) else nullcontext()
        with standing(self.inputs.sources.values()), drawn:
            yield

    def _moment(self, training: StepsTaken | None, pins: bool) -> Moment:
        variables, queues, pinned = self._graph.contents.variables, self._queues(), None
        if (cluster := connected(self._cluster)) is not None:
            values, there, step, pinned = cluster.cut(variables, queues.values(), pins=pins)
            with checkpoint.released_on_error(pinned):
                held = {label: there[queue] for label, queue in queues.items()}
                taken = training.at(step) if isinstance(training, StepsThere) else None
                positions = self._positions_behind(taken, held)
        else:
            with LOCKS.read(*variables.values()):  # no step in between
                values = {label: variable.value() for label, variable in variables.items()}
                held = queue_contents.held_by(queues)
                taken = None if training is None else training.applied
                positions = self._positions_behind(taken, held)
        source = None if training is None else training.source
        if taken is not None and isinstance(source, QueueElements):
            return Moment(values, positions, self._with_drawn(held, source, taken), pinned)
        return Moment(values, positions, held, pinned)

    def _with_drawn(
        self, held: Mapping[str, QueueSnapshot], source: QueueElements, taken: TakenSteps
    ) -> Mapping[str, QueueSnapshot]:
        """The same, with the elements that a training drew and no step counts of."""
        if taken.position is None:
            return held
        back, queues = source.after(taken.position), self._queues()
        return {
            label: queue_contents.in_front(queues[label], one, back) if queues[label] is source.queue else one
            for label, one in held.items()
        }

    def go_back(self, moment: Moment) -> None:
        """Restore a moment, all or nothing; Variables and queues made since stay unchanged.

        One note tells which hyperparameters of torch optimizers changed, and another one names the schedulers that
        stay as they are.
        """
        variables, queues = settable(self._graph), self._queues()
        values = {variables[label]: value for label, value in moment.values.items() if label in variables}
        held = {label: one for label, one in moment.queues.items() if label in queues}
        for name, position in moment.positions.get("sources", {}).items():
            if (source := self.inputs.sources.get(name)) is not None:
                source.ensure_position(position)
        optimizers, schedulers = self._optimizers(), param_groups.labelled(self.inputs.schedulers)
        groups, states = (moment.positions.get(name, {}) for name in _OF_OPTIMIZERS)
        for label, optimizer in optimizers.items():
            param_groups.ensure_alike(label, optimizer, groups.get(label))
        for label, scheduler in schedulers.items():
            param_groups.ensure_alike(label, scheduler.optimizer, states.get(label, {}).get("groups"))
        with standing(self.inputs.sources.values()), self._restoring(values, queues, held) as become, no_interrupt():
            become()
            self.went_on()
            self.go_to(moment.positions)
            changes = {
                label: param_groups.write_back(one, groups[label])
                for label, one in optimizers.items()
                if label in groups
            }
            loaded = [one for label, one in schedulers.items() if label in states]
            for label in schedulers.keys() & states.keys():
                param_groups.load_state(schedulers[label], states[label])
            if "schedulers" in moment.positions:
                self.inputs.states = {label: state for label, state in states.items() if label not in schedulers}
        if changed := [f"{label}: {', '.join(lines)}" for label, lines in changes.items() if lines]:
            text = "; ".join(changed)
            warnings.warn(f"restored the param groups: {text}", stacklevel=user_level(None))
        unloaded = [self._unloaded(label, optimizers[label], lines, loaded) for label, lines in changes.items()]
        if text := "; ".join(filter(None, unloaded)):
            warnings.warn(text, stacklevel=user_level(None))

    @contextmanager
    def _restoring(
        self, values: Mapping[Variable, torch.Tensor], queues: Mapping[str, Queue], held: Mapping[str, QueueSnapshot]
    ) -> Iterator[Callable[[], None]]:
        """A block whose callable restores Variables and queues; everything that may fail fails before."""
        for variable, value in values.items():
            variable.ensure_fits(value)
        if (cluster := connected(self._cluster)) is not None:
            with cluster.restoring(values, {queues[label]: one for label, one in held.items()}) as become:
                yield become
            return
        hold = queue_contents.ready_to_hold(queues, held)

        def become_here() -> None:
            for variable, value in values.items():
                variable.set(value)
            hold()

        with LOCKS.write(*values):
            yield become_here

    def _optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The torch optimizers whose steps the graph takes, by label."""
        leading = (variable.leads for variable in self._graph.contents.variables.values())
        return param_groups.labelled(dict.fromkeys(twin.optimizer for twin in leading if twin is not None))

    def _unloaded(self, label: str, optimizer: torch.optim.Optimizer, changes: list[str], loaded: list[Any]) -> str:
        """The note on schedulers of an optimizer that did not get their saved state; empty for none."""
        others = [one for one in param_groups.at_work(optimizer) if not any(one is known for known in loaded)]
        is_to_come = any(line.startswith("initial_lr") for line in changes)  # it was made there, and was not here
        if not others and (loaded or not is_to_come):
            return ""
        kinds = [type(one).__name__ for one in others]
        reads = f"tfnb.Session({self._graph.name!r}).reads(scheduler)"
        saved = [name for name in self.inputs.states if name.startswith(tuple(kinds)) or not kinds]
        if saved:
            how = f"{reads} gives it the state that the file holds"
        else:
            how = (
                "load it, scheduler.load_state_dict(state), as you saved scheduler.state_dict(); with "
                f"{reads} before them save and restore do so"
            )
        named = " and ".join(kinds or saved) or "its scheduler"
        return f"restored the param groups of {label}, but not the state of {named}: {how}"

    def _queues(self) -> dict[str, Queue]:
        """The existing queues, by label."""
        everyone = [*queues_of(self._graph.nodes), *self.inputs.queues]
        return queue_contents.labelled(queue for queue in everyone if not getattr(queue, "gone", ""))

    @property
    def positions(self) -> dict[str, Any]:
        """Where its random streams, sources and training are, as a dict for JSON."""
        training = self.inputs.training
        return self._positions_behind(None if training is None else training.applied)

    def _positions_behind(
        self, taken: TakenSteps | None, held: Mapping[str, QueueSnapshot] = _NO_QUEUES
    ) -> dict[str, Any]:
        """Positions behind the counted steps of a training, and behind the contents of queues."""
        marks = [one.marks for one in held.values()]
        inputs, training = self.inputs, self.inputs.training
        sources = inputs.positions | {name: position_behind(one, marks) for name, one in inputs.sources.items()}
        kept = TakenSteps(inputs.trained, None, self._steps.runs.next, not inputs.has_gaps)
        trained, position, run, is_whole = taken or kept
        is_read = training is not None and not isinstance(training.source, QueueElements | None)
        if position is not None and is_read:
            sources[training.source.name] = position  # type: ignore[union-attr]
        return {
            "streams": {"seed": self._graph.seed, "runs": run}, "sources": sources,
            "training": {"steps": trained, "ended": inputs.ended} | ({} if is_whole else {"gaps": True}),
            **self._of_optimizers(),
        }  # fmt: skip

    def _of_optimizers(self) -> dict[str, Any]:
        """Hyperparameters of torch optimizers and states of schedulers, by label."""
        groups = {label: param_groups.groups_of(one) for label, one in self._optimizers().items()}
        schedulers = param_groups.labelled(self.inputs.schedulers)
        states = self.inputs.states | {label: param_groups.state_of(one) for label, one in schedulers.items()}
        return {name: facts for name, facts in zip(_OF_OPTIMIZERS, (groups, states), strict=True) if facts}

    def go_to(self, positions: Mapping[str, Any]) -> None:
        """Go on from where `positions` of this session, or of a file, says."""
        if streams := positions.get("streams"):
            self._graph.seed, self._steps.runs.next = streams["seed"], streams["runs"]
        training = positions.get("training", {})
        self.inputs.trained, self.inputs.has_gaps = training.get("steps", 0), bool(training.get("gaps"))
        self.inputs.ended = training.get("ended", self.inputs.trained)  # of an older file nobody knows more
        self.inputs.positions |= positions.get("sources", {})
        for source in self.inputs.sources.values():
            self.reads(source)

    def restore(
        self, path: str | PathLike[str], *, strict: bool = True, mapping: Mapping[str, str] | None = None
    ) -> None:
        """Load the state from a file, all or nothing: `Session.restore`."""
        keys = dict(mapping or {})
        here = ((label, variable) for label, variable in settable(self._graph).items() if variable.initialized)
        saved, about = checkpoint.load(path, {keys.get(label, label): variable.kept for label, variable in here})
        tensors, held = queue_contents.split(saved, about.get("queues", ()))
        if not strict or mapping:
            about = {name: facts for name, facts in about.items() if name not in _OF_OPTIMIZERS}
        else:
            older = {} if "optimizers" in about else param_groups.of_older_files(tensors, self._optimizers())
            about = {"optimizers": older, "schedulers": {}} | about
        specs = {label: variable.spec for label, variable in settable(self._graph).items()}
        values = checkpoint.match(tensors, specs, strict=strict, mapping=mapping)
        queues = self._queues() if "queues" in about else {}
        needed = set(queues_of(self._graph.nodes)) if strict else ()
        found = queue_contents.match(about.get("queues", {}), held, queues, needed=needed)
        self.go_back(Moment(values, about, found))
        self.inputs.contents = queue_contents.others(about.get("queues", {}), held, queues)

    def reads(self, source: object) -> None:
        """Keep the position of a source, the contents of a queue or the state of a scheduler: `Session.reads`."""
        if param_groups.is_scheduler(source):
            self._goes_by(source)
            return
        if isinstance(source, TensorQueue):
            self.inputs.queues[source] = None
            for label, queue in self._queues().items():
                if queue is source and (saved := self.inputs.contents.get(label)) is not None:
                    one = {label: queue}
                    found = queue_contents.match({label: saved.facts}, saved.tensors, one, needed=one.values())
                    with self._restoring({}, one, found) as become, no_interrupt():
                        become()
                        del self.inputs.contents[label]
            return
        if not isinstance(source, Source):
            raise InvalidType(
                f"Session.reads takes a Source, a queue or a scheduler of a torch optimizer, and was given a "
                f"{type(source).__name__}"
            )
        if self.inputs.sources.setdefault(source.name, source)._root is not source._root:
            raise InvalidArgument(
                f"this session reads another source named {source.name!r}: their positions are saved by name, so give "
                "each a name= of its own"
            )
        if (position := self.inputs.positions.pop(source.name, None)) is not None:
            source.seek(position)

    def _goes_by(self, scheduler: Any) -> None:
        """A scheduler sets learning rates of the session's optimizers."""
        param_groups.state_of(scheduler)  # raises for what no file can hold
        schedulers = self.inputs.schedulers
        if not any(one is scheduler for one in schedulers):
            schedulers.append(scheduler)
        label = next(name for name, one in param_groups.labelled(schedulers).items() if one is scheduler)
        if (saved := self.inputs.states.get(label)) is not None:
            param_groups.ensure_alike(label, scheduler.optimizer, saved["groups"])
            param_groups.load_state(scheduler, saved)
            del self.inputs.states[label]

    @property
    def trained(self) -> int:
        """Steps of a training of `fit` that is not at its end."""
        training = self.inputs.training
        return self.inputs.trained if training is None else training.applied.steps

    @property
    def resumed(self) -> int:
        """The step after which a stopped training resumes; 0 if earlier steps are missing."""
        return 0 if self.inputs.has_gaps else self.trained

    @property
    def ahead(self) -> Path | str | None:
        """The checkpoint with which a training goes on that lost its cluster, unless values were written since then."""
        if (ahead := self.inputs.ahead) is None:
            return None
        now = self.inputs.trained, versions(ahead.versions)
        return ahead.file if (ahead.trained, ahead.versions) == now else None

    def fell_behind(self, file: Path | str, trained: int) -> None:
        """A training lost its cluster after a checkpoint that is newer than the values here."""
        self.inputs.ahead = NewerCheckpoint(file, trained, versions(settable(self._graph).values()))

    def went_on(self) -> None:
        """Values were written, here or on a cluster: no earlier checkpoint is ahead of them any more."""
        self.inputs.ahead = None

    def settle(self, training: StepsTaken, *, is_over: bool = False) -> None:
        """A training stands still: its data and the random numbers go on behind the last step that counts."""
        with no_interrupt():
            steps, position, self._steps.runs.next, is_whole = training.applied
            self.inputs.trained, self.inputs.has_gaps = 0 if is_over else steps, not (is_over or is_whole)
            if training.source is not None and position is not None and not is_over:
                training.source.back_to(position)
            if self.inputs.training is training:
                self.inputs.training = None
