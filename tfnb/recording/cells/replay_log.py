"""What cells wrote to tensors of other cells, in program order: a cell run again starts from what was there before it.

Each handle, and each base of a family of aliases, that a recording of another owner changed has a list of steps. To run
a cell again, the steps of its block and of all below are taken back; afterwards those below are taken again on top of
what the cell wrote now. So a graph is what its cells, each as it was last run, give when they run once in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple

from torch.utils.weak import WeakIdKeyDictionary

from tfnb.errors import FailedPrecondition
from tfnb.graph import Contents, Graph, Owner, Value
from tfnb.graph.op_facts import facts_of
from tfnb.recording.values.tensor import Base, Tensor
from tfnb.recording.writes.undo_log import BASE, Journal, State, Thing, differs, light, renewed, restore, state


class Step(NamedTuple):
    """What one owner changed: between these two states."""

    owner: str
    before: State
    after: State


class Past:
    """The steps of one graph."""

    def __init__(self) -> None:
        self.steps = WeakIdKeyDictionary()  # handle or base -> its steps in program order

    def rewind(self, owner: Owner, contents: Contents, owners: list[str]) -> Rewound:
        """Everything as it was before the block of ``owner``, which is about to be replaced."""
        rewound = Rewound(self, owner, contents)
        first = {n.owner.key: at for at, n in reversed(list(enumerate(contents.nodes))) if n.owner is not None}
        here = first.get(owner.key)
        below = {key for at, key in enumerate(owners) if here is not None and (
            first[key] >= here if key in first else at > owner.index
        )}  # fmt: skip
        rewound.below = frozenset(below) - {owner.key}
        for thing, steps in list(self.steps.items()):
            if here is None:  # nothing of it stands any more: it takes back what was lost, and is added at the end
                lost = (i for i, step in enumerate(steps) if _value(step.after).node not in contents.by_id)
                at = next(lost, len(steps))
                at = at if at < len(steps) and steps[at].owner == owner.key else len(steps)
            else:
                at = next((i for i, step in enumerate(steps) if step.owner in below), len(steps))
            rewound.take_back(thing, steps, at)
        return rewound

    def renew(self, ids: Container[int], renew: Callable[[Any], Any]) -> None:
        """Sizes of the values of ``ids`` are renewed."""
        for thing, steps in list(self.steps.items()):
            self.steps[thing] = [
                Step(s.owner, renewed(s.before, ids, renew), renewed(s.after, ids, renew)) for s in steps
            ]


def past(graph: Graph) -> Past:
    """The past of a graph, made when first asked for."""
    return graph.attached.setdefault("past", Past())


class Rewound:
    """The steps that were taken back for one recording."""

    def __init__(self, past: Past, owner: Owner, contents: Contents) -> None:
        self._past, self._owner, self._contents = past, owner, contents
        self._journal = Journal()
        self._tails: list[tuple[Thing, list[Step]]] = []
        self.below: frozenset[str] = frozenset()  # owners whose blocks follow

    def take_back(self, thing: Thing, steps: list[Step], at: int) -> None:
        """Undo the steps of ``thing`` from number ``at`` on."""
        if at < len(steps):
            self._journal.note(thing)
            self._tails.append((thing, steps[at:]))
            restore(thing, steps[at].before)

    def undo(self) -> None:
        """Everything as it was before it was rewound."""
        self._journal.undo()

    def _mine(self, tail: Iterable[Step]) -> Step | None:
        return next((step for step in tail if step.owner == self._owner.key), None)

    def moved(self) -> dict[Value, Value]:
        """What the earlier run left in each tensor -> what this run leaves in it."""
        steps = ((thing, self._mine(tail)) for thing, tail in self._tails)
        return {_value(step.after): _value(state(thing)) for thing, step in steps if step is not None}

    def hidden(self, changed: Iterable[tuple[Thing, State]]) -> frozenset[Value]:
        """What looks into tensors that this run writes and the earlier one did not: it means something else below."""
        before = {id(thing) for thing, tail in self._tails if self._mine(tail)}
        hidden = {_value(old) for thing, old in changed if id(thing) not in before and _is_write(thing, old)}
        for node in self._contents.nodes if hidden else ():
            if node.inputs and node.inputs[0] in hidden and facts_of(node.op).is_view:
                hidden.update(Value(node.id, index) for index in range(len(node.outputs)))
        return frozenset(hidden)

    def check(self, contents: Contents) -> None:
        """Raise FailedPrecondition if the block now stands below a write that was taken back for it."""
        first = next((at for at, n in enumerate(contents.nodes) if n.owner == self._owner), 0)
        above = {n.owner.key: n for n in contents.nodes[:first] if n.owner is not None}
        for _, tail in self._tails:
            passed = next((above[step.owner] for step in tail if step.owner in above), None)
            if passed is not None:
                label = passed.source.label if passed.source else "another cell"
                raise FailedPrecondition(
                    f"this cell uses what was recorded below it, and {label} between them writes to tensors of other "
                    f"cells: remove the cell from the graph (%tfgraph rm) and run it again, so that it stands last"
                )

    def adopt(self, made: Iterable[Tensor], known: Iterable[Tensor], moved: Mapping[Value, Value]) -> None:
        """A tensor that the earlier run made and this run made again is the same one to the cells below."""
        made = list(made)
        old: dict[Value, set[Base]] = {}
        new: dict[Value, set[Base]] = {}
        for base in (*(t._family for t in known), *(t for t, _ in self._tails if isinstance(t, Base))):
            old.setdefault(base.entry.value, set()).add(base)
        for tensor in made:
            new.setdefault(tensor._family.entry.value, set()).add(tensor._family)
        for value, bases in old.items():
            heirs = new.get(moved.get(value, value), set()) - bases
            if len(bases) == len(heirs) == 1:
                base, heir = bases.pop(), heirs.pop()
                base.entry, base.frozen, base.twins = heir.entry, heir.frozen, heir.twins
                for tensor in (t for t in made if t._family is heir):
                    tensor._family, tensor._seen = base, base.version
        views = {t.shown.value: t for t in made if t._chain}
        self._tails = [(views.get(moved.get(_value(state(t)), _value(state(t))), t), tail) for t, tail in self._tails]

    def _renumber(self, handles: Iterable[Tensor]) -> None:
        """The version that views below have seen is the one that the block leaves, whatever it wrote this time."""
        handles = list(handles)
        for base, tail in self._tails:
            step = self._mine(tail)
            if step is None or not isinstance(base, Base):
                continue
            version = dict(zip(BASE, step.after, strict=True))["version"]
            for tensor in (t for t in handles if t._family is base and t._seen == base.version):
                tensor._seen = version
            base.version = version

    def replay(
        self, changed: Iterable[tuple[Thing, State]], handles: Iterable[Tensor], gone: Container[int]
    ) -> None:  # fmt: skip
        """Note what this recording changed, and take the steps below again on top of it, up to one that is ``gone``."""
        self._renumber(handles)
        steps, key = self._past.steps, self._owner.key
        tails = {id(thing): (thing, tail) for thing, tail in self._tails}
        own = {id(thing): (thing, before) for thing, before in changed if differs(thing, before)}
        for at, (thing, _) in {**tails, **own}.items():
            tail = tails[at][1] if at in tails else []
            chain = steps.get(thing, [])
            chain = chain[: len(chain) - len(tail)]
            if at in own:
                chain = [*chain, Step(key, light(own[at][1]), light(state(thing)))]
            steps[thing] = chain  # added to below
            below = [step for step in tail if step.owner != key]
            now = light(state(thing))
            for step in below:
                chain.append(Step(step.owner, now, step.after))
                now = step.after
            if below:
                lost = (step.after for step in below if _value(step.after).node in gone)
                restore(thing, next(lost, now))


def _value(held: State) -> Value:
    return held[0].value


def _is_write(thing: Thing, old: State) -> bool:
    """Whether something was written or reshaped; a view that only looks again is found by what it looks at."""
    return differs(thing, old) and (isinstance(thing, Base) or (thing._family, thing._chain) != old[1:3])
