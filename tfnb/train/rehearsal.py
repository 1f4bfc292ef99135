"""Steps of a user's optimizer class on plain copies: the first values of its state, and a comparison with a graph.

A graph has the tensors and numbers of ``state[p]`` as Variables, and so those attributes and settings of groups that a
step changes, and the state of an inner optimizer of torch; all else are constants. So the steps of one copy that lives
on are compared with steps of new copies that get these values alone. No recording is open meanwhile, and nothing of the
user's is written.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.errors import Unsupported
from tfnb.graph import current
from tfnb.graph.setting import setting
from tfnb.recording.marks.user_code import is_of_program
from tfnb.train.stand_ins import exchanged, take_attributes

Entries = dict[str, Any]  # the state of one Parameter
Setting = tuple[int | None, str]  # a value of a param group, by its number, or of the optimizer's attributes: its name
_STEPS = 4
HOOKS = {
    f"_optimizer_{at}_{when}_hooks" for at in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
}
_NO_SETTINGS = {"params", "param_groups", "state"}
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
_FEW = 4096  # numbers of a tensor that are compared
_EMPTY = CellType()
_APART = (torch.optim.Optimizer, torch.nn.Module, torch.nn.Parameter)  # their numbers change, or are read, in a run
INSTEAD = "write its rule as a tfnb.train.Optimizer, or step it between runs"


class FirstValue(NamedTuple):
    """The first value of an entry of a state as a tensor, and as a number of Python or None."""

    tensor: torch.Tensor
    number: float | None


class FirstValues(Entries):
    """The state of one Parameter in a rehearsal; ``first`` has the first value of each entry."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        super().__init__()
        self.first: dict[str, FirstValue] = {}
        self.update(entries)

    def __setitem__(self, name: str, value: object) -> None:
        is_new = self.get(name) is None
        if is_new and isinstance(value, torch.Tensor):
            self.first[name] = FirstValue(value.detach().clone(), None)
        elif is_new and isinstance(value, (bool, int, float)):
            dtype = torch.bool if isinstance(value, bool) else torch.float64
            self.first[name] = FirstValue(torch.tensor(value, dtype=dtype), value)
        super().__setitem__(name, value)

    def setdefault(self, name: str, default: object = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *args: object, **kwargs: object) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value


