"""Steps of a user's optimizer class on plain copies: the first values of its state, and a comparison with a graph.

A graph has the tensors and numbers of ``state[p]`` as Variables, and all else as constants. So the steps of one copy
that lives on are compared with steps of new copies that get these entries alone. Nothing of the user's is written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from tfnb.errors import Unsupported
from tfnb.recording.marks.user_code import is_of_program

Entries = dict[str, Any]  # the state of one Parameter
_STEPS = 4
HOOKS = {
    f"_optimizer_{at}_{when}_hooks" for at in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
}
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
        if name not in self and isinstance(value, torch.Tensor):
            self.first[name] = FirstValue(value.detach().clone(), None)
        elif name not in self and isinstance(value, (int, float)) and not isinstance(value, bool):
            self.first[name] = FirstValue(torch.tensor(float(value), dtype=torch.float64), value)
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
        for name, value in vars(optimizer).items():
            if name != "state":
                self.optimizer.__dict__[name] = value if name in HOOKS else _copied(optimizer, name, value, memo)
        self.groups: list[dict[str, Any]] = self.optimizer.__dict__.pop("param_groups")
        self.attributes = dict(vars(self.optimizer))
        self.state: list[Entries] = [{} for _ in places]


class Rehearsal:
    """Steps of an optimizer on plain copies, by ``call(optimizer, groups, state)``: the state after one step.

    Called without modes of torch and without gradients. Random numbers are drawn: the caller restores the generator.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, twin: object, call: Callable[..., Any]) -> None:
        self.optimizer, self.twin, self.call = optimizer, twin, call
        self.values = [p.detach() for group in optimizer.param_groups for p in group["params"]]

    def first_values(self, state: Sequence[Entries]) -> list[dict[str, FirstValue]]:
        """The first value of each entry, by Parameter; raises Unsupported if it needs a run."""
        tries = [self._begun(self._copy, state, shift, grad) for shift, grad in ((0.0, 0.5), (1.0, -0.25))]
        for first, again in zip(*tries, strict=True):
            if differ := _differing(first, again):
                raise Unsupported(
                    f"{self._label}.step() begins state[{differ[0]!r}] with a value of the Parameter, its gradient "
                    f"or a random draw, which only the first run knows: begin it with zeros, or make it in "
                    f"__init__; else {INSTEAD}"
                )
        return tries[0]

    def compare(self, state: Sequence[Entries]) -> None:
        """Raise Unsupported unless steps that get their entries alone equal those of an optimizer that lives on."""
        whole, untouched = self._moving(self.values, state), self._moving(self.values, state)
        first, values = self._begun(self._moving, state, 0.0, 0.5), self.values
        kept = [{n: x.tensor if x.number is None else x.number for n, x in mine.items()} for mine in first]
        for number in range(_STEPS):
            grads = _random_grads(values, number)
            part = self._moving(values, [{**entries, **mine} for entries, mine in zip(state, kept, strict=True)])
            for each in (whole, part):
                torch.default_generator.manual_seed(number)
                self._step(each, grads)
            self._refuse_attributes(whole, untouched)
            for ours, entries, theirs, mine in zip(whole.state, part.state, state, kept, strict=True):
                self._refuse_entries(ours, entries, theirs, mine)
            if not all(map(_near, whole.parameters, part.parameters)):
                self._refuse(
                    "takes another first step than a step from the first values of its state, or keeps something "
                    "outside of it", "begin self.state[p] with what stood before the step, as zeros_like(p) or 0, and "
                    "let all steps do the same with it"
                )  # fmt: skip
            values = [mine.detach() for mine in part.parameters]
            kept = [{name: entries[name] for name in mine} for entries, mine in zip(part.state, kept, strict=True)]

    @property
    def _label(self) -> str:
        return type(self.optimizer).__name__

    def _begun(
        self, copied: Callable[..., PlainCopy], state: Sequence[Entries], shift: float, grad: float
    ) -> list[dict[str, FirstValue]]:
        copy = copied([value + shift for value in self.values], state)
        begun = [FirstValues(entries) for entries in copy.state]
        copy.state = [*begun]
        self._step(copy, [torch.full_like(mine, grad) for mine in copy.parameters])
        return [entries.first for entries in begun]

    def _copy(self, values: Sequence[torch.Tensor], state: Sequence[Entries]) -> PlainCopy:
        copy = PlainCopy(self.optimizer, self.twin, values)
        copy.state = [deepcopy(dict(entries)) for entries in state]
        return copy

    def _moving(self, values: Sequence[torch.Tensor], state: Sequence[Entries]) -> PlainCopy:
        """A copy with a learning rate above 0: one of 0, at the begin of a warm-up, would hide differences."""
        copy = self._copy(values, state)
        for group in copy.groups:
            group["lr"] = group["lr"] if float(group["lr"]) else 0.1
        return copy

    def _step(self, copy: PlainCopy, grads: Sequence[torch.Tensor]) -> None:
        mine = [grad.clone() for grad in grads]
        for parameter, grad in zip(copy.parameters, mine, strict=True):
            parameter.grad = grad
        after = self.call(copy.optimizer, copy.groups, dict(zip(copy.parameters, copy.state, strict=True)))
        copy.state = [after[parameter] for parameter in copy.parameters]
        for parameter, grad, entries in zip(copy.parameters, mine, copy.state, strict=True):
            if parameter.grad is not grad:
                self._refuse("replaces or drops p.grad", "leave it, and call zero_grad() after step()")
            held = [name for name, x in entries.items() if _shares(x, grad)]
            if held:
                self._refuse(f"keeps the gradient itself in state[{held[0]!r}]", "keep p.grad.clone()")

    def _refuse_attributes(self, whole: PlainCopy, untouched: PlainCopy) -> None:
        for name, value in whole.attributes.items():
            if not _same(value, untouched.attributes[name]):
                raise Unsupported(refused_change(self._label, f"its attribute {name}"))
        for group, before in zip(whole.groups, untouched.groups, strict=True):
            for name, value in group.items():
                if not _same(value, before[name]):
                    raise Unsupported(refused_change(self._label, f"param_groups[...][{name!r}]"))

    def _refuse_entries(self, whole: Entries, part: Entries, before: Entries, kept: Entries) -> None:
        """Raise Unsupported for an entry of a Parameter with another value in a graph."""
        if gone := [name for name in kept if name not in whole or name not in part]:
            self._refuse(f"drops state[{gone[0]!r}]", "begin it in the first step and keep it")
        for name, value in whole.items():
            if name not in kept and not (name in before and _same(value, before[name])) and value is not None:
                self._refuse(
                    f"keeps state[{name!r}], which is a {type(value).__name__}",
                    "keep tensors and numbers in self.state[p], each by a name of its own",
                )
        if differ := [name for name in kept if not _near(whole[name], part[name])]:
            self._refuse(
                f"leaves another state[{differ[0]!r}] by its first step than a step from the first value of it",
                f"begin it with what stood before the step, as state.setdefault({differ[0]!r}, 0) or zeros_like(p), "
                "not another entry's tensor, and let all steps do the same with it",
            )

    def _refuse(self, what: str, instead: str) -> None:
        raise Unsupported(f"{self._label}.step() {what}, which a graph does not repeat: {instead}; else {INSTEAD}")


