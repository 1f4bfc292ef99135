"""The twin of a torch optimizer: the same rules, hyperparameters and state, as nodes of a graph.

The state is torch's own: a slot is the tensor in ``optimizer.state``, looked up at every run, so `state_dict` shows
what the graph did, `load_state_dict` counts, and an eager `step` may follow. Recording alone adds nothing to it. The
numbers of a group (learning rate, betas, momentum, weight decay ...) are read at every run, too, so schedulers work
between runs; what changes the formula is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.control_flow import cond
from tfnb.errors import FailedPrecondition, Unsupported
from tfnb.gradients import IndexedSlices
from tfnb.gradients.rules.index import without_padding
from tfnb.graph import Variable, current
from tfnb.graph.lazy_memory import beside
from tfnb.graph.ops import GRADIENT, PRESENT
from tfnb.kernels.optim import NUMBERS, SWITCHES
from tfnb.recording import Operation, Recorder, Tensor, variable
from tfnb.recording.values.variables import known
from tfnb.train.optimizer import Optimizer, Pair, Rate, buffer_writes
from tfnb.train.update_rules import OF_RATE, OPTIMIZERS, UpdateRule, parts_of, settings_of

TWIN = "_tfnb_twin"  # attribute of the torch optimizer: state dicts, copies and pickles leave it out
CLASSES = {getattr(torch.optim, name) for name in OPTIMIZERS}


class _GroupMember(NamedTuple):
    """A parameter, and the number of its group."""

    parameter: torch.Tensor
    group: int


class Hyperparameters:
    """The hyperparameters of a param group, for the steps that are recorded with one formula.

    variable: a float64 vector of the learning rate and the op's `NUMBERS`, as the group says them at each run.
    formula: the other settings, and whether a number is 0 where that decides.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        self.optimizer, self.number, self.kind = optimizer, number, type(optimizer).__name__
        self.settings = settings_of(self.kind, self._group)
        self.formula = _formula(self.kind, self.settings)
        self._seen: list[Any] = []
        self._fits: list[Any] = []
        self._vector = _plain([0.0])

    @cached_property
    def variable(self) -> Variable:
        label = f"{self.kind}/hyperparameters{f'_{self.number}' if self.number else ''}"
        return Variable.looked_up(self._find, name=label, leads=self, ready=self._hold_to)

    @property
    def _group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[self.number]

    def _now(self) -> list[Any]:
        """The numbers and other settings, pairs taken apart; before each run, hence the plain loop."""
        group, found = self._group, [self._group["lr"]]
        for name in self.settings:
            value = group[name]
            if isinstance(value, (tuple, list)):
                found += value
            else:
                found.append(value)
        return [float(value) if isinstance(value, torch.Tensor) else value for value in found]

    def _find(self) -> torch.Tensor:
        if current.recording() is None:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn where no step was
        now = self._now()
        if now != self._seen:
            parts = parts_of(settings_of(self.kind, self._group))
            self._vector = _plain([self._group["lr"], *(parts[name] for name in NUMBERS[OPTIMIZERS[self.kind].op])])
            self._seen = now
        return self._vector

    def _hold_to(self) -> None:
        """Raise FailedPrecondition in a run whose group asks for another formula than was recorded."""
        if current.recording() is not None or (now := self._now()) == self._fits:
            return
        settings = settings_of(self.kind, self._group)
        formula = _formula(self.kind, settings)
        if formula != self.formula:
            before, after = parts_of(self.settings), parts_of(settings)
            differ = [name for name in formula if formula[name] != self.formula[name]]
            changed = ", ".join(f"{name} was {before[name]}, and is {after[name]} now" for name in differ)
            cycled = (
                ". OneCycleLR and CyclicLR set the momentum when they are made: make them above the cell that records "
                "the step, or with cycle_momentum=False"
            )
            raise FailedPrecondition(
                f"{self.kind}: {changed} (group {self.number}): a recorded step takes its numbers at each run, but has "
                f"the formula of its recording. Record the step again{cycled if 'momentum' in differ else ''}"
            )
        self._fits = now


