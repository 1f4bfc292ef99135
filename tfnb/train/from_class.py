"""The twin of an optimizer whose class the user wrote: its own ``step``, recorded on stand-ins, as the rule of a step.

The user's ``step`` is ordinary torch code over ``param_groups`` and ``state``. It is called while recording, on a copy
of the optimizer in which each Parameter is a recorded tensor with its gradient and each entry of its state a recorded
tensor; what it leaves in them is assigned to Variables. So the graph has nodes of an ordinary joint rule. A class whose
first step is another one than those after it (``state["m"] = p.grad.clone()``) is called twice, in the branches of a
conditional: without entries, and with them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.control_flow import autograph, cond
from tfnb.control_flow.staging.containers import made
from tfnb.control_flow.staging.statement import as_number
from tfnb.errors import FailedPrecondition, InvalidArgument, Unsupported
from tfnb.graph import Variable, current
from tfnb.graph.setting import setting
from tfnb.recording import Operation, Recorder, Tensor, variable
from tfnb.recording.marks.user_code import is_foreign
from tfnb.recording.subgraphs.capture import Savepoint
from tfnb.recording.subgraphs.own_gradient import sealed
from tfnb.recording.values.variables import known
from tfnb.train.from_torch import CLASSES, FromTorch, at_line
from tfnb.train.inner_steps import InnerSteps, Kept, standing
from tfnb.train.optimizer import Optimizer, Pair, Rate
from tfnb.train.recorded_numbers import NumberMode
from tfnb.train.rehearsal import (
    HOOKS,
    INSTEAD,
    Beginning,
    Rehearsal,
    Setting,
    apart,
    constant,
    inner_of,
    is_plain,
    is_value,
    refused_change,
)
from tfnb.train.stand_ins import exchanged, take_attributes

_BEGUN = "is_begun"  # slot of a Parameter whose first step is another one: whether it was taken
InnerStep = Callable[[torch.optim.Optimizer, Any], None]
_within: ContextVar[InnerStep | None] = ContextVar("within", default=None)  # of a ``step`` of the user's under way


def has_own_step(kind: type) -> bool:
    """Whether the ``step`` of an optimizer's class is not one of torch's."""
    return not own_step(kind).__module__.startswith("torch.")


def step_within() -> InnerStep | None:
    """The recorded ``step`` of a user's class takes the step of an inner optimizer by this function."""
    return _within.get()


def own_step(kind: type) -> Callable[..., None]:
    """The ``step`` of a class without the wrappers of torch around it: its hooks and ``no_grad``."""
    step: Any = kind.step  # type: ignore[attr-defined]
    while hasattr(step, "__wrapped__") and hasattr(step, "__code__") and is_foreign(step.__code__.co_filename):
        step = step.__wrapped__
    return step