def refused_change(label: str, what: str) -> str:
    """Text of the refusal of a ``step`` that changes a constant of the graph."""
    return (
        f"{label}.step() changes {what}, which would be a constant of the graph: keep it in self.state[p], or {INSTEAD}"
    )


def _copied(optimizer: torch.optim.Optimizer, name: str, value: object, memo: dict[int, Any]) -> Any:
    try:
        return deepcopy(value, memo)
    except Exception as error:
        raise Unsupported(
            f"{type(optimizer).__name__}.step() is tried on a copy before it is recorded, and its attribute {name} "
            f"cannot be copied ({error}): keep it elsewhere, or step it between runs"
        ) from error


def _random_grads(values: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=source).to(x.device, x.dtype) for x in values]


def _differing(first: Mapping[str, FirstValue], again: Mapping[str, FirstValue]) -> list[str]:
    """Names of entries with another first value in the second rehearsal."""
    both = first.keys() & again.keys()
    return [*(first.keys() ^ again.keys()), *(n for n in both if not torch.equal(first[n].tensor, again[n].tensor))]


def _near(a: object, b: object) -> bool:
    """True for two tensors or numbers equal but for rounding of the last digits."""
    a, b = (torch.as_tensor(x, dtype=None if isinstance(x, torch.Tensor) else torch.float64) for x in (a, b))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=4 * torch.finfo(a.dtype).eps, atol=0.0, equal_nan=True)


def _same(a: Any, b: Any, deep: int = 4) -> bool:
    """True if a step left the tensors, numbers and strings of an attribute as they were, also in containers and plain
    objects.
    """
    if isinstance(a, torch.nn.Parameter) or not deep:
        return True
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and _near(a, b)
    if isinstance(a, SimpleNamespace) or is_of_program(type(a)):
        a, b = (getattr(x, "__dict__", {}) for x in (a, b))
    if isinstance(a, (dict, list, tuple, set, deque)):
        a, b = (x.values() if isinstance(x, dict) else x for x in (a, b))
        return len(a) == len(b) and all(map(partial(_same, deep=deep - 1), a, b))
    return not isinstance(a, _PLAIN) or (type(a) is type(b) and (a == b or a != a))


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
