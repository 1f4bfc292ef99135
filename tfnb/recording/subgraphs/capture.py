"""Loops and branches while recording: the nodes of a function are cut out of the tape and become a subgraph.

The function runs under the ordinary recorder. What it takes from outside becomes an input; reads of variables,
constants and, in a loop, what is the same in each iteration stay outside, but for what could fail where there is no
iteration. A tensor or variable of outside that it writes gets its value back, and the new one is an output: the caller
writes it after the loop or branch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.errors import InvalidArgument, TfnbError, Unsupported
from tfnb.graph import Contents, Dim, Guard, Node, Ref, Spec, Subgraph, Value, Variable
from tfnb.graph.contents import Names
from tfnb.graph.graph import new_id
from tfnb.graph.setting import setting
from tfnb.graph.spec import Size
from tfnb.graph.subgraph import is_guarding, uses_queues
from tfnb.recording.marks.lasting_state import LastingChange
from tfnb.recording.marks.scopes import clean
from tfnb.recording.subgraphs.own_gradient import sealed
from tfnb.recording.subgraphs.recompute import may_fail, repeats
from tfnb.recording.values.interpret import evaluate
from tfnb.recording.values.recording import Recording
from tfnb.recording.values.tape import LEAF
from tfnb.recording.values.tensor import Base, Entry, Tensor
from tfnb.recording.values.variables import known
from tfnb.recording.writes.buffer_assignments import Rebound

Function = Callable[..., Sequence[Any]]  # of recorded tensors, to tensors
Result = TypeVar("Result")
_SHOWN = 3  # names in a message
_TRIES = 300  # recordings of a region, each of which met more tensors of outside that it writes
AGAIN = "again"  # tag of a forward node's copy that gives more


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a recorded function: a spec, a name, and a sample if there is one."""

    spec: Spec
    name: str
    sample: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Inner:
    """Values inside of a subgraph, for the computation of its gradient.

    Those of ``nodes`` are another one in each call, although they are not recorded there; ``same`` has those that are
    values of outside.
    """

    nodes: set[int]
    same: dict[Value, Value]


@dataclass(frozen=True, slots=True)
class LeftGradient:
    """A ``.grad`` at the end of a region: its tensor and value, and the presence, which may be a value, too.

    present: whether a run that goes there has the gradient; see `tfnb.gradients.presence`.
    """

    tensor: torch.Tensor
    value: Value
    present: object
    present_value: Value | None

    def resolved(self, same: Mapping[Value, Value]) -> LeftGradient:
        """The gradient with its values replaced as in the nodes of the region."""
        told = self.present_value
        return replace(
            self, value=same.get(self.value, self.value), present_value=None if told is None else same.get(told, told)
        )

    @property
    def values(self) -> tuple[Value, ...]:
        """Its values."""
        return (self.value,) if self.present_value is None else (self.value, self.present_value)


@dataclass(slots=True)
class Region:
    """One recorded call of a function: its nodes, the placeholders of its arguments, and its results."""

    nodes: list[Node]
    inputs: tuple[Value, ...]
    outputs: list[Value | None]
    written: dict[Base, Value]  # tensors and variables of outside, and what was written to them
    guards: list[Guard]
    moved: list[Node]  # repeat nodes of the forward subgraph, and belong there
    stepped: set[Variable]  # those that an optimizer's step wrote
    buffers: set[Variable]  # those of which the write belongs to the step of a loss
    rebound: dict[Base, Rebound]  # those of `written` of which modules hold another tensor from here on
    gradients: dict[Any, LeftGradient]  # by holder: the ``.grad`` of each at the end
    undo: Callable[[], None]  # as if the call had not been; only while nothing else was recorded since

    @property
    def ids(self) -> set[int]:
        """Of the nodes."""
        return {node.id for node in self.nodes}


