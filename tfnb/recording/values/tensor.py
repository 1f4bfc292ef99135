"""The recorded tensor: a torch.Tensor that holds a graph value, a fake tensor with symbolic sizes, and a sample.

Inside a recording every op on it is recorded. Outside, ops give plain tensors computed on the sample.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.errors import FailedPrecondition, InvalidArgument, StaleNode, TfnbError, Unsupported
from tfnb.graph import Graph, Node, Spec, Value, Variable, current
from tfnb.graph.subgraph import path_to
from tfnb.recording.marks.notes import warn_of_sample
from tfnb.recording.values.checks import is_check
from tfnb.recording.values.layout_queries import FORMATS, contiguous
from tfnb.recording.values.outside_calls import RecordedTensor
from tfnb.recording.values.views import View, renewed_chain
from tfnb.recording.values.workspace import Workspace

_versions = itertools.count(1)


class Entry:
    """A graph value with its fake tensor and its sample (None where there is none).

    find: computes a sample that nobody has asked for yet. lost: why nobody knows any more what the tensor holds.
    """

    __slots__ = ("_sample", "fake", "find", "lost", "value")

    def __init__(
        self, value: Value, fake: torch.Tensor, sample: torch.Tensor | None,
        find: Callable[[Value], torch.Tensor | None] | None = None, lost: str = "",
    ) -> None:  # fmt: skip
        self.value, self.fake, self._sample, self.find, self.lost = value, fake, sample, find, lost

    @property
    def sample(self) -> torch.Tensor | None:
        """The sample, computed now if it was lazy."""
        if self._sample is None and self.find is not None:
            self._sample = self.find(self.value)
        return self._sample

    @sample.setter
    def sample(self, sample: torch.Tensor | None) -> None:
        self._sample = sample

    @property
    def waits(self) -> bool:
        """Whether the sample is lazy and not yet computed."""
        return self._sample is None and self.find is not None

    def known(self) -> torch.Tensor | None:
        """The sample, if already computed."""
        return self._sample

    def light(self, fake: torch.Tensor | None = None) -> Entry:
        """A copy of the entry without the sample, which is found again on demand; ``fake``: with other sizes."""
        return Entry(self.value, self.fake if fake is None else fake, None, self.find, self.lost)

    def of(self, value: Value) -> Entry:
        """The entry of another value that is equal to this one."""
        return Entry(value, self.fake, self._sample, self.find)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Base:
    """The shared memory of a family of aliases: its current entry, which each write replaces.

    ``version`` is 0 before the first write and then never twice the same, also where a write is taken back.
    ``written`` is called with the new entry when the base is a Variable.
    """

    entry: Entry
    version: int = 0
    written: Callable[[Entry], Entry] | None = None
    variable: Variable | None = None
    frozen: str = ""  # why nothing may be written here
    twins: tuple[weakref.ref[Base], ...] = ()  # others that stand for the same memory, through ``.data = ...``
    copies: tuple[tuple[weakref.ref[Base], Callable[[], Any]], ...] = ()  # others, where sizes make a copy a view
    shares: tuple[tuple[weakref.ref[Base], str], ...] = ()  # others of the same memory in some runs, and why
    views: list[weakref.ref[Tensor]] = field(default_factory=list)  # tensors made of it by views

    @property
    def held_views(self) -> list[Tensor]:
        """The views of the memory that somebody still holds."""
        return [view for view in (each() for each in self.views) if view is not None and view._family is self]

    def write(self, entry: Entry) -> None:
        """Replace the entry; aliases notice by the version."""
        self.become(self.written(entry) if self.written else entry)

    def become(self, entry: Entry) -> None:
        """Look at another entry, as if nothing had been written."""
        self.entry = entry
        self.version = next(_versions)


class Tensor(RecordedTensor):
    """A recorded tensor. ``.sample`` is its plain value while recording, ``.value`` its place in ``.graph``."""

    __module__ = "torch.tfnb"  # opt_einsum, autoray and others look there for the library that a tensor is of

    _entry: Entry
    _family: Base
    _chain: tuple[View, ...]
    _seen: int
    _feed: Value | None
    _space: Workspace
    _graph: Graph

    @staticmethod
    def __new__(
        cls, entry: Entry, space: Workspace, base: Base | None = None, chain: tuple[View, ...] = (),
        seen: int | None = None,
    ) -> Tensor:  # fmt: skip
        fake, known = entry.fake, entry.known()
        memory = fake if known is None else known  # without the bytes torch multiplies symbols, which takes 0.1 ms
        with space.symbols.laying():
            self = torch.Tensor._make_wrapper_subclass(
                cls, fake.shape, strides=fake.stride(), storage_offset=fake.storage_offset(), dtype=fake.dtype,
                device=fake.device, layout=fake.layout, requires_grad=False,
                storage_size=memory.untyped_storage().nbytes(),
            )  # fmt: skip
        torch._C._set_throw_on_mutable_data_ptr(self)  # whatever would read or write its memory in C++
        self._entry = entry
        self._family = base or Base(entry)
        self._chain = chain
        self._register()
        self._seen = self._family.version if seen is None else seen
        self._feed = None
        self._space = space
        self._graph = space.graph
        return self

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    def _register(self) -> None:
        """Let the base know its view."""
        if self._chain:
            self._family.views.append(weakref.ref(self))

    # -- where it stands in the graph -----------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        """The graph of the recording that made this tensor."""
        return self._graph

    @property
    def shown(self) -> Entry:
        """The entry at the last refresh."""
        return self._entry if self._chain else self._family.entry

    @property
    def entry(self) -> Entry:
        """The current entry; a view of written memory is refreshed."""
        if self._family.entry.lost:
            raise Unsupported(self._family.entry.lost)
        is_current = self._seen == self._family.version
        if not self._chain or (is_current and self._family.variable is None):
            return self.shown
        recording = next((r for r in reversed(current.stack.open) if r.graph is self._graph), None)
        return self.shown if recording is None else recording.look(self)

    def is_foreign(self) -> bool:
        """Whether no open recording is of its graph."""
        return all(recording.graph is not self._graph for recording in current.stack.open)

    @property
    def value(self) -> Value:
        """(node id, output index); after an in-place write, of the new value."""
        return self.entry.value

    @property
    def feed_value(self) -> Value:
        """The Value a feed under this key replaces: a placeholder written in place stays its own key."""
        return self._feed or self.value

    @property
    def node(self) -> Node:
        """The producing node; raises StaleNode if its cell was run again."""
        return _node(self._graph, self.value)

    @property
    def index(self) -> int:  # type: ignore[override]
        """The number of the node's output."""
        return self.value.index

    @property
    def spec(self) -> Spec:
        """dtype, symbolic shape, device."""
        return self._space.symbols.spec(self._entry.fake)

    @property
    def name(self) -> str:  # type: ignore[override]
        """``node`` or ``node:index``, or the Python name that a further output was assigned to."""
        value = self.value
        if not value.index:
            return self.node.name
        return self._graph.contents.assigned.get(value) or f"{self.node.name}:{value.index}"

    @property
    def sample(self) -> torch.Tensor:
        """The plain value while recording; raises InvalidArgument where there is none."""
        found = self.found_sample()
        if found is None:
            raise InvalidArgument(
                f"{self.described()} has no value while recording: it depends on a placeholder without a sample. "
                "Give tfnb.placeholder a sample, or use the value in a run",
            )
        return found

    def found_sample(self) -> torch.Tensor | None:
        """The sample, or None where there is none."""
        entry = self.entry
        found = entry.sample
        return self._space.sample(entry.value) if found is None else found

    def look_as(self, other: Tensor) -> None:
        """Become another handle of the value of ``other``, with its shape and strides."""
        self._entry, self._family, self._chain, self._seen = other._entry, other._family, other._chain, other._seen
        self._register()
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            self.data = other  # sizes and strides; torch asks whether the two fit, also where there is no sample

    def renew(self, ids: Container[int], renewed: Callable[[Any], Any]) -> None:
        """If a node of ``ids`` computes this tensor, recompute the sample on demand and renew the sizes."""
        before, base = self._entry, self._family.entry
        if base.value.node in ids:
            self._family.entry = base.light(renewed(base.fake))
        if before.value.node not in ids:
            return
        self._entry = before.light(renewed(before.fake)) if self._chain else self._family.entry
        if self._entry.fake is not before.fake:
            chain = renewed_chain(self._chain, renewed)
            with self._space.symbols.quiet():
                self.look_as(Tensor(self._entry, self._space, self._family, chain, self._seen))

    def eval(self, feed_dict: Mapping[Any, Any] | None = None) -> torch.Tensor:
        """The value in the default session of its graph."""
        from tfnb.session import run  # listed exception: .eval asks the session

        return run(self, feed_dict)

    def described(self) -> str:
        try:
            return f"{self.name}: {self.spec}"
        except StaleNode:
            return str(self.spec)

    # -- behaviour ------------------------------------------------------------------------------------------

    def _repr_html_(self) -> str:
        from tfnb.view import tensor_html  # listed exception: a repr asks view

        return tensor_html(self)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        try:
            shown = f"sample {torch.Tensor.__repr__(self.sample)}"
        except (InvalidArgument, Unsupported):
            shown = "no sample"
        return f"<{self.described()}, {shown}>"

    def __format__(self, spec: str) -> str:
        if self.dim():
            return format(repr(self), spec)
        recording = current.recording()
        if recording is not None:
            recording.text_of("format()")
        elif self.found_sample() is not None:
            self.taken_outside("format()")
        with _disable_current_modes():
            return format(self.sample, spec)

    def _escaped(self, how: str) -> torch.Tensor:
        """The sample, leaving the graph: an open recording notes the line, and outside of one the line is warned of."""
        recording, sample = current.recording(), self.sample
        if recording is not None:
            recording.escaped(self, how)
        else:
            self.taken_outside(how)
        return sample

    def taken_outside(self, how: str) -> None:
        """Say that the user's line took the sample's value where nothing is recorded."""
        with suppress(StaleNode):  # a run would say that
            if self.node.op != "tfnb.constant":
                warn_of_sample(self.name, how, self._space.told)

    def __bool__(self) -> bool:
        __tracebackhide__ = True
        return self._truth(sys._getframe(1))

    def _truth(self, asking: FrameType) -> bool:
        """The sample's truth value; an open recording has it as the answer to a branch that a frame asks."""
        __tracebackhide__ = True
        recording = current.recording()
        outcome = bool(self.sample)
        if recording is not None:
            checks = is_check(asking)
            recording.branch(self, outcome, is_check=checks, raises="" if checks else None)
        return outcome

    def item(self) -> Any:
        __tracebackhide__ = True
        if self.dtype is torch.bool and current.recording() is not None:
            return self._truth(sys._getframe(1))  # the number is what an `if` asks for
        return self._escaped("item()").item()

    def __float__(self) -> float:
        return float(self._escaped("float()"))

    def __int__(self) -> int:
        return int(self._escaped("int()"))

    def __index__(self) -> int:
        return self._escaped("index").__index__()

    def tolist(self) -> Any:
        return self._escaped("tolist()").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return _read_only(self._escaped("numpy()").numpy(force=force))

    def __array__(self, dtype: object = None, copy: object = None) -> Any:
        return _read_only(self._escaped("numpy()").__array__(dtype))

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        """Whether the memory has this format: decided by the sizes, and guarded where sizes vary."""
        sizes, strides = self.shape, self.stride()
        if memory_format not in FORMATS or not any(isinstance(n, torch.SymInt) for n in (*sizes, *strides)):
            return super().is_contiguous(memory_format=memory_format)
        return bool(contiguous(self._space.symbols.env, sizes, strides, memory_format))

    def dim_order(self, **options: Any) -> tuple[int, ...]:
        if any(isinstance(n, torch.SymInt) for n in self.shape):
            raise Unsupported(f"dim_order() of {self.described()}, whose sizes vary: decide by stride() instead{_at()}")
        return super().dim_order(**options)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of its elements; torch's own wants numbers for the sizes."""
        return self.numel() * self.element_size()

    def untyped_storage(self) -> torch.UntypedStorage:
        """Outside of a recording the sample's storage; inside, an error: its bytes would be the sample's in
        every run.
        """
        if current.recording() is None:
            return self.sample.untyped_storage()
        raise FailedPrecondition(
            f"a recorded tensor has no memory of its own: use .nbytes or .numel(), or .sample.untyped_storage(){_at()}"
        )

    def as_subclass(self, cls: type) -> Any:
        """Outside of a recording the sample as a subclass; inside, refused with the line."""
        if isinstance(self, cls):
            return self
        if current.recording() is None:
            return self.sample.as_subclass(cls)
        raise Unsupported(
            f"as_subclass({cls.__name__}): a recorded tensor stays a tfnb.Tensor, and the graph would miss what "
            f"{cls.__name__} makes of torch's calls. Call on the tensor itself what it is made for, or do so outside "
            f"of the recording and feed the result{_at()}"
        )

    def data_ptr(self) -> int:
        raise FailedPrecondition(
            "a recorded tensor has no memory of its own: make the function that asks for data_ptr() a "
            f"torch.library.custom_op, or use .sample{_at()}"
        )

    def apply_(self, function: Callable[..., Any]) -> Any:
        raise Unsupported(f"apply_() calls Python for each element of a sample: use torch calls{_at()}")

    def map_(self, *args: object) -> Any:
        raise Unsupported(f"map_() calls Python for each element of a sample: use torch calls{_at()}")

    def __dlpack__(self, **options: Any) -> Any:
        return self._apart("__dlpack__()").__dlpack__(**options)

    def __reduce_ex__(self, protocol: object) -> Any:
        return self._apart("pickle").__reduce_ex__(protocol)

    def _apart(self, how: str) -> torch.Tensor:
        """The sample in memory of its own, leaving the graph."""
        with _disable_current_modes():
            return self._escaped(how).detach().clone()

    def __copy__(self) -> torch.Tensor:
        """Another handle of the same memory, detached from its history, as in torch."""
        copy = self.detach()
        return copy.requires_grad_() if self.requires_grad else copy

    def __deepcopy__(self, memo: object) -> torch.Tensor:
        if current.recording() is None:
            return self.sample.detach().clone()
        if self.requires_grad and not self.is_leaf:
            raise FailedPrecondition(
                f"deepcopy() takes tensors that the program made itself, as in torch, and {self.described()} was "
                f"computed from what requires a gradient: use .detach().clone(){_at()}"
            )
        copy = self.detach().clone()
        return copy.requires_grad_() if self.requires_grad else copy

    def __hash__(self) -> int:
        """By identity; in the program's own sets and dicts, one that stands for a Python number as that number."""
        recording, is_number = current.recording(), getattr(self, "_is_number", False)
        if recording is None or not (is_number or recording.tape.numbers) or _hashes_by_identity(sys._getframe(1)):
            return id(self)
        return hash(self.item()) if is_number or recording.is_taken(self) else id(self)


