"""The step of a torch optimizer within the recorded step of a class that holds it, such as Lookahead."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tfnb.errors import Unsupported
from tfnb.recording import Recorder
from tfnb.train.from_torch import FromTorch, at_line
from tfnb.train.rehearsal import inner_of
from tfnb.train.stand_ins import exchanged

Kept = Mapping[str, torch.Tensor]  # the values of the slots of a Parameter


class InnerSteps:
    """The steps of inner optimizers within a recorded step: by their rules, on the stand-ins of Parameters.

    slots: the values of their slots, for each target of the step.
    """

    def __init__(
        self, recorder: Recorder, outer: torch.optim.Optimizer, idle: Any, groups: list[dict[str, Any]],
        stands: Mapping[torch.Tensor, torch.Tensor], slots: Sequence[Kept],
    ) -> None:  # fmt: skip
        self.recorder, self.stands, self.names = recorder, stands, inner_of(outer)
        self.slots = [{name: x for name, x in kept.items() if name.partition(".")[0] in self.names} for kept in slots]
        self.standing: dict[str, torch.optim.Optimizer] = {}
        for name, inner in self.names.items():
            self.standing[name] = mine = object.__new__(type(inner))
            shared = inner.param_groups is outer.param_groups
            mine.__dict__.update(
                vars(inner), param_groups=groups if shared else standing(inner.param_groups, stands),
                state=defaultdict(dict),
            )  # fmt: skip
            idle.__dict__[name] = mine

    def __call__(self, optimizer: torch.optim.Optimizer, closure: Any) -> None:
        name = next((name for name, mine in self.standing.items() if mine is optimizer), None)
        if name is None or closure is not None:
            raise Unsupported(
                f"{type(optimizer).__name__}.step() is called within the step() of another optimizer: keep it as an "
                "attribute of that one, and call it without a closure; or call both in the cell, one behind the other"
                f"{at_line()}"
            )
        twin = FromTorch.of(self.names[name])
        for place, number in twin._places():
            at = next((i for i, parameter in enumerate(self.stands) if parameter is place), None)
            if at is None or (grad := self.recorder.autograd.grad(self.stands[place])) is None:
                continue
            kept, rate = self.slots[at], self.recorder.read(twin._hyperparameters(number).variable)
            rule, stem = twin._group_rule(number), f"{name}."
            given = {key.removeprefix(stem): x for key, x in kept.items() if key.startswith(stem)}
            new, after = rule.update(self.stands[place], grad, given, rate)
            self.stands[place].copy_(new)
            kept.update({f"{stem}{key}": x for key, x in after.items()})


def standing(groups: Sequence[Mapping[str, Any]], stands: Mapping[torch.Tensor, torch.Tensor]) -> list[dict[str, Any]]:
    """Param groups of the stand-ins."""
    return [{name: exchanged(value, stands) for name, value in group.items()} for group in groups]
