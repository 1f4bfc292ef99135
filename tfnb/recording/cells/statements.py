"""Assigns statements (writes without a handle) to the steps of their block. Pure functions over nodes.

A *statement* is a write in torch's way (in place, by rebinding, of a module's statistics), or an ``assign``,
``enqueue`` or the like whose handle nobody holds. A *step* is the group that ``opt.step()``, ``minimize`` or
``apply_gradients`` give, or one that holds an in-place update of a trainable Variable. In eager torch a statement
happens with the steps around it, so each belongs to exactly one step of its block: the last one whose update it reads,
else the next one below it, else the last one. The step names it among its ``effects``, and its place in program order
stays. In a block without a step the statistics of modules go with what the modules give, and other statements are
noted. Semantics S-52.

A *guard* holds the outcome of a branch that Python took. Nodes below the branch depend on its guard; a guard below all
steps is given to a step as a statement is. It is given, too, to values above it among which the branch may have chosen
(somebody holds them, and not by the names alone that they had before), where a run of the value needs no further feed,
update or gradient for it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from tfnb.graph import Contents, Node, Ref, SourceLine, Value, Variable
from tfnb.graph.contents import unique
from tfnb.graph.graph import new_id
from tfnb.graph.ops import CALL, DEQUEUE, REGIONS, SIZE, STATEMENT, STEP
from tfnb.graph.subgraph import queues_of, uses_queues

_CURE = "`everything = tfnb.effects()` at the end of the block gives an Operation that runs all its writes and steps"
LEFT = "left out"  # key of what is attached to a graph: notes of statements that belong to no step, not told yet
_TAKEN = frozenset({"tfnb.placeholder", "tfnb.read", "tfnb.constant"})
_GUARD = "tfnb.guard"
_UNSET = "UnboundLocalError"  # of a name that a loop may not have set: it hangs on the value of the name alone
_GIVES_STEP = re.compile(r"[\w.\[\]]+\.(step|minimize|apply_gradients)\([^;]*\)")


class Note(NamedTuple):
    """A note: code of the block that no run executes by itself, and the remedy.

    nodes: those of a statement of a block without a step. is_quiet: no warning is given, as the statement uses a queue
    and is meant to be fetched by itself, or as it is a branch of which another warning tells.
    """

    source: SourceLine | None
    text: str
    nodes: tuple[Node, ...] = ()
    is_quiet: bool = False

    def __str__(self) -> str:
        at = f"{self.source.label} line {self.source.line}" if self.source else "recording"
        return f"{at}: {self.text}"


@dataclass(frozen=True, slots=True)
class BlockStatement:
    """The nodes of one statement: one write, or all writes of a staged branch or loop."""

    nodes: tuple[Node, ...]

    @property
    def is_by_hand(self) -> bool:
        """Whether a node updates a Parameter in place: the Parameter is a key to fetch the update by."""
        return any(_is_update(node) and node.attrs["variable"].held is not None for node in self.nodes)


class UnrunReason(NamedTuple):
    """Why no step of its block runs a statement."""

    source: SourceLine | None
    why: str
    by_hand: str = ""  # how the block updates Parameters beside its steps
    waits: bool = False
    is_named: bool = False  # it has a result, which may be given a name


def attached(
    kept: Sequence[Node], new: Sequence[Node], live: Collection[int], everything: Collection[int] = (),
    calls: Sequence[range] = (), settled: Mapping[int, Collection[int]] = MappingProxyType({}),
) -> tuple[list[Node], list[Note]]:  # fmt: skip
    """The nodes of a block, with statements and guards as effects of its steps; and notes of code that no run executes.

    kept: nodes of other blocks. live: ids of nodes of which somebody holds a handle. everything: ids of the groups that
    `tfnb.effects` gave, which run all writes and steps of the block. calls: ids of the nodes of each outermost call of
    a module. settled: by guard the nodes among which its branch cannot have chosen.
    """
    if not any(is_effect(node) or node.op == _GUARD for node in new):
        return list(new), []
    block = _Block(kept, new, live, everything, calls, settled)
    block.attach()
    nodes = [replace(n, effects=(*n.effects, *block.found[n.id])) if n.id in block.found else n for n in new]
    return [*nodes, *block.groups], block.notes


def left_out(notes: Iterable[Note], run: Contents) -> list[Note]:
    """The notes of statements left out of a run that computes other nodes of the same block."""
    computed = {node.owner for node in run.nodes if node.op not in _TAKEN}
    return [
        note for note in notes
        if note.nodes[0].owner in computed and run.by_id.keys().isdisjoint(node.id for node in note.nodes)
    ]  # fmt: skip


def is_effect(node: Node) -> bool:
    """Whether a run of the node changes state that outlives the run: a Variable or a queue."""
    return node.op == "tfnb.assign" or (node.op != SIZE and uses_queues(node))


def outermost(node: Node) -> tuple[str, ...]:
    """The name of the outermost module around the function that the node is of; empty outside of modules."""
    return node.scope[:-1][:1]


@dataclass
class _Block:
    """One block while its statements are given to its steps. ``found``: the effects of nodes, by id."""

    kept: Sequence[Node]
    new: Sequence[Node]
    live: Collection[int]
    everything: Collection[int]
    calls: Sequence[range]
    settled: Mapping[int, Collection[int]]
    found: dict[int, tuple[int, ...]] = field(default_factory=dict)
    groups: list[Node] = field(default_factory=list)  # of the statistics of modules, in a block without steps
    lost: dict[UnrunReason, list[Node]] = field(default_factory=dict)  # what their statements write
    unseen: dict[SourceLine | None, str] = field(default_factory=dict)  # guards that no step looks at
    notes: list[Note] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.contents = Contents((*self.kept, *self.new))
        self.mine = {node.id for node in self.new}
        self._run_by: dict[int, set[int]] = {}
        self._needed_by: dict[int, set[Hashable]] = {}
        self._known_needs: dict[int, set[Hashable]] = {}  # by the nodes of a run
        self.steps = [node for node in self.new if self._is_step(node) and not self._only_holds_steps(node)]
        members = [(at, value.node) for at, step in enumerate(self.steps) for value in step.inputs]
        self.update_of = {i: at for at, i in members if self.contents.by_id[i].op == "tfnb.assign"}

    def attach(self) -> None:
        """Give each statement to its step."""
        for group in self.everything:
            self.found[group] = tuple(n.id for n in self.new if (is_effect(n) and n.op != DEQUEUE) or n in self.steps)
        statements = self._statements()
        if not self.steps:
            statements = self._with_modules(statements)
        for statement in statements:
            self._give(statement)
        self._give_guards()
        self._note_lost()
        self._note_unheld()

    # -- steps ----------------------------------------------------------------------------------------------------

    def _is_step(self, node: Node) -> bool:
        if node.op != "tfnb.group":
            return False
        return STEP in node.tags or any(_is_update(m) or self._is_step(m) for m in self._members(node))

    def _only_holds_steps(self, group: Node) -> bool:
        """Whether a group only combines other steps of the block, each of which has its own statements."""
        own = [m for m in self._members(group) if _is_update(m) or (self._is_step(m) and m.id not in self.mine)]
        return STEP not in group.tags and not own

    def _members(self, group: Node) -> list[Node]:
        return [self.contents.by_id[value.node] for value in group.inputs]

    @cached_property
    def last_read(self) -> dict[int, int]:
        """For each node of the block, index of the last step with an update in its ancestors; -1 for none."""
        number = {step.id: at for at, step in enumerate(self.steps)}
        found: dict[int, int] = {}
        written: dict[Variable, int] = {}
        for node in self.new:
            ways = (*(value.node for value in node.inputs), *node.control)
            last = max((found.get(i, -1) for i in ways), default=-1)
            last = max(last, number.get(node.id, -1), self.update_of.get(node.id, -1))
            if node.op == "tfnb.read":
                last = max(last, written.get(node.attrs["variable"], -1))
            elif node.op == "tfnb.assign":
                written[node.attrs["variable"]] = last
            found[node.id] = last
        return found

    # -- statements -------------------------------------------------------------------------------------------------

    def _statements(self) -> list[BlockStatement]:
        """The statements of the block that belong to no step yet, in program order."""
        given = {i for step in self.steps for i in step.effects}
        held = self._reached([*self.live, *(step.id for step in self.steps)])
        found: dict[Hashable, list[Node]] = {}
        for node in self.new:
            is_free = STATEMENT in node.tags or node.id not in held
            if is_effect(node) and is_free and node.id not in given and node.id not in self.update_of:
                found.setdefault(self._region(node), []).append(node)
        return [BlockStatement(tuple(nodes)) for nodes in found.values()]

    def _region(self, node: Node) -> int:
        """Id of the branch or loop that computes the written value; else the node's own id."""
        giver = self.contents.by_id[node.inputs[0].node] if node.op == "tfnb.assign" else node
        return giver.id if giver.op in REGIONS or giver.op == CALL else node.id

    def _give(self, statement: BlockStatement) -> None:
        step = self._step_of(statement)
        if step is None:
            self._leave(statement)
            return
        lacks = self._lacks(self._reached(n.id for n in statement.nodes), step)
        if lacks:
            self._lose(statement, f"the step {step.name} leaves it out: it would need {lacks}")
            return
        more = tuple(n.id for n in statement.nodes if n.id not in self._runs(step))
        if more:
            self.found[step.id] = (*self.found.get(step.id, ()), *more)

    def _leave(self, statement: BlockStatement) -> None:
        """Handle a statement of a block without a step: it is lost unless a held value depends on it."""
        if self._does_everything:
            return
        if statement.is_by_hand or self._held.isdisjoint(node.id for node in statement.nodes):
            self._lose(statement, "the block has no step that could run it")

    def _lose(self, statement: BlockStatement, why: str) -> None:
        first = statement.nodes[0]
        waits = any(uses_queues(self.contents.by_id[i]) for i in self._reached(n.id for n in statement.nodes))
        is_named = STATEMENT not in first.tags
        staged = any(self.contents.by_id[value.node].op in REGIONS for value in first.inputs)
        how = "updated in a staged branch or loop, which is no step of the block" if staged else "written by hand"
        by_hand = how if statement.is_by_hand and not self.steps else ""
        lost = UnrunReason(first.source, why, by_hand, waits, is_named)
        self.lost.setdefault(lost, []).extend(statement.nodes)

    def _step_of(self, statement: BlockStatement) -> Node | None:
        """The step for a statement: the last step whose update the statement reads, else the next below, else
        the last.
        """
        if not self.steps:
            return None
        last = max(self.last_read[node.id] for node in statement.nodes)
        if last >= 0:
            return self.steps[last]
        place = self.contents.position
        below = (step for step in self.steps if place[step.id] > place[statement.nodes[0].id])
        return next(below, self.steps[-1])

    def _reached(self, ids: Iterable[int]) -> set[int]:
        """Nodes that a run of these nodes runs."""
        found: set[int] = set()
        stack = [i for i in ids if i in self.contents.by_id]
        while stack:
            node = self.contents.by_id[stack.pop()]
            if node.id not in found:
                found.add(node.id)
                stack += [*(value.node for value in node.inputs), *node.control, *node.effects]
        return found

    @cached_property
    def _held(self) -> set[int]:
        """Nodes that a run of all that the user holds runs."""
        return self._reached(self.live)

    def _runs(self, step: Node) -> set[int]:
        """Nodes that a run of the step runs by itself."""
        if step.id not in self._run_by:
            self._run_by[step.id] = self._reached([step.id])
        return self._run_by[step.id]

    @property
    def _does_everything(self) -> bool:
        return any(group in self._held for group in self.everything)

    # -- guards -----------------------------------------------------------------------------------------------------

    def _give_guards(self) -> None:
        """Give guards to steps and to values above them. A guard runs those above it, so the last one comes first."""
        guards = [
            node for node in reversed(self.new)
            if node.op == _GUARD and not node.attrs.get("raises", "").startswith(_UNSET)
        ]  # fmt: skip
        for guard in guards if self.steps else ():
            self._give_to_step(guard)
        place, runs = self.contents.position, self._masks if guards else {}
        held = [n for n in self.new if n.id in self.live and n.outputs and n.op not in _TAKEN] if guards else []
        for node in held:
            run = runs[node.id]
            for guard in guards:
                is_free = place[guard.id] < place[node.id] or node.id in self.settled.get(guard.id, ())
                if not is_free and not run & self._bit(guard) and self._is_seen(guard, run):
                    self.found[node.id] = (*self.found.get(node.id, ()), guard.id)
                    run |= runs[guard.id]

    def _give_to_step(self, guard: Node) -> None:
        step = self._step_of(BlockStatement((guard,)))
        assert step is not None, "there are steps"
        run = self._masks[step.id]
        for effect in self.found.get(step.id, ()):
            run |= self._masks[effect]
        if run & self._bit(guard):
            return
        more = self._nodes(self._masks[guard.id] & ~run)
        lacks = self._lacks((node.id for node in more), step) or _changed(list(filter(is_effect, more)))
        if not lacks:
            self.found[step.id] = (*self.found.get(step.id, ()), guard.id)
        elif guard.source not in self.unseen:
            self.unseen[guard.source] = f"a run of the step {step.name} does not look at this branch: it needs {lacks}"

    def _is_seen(self, guard: Node, run: int) -> bool:
        """Whether the nodes of a run determine a guard by forward operations."""
        more = self._nodes(self._masks[guard.id] & ~run)
        is_forward = all(node.forward is None and not is_effect(node) for node in more)
        return is_forward and self._needs(node.id for node in more) <= self._needs_of(run)

    def _needs_of(self, run: int) -> set[Hashable]:
        if run not in self._known_needs:
            self._known_needs[run] = self._needs(node.id for node in self._nodes(run))
        return self._known_needs[run]

    # -- what runs with a node, as bits by the nodes' places in the program: there may be a guard for each of many nodes

    @cached_property
    def _masks(self) -> dict[int, int]:
        """For each node, itself and the nodes that a run of it runs."""
        found = dict.fromkeys(self.contents.by_id, 0)
        ways = {
            node.id: [i for i in (*(v.node for v in node.inputs), *node.control, *node.effects) if i in found]
            for node in self.contents.nodes
        }
        is_new = True
        while is_new:  # an effect may stand below its node
            is_new = False
            for node in self.contents.nodes:
                mask = self._bit(node)
                for i in ways[node.id]:
                    mask |= found[i]
                is_new |= mask != found[node.id]
                found[node.id] = mask
        return found

    def _bit(self, node: Node) -> int:
        return 1 << self.contents.position[node.id]

    def _nodes(self, mask: int) -> list[Node]:
        bits = reversed(bin(mask)[2:])
        return [self.contents.nodes[place] for place, bit in enumerate(bits) if bit == "1"]

    # -- what a step would need for a statement ------------------------------------------------------------------------

    def _lacks(self, run: Iterable[int], step: Node) -> str:
        """Names of the inputs that these nodes need in a run of the step, beyond the step's own needs; empty for
        none.
        """
        if step.id not in self._needed_by:
            self._needed_by[step.id] = self._needs(self._runs(step))
        needs = self._needs(run) - self._needed_by[step.id]
        sizes = {need for need in needs if isinstance(need, str)}  # of feeds, which are told themselves
        return ", ".join(sorted({self._named(need) for need in needs - sizes or needs}))

    def _needs(self, run: Iterable[int]) -> set[Hashable]:
        """The placeholders, sizes of feeds, elements of queues, waits, and updates of steps among nodes."""
        found: set[Hashable] = set()
        for i in run:
            node = self.contents.by_id[i]
            if node.op == "tfnb.placeholder":
                found |= {node.id, *node.outputs[0].symbols}
            elif node.op in (DEQUEUE, SIZE) or i in self.update_of:
                found.add(node.id)
            found |= {symbol for symbol in node.symbols if symbol in self._fed_sizes}
            if uses_queues(node):
                found.add(_WAIT)
        return found

    @cached_property
    def _fed_sizes(self) -> set[str]:
        return {symbol for node in self.contents.placeholders for symbol in node.outputs[0].symbols}

    def _named(self, need: Hashable) -> str:
        if not isinstance(need, int):
            return "a wait for a queue" if need is _WAIT else f"the size {need}"
        node = self.contents.by_id[need]
        if need in self.update_of:
            return f"the step {self.steps[self.update_of[need]].name}"
        return f"the feed {node.name}" if node.op == "tfnb.placeholder" else f"an element of {node.attrs['queue'].name}"

    # -- notes, and blocks without a step ------------------------------------------------------------------------------

    def _note_lost(self) -> None:
        """Add a note for the statements that no step runs, one for each line and reason."""
        for lost, nodes in self.lost.items():
            changes = _changed(nodes)
            if lost.by_hand:
                text = f"{lost.by_hand}: {changes}; a run does it when the parameter, or a tfnb.group of them, is "
                text += f"fetched, and not for the loss or another cell; {_CURE}"
            else:
                named = "give its result a name and fetch that"
                how = named if lost.is_named else "fetch what it writes, or a tfnb.group of that"
                text = f"this changes {changes}, and {lost.why}. To run it {how}; {_CURE}"
            self.notes.append(
                Note(lost.source, text, () if self.steps else tuple(nodes), lost.waits and not self.steps)
            )
        self.notes += [Note(source, text, is_quiet=True) for source, text in self.unseen.items()]

    def _note_unheld(self) -> None:
        """Add a note for the steps that nobody can fetch, one for each line."""
        lost: dict[SourceLine | None, list[Node]] = {}
        for step in self.steps:
            if not self._does_everything and step.id not in self._held:
                lost.setdefault(step.source, []).append(step)
        for source, steps in lost.items():
            names = ", ".join(dict.fromkeys(step.name for step in steps))
            text = "" if source is None else source.text.partition("  #")[0]
            cure = f"write `step = {text}` and fetch `step`; " if _GIVES_STEP.fullmatch(text) else ""
            self.notes.append(Note(source, f"no name holds the step {names}, so runs do not take it: {cure}{_CURE}"))

    def _with_modules(self, statements: Sequence[BlockStatement]) -> list[BlockStatement]:
        """Give statistics to the values that come out of their module's call; returns the other statements."""
        of_call: dict[range, list[BlockStatement]] = {}
        left = []
        for statement in statements:
            call = self._call(statement.nodes[0])
            if call is not None and all(STATEMENT in node.tags for node in statement.nodes):
                of_call.setdefault(call, []).append(statement)
            else:
                left.append(statement)
        taken = {node.name for node in self.contents.nodes}
        for call, written in of_call.items():
            given = [node for node in self.new if node.id in call and self._comes_out(node, call)]
            if not given:  # nobody could fetch what would run them
                left += written
                continue
            writes = [node for statement in written for node in statement.nodes]
            name = unique("/".join([*outermost(writes[0]), "statistics"]), taken)
            taken.add(name)
            group = Node(
                id=new_id(), name=name, op="tfnb.group", inputs=tuple(node.value() for node in writes),
                attrs={"values": tuple(map(Ref, range(len(writes))))}, scope=(*outermost(writes[0]), "statistics"),
                source=writes[-1].source, owner=writes[-1].owner, tags=frozenset({"buffer"}),
            )  # fmt: skip
            self.groups.append(group)
            self.found |= {node.id: (group.id,) for node in given}
        return left

    def _call(self, node: Node) -> range | None:
        """The outermost call of a module that recorded the node."""
        return next((call for call in self.calls if node.id in call), None)

    def _comes_out(self, node: Node, call: range) -> bool:
        """Whether somebody holds a value of the node, or something outside of the call takes one."""
        users = (i for at in range(len(node.outputs)) for i in self.contents.consumers.get(Value(node.id, at), ()))
        is_state = node.op in ("tfnb.read", "tfnb.constant", "tfnb.placeholder")
        return bool(node.outputs) and not is_state and (node.id in self.live or any(i not in call for i in users))


_WAIT = object()
_SHOWN = 6  # names in a note


def _changed(nodes: Sequence[Node]) -> str:
    """Names of the Variables and queues that nodes change."""
    variables = sorted(node.attrs["variable"].name for node in nodes if node.op == "tfnb.assign")
    names = list(dict.fromkeys([*variables, *(queue.name for queue in queues_of(nodes))]))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _is_update(node: Node) -> bool:
    """Whether the node is an in-place update of a trainable Variable."""
    return node.op == "tfnb.assign" and STATEMENT in node.tags and bool(node.attrs["variable"].trainable)


__all__ = ["Note", "attached", "is_effect", "outermost"]