class PlainCopy:
    """A copy of an optimizer with its attributes and groups, on copies of its Parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, twin: object, values: Sequence[torch.Tensor]) -> None:
        places = [p for group in optimizer.param_groups for p in group["params"]]
        self.parameters = [
            torch.nn.Parameter(value.detach().clone(), requires_grad=p.requires_grad)
            for p, value in zip(places, values, strict=True)
        ]
        self.optimizer: object = object.__new__(type(optimizer))
        memo: dict[int, Any] = {id(p): mine for p, mine in zip(places, self.parameters, strict=True)}
        memo |= {id(optimizer): self.optimizer, id(twin): twin}
        stands = dict(zip(places, self.parameters, strict=True))
        for place, mine in stands.items():
            take_attributes(mine, place)
        for name, value in vars(optimizer).items():
            if name != "state":
                copied = value if name in HOOKS else _copied(optimizer, name, value, memo)
                self.optimizer.__dict__[name] = copied if name in HOOKS else exchanged(copied, stands)
        self.groups: list[dict[str, Any]] = self.optimizer.__dict__.pop("param_groups")
        self.inner = inner_of(self.optimizer)
        self.state: list[Entries] = [{} for _ in places]

    def owner(self, where: int | None) -> dict[str, Any]:
        """The param group of a number, or the attributes."""
        return vars(self.optimizer) if where is None else self.groups[where]

    def go_on_from(self, other: PlainCopy, settings: Sequence[Setting]) -> None:
        """Take the settings of another copy, and the state of its inner optimizers."""
        for where, name in settings:
            self.owner(where)[name] = _alone(other.owner(where)[name])
        for name, inner in self.inner.items():
            theirs = other.inner[name].state
            for mine, parameter in zip(self.parameters, other.parameters, strict=True):
                inner.state[mine] = {key: _alone(x) for key, x in theirs.get(parameter, {}).items()}


class Beginning(NamedTuple):
    """How a step begins the state: the first value of each entry, by Parameter.

    is_own: whether the first step is another one than a step from these values. settings: those that a step changes.
    """

    values: list[dict[str, FirstValue]]
    is_own: bool
    settings: list[Setting]


class Rehearsal:
    """Steps of an optimizer on plain copies, by ``call(optimizer, groups, state, closure)``: the state after one step.

    has_closure: whether a step is called with a closure.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, twin: object, call: Callable[..., Any], *, has_closure: bool
    ) -> None:
        self.optimizer, self.twin, self.call, self.has_closure = optimizer, twin, call, has_closure
        self.values = [p.detach() for group in optimizer.param_groups for p in group["params"]]
        self.settings: list[Setting] = []

    def begin(self, state: Sequence[Entries]) -> Beginning:
        """The first values of the entries; raises Unsupported for a class whose steps a graph would not repeat."""
        tries = [self._begun(self._copy, state, shift, grad) for shift, grad in ((0.0, 0.5), (1.0, -0.25))]
        is_own = any(_differing(first, again) for first, again in zip(*tries, strict=True))
        whole, untouched = self._moving(self.values, state), self._moving(self.values, state)
        changed: dict[Setting, None] = {}
        for number in range(_STEPS):
            self._step(whole, _random_grads(self.values, number), number)
            changed |= dict.fromkeys(_changed(whole, untouched))
        self.settings = [
            (where, name) for where, name in changed
            if name != "lr" and all(is_value(each.owner(where).get(name)) for each in (whole, untouched))
        ]  # fmt: skip
        return Beginning(tries[0], self._compare(state, is_own=is_own), self.settings)

    def first_values(self, state: Sequence[Entries]) -> list[dict[str, FirstValue]]:
        """The first value of each entry, by Parameter."""
        return self._begun(self._copy, state, 0.0, 0.5)

    def _compare(self, state: Sequence[Entries], *, is_own: bool) -> bool:
        """Whether the first step is another one than a step from the first values.

        Raises Unsupported unless further steps that get their entries alone equal those of an optimizer that lives on.
        """
        whole, untouched = self._moving(self.values, state), self._moving(self.values, state)
        first = self._begun(self._moving, state, 0.0, 0.5)
        names = [list(mine) for mine in first]
        grads = _random_grads(self.values, 0)
        self._step(whole, grads, 0)
        if not is_own:
            kept = [{n: x.tensor if x.number is None else x.number for n, x in mine.items()} for mine in first]
            part = self._moving(self.values, [{**old, **mine} for old, mine in zip(state, kept, strict=True)])
            self._step(part, grads, 0)
            is_own = not self._are_same(whole, part, names)
        for number in range(1, _STEPS):
            self._refuse_other_changes(whole, untouched, state, names)
            kept = [{n: _alone(entries[n]) for n in mine} for entries, mine in zip(whole.state, names, strict=True)]
            values = [mine.detach() for mine in whole.parameters]
            part = self._moving(values, [{**old, **mine} for old, mine in zip(state, kept, strict=True)])
            part.go_on_from(whole, self.settings)
            grads = _random_grads(values, number)
            for each in (whole, part):
                self._step(each, grads, number)
            self._refuse_entries(whole, part, names)
        self._refuse_other_changes(whole, untouched, state, names)
        return is_own

    @property
    def _label(self) -> str:
        return type(self.optimizer).__name__

    def _begun(
        self, copied: Callable[..., PlainCopy], state: Sequence[Entries], shift: float, grad: float
    ) -> list[dict[str, FirstValue]]:
        copy = copied([value + shift for value in self.values], state)
        begun = [FirstValues(entries) for entries in copy.state]
        copy.state = [*begun]
        self._step(copy, [torch.full_like(mine, grad) for mine in copy.parameters], 0)
        return [entries.first for entries in begun]

    def _copy(self, values: Sequence[torch.Tensor], state: Sequence[Entries]) -> PlainCopy:
        copy = PlainCopy(self.optimizer, self.twin, values)
        copy.state = [deepcopy(dict(entries)) for entries in state]
        return copy

    def _moving(self, values: Sequence[torch.Tensor], state: Sequence[Entries]) -> PlainCopy:
        """A copy with a learning rate above 0: one of 0, at the begin of a warm-up, would hide differences."""
        copy = self._copy(values, state)
        for group in itertools.chain(copy.groups, *(inner.param_groups for inner in copy.inner.values())):
            group["lr"] = group["lr"] if float(group["lr"]) else 0.1
        return copy

    def _step(self, copy: PlainCopy, grads: Sequence[torch.Tensor], seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        mine = [grad.clone() for grad in grads]
        for parameter, grad in zip(copy.parameters, mine, strict=True):
            parameter.grad = grad
        closure = PlainClosure(copy.parameters) if self.has_closure else None
        after = self.call(copy.optimizer, copy.groups, dict(zip(copy.parameters, copy.state, strict=True)), closure)
        if closure is not None and (closure.calls != 1 or closure.is_late):
            self._refuse(
                f"calls its closure {'after it wrote a Parameter' if closure.is_late else f'{closure.calls} times'}",
                "call it once, above all else",
            )
        copy.state = [after[parameter] for parameter in copy.parameters]
        for parameter, grad, entries in zip(copy.parameters, mine, copy.state, strict=True):
            if parameter.grad is not grad:
                self._refuse("replaces or drops p.grad", "leave it, and call zero_grad() after step()")
            held = [name for name, x in entries.items() if _shares(x, grad)]
            if held:
                self._refuse(f"keeps the gradient itself in state[{held[0]!r}]", "keep p.grad.clone()")

    def _refuse_other_changes(
        self, whole: PlainCopy, untouched: PlainCopy, state: Sequence[Entries], names: Sequence[list[str]]
    ) -> None:
        """Raise Unsupported for a change of anything else than tensors and numbers of the state."""
        if more := [each for each in _changed(whole, untouched) if each not in self.settings]:
            raise Unsupported(refused_change(self._label, more[0]))
        for now, before, mine in zip(whole.state, state, names, strict=True):
            if gone := [name for name in mine if name not in now]:
                self._refuse(f"drops state[{gone[0]!r}]", "begin it in the first step and keep it")
            for name, value in now.items():
                if name not in mine and not (name in before and _same(value, before[name])) and value is not None:
                    self._refuse(
                        f"keeps state[{name!r}], which is a {type(value).__name__}, or begins it in a later step",
                        "keep tensors and numbers in self.state[p], each by a name of its own, from the first step on",
                    )

    def _refuse_entries(self, whole: PlainCopy, part: PlainCopy, names: Sequence[list[str]]) -> None:
        """Raise Unsupported for an entry or Parameter with another value in a graph."""
        for ours, entries, mine in zip(whole.state, part.state, names, strict=True):
            if differ := [n for n in mine if n in ours and n in entries and not _near(ours[n], entries[n])]:
                self._refuse(
                    f"leaves another state[{differ[0]!r}] than a step that has the state and Parameters alone",
                    "keep all that lives on in self.state[p], and no tensor in it by two names",
                )
        if not all(map(_near, whole.parameters, part.parameters)) or not all(
            _near(whole.owner(where)[name], part.owner(where)[name]) for where, name in self.settings
        ):
            self._refuse(
                "takes another step than one that has the state and Parameters alone",
                "keep all that lives on in self.state[p]",
            )

    def _are_same(self, whole: PlainCopy, part: PlainCopy, names: Sequence[list[str]]) -> bool:
        """Whether two copies have the same Parameters and entries."""
        return all(map(_near, whole.parameters, part.parameters)) and all(
            n in ours and n in theirs and _near(ours[n], theirs[n])
            for ours, theirs, mine in zip(whole.state, part.state, names, strict=True)
            for n in mine
        )

    def _refuse(self, what: str, instead: str) -> None:
        raise Unsupported(f"{self._label}.step() {what}, which a graph does not repeat: {instead}; else {INSTEAD}")


class PlainClosure:
    """The closure of a step on plain copies: counts its calls, and tells of one that comes behind a write."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters, self.before = parameters, [p.detach().clone() for p in parameters]
        self.calls, self.is_late = 0, False

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        self.is_late |= not all(map(torch.equal, self.parameters, self.before))
        return self.before[0].sum()


@contextmanager
def apart() -> Iterator[None]:
    """Inside, no recording is open and no gradients are taken; afterwards the random generator is as before."""
    with setting(current.stack, open=[]), _disable_current_modes(), torch.no_grad():
        random = torch.default_generator.get_state()
        try:
            yield
        finally:
            torch.default_generator.set_state(random)


def inner_of(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """The optimizers that another one holds, by attribute."""
    return {name: each for name, each in vars(optimizer).items() if isinstance(each, torch.optim.Optimizer)}


def refused_change(label: str, setting: Setting) -> str:
    """Text of the refusal of a ``step`` that changes a constant of the graph."""
    where, name = setting
    what = f"its attribute {name}" if where is None else f"param_groups[{where}][{name!r}]"
    return (
        f"{label}.step() changes {what}, which would be a constant of the graph: make it a number or tensor in "
        f"__init__, keep it in self.state[p], or {INSTEAD}"
    )


def _changed(whole: PlainCopy, untouched: PlainCopy) -> list[Setting]:
    """The attributes and settings of groups that steps have changed; an inner optimizer by its settings."""
    found: list[Setting] = []
    for where in (None, *range(len(whole.groups))):
        now, before = whole.owner(where), untouched.owner(where)
        for name in [*now, *(before.keys() - now.keys())]:
            if name not in _NO_SETTINGS and not (name in now and name in before and _same(now[name], before[name])):
                found.append((where, name))
    return found


def is_value(value: Any) -> bool:
    """True for a tensor or number, which a Variable can hold."""
    return isinstance(value, (torch.Tensor, bool, int, float)) and not isinstance(value, torch.nn.Parameter)


def _copied(optimizer: torch.optim.Optimizer, name: str, value: object, memo: dict[int, Any]) -> Any:
    try:
        return deepcopy(value, memo)
    except Exception as error:
        raise Unsupported(
            f"{type(optimizer).__name__}.step() is tried on a copy before it is recorded, and its attribute {name} "
            f"cannot be copied ({error}): keep it elsewhere, or step it between runs"
        ) from error


def _alone(value: Any) -> Any:
    """An entry in memory of its own, as a Variable has it."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _random_grads(values: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=source).to(x.device, x.dtype) for x in values]


def _differing(first: Mapping[str, FirstValue], again: Mapping[str, FirstValue]) -> list[str]:
    """Names of entries with another first value in the second rehearsal."""
    both = first.keys() & again.keys()
    return [*(first.keys() ^ again.keys()), *(n for n in both if not torch.equal(first[n].tensor, again[n].tensor))]


def _near(a: object, b: object) -> bool:
    """True for two tensors or numbers equal but for rounding of the last digits; of 16 bits there are few."""
    a, b = (torch.as_tensor(x, dtype=None if isinstance(x, torch.Tensor) else torch.float64) for x in (a, b))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):  # as a rule, and found soon
        return True
    if not (a.is_floating_point() or a.is_complex()):
        return False
    last = 0.0 if a.element_size() == 2 else 4 * torch.finfo(a.dtype).eps
    return torch.allclose(a, b, rtol=last, atol=0.0, equal_nan=True)


