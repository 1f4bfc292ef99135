"""Moving averages of variables, as user code: Variables beside the trained ones, and a step that renews them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.errors import FailedPrecondition, InvalidArgument
from tfnb.graph import Variable, current
from tfnb.recording import Operation, Recorder, variable


class ExponentialMovingAverage:
    """``average = decay * average + (1 - decay) * variable`` at each step (Polyak and Juditsky 1992).

    num_updates: a count of steps, a number, Variable or recorded scalar; the decay is then at most
    ``(1 + num_updates) / (10 + num_updates)``. An average starts with the value that its variable has when it is made.

    >>> import tfnb
    >>> w, means = tfnb.Variable([4.0], name="w"), ExponentialMovingAverage(0.5)
    >>> with tfnb.record():
    ...     step = means.apply([w])
    >>> _ = w.assign([0.0])
    >>> tfnb.run(step), means.average(w).value()
    (None, tensor([2.]))
    """

    def __init__(self, decay: float, num_updates: Variable | float | None = None) -> None:
        if not isinstance(decay, (int, float)) or not 0 <= decay <= 1:
            raise InvalidArgument(f"ExponentialMovingAverage: decay is a number from 0 to 1, not {decay!r}")
        self.decay, self.num_updates = float(decay), num_updates
        self._averages: WeakKeyDictionary[Variable, Variable] = WeakKeyDictionary()

    def apply(self, variables: Sequence[Any] | None = None) -> Operation:
        """Record one step of the averages of Variables or Parameters; by default the trainable ones read above.

        Recorded below a training step, and fetched with it, it averages the values after that step.
        """
        recorder = current.recording()
        if not isinstance(recorder, Recorder):
            raise FailedPrecondition("ExponentialMovingAverage.apply() works inside a recording: put it into a cell")
        read = dict.fromkeys(node.attrs["variable"] for node in recorder.nodes if node.op == "tfnb.read")
        chosen = [v for v in read if v.trainable] if variables is None else [variable(v) for v in variables]
        if not chosen:
            raise InvalidArgument("ExponentialMovingAverage.apply(): no trainable variable was read above, name some")
        keep, means = self._keep(recorder), [self.average(v) for v in chosen]
        pairs = [(mean, recorder.read(mean), recorder.read(v)) for mean, v in zip(means, chosen, strict=True)]
        steps = [recorder.assign(m, now + keep * (old - now), tags=frozenset({"step"})) for m, old, now in pairs]
        return recorder.group(tuple(step.value for step in steps))

    def average(self, target: torch.Tensor | Variable) -> Variable:
        """The Variable that holds the average of a Variable or Parameter."""
        owner = variable(target)
        if owner not in self._averages:
            with _disable_current_modes(), torch.no_grad():
                name = f"{owner.name}/{type(self).__name__}"
                self._averages[owner] = Variable(owner.storage.detach(), name=name, trainable=False)
        return self._averages[owner]

    def _keep(self, recorder: Recorder) -> Any:
        if self.num_updates is None:
            return self.decay
        count = recorder.read(self.num_updates) if isinstance(self.num_updates, Variable) else self.num_updates
        return torch.clamp((1 + count) / torch.as_tensor(10.0 + count), max=self.decay)
