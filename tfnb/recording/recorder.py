"""The recorder: a dispatch mode that runs each ATen call at once on samples and appends a node.

It sees every call of the block, also those without a recorded tensor (views of parameters, factories, random draws).
Composites are taken apart here; writes become their out-of-place twins; everything else is one node. Nothing outside
the recording changes: variables, modules, user tensors and torch's random state stay as they are.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import sympy
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils.weak import WeakIdKeyDictionary

from tfnb.errors import InvalidArgument, ShapeError, StaleNode, Unsupported
from tfnb.graph import Graph, Guard, Node, Owner, Ref, Source, Spec, Value, Variable
from tfnb.graph.node import leaves
from tfnb.graph.variable import updated
from tfnb.kernels.random import seeded
from tfnb.recording.custom_ops import lacks_shapes, shapes
from tfnb.recording.habits import Habits
from tfnb.recording.journal import Journal
from tfnb.recording.ops import Facts, Op, bind, facts, kernel, op_name
from tfnb.recording.replaced import PHYSICAL, REPLACED, SHAPES
from tfnb.recording.report import dense, explained, user_level
from tfnb.recording.scopes import Scopes, clean
from tfnb.recording.tape import Tape
from tfnb.recording.tensor import Base, Entry, Operation, Tensor
from tfnb.recording.variables import held, known, variable
from tfnb.recording.views import View
from tfnb.recording.workspace import conjugating, physical, stream_seed, workspace
from tfnb.recording.writes import record_write

aten = torch.ops.aten
BIG_CONSTANT = 1 << 20  # bytes; larger captured tensors are announced, and copied only if they stay in the graph
_STATE = (torch.nn.Parameter, torch.nn.Buffer)
_ABSENT = Spec(torch.bool, (0,))  # stands for an output that the op leaves out, as its mask says
_CONSTRUCTORS = frozenset({"__init__", "reset_parameters", "_reset_parameters", "initialize_parameters"})
_CONVERTERS = frozenset({"_apply"})  # of a module just made: .double(), .to(...)


class Recorder(TorchDispatchMode):
    """One open recording of one owner into one graph."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the handler is never traced, and the guard costs more than a dispatch

    def __init__(
        self, graph: Graph, owner: Owner, *, where: Callable[[], Source | None], kept: tuple[Node, ...],
        names: Callable[[], Mapping[str, Any]], stop: FrameType | None = None, lazy: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.graph, self.owner, self.lazy = graph, owner, lazy
        self.space = workspace(graph)
        self.symbols = self.space.symbols
        self.where = where
        self.scopes = Scopes(names)
        self.tape = Tape(owner, where, kept)
        self.new_guards: list[Guard] = []
        self.equalities: list[tuple[str, sympy.Eq, Source | None]] = []
        self.notes: list[str] = []
        self.born = WeakIdKeyDictionary()  # parameters and buffers made in this recording
        self.journal = Journal()
        self.borrowed: dict[int, Entry] = {}  # constants that still share the memory of what was captured
        self.live = WeakIdKeyDictionary()  # every recorded tensor that somebody still holds
        self._handles: dict[int, tuple[torch.Tensor, Tensor]] = {}  # of plain tensors met, by id
        self._memory: dict[int, tuple[torch.Tensor, Tensor]] = {}  # the first of them, by their storage
        self._reads: dict[Variable, Base] = {}
        self._warned: set[Any] = set()
        self._stop = stop
        self.default_device: Any = None
        self.packings: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by the tensor of their batch sizes
        self.regions = 0  # of values that are computed again for the backward pass
        self.refuse: Callable[[str], None] | None = None  # asked about each value that leaves the graph
        self.overrides: Mapping[str, Callable[..., Any]] = {}  # gradient rules of the ops recorded now
        self.letters: set[str] = set()  # symbols declared in this recording
        self.habits = Habits(self)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record what runs inside, also from within a dispatch handler; harmless where it is on already."""
        if _get_current_dispatch_mode() is self:
            yield
        else:
            with self:
                yield

    def changes(self, *things: Tensor | Base) -> None:
        """Said before a handle or base changes: those of earlier recordings are put back should this one fail."""
        for thing in things:
            if thing not in self.live if isinstance(thing, Tensor) else self.tape.is_earlier(thing.entry.value):
                self.journal.note(thing)

    def own(self, node: Node) -> Node:
        """A node that stays in the graph: with a copy of the data that the user may still change."""
        entry = self.borrowed.get(node.id)
        if entry is None:
            return node
        with _disable_current_modes():
            entry.sample = node.attrs["value"].clone()
        self.space.keep(entry.value, entry.sample, root=True)
        return replace(node, attrs={**node.attrs, "value": entry.sample})

    def settle(self) -> None:
        """At the end of the block: views whose base was written, here or below, show the new values."""
        for tensor in (*self.live, *self.space.live):
            base = tensor._family
            if tensor._seen != base.version and base.entry.value.node in self.tape.by_id:
                self._refresh(tensor)

    def look(self, tensor: Tensor) -> Entry:
        """What a recorded tensor means at this place of the program."""
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
        """Give a node of this recording another name (made unique); returns it."""
        return self.tape.rename(node_id, name)

    def tensor(self, value: Value) -> Tensor:
        """A recorded tensor of an existing value."""
        return self._wrap(self._entry_of_value(value))

    def _entry_of_value(self, value: Value) -> Entry:
        node = self.tape.by_id.get(value.node)
        if node is None:
            raise StaleNode(self.graph.stale.get(value.node, f"node {value.node} is not in graph {self.graph.name}"))
        fake = self.space.fakes.get(value)
        if fake is None:
            fake = self.space.fakes[value] = self.symbols.fake(node.outputs[value.index])
        with _disable_current_modes():
            sample = None if self.lazy else self.space.sample(value, self.tape.by_id)
        return Entry(value, fake, sample)

    def read(self, var: Variable) -> Tensor:
        """The variable's value at this place of the program."""
        return self._wrap(self._read_base(var).entry)

    def _read_base(self, var: Variable) -> Base:
        base = self._reads.get(var)
        if base is None:
            with _disable_current_modes():
                sample = physical(var.storage) if var.home is None or not self.lazy else None
                fake = self.space.shapes.like(var.storage)
            value = self.tape.append("tfnb.read", clean(var.name), (var.spec,), attrs={"variable": var})
            base = Base(Entry(value, fake, sample))
            base.written = lambda entry: self._assigned(var, entry, frozenset())
            self.space.fakes[value] = fake
            self.space.keep(value, sample, root=False)
            self._reads[var] = base
        return base

    def write(self, var: Variable, kind: str, *args: Any) -> Tensor:
        """Record a write; returns the value after it."""
        with self.scopes.name_scope(clean(var.name)), self.on():
            new = updated(self.read(var), kind, *(self._as_tensor(a) for a in args))
        base = self._read_base(var)
        base.write(self._entry(self._fitting(var, new)))
        return self._wrap(base.entry)

    def assign(self, var: Variable, tensor: torch.Tensor, *, tags: frozenset[str] = frozenset()) -> Tensor:
        """Record a plain assignment. Tagged ``step`` it is a step to be run: later reads neither pull nor show it."""
        entry = self._entry(self._fitting(var, tensor))
        if "step" not in tags:
            base = self._read_base(var)
            base.write(entry)
            return self._wrap(base.entry)
        self._reads.pop(var, None)
        return self._wrap(self._assigned(var, entry, tags))

    def _assigned(self, var: Variable, entry: Entry, tags: frozenset[str]) -> Entry:
        value = self.tape.append(
            "tfnb.assign", f"{clean(var.name)}/assign", (var.spec,), inputs=(entry.value,),
            attrs={"variable": var, "value": Ref(0)}, tags=tags, scope=self.scopes.current(),
        )  # fmt: skip
        self.space.fakes[value] = entry.fake
        self.space.keep(value, entry.sample)
        return Entry(value, entry.fake, entry.sample)

    def _fitting(self, var: Variable, new: Any) -> torch.Tensor:
        new = self._as_tensor(new)
        spec = self.space.shapes.spec(self._entry(new).fake)
        if spec.dtype != var.spec.dtype or spec.shape != tuple(var.spec.shape):
            raise ShapeError(f"cannot assign {spec} to variable {var.name}, which is {var.spec}{self.tape.at()}")
        return new

    def _as_tensor(self, value: Any) -> torch.Tensor:
        if isinstance(value, Variable):
            return self.read(value)
        if isinstance(value, torch.Tensor):
            return value
        with _disable_current_modes():
            return torch.as_tensor(value)

    def group(
        self, values: tuple[Value, ...], name: str | None = None, *, tags: frozenset[str] = frozenset()
    ) -> Operation:
        """An Operation that runs all of ``values``."""
        attrs = {"values": tuple(map(Ref, range(len(values))))}
        value = self.tape.append(
            "tfnb.group", "group", (), inputs=values, attrs=attrs, tags=tags, scope=self.scopes.current(),
            chosen=name,
        )  # fmt: skip
        return Operation(self.graph, value)

    def constant(self, tensor: torch.Tensor, name: str | None = None) -> Entry:
        """A node that holds ``tensor``."""
        tensor = physical(tensor)
        value = self.tape.append(
            "tfnb.constant", "constant", (self.space.shapes.spec(tensor),), attrs={"value": tensor},
            chosen=name,
        )  # fmt: skip
        fake = self.space.fakes[value] = self.space.shapes.like(tensor)
        self.space.keep(value, tensor, root=True)
        return Entry(value, fake, None if self.lazy else tensor)

    def placeholder(self, spec: Spec, sample: torch.Tensor | None, name: str | None) -> Tensor:
        """A node that must be fed."""
        value = self.tape.append("tfnb.placeholder", "placeholder", (spec,), chosen=name)
        fake, sample = self.symbols.fake(spec), physical(sample)
        self.space.fakes[value] = fake
        self.space.keep(value, sample, root=True)
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
        before, self._reads = self._reads, {}
        try:
            with self.tape.marked(control=() if ids is None else (*self.tape.marks.control, *ids)):
                yield
        finally:
            self._reads = before

    @contextmanager
    def placed(self, device: str | None) -> Iterator[None]:
        """Nodes recorded inside request this device."""
        with self.tape.marked(device=device):
            yield

    # -- what leaves the graph --------------------------------------------------------------------------------

    def escaped(self, tensor: torch.Tensor, how: str) -> None:
        """A value was read while recording: the number is a constant of the graph."""
        if self.refuse is not None:
            self.refuse(how)
        source = self.where()
        note = f"{source.label} line {source.line} `{how}`" if source else how
        if note not in self.notes:
            self.notes.append(note)

    def streams_differ(self, what: str) -> None:
        """Note that recorded draws do not come from torch's generators."""
        source = self.where()
        at = f"{source.label} line {source.line}: " if source else ""
        note = f"{at}{what} does not reach recorded draws: a graph's random nodes have seeded streams of their own"
        if note not in self.notes:
            self.notes.append(note)

    def lost_write(self, base: Base) -> None:
        """Say once a line that a write into a tensor of outside that is no Variable does not last."""
        is_first = self.node(base.entry.value.node).op == "tfnb.constant"
        if not is_first or all(handle._family is not base for _, handle in self._memory.values()):
            return
        source = self.where()
        note = (
            f"{f'{source.label} line {source.line}' if source else 'recording'}: a run does not write into a plain "
            "tensor of outside, and starts each time from what it held; make it a buffer or a tfnb.Variable to keep it"
        )
        if note not in self.notes:
            self.notes.append(note)

    def written(self, tensor: torch.Tensor, how: str = "numpy()") -> torch.Tensor:
        """What a tensor that was not recorded holds for the program: its memory, or what this recording wrote to it."""
        if _storage(tensor) not in self._memory or not self.home(tensor).version:
            return tensor
        self.escaped(tensor, how)
        sample = self._entry(tensor).sample
        if sample is None:
            raise InvalidArgument(f"a tensor written here has no value while recording{self.tape.at()}")
        return sample

    def guard(self, tensor: torch.Tensor, outcome: bool) -> None:
        """Every later node runs only where ``tensor`` has this truth."""
        guard = self.tape.append(
            "tfnb.guard", "guard", (), inputs=(self._entry(tensor).value,),
            attrs={"value": Ref(0), "outcome": outcome}, scope=self.scopes.current(),
        )  # fmt: skip
        self.tape.marks = replace(self.tape.marks, control=(*self.tape.marks.control, guard.node))

    def branch(self, tensor: Tensor, outcome: bool) -> None:
        """Python took a branch on a recorded value: warn once a line, and guard every later node by the outcome."""
        source = self.where()
        entry = self._entry(tensor)
        self.guard(tensor, outcome)
        key = ("branch", source and source.line)
        if key not in self._warned and not self.tape.is_fixed(entry.value):
            self._warned.add(key)
            warnings.warn(
                f"{source or 'recording'}: Python took the {outcome} branch of a recorded value; the graph holds only "
                "that branch, and a run where it would go the other way raises BranchChanged (torch.where and "
                "tfnb's staged control flow have both)",
                stacklevel=user_level(self._stop),
            )

    def heard(self, text: str, expr: Any, kernel: bool) -> None:
        """A relation between sizes that this recording now relies on."""
        source = self.where()
        if isinstance(expr, sympy.Eq):
            self.equalities.append((text, expr, source))
        if all(guard.expr != text for guard in self.new_guards):
            self.new_guards.append(Guard(text, source, self.owner))

    # -- the dispatch mode --------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        __tracebackhide__ = True
        with self.symbols.inside():
            return self._dispatched(func, args, kwargs or {})

    def _dispatched(self, func: Op, args: Any, kwargs: Any) -> Any:
        __tracebackhide__ = True
        if func in _SIZES:
            return [int(size) for size in _SIZES[func](args[0])]
        own = facts(func)
        if func is aten._local_scalar_dense.default:
            return self._leave(args[0])
        if func in _ANSWERS:
            return self._answer(func, args, kwargs)
        if not _mentions(args, kwargs, Tensor) and self._constructing(func, own, args):
            made = func(*args, **kwargs)
            if isinstance(made, torch.Tensor):
                self.born[made] = True
            return made
        if func in (aten.lift_fresh.default, aten.lift.default):
            return args[0] if isinstance(args[0], Tensor) else self._wrap(self._entry(args[0]))
        if self.overrides and self._override(func) is not None:
            return self._call(func, own, args, kwargs)  # whole, so that its rule sees its arguments
        if func in REPLACED:
            with self.on():
                result = REPLACED[func](self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if own.decomposes:
            with self.on():
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if own.writes:
            return record_write(self, func, own, args, kwargs)
        return self._call(PHYSICAL.get(func, func), own, args, kwargs)

    def _leave(self, tensor: torch.Tensor) -> Any:
        """``.item()`` from inside torch: the sample's number."""
        entry = self._entry(tensor)
        if not self.tape.is_fixed(entry.value):
            self.escaped(tensor, "item()")
        if isinstance(tensor, Tensor):
            return tensor.sample.item()
        return (tensor if entry.sample is None else entry.sample).item()

    def _answer(self, func: Op, args: Any, kwargs: Any) -> bool:
        """A comparison that gives a Python bool: the samples' answer, and a guard that it stays so."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if not any(isinstance(t, Tensor) for t in tensors):
            return func(*args, **kwargs)
        samples = [self._entry(t).sample for t in tensors]
        if any(sample is None for sample in samples):
            raise InvalidArgument(f"{op_name(func)} has no answer without samples{self.tape.at()}")
        outcome = bool(func(*samples, *args[len(tensors) :], **kwargs))
        with self.on():
            same = tensors[0].shape == tensors[1].shape
            check = _ANSWERS[func](*args, **kwargs).all() if same else None
        if check is not None:
            self.branch(check, outcome)
        return outcome

    def _constructing(self, func: Op, own: Facts, args: Any) -> bool:
        """Whether this call only makes initial values: it runs for real and leaves no node."""
        mine = bool(args) and isinstance(args[0], torch.Tensor) and self.is_unused(args[0])
        if own.writes and mine and isinstance(args[0], torch.nn.Parameter):
            return args[0].untyped_storage().data_ptr() != 0
        names = _CONSTRUCTORS | _CONVERTERS if mine else _CONSTRUCTORS
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame is not self._stop:
            code = frame.f_code
            me = frame.f_locals.get(code.co_varnames[0]) if code.co_name in names and code.co_argcount else None
            if isinstance(me, (torch.nn.Module, torch.optim.Optimizer)):
                return True
            frame = frame.f_back
        return False

    def is_unused(self, tensor: torch.Tensor) -> bool:
        """Whether this is a parameter or buffer made in this recording that nothing recorded has used yet."""
        return tensor in self.born and known(tensor) is None

    def _call(self, func: Op, own: Facts, args: Any, kwargs: Any) -> Any:
        """Record one op: node, fake result, sample result."""
        __tracebackhide__ = True
        inputs: list[Entry] = []
        attr_args, fake_args, sample_args = self._arguments(list(args), inputs)
        attr_kwargs, fake_kwargs, sample_kwargs = self._arguments(kwargs, inputs)
        fakes = self._fake_call(func, fake_args, fake_kwargs, inputs)
        flat = fakes if isinstance(fakes, (list, tuple)) else (fakes,)
        if not all(f is None or isinstance(f, torch.Tensor) for f in flat) or all(f is None for f in flat):
            return fakes  # sizes and other numbers: symbolic already
        override = self._override(func) if self.overrides else None
        specs = tuple(_ABSENT if f is None else self.space.shapes.spec(f) for f in flat)
        value = self.tape.append(
            op_name(func), self._leaf_name(func), specs,
            inputs=tuple(entry.value for entry in inputs), attrs=bind(func, tuple(attr_args), attr_kwargs),
            scope=self.scopes.current(), is_random=own.is_random,
            tags=frozenset() if override is None else frozenset({"override"}),
        )  # fmt: skip
        if override is not None:
            self.space.rules[value.node] = override
        try:
            samples = self._sample_call(func, sample_args, sample_kwargs, inputs, self.new[-1], len(flat))
        except Exception as error:
            self.tape.drop_last()
            raise self._failed(func, error, inputs) from error
        base, chain, attrs = self._viewed(func, own, args, kwargs)
        wrapped: list[Tensor | None] = []
        for index, (fake, sample) in enumerate(zip(flat, samples, strict=True)):
            if fake is None:
                wrapped.append(None)
                continue
            entry = Entry(Value(value.node, index), fake, sample)
            self.space.fakes[entry.value] = fake
            self.space.keep(entry.value, sample)
            if sample is not None:
                self.symbols.observe(fake, sample)
            view = () if base is None else (*chain, View(func, attrs, index, torch.is_grad_enabled()))
            wrapped.append(self._wrap(entry, base, view))
        if isinstance(fakes, (list, tuple)):
            return type(fakes)(wrapped) if type(fakes) in (list, tuple) else tuple(wrapped)
        return wrapped[0]

    def _override(self, func: Op) -> Callable[..., Any] | None:
        """The gradient that the user gave this op here; what gradient rules record keeps the usual one."""
        return None if "gradient" in self.tape.marks.tags else self.overrides.get(op_name(func))

    def _arguments(self, tree: Any, inputs: list[Entry]) -> tuple[Any, Any, Any]:
        """An argument tree three times: as attrs (Ref, Dim), on fakes, on samples. Tensors are added to ``inputs``."""
        if isinstance(tree, torch.Tensor):
            entry = self._entry(tree)
            inputs.append(entry)
            return Ref(len(inputs) - 1), entry.fake, entry.sample
        if isinstance(tree, (list, tuple)):
            parts = [self._arguments(item, inputs) for item in tree]
            kind = list if isinstance(tree, list) else tuple
            return tuple(kind(part[i] for part in parts) for i in range(3))  # type: ignore[return-value]
        if isinstance(tree, Mapping):
            items = {key: self._arguments(item, inputs) for key, item in tree.items()}
            return tuple({key: part[i] for key, part in items.items()} for i in range(3))  # type: ignore[return-value]
        if isinstance(tree, torch.Generator):
            self.streams_differ("generator=")
            return None, None, None
        return self.symbols.leaf(tree), tree, self.symbols.concrete(tree)

    def _fake_call(self, func: Op, args: Any, kwargs: Any, inputs: list[Entry]) -> Any:
        __tracebackhide__ = True
        try:
            if lacks_shapes(func):
                with self.symbols.kernel():
                    return shapes(self, func, args, kwargs, inputs)
            fakes = self.space.shapes.call(func, args, kwargs, SHAPES.get(func, func))
            return dense(fakes, self.tape.at()) if isinstance(fakes, torch.Tensor) else fakes
        except Exception as error:
            raise self._failed(func, error, inputs) from error

    def _sample_call(
        self, func: Op, args: Any, kwargs: Any, inputs: list[Entry], node: Node, count: int
    ) -> tuple[torch.Tensor | None, ...]:
        if self.lazy or any(entry.sample is None for entry in inputs):
            return (None,) * count
        if node.stream is None:
            dtypes = (*(spec.dtype for spec in node.outputs), *(entry.fake.dtype for entry in inputs))
            with conjugating(any(dtype.is_complex for dtype in dtypes)):
                out = kernel(func)(*args, **kwargs)
        else:
            seed = stream_seed(node, self.graph.seed, 0)
            out = seeded(func, seed, torch.device(node.outputs[0].device), args, kwargs)
        return tuple(map(physical, out)) if isinstance(out, (list, tuple)) else (physical(out),)

    def _viewed(
        self, func: Op, own: Facts, args: Any, kwargs: Any
    ) -> tuple[Base | None, tuple[View, ...], dict[str, Any]]:
        """For a view op: the base it looks at, the chain so far, and its arguments without the viewed tensor."""
        if not own.is_view:
            return None, (), {}
        source = args[0] if args else kwargs["self"]
        named = bind(func, tuple(args), kwargs)
        attrs = {name: arg for name, arg in named.items() if arg is not source}
        handle = self.handle(source)
        if func is aten.as_strided.default:  # counts from the start of the memory, whatever it is called on
            return handle._family, (), {**attrs, "storage_offset": attrs.get("storage_offset", handle.storage_offset())}
        return handle._family, handle._chain, attrs

    # -- tensors to entries -----------------------------------------------------------------------------------------

    def _entry(self, tensor: torch.Tensor) -> Entry:
        """The current entry of any tensor met while recording."""
        tensor = self.handle(tensor)
        if tensor._seen != tensor._family.version:
            self._refresh(tensor)
        entry = tensor._entry
        if entry.value.node not in self.tape.by_id:
            why = self.graph.stale.get(entry.value.node, "its recording failed or was replaced")
            raise StaleNode(f"a tensor used{self.tape.at()} is not in graph {self.graph.name} any more: {why}")
        if entry.sample is None and not self.lazy:
            entry.sample = self.space.sample(entry.value, self.tape.by_id)
        return entry

    def _refresh(self, tensor: Tensor) -> None:
        """A view whose base was written: look again."""
        base = tensor._family
        entry = base.entry
        if tensor._chain:
            with self.on():
                look: torch.Tensor = self._wrap(entry, base)
                for view in tensor._chain:
                    look = view.apply(look)
            entry = self._entry(look)
        self.changes(tensor)
        tensor._entry, tensor._seen = entry, base.version

    def handle(self, tensor: torch.Tensor) -> Tensor:
        """The recorded tensor that stands for any tensor met while recording: itself, a variable's, or a constant's."""
        if isinstance(tensor, Tensor):
            if tensor._space is self.space:
                return tensor
            tensor = tensor.sample
        found = self._handles.get(id(tensor))
        if found is not None:
            return found[1]
        var = self.variable_of(tensor)
        if var is not None:
            base = self._read_base(var)
            handle = Tensor(base.entry, self.space, base)
        else:
            seen = self._seen_memory(tensor)
            handle = self._constant_of(tensor) if seen is None else seen
            self._handles[id(tensor)] = (tensor, handle)
        self._memory.setdefault(_storage(tensor), (tensor, handle))
        return handle

    def _constant_of(self, tensor: torch.Tensor) -> Tensor:
        with _disable_current_modes():
            entry = self.constant(self._captured(tensor))
        if entry.sample is not None and _storage(entry.sample) == _storage(tensor):
            self.borrowed[entry.value.node] = entry
        return Tensor(entry, self.space)

    def _seen_memory(self, tensor: torch.Tensor) -> Tensor | None:
        """A plain tensor that shares memory with one met before: a view of that, so that writes to either show."""
        met, base = self._memory.get(_storage(tensor)), tensor._base
        if met is None and base is not None and self.variable_of(base) is not None:
            met = base, self.handle(base)
        if met is None:
            return None
        first, handle = met
        if not _covers(first, tensor):
            why = "a tensor whose memory another tensor met in this recording shares in part: write to a copy of it"
            if handle._family.version:
                raise Unsupported(f"a read after a write to {why}{self.tape.at()}")
            self.changes(handle._family)
            handle._family.frozen = why
            other = self._constant_of(tensor)
            other._family.frozen = why
            return other
        handle = self.handle(first)
        with self.on():
            offset = tensor.storage_offset() - first.storage_offset() + int(handle.storage_offset())
            return aten.as_strided(handle, tensor.shape, tensor.stride(), offset)

    def home(self, tensor: torch.Tensor) -> Base:
        """What the aliases of a tensor share."""
        return self.handle(tensor)._family

    def fresh(self, tensor: torch.Tensor) -> Tensor:
        """The value of ``tensor`` in memory of its own."""
        return self._wrap(self._entry(tensor))

    def variable_of(self, tensor: torch.Tensor) -> Variable | None:
        """The Variable of a Parameter, buffer or leaf; None for other tensors."""
        var = known(tensor)
        if var is not None and var in self._reads:
            return var
        is_leaf = isinstance(tensor, _STATE) or (tensor.requires_grad and tensor.is_leaf)
        if var is None and not is_leaf and not self.scopes.places(tensor):
            self.scopes.look_for_buffer(tensor)
        places = self.scopes.places(tensor)
        if var is None and not is_leaf and not places:
            return None
        if var is not None and var.name != "Variable" and not places:
            return var
        taken = {n.attrs["variable"].name for n in self.tape.nodes if n.op == "tfnb.read"}
        name = self.scopes.label(tensor, taken)
        return held(tensor, places, name) if places else variable(tensor, name=name)

    def _captured(self, tensor: torch.Tensor) -> torch.Tensor:
        """A plain tensor as a constant: copied, so that later changes do not reach the graph; a big one at the end."""
        size = dense(tensor, self.tape.at()).numel() * tensor.element_size()
        if size <= BIG_CONSTANT:
            return tensor.detach().clone()
        source = self.where()
        self.notes.append(
            f"{source.label + f' line {source.line}' if source else 'recording'}: a constant of {size / 1e6:.1f} MB "
            "stands in the graph; feed it through a placeholder if it is data"
        )
        return tensor.detach()

    def _wrap(self, entry: Entry, base: Base | None = None, chain: tuple[View, ...] = ()) -> Tensor:
        with self.symbols.quiet():  # torch looks whether the tensor is empty
            tensor = Tensor(entry, self.space, base, chain)
        self.live[tensor] = True
        return tensor

    def _leaf_name(self, func: Op) -> str:
        own = clean(func._schema.name.partition("::")[2].strip("_"))
        function = self.scopes.function
        path = [clean(part) for part in self.scopes.path]
        leaf = [own] if function in (None, own) else [str(function), own]
        return "/".join([*path, *leaf])

    def _failed(self, func: Op, error: Exception, inputs: list[Entry]) -> Exception:
        described = ((self.tape.by_id[e.value.node].name, str(self.space.shapes.spec(e.fake))) for e in inputs)
        return explained(func, error, described, self.where(), self.symbols.readable)


def _storage(tensor: torch.Tensor) -> int:
    """The memory of a plain tensor; its own id where that is not one piece."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _covers(first: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether every element of ``tensor`` is one of ``first``, which lies in memory without gaps."""
    start, at = first.storage_offset(), tensor.storage_offset()
    last = at + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    with _disable_current_modes():
        dense = torch.empty_like(first, device="meta").stride() == first.stride()
    return dense and tensor.dtype == first.dtype and start <= at and last < start + first.numel()


# Composites in C++ that want numbers: they fix the sizes, which is heard as equalities and warned about.
_SIZES: dict[Op, Callable[[torch.Tensor], Any]] = {
    aten.size.default: torch.Tensor.size, aten.stride.default: torch.Tensor.stride,
}  # fmt: skip

_ANSWERS: dict[Op, Callable[..., Any]] = {aten.equal.default: torch.eq, aten.allclose.default: torch.isclose}


def _mentions(args: Any, kwargs: Any, kind: type) -> bool:
    return any(isinstance(leaf, kind) for leaf in leaves((args, kwargs)))