class Rebinding(Exception):
    """No error: a recorded step binds a setting to another value, and is recorded again with a Variable of it."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.setting = setting


class FromClass(FromTorch):
    """The optimizer made by `from_torch` of a class with a ``step`` of its own.

    The learning rate is read at each run; a run whose group has other settings than the recording had is refused.
    """

    joint = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self._rates: dict[int, list[tuple[dict[str, Any], Variable]]] = {}  # by group, one for each other settings
        self._reads: list[Tensor] = []  # of the learning rates in the step that is being recorded
        self._counts: dict[torch.Tensor, set[str]] = {}  # by parameter: entries of its state that are Python numbers
        self._begins = True  # whether a step begins an empty state
        self._given: dict[torch.Tensor, set[str]] = {}  # by parameter: entries that a first step of its own finds
        self._targets: list[Variable] = []  # of the step that is being recorded
        self._closure: Callable[[], Any] | None = None  # of that step: gives the loss that is computed already
        self._has_closure = False
        self._flag = _BEGUN
        self._changing: dict[Setting, bool] = {}  # settings that steps change: whether one is a tensor of the user's
        self._changed: dict[str, Variable] = {}  # their values

    def step(self, closure: Callable[[], Any] | None = None) -> Operation:
        if closure is None:
            return super().step()
        with torch.enable_grad():
            loss = closure()
        with setting(self, _closure=lambda: loss):
            return super().step()

    # -- state ------------------------------------------------------------------------------------------------------

    def slots(self, target: object) -> dict[str, Variable]:
        owner = variable(target)
        parameter = self._place_of(owner)
        if parameter not in self._first:
            self._begin_all()
        found = {name: self._kept_slot(owner, parameter, name) for name in self._first[parameter]}
        for name, inner in inner_of(self.optimizer).items():
            if any(place is parameter for group in inner.param_groups for place in group["params"]):
                found |= {f"{name}.{slot}": x for slot, x in self._inner(inner).slots(owner).items()}
        if self._targets[:1] == [owner]:
            found |= {_label_of(setting): self._setting_of(setting) for setting in self._changing}
        return found

    def _place_of(self, owner: Variable) -> torch.Tensor:
        """The Parameter of a Variable."""
        found = next((parameter for parameter, _ in self._places() if known(parameter) is owner), None)
        if found is None:
            raise FailedPrecondition(f"{owner.name} is no parameter of this {self._label}: add_param_group it")
        return found

    def _inner(self, inner: torch.optim.Optimizer) -> FromTorch:
        """The twin of an inner optimizer."""
        if type(inner) not in CLASSES:
            raise Unsupported(
                f"{type(inner).__name__}.step() is called within the step() of another optimizer, {self._label}: that "
                f"is one of torch.optim, or call both in the cell, one behind the other{at_line()}"
            )
        found: FromTorch = FromTorch.of(inner)
        return found

    def _setting_of(self, setting: Setting) -> Variable:
        """The Variable of an attribute, or of a setting of a group, that steps change."""
        label = _label_of(setting)
        if label not in self._changed:
            with _disable_current_modes():
                find = partial(self._now, setting)
                self._changed[label] = Variable.looked_up(find, name=f"{self._label}/{label}")
        return self._changed[label]

    def _follow(self, settings: Iterable[Setting]) -> None:
        """Hold settings that steps change as Variables."""
        for where, name in settings:
            self._changing.setdefault((where, name), isinstance(self._owner(where)[name], torch.Tensor))

    def _owner(self, where: int | None) -> dict[str, Any]:
        return vars(self.optimizer) if where is None else self.optimizer.param_groups[where]

    def _now(self, setting: Setting) -> torch.Tensor:
        """The value of a setting that steps change; a number becomes a tensor when a run needs it."""
        where, name = setting
        owner = self._owner(where)
        value = owner[name]
        if isinstance(value, torch.Tensor):
            return value
        with _disable_current_modes():
            value = torch.tensor(value, dtype=torch.bool if isinstance(value, bool) else torch.float64)
        if current.recording() is None:
            owner[name] = value
        return value

    def _kept_slot(self, owner: Variable, parameter: torch.Tensor, name: str) -> Variable:
        key = parameter, name
        if key not in self._kept:
            with _disable_current_modes():
                find = partial(self._is_begun if name == _BEGUN else self._state, parameter, name)
                self._kept[key] = Variable.looked_up(find, name=f"{owner.name}/{self._label}/{name}")
        return self._kept[key]

    def _begin_all(self) -> None:
        """The first value of each entry of the state of new Parameters: as it is now, or as a step begins it on copies.

        Raises Unsupported for a class whose steps a graph would not repeat.
        """
        now = [self._entries(parameter) for parameter, _ in self._places()]
        given: list[dict[str, Any]] = [{} for _ in now]  # what a first step of its own finds
        begin = Beginning(given, False, [])
        try:
            begin = self._rehearsed(given)
            self._begins = True
        except Exception:  # of torch, or of the user's code: that wants its state made in __init__
            if not any(now):
                raise
            self._begins = False
        is_own, changing = begin.is_own, begin.settings
        if any(now):
            begin = self._rehearsed(now)
            if begin.is_own:  # the state is made in part
                is_own, given = True, now
        self._follow((*changing, *begin.settings))
        for (parameter, _), first, mine in zip(self._places(), begin.values, given, strict=True):
            if parameter in self._first:  # its entries are Variables already
                continue
            self._first[parameter] = {name: value.tensor for name, value in first.items()}
            self._counts[parameter] = {name for name, value in first.items() if value.number is not None}
            self._given[parameter] = first.keys() & mine.keys()
            if is_own and first.keys() - mine.keys():
                with _disable_current_modes():
                    self._first[parameter][_BEGUN] = torch.tensor(False)

    def _rehearsed(self, state: list[dict[str, Any]]) -> Beginning:
        with apart():
            return self._rehearsal().begin(state)

    def _rehearsal(self) -> Rehearsal:
        return Rehearsal(self.optimizer, self, self._call, has_closure=self._has_closure)

    def _entries(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The state of a Parameter, without the entries that no step has begun."""
        unbegun = {name for place, name in self.unbegun() if place is parameter}
        return {name: x for name, x in self.optimizer.state.get(parameter, {}).items() if name not in unbegun}

    def _state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """An entry of the state, made when needed outside of a recording; a number becomes a tensor then."""
        first, entry = self._first[parameter][name], self.optimizer.state.get(parameter, {}).get(name)
        if isinstance(entry, torch.Tensor) and entry.dtype == first.dtype:
            return entry
        if current.recording() is not None:
            return first.clone() if entry is None else torch.as_tensor(entry, dtype=first.dtype, device=first.device)
        if entry is None:
            self._begin_again(parameter, name)
        else:
            self.optimizer.state[parameter][name] = torch.as_tensor(entry, dtype=first.dtype, device=first.device)
        return self.optimizer.state[parameter][name]

    def _begin_again(self, parameter: torch.Tensor, name: str) -> None:
        """Fill in missing entries of the state: from the class's own first step, or first values as of now."""
        first = self._first[parameter]
        if _BEGUN in first and name not in self._given[parameter]:
            self.optimizer.state[parameter][name] = first[name] = first[name].clone()
            first[_BEGUN].fill_(False)
            return
        if not self._begins or self._given[parameter]:
            raise FailedPrecondition(
                f"{self._label}: state[{name!r}] is gone, and step() does not begin it as a graph can repeat: load a "
                "state_dict that has it, or make the optimizer anew and record its step again"
            )
        with apart():
            found = self._rehearsal().first_values([{} for _ in self._places()])
        begun = {place: values for (place, _), values in zip(self._places(), found, strict=True)}
        for place, entry in self._kept:
            if _BEGUN not in self._first[place] and entry not in self.optimizer.state.get(place, {}):
                self.optimizer.state[place][entry] = begun[place][entry].tensor

    def _begun_by_step(self, parameter: torch.Tensor) -> set[str]:
        return super()._begun_by_step(parameter) - self._given[parameter]

    # -- the step -----------------------------------------------------------------------------------------------------

    def _record(self, recorder: Recorder, pairs: Sequence[Pair], rate: Rate) -> list[Tensor]:
        for _, target in pairs:
            if recorder.autograd.present(target) is not None:
                raise Unsupported(
                    f"{self._label}.step(): a branch decides whether {target.name} has a .grad, and the step of a "
                    "class of your own is one for all Parameters: call step() inside of the branch"
                    f"{recorder.tape.at()}"
                )
        self._targets, self._reads = [target for _, target in pairs], []
        self._has_closure = self._closure is not None
        if any(self._place_of(target) not in self._first for target in self._targets):
            self._begin_all()
        before = Savepoint(recorder)
        try:
            values = Optimizer._record(self, recorder, pairs, rate)
        except Rebinding as more:  # a setting that no step of the rehearsal changed, such as a maximum
            before.undo()
            self._follow([more.setting])
            return self._record(recorder, pairs, rate)
        recorder.python.updates(self.optimizer, [value.value.node for value in values])
        return [*values, *self._reads]  # a step that uses no learning rate holds to its settings, too

    def update_all(
        self, ws: Sequence[torch.Tensor], grads: Sequence[Any], slots: Sequence[Kept], lr: Rate
    ) -> list[tuple[torch.Tensor, Kept]]:
        recorder = current.recording()
        assert isinstance(recorder, Recorder)
        rates = [self._rate(recorder, number) for number in range(len(self.optimizer.param_groups))]
        places = [self._place_of(target) for target in self._targets]
        flagged = [(place, kept[_BEGUN]) for place, kept in zip(places, slots, strict=True) if _BEGUN in kept]
        later = partial(self._stepped, recorder, ws, grads, slots, rates)
        if not flagged:
            return later()
        unbegun = [(place, flag) for place, flag in flagged if not self._has_begun(place)] or flagged
        lacks = (
            f"{self._label}.step(): its first step is another one than those after it, and some Parameters of this run "
            "have taken it that had not when the step was recorded, or the other way round: record the step again"
        )
        if older := [flag for place, flag in flagged if all(place is not other for other, _ in unbegun)]:
            recorder.guard(torch.stack(older).all(), True, lacks=lacks)
        flags = torch.stack([flag for _, flag in unbegun])
        recorder.guard(flags.all() == flags.any(), True, lacks=lacks)
        first = frozenset(place for place, _ in unbegun)
        found: list[tuple[torch.Tensor, Kept]] = cond(flags.all(), later, partial(later, first=first))
        return found

    def _stepped(
        self, recorder: Recorder, ws: Sequence[torch.Tensor], grads: Sequence[Any], slots: Sequence[Kept],
        rates: Sequence[torch.Tensor], *, first: Collection[torch.Tensor] = (),
    ) -> list[tuple[torch.Tensor, Kept]]:  # fmt: skip
        """The user's ``step``, recorded: new values of Parameters and slots. first: Parameters that take their first
        step.
        """
        stands: dict[torch.Tensor, torch.Tensor] = {}
        state: dict[torch.Tensor, Any] = {}
        places = {known(parameter): parameter for parameter, _ in self._places()}
        with torch.no_grad():
            for target, w, grad, kept in zip(self._targets, ws, grads, slots, strict=True):
                place = places[target]
                stands[place] = mine = w.clone()
                take_attributes(mine, place)
                mine._is_param = True  # for isinstance(p, torch.nn.Parameter)
                mine.requires_grad_(place.requires_grad)
                recorder.autograd.set_grad(mine, grad)
                state[mine] = made(self._given_entries(place, kept, is_first=place in first))
            groups = standing(self.optimizer.param_groups, stands)
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            idle = object.__new__(type(self.optimizer))
            apart = ("state", "param_groups", "defaults", *HOOKS)
            for name, value in vars(self.optimizer).items():
                idle.__dict__[name] = value if name in apart else exchanged(value, stands)
            owners: dict[Any, dict[str, Any]] = {None: idle.__dict__, **dict(enumerate(groups))}
            for where, name in self._changing:
                value = slots[0][_label_of((where, name))].clone()
                owners[where][name] = value if self._changing[where, name] else as_number(value)
            inner = InnerSteps(recorder, self.optimizer, idle, groups, stands, slots)
            before = {where: dict(owner) for where, owner in owners.items()}
            held = [recorder.read(target).value for target in self._targets]
            with sealed(recorder, self._refuse), NumberMode():
                self._call(idle, groups, state, self._closure, autograph, inner)
            if held != [recorder.read(target).value for target in self._targets]:
                raise Unsupported(
                    f"{self._label}.step() writes Parameters that it does not take from its groups, nor from a list or "
                    f"dict of its own: loop over self.param_groups; else {INSTEAD}"
                )
            self._refuse_constants(owners, before)
            found = [
                self._left(place, mine, state[mine], kept)
                for (place, mine), kept in zip(stands.items(), slots, strict=True)
            ]
            for (_, after), kept in zip(found, inner.slots, strict=True):
                after.update(kept)
            for where, name in self._changing:
                label = _label_of((where, name))
                found[0][1][label] = torch.as_tensor(owners[where][name], dtype=slots[0][label].dtype)
        for mine in stands.values():
            recorder.autograd.set_grad(mine, None)
            mine.requires_grad_(False)
        return [*found]

    def _refuse_constants(
        self, owners: Mapping[Any, Mapping[str, Any]], before: Mapping[Any, Mapping[str, Any]]
    ) -> None:
        """Raise Unsupported for a step that binds an attribute or setting without a Variable."""
        for where, owner in owners.items():
            for name, value in owner.items():
                is_constant = (where, name) not in self._changing and name not in ("state", "param_groups")
                if is_constant and (name not in before[where] or before[where][name] is not value):
                    can_change = name != "lr" and is_value(before[where].get(name)) and is_value(value)
                    if can_change:
                        raise Rebinding((where, name))
                    raise Unsupported(refused_change(self._label, (where, name)))

    def _given_entries(self, parameter: torch.Tensor, kept: Kept, *, is_first: bool) -> dict[str, Any]:
        """The state of a Parameter that the recorded step finds."""
        mine = self._first[parameter].keys() - {_BEGUN}
        names = [name for name in kept if name in (self._given[parameter] if is_first else mine)]
        counts, constants = self._counts[parameter], self._entries(parameter)
        given = {name: as_number(kept[name].clone()) if name in counts else kept[name].clone() for name in names}
        return {**{name: x for name, x in constants.items() if name not in kept}, **given}

    def _left(
        self, parameter: torch.Tensor, mine: torch.Tensor, left: Mapping[str, Any], kept: Kept
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A Parameter and its slots after the recorded step."""
        slots = self._first[parameter].keys() - {_BEGUN}
        more = [name for name, x in left.items() if name not in slots and isinstance(x, torch.Tensor)]
        if more or slots - left.keys():
            raise InvalidArgument(
                f"{self._label}.step() makes or drops state[{(more or sorted(slots - left.keys()))[0]!r}] in "
                f"a later step: begin it in the first{at_line()}"
            )
        after = {name: torch.as_tensor(left[name], dtype=kept[name].dtype) for name in kept if name in slots}
        return mine, after | {name: torch.ones_like(x) for name, x in kept.items() if name == _BEGUN}

    def _call(
        self, idle: Any, groups: list[dict[str, Any]], state: Mapping[torch.Tensor, Any],
        closure: Callable[[], Any] | None, form: Callable[..., Callable[..., None]] = lambda step: step,
        inner: InnerStep | None = None,
    ) -> Mapping[torch.Tensor, Any]:  # fmt: skip
        """The state after the user's ``step`` on a copy of the optimizer."""
        idle.__dict__.update(param_groups=groups, state=made(defaultdict(dict, state)))
        token = _within.set(inner)
        try:
            form(own_step(type(idle)))(idle, *([] if closure is None else [closure]))
        finally:
            _within.reset(token)
        if len(idle.state) != len(state):
            raise Unsupported(
                f"{self._label}.step() changes self.state of what is no Parameter with a gradient, which would be a "
                f"constant of the graph: keep it in self.state[p], or {INSTEAD}"
            )
        found: Mapping[torch.Tensor, Any] = idle.state
        return found

    def _refuse(self, how: str) -> None:
        raise Unsupported(
            f"{self._label}.step() takes a value as a Python number by {how}, which would be a constant of the graph: "
            f"keep it a tensor (torch.sqrt(x) in place of np.sqrt(x)), or {INSTEAD}"
        )

    # -- settings ----------------------------------------------------------------------------------------------------

    def _rate(self, recorder: Recorder, number: int) -> Any:
        """The learning rate of a group, as each run finds it."""
        settings, recorded = self._settings(number), self._rates.setdefault(number, [])
        if all(before != settings for before, _ in recorded):
            label = f"{self._label}/lr{f'_{number}' if number else ''}"
            find, ready = partial(self._lr, number), partial(self._hold_to, number, settings)
            with _disable_current_modes():
                recorded.append((settings, Variable.looked_up(find, name=label, leads=self, ready=ready)))
        self._reads.append(recorder.read(next(rate for before, rate in recorded if before == settings)))
        return as_number(self._reads[-1].clone())

    def _settings(self, number: int) -> dict[str, Any]:
        """The settings of a group and the attributes of the optimizer, as constants of a recorded step."""
        mine, group = (
            {n: x for n, x in owner.items() if n not in _NO_SETTINGS and (where, n) not in self._changing}
            for where, owner in ((None, vars(self.optimizer)), (number, self.optimizer.param_groups[number]))
        )
        mine = {f"self.{name}": value for name, value in mine.items()}
        with _disable_current_modes():
            return {name: constant(value) for name, value in {**mine, **group}.items()}

    def _lr(self, number: int) -> torch.Tensor:
        if current.recording() is None:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn where no step was
        with _disable_current_modes():
            return torch.tensor(float(self.optimizer.param_groups[number]["lr"]), dtype=torch.float64)

    def _hold_to(self, number: int, before: dict[str, Any]) -> None:
        """Raise FailedPrecondition in a run whose group has other settings than were recorded."""
        if current.recording() is None and (now := self._settings(number)) != before:
            name = next(name for name in now.keys() | before.keys() if now.get(name) != before.get(name))
            is_told = is_plain(before.get(name)) and is_plain(now.get(name))
            change = f"was {before.get(name)}, and is {now.get(name)} now" if is_told else "is another one now"
            raise FailedPrecondition(
                f"{self._label}: {name} {change} (group {number}): a recorded step of a class of your own reads its "
                "learning rate at each run, and has the other settings of its recording. Record the step again"
            )

    def __repr__(self) -> str:
        return f"from_torch({self._label})"


_NO_SETTINGS = {
    "params", "lr", "initial_lr", "defaults", "param_groups", "state", "step", "_opt_called", "_step_count",
    "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", *HOOKS,
}  # fmt: skip


def _label_of(setting: Setting) -> str:
    where, name = setting
    return f"self.{name}" if where is None else f"group_{where}.{name}"
