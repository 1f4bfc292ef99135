"""The twin of an optimizer whose class the user wrote: its own ``step``, recorded on stand-ins, as the rule of a step.

The user's ``step`` is ordinary torch code over ``param_groups`` and ``state``. It is called once while recording, on a
copy of the optimizer in which each Parameter is a recorded tensor with its gradient and each entry of its state a
recorded tensor; what it leaves in them is assigned to Variables. So the graph has nodes of an ordinary joint rule.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.control_flow import autograph
from tfnb.control_flow.staging.containers import made
from tfnb.control_flow.staging.statement import as_number, is_number
from tfnb.errors import FailedPrecondition, InvalidArgument, Unsupported
from tfnb.graph import Variable, current
from tfnb.recording import Recorder, Tensor, variable
from tfnb.recording.marks.user_code import is_foreign
from tfnb.recording.subgraphs.own_gradient import sealed
from tfnb.recording.values.variables import known
from tfnb.train.from_torch import FromTorch
from tfnb.train.optimizer import Optimizer, Pair, Rate
from tfnb.train.rehearsal import HOOKS, INSTEAD, FirstValue, Rehearsal, constant, is_plain, refused_change

_within: ContextVar[bool] = ContextVar("within", default=False)  # whether a ``step`` of the user's is under way


def has_own_step(kind: type) -> bool:
    """Whether the ``step`` of an optimizer's class is not one of torch's."""
    return not own_step(kind).__module__.startswith("torch.")


def is_within() -> bool:
    """Whether a ``step`` of a class of the user's own is being recorded."""
    return _within.get()