def _formula(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are fixed in a recorded step, by the names of the op; other settings are read at each run."""
    numbers = NUMBERS[OPTIMIZERS[kind].op]
    decisive = SWITCHES | {"eps"}  # rows without gradient stay as they are where nothing is divided by 0
    return {
        name: bool(value == 0) if name in numbers else value
        for name, value in parts_of(settings).items()
        if name not in numbers or name in decisive
    }


class FromTorch(Optimizer):
    """The optimizer made by `from_torch`: updates the parameters of the torch optimizer only, each by its group."""

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Any:
        """The one twin of an optimizer."""
        if TWIN not in optimizer.__dict__:
            setattr(optimizer, TWIN, cls(optimizer))
        return getattr(optimizer, TWIN)

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(0.0)  # each group has its own
        self.optimizer = optimizer
        self._groups: dict[int, list[Hyperparameters]] = {}  # by number, one for each formula that was recorded
        self._first: dict[torch.Tensor, dict[str, torch.Tensor]] = {}  # by parameter: what state starts with
        self._kept: dict[tuple[torch.Tensor, str], Variable] = {}
        self._flag = "step" if type(optimizer) is torch.optim.SGD else ""  # slot that torch has not: `_is_begun`
        hooks = optimizer.__dict__.setdefault("_optimizer_state_dict_post_hooks", OrderedDict())
        hooks[TWIN] = _without_unbegun  # with no handle of torch's, of which a branch would note that it makes one

    @property
    def _label(self) -> str:
        return type(self.optimizer).__name__

    def step(self, closure: Callable[[], Any] | None = None) -> Operation:
        """Record one step along the gradients that ``backward`` left in this recording; takes no step.

        closure: called first, as torch does: it clears and computes the gradients. The step also runs the writes of
        buffers by the modules on the way (running statistics). Raises FailedPrecondition outside a recording or without
        a gradient.
        """
        recorder = current.recording()
        if not isinstance(recorder, Recorder):
            raise FailedPrecondition(f"from_torch({self._label}).step() works inside a recording, after backward()")
        if closure is not None:
            closure()
        pairs = []
        for parameter, _ in self._places():
            grad = recorder.autograd.grad(parameter)
            if isinstance(parameter, Tensor) and grad is not None:
                raise Unsupported(
                    f"{self._label}.step(): {parameter.name} was recorded, it is no Parameter that lives on from "
                    f"run to run: make it a torch.nn.Parameter{recorder.tape.at()}"
                )
            if grad is not None:
                pairs.append((grad, variable(parameter)))
        if not pairs:
            raise FailedPrecondition(
                f"{self._label}.step(): no parameter has a .grad in this recording; call backward() in the same cell "
                f"above it{recorder.tape.at()}"
            )
        recorded = [grad.value for grad, _ in pairs if isinstance(grad, Tensor)]
        return self._applied(pairs, buffer_writes(recorder, recorded))

    def slots(self, target: object) -> dict[str, Variable]:
        owner = variable(target)
        parameter, rule = self._rule(owner)
        stem = f"{owner.name}/{self._label}"
        return {name: self._slot(rule, parameter, name, stem) for name in rule.names(parameter)}

    # -- the torch optimizer's groups and state -------------------------------------------------------------------

    def _places(self) -> list[_GroupMember]:
        return [_GroupMember(p, i) for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]]

    def _trained(self, recorder: Recorder) -> list[Variable]:
        mine = {known(parameter) for parameter, _ in self._places()}
        return [v for v in super()._trained(recorder) if v in mine]

    def _rule(self, owner: Variable) -> tuple[torch.Tensor, UpdateRule]:
        """The parameter of a variable, and the rule of its group with the hyperparameters of now."""
        for parameter, number in self._places():
            if known(parameter) is owner:
                return parameter, self._group_rule(number)
        raise FailedPrecondition(f"{owner.name} is no parameter of this {self._label}: add_param_group it{at_line()}")

    def _group_rule(self, number: int) -> UpdateRule:
        group = self.optimizer.param_groups[number]
        return UpdateRule(self._label, group["lr"], **settings_of(self._label, group))

    def _hyperparameters(self, number: int) -> Hyperparameters:
        """The hyperparameters of a group, for steps recorded with its current formula."""
        made = Hyperparameters(self.optimizer, number)
        known = self._groups.setdefault(number, [])
        if made.formula not in [one.formula for one in known]:
            known.append(made)
        return next(one for one in known if one.formula == made.formula)

    def _slot(self, rule: UpdateRule, parameter: torch.Tensor, name: str, stem: str) -> Variable:
        key = parameter, name
        if key not in self._kept:
            self._begin(rule, parameter, set(rule.names(parameter)) - self._first.get(parameter, {}).keys())
            find = partial(self._is_begun if name == self._flag else self._state, parameter, name)
            with _disable_current_modes():
                self._kept[key] = Variable.looked_up(find, name=f"{stem}/{name}")
        return self._kept[key]

    def _begin(self, rule: UpdateRule, parameter: torch.Tensor, names: Collection[str]) -> None:
        """Make the initial slot values, some of them from the current learning rate."""
        with _disable_current_modes(), torch.no_grad():
            value = parameter.detach()
            made = rule.initial(value)
        self._first.setdefault(parameter, {}).update({name: beside(value, made[name]) for name in names})

    def _state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """A slot in torch's state. A missing slot is created when needed outside of a recording."""
        state = self.optimizer.state.get(parameter, {})
        if state.get(name) is not None:
            if name in OF_RATE and current.recording() is None and not state["step"]:
                self._rewind(parameter, state[name])
            return self._as_tensor(state, name)
        if current.recording() is None:  # all of it: torch takes a state with anything in it for a whole one
            rule = self._group_rule(next(i for p, i in self._places() if p is parameter))
            missing = {n for n in rule.names(parameter) if state.get(n) is None}
            if rule.kind == "SGD" and "step" in missing:  # which torch has not, and which goes with the buffer
                missing.discard("step")
                self._first[parameter]["step"].zero_()
            self._begin(rule, parameter, missing)
            first = {n: self._first[parameter][n] for n in missing}
            self.optimizer.state[parameter].update(first)
        return self._first[parameter][name]

    def _rewind(self, parameter: torch.Tensor, slot: torch.Tensor) -> None:
        """Let a slot begin with the rate of now: torch makes it at the first step that has a gradient."""
        number = next(i for p, i in self._places() if p is parameter)
        with torch.no_grad():
            rate = float(self.optimizer.param_groups[number]["lr"])
            slot.fill_(complex(rate, rate) if slot.is_complex() else rate)

    def _as_tensor(self, state: dict[str, Any], name: str) -> torch.Tensor:
        """An entry of a state as a tensor; the count of SparseAdam is a number until a graph needs it."""
        if not isinstance(state[name], torch.Tensor):
            number = _plain(state[name])
            if current.recording() is not None:
                return number
            state[name] = number
        return state[name]

    def _is_begun(self, parameter: torch.Tensor, flag: str) -> torch.Tensor:
        """Whether the first step, where later steps differ, was taken: torch has no state before the first step.

        The flag is the runs' own as long as the state holds what was put there for them.
        """
        if current.recording() is None:
            self._first[parameter][flag].fill_(self._has_begun(parameter))
        return self._first[parameter][flag]

    def _has_begun(self, parameter: torch.Tensor) -> bool:
        """Whether a Parameter has taken its first step, in a run or in plain torch."""
        first, state = self._first[parameter], self.optimizer.state.get(parameter, {})
        entries = [(state.get(name), first[name]) for name in self._begun_by_step(parameter)]
        if any(now is not mine for now, mine in entries):
            return all(now is not None for now, _ in entries)
        return bool(first[self._flag])

    def _begun_by_step(self, parameter: torch.Tensor) -> set[str]:
        """The entries of the state that its first step makes."""
        return self._first[parameter].keys() - {self._flag}

    def unbegun(self) -> list[tuple[torch.Tensor, str]]:
        """Entries of the state for runs, before any run has taken the first step."""
        return [
            (parameter, name)
            for parameter, first in self._first.items() if self._flag in first and not first[self._flag]
            for name in self._begun_by_step(parameter)
            if self.optimizer.state.get(parameter, {}).get(name) is first[name]
        ]  # fmt: skip

    def drop_unbegun(self) -> None:
        """Before an eager step: torch takes a state with any entry for a whole state."""
        for parameter, name in self.unbegun():
            if self._kept[parameter, self._flag].home is None:
                del self.optimizer.state[parameter][name]

    def _record(self, recorder: Recorder, pairs: Sequence[Pair], rate: Rate) -> list[Tensor]:
        return [value for grad, target in pairs for value in self._record_present(recorder, grad, target)]

    def _record_present(self, recorder: Recorder, grad: object, target: Variable) -> list[Any]:
        """The update of a variable, in runs that have a gradient of it."""
        present = recorder.autograd.present(target)
        if present is None:
            return self._record_one(recorder, grad, target)
        recorder.carried.tell_kept(target)
        with torch.no_grad(), recorder.tagged(GRADIENT | {PRESENT}):
            present = present.clone()

        def taken() -> Operation:
            made = self._record_one(recorder, grad, target)
            return recorder.group(tuple(value.value for value in made))

        with recorder.tagged(frozenset({"update"})):
            step = cond(present, taken, lambda: None)
        recorder.python.updates(self.optimizer, [step.value.node])
        return [step]

    def _record_one(self, recorder: Recorder, grad: object, target: Variable) -> list[Tensor]:
        parameter, rule = self._rule(target)
        number = next(i for p, i in self._places() if p is parameter)
        rule._slots[target] = self.slots(target)
        if isinstance(grad, Tensor) and (rule.still or rule.sparse == "lazy"):
            grad = _by_rows(recorder, grad) or grad
        made = rule._record(recorder, [(grad, target)], recorder.read(self._hyperparameters(number).variable))
        recorder.python.updates(self.optimizer, [value.value.node for value in made])
        return made

    def __repr__(self) -> str:
        rules = ", ".join(repr(self._group_rule(i)) for i in range(len(self.optimizer.param_groups)))
        return f"from_torch({self._label}: {rules})"


def _without_unbegun(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Hook of ``state_dict()``: without the entries that no step has begun."""
    twin = optimizer.__dict__.get(TWIN)
    places = [] if twin is None else [parameter for parameter, _ in twin._places()]
    for parameter, name in [] if twin is None else twin.unbegun():
        at = next(i for i, place in enumerate(places) if place is parameter)
        entries = {key: x for key, x in state_dict["state"].pop(at).items() if key != name}
        if entries:
            state_dict["state"][at] = entries


def _by_rows(recorder: Recorder, grad: Tensor) -> IndexedSlices | None:
    """The entries of a gradient that is exactly the gradient of one table look-up."""
    node = grad.node
    if node.op != "aten.embedding_dense_backward.default" or node.attrs["scale_grad_by_freq"]:
        return None
    dy, rows = map(recorder.tensor, node.inputs)
    with torch.no_grad(), recorder.tagged(GRADIENT, node.forward), recorder.placed(node.device):
        entries = without_padding(dy.flatten(0, rows.dim() - 1), rows.flatten(), node.attrs["padding_idx"])
        values, indices = torch.ops.tfnb.slices(*entries, grad.shape[0])
        return IndexedSlices(values, indices, grad.shape)


def _plain(number: Any) -> torch.Tensor:
    """A number, or a list of them, as a tensor that no open recording sees."""
    with _disable_current_modes():
        return torch.tensor([*map(float, number)] if isinstance(number, list) else float(number), dtype=torch.float64)


def at_line() -> str:
    recording = current.recording()
    return recording.tape.at() if isinstance(recording, Recorder) else ""