def record_region(
    recorder: Recording, function: Function, given: Sequence[Argument], *, scope: str, iterations: bool,
    held: Sequence[Base] = (), inner: Inner | None = None, entered: bool = True, more: Sequence[Tensor] = (),
    fills: bool = False,
) -> Region:  # fmt: skip
    """Record a call of ``function`` as a region.

    scope: the path of the scope that it is recorded in. iterations: whether it runs many times: what is the same each
    time is then left outside. held: tensors and variables of outside that mean the last of ``given`` inside; what they
    mean at the end are the last outputs. inner: of a subgraph that is differentiated. entered: whether the samples get
    there; an op that fails on those that do not has a shape and no sample. more: further arguments, which the
    function asks for while it is recorded. fills: the caller joins the gradients that the region leaves in ``.grad``;
    else a region that changes one is refused.
    """
    for _ in range(_TRIES):
        before = Savepoint(recorder)
        try:
            recorder.inside.append(before)
            with (
                recorder.tape.enclosed(control=()),
                recorder.scope(f"{scope}/"),
                _sealed(recorder, iterations),
                setting(recorder, entered=recorder.entered and entered),
            ):
                tensors = [argument(recorder, item) for item in given]
                inputs = tuple(tensor._entry.value for tensor in tensors)  # before any is written in place
                for base, tensor in zip(held, tensors[len(tensors) - len(held) :], strict=True):
                    base.become(tensor._entry)
                    if base.variable is not None:
                        stands = recorder.tape.stands
                        stands[base.variable] = (*stands.get(base.variable, ()), tensor._entry.value)
                before.start()
                found = function(*tensors[: len(tensors) - len(held)])
                outputs = [recorder._entry(recorder._as_tensor(item)).value for item in found]
                before.release()
                outputs += [base.entry.value for base in held]
                inputs += tuple(tensor._entry.value for tensor in more)
                _refuse_lasting(recorder, before)
                if not fills:
                    _refuse_filling(recorder, before, "a loop" if iterations else "a function of the graph")
                gradients = before.outer(recorder.autograd.left()) if fills else {}
        except BaseException:
            before.undo()
            raise
        finally:
            recorder.inside.pop()
        late = before.met_and_written()
        if not late:
            inner = inner or Inner(set(), {})
            return before.cut(inputs, outputs, gradients, iterations=iterations, inner=inner)
        before.undo()
        for meet in late:
            meet()
    raise Unsupported(
        "a branch, loop or function of the graph makes a tensor of state anew each time that it is recorded, and "
        f"writes it in place: make it before{recorder.tape.at()}"
    )


def _refuse_lasting(recorder: Recording, before: Savepoint) -> None:
    """Raise Unsupported where a region leaves Python state of outside changed, which all runs would have."""
    changes = before.put_back_lasting()
    if not changes:
        return
    facet = changes[0].facet
    names = dict.fromkeys(_name(change.owner) for change in changes if change.facet is facet)
    raise Unsupported(
        f"{facet.change.format(names=', '.join(list(names)[:_SHOWN]))} inside of a branch or loop, which a run may "
        f"leave out: {facet.remedy}{recorder.tape.at()}"
    )


def _name(owner: object) -> str:
    """The name of a recorded tensor, a Variable or a kind of module in a message."""
    if isinstance(owner, torch.Tensor):
        holder = owner if isinstance(owner, Tensor) else known(owner)
        return "a Parameter" if holder is None else holder.name
    return type(owner).__name__


def _refuse_filling(recorder: Recording, before: Savepoint, what: str) -> None:
    """Raise Unsupported where a region that cannot leave gradients changed a ``.grad``."""
    changed = before.outer(dict.fromkeys(recorder.autograd.changed_since(before.autograd)))
    if changed:
        names = ", ".join(holder.name for holder in list(changed)[:_SHOWN] if hasattr(holder, "name"))
        raise Unsupported(
            f"inside of {what} the .grad of {names or 'a tensor'} is filled or cleared, and what each iteration or "
            "call leaves there is not carried on: use torch.autograd.grad there, and keep sums of gradients in tensors"
            f"{recorder.tape.at()}"
        )


class Retry(BaseException):  # the user's `except Exception` is not meant
    """Raised when the recording of ``of`` did not fit; ``of`` has learnt the remedy, and is recorded again."""

    def __init__(self, of: object) -> None:
        self.of = of