def _hashes_by_identity(frame: FrameType) -> bool:
    """Whether code of tfnb or torch, or a weak reference, asks for a hash: those tell tensors apart, not numbers."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("tfnb", "torch", "weakref")


def _read_only(array: Any) -> Any:
    """The array of a sample, read-only in a recording: what NumPy writes into a tensor's memory, no run would see."""
    if current.recording() is not None:
        array.flags.writeable = False
    return array


class WholeNumbers:
    """Numbers whose count only a run knows, such as a range up to a size: an index, or data of a tensor."""

    def tensor(self) -> torch.Tensor:
        """The numbers as int64[n]."""
        raise NotImplementedError


class Operation:
    """A node without an output (minimize, group): something to run, with result None."""

    def __init__(self, graph: Graph, value: Value) -> None:
        self.graph, self.value = graph, value

    @property
    def node(self) -> Node:
        """The node; raises StaleNode if its cell was run again."""
        return _node(self.graph, self.value)

    @property
    def name(self) -> str:
        """The node's name."""
        return self.node.name

    def run(self, feed_dict: Mapping[Any, Any] | None = None) -> None:
        """Run the operation in the default session of its graph."""
        from tfnb.session import run  # listed exception: .eval asks the session

        run(self, feed_dict)

    def _repr_html_(self) -> str:
        from tfnb.view import operation_html  # listed exception: a repr asks view

        return operation_html(self)

    def __repr__(self) -> str:
        try:
            return f"<Operation {self.name}>"
        except StaleNode as gone:
            return f"<Operation: {gone}>"


