"""A Variable: a persistent tensor with a name and a spec. Data and delegation only.

Locally the value is the storage of the object it was made from (an ``nn.Parameter``, a buffer, or its own tensor), so a
trained graph is a trained module. Once a run or `fit` on a connected cluster has used it, the value lives on its
parameter servers until the cluster is closed, and ``home`` answers for it. What a write means inside a recording is the
recording's business: see `tfnb.graph.current`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial
from numbers import Real
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.errors import FailedPrecondition, InvalidArgument, InvalidType, NotFound, ShapeError, StepAborted, ensure_type
from tfnb.graph import current, lazy_memory, resources
from tfnb.graph.held import CHANGES, TensorHolder, TensorWatch
from tfnb.graph.spec import Spec, flows, tensor_of
from tfnb.graph.variable_locks import LOCKS, counter

_serial = itertools.count()
_NONE: object = object()  # no initial value is kept
_INITIALIZING: ContextVar[tuple[Variable | str, ...]] = ContextVar("initializing", default=())


class ValueOwner(Protocol):
    """The owner of a Variable's value while the value is not in this process: a connected cluster."""

    def value(self, variable: Variable) -> torch.Tensor: ...

    def assign(self, variable: Variable, value: torch.Tensor) -> None: ...


class Leader(Protocol):
    """Who says the value of a Variable: the twin of a torch optimizer."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...


class Variable:
    """A tensor that survives runs.

    initial_value: tensor, array or number, another Variable, or a function that gives one of these. name: a label, made
    unique per graph. trainable: whether ``minimize`` updates it by default. container: where it lives, by default that
    of `tfnb.container`. shared_name: every Variable of that name in a container is this one; raises InvalidArgument for
    another dtype or shape. lazy_init: no value until `initialize`, or until one is assigned; reading raises
    FailedPrecondition. With ``shape`` (and ``dtype``) a lazy initial value may be a function of Variables that are made
    later, and a number is the value of every element: a large table of zeros takes memory only where rows are written.
    partitions: the number of pieces of rows that servers hold it in, or ``"auto"``, as many as it has pieces of 256 KB;
    partition_bytes: the bytes that a piece should not exceed, by default 64 MB. A server holds at most one piece: with
    few servers there are fewer and larger ones. Here, and in files, it is one. Where an update needs more than its own
    rows it is not divided.

    >>> v = Variable(torch.zeros(2), name="v")
    >>> v.assign_add(torch.ones(2))
    tensor([1., 1.])
    >>> v.value()
    tensor([1., 1.])
    """

    _owned: torch.Tensor | None  # what its storage is each time, where that is known
    _start: Any  # the initial value, where it is kept
    spec: Spec
    request: str | None  # a device, asked for where it was made

    def __new__(cls, *args: object, container: str = "", shared_name: str | None = None, **kwargs: object) -> Variable:
        found = resources.shared(container, shared_name)
        return found if isinstance(found, Variable) else object.__new__(cls)

    def __init__(
        self, initial_value: object, *, name: str | None = None, trainable: bool = True, container: str = "",
        shared_name: str | None = None, lazy_init: bool = False, shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None, partitions: int | str | None = None, partition_bytes: int | None = None,
    ) -> None:  # fmt: skip
        ensure_type(dtype, (torch.dtype, type(None)), "the dtype of a Variable")
        ensure_type(name, (str, type(None)), "the name of a Variable")
        owned = None
        if lazy_init and shape is not None:
            spec = Spec(dtype or torch.get_default_dtype(), (*shape,))
        elif lazy_init and isinstance(initial_value, Variable):
            spec = initial_value.spec
        else:
            with _disable_current_modes():  # made in a recording, it is no part of that
                if shape is not None and isinstance(initial_value, Real):
                    owned = _filled(initial_value, shape, dtype or torch.get_default_dtype())
                else:
                    given = _initial(initial_value, None if lazy_init else name or "Variable").detach()
                    owned = lazy_memory.clone(given)
            spec = Spec.of(owned)
        if (found := resources.shared(container, shared_name)) is not None:
            resources.ensure_same(found, f"a Variable {spec}")
            return
        trains = trainable and flows(spec.dtype)
        storage: Callable[[], torch.Tensor] | None = None if lazy_init else lambda: owned  # type: ignore[assignment,return-value]
        self._bind(storage, spec, name or shared_name or "Variable", trains, container, shared_name)
        self._owned = None if lazy_init else owned
        keeps = isinstance(initial_value, Variable | Real) or _is_function(initial_value)  # other memory is not kept
        if lazy_init or keeps:
            self._start = initial_value
        self.divide(partitions, partition_bytes)
        recording = current.recording()
        asked = None if recording is None else recording.tape.marks.device
        self.request = None if callable(asked) else asked  # a function says where nodes are
        resources.enter(self)

    @classmethod
    def of(cls, tensor: torch.Tensor, *, name: str, trainable: bool | None = None) -> Variable:
        """The Variable that shares ``tensor``'s storage (a Parameter or buffer; held weakly).

        It follows the modules that are said to hold it (``held.by``). trainable: by default as ``requires_grad`` says.
        """
        self = cls.__new__(cls)
        self._bind(None, Spec.of(tensor), name, trainable)
        self.held = TensorHolder(tensor)
        return self

    @classmethod
    def looked_up(
        cls, find: Callable[[], torch.Tensor], *, name: str, leads: Leader | None = None,
        ready: Callable[[], None] | None = None,
    ) -> Variable:  # fmt: skip
        """A Variable, not trainable, whose storage is the result of ``find`` at each access: always of one shape and
        dtype.

        leads: whose number it shows. The value here counts also while the variable lives elsewhere: its owner looks
        here before each step.
        ready: raises where no step may take the value, which can be shown and saved all the same.
        """
        self = cls.__new__(cls)

        def taken() -> torch.Tensor:
            if ready is not None:
                ready()
            return find()

        self._bind(taken, Spec.of(find()), name, False)
        self.leads, self._shown = leads, find
        return self

    @classmethod
    def declared(cls, spec: Spec, *, name: str, trainable: bool) -> Variable:
        """A Variable of a loaded graph: without a value or memory until a value is stored."""
        self = cls.__new__(cls)
        self._bind(None, spec, name, trainable)
        return self

    def _bind(
        self, storage: Callable[[], torch.Tensor] | None, spec: Spec, name: str, trainable: bool | None,
        container: str = "", shared_name: str | None = None,
    ) -> None:  # fmt: skip
        self._storage = storage
        self._owned = None
        self._shown: Callable[[], torch.Tensor] | None = None
        self.held: TensorHolder | None = None
        self._fitting: torch.Tensor | None = None  # what was held when it was last looked at
        self.key = f"v{next(_serial)}"
        self.writes = counter()
        self.name = name
        self._trainable = trainable
        self.leads: Leader | None = None
        self.spec = spec
        self.shape = torch.Size(spec.sizes({}))
        self.home: ValueOwner | None = None
        self.container = resources.placed(container)
        self.shared_name = shared_name
        self._used: float | None = None
        self._gone = ""  # why there is no value any more
        self._start = _NONE
        self.partitions: int | str | None = None  # as `divide` says
        self.partition_bytes: int | None = None
        self.request = None

    def divide(self, partitions: int | str | None = None, partition_bytes: int | None = None) -> None:
        """Set the number of row shards for the next time that the value moves to servers; arguments as of `Variable`.

        Raises InvalidArgument for more pieces than rows, for numbers below 1, and for both arguments at once.
        """
        rows = self.shape[0] if self.shape else 1
        if partitions is not None and partition_bytes is not None:
            raise InvalidArgument(f"variable {self.name}: partitions or partition_bytes, not both")
        for name, number in (("partitions", partitions), ("partition_bytes", partition_bytes)):
            if number is not None and number != "auto" and (type(number) is not int or number < 1):
                raise InvalidArgument(f"variable {self.name}: {name} is an int of at least 1, not {number!r}")
        if isinstance(partitions, int) and partitions > rows:
            raise InvalidArgument(f"variable {self.name} cannot have {partitions} pieces: it has {rows} rows")
        self.partitions, self.partition_bytes = partitions, partition_bytes

    @property
    def used(self) -> float | None:
        """Time of the last use, steps included, as `time.time`; None if never used."""
        return max(filter(None, (self._used, *LOCKS.uses(self))), default=None)

    @property
    def trainable(self) -> bool:
        """Whether ``minimize`` and ``backward`` train the Variable by default: as declared, else as its tensor
        requires.
        """
        if self._trainable is not None:
            return self._trainable
        return self.held is not None and self.held.wants_gradient()

    @property
    def version(self) -> int:
        """Number of writes in this process."""
        return int(self.writes.value)

    @property
    def initialized(self) -> bool:
        """Whether there is a local value."""
        return self._storage is not None or self.held is not None

    @property
    def storage(self) -> torch.Tensor:
        """The local storage, not a copy; stale while a cluster owns the value.

        Raises NotFound, with the reason, where the value was lost, and FailedPrecondition where there is none yet.
        """
        if self._owned is not None:
            return self._owned
        if self.held is not None:
            return self._followed(self.held)
        if self._storage is None and self._gone:
            raise NotFound(f"variable {self.name} has no value any more: {self._gone}; assign one, or restore it")
        if self._storage is None and self._start is not _NONE and _INITIALIZING.get():
            self.initialize()
        if self._storage is None:
            made = "" if self._start is _NONE else f"tfnb.initialize({self.name}) gives it its initial value, or "
            raise FailedPrecondition(
                f"Attempting to use uninitialized value {self.name} ({self.spec}): "
                f"{made}restore a checkpoint with session.restore(path), or assign a value first"
            )
        return self._storage()

    @property
    def kept(self) -> torch.Tensor:
        """`storage` for display or saving, available also where no step may use the value."""
        return self.storage if self._shown is None else self._shown()

    def initialize(self) -> None:
        """Set the initial value, again if there is a value; Variables without a value that the initial value reads come
        first.

        Raises InvalidArgument, with the cycle, for initial values that depend on each other; FailedPrecondition where
        the initial value was a tensor, which is not kept.
        """
        if self._start is _NONE:
            raise FailedPrecondition(f"variable {self.name} does not keep its initial value: assign one, or restore it")
        with _disable_current_modes():
            is_number = isinstance(self._start, Real)
            self.set(_filled(self._start, self.shape, self.dtype) if is_number else _initial(self._start, self))

    def _followed(self, held: TensorHolder) -> torch.Tensor:
        """The module's current tensor; raises if its shape, dtype or device does not fit this variable."""
        try:
            found = held.values()
        except FailedPrecondition as error:
            raise FailedPrecondition(f"variable {self.name} has no single value: {error}") from None
        if found is self._fitting:
            return found
        if found.shape != self.shape or found.dtype != self.spec.dtype:
            raise ShapeError(
                f"variable {self.name} is {self.spec}, but its module now holds {Spec.of(found)} in its place: "
                "record the cell again"
            )
        if not self.spec.is_on(found.device):
            raise FailedPrecondition(
                f"variable {self.name} was recorded on {self.spec.device}, and its module is on {found.device} now: "
                f"move it back, module.to({self.spec.device!r}), or record the cell again"
            )
        self._fitting = found
        return found

    def watched(self) -> TensorWatch | None:
        """The condition under which `storage` is unchanged; None if no such check exists."""
        if self._owned is not None:
            return TensorWatch()
        if self.held is not None:
            return self.held.watched()
        return None if self._storage is None else TensorWatch(find=self._storage)

    @property
    def definition(self) -> str:
        """A description of the Variable in words."""
        return f"a Variable {self.spec}"

    @property
    def nbytes(self) -> int:
        """Bytes of its value here."""
        return self.kept.numel() * self.kept.element_size() if self.initialized else 0

    def drop(self, why: str) -> None:
        """Drop the value; steps of other threads that compute with it are stopped with StepAborted, and later ones need
        a new value.
        """
        text = f"variable {self.name} was dropped while this step used it: {why}; nothing was written"
        LOCKS.stop(self, lambda stop: StepAborted(text))
        with LOCKS.write(self):
            self._gone, self._owned, self._storage = why, None, None
            CHANGES.value += 1

    @property
    def hooks(self) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
        """Hooks given to ``register_hook`` of its Parameter."""
        tensor = None if self.held is None else self.held.tensor()
        return [] if tensor is None else list((tensor._backward_hooks or {}).values())

    @property
    def after_hooks(self) -> list[Callable[[], Any]]:
        """Hooks given to ``register_post_accumulate_grad_hook`` of its Parameter, as calls without arguments."""
        tensor = None if self.held is None else self.held.tensor()
        return (
            [] if tensor is None else [partial(h, tensor) for h in (tensor._post_accumulate_grad_hooks or {}).values()]
        )

    def store(self, value: torch.Tensor) -> None:
        """Write the local storage, wherever the value lives; raises ShapeError for another shape or dtype."""
        self.ensure_fits(value)
        with torch.no_grad(), LOCKS.write(self):
            try:
                if not self.initialized:
                    owned = self._copied(value)
                    self._storage = lambda: owned
                    if self._gone:
                        self._gone = ""
                        resources.enter(self)
                else:
                    lazy_memory.assign(self.kept, value)
            finally:
                self.writes.value += 1

    def _copied(self, value: torch.Tensor) -> torch.Tensor:
        """A value in memory of its own: that of a table takes no more than its rows."""
        plain = value.resolve_conj().resolve_neg()
        if plain.is_contiguous() and self.spec.is_on(plain.device):
            return lazy_memory.clone(plain)
        return torch.empty(self.shape, dtype=self.dtype, device=self.spec.device).copy_(plain)

    @property
    def grad(self) -> torch.Tensor | None:
        """Inside a recording: the gradient that ``backward`` recorded so far."""
        recording = current.recording()
        return None if recording is None else recording.autograd.grad(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        recording = current.recording()
        if recording is None:
            raise FailedPrecondition(f"the .grad of variable {self.name} is set inside a recording only")
        recording.autograd.set_grad(self, value)

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.dtype

    @property
    def device(self) -> str:
        """Where the value lives."""
        if self.home is not None:
            return str(self.home)
        return str(self.kept.device) if self.initialized else self.spec.device

    def value(self, *, timeout: float | None = None) -> torch.Tensor:
        """A copy of the value, wherever the owner is; inside a recording a value from outside, unlike `read`.

        timeout: seconds to wait for a step of another thread that writes it here, 60 by default. Raises
        DeadlineExceeded.
        """
        recording = current.recording()
        if recording is not None:
            recording.escaped(self, "value()")
        self._used = time.time()
        with _disable_current_modes():
            if self.home is not None:
                return self.home.value(self)
            with LOCKS.read(self, timeout=timeout):  # not one that is half written
                return lazy_memory.clone(self.kept)

    def set(self, value: torch.Tensor) -> None:
        """Write the value at once, wherever the owner is; raises ShapeError for another shape or dtype."""
        self._used = time.time()
        if self.home is None:
            self.store(value)
            return
        self.ensure_fits(value)
        self.home.assign(self, value)

    def ensure_fits(self, value: torch.Tensor) -> None:
        """Raise ShapeError for a value of another shape or dtype."""
        ensure_type(value, torch.Tensor, f"variable {self.name}")
        if tuple(value.shape) != tuple(self.spec.shape) or value.dtype != self.spec.dtype:
            raise ShapeError(f"cannot assign {Spec.of(value)} to variable {self.name}, which is {self.spec}")

    # -- reads and writes: recorded inside a recording, immediate outside ----------------------------------

    def read(self) -> torch.Tensor:
        """The value at this place of the program."""
        recording = current.recording()
        return self.value() if recording is None else recording.read(self)

    def _write(self, kind: str, *args: object) -> torch.Tensor:
        recording = current.recording()
        if recording is not None:
            return recording.write(self, kind, *args)
        *indices, value = args
        operands = [*(self._rows(i) for i in indices), self._operand(value)]
        with LOCKS.write(self) if self.home is None else nullcontext():
            old = operands[-1] if kind == "assign" else self.value()  # an uninitialised variable may be assigned
            try:
                if indices:
                    own = (
                        old if self.home is None else lazy_memory.clone(old)
                    )  # what came from servers may be read-only
                    new = _with_rows(own, kind, *operands)
                else:
                    new = updated(old, kind, *operands)
            except (RuntimeError, IndexError) as error:
                raise ShapeError(f"variable {self.name}, which is {self.spec}: {kind}: {error}") from error
            self.set(new)
        return new

    def _operand(self, value: object) -> torch.Tensor:
        """Tensors unchanged; numbers and lists as tensors of the variable's dtype."""
        if isinstance(value, Variable):
            return value.value()
        plain = current.plain(value)
        return plain if isinstance(plain, torch.Tensor) else tensor_of(plain, self.dtype, f"variable {self.name}")

    def _rows(self, indices: object) -> torch.Tensor:
        """Row numbers as a tensor; raises InvalidArgument for one outside of the rows."""
        rows = tensor_of(current.plain(indices), None, f"variable {self.name}")
        if rows.numel() and rows.dtype not in (torch.int64, torch.int32):
            raise InvalidArgument(f"variable {self.name} takes row numbers in int64, not in {rows.dtype}")
        outside = rows[(rows < 0) | (rows >= len(self))]
        if outside.numel():
            bad = int(outside[0])
            raise InvalidArgument(f"row {bad} is outside of variable {self.name}, which has {len(self)} rows")
        return rows

    def assign(self, value: object) -> torch.Tensor:
        """Replace the value; returns the value after the write.

        In a recording this is a node, which a run executes that fetches it or what reads it below; outside it happens
        at once, on a cluster on the servers. Raises ShapeError for a tensor of another shape (none is broadcast) or
        dtype, InvalidArgument for a number that the dtype cannot hold.

        >>> rate = Variable(0.5)
        >>> rate.assign(0.25)
        tensor(0.2500)
        """
        return self._write("assign", value)

    def assign_add(self, value: object) -> torch.Tensor:
        """Add ``value``; returns the value after the write. In a run on a cluster the server adds, if it holds the
        whole Variable. Outside of a recording the value is read, added to in this process and written back: what a step
        writes in between is lost.
        """
        return self._write("assign_add", value)

    def assign_sub(self, value: object) -> torch.Tensor:
        """Subtract ``value``; returns the value after the write."""
        return self._write("assign_sub", value)

    def scatter_update(self, indices: object, rows: object) -> torch.Tensor:
        """Replace the rows ``indices`` [n] by ``rows`` [n, ...]."""
        return self._write("scatter_update", indices, rows)

    def scatter_add(self, indices: object, rows: object) -> torch.Tensor:
        """Add ``rows`` to the rows ``indices``; duplicates sum."""
        return self._write("scatter_add", indices, rows)

    def scatter_sub(self, indices: object, rows: object) -> torch.Tensor:
        """Subtract ``rows`` from the rows ``indices``; duplicates sum."""
        return self._write("scatter_sub", indices, rows)

    def scatter_mul(self, indices: object, rows: object) -> torch.Tensor:
        """Multiply the rows ``indices`` by ``rows``."""
        return self._write("scatter_mul", indices, rows)

    def scatter_div(self, indices: object, rows: object) -> torch.Tensor:
        """Divide the rows ``indices`` by ``rows``."""
        return self._write("scatter_div", indices, rows)

    # -- use as a tensor ------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        def read(x: object) -> Any:
            return x.read() if isinstance(x, Variable) else x

        args, kwargs = torch.utils._pytree.tree_map(read, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.read(), name)  # v.sum(), v.T: what any tensor has

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.read()[index]

    def __len__(self) -> int:
        return int(self.shape[0])

    def _repr_html_(self) -> str:
        from tfnb.view import variable_html  # listed exception: a repr asks view

        return variable_html(self)

    def __repr__(self) -> str:
        return f"<Variable {self.name}: {self.spec}{'' if self.trainable else ', not trainable'}>"

    def __reduce__(self) -> Any:
        raise FailedPrecondition(
            f"variable {self.name} is a handle and is not pickled: use {self.name}.value(), or session.save(path)"
        )


def initialize(*what: object) -> int:
    """Initialize Variables in the order in which their initial values depend on each other; returns their number.

    what: Variables, each also anew, or graphs, of which those get one that have none and keep an initial value. Raises
    InvalidType for anything else.

    >>> import tfnb
    >>> a = tfnb.Variable(lambda: b * 2, shape=(2,), lazy_init=True, name="a")  # b is made later
    >>> b = tfnb.Variable(torch.ones(2), lazy_init=True, name="b")
    >>> tfnb.initialize(a), a.value(), b.initialized
    (1, tensor([2., 2.]), True)
    """
    for each in what:
        if not isinstance(each, Variable) and not isinstance(getattr(each, "variables", None), tuple):
            raise InvalidType(f"tfnb.initialize takes Variables and graphs, and was given a {type(each).__name__}")
    wanted = [one for each in what for one in ([each] if isinstance(each, Variable) else _without_value(each))]
    for variable in wanted:
        if not variable.initialized or any(variable is each for each in what):
            variable.initialize()
    return len(wanted)


def _without_value(graph: Any) -> list[Variable]:
    return [v for v in graph.variables if not v.initialized and v.home is None and v._start is not _NONE]


def _initial(value: Any, owner: Variable | str | None) -> torch.Tensor:
    """An initial value as a tensor: the value of a Variable, or the result of a function.

    owner: whose it is; Variables that it depends on get theirs first. None: it is only looked at.
    """
    chain = _INITIALIZING.get()
    if owner is not None and any(owner is other for other in chain):
        names = " -> ".join(str(getattr(each, "name", each)) for each in (*chain, owner))
        raise InvalidArgument(f"initial values depend on each other: {names}")
    token = _INITIALIZING.set(chain if owner is None else (*chain, owner))
    try:
        found = value() if _is_function(value) else value
        return found.value() if isinstance(found, Variable) else tensor_of(current.plain(found), None, "a Variable")
    finally:
        _INITIALIZING.reset(token)


def _filled(number: Any, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor filled with a number; large tables of zeros take no memory before a write."""
    if number == 0:
        return lazy_memory.zeros(shape, dtype)
    lazy_memory.ensure_room(math.prod(shape) * dtype.itemsize, "a Variable of one number")
    return torch.full((*shape,), number, dtype=dtype)


def _is_function(value: object) -> bool:
    return callable(value) and not isinstance(value, (torch.Tensor, Variable))


def _with_rows(own: torch.Tensor, kind: str, indices: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`updated` in place: of a table only the rows that are written take memory."""
    match kind:
        case "scatter_update":
            return own.index_copy_(0, indices, rows)
        case "scatter_add" | "scatter_sub":
            return own.index_add_(0, indices, rows, alpha=1 if kind == "scatter_add" else -1)
    before = own.index_select(0, indices)
    return own.index_copy_(0, indices, before * rows if kind == "scatter_mul" else before / rows)


def updated(old: torch.Tensor, kind: str, *args: torch.Tensor) -> torch.Tensor:
    """``old`` after the write ``kind``, as ordinary torch code: recorded in a recording, eager outside."""
    match kind, args:
        case "assign", (value,):
            return value
        case "assign_add", (value,):
            return old + value
        case "assign_sub", (value,):
            return old - value
        case "scatter_update", (indices, rows):
            return old.index_copy(0, indices, rows)
        case "scatter_add", (indices, rows):
            return old.index_add(0, indices, rows)
        case "scatter_sub", (indices, rows):
            return old.index_add(0, indices, rows, alpha=-1)
        case "scatter_mul", (indices, rows):
            return old.index_copy(0, indices, old.index_select(0, indices) * rows)
        case "scatter_div", (indices, rows):
            return old.index_copy(0, indices, old.index_select(0, indices) / rows)
    raise AssertionError(kind)


def _operators() -> None:
    """Give Variable the arithmetic of a tensor, each operator through ``read``."""
    binary = "add sub mul truediv floordiv mod pow matmul and or xor lt le gt ge eq ne"

    def install(name: str) -> None:
        def operator(self: Variable, *args: object) -> Any:
            return getattr(torch.Tensor, name)(self.read(), *(a.read() if isinstance(a, Variable) else a for a in args))

        setattr(Variable, name, operator)

    for name in binary.split():
        if name not in ("eq", "ne"):  # identity equality and hash: a Variable is a dict key
            install(f"__{name}__")
        if name not in ("eq", "ne", "lt", "le", "gt", "ge"):
            install(f"__r{name}__")
    for name in ("neg", "abs", "invert"):
        install(f"__{name}__")


_operators()