def retried(of: object, record: Callable[[], Result], recorder: Recording | None = None) -> Result:
    """Call ``record`` until it returns without raising `Retry` of this object; returns the result.

    A region that is left by it is undone in any case; with a recorder, so is all else that was recorded since.
    """
    while True:
        before = None if recorder is None else Savepoint(recorder)
        try:
            return record()
        except Retry as retry:
            if before is not None:
                before.undo()
            if retry.of is not of:
                raise


def attempt(recorder: Recording) -> Callable[[], None]:
    """A function that takes back everything recorded from here on."""
    return Savepoint(recorder).undo


def _sealed(recorder: Recording, iterations: bool) -> Any:
    """Inside a loop, a value that Python reads would be a constant in every iteration."""

    def refuse(how: str) -> None:
        raise InvalidArgument(
            f"{how} inside a loop would give the value of the first iteration in every iteration: keep it a tensor, or "
            f"read it before the loop{recorder.tape.at()}"
        )

    return sealed(recorder, refuse) if iterations else nullcontext()


def argument(recorder: Recording, given: Argument) -> Tensor:
    """An argument of the function that is being recorded."""
    value = recorder.tape.append("tfnb.placeholder", clean(given.name), (given.spec,))
    fake = recorder.space.fakes[value] = recorder.symbols.fake(given.spec)
    recorder.space.samples.root(value, given.sample)
    return recorder._wrap(Entry(value, fake, given.sample))