def _at() -> str:
    """The line of the open recording, as the end of an error text."""
    recording = current.recording()
    return "" if recording is None else recording.tape.at()


def _node(graph: Graph, value: Value) -> Node:
    """The node of a handle, in the graph or in the graph's open recording; raises StaleNode."""
    node = graph.contents.by_id.get(value.node)
    recording = current.recording()
    if node is None and recording is not None and recording.graph is graph:
        try:
            node = recording.node(value.node)
        except KeyError:  # a handle of a recording that failed
            node = None
    if node is None:
        raise missing(graph, value, "this is")
    return node


def missing(graph: Graph, value: Value, asked: str) -> TfnbError:
    """The error for a handle whose node is not in its graph: the node was removed, or is inside of a branch or loop."""
    if value.node in graph.stale:
        return StaleNode(f"{asked} not in graph {graph.name} any more: {graph.stale[value.node]}")
    recording = current.open_of(graph)
    nodes = graph.contents.by_id if recording is None else recording.tape.by_id
    if recording is not None and value.node in nodes:
        return FailedPrecondition(
            f"{asked} not in graph {graph.name} yet: its recording is not finished. Run it in a cell below the block"
        )
    places = path_to(nodes.values(), value.node)
    if places is None:
        where = "inside of a branch, loop or function of the graph, and no result of it"
    else:
        where = f"{places[0]}, inside of {' in '.join(places[1:])}"
    return InvalidArgument(f"{asked} {where}: only a run that goes there has it, or many of it: return it from there")
