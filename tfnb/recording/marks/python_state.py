"""Python state that a recording reads: attributes, submodules and hooks of modules, flags of parameters, numbers.

A graph has the values of its recording. `PythonReads` collects while a block is recorded which state it reads; the
`PythonGuards` that it gives say later what has changed since. State that the block itself changes is carried from call
to call in eager torch, and each run of the graph begins with the same one: that is noted. (torch.compile calls such
conditions guards; it compiles again where one fails, and a recording is a cell that the user runs.)
"""

from __future__ import annotations

import inspect
import io
import itertools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from tfnb.errors import InvalidArgument, StaleNode
from tfnb.graph import Node, SourceLine, Variable
from tfnb.graph.current import is_recorded
from tfnb.graph.graph import new_id
from tfnb.recording.marks.attribute_reads import attribute_reads, attribute_uses
from tfnb.recording.marks.block_names import NameRead, Namespace, asks, behind, enclosed_reads, function_reads
from tfnb.recording.marks.open_block import OpenBlock
from tfnb.recording.marks.settings import (
    FEW,
    MISSING,
    OPAQUE,
    Attributes,
    Picture,
    array_picture,
    at_path,
    contents,
    differences,
    holds_settings,
    picture,
)  # fmt: skip
from tfnb.recording.marks.source_trees import definition, only_in_texts
from tfnb.recording.marks.user_code import is_foreign, is_of_program

GUARDS = "python guards"  # key of what is attached to a graph: the guards of each owner
SHARE = 20  # a comparison may cost one of so many parts of the time since the last one
COST = 2  # of its own time: the run after it is slower, whose data it pushed out of the processor's caches

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
_OF_CHILDREN = {"_modules", "children", "named_children", "modules", "named_modules"}
_KEPT = (list, dict, set, deque)
_NUMBERS_AND_TEXTS = (bool, int, float, complex, str)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_MODULE = frozenset(vars(torch.nn.Module()))  # attributes that torch keeps itself
_NO_HOOKS = ((),) * len(_HOOKS)
_modes: weakref.WeakKeyDictionary[torch.nn.Module, set[bool]] = weakref.WeakKeyDictionary()  # as recordings found them
_frozen_inside: weakref.WeakSet[Variable] = weakref.WeakSet()  # whose flag a recording set: cells set it in turn


_executed = [0]  # how often user code ran that may have changed anything


def user_code_ran() -> None:
    """A cell or a callback was executed: the next run compares at once."""
    _executed[0] += 1


@dataclass(slots=True)
class _ModuleVisit:
    """A module whose forward a recording entered: its attributes before the call, and ids of the nodes of its calls."""

    module: torch.nn.Module
    label: str
    source: SourceLine | None
    before: dict[str, Any]
    copies: dict[str, Any]  # of the contents of those that are no plain values
    names: frozenset[str]  # of the attributes of objects that belong to these values
    spans: list[range] | None  # None: in a loop or branch, whose nodes are not known by their ids, or without nodes
    training: bool | None  # None: entered in both modes


@dataclass(frozen=True, slots=True)
class ModuleGuard:
    """State read from one module by a recording; ``state`` has the form of `_state`."""

    module: weakref.ref[torch.nn.Module]
    label: str
    attributes: tuple[str, ...]
    children: tuple[str, ...]
    is_whole: bool  # whether further submodules would have been called, too
    tensors: tuple[tuple[str, str], ...]  # table and name of the parameters and buffers
    state: list[Any]
    spans: tuple[range, ...] | None
    training: bool | None

    def is_of(self, ids: Collection[int]) -> bool:
        """Whether one of these nodes was recorded in a call of the module."""
        return self.spans is None or any(at in span for span in self.spans for at in ids)

    def is_kept(self) -> bool:
        """Whether the module's state is unchanged, or the module is dead."""
        module = self.module()
        if module is None:
            return True
        try:
            return self.state == _state(module, self.attributes, self.children, self.is_whole, self.tensors)
        except Exception:  # a tensor or an array stands where a number stood
            return False

    def changes(self) -> Iterator[str]:
        """Descriptions of the changed parts of the module's state."""
        module = self.module()
        if module is None:
            return
        now = _state(module, self.attributes, self.children, self.is_whole, self.tensors)
        names = [
            "the code of forward", "forward", "the number of submodules",
            *(f"attribute {n}" for n in self.attributes), *(f"submodule {n}" for n in self.children),
            *(f"{'buffer' if table == '_buffers' else 'parameter'} {n}" for table, n in self.tensors),
            *(f"the {table[1:].replace('_', ' ')}" for table in _HOOKS),
        ]  # fmt: skip
        for name, old, new in zip(names, self.state, now, strict=True):
            try:
                is_same = bool(old == new)
            except Exception:
                is_same = False
            if not is_same:
                yield f"{name} of {self.label} {_told(name, old, new)}"


def _told(name: str, old: Any, new: Any) -> str:
    """The change of one item, in words."""
    if name.startswith(("attribute", "the number")):
        return f"was {_short(old)}, and is {_short(new)} now"
    if name.startswith(("parameter", "buffer")):
        return "was there, and is not now" if new else "was None or missing, and is there now"
    if name.startswith("submodule") and new is None:
        return "is gone"
    if name.endswith("hooks"):
        return f"are {len(new)} now, and were {len(old)}" if len(old) != len(new) else "are others now"
    return "is another one now"


def _short(value: object) -> str:
    text = f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def _state(
    module: torch.nn.Module, attributes: Sequence[str], children: Sequence[str], is_whole: bool,
    tensors: Sequence[tuple[str, str]],
) -> list[Any]:  # fmt: skip
    """The state of a module compared by a guard, in one list, so that a comparison is one call in C."""
    own, forward = module.__dict__, type(module).forward
    found = [forward.__code__ if type(forward) is FunctionType else forward, own.get("forward"), None]
    if attributes:
        found += map(own.get, attributes)
    if children:
        modules = own["_modules"]
        found += [child if (child := modules.get(name)) is None else weakref.ref(child) for name in children]
        if is_whole:
            found[2] = len(modules)
    if tensors:
        found += [own[table].get(name) is None for table, name in tensors]
    if own["_forward_pre_hooks"] or own["_forward_hooks"] or own["_backward_pre_hooks"] or own["_backward_hooks"]:
        found += [tuple(own[hooks]) for hooks in _HOOKS]
    else:
        found += _NO_HOOKS
    return found