class Savepoint:
    """A point of a recording to return to, repeatedly: by `undo`, or by `cut`, which extracts the nodes recorded since.

    It keeps the tape's state, the gradients, what recorded tensors look at, and what the journal names. What else a
    function does to Python's objects stays done.
    """

    def __init__(self, recorder: Recording) -> None:
        self.recorder = recorder
        self.state = recorder.tape.saved()
        self.autograd, self.carried = recorder.autograd.saved(), recorder.carried.saved()
        self.changes = len(recorder.lasting)
        self.at = len(recorder.new)
        self.live = list(recorder.live)
        self._dated = {id(owner) for owner in [*self.live, *recorder.autograd.hooks.values()]}
        bases = [*(tensor._family for tensor in self.live), *recorder.tape.reads.values()]
        self.entries = {base: base.entry for base in bases}
        self.versions: dict[Base, int] = {}
        self.rebound: dict[Base, Rebound] = {}

    def outer(self, by_holder: Mapping[Any, Result]) -> dict[Any, Result]:
        """Of the holders of gradients, those that are no tensors made since."""
        return {holder: found for holder, found in by_holder.items() if self.is_outer(holder)}

    def is_outer(self, owner: object) -> bool:
        """Whether an object is none that was made since: a recorded tensor, or the hooks of one; others are taken for
        older.
        """
        hooked = self.recorder.autograd.hooks.values()
        is_dated = isinstance(owner, Tensor) or any(owner is hooks for hooks in hooked)
        return not is_dated or id(owner) in self._dated

    def put_back_lasting(self) -> list[LastingChange]:
        """Restore the Python state of outside that the journal has changes of since; returns these."""
        return self.recorder.lasting.put_back(self.changes, self.is_outer)

    def start(self) -> None:
        """Mark the call of the function: later writes are the function's own."""
        self.versions = {base: base.version for base in self.entries}

    def release(self) -> None:
        """Mark the return of the function: modules hold their earlier buffers again."""
        self.rebound = self.recorder.buffers.release(self.state, self.versions)

    def undo(self) -> None:
        """As if nothing had been recorded since."""
        bindings = self.recorder.tape.bindings
        gone = self.recorder.tape.put_back(self.state)
        self.recorder.buffers.put_back(bindings, self.state)
        self._put_back_gradients()
        self._restore({node.id for node in gone})
        self.recorder.space.release(gone)

    def met_and_written(self) -> list[Callable[[], Any]]:
        """Calls that meet the tensors and variables that the function met first, and wrote."""
        recorder = self.recorder
        late: list[Callable[[], Any]] = []
        for var, base in recorder.tape.reads.items():
            if base not in self.entries and base.version:
                late.append(partial(recorder._read_base, var))
        for tensor, handle in recorder.tape.memory.values():
            if handle._family not in self.entries and handle._family.version and not late:
                late.append(partial(recorder.handle, tensor))
        return late

    def cut(
        self, inputs: tuple[Value, ...], outputs: list[Value], gradients: Mapping[Any, LeftGradient], *,
        iterations: bool, inner: Inner,
    ) -> Region:  # fmt: skip
        """The region, out of the tape."""
        recorder = self.recorder
        written = {base: base.entry.value for base, version in self.versions.items() if base.version != version}
        made = recorder.tape.cut(self.at)
        inside, same, moved = _parted(recorder, made, {v.node for v in inputs}, iterations=iterations, inner=inner)
        resolved = [same.get(v, v) for v in outputs]
        final = {base: same.get(v, v) for base, v in written.items()}
        left = {holder: each.resolved(same) for holder, each in gradients.items()}
        values = [value for each in left.values() for value in each.values]
        nodes = _needed(recorder, inside, [*resolved, *final.values(), *values])
        guards = self._inner_guards()
        gone = {node.id for node in made if node.id not in recorder.tape.by_id}
        self._put_back_gradients()
        self._restore(gone)
        recorder.space.release(node for node in made if node.id in gone)
        assigned = [node for node in made if node.op == "tfnb.assign"]
        kinds = {"step", LEAF}, {"buffer"}  # LEAF: of the writes behind branches inside
        steps, buffers = ({n.attrs["variable"] for n in assigned if n.tags & kind} for kind in kinds)
        return Region(
            nodes, inputs, list(resolved), final, guards, moved, steps, buffers, self.rebound, left, self.undo
        )  # fmt: skip

    def _put_back_gradients(self) -> None:
        self.recorder.autograd.put_back(self.autograd)
        self.recorder.carried.put_back(self.carried)
        self.put_back_lasting()

    def _inner_guards(self) -> list[Guard]:
        """Relations between sizes that exist inside only."""
        recorder = self.recorder
        start = len(self.state.guards)
        new = recorder.tape.guards[start:]
        outer = _bound(recorder.tape.nodes) if new else set()
        recorder.tape.guards[start:] = [  # their lines are not those of the node that holds the region
            replace(guard, is_local=False) for guard in new if outer.issuperset(guard.symbols)
        ]
        return [guard for guard in new if not outer.issuperset(guard.symbols)]

    def _restore(self, gone: set[int]) -> None:
        """Restore handles and their entries; drop handles of removed nodes."""
        recorder = self.recorder
        for base, entry in self.entries.items():
            if base.entry is not entry:
                base.become(entry)
        kept = {id(tensor) for tensor in self.live} | {id(h) for _, h in recorder.tape.handles.values()}
        for tensor in list(recorder.live):
            if tensor._entry.value.node in gone:
                if id(tensor) in kept:
                    tensor._seen = -1  # looks again when it is next used
                else:
                    del recorder.live[tensor]


