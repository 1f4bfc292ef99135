"""The recorder: a dispatch mode that runs each ATen call at once on samples and appends a node.

It sees every call of the block, also those without a recorded tensor (views of parameters, factories, random draws).
Composites are taken apart here; writes become their out-of-place twins; everything else is one node. Nothing outside
the recording changes: variables, modules, user tensors and torch's random state stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any
from weakref import WeakSet

import sympy
import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils.weak import WeakIdKeyDictionary

from tfnb.errors import GraphFormatError, ShapeError, StaleNode, Unsupported
from tfnb.graph import Graph, Guard, Node, Owner, Ref, SourceLine, Spec, Value, Variable, ops
from tfnb.graph.current import Autograd
from tfnb.graph.device_request import Scope
from tfnb.graph.node import leaves
from tfnb.graph.op_facts import Op, facts, op_name
from tfnb.graph.variable import updated
from tfnb.recording.dispatch.recorded_call import record_call
from tfnb.recording.marks.carried_gradients import CarriedGradients
from tfnb.recording.marks.held_interrupts import raise_held
from tfnb.recording.marks.lasting_state import LastingChanges
from tfnb.recording.marks.notes import asked_in, fixed_batches, warn_of_branch, warn_of_written
from tfnb.recording.marks.python_state import PythonReads
from tfnb.recording.marks.scopes import Scopes, clean
from tfnb.recording.overrides import higher_order
from tfnb.recording.overrides.constructors import constructing, fixed
from tfnb.recording.overrides.override_table import OVERRIDES, Stage
from tfnb.recording.overrides.python_answers import counters_of, guard_number, settle_size, stands_for_number
from tfnb.recording.values.outside_tensors import Outside
from tfnb.recording.values.python_draws import NamedGenerator
from tfnb.recording.values.samples import physical
from tfnb.recording.values.tape import Tape
from tfnb.recording.values.tensor import Base, Entry, Operation, Tensor, missing
from tfnb.recording.values.variables import held, known, variable
from tfnb.recording.values.views import View
from tfnb.recording.values.workspace import workspace
from tfnb.recording.writes.aliases import STRAIGHT, looked
from tfnb.recording.writes.buffer_assignments import Buffers
from tfnb.recording.writes.in_place_calls import note_copy, record_write

aten = torch.ops.aten
_STATE = (torch.nn.Parameter, torch.nn.Buffer)
_ANSWERS, _OPS = OVERRIDES[Stage.ANSWER], OVERRIDES[Stage.OP]
_COMPUTED_BY_RUNS = frozenset({"gradient", "update"})
_STATEMENT = frozenset({ops.STATEMENT})
_PYTHON_KEYS = torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot


class Recorder(TorchDispatchMode):
    """One open recording of one owner into one graph."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the handler is never traced, and the guard costs more than a dispatch

    def __init__(
        self, graph: Graph, owner: Owner, *, where: Callable[[], SourceLine | None], kept: tuple[Node, ...],
        names: Callable[[], Mapping[str, Any]], stop: FrameType | None = None, lazy: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.graph, self.owner, self.lazy = graph, owner, lazy
        self.space = workspace(graph)
        self.symbols = self.space.symbols
        self.where = where
        self.scopes, self._names = Scopes(names), names
        self.tape = Tape(owner, where, kept)
        self.born = WeakIdKeyDictionary()  # parameters and buffers made in this recording: whether of plain values
        self._elsewhere = WeakIdKeyDictionary()  # views of variables that other recordings made: what they look at
        self.live = WeakIdKeyDictionary()  # every recorded tensor that somebody still holds
        self.operations: WeakSet[Operation] = WeakSet()  # every Operation that somebody still holds
        self.outside = Outside(self)
        self.buffers = Buffers(self)
        self.python = PythonReads(self)
        self.carried = CarriedGradients(self)
        self.lasting = LastingChanges()
        self._warned: set[Any] = set()
        self.stop, self.is_cell = stop, False
        self.default_device: Any = None
        self.held: list[NamedGenerator] = []  # generators of numbers of Python, as they were when the block began
        self.packings: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by the tensor of their batch sizes
        self.refuse: Callable[[str], None] | None = None  # asked about each value that leaves the graph
        self.overrides: Mapping[str, Callable[..., Any]] = {}  # gradient rules of the ops recorded now
        self.inside: list[Any] = []  # of the loops, branches and functions that are being recorded: what was before
        self.failed: tuple[Exception, Node] | None = None  # the last op that raised, as a node without outputs
        self.entered = True  # whether the samples get to what is recorded now
        self.calls: dict[Any, Any] = {}  # functions that are being recorded: see `subgraphs.recursive_calls`
        self.autograd: Autograd  # given by an extension: `tfnb.graph.current`

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record the calls inside, also from within a dispatch handler; no effect if recording is on already.

        `torch.tensor` of a list excludes Python from dispatch while it asks the items for numbers: a kernel would read
        memory that a recorded tensor has not.
        """
        with ExitStack() as stack:
            for key in _PYTHON_KEYS:
                stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
            if _get_current_dispatch_mode() is not self:
                stack.enter_context(self)
            yield

    @property
    def samples_wait(self) -> bool:
        """Whether samples of new nodes are computed lazily, on first access: true for gradients and updates."""
        return not self.tape.marks.tags.isdisjoint(_COMPUTED_BY_RUNS)

    def settle(self) -> None:
        """At the end of the block: refresh views of written tensors."""
        self.buffers.compare()
        self.leave()
        for tensor in list(self.live):
            base = tensor._family
            is_old = tensor._seen != base.version and not base.entry.lost
            if is_old and not self.tape.is_earlier(base.entry.value):
                self._refresh(tensor)
        for note in fixed_batches(self.tape.fixed):
            self._tell(note, warns=True)
        warn_of_written(self.tape.asked, self.new)

    def leave(self) -> None:
        """At the end, also by an error: views of variables return to the reads of their own recordings.

        Modules hold their own buffers again.
        """
        self.buffers.leave()
        for tensor, before in self._elsewhere.items():
            tensor._entry, tensor._family, tensor._seen = before
        self._elsewhere.clear()

    def look(self, tensor: Tensor) -> Entry:
        """The entry of a recorded tensor at this place of the program."""
        with _disable_current_modes():
            return self._entry(tensor)

    # -- what the rooms above use -----------------------------------------------------------------------------

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes so far, earlier owners' first."""
        return self.tape.nodes

    @property
    def new(self) -> list[Node]:
        """The nodes of this recording."""
        return self.tape.new

    def node(self, node_id: int) -> Node:
        """A node of the graph or of this recording."""
        return self.tape.by_id[node_id]

    def rename(self, node_id: int, name: str) -> str:
        """Rename a node of this recording to a name made unique; returns the new name."""
        return self.tape.rename(node_id, name)

    def tensor(self, value: Value) -> Tensor:
        """A recorded tensor of an existing value."""
        return self._wrap(self._entry_of_value(value))

    def _entry_of_value(self, value: Value) -> Entry:
        node = self.tape.by_id.get(value.node)
        if node is None:
            raise missing(self.graph, value, "a tensor is")
        fake = self.space.fakes.get(value)
        if fake is None:
            fake = self.space.fakes[value] = self.symbols.fake(node.outputs[value.index])
        return Entry(value, fake, self.space.samples.known(value), self.space.awaited)

    def read(self, var: Variable) -> Tensor:
        """The variable's value at this place of the program."""
        return self._wrap(self._read_base(var).entry)

    def _read_base(self, var: Variable) -> Base:
        base = self.tape.reads.get(var)
        if base is None:
            with _disable_current_modes():
                sample = physical(var.storage) if var.home is None or not self.lazy else None
                fake = self.space.shapes.like(var.storage)
            value = self.tape.append("tfnb.read", clean(var.name), (var.spec,), attrs={"variable": var})
            base = Base(Entry(value, fake, sample))
            self.stand(base, var)
            self.space.fakes[value] = fake
            self.space.samples.read(value, var, sample)
            self.tape.reads[var] = base
        return base

    def stand(self, base: Base, var: Variable) -> None:
        """Bind the memory of a family of tensors to a Variable: a write into the memory is an assignment."""
        base.variable, base.written = var, lambda entry: self._assigned(var, entry, _STATEMENT)

    def write(self, var: Variable, kind: str, *args: object) -> Tensor:
        """Record a write of a Variable; returns the value after the write."""
        with self.scopes.name_scope(clean(var.name)), self.on():
            new = updated(self.read(var), kind, *(self._as_tensor(a) for a in args))
        if ops.UNORDERED in self.tape.marks.tags:
            return self.assign(var, new, tags=frozenset({"step"}))
        return self.assign(var, new)

    def assign(self, var: Variable, tensor: torch.Tensor, *, tags: frozenset[str] = frozenset()) -> Tensor:
        """Record a plain assignment. Tagged ``step``, the assignment is a step: later reads neither pull nor show its
        value.

        In a loop or branch a step is a write like others: what follows there takes the new value.
        """
        entry = self._entry(self._fitting(var, tensor))
        if "step" not in tags or self.inside:  # in a loop or branch it is the function's doing, like any write
            base = self._read_base(var)
            base.become(self._assigned(var, entry, tags))
            return self._wrap(base.entry)
        before = self.tape.reads.pop(var, None)
        made = self._wrap(self._assigned(var, entry, tags))
        if before is not None and before.held_views:
            before.become(self._read_base(var).entry)  # in Python a view of the memory shows what the step wrote
            self.tape.reads[var] = before
        return made

    def _assigned(self, var: Variable, entry: Entry, tags: frozenset[str]) -> Entry:
        value = self.tape.append(
            "tfnb.assign", f"{clean(var.name)}/assign", (var.spec,), inputs=(entry.value,),
            attrs={"variable": var, "value": Ref(0)}, tags=tags, scope=self.scopes.current(),
        )  # fmt: skip
        self.space.fakes[value] = entry.fake
        return entry.of(value)

    def _fitting(self, var: Variable, new: object) -> torch.Tensor:
        new = self._as_tensor(new)
        spec = self.space.shapes.spec(self._entry(new).fake)
        if spec.dtype != var.spec.dtype or spec.shape != tuple(var.spec.shape):
            raise ShapeError(f"cannot assign {spec} to variable {var.name}, which is {var.spec}{self.tape.at()}")
        return new

    def _as_tensor(self, value: object) -> torch.Tensor:
        if isinstance(value, Variable):
            return self.read(value)
        if isinstance(value, torch.Tensor):
            return value
        with _disable_current_modes():
            return torch.as_tensor(value)

    def group(
        self, values: tuple[Value, ...], name: str | None = None, *, tags: frozenset[str] = frozenset(),
        attrs: Mapping[str, Any] | None = None, effects: tuple[int, ...] = (),
    ) -> Operation:  # fmt: skip
        """An Operation that runs all of ``values`` and the nodes of ``effects``; ``attrs`` hold its further facts."""
        more = attrs or {}
        value = self.tape.append(
            "tfnb.group", next(iter(more), "group"), (), inputs=values,
            attrs={"values": tuple(map(Ref, range(len(values)))), **more}, tags=tags, scope=self.scopes.current(),
            chosen=name, effects=effects,
        )  # fmt: skip
        return self.operation(value)

    def operation(self, value: Value) -> Operation:
        """The handle of a node without outputs."""
        made = Operation(self.graph, value)
        self.operations.add(made)
        return made

    def constant(self, tensor: torch.Tensor, name: str | None = None) -> Entry:
        """A node that holds ``tensor``."""
        tensor = physical(tensor)
        value = self.tape.append(
            "tfnb.constant", "constant", (self.space.shapes.spec(tensor),), attrs={"value": tensor},
            chosen=name,
        )  # fmt: skip
        fake = self.space.fakes[value] = self.space.shapes.like(tensor)
        self.space.samples.root(value, tensor)
        return Entry(value, fake, None if self.lazy else tensor)

    def placeholder(self, spec: Spec, sample: torch.Tensor | None, name: str | None) -> Tensor:
        """A node that must be fed."""
        value = self.tape.append("tfnb.placeholder", "placeholder", (spec,), chosen=name)
        fake, sample = self.symbols.fake(spec), physical(sample)
        self.space.fakes[value] = fake
        self.space.samples.root(value, sample)
        tensor = self._wrap(Entry(value, fake, sample))
        tensor._feed = value
        return tensor

    @contextmanager
    def scope(self, name: str | None) -> Iterator[str]:
        """A name scope: ``"a"`` fresh, ``"a/"`` re-entered, ``None`` the root."""
        with self.scopes.name_scope(name) as path:
            yield path

    @contextmanager
    def tagged(self, tags: frozenset[str], forward: int | None = None) -> Iterator[None]:
        """Nodes recorded inside carry the tags and the forward node's id."""
        with self.tape.marked(tags=self.tape.marks.tags | tags, forward=forward):
            yield

    @contextmanager
    def after(self, ids: tuple[int, ...] | None) -> Iterator[None]:
        """Control dependencies: nodes recorded inside run after ``ids``, and reads inside are fresh."""
        before, self.tape.reads = self.tape.reads, {}
        try:
            with self.tape.marked(control=() if ids is None else (*self.tape.marks.control, *ids)):
                yield
        finally:
            self.tape.reads = before

    @contextmanager
    def placed(self, device: Scope) -> Iterator[None]:
        """Nodes recorded inside request this device, regardless of enclosing scopes."""
        with self.tape.marked(device=device):
            yield

    # -- what leaves the graph --------------------------------------------------------------------------------

    def escaped(self, value: Any, how: str) -> None:
        """A value was read while recording: the number is a constant of the graph, with a guard in staged code.

        Nothing is said of a value that is the same in every run.
        """
        if self.refuse is not None:
            self.refuse(how)
        if isinstance(value, Tensor) and self.tape.is_fixed(self._entry(value).value):
            return
        source = self.where()
        if isinstance(value, Tensor):
            fresh = counters_of(self, self._entry(value).value) - self.tape.asked.keys()
            self.tape.asked |= dict.fromkeys(fresh, source)
        where = f"{source.label} line {source.line} `{how}`" if source else how
        is_guarded = isinstance(value, Tensor) and stands_for_number(self, self._entry(value).value)
        if is_guarded:
            guard_number(self, value)
            where += " needs the number itself: a run must have the sample's, and"
        asked = asked_in(source, self.stop)
        note = f"{where} took the sample's value, so what Python makes of it is the same in every run{asked}"
        self._tell(note, warns=not is_guarded)

    def is_taken(self, tensor: Tensor) -> bool:
        """Whether a recorded tensor stands for a Python number that staged code took."""
        return tensor.graph is self.graph and stands_for_number(self, self._entry(tensor).value)

    def text_of(self, how: str) -> None:
        """A value was made into text while recording."""
        self.note(f"`{how}` took the sample's value, so the text is the same in every run")

    def streams_differ(self, what: str) -> None:
        """Note that recorded draws do not come from torch's generators."""
        self.note(f"{what} does not reach recorded draws: a graph's random nodes have seeded streams of their own")

    def note(self, text: str) -> None:
        """Something to be said once about this line."""
        self._tell(self._at(text), warns=False)

    def warn(self, text: str) -> None:
        """A note that runs differ from plain PyTorch by this line: a warning where no notebook shows notes."""
        self._tell(self._at(text), warns=True)

    def _at(self, text: str) -> str:
        source = self.where()
        return f"{f'{source.label} line {source.line}' if source else 'recording'}: {text}"

    def _tell(self, note: str, *, warns: bool) -> None:
        if note not in self.tape.notes:
            self.tape.notes.append(note)
            self.tape.differing += [note] * warns

    def guard(
        self, tensor: torch.Tensor, outcome: bool, raises: str | None = None, lacks: str | None = None,
        because: str | None = None,
    ) -> None:  # fmt: skip
        """Every later node runs only where ``tensor`` has this truth.

        raises: what Python would raise elsewhere; lacks: what is said to a run where it has not; because: why a
        staged statement is Python's.
        """
        value = self._entry(tensor).value
        state = self.tape.state_behind(value)
        said = {"state": state} if state and raises is None else {} if raises is None else {"raises": raises}
        if lacks is not None:
            said = {"lacks": lacks}
        if asked := asked_in(self.where(), self.stop):
            said["asked"] = asked
        if because is not None:
            said["because"] = because
        guard = self.tape.append(
            "tfnb.guard", "guard", (), inputs=(value,), attrs={"value": Ref(0), "outcome": outcome, **said},
            scope=self.scopes.current(),
        )  # fmt: skip
        self.tape.marks = replace(self.tape.marks, control=(*self.tape.marks.control, guard.node))
        self.tape.named_above[guard.node] = self.named_nodes()

    def named_nodes(self) -> frozenset[tuple[str, int]]:
        """The names of the program that stand for recorded tensors now, each with the id of its node."""
        found = list(self._names().items())
        return frozenset(
            (name, value.shown.value.node) for name, value in found
            if isinstance(value, Tensor) and value.graph is self.graph and not name.startswith("_")
        )  # fmt: skip

    def branch(
        self, tensor: torch.Tensor, outcome: bool, *, is_check: bool = False, raises: str | None = None,
        is_state: bool = False, because: str | None = None,
    ) -> None:  # fmt: skip
        """Python took a branch on a recorded value: guard every later node by the outcome, and warn once a line.

        is_check: the other branch only raises, so there is nothing else that the graph could hold; raises: what.
        because: why a statement that could have both is Python's.
        is_state: it is what a buffer holds, which no feed decides about.
        """
        source = self.where()
        entry = self._entry(tensor)
        self.guard(tensor, outcome, raises, because=because)
        key = ("branch", source and source.line)
        if not is_check and not is_state and key not in self._warned and not self.tape.is_fixed(entry.value):
            self._warned.add(key)
            warn_of_branch(source, outcome, self.stop, because)

    def heard(self, text: str, expr: object, *, by_torch: bool = False) -> None:
        """A relation between sizes that this recording now relies on; one of torch's checks, only in its own line."""
        source = self.where()
        if isinstance(expr, sympy.Eq):
            self.tape.equalities.append((text, expr, f"{source or ''}{asked_in(source, self.stop)}"))
        guard = Guard(text, source, self.owner, is_local=by_torch)
        if all(not other.covers(guard) for other in self.tape.guards):
            self.tape.guards.append(guard)

    def settled(self, expr: sympy.Expr) -> Any:
        """Answer for a size that only data tell: take the samples' answer, and guard that a run agrees."""
        return settle_size(self, expr)

    # -- the dispatch mode --------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Op, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        __tracebackhide__ = True
        if isinstance(func, HigherOrderOperator):
            return higher_order.call(self, func, args, kwargs or {})
        with self.symbols.inside():
            try:
                result = self._dispatched(func, args, kwargs or {})
            except GraphFormatError as error:
                raise Unsupported(f"{op_name(func)}: {error}{self.tape.at()}", op=op_name(func)) from error
        raise_held()
        return result

    def _dispatched(self, func: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        __tracebackhide__ = True
        row = _ANSWERS.get(func)
        if row is not None:
            return row(self, *args, **kwargs)
        own = facts(func)
        is_first = not any(isinstance(leaf, Tensor) for leaf in leaves((args, kwargs)))
        if is_first and constructing(self, own, args):
            made = func(*fixed(args), **fixed(kwargs))
            if isinstance(made, torch.Tensor):
                self.born[made] = True
            return made
        if self.override(func) is not None:
            return record_call(self, func, own, args, kwargs)  # whole, so that its rule sees its arguments
        row = _OPS.get(func)
        if row is not None:
            with self.on():
                result = row(self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if own.decomposes:
            with self.on():
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                if own.view_or_copy:
                    note_copy(self, args[0] if args else kwargs["self"], result)
                return result
        if own.writes:
            return record_write(self, func, own, args, kwargs)
        return record_call(self, func, own, args, kwargs)

    def record_view(self, view: Op, op: Op, x: torch.Tensor) -> Any:
        """Record ``op``; the result looks at the memory of ``x`` as that of ``view`` would."""
        with _disable_current_modes():
            return record_call(self, op, facts(view), (x,), {})

    def is_unused(self, tensor: torch.Tensor) -> bool:
        """Whether this is a parameter or buffer made in this recording that nothing recorded has used yet."""
        return tensor in self.born and known(tensor) is None

    def override(self, func: Op) -> Callable[..., Any] | None:
        """The user's gradient override for this op, if any; gradient rules themselves use the standard gradient."""
        if not self.overrides or "gradient" in self.tape.marks.tags:
            return None
        return self.overrides.get(op_name(func))

    def _of_here(self, tensor: Tensor) -> Tensor:
        """Rebase a view of a variable from an earlier recording onto the variable's value in this recording."""
        var = tensor._family.variable
        if var is not None and tensor._chain and self.tape.is_earlier(tensor._family.entry.value):
            self._elsewhere.setdefault(tensor, (tensor._entry, tensor._family, tensor._seen))
            tensor._family, tensor._seen = self._read_base(var), -1
        return tensor

    # -- tensors to entries -----------------------------------------------------------------------------------------

    def _entry(self, tensor: torch.Tensor) -> Entry:
        """The current entry of any tensor met while recording."""
        tensor = self.handle(tensor)
        if tensor._seen != tensor._family.version:
            self._refresh(tensor)
        entry = tensor._entry
        if entry.value.node not in self.tape.by_id:
            own = self.graph.contents.by_id.get(entry.value.node)
            if own is not None:  # the block that this recording replaces
                raise StaleNode(
                    f"a tensor used{self.tape.at()} is not in graph {self.graph.name} any more: node {own.name} is of "
                    "an earlier run of this cell, which this run replaces: first run the cell that the name had its "
                    "value from, or give the result another name"
                )
            raise missing(self.graph, entry.value, f"a tensor used{self.tape.at()} is")
        if entry.find is None and not self.lazy:
            entry.find = self.space.awaited
        return entry

    def _refresh(self, tensor: Tensor) -> None:
        """A view whose base was written: look again."""
        base = tensor._family
        entry = base.entry
        if entry.lost:
            raise Unsupported(f"{entry.lost}{self.tape.at()}")
        if tensor._chain:
            with self.on(), self.tape.marked(tags=self.tape.marks.tags - STRAIGHT):  # of a write that takes it
                look = looked(tensor._chain, self._wrap(entry, base))
            entry = self._entry(look)
        tensor._entry, tensor._seen = entry, base.version

    def handle(self, tensor: torch.Tensor) -> Tensor:
        """The recorded tensor that stands for any tensor met while recording."""
        if isinstance(tensor, Tensor):
            return self._of_here(tensor) if tensor._space is self.space else self.outside.handle(tensor.sample)
        return self.outside.handle(tensor)

    def home(self, tensor: torch.Tensor) -> Base:
        """The base that the aliases of a tensor share."""
        return self.handle(tensor)._family

    def fresh(self, tensor: torch.Tensor) -> Tensor:
        """The value of ``tensor`` in memory of its own."""
        return self._wrap(self._entry(tensor))

    def variable_of(self, tensor: torch.Tensor) -> Variable | None:
        """The Variable of a Parameter, buffer or leaf; None for other tensors."""
        var = known(tensor)
        if var is not None and var in self.tape.reads:
            return var
        is_leaf = isinstance(tensor, _STATE) or (tensor.requires_grad and tensor.is_leaf)
        if var is None and not is_leaf and not self.scopes.places(tensor):
            self.scopes.look_for_buffer(tensor)
        places = self.scopes.places(tensor)
        if var is None and not is_leaf and not places:
            return None
        if var is not None and var.name != "Variable" and not places:
            return var
        name = self.scopes.label(tensor, self.tape.labels)
        return held(tensor, places, name) if places else variable(tensor, name=name)

    def _wrap(self, entry: Entry, base: Base | None = None, chain: tuple[View, ...] = ()) -> Tensor:
        with torch._C.DisableTorchFunction():
            tensor = Tensor(entry, self.space, base, chain)
        self.live[tensor] = True
        return tensor