def _same(a: Any, b: Any, deep: int = 4) -> bool:
    """True if a step left the tensors, numbers and strings of an attribute as they were, also in containers and plain
    objects.
    """
    if isinstance(a, torch.nn.Parameter) or not deep:
        return True
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and _near(a, b)
    if isinstance(a, torch.optim.Optimizer):
        return isinstance(b, torch.optim.Optimizer) and _same(_settings_of(a), _settings_of(b))
    if isinstance(a, SimpleNamespace) or is_of_program(type(a)):
        a, b = (getattr(x, "__dict__", {}) for x in (a, b))
    if isinstance(a, (dict, list, tuple, set, deque)):
        a, b = (x.values() if isinstance(x, dict) else x for x in (a, b))
        return len(a) == len(b) and all(map(partial(_same, deep=deep - 1), a, b))
    return not isinstance(a, _PLAIN) or (type(a) is type(b) and (a == b or a != a))


def _settings_of(inner: torch.optim.Optimizer) -> list[Any]:
    """The settings of an inner optimizer, whose groups may be shared with the outer one and hold further settings."""
    return [group.get(name) for group in inner.param_groups for name in inner.defaults]


def is_plain(value: object) -> bool:
    """True for numbers and strings, also in containers."""
    if isinstance(value, (list, tuple, dict)):
        return all(map(is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, _PLAIN)


def constant(value: object, deep: int = 4) -> object:
    """The form of a setting or attribute whose equality tells whether a graph may keep it as a constant.

    Tensors by value (large ones by identity and version), containers and objects of the user's classes by their items,
    functions by code, defaults and closure, all else by identity.
    """
    if is_plain(value):
        return deepcopy(value)
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        few = value.numel() <= _FEW and value.layout is torch.strided and value.device.type != "meta"
        numbers = str(value.tolist()) if few else (id(value), value._version)
        return value.item() if value.numel() == 1 else (torch.Tensor, numbers)
    if not deep:
        return type(value)
    form = partial(constant, deep=deep - 1)
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(map(repr, map(form, value)))
    if isinstance(value, Mapping):
        return type(value), [*map(form, value)], [*map(form, value.values())]
    if isinstance(value, (deque, list, tuple)):
        return type(value), [*map(form, value)]
    if isinstance(value, partial):
        return form((value.func, value.args, value.keywords))
    if isinstance(value, MethodType):
        return form(value.__func__)
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY]
        return value.__code__, form(value.__defaults__), form(cells)
    if isinstance(value, SimpleNamespace) or (is_of_program(type(value)) and not isinstance(value, _APART)):
        return type(value), constant(dict(getattr(value, "__dict__", {})), deep)
    return id(value), type(value)


def _shares(value: object, grad: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() == grad.untyped_storage().data_ptr()