def _parted(
    recorder: Recording, made: Sequence[Node], inputs: set[int], *, iterations: bool, inner: Inner
) -> tuple[list[Node], dict[Value, Value], list[Node]]:
    """Partition nodes: inside the subgraph, or back to the tape. Writes of variables become the values written.

    Copies of forward nodes, which take and give local values, are told apart.
    """
    same = dict(inner.same)
    moved: dict[int, Node] = {}
    inside: dict[int, Node] = {}
    outer: set[str] | None = None
    for node in made:
        if node.op == "tfnb.assign" and node.tags.isdisjoint(("no_grad", LEAF)):
            same[node.value()] = same.get(node.inputs[0], node.inputs[0])
            continue
        if node.op == "tfnb.assign":  # a node stays, which keeps gradients from what it wrote
            tags = frozenset({"no_grad"}) | (node.tags & {LEAF})
            node = replace(node, op="aten.alias.default", attrs={"self": Ref(0)}, tags=tags)
        if node.op == "tfnb.group":
            continue
        if node.op == "tfnb.placeholder" and node.id not in inputs:
            raise InvalidArgument(f"a placeholder inside a loop or branch cannot be fed\n  at {node.source}")
        if any(v in same for v in node.inputs):
            node = replace(node, inputs=tuple(same.get(v, v) for v in node.inputs))
        node = replace(node, control=tuple(i for i in node.control if i in inside))
        bound = any(v.node in inside for v in node.inputs) or bool(node.control)
        fixed = not any(v.node in inner.nodes or v.node in moved for v in node.inputs)
        if node.op in ("tfnb.read", "tfnb.constant"):
            recorder.tape.put(replace(node, control=()))  # a guard inside is none of what is outside
        elif AGAIN in node.tags and not bound and not fixed and not node.attrs.get("recompute"):
            moved[node.id] = node
        elif iterations and not bound and fixed and (repeats(node) or AGAIN in node.tags) and not may_fail(node):
            symbols = {s for spec in node.outputs for s in spec.symbols} | set(node.symbols)
            if symbols and outer is None:
                outer = _bound(recorder.tape.nodes)
            if symbols and not (outer or set()).issuperset(symbols):
                inside[node.id] = node
            else:
                recorder.tape.put(node)
        else:
            inside[node.id] = node
    return list(inside.values()), same, list(moved.values())


def _needed(recorder: Recording, nodes: Sequence[Node], outputs: Iterable[Value]) -> list[Node]:
    """The ancestors of the outputs; placeholders, guards of branches and queue operations stay."""
    wanted = {v.node for v in outputs}
    kept = []
    for node in reversed(nodes):
        if node.id in wanted or node.op == "tfnb.placeholder" or is_guarding(node) or uses_queues(node):
            kept.append(node)
            wanted.update(v.node for v in node.inputs)
            wanted.update(node.control)
            if node.symbols:
                wanted.update(_tellers(recorder, nodes, node.symbols))
    return kept[::-1]


def _tellers(recorder: Recording, nodes: Sequence[Node], symbols: Iterable[str]) -> Iterator[int]:
    """The nodes of a region that first bind these sizes, unless the outside binds them."""
    inner = {symbol: next((n.id for n in nodes if symbol in axes(n.outputs)), None) for symbol in symbols}
    outer = _bound(recorder.tape.nodes) if any(inner.values()) else set()
    yield from (at for symbol, at in inner.items() if at is not None and symbol not in outer)


def now(recorder: Recording, spec: Spec) -> tuple[Size, ...]:
    """The shape, as far as sizes turned out to be a number or another size since."""
    symbols = recorder.symbols
    return tuple(
        symbols.size(size.evaluate(symbols.bindings([size]))) if isinstance(size, Dim) else size for size in spec.shape
    )


def same_shape(recorder: Recording, a: Spec, b: Spec) -> bool:
    """Whether the shapes are the same; sizes that merely are so for the samples are from here on, as by a guard."""
    symbols = recorder.symbols
    pairs = [(x, y) for x, y in zip(now(recorder, a), now(recorder, b), strict=False) if x != y]
    if len(a.shape) != len(b.shape) or not (bound_outside(recorder, a) and bound_outside(recorder, b)):
        return not pairs and len(a.shape) == len(b.shape)
    known = symbols.bindings([size for pair in pairs for size in pair])
    relations = [operator.eq(*(s.evaluate(known) if isinstance(s, Dim) else s for s in pair)) for pair in pairs]
    if any(isinstance(each, bool) or free_unbacked_symbols(each) or not symbols.truth(each) for each in relations):
        return False
    return all(map(symbols.decided, relations))


def bound_outside(recorder: Recording, spec: Spec) -> bool:
    """Whether the spec's sizes are bound by values recorded here, not by values inside subgraphs."""
    return not spec.symbols or _bound(recorder.tape.nodes).issuperset(spec.symbols)


def bound_before(recorder: Recording, spec: Spec) -> bool:
    """Inside a function being recorded: whether the spec's sizes are bound by values from before its call."""
    made = {node.id for node in recorder.new[recorder.inside[-1].at :]}
    outer = (node for node in recorder.tape.nodes if node.id not in made)
    return not spec.symbols or _bound(outer).issuperset(spec.symbols)


