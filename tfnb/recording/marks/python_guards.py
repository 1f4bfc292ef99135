"""Guards of the Python state that a recording read: comparisons before a run, on a schedule that costs little.

A guard that fails makes its block stale, as the graph is then of another program; a changed number, setting or tensor
is noted, as the graph computes with the former. `tfnb.recording.marks.python_state` makes the guards while a block is
recorded. (torch.compile calls such conditions guards, too; it compiles again where one fails.)
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tfnb.errors import StaleNode
from tfnb.graph import Node, Variable
from tfnb.graph.current import is_recorded
from tfnb.recording.marks.settings import Picture, differences, picture

GUARDS = "python guards"  # key of the guards of each owner among the things attached to a graph
SHARE = 20  # a comparison may cost one of so many parts of the time since the last one
COST = 2  # of its own time: the run after it is slower, whose data it pushed out of the processor's caches
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_NO_HOOKS = ((),) * len(HOOKS)

recorded_modes: weakref.WeakKeyDictionary[torch.nn.Module, set[bool]] = weakref.WeakKeyDictionary()  # training or not
flags_set_inside: weakref.WeakSet[Variable] = weakref.WeakSet()  # whose flag a recording set: cells set it in turn
_executed = [0]  # how often user code ran that may have changed anything


def user_code_ran() -> None:
    """A cell or a callback was executed: the next run compares at once."""
    _executed[0] += 1


@dataclass(frozen=True, slots=True)
class ModuleGuard:
    """State read from one module by a recording; ``state`` has the form of `state_of`."""

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
            return self.state == state_of(module, self.attributes, self.children, self.is_whole, self.tensors)
        except Exception:  # a tensor or an array stands where a number stood
            return False

    def changes(self) -> Iterator[str]:
        """Descriptions of the changed parts of the module's state."""
        module = self.module()
        if module is None:
            return
        now = state_of(module, self.attributes, self.children, self.is_whole, self.tensors)
        names = [
            "the code of forward", "forward", "the number of submodules",
            *(f"attribute {n}" for n in self.attributes), *(f"submodule {n}" for n in self.children),
            *(f"{'buffer' if table == '_buffers' else 'parameter'} {n}" for table, n in self.tensors),
            *(f"the {table[1:].replace('_', ' ')}" for table in HOOKS),
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


def state_of(
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
        found += [tuple(own[hooks]) for hooks in HOOKS]
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
        return tensor is None or self.state == flags_of(tensor) or self.variable in flags_set_inside

    def changes(self) -> Iterator[str]:
        """Descriptions of the changed flag or hooks."""
        tensor = self.tensor()
        if tensor is not None:
            now = flags_of(tensor)
            if now[0] != self.state[0]:
                yield f"requires_grad of {self.variable.name} was {self.state[0]}, and is {now[0]} now"
            if now[1:] != self.state[1:]:
                yield f"the gradient hooks of {self.variable.name} are others now"


def flags_of(tensor: torch.Tensor) -> tuple[Any, ...]:
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


def group_guard(optimizer: torch.optim.Optimizer, updates: Sequence[Node]) -> GroupGuard:
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
    place: object

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
    seen: object  # the stamp at which it was last equal to the constant

    def differs(self) -> bool:
        """Whether a tensor with other values is there now; one of another shape or dtype has another purpose."""
        now = self.find()
        if not isinstance(now, torch.Tensor) or is_recorded(now):
            return False
        if (at := stamp(now)) == self.seen and not is_shared(now):  # NumPy writes without a stamp
            return False
        if now.shape != self.value.shape or now.dtype != self.value.dtype or now.device != self.value.device:
            return False
        if not are_equal(now, self.value):
            return True
        self.seen = at
        return False


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether an array of NumPy may look at the memory of a plain tensor: torch does not resize such memory."""
    return tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.untyped_storage().resizable()


def are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
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
            if module.training not in recorded_modes.get(module, ()):
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
