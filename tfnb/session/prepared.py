"""A signature of a session, ready to run: its fetches and feeds, code, and handling of results."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, combinations, repeat
from typing import Any, NamedTuple

import torch

from tfnb.errors import Unimplemented, Unsupported
from tfnb.execution.pack_step import PackCode
from tfnb.execution.step_code import StepCode
from tfnb.execution.tiers import tiered as tiers
from tfnb.graph import Graph, Node, Value, Variable
from tfnb.graph.held import overlap
from tfnb.graph.variable_locks import VariableSnapshot
from tfnb.passes import StepGraph, step_graph
from tfnb.passes.flow.pipeline_replicas import replicated
from tfnb.passes.microbatches import Microbatches, in_microbatches
from tfnb.placement.requests import NodeRequest, asked
from tfnb.placement.row_guards import RowGuards
from tfnb.recording.cells.statements import LEFT, Note, left_out
from tfnb.recording.marks.notes import user_level
from tfnb.recording.marks.python_guards import StepGuards, watched
from tfnb.session.breakpoints import stopping
from tfnb.session.divided_feeds import AUTO, DividedFeeder, Division
from tfnb.session.feeding import Feeder
from tfnb.session.printed import line, printing
from tfnb.session.structures import Fetches, fed_by, flat, places_of, structure, value_of, variable_of
from tfnb.state.step_groups import StepGroup


class Look(NamedTuple):
    """Further fetches of a step, and the function that gets their values: of a print or a breakpoint of its graph."""

    wanted: tuple[Value, ...]
    see: Callable[[Sequence[Any]], None]
    stops: bool = False  # it sees them before the step commits, and may raise; else when the step is over


@dataclass(slots=True)
class PreparedRun:
    """One signature, ready to run."""

    code: StepCode
    feeder: Feeder
    values: tuple[Value, ...]
    rebuild: Callable[[Sequence[Any]], Any]  # what a run gives, of its results; prints what is to be printed
    structured: Callable[[Sequence[Any]], Any]  # the same of values without those of ``looks``
    trailing: tuple[Variable, ...]  # variables fetched as such: their value after the step
    version: int
    asked: tuple[NodeRequest, ...] = ()  # nodes that ask for a place
    looks: Sequence[Look] = ()  # whose values are fetched behind ``values``
    direct: Callable[..., list[Any] | None] | None = None  # the whole step, where nothing is in the way
    guarded: tiers.GuardedCode | None = None  # what that is of
    python: StepGuards | None = None  # what the recordings read of Python, which no run may find changed
    default: torch.dtype = field(default_factory=torch.get_default_dtype)  # the code is for: `tfnb.passes.fractions`

    def is_of(self, graph: Graph) -> bool:
        """Whether the signature matches the graph's version and torch's current default dtype."""
        return self.version == graph.version and self.default is torch.get_default_dtype()

    def ensure_fresh(self) -> None:
        """Raise StaleNode if recorded Python state has changed; warn of lesser changes."""
        if self.python is not None:
            self.python.check(_warn)

    @property
    def stops(self) -> bool:
        """Whether a breakpoint may stop the step."""
        return bool(self.looks) and any(look.stops for look in self.looks)

    @property
    def is_plain(self) -> bool:
        """Whether the signature needs nothing beside the step itself."""
        return not (self.trailing or self.asked or self.feeder.repeats or self.stops)

    @property
    def see(self) -> Callable[[Sequence[Any]], None] | None:
        """`look`, where a breakpoint may stop the step."""
        return self.look if self.stops else None

    def of_group(self, group: StepGroup) -> StepGroup:
        """The same for steps of a training, whose values are stacked; each of them prints."""
        if not group.steps:
            return group
        if self.looks:
            for results in group.each():
                self.rebuild([*results, *repeat(None, len(self.trailing))])
        shown = [variable.value().unsqueeze(0) for variable in self.trailing]  # such steps come one at a time
        return group._replace(values=self.structured([*group.values[: len(self.values)], *shown]))

    def look(self, results: Sequence[Any]) -> None:
        """Show breakpoints their values, before the step commits."""
        __tracebackhide__ = True
        for look, start, end in _placed(self.looks, len(self.values)):
            if look.stops:
                look.see(results[start:end])

    def after(self, cut: VariableSnapshot | None = None) -> list[torch.Tensor]:
        """The values of the fetched Variables after the step; unwritten ones come from the snapshot."""
        copies, writes = {} if cut is None else cut.copies, self.code.step.writes
        return [v.value() if v in writes or v not in copies else copies[v] for v in self.trailing]


def prepare(
    graph: Graph, fetches: Fetches, feed_keys: tuple[Any, ...], code: Callable[[StepGraph], StepCode]
) -> PreparedRun:  # fmt: skip
    """Resolve fetches and feeds; ``code`` makes the code of the step."""
    version = graph.version
    leaves: list[Any] = []
    nested = structure(fetches, leaves)
    variables = [variable_of(graph, leaf) for leaf in leaves]
    trailing = tuple(variable for variable in variables if variable is not None)
    values = tuple(value_of(graph, leaf) for leaf, var in zip(leaves, variables, strict=True) if var is None)
    at = places_of([variable is not None for variable in variables])
    if trailing:
        structured = lambda results: nested([results[p] for p in at])  # noqa: E731
    else:
        structured = type(fetches) if flat(fetches, leaves) else nested
    feeder = Feeder(graph, [(key, fed_by(graph, key)) for key in feed_keys])
    step = step_graph(graph, values, feeder.values)
    _warn_left_out(step)
    _refuse_overlaps(step)
    looks = [Look(node.inputs, partial(_print, node)) for node in printing(step)]
    step = step.also(value for look in looks for value in look.wanted)
    stops = [Look(tuple(stop.wanted.values()), stop.ensure_passed, stops=True) for stop in stopping(step)]
    step = step.also(value for stop in stops for value in stop.wanted)
    looks = [*looks, *stops]
    rebuild = partial(_looked, looks, structured, len(values)) if looks else structured
    feeder.narrow(step.graph.nodes)
    made = code(step)
    places = () if made.is_cut else asked(step.graph.nodes)  # of a step in parts each place is there
    return PreparedRun(
        made, feeder, values, rebuild, structured, trailing, version, places, looks,
        python=watched(graph.attached, step.graph.nodes),
    )  # fmt: skip


def prepare_divided(
    graph: Graph, fetches: Fetches, feed_keys: tuple[Any, ...], code: Callable[[StepGraph], StepCode],
    division: Division, packs: Callable[[StepGraph], Any] | None = None,
) -> PreparedRun:  # fmt: skip
    """`prepare` for a step over microbatches. Raises Unimplemented if a breakpoint or a print takes part in the step.

    packs: what makes the code of a step that divides itself into microbatches, and into packs.
    """
    microbatches, schedule, replicas = division
    made: list[Microbatches] = []
    guards: list[RowGuards] = []

    def divided(step: StepGraph) -> StepCode:
        guards.append(RowGuards.of(step))
        most = microbatches if schedule and microbatches != AUTO else 1
        made.append(replicated(in_microbatches(step, most, schedule), replicas))
        return code(made[0].step) if packs is None else packs(step)

    prepared = prepare(graph, fetches, feed_keys, divided)
    if prepared.looks:
        raise Unimplemented("a breakpoint looks at a step as a whole, and microbatches have none: remove it")
    if made[0].moved:
        names = ", ".join(variable.name for variable in made[0].moved)
        _warn(
            f"the step writes {names} itself, not along a gradient: with microbatches={microbatches!r} it is written "
            "once for each of them, in their order, from the rows of that one"
            + (f"; of replicas={replicas} the writes of the first one count" if replicas > 1 else "")
        )
    chosen = prepared.code.quickest if microbatches == AUTO and isinstance(prepared.code, PackCode) else None
    feeder = DividedFeeder(prepared.feeder, guards[0], made[0].divided, microbatches, chosen, replicas)
    return replace(prepared, feeder=feeder)  # type: ignore[arg-type]


def _warn(note: str) -> None:
    warnings.warn(note, stacklevel=user_level(None))


def _refuse_overlaps(step: StepGraph) -> None:
    """Raise Unsupported where the step writes memory that two of its Variables share: one would undo the other."""
    by_memory: dict[int, list[tuple[Variable, torch.Tensor]]] = {}
    for variable in step.variables:
        tensor = None if variable.held is None else variable.held.tensor()
        if tensor is not None and tensor.layout is torch.strided:
            by_memory.setdefault(tensor.untyped_storage().data_ptr(), []).append((variable, tensor))
    written = set(step.writes)
    for one, other in chain.from_iterable(combinations(each, 2) for each in by_memory.values()):
        if (one[0] in written or other[0] in written) and overlap(one[1], other[1]):
            raise Unsupported(
                f"{one[0].name} and {other[0].name} are two Parameters or buffers in the same memory, which the step "
                "writes: use one object in both places (b.weight = a.weight), and its transpose as a.weight.t()"
            )


def _warn_left_out(step: StepGraph) -> None:
    """Warn once of writes in a block of the step that the step leaves out."""
    notes: list[Note] = step.whole.attached.get(LEFT, [])
    for note in left_out(notes, step.graph.contents):
        notes.remove(note)
        warnings.warn(str(note), stacklevel=user_level(None))


def same_step(old: StepGraph, new: StepGraph) -> bool:
    """Whether code of the one computes the other."""
    is_same = old.fetches == new.fetches and old.feeds == new.feeds and old.graph.seed == new.graph.seed
    return is_same and old.graph.nodes == new.graph.nodes


def _placed(looks: Sequence[Look], start: int) -> Iterator[tuple[Look, int, int]]:
    """Each with where its values begin and end among the results."""
    for look in looks:
        yield look, start, (start := start + len(look.wanted))


def _looked(looks: Sequence[Look], rebuild: Callable[[Sequence[Any]], Any], start: int, results: Sequence[Any]) -> Any:
    """``rebuild`` for the results without the fetches of looks; prints are made, since the step is over."""
    end = start
    for look, begin, end in _placed(looks, start):
        if not look.stops:
            look.see(results[begin:end])
    return rebuild([*results[:start], *results[end:]])


def _print(node: Node, values: Sequence[Any]) -> None:
    print(line(node, values))  # noqa: T201  the user asked for it