def _bound(nodes: Iterable[Node]) -> set[str]:
    """Symbols that some value has as an axis."""
    return axes(spec for node in nodes for spec in node.outputs)


def axes(specs: Iterable[Spec]) -> set[str]:
    """Symbols that are an axis of one of the specs."""
    return {size.expr for spec in specs for size in spec.shape if isinstance(size, Dim) and size.is_symbol}


# -- from regions to a node -----------------------------------------------------------------------------------


def captures(
    recorder: Recording, regions: Iterable[Region], sized: Callable[[Value, str], Value] | None = None
) -> list[Value]:  # fmt: skip
    """Outside values used by the regions, and values that bind the sizes used by the regions.

    sized: what is taken for a value of which only a size matters, the symbol.
    """
    found: dict[Value, None] = {}
    for region in regions:
        ids, taken = region.ids, [v for node in region.nodes for v in node.inputs]
        found.update(dict.fromkeys(v for v in [*taken, *filter(None, region.outputs)] if v.node not in ids))
    for region in regions:
        bound = axes(recorder.node(v.node).outputs[v.index] for v in found)
        wanted: set[str] = set()
        for node in region.nodes:  # a size that its own arguments say is not known by its output
            wanted |= set(node.symbols) - bound
            bound |= _bound([node])
        used = {s for node in region.nodes for spec in node.outputs for s in spec.symbols}
        used |= {s for guard in region.guards for s in guard.symbols}
        for symbol in sorted(wanted | (used - bound)):
            binder = _binder(recorder, symbol)
            found[binder if sized is None else sized(binder, symbol)] = None
    given = [_bound(node for node in region.nodes if node.op == "tfnb.placeholder") for region in regions]
    while missing := _untold(recorder, found) - given[0].intersection(*given[1:]):
        for symbol in sorted(missing):
            binder = _binder(recorder, symbol)
            found[binder if sized is None else sized(binder, symbol)] = None
    return list(found)


def _untold(recorder: Recording, values: Iterable[Value]) -> set[str]:
    """Symbols that occur in sizes of the values but never as an axis: `x[-1:]` does not bind the length of `x`."""
    specs = [recorder.node(v.node).outputs[v.index] for v in values]
    return {symbol for spec in specs for symbol in spec.symbols} - axes(specs)


def _binder(recorder: Recording, symbol: str) -> Value:
    """The first value of outside with an axis of this size."""
    for node in recorder.tape.by_id.values():
        for index, spec in enumerate(node.outputs):
            if any(isinstance(size, Dim) and size.expr == symbol for size in spec.shape):
                return node.value(index)
    raise InvalidArgument(f"a loop or branch uses the size {symbol}, which no value has{recorder.tape.at()}")


def subgraph(
    recorder: Recording, region: Region, captured: Sequence[Value], outputs: Sequence[Value | None]
) -> Subgraph:
    """A region as a function of its own inputs followed by the captured values."""
    names = Names()
    inside: dict[Value, Value] = {}
    inputs = []
    for value in captured:
        outer = recorder.node(value.node)
        name = names.fresh(outer.name.rpartition("/")[2])
        node = Node(id=new_id(), name=name, op="tfnb.placeholder", outputs=(outer.outputs[value.index],))
        inputs.append(node)
        inside[value] = node.value()
    nodes = []
    for node in region.nodes:
        nodes.append(replace(node, name=names.fresh(node.name), inputs=tuple(inside.get(v, v) for v in node.inputs)))
    firsts = [node for node in nodes if node.op == "tfnb.placeholder"]
    rest = [node for node in nodes if node.op != "tfnb.placeholder"]
    contents = Contents((*firsts, *inputs, *rest), tuple(region.guards))
    results = tuple(None if v is None else inside.get(v, v) for v in outputs)
    return Subgraph(contents, (*region.inputs, *(node.value() for node in inputs)), results)