def own_step(kind: type) -> Callable[..., None]:
    """The ``step`` of a class without the wrappers of torch around it: its hooks and ``no_grad``."""
    step: Any = kind.step  # type: ignore[attr-defined]
    while hasattr(step, "__wrapped__") and hasattr(step, "__code__") and is_foreign(step.__code__.co_filename):
        step = step.__wrapped__
    return step


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
        self._begins = True  # whether a step begins an empty state as a graph can repeat
        self._targets: list[Variable] = []  # of the step that is being recorded

    # -- state ------------------------------------------------------------------------------------------------------

    def slots(self, target: object) -> dict[str, Variable]:
        owner = variable(target)
        parameter = next((p for p, _ in self._places() if known(p) is owner), None)
        if parameter is None:
            raise FailedPrecondition(f"{owner.name} is no parameter of this {self._label}: add_param_group it")
        if parameter not in self._first:
            self._begin_all()
        return {name: self._kept_slot(owner, parameter, name) for name in self._first[parameter]}

    def _kept_slot(self, owner: Variable, parameter: torch.Tensor, name: str) -> Variable:
        key = parameter, name
        if key not in self._kept:
            with _disable_current_modes():
                find = partial(self._state, parameter, name)
                self._kept[key] = Variable.looked_up(find, name=f"{owner.name}/{self._label}/{name}")
        return self._kept[key]

    def _begin_all(self) -> None:
        """The first value of each entry of the state: as it is now, or as a step begins it on plain copies.

        Raises Unsupported for a class whose steps a graph would not repeat.
        """
        now = [self._entries(parameter) for parameter, _ in self._places()]
        found: list[dict[str, FirstValue]] = []
        try:
            found = self._rehearsed([{} for _ in now], compare=True)
            self._begins = True
        except Exception:  # of torch, or of the user's code: that wants its state made in __init__
            if not any(now):
                raise
            self._begins = False
        if any(now):
            found = self._rehearsed(now, compare=True)
        for (parameter, _), first in zip(self._places(), found, strict=True):
            self._first[parameter] = {name: value.tensor for name, value in first.items()}
            self._counts[parameter] = {name for name, value in first.items() if value.number is not None}

    def _rehearsed(self, state: list[dict[str, Any]], *, compare: bool) -> list[dict[str, FirstValue]]:
        with _disable_current_modes(), torch.no_grad():
            random, rehearsal = torch.default_generator.get_state(), Rehearsal(self.optimizer, self, self._call)
            try:
                first = rehearsal.first_values(state)
                if compare:
                    rehearsal.compare(state)
                return first
            finally:
                torch.default_generator.set_state(random)

    def _entries(self, parameter: torch.Tensor) -> dict[str, Any]:
        return dict(self.optimizer.state.get(parameter, {}))

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
        """Fill in missing entries of the state with the first values of a step of now."""
        if not self._begins:
            raise FailedPrecondition(
                f"{self._label}: state[{name!r}] is gone, and step() does not begin it as a graph can repeat: load a "
                "state_dict that has it, or make the optimizer anew and record its step again"
            )
        found = self._rehearsed([{} for _ in self._places()], compare=False)
        begun = {place: first for (place, _), first in zip(self._places(), found, strict=True)}
        for place, entry in self._kept:
            if entry not in self.optimizer.state.get(place, {}):
                self.optimizer.state[place][entry] = begun[place][entry].tensor

    # -- the step -----------------------------------------------------------------------------------------------------

    def _record(self, recorder: Recorder, pairs: Sequence[Pair], rate: Rate) -> list[Tensor]:
        for _, target in pairs:
            if target.spec.dtype in (torch.float16, torch.bfloat16):
                raise Unsupported(
                    f"{self._label}.step(): {target.name} is {target.spec.dtype}, which would round the learning "
                    f"rate: keep the Parameter in float32; else {INSTEAD}{recorder.tape.at()}"
                )
            if recorder.autograd.present(target) is not None:
                raise Unsupported(
                    f"{self._label}.step(): a branch decides whether {target.name} has a .grad, and the step of a "
                    "class of your own is one for all Parameters: call step() inside of the branch"
                    f"{recorder.tape.at()}"
                )
        self._targets, self._reads = [target for _, target in pairs], []
        values = Optimizer._record(self, recorder, pairs, rate)
        recorder.python.updates(self.optimizer, [value.value.node for value in values])
        return [*values, *self._reads]  # a step that uses no learning rate holds to its settings, too

    def update_all(
        self, ws: Sequence[torch.Tensor], grads: Sequence[Any], slots: Sequence[Mapping[str, torch.Tensor]], lr: Rate
    ) -> list[tuple[torch.Tensor, Mapping[str, torch.Tensor]]]:
        recorder = current.recording()
        assert isinstance(recorder, Recorder)
        stands: dict[torch.Tensor, torch.Tensor] = {}
        state: dict[torch.Tensor, Any] = {}
        places = {known(parameter): parameter for parameter, _ in self._places()}
        with torch.no_grad():
            for target, w, grad, kept in zip(self._targets, ws, grads, slots, strict=True):
                stands[places[target]] = mine = w.clone()
                recorder.autograd.set_grad(mine, grad)
                counts = self._counts[places[target]]
                given = {name: as_number(x.clone()) if name in counts else x.clone() for name, x in kept.items()}
                state[mine] = made({**self._entries(places[target]), **given})
            groups = [
                {**group, "lr": self._rate(recorder, number), "params": [stands.get(p, p) for p in group["params"]]}
                for number, group in enumerate(self.optimizer.param_groups)
            ]
            with sealed(recorder, self._refuse), _Numbers():
                idle = object.__new__(type(self.optimizer))
                idle.__dict__.update(vars(self.optimizer))
                self._call(idle, groups, state, autograph)
        found: list[tuple[torch.Tensor, Mapping[str, torch.Tensor]]] = []
        for mine, kept in zip(stands.values(), slots, strict=True):
            left = state[mine]
            more = [name for name, x in left.items() if name not in kept and isinstance(x, torch.Tensor)]
            if more or kept.keys() - left.keys():
                raise InvalidArgument(
                    f"{self._label}.step() makes or drops state[{(more or sorted(kept.keys() - left.keys()))[0]!r}] in "
                    f"a later step: begin it in the first{recorder.tape.at()}"
                )
            found.append((mine, {name: torch.as_tensor(left[name]).to(kept[name].dtype) for name in kept}))
        return found

    def _call(
        self, idle: Any, groups: list[dict[str, Any]], state: Mapping[torch.Tensor, Any],
        form: Callable[..., Callable[..., None]] = lambda step: step,
    ) -> Mapping[torch.Tensor, Any]:  # fmt: skip
        """The state after the user's ``step`` on a copy of the optimizer; Unsupported if other attributes change."""
        own = {name: value for name, value in vars(idle).items() if name not in ("param_groups", "state")}
        settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        entries = made(defaultdict(dict, state))
        idle.__dict__.update(own, param_groups=groups, state=entries)
        token = _within.set(True)
        try:
            form(own_step(type(idle)))(idle)
        finally:
            _within.reset(token)
        for group, before in zip(groups, settings, strict=True):
            changed = [name for name in group if name != "params" and group[name] is not before.get(name)]
            if changed:
                self._refuse_kept(f"param_groups[...][{changed[0]!r}]")
        now = {name: value for name, value in vars(idle).items() if name not in ("param_groups", "state")}
        if changed := [name for name in now if name not in own or now[name] is not own[name]]:
            self._refuse_kept(f"its attribute {changed[0]}")
        if len(idle.state) != len(state):
            self._refuse_kept("self.state of what is no Parameter with a gradient")
        return idle.state

    def _refuse_kept(self, what: str) -> None:
        raise Unsupported(refused_change(self._label, what))

    def _refuse(self, how: str) -> None:
        raise Unsupported(
            f"{self._label}.step() takes a value as a Python number by {how}, which would be a constant of the graph: "
            f"keep it a tensor (x ** 0.5 in place of math.sqrt(x)), or {INSTEAD}"
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
        mine = {f"self.{name}": value for name, value in vars(self.optimizer).items() if name not in _NO_SETTINGS}
        group = {name: value for name, value in self.optimizer.param_groups[number].items() if name not in _NO_SETTINGS}
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


class _Numbers(TorchFunctionMode):
    """Recorded numbers in the place of Python's: they take the dtype of a tensor beside them, and may be a scale."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, args = dict(kwargs or {}), list(args)
        name = getattr(func, "__name__", "")
        if args and is_number(args[0]):  # `+=` gives a name another number, and leaves the number of other names
            func = _AUGMENTED.get(name, func)
        name = name.rstrip("_")
        scale = _SCALES.get(name)
        if scale is not None and isinstance(kwargs.get(scale), Tensor):  # torch takes a plain number only
            args[1] = _scaled(args[1], kwargs.pop(scale))
        beside = next((x for x in args if isinstance(x, torch.Tensor) and not is_number(x)), None)
        if beside is None:
            found = func(*args, **kwargs)
            return as_number(found) if any(map(is_number, args)) and isinstance(found, torch.Tensor) else found
        dtype = beside.dtype if beside.dtype.is_floating_point else torch.get_default_dtype()
        return func(*(x.to(dtype) if is_number(x) else x for x in args), **kwargs)


def _scaled(xs: Any, factor: torch.Tensor) -> Any:
    """A tensor times a number, or each of a list of them."""
    return [x * factor for x in xs] if isinstance(xs, (list, tuple)) else xs * factor


_AUGMENTED = {
    "add_": operator.add, "sub_": operator.sub, "mul_": operator.mul, "div_": operator.truediv,
    "floor_divide_": operator.floordiv, "remainder_": operator.mod, "pow_": operator.pow,
}  # fmt: skip
_SCALES = {
    "add": "alpha", "sub": "alpha", "addcmul": "value", "addcdiv": "value",
    "_foreach_add": "alpha", "_foreach_sub": "alpha",
}  # fmt: skip
