"""Python state that a recording reads: attributes, submodules and hooks of modules, flags of parameters, numbers.

A graph has the values of its recording. `PythonReads` collects while a block is recorded which state it reads, and
gives the `PythonGuards` that tell later which of it has changed. State that the block itself changes is carried from
call to call in eager torch, and each run of the graph begins with the same one: that is noted.
"""

from __future__ import annotations

import inspect
import io
import itertools
import os
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from tfnb.errors import InvalidArgument
from tfnb.graph import Node, SourceLine, Variable
from tfnb.graph.current import is_recorded
from tfnb.graph.graph import new_id
from tfnb.recording.marks.attribute_reads import attribute_reads, attribute_uses
from tfnb.recording.marks.block_names import NameRead, Namespace, asks, behind, enclosed_reads, function_reads
from tfnb.recording.marks.open_block import OpenBlock
from tfnb.recording.marks.python_guards import (
    HOOKS,
    FlagGuard,
    ModuleGuard,
    PythonGuards,
    SettingGuard,
    TensorGuard,
    are_equal,
    flags_of,
    flags_set_inside,
    group_guard,
    is_shared,
    recorded_modes,
    state_of,
)
from tfnb.recording.marks.settings import (
    FEW,
    MISSING,
    OPAQUE,
    Attributes,
    Picture,
    array_picture,
    at_path,
    contents,
    holds_settings,
    picture,
)  # fmt: skip
from tfnb.recording.marks.source_trees import definition, only_in_texts
from tfnb.recording.marks.user_code import is_foreign, is_of_program

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type)
_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
_OF_CHILDREN = {"_modules", "children", "named_children", "modules", "named_modules"}
_KEPT = (list, dict, set, deque)
_NUMBERS_AND_TEXTS = (bool, int, float, complex, str)
_MODULE = frozenset(vars(torch.nn.Module()))  # attributes that torch keeps itself


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


class CarriedState(NamedTuple):
    """State of Python that a block changes, and so carries from call to call in eager torch."""

    source: SourceLine | None
    text: str


class _State(NamedTuple):
    """The value of a name or path of the program before the block; ``items``: a copy of its contents."""

    read: NameRead
    namespace: Namespace
    before: object
    items: object
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
        self._rec, self.namespace = recording, namespace
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
        self._followed: set[FunctionType] = set()
        self._readable: dict[tuple[type, frozenset[str]], _ReadableAttributes] = {}
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
        if function in self._followed:
            return
        self._followed.add(function)
        found = function_reads(function)
        if not found.attributes <= self._names_read:
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
            key = type(module), self._names_read
            if key not in self._readable:
                self._readable[key] = _ReadableAttributes.of(*key)
            before = self._readable[key].values(module)
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
        flags_set_inside.add(variable)

    def guards(self, label: str, nodes: Iterable[Node], *, is_cell: bool) -> PythonGuards:
        """The guards of the block's Python state, made at the end of the block."""
        nodes = list(nodes)
        groups = [group_guard(optimizer, [n for n in nodes if n.id in ids]) for optimizer, ids in self._updates.items()]
        found = PythonGuards(label, is_cell, groups=groups)
        used = self._used(variables := _variables(nodes))
        found.modules = [_guard(entered, used) for entered in self._entered.values()]
        found.modules += [*self._of_names(), *self._of_containers(used)]
        for entered in self._entered.values():
            if entered.training is not None and "training" in attribute_reads(type(entered.module)):
                recorded_modes.setdefault(entered.module, set()).add(entered.training)
        for variable in variables:
            tensor = None if variable.held is None else variable.held.tensor()
            if tensor is not None:
                found.flags.append(FlagGuard(weakref.ref(tensor), variable, flags_of(tensor)))
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
        self, name: str, module: torch.nn.Module, find: Callable[[], Any], place: object
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
                if is_guarded or value is MISSING or (name in _MODULE and name not in HOOKS):
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
        if self.namespace is not None:
            for read, value in self._reads.items():
                if not _is_plain(self._attributes.get(read, MISSING)):
                    yield read, self.namespace, at_path(value, read.attribute)
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
                state = state_of(module, (read.attribute,), (), False, ())
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
                if entered.module._forward_pre_hooks and name not in HOOKS:  # a hook may have set it before
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
        read = set() if self.namespace is None else {id(self.namespace.at(owner)) for owner in owners}
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
            if not are_equal(value, tensor):
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
            optimizer = None if self.namespace is None else self.namespace.at(owner)
            if isinstance(optimizer, torch.optim.Optimizer):
                yield CarriedState(
                    None,
                    f"this cell or block reads {path}, in Python: every run of the graph has what the recording found "
                    "there. Read it outside, after a run",
                )

    def _changed_parts(self, state: _State) -> Iterator[str]:
        """The paths of the parts that the block changed, so that the next call would find other ones."""
        if state.before is MISSING and not state.read.attribute and not self._asks:
            return  # a global name that was not there: the block set it before it read it
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
                if name in HOOKS:  # a hook may take itself away
                    kept = {key: item for key, item in kept.items() if key in now}
                yield from self._carried_parts(kept, now, name)

    def _carried_parts(self, before: object, now: object, path: str) -> Iterator[str]:
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


def _as_is(value: object, names: frozenset[str], levels: int) -> Any:
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


def _tensors(value: object, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
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


class _ReadableAttributes(NamedTuple):
    """Attributes of the modules of a class that code may read.

    ``sure``: by its forward; ``others``: by functions to which a forward may hand the module. ``defaults``: those that
    the class has, or MISSING of those that a forward may make.
    """

    sure: tuple[str, ...]
    others: frozenset[str]
    defaults: Mapping[str, Any]

    @classmethod
    def of(cls, kind: type, names: frozenset[str]) -> _ReadableAttributes:
        """The attributes of one class. names: the attributes that functions of the program read of any object."""
        sure = tuple(name for name in attribute_reads(kind) if name != "training")
        others = names.difference(attribute_uses(kind), _MODULE, ("training",))
        defaults: dict[str, Any] = {}
        for name in (*sure, *others) if is_of_program(kind) else ():
            found = inspect.getattr_static(kind, name, MISSING)
            is_made = name in sure or found is not MISSING
            if is_made and name not in _MODULE and not isinstance(found, FunctionType | property | type):
                defaults[name] = MISSING if isinstance(found, cached_property) else found
        return cls(sure, others, defaults)

    def values(self, module: torch.nn.Module) -> dict[str, Any]:
        """Those of a module; its hooks, too."""
        own = module.__dict__
        found = {name: own[name] for name in self.sure if name in own}
        found |= {name: own[name] for name in self.others & own.keys()}
        found |= {name: value for name, value in self.defaults.items() if name not in own}
        return found | {name: own[name] for name in ("_forward_pre_hooks", "_forward_hooks") if own[name]}


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
    state = [copy(v) if type(v) in _KEPT else v for v in state_of(module, attributes, children, is_whole, tensors)]
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