def append(
    recorder: Recording, op: str, inputs: Sequence[Value], attrs: Mapping[str, Any], outputs: Sequence[Spec],
    tags: frozenset[str] = frozenset(), draws: bool = False, stream: int | None = None,
) -> list[Tensor]:  # fmt: skip
    """Record a node with subgraphs; its samples are computed from its inputs' samples.

    Guards inside of it hold for all that follows, as one that stands here does.

    draws: it gets a number among the random nodes; ``stream``: this one.
    """
    tape, space = recorder.tape, recorder.space
    entries = [recorder._entry_of_value(v) for v in inputs]
    name = "/".join([*map(clean, recorder.scopes.path), op.partition(".")[2]])
    scope = recorder.scopes.current()
    parts = (part for part in attrs.values() if isinstance(part, Subgraph))
    with torch.set_grad_enabled(torch.is_grad_enabled() or any(map(_conducts, parts))):
        value = tape.append(op, name, tuple(outputs), inputs=tuple(inputs), attrs=attrs, scope=scope, tags=tags,
                            is_random=draws and stream is None)  # fmt: skip
    if stream is not None:
        tape.new[-1] = tape.by_id[value.node] = replace(tape.new[-1], stream=stream)
    node = tape.new[-1]
    samples: Sequence[torch.Tensor | None] = [None] * len(outputs)
    if not (recorder.lazy or uses_queues(node)) and all(entry.sample is not None for entry in entries):
        try:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                samples = evaluate(
                    node, [entry.sample for entry in entries], recorder.symbols.number, recorder.graph.seed
                )
        except BaseException as error:
            tape.drop_last()
            if isinstance(error, TfnbError) or not isinstance(error, Exception):
                raise
            what = f"{op.removeprefix('tfnb.')} failed for the samples: {str(error) or type(error).__name__}{tape.at()}"
            raise InvalidArgument(what, op=op) from error
    tensors = []
    for index, (spec, sample) in enumerate(zip(outputs, samples, strict=True)):
        at = Value(value.node, index)
        fake = space.fakes[at] = recorder.symbols.fake(spec)
        space.samples.keep(at, sample)
        if sample is not None:
            recorder.symbols.observe(fake, sample)
        tensors.append(recorder._wrap(Entry(at, fake, sample)))
    if is_guarding(node):
        tape.marks = replace(tape.marks, control=(*tape.marks.control, node.id))
    return tensors


def _conducts(part: Subgraph) -> bool:
    """Whether a gradient passes, also with grad mode off around: values handed through keep their history."""
    reached = {value.node for value in part.inputs}
    for node in part.contents.nodes:
        ways = node.inputs if "no_grad" not in node.tags else node.inputs[: "in_place" in node.tags]
        if any(value.node in reached for value in ways):
            reached.add(node.id)
    return any(value is not None and value.node in reached for value in part.outputs)


def write_back(
    recorder: Recording, bases: Sequence[Base], tensors: Sequence[Tensor], regions: Iterable[Region]
) -> None:  # fmt: skip
    """Assign the values left by a loop or branch to outside tensors and variables.

    Where it took an optimizer's step, whoever runs the write of a trained Variable runs those of its slots.
    """
    regions = list(regions)
    stepped = set[Variable]().union(*(region.stepped for region in regions))
    buffers = set[Variable]().union(*(region.buffers for region in regions))
    slots: list[int] = []

    def is_trained(pair: tuple[Base, Tensor]) -> bool:
        var = pair[0].variable
        return var in stepped and var is not None and var.trainable

    for base, tensor in sorted(zip(bases, tensors, strict=True), key=is_trained):
        after = slots if is_trained((base, tensor)) else ()
        tags = recorder.tape.marks.tags | ({"buffer"} if base.variable in buffers else set())
        tags |= {LEAF} if base.variable in stepped else set()
        control = (*recorder.tape.marks.control, *after)
        with torch.enable_grad(), recorder.tape.marked(control=control, tags=tags):  # what was written says what passes
            rebound = next((region.rebound[base] for region in regions if base in region.rebound), None)
            if rebound is not None:
                recorder.buffers.rebind(rebound, tensor)
                continue
            base.write(tensor._entry)
        if base.variable in stepped and not after:
            slots.append(base.entry.value.node)