class FlagGuard(NamedTuple):
    """``requires_grad`` and the gradient hooks of the Parameter or buffer of one Variable."""

    tensor: weakref.ref[torch.Tensor]
    variable: Variable
    state: tuple[Any, ...]

    def is_kept(self) -> bool:
        """Whether the flag and the hooks are unchanged, or the tensor is dead."""
        tensor = self.tensor()
        return tensor is None or self.state == _flags(tensor) or self.variable in _frozen_inside

    def changes(self) -> Iterator[str]:
        """Descriptions of the changed flag or hooks."""
        tensor = self.tensor()
        if tensor is not None:
            now = _flags(tensor)
            if now[0] != self.state[0]:
                yield f"requires_grad of {self.variable.name} was {self.state[0]}, and is {now[0]} now"
            if now[1:] != self.state[1:]:
                yield f"the gradient hooks of {self.variable.name} are others now"


def _flags(tensor: torch.Tensor) -> tuple[Any, ...]:
    hooks, accumulated = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    if hooks or accumulated:
        return tensor.requires_grad, tuple(hooks or ()), tuple(accumulated or ())
    return tensor.requires_grad, (), ()


class GroupGuard(NamedTuple):
    """Ids of the parameters of each group, and of the step hooks, of a torch optimizer with a recorded step.

    updated: the Variables whose updates it recorded.
    """

    optimizer: weakref.ref[torch.optim.Optimizer]
    state: tuple[tuple[int, ...], ...]
    hooks: tuple[int, ...]
    nodes: frozenset[int]  # of its updates
    updated: tuple[Variable, ...]

    def is_kept(self) -> bool:
        """Whether groups and hooks are the same, and the modules still hold the parameters of the groups."""
        optimizer = self.optimizer()
        if optimizer is None:
            return True
        is_same = self.state == _groups(optimizer) and self.hooks == _step_hooks(optimizer)
        return is_same and self._strange() is None

    def _strange(self) -> Variable | None:
        """A Variable that is updated, and goes with a module that has replaced the optimizer's parameter."""
        known = {at for group in self.state for at in group}
        for variable in self.updated:
            tensor = None if variable.held is None else variable.held.tensor()
            if tensor is not None and id(tensor) not in known:
                return variable
        return None

    def changes(self) -> Iterator[str]:
        """A description of the changed groups."""
        optimizer = self.optimizer()
        if optimizer is not None:
            name = type(optimizer).__name__
            if self.hooks != _step_hooks(optimizer):
                yield f"the step hooks of {name} are others now"
            if (strange := self._strange()) is not None:
                yield f"{strange.name} is another Parameter now, of which {name} does not know"
            if self.state == (groups := _groups(optimizer)):
                return
            old, now = ([len(group) for group in each] for each in (self.state, groups))
            yield f"the groups of {name} had {old} parameters, and have " + (
                f"{now} now" if old != now else "others now"
            )


def _groups(optimizer: torch.optim.Optimizer) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(id, group["params"])) for group in optimizer.param_groups)


def _group_guard(optimizer: torch.optim.Optimizer, updates: Sequence[Node]) -> GroupGuard:
    groups = _groups(optimizer)
    known = {at for group in groups for at in group}
    found = dict.fromkeys(node.attrs["variable"] for node in updates if "variable" in node.attrs)
    updated = tuple(v for v in found if v.held is not None and id(v.held.tensor()) in known)
    ids = frozenset(node.id for node in updates)
    return GroupGuard(weakref.ref(optimizer), groups, _step_hooks(optimizer), ids, updated)


