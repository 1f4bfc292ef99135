"""The twin of a torch optimizer by its class, and the recorded ``step`` of classes of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tfnb.errors import InvalidType, Unsupported
from tfnb.graph import current
from tfnb.train.from_class import FromClass, has_own_step
from tfnb.train.from_torch import CLASSES, TWIN, FromTorch, at_line
from tfnb.train.update_rules import OPTIMIZERS


def from_torch(optimizer: torch.optim.Optimizer) -> FromTorch:
    """The graph's twin of a torch optimizer: every param group with its own hyperparameters, and the same state.

    Of the classes of torch.optim, but not LBFGS, and of classes with a ``step`` of their own; one optimizer has one
    twin. State and the numbers of groups (learning rate, betas, eps, momentum, weight decay ...) are the torch
    optimizer's, looked up at each run; what changes the formula (``nesterov``, ``amsgrad``, a momentum or weight decay
    from or to 0) is that of the recording: another one raises FailedPrecondition in a run. While a cluster is connected
    its servers hold the state: ``state_dict()`` brings it home, and so does ``fit`` at its end. A number that changes
    there counts from the next ``run`` or ``fit`` on.

    A ``step`` of a class of your own is tensor code over ``param_groups`` and ``self.state[p]``. What lives on to the
    next step are tensors and numbers there, in the groups and in attributes, and a torch optimizer among those.
    The learning rate is read at each run; a run with other settings than the recording had raises FailedPrecondition.

    Raises InvalidType for anything else than an optimizer, Unsupported for another class, for ``differentiable=True``,
    and for a ``step`` that keeps state elsewhere.

    >>> layer = torch.nn.Linear(2, 1)
    >>> from_torch(torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9))
    from_torch(SGD: SGD(lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False))
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidType(f"an optimizer is a torch.optim.Optimizer, not {type(optimizer).__name__}{at_line()}")
    if type(optimizer) not in CLASSES and not has_own_step(type(optimizer)):
        raise Unsupported(f"{_without_twin(type(optimizer))}{at_line()}")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise Unsupported(
            f"{type(optimizer).__name__}(differentiable=True) has no twin in the graph: apply the update in torch calls"
            f"{at_line()}"
        )
    found: FromTorch = (FromClass if has_own_step(type(optimizer)) else FromTorch).of(optimizer)
    return found


def _before_eager_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Hook of every eager step: entries of the state for runs alone are dropped first."""
    if current.recording() is None and (twin := optimizer.__dict__.get(TWIN)) is not None:
        twin.drop_unbegun()


register_optimizer_step_pre_hook(_before_eager_step)


def _without_twin(kind: type) -> str:
    name = f"{kind.__module__}.{kind.__qualname__} has no twin in the graph"
    if kind is torch.optim.LBFGS:
        return (
            f"{name}: it calls its closure as often as the values tell, each time at other parameters; step it between "
            "runs, with a closure that runs the loss and its gradients"
        )
    names = ", ".join(OPTIMIZERS)
    return (
        f"{name}: only {names} of torch.optim themselves, not their subclasses, have one; write its rule as a "
        "tfnb.train.Optimizer"
    )


def record_own_steps(record: Callable[[torch.optim.Optimizer, Any], Any]) -> None:
    """From here on, ``step`` of the optimizers' classes outside of torch calls ``record`` while a recording is open.

    torch's hooks cannot say what a ``step`` returns. So the function within torch's wrapper of each class that there is
    becomes another one, and stays it: schedulers keep that wrapper in the optimizer. Outside of recordings it is the
    class's own.
    """
    for kind in _subclasses(torch.optim.Optimizer):
        step = vars(kind).get("step")
        if step is None or not has_own_step(kind) or getattr(step, "is_recorded", False):
            continue
        if getattr(step, "hooked", False):
            cell = next(cell for cell in step.__closure__ if cell.cell_contents is step.__wrapped__)
            cell.cell_contents = _recorded(step.__wrapped__, record)
        else:  # torch wraps it with the first optimizer of the class
            kind.step = step = _recorded(step, record)  # type: ignore[attr-defined]
        step.is_recorded = True


def _recorded(original: Any, record: Callable[[torch.optim.Optimizer, Any], Any]) -> Any:
    @wraps(original)
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if current.recording() is None:
            return original(self, *args, **kwargs)
        given = [value for value in (*args, *kwargs.values()) if value is not None]
        if len(given) > 1 or not all(map(callable, given)):
            raise Unsupported(
                f"{type(self).__name__}.step() of a class of your own is recorded with a closure or without arguments: "
                f"keep others in the groups{at_line()}"
            )
        return record(self, given[0] if given else None)

    return step


def _subclasses(kind: type) -> Iterator[type]:
    kinds: list[type] = kind.__subclasses__()
    for each in kinds:
        yield each
        yield from _subclasses(each)