def _step_hooks(optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    return (*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks)


class SettingGuard(NamedTuple):
    """A setting that the code of a block, a function or a module read, by a name, a path or an attribute.

    names: the attributes of objects that belong to the setting. place: what tells settings of one name apart.
    """

    name: str
    of: str  # the module whose attribute it is, in words; empty for names of the program
    value: Picture
    names: frozenset[str]
    find: Callable[[], Any]
    place: Any

    def changes(self, label: str) -> Iterator[tuple[Any, str]]:
        """(key, text) of each change of the setting since the recording of ``label``."""
        now = picture(self.find(), self.names)
        if now is None or now.kind != self.value.kind:  # of another purpose
            return
        for path, old, new in differences(self.value.of, now.of):
            text = f"attribute {self.name}{path} of {self.of}" if self.of else f"{self.name}{path}"
            told = f"was {_short(old)} when {label} was recorded, and is {_short(new)} now"
            if not self.value.is_shown:
                told = f"is another {now.label} now than when {label} was recorded"
            yield (self.place, text), f"{text} {told}: the graph computes with the former. "


@dataclass(slots=True)
class TensorGuard:
    """A plain tensor that a constant of the graph was copied from. ``find`` gives the tensor in its place now."""

    name: str
    node: int
    value: torch.Tensor
    find: Callable[[], Any]
    seen: Any  # the stamp at which it was last equal to the constant

    def differs(self) -> bool:
        """Whether a tensor with other values is there now; one of another shape or dtype has another purpose."""
        now = self.find()
        if not isinstance(now, torch.Tensor) or is_recorded(now):
            return False
        if (at := stamp(now)) == self.seen and not is_shared(now):  # NumPy writes without a stamp
            return False
        if now.shape != self.value.shape or now.dtype != self.value.dtype or now.device != self.value.device:
            return False
        if not _are_equal(now, self.value):
            return True
        self.seen = at
        return False


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether an array of NumPy may look at the memory of a plain tensor: torch does not resize such memory."""
    return tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.untyped_storage().resizable()


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors of one shape and dtype have equal elements, NaN being equal to NaN."""
    if torch.equal(one, other) or one.layout is not torch.strided:
        return torch.equal(one, other)
    return bool(((one == other) | ((one != one) & (other != other))).all())


def stamp(tensor: torch.Tensor) -> Any:
    """A stamp that changes when the tensor is written, or another takes its place."""
    written = 0 if tensor.is_inference() else tensor._version
    return tensor.data_ptr() if tensor.layout is torch.strided else id(tensor), written


@dataclass(slots=True)
class PythonGuards:
    """The guards of one block."""

    label: str  # of the cell or file
    is_cell: bool
    modules: list[ModuleGuard] = field(default_factory=list)
    flags: list[FlagGuard] = field(default_factory=list)
    groups: list[GroupGuard] = field(default_factory=list)
    settings: list[SettingGuard] = field(default_factory=list)
    tensors: list[TensorGuard] = field(default_factory=list)
    told: set[Any] = field(default_factory=set)  # notes, once each

    def needed(self, ids: Collection[int], variables: Collection[Variable], *, trains: bool) -> PythonGuards | None:
        """The guards for a run of these nodes; None for none. trains: whether the run includes gradients or updates."""
        found = PythonGuards(
            self.label, self.is_cell,
            [guard for guard in self.modules if guard.is_of(ids)],
            [guard for guard in self.flags if trains and guard.variable in variables],
            [guard for guard in self.groups if not guard.nodes.isdisjoint(ids)], self.settings,
            [guard for guard in self.tensors if guard.node in ids], self.told,
        )  # fmt: skip
        return found if found.all or found.settings or found.tensors else None

    @property
    def cure(self) -> str:
        """The remedy for a changed block: how to record again."""
        return f"run {self.label} again, or %tfgraph refresh" if self.is_cell else "record it again"

    @property
    def all(self) -> list[ModuleGuard | FlagGuard | GroupGuard]:
        """The guards whose failure makes the block stale."""
        return [*self.modules, *self.flags, *self.groups]

    def is_kept(self) -> bool:
        """Whether nothing changed that makes the block stale."""
        return all(guard.is_kept() for guard in self.all)

    def stale(self) -> StaleNode:
        """The StaleNode error with the changes since the recording."""
        changes = [change for guard in self.all if not guard.is_kept() for change in guard.changes()]
        more = f" (and {len(changes) - 3} more)" if len(changes) > 3 else ""
        return StaleNode(
            f"{'; '.join(changes[:3])}{more}. {self.label} was recorded before that: {self.cure}", cell=self.label
        )

    @property
    def has_notes(self) -> bool:
        """Whether there is anything that `notes` could say."""
        return bool(self.settings or self.tensors) or any(guard.training is not None for guard in self.modules)

    def notes(self) -> Iterator[str]:
        """Notes of changes that do not make the block stale, once each."""
        for guard in self.settings:
            for key, change in guard.changes(self.label):
                if key not in self.told:
                    self.told.add(key)
                    is_number = guard.value.kind in ("number", "items")
                    vary = "To change it from run to run make it a placeholder or a tfnb.Variable; else "
                    yield f"{change}{vary if is_number else 'For the new one '}{self.cure}"
        for each in self.tensors:
            if each.name not in self.told and each.differs():
                self.told.add(each.name)
                yield (
                    f"{each.name} has other values now than when {self.label} was recorded: the graph computes with "
                    f"those of then. To change it from run to run make it a placeholder, a tfnb.Variable or a buffer "
                    f"of a module; else {self.cure}"
                )
        for one in self.modules:
            module = one.module()
            if module is None or one.training is None or module.training is one.training or "mode" in self.told:
                continue
            if module.training not in _modes.get(module, ()):
                self.told.add("mode")
                was, now = ("training" if mode else "evaluation" for mode in (one.training, module.training))
                yield (
                    f"{one.label} is in {now} mode now, and this run computes it in {was} mode, as "
                    f"{self.label} recorded it: record the model in {now} mode in another cell, and run that"
                )


class StepGuards:
    """The guards of one prepared step, and the schedule of their comparisons.

    A comparison that takes more than twice as long as the last one counts as twice: the processor did something else.
    """

    def __init__(self, guards: Sequence[PythonGuards]) -> None:
        self._guards = [(each, [guard.is_kept for guard in each.all], each.has_notes) for each in guards]
        self._next = 0.0  # time from which on a comparison is due
        self._seconds = float("inf")  # of the last one
        self._seen = -1

    def check(self, tell: Callable[[str], None]) -> None:
        """Compare the guards if due: raise StaleNode for stale ones, ``tell`` the notes of the others."""
        now = time.perf_counter()
        if now < self._next and self._seen == _executed[0]:
            return
        self._compare(tell)
        if self._seconds == float("inf"):  # what the first one takes, of cold code, would keep later ones off for long
            now = time.perf_counter()
            self._compare(tell)
        self._seen = _executed[0]
        end = time.perf_counter()
        self._seconds = min(end - now, 2 * self._seconds)
        self._next = end + SHARE * COST * self._seconds

    def _compare(self, tell: Callable[[str], None]) -> None:
        for guards, checks, has_notes in self._guards:
            for is_kept in checks:
                if not is_kept():
                    raise guards.stale()
            for note in guards.notes() if has_notes else ():
                tell(note)


def stale_owners(attached: Mapping[str, Any]) -> list[str]:
    """The owners of a graph whose blocks read Python state that changed since."""
    return [key for key, guards in attached.get(GUARDS, {}).items() if not guards.is_kept()]


def watched(attached: Mapping[str, Any], nodes: Iterable[Node]) -> StepGuards | None:
    """The guards to compare before runs of these nodes of a graph; None for none."""
    blocks: Mapping[str, PythonGuards] = attached.get(GUARDS, {})
    if not blocks:
        return None
    nodes = list(nodes)
    ids = {node.id for node in nodes} | {node.forward for node in nodes if node.forward is not None}
    variables = {node.attrs["variable"] for node in nodes if "variable" in node.attrs}
    trains = any(node.forward is not None or not node.tags.isdisjoint(("gradient", "update")) for node in nodes)
    owners = {node.owner.key for node in nodes if node.owner is not None}
    needed = (blocks[key].needed(ids, variables, trains=trains) for key in owners & blocks.keys())
    found = [guards for guards in needed if guards is not None]
    return StepGuards(found) if found else None


# -- while recording ------------------------------------------------------------------------------------------------


class CarriedState(NamedTuple):
    """State of Python that a block changes, and so carries from call to call in eager torch."""

    source: SourceLine | None
    text: str


class _State(NamedTuple):
    """The value of a name or path of the program before the block; ``items``: a copy of its contents."""

    read: NameRead
    namespace: Namespace
    before: Any
    items: Any
    names: frozenset[str]  # of the attributes of objects that belong to it
    holder: int | None  # the id of the object whose attribute it is
    is_global: bool  # a function of the program reads it

    @classmethod
    def of(cls, read: NameRead, namespace: Namespace, names: frozenset[str], *, is_global: bool = False) -> _State:
        """The state before the block."""
        path = NameRead(read.name, read.attribute.rpartition(".")[0])
        value, holder = namespace.at(read), namespace.at(path) if read.attribute else None
        items = OPAQUE if isinstance(holder, torch.optim.Optimizer) else _kept(value, names)  # its groups are compared
        return cls(read, namespace, value, items, names, None if holder is None else id(holder), is_global)

    def paths(self, last: str) -> Iterator[NameRead]:
        """The beginnings of the path that end with this attribute."""
        names = self.read.attribute.split(".")
        for place, name in enumerate(names):
            if name == last:
                yield NameRead(self.read.name, ".".join(names[: place + 1]))

    @property
    def takes_items(self) -> bool:
        """Whether a read takes an item of an iterator that outlives the block."""
        is_count = self.is_global and isinstance(self.before, itertools.count)  # which is compared
        return isinstance(self.before, Iterator) and not isinstance(self.before, io.IOBase) and not is_count


class PythonReads:
    """Python state read by one block, collected while the block is recorded."""

    def __init__(
        self, recording: OpenBlock, reads: Sequence[NameRead] = (), namespace: Namespace | None = None,
        attributes: frozenset[str] = frozenset(), keys: frozenset[str] = frozenset(),
        paths_set: frozenset[NameRead] = frozenset(), asks_in_block: bool = True,
    ) -> None:  # fmt: skip
        self._rec, self._namespace = recording, namespace
        self._entered: dict[int, _ModuleVisit] = {}
        self._open: list[tuple[_ModuleVisit, int, int]] = []  # with the first id, and how many nodes there were
        self._updates: dict[torch.optim.Optimizer, set[int]] = {}
        values = {} if namespace is None else {read: namespace.get(read.name, MISSING) for read in reads}
        self._reads = {read: value for read, value in values.items() if value is not MISSING}
        self._globals: dict[tuple[int, NameRead], tuple[Namespace, Any]] = {}  # that functions of the program read
        self._states: list[_State] = []
        self._keys = keys  # texts that the block looks up in dicts
        self._asks_in_block = asks_in_block
        self._kinds: set[type] = set()  # of the program, whose methods may run
        self._set = {str(path) for path in paths_set}  # by the block itself, in each of its runs
        self._set |= {path.name for path in paths_set if isinstance(values.get(NameRead(path.name)), FunctionType)}
        self.functions: list[FunctionType] = []  # of the program, that the block may call
        self._shared: list[tuple[SourceLine | None, torch.Tensor, torch.Tensor]] = []  # with NumPy: with copies
        self._environment: dict[str, str] = {}  # variables of the environment that the program read; empty for none
        self._names_read = attributes  # of any object, by the block and by functions of the program
        for read, value in list(self._reads.items()):
            if isinstance(value, type) and issubclass(value, torch.autograd.Function):
                for method in filter(None, map(behind, vars(value).values())):
                    self._follow(method)
            elif (function := behind(value)) is not None:
                self._follow(function)
            else:
                self._reads |= dict.fromkeys(self._of_method(read, value), value)
        names = self._names_read
        self._states += [_State.of(read, its, names, is_global=True) for (_, read), (its, _) in self._globals.items()]
        if namespace is not None:
            self._states += [_State.of(read, namespace, names - self._set_first(read)) for read in self._reads]
        self._groups = {
            id(state.before): (str(state.read), state.before, _numbers(state.before))
            for state in self._states if isinstance(state.before, torch.optim.Optimizer)
        }  # fmt: skip
        self._attributes = {
            read: vars(module)[read.attribute]
            for read, module in self._reads.items()
            if isinstance(module, torch.nn.Module) and read.attribute in vars(module)
        }

    def _set_first(self, root: NameRead) -> set[str]:
        """Attributes of an object that the methods called by the block set before they read them, in its order."""
        first: dict[str, bool] = {}
        kind = type(self._reads[root])
        for read in self._reads if not root.attribute and holds_settings(kind) else ():
            if read.name == root.name and read.attribute and hasattr(kind, read.attribute):
                reads = attribute_reads(kind, read.attribute)
                first = dict.fromkeys(attribute_uses(kind, read.attribute), False) | dict.fromkeys(reads, True) | first
        return {name for name, is_read in first.items() if not is_read}

    def _follow(self, function: FunctionType) -> None:
        """Note the globals and attribute names read by a function of the program that the block may call."""
        found = function_reads(function)
        self._names_read |= found.attributes
        self.functions += found.functions
        for read, table in found.globals:
            namespace = Namespace(table)
            self._globals.setdefault((id(table), read), (namespace, namespace.at(read)))

    def _of_method(self, read: NameRead, value: object) -> Iterator[NameRead]:
        """The attributes of an object that are read by a method of the program named or called by the block."""
        name = read.attribute or "__call__"
        kind = type(value)
        if isinstance(value, type | ModuleType | torch.Tensor) or "." in name:
            return
        self._kinds.add(kind)
        method = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
        if isinstance(method, FunctionType) and not is_foreign(method.__code__.co_filename):
            self._follow(method)
            for attribute in attribute_reads(kind, name):
                yield NameRead(read.name, attribute)

    def enter(self, module: torch.nn.Module) -> None:
        """A module's forward begins, in its scope."""
        found = self._entered.get(id(module))
        if found is None:
            self._kinds.add(type(module))
            self._enter_function(type(module).forward)
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                self._enter_function(behind(hook) or vars(type(hook)).get("__call__"))
            names = self._names_of(type(module), has_hooks=bool(module._forward_pre_hooks or module._forward_hooks))
            before = dict(_read_attributes(module, self._names_read))
            copies = {n: _kept(v, names) for n, v in before.items() if not _is_plain(v)}
            label = f"{'.'.join(self._rec.scopes.path)} ({type(module).__name__})"
            found = _ModuleVisit(module, label, self._rec.where(), before, copies, names, [], module.training)
            self._entered[id(module)] = found
        elif found.training is not module.training:
            found.training = None
        if self._rec.inside:
            found.spans = None
        self._open.append((found, new_id(), len(self._rec.new)))

    def _names_of(self, kind: type, *, has_hooks: bool) -> frozenset[str]:
        """The attributes of objects that a forward reads; the program's may hand them to any of its functions."""
        reads = frozenset(attribute_reads(kind))
        return reads | self._names_read if is_of_program(kind) or has_hooks else reads

    def _enter_function(self, function: object) -> None:
        """Note the state that a function of the program reads before it runs."""
        if not isinstance(function, FunctionType):
            return
        before = len(self._globals)
        self._follow(function)
        for (_, read), (namespace, _) in list(self._globals.items())[before:]:
            self._states.append(_State.of(read, namespace, self._names_read, is_global=True))

    def exit(self, module: torch.nn.Module) -> None:
        """A module's forward ends, also by an exception."""
        while self._open:
            found, start, before = self._open.pop()
            if len(self._rec.new) == before:  # it gave its input, or a part of it
                found.spans = None
            elif found.spans is not None:
                found.spans.append(range(start, new_id()))
            if found.module is module:
                return

    def updates(self, optimizer: torch.optim.Optimizer, nodes: Iterable[int]) -> None:
        """Nodes of a step of a torch optimizer."""
        self._updates.setdefault(optimizer, set()).update(nodes)

    def reads_environment(self, name: str, value: str | None) -> None:
        """The program reads a variable of the environment."""
        self._environment[name] = value or ""

    def shares(self, tensor: torch.Tensor) -> None:
        """The program takes the memory of a plain tensor as an array of NumPy."""
        self._shared.append((self._rec.where(), tensor, tensor.detach().clone()))

    def sets_flag(self, variable: Variable) -> None:
        """The block sets ``requires_grad`` of a Variable's Parameter."""
        _frozen_inside.add(variable)

    def guards(self, label: str, nodes: Iterable[Node], *, is_cell: bool) -> PythonGuards:
        """The guards of the block's Python state, made at the end of the block."""
        nodes = list(nodes)
        groups = [
            _group_guard(optimizer, [n for n in nodes if n.id in ids]) for optimizer, ids in self._updates.items()
        ]
        found = PythonGuards(label, is_cell, groups=groups)
        used = self._used(variables := _variables(nodes))
        found.modules = [_guard(entered, used) for entered in self._entered.values()]
        found.modules += [*self._of_names(), *self._of_containers(used)]
        for entered in self._entered.values():
            if entered.training is not None and "training" in attribute_reads(type(entered.module)):
                _modes.setdefault(entered.module, set()).add(entered.training)
        for variable in variables:
            tensor = None if variable.held is None else variable.held.tensor()
            if tensor is not None:
                found.flags.append(FlagGuard(weakref.ref(tensor), variable, _flags(tensor)))
                for hook in (tensor._backward_hooks or {}).values():
                    self._enter_function(behind(hook))
        found.settings = [*self._settings_of_names(), *self._settings_of_modules()]
        for name, value in self._environment.items():
            find = partial(os.environ.get, name, "")
            found.settings.append(
                SettingGuard(f"os.environ[{name!r}]", "", Picture("text", value), frozenset(), find, 0)
            )
        found.tensors = list(self._captured(nodes))
        return found

    def _settings_of_names(self) -> Iterator[SettingGuard]:
        for read, namespace, value in self._names():
            if namespace.at(read) is not value or "param_groups" in read.attribute:  # runs take its numbers of now
                continue
            place, find = (id(namespace.names), namespace.function), partial(namespace.at, read)
            if (before := picture(value, self._names_read)) is not None:
                yield SettingGuard(str(read), "", before, self._names_read, find, place)
            if isinstance(value, torch.nn.Module) and id(value) not in self._entered:  # handed to a function
                yield from self._settings_of_holder(str(read), value, find, place)

    def _settings_of_holder(
        self, name: str, module: torch.nn.Module, find: Callable[[], Any], place: Any
    ) -> Iterator[SettingGuard]:
        """Guards of plain attributes of a module that is not called."""
        for attribute in (self._names_read & module.__dict__.keys()) - _MODULE:
            value = module.__dict__[attribute]
            if isinstance(value, _NUMBERS_AND_TEXTS):
                of = partial(_found_attribute, find, attribute)
                before = Picture("text" if isinstance(value, str) else "number", value)
                yield SettingGuard(f"{name}.{attribute}", "", before, frozenset(), of, place)

    def _settings_of_modules(self) -> Iterator[SettingGuard]:
        """Guards of objects, nested lists and attributes of the class that a forward reads, once for each object."""
        seen: set[tuple[int, frozenset[str]]] = set()
        for entered in self._entered.values():
            own, kind, module = entered.module.__dict__, type(entered.module), weakref.ref(entered.module)
            reads = attribute_reads(kind)
            late = (self._names_read & own.keys()).difference(entered.before, attribute_uses(kind), _MODULE)
            for name, value in (*entered.before.items(), *((name, own[name]) for name in late)):
                is_guarded = name in reads and name in own and (
                    _is_plain(value) or _is_setting(name, value, entered.copies)
                )  # fmt: skip
                if is_guarded or value is MISSING or (name in _MODULE and name not in _HOOKS):
                    continue
                if _attribute(module, name) is not value or (id(value), entered.names) in seen:
                    continue
                if not isinstance(value, _NUMBERS_AND_TEXTS):  # an object that several modules share is said once
                    seen.add((id(value), entered.names))
                before = picture(value, entered.names)
                if before is not None and before.kind != "callable":
                    find = partial(_attribute, module, name)
                    yield SettingGuard(name, entered.label, before, entered.names, find, id(entered.module))

    def _names(self) -> Iterator[tuple[NameRead, Namespace, Any]]:
        """Names and paths that the block and functions of the program read, with the values that they had before."""
        if self._namespace is not None:
            for read, value in self._reads.items():
                if not _is_plain(self._attributes.get(read, MISSING)):
                    yield read, self._namespace, at_path(value, read.attribute)
        for (_, read), (namespace, value) in self._globals.items():
            yield read, namespace, value

    def _captured(self, nodes: Iterable[Node]) -> Iterator[TensorGuard]:
        """Guards of the plain tensors that constants were copied from, by the name or attribute that holds them."""
        captured = self._rec.tape.captured
        places: dict[int, tuple[str, Callable[[], Any]]] = {}  # by the tensor's id
        arrays: set[int] = set()  # where arrays lie that are compared as settings
        for entered in self._entered.values():
            module = weakref.ref(entered.module)
            for name, value in entered.before.items():
                if isinstance(value, torch.Tensor):
                    find = partial(_attribute, module, name)
                    places[id(value)] = f"attribute {name} of {entered.label}", find
        for read, namespace, value in self._names():
            if isinstance(value, torch.Tensor) and namespace.at(read) is value:
                places[id(value)] = str(read), partial(namespace.at, read)
            if type(value).__module__ == "numpy" and hasattr(value, "ctypes") and picture(value) is not None:
                arrays.add(value.ctypes.data)
        wanted = {id(tensor) for tensor, _ in captured.values()} - places.keys()
        if wanted:
            places |= self._nested(wanted)
        for node in nodes:
            if node.id not in captured or not isinstance(value := node.attrs.get("value"), torch.Tensor):
                continue
            tensor, at = captured[node.id]
            if tensor.data_ptr() in arrays:
                continue
            where = "" if node.source is None else f" that {node.source.label} line {node.source.line} reads"
            name, find = places.get(id(tensor), (f"a tensor{where}", weakref.ref(tensor)))
            yield TensorGuard(name, node.id, value, find, at)

    def _nested(self, wanted: Collection[int]) -> dict[int, tuple[str, Callable[[], Any]]]:
        """The places of tensors in lists, dicts, objects and functions, by their ids."""
        roots = [(str(read), partial(namespace.at, read), self._names_read) for read, namespace, _ in self._names()]
        for entered in self._entered.values():
            module = weakref.ref(entered.module)
            roots += [
                (f"attribute {name} of {entered.label}", partial(_attribute, module, name), entered.names)
                for name, value in entered.before.items() if value is not MISSING and not _is_plain(value)
            ]  # fmt: skip
        found: dict[int, tuple[str, Callable[[], Any]]] = {}
        for name, find, names in roots:
            for keys, tensor in _tensors(_kept(find(), names)):
                if id(tensor) in wanted and keys:
                    found.setdefault(id(tensor), (f"a tensor in {name}", partial(_at_keys, find, names, keys)))
        return found

    def _of_names(self) -> Iterator[ModuleGuard]:
        """Guards of the attributes that the code of the block itself read of modules."""
        for read, value in self._attributes.items():
            module = self._reads[read]
            entered = self._entered.get(id(module))
            is_known = entered is not None and read.attribute in attribute_reads(type(module))
            if _is_plain(value) and vars(module).get(read.attribute) is value and not is_known:
                state = _state(module, (read.attribute,), (), False, ())
                label = f"{read.name} ({type(module).__name__})"
                yield ModuleGuard(weakref.ref(module), label, (read.attribute,), (), False, (), state, None, None)

    def _of_containers(self, used: Collection[int]) -> Iterator[ModuleGuard]:
        """Guards of containers in between: lists of modules, and modules with only methods or parts called."""
        named = (module for module in self._reads.values() if isinstance(module, torch.nn.Module))
        stack: list[tuple[torch.nn.Module, str, tuple[range, ...] | None]] = [
            *((e.module, e.label, None if e.spans is None else tuple(e.spans)) for e in self._entered.values()),
            *((module, f"{self._rec.scopes.python_name(module)} (", None) for module in named),
        ]
        seen: set[int] = set()
        while stack:
            module, label, spans = stack.pop()
            if id(module) in seen or isinstance(module, torch.jit.ScriptModule) or not _has_any(module, used):
                continue
            seen.add(id(module))
            path = label.partition(" (")[0]
            if id(module) not in self._entered:
                entered = _ModuleVisit(
                    module, f"{path} ({type(module).__name__})", None, {}, {}, frozenset(), None, None
                )
                yield replace(_guard(entered, used), spans=spans)
            stack += [(child, f"{path}.{name}", spans) for name, child in module._modules.items() if child is not None]

    def _used(self, variables: Iterable[Variable]) -> set[int]:
        """Ids of the modules that were entered, or hold a Parameter or buffer that was read."""
        places = (place() for v in variables if v.held is not None for place, _ in v.held.places)
        return self._entered.keys() | {id(module) for module in places if module is not None}

    def kept(self) -> Iterator[CarriedState]:
        """Notes of state that the block's code reads first and then changes."""
        cure = (
            "in Python, from call to call: every run of the graph begins with the value that the recording found. Keep "
            "it in a buffer (register_buffer) or a tfnb.Variable"
        )
        for entered in self._entered.values():
            for name in self._changed(entered):
                if entered.module._forward_pre_hooks and name not in _HOOKS:  # a hook may have set it before
                    continue
                yield CarriedState(entered.source, f"{entered.label} keeps its attribute {name} {cure}")
        states = [state for state in self._states if state.holder not in self._entered]  # others were visited
        changed = dict.fromkeys(name for state in states for name in self._changed_parts(state))
        for name in (name for name in changed if name not in self._set):
            yield CarriedState(None, f"this cell or block keeps {name} {cure}")
        yield from self._set_in_groups()
        yield from self._read_in_groups()
        yield from self._read_slots()
        yield from self._written_by_numpy()
        for state in states:
            if state.takes_items:
                yield CarriedState(
                    None,
                    f"this cell or block takes items of {state.read}, an iterator: each run of the graph has those "
                    "that the recording took. Take them outside, and feed them to placeholders",
                )

    def _set_in_groups(self) -> Iterator[CarriedState]:
        """Notes of numbers of an optimizer's param groups that the block set."""
        for name, optimizer, before in self._groups.values():
            pairs = zip(before, _numbers(optimizer), strict=False)  # a group may be new
            found = dict.fromkeys(key for old, now in pairs for key in old if now.get(key, MISSING) != old[key])
            if found:
                yield CarriedState(
                    None,
                    f"this cell or block sets {', '.join(found)} of the param groups of {name}. That happens once, "
                    "while it is recorded: a run takes the number that a group has then. Set it between runs",
                )

    def _read_in_groups(self) -> Iterator[CarriedState]:
        """Notes of numbers of an optimizer's param groups that the block reads."""
        paths = (p for p in self._reads if p.attribute.rpartition(".")[2] == "param_groups")
        owners = (NameRead(path.name, path.attribute.rpartition(".")[0]) for path in paths)
        read = set() if self._namespace is None else {id(self._namespace.at(owner)) for owner in owners}
        for name, optimizer, before in self._groups.values():
            found = sorted(self._keys & {key for group in before for key in group})
            if found and id(optimizer) in read:
                yield CarriedState(
                    None,
                    f"this cell or block reads {', '.join(found)} of the param groups of {name}, in Python: every run "
                    "of the graph computes with the number that the recording found, also where it was set since. "
                    "Make the number a placeholder or a tfnb.Variable; opt.step() takes the rate of now",
                )

    def _written_by_numpy(self) -> Iterator[CarriedState]:
        """Notes of tensors whose memory NumPy wrote while the block was recorded."""
        captured = self._rec.tape.captured.items()
        nodes = ((self._rec.tape.by_id.get(at), tensor) for at, (tensor, _) in captured)
        found = [(node.source, tensor, node.attrs["value"]) for node, tensor in nodes if node is not None]
        for source, tensor, value in (*found, *self._shared):
            if is_recorded(tensor) or not is_shared(tensor) or value.shape != tensor.shape:
                continue
            if not _are_equal(value, tensor):
                yield CarriedState(
                    source,
                    "NumPy writes into the memory of a tensor here. Each run computes with the values that torch first "
                    "met: write with torch, or take the array when it is complete, torch.tensor(array)",
                )

    def _read_slots(self) -> Iterator[CarriedState]:
        """Notes of optimizers whose state the block's code reads: a run has what the recording found there."""
        paths = dict.fromkeys(path for state in self._states for path in state.paths("state"))
        for path in paths:
            owner = NameRead(path.name, path.attribute.rpartition(".")[0])
            optimizer = None if self._namespace is None else self._namespace.at(owner)
            if isinstance(optimizer, torch.optim.Optimizer):
                yield CarriedState(
                    None,
                    f"this cell or block reads {path}, in Python: every run of the graph has what the recording found "
                    "there. Read it outside, after a run",
                )

    def _changed_parts(self, state: _State) -> Iterator[str]:
        """The paths of the parts that the block changed, so that the next call would find other ones."""
        now = state.namespace.at(state.read)
        is_tensor = now is state.before and isinstance(now, torch.Tensor)  # in place: that is noted there
        is_name = isinstance(state.before, itertools.count) and self._makes_names(state.read.name)
        if not is_tensor and not state.takes_items and not is_name:
            yield from self._carried_parts(state.items, _kept(now, state.names), str(state.read))

    def _makes_names(self, count: str) -> bool:
        """Whether functions of the program take items of a counter for texts alone, such as names."""
        found = [definition(f) for f in self.functions if count in f.__code__.co_names]
        return bool(found) and all(each is not None and only_in_texts(each, count) for each in found)

    def _changed(self, entered: _ModuleVisit) -> Iterator[str]:
        own = entered.module.__dict__
        for name, before in entered.before.items():
            if name in own and not (own[name] is before and name not in entered.copies):  # a plain value, kept
                now, kept = _kept(own[name], entered.names), entered.copies.get(name, before)
                if name in _HOOKS:  # a hook may take itself away
                    kept = {key: item for key, item in kept.items() if key in now}
                yield from self._carried_parts(kept, now, name)

    def _carried_parts(self, before: Any, now: Any, path: str) -> Iterator[str]:
        """The paths of the parts of a copied value that hold something else for the next call."""
        if isinstance(before, Attributes) and isinstance(now, Attributes):
            for name, item in now.items():
                if name in before or self._asks:
                    yield from self._carried_parts(before.get(name, MISSING), item, f"{path}.{name}")
        elif self._are_carried(before, now):
            yield path

    def _are_carried(self, before: Any, now: Any) -> bool:
        """Whether a copied list, dict or other value holds something else for the next call than before.

        A dict that gains numbers may make them once, as a cache does.
        """
        if before is OPAQUE or now is OPAQUE:
            return False
        if isinstance(before, dict) and isinstance(now, dict):
            is_shorter = any(key not in now for key in before)
            known = (key for key in now if key in before or self._asks)
            return is_shorter or any(self._are_carried(before.get(key, MISSING), now[key]) for key in known)
        if isinstance(before, list | tuple) and isinstance(now, list | tuple):
            is_shorter = len(now) < len(before)
            gained = now[len(before) :]
            parts = (*zip(before, now, strict=False), *((MISSING, item) for item in gained))
            return is_shorter or any(map(_is_plain, gained)) or any(self._are_carried(*part) for part in parts)
        if isinstance(now, list | tuple | dict) and (_is_plain(before) or before is MISSING):  # made by the block
            return any(self._are_carried(MISSING, item) for item in (now.values() if isinstance(now, dict) else now))
        if type(before).__module__.startswith("tfnb") or isinstance(before, frozenset):
            return type(before) is type(now) and not is_recorded(before) and bool(before != now)
        return self._is_carried(before, now)

    def _is_carried(self, before: Any, now: Any) -> bool:
        """Whether a value became another one that the next call would have found: a number, or a computed tensor."""
        if is_recorded(before) or isinstance(before, torch.nn.Parameter):
            return False
        if isinstance(before, torch.Tensor):
            _, handle = self._rec.tape.handles.get(id(before), (None, None))
            if handle is None:
                return self._rec.variable_of(before) is not None and now is not before and self._is_computed(now)
            if now is before or self._is_computed(now):
                return now is not before or handle._family.version > 0
            return is_recorded(now) and now.graph is self._rec.graph and not _is_close(now.found_sample(), before)
        if _is_plain(before):
            return self._is_computed(now) or (_is_plain(now) and before != now)
        return before is MISSING and self._is_computed(now)  # a constant may be made once

    @cached_property
    def _asks(self) -> bool:
        """Whether code that may run asks if something is there: else what is new there is set before it is read."""
        methods = (behind(each) for kind in self._kinds for base in kind.__mro__ if is_of_program(base)
                   for each in vars(base).values())  # fmt: skip
        functions = (*self.functions, *filter(None, methods))
        return self._asks_in_block or any(asks(function.__code__) for function in functions)

    def _is_computed(self, value: Any) -> bool:
        """Whether a value is a recorded tensor that is not the same in every run."""
        rec = self._rec
        if not is_recorded(value) or value.graph is not rec.graph:
            return False
        value = value if isinstance(value, torch.Tensor) else value.values  # of a row-sparse gradient
        try:
            return not rec.tape.is_fixed(rec.look(value).value)
        except InvalidArgument:  # of the inside of a branch or loop, and no result of it
            return False


def _numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The plain numbers of each param group."""
    return [{name: item for name, item in group.items() if _is_plain(item)} for group in optimizer.param_groups]


def _kept(value: object, names: frozenset[str]) -> Any:
    """A copy of a value's contents."""
    return contents(value, names, _as_is)


def _as_is(value: Any, names: frozenset[str], levels: int) -> Any:
    """The content of one item: of a function its enclosed names, defaults and attributes, else the value itself."""
    if isinstance(value, FunctionType) and levels and not is_foreign(value.__code__.co_filename):
        read = enclosed_reads(value.__code__)
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        kept = [OPAQUE if cell == CellType() else cell.cell_contents for name, cell in cells if name in read]
        kept += value.__defaults__ or ()
        kept += (item for name, item in vars(value).items() if name in names and name != "__wrapped__")
        return [contents(each, names, _as_is, levels - 1) for each in kept]
    found = array_picture(value) if type(value).__module__ == "numpy" else None
    return value if found is None else found.of


def _is_close(sample: torch.Tensor | None, before: torch.Tensor) -> bool:
    """Whether a constant is the former one in another form, such as another dtype."""
    if sample is None or sample.shape != before.shape:
        return True
    return torch.allclose(sample.to(before.dtype), before, equal_nan=True)


def _attribute(module: weakref.ref[torch.nn.Module], name: str) -> Any:
    """An attribute of a module or of its class; MISSING if there is none, or the module is gone."""
    found = module()
    if found is None or name in found.__dict__:
        return MISSING if found is None else found.__dict__[name]
    return inspect.getattr_static(type(found), name, MISSING)


def _tensors(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """The tensors in copied contents, with the keys that lead to each."""
    if isinstance(value, torch.Tensor):
        yield keys, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        yield from _tensors(item, (*keys, key))


def _at_keys(find: Callable[[], Any], names: frozenset[str], keys: tuple[Any, ...]) -> Any:
    """What is at these keys of the contents of a value now; None if there is nothing."""
    found = _kept(find(), names)
    for key in keys:
        try:
            found = found[key]
        except (LookupError, TypeError):
            return None
    return found


def _found_attribute(find: Callable[[], Any], name: str) -> Any:
    return getattr(find(), name, MISSING)


def _read_attributes(module: torch.nn.Module, names: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """The attributes that code may read, with their values; MISSING for those that a forward may make. Hooks, too.

    names: the attributes that functions of the program read of any object, to which a forward may hand the module.
    """
    own, kind = module.__dict__, type(module)
    reads, is_own = attribute_reads(kind), is_of_program(kind)
    others = (names if is_own else names & own.keys()) - _MODULE
    for name in (*reads, *(others - attribute_uses(kind))) if others else reads:
        if name in own and name != "training":
            yield name, own[name]
        elif is_own and name not in _MODULE and name != "training":
            found = inspect.getattr_static(kind, name, MISSING)
            is_made = name in reads or found is not MISSING
            if is_made and not isinstance(found, FunctionType | property | type):
                yield name, MISSING if isinstance(found, cached_property) else found
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        if own[name]:
            yield name, own[name]


def _items(value: Any) -> dict[Any, Any]:
    """The items of a short list, dict or set by their keys."""
    if isinstance(value, dict):
        return dict(value)
    return dict(enumerate(value)) if isinstance(value, list | deque) else dict.fromkeys(map(id, value))


def _variables(nodes: Iterable[Node]) -> list[Variable]:
    return list(dict.fromkeys(node.attrs["variable"] for node in nodes if node.op == "tfnb.read"))


def _guard(entered: _ModuleVisit, used: Collection[int]) -> ModuleGuard:
    module, own = entered.module, entered.module.__dict__
    modules, reads = own["_modules"], attribute_reads(type(module))
    children = tuple(n for n, child in modules.items() if child is not None and _has_any(child, used))
    attributes = tuple(
        name for name, value in entered.before.items()
        if own.get(name) is value and name in reads and (
            _is_plain(value) or isinstance(value, _FUNCTIONS) or _is_setting(name, value, entered.copies)
        )
    )  # fmt: skip
    is_whole = bool(modules) and len(children) == len(modules) and _goes_over_children(type(module))
    tensors = tuple((table, name) for table in ("_parameters", "_buffers") for name in own[table])
    state = [copy(v) if type(v) in _KEPT else v for v in _state(module, attributes, children, is_whole, tensors)]
    spans = None if entered.spans is None else tuple(entered.spans)
    training = entered.training if "training" in attribute_reads(type(module)) else None
    return ModuleGuard(
        weakref.ref(module), entered.label, attributes, children, is_whole, tensors, state, spans, training
    )


def _goes_over_children(kind: type) -> bool:
    """Whether a further submodule would be called like the others."""
    return issubclass(kind, _CONTAINERS) or not _OF_CHILDREN.isdisjoint(attribute_reads(kind))


def _has_any(module: torch.nn.Module, used: Collection[int]) -> bool:
    return any(id(each) in used for each in module.modules())


def _is_setting(name: str, value: object, copies: Mapping[str, Any]) -> bool:
    """Whether an attribute is a short list, dict or set of plain values that the block left unchanged."""
    if name in _MODULE or not isinstance(value, _KEPT) or not 0 < len(value) < FEW:
        return False
    items = value.values() if isinstance(value, dict) else value
    return all(map(_is_plain, items)) and _kept(value, frozenset()) == copies[name]


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and len(value) < FEW and all(map(_is_plain, value)))
