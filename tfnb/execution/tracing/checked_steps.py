"""Steps that are checked: one that would give, or write, NaN or infinite numbers raises, and nothing is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tfnb.errors import NonFinite
from tfnb.execution.commit import Pending
from tfnb.execution.lowering.program import Program
from tfnb.execution.tracing.health import is_finite
from tfnb.execution.tracing.live_memory import tensors
from tfnb.execution.tracing.origins import not_finite
from tfnb.execution.tracing.tracer import Tracer
from tfnb.execution.tracing.value_health import ValueHealth
from tfnb.graph import lazy_memory


class CheckedTracer(Tracer):
    """A step that raises NonFinite for NaN or infinite results or writes; nothing is written then.

    Its code is that of any run; only a step that failed runs again with probes. What the updates of optimizers wrote is
    looked at when it is written, and taken back from copies.
    """

    found: ValueHealth | None = None  # of the step that failed

    def forward(self, *args: object) -> tuple[Any, ...]:
        """Run the generated code, and check its results."""
        outs = self.program.forward(*args)
        if not _all_finite(outs):
            self.found = found = ValueHealth(self.program)
            found.forward(*args)
            raise not_finite(found.results, self.program.whole)
        return outs

    def commit(self, pending: Pending) -> None:
        """Write everything, or nothing."""
        storages = [variable.storage for variable in self.program.writes]
        before = [lazy_memory.clone(storage) for storage in storages]
        self.program.commit(pending)
        try:
            ensure_finite(self.program, storages)
        except NonFinite:
            for storage, copy in zip(storages, before, strict=True):
                lazy_memory.assign(storage, copy)
            raise


def try_update(program: Program, feeds: Sequence[torch.Tensor], storages: Sequence[torch.Tensor], run: int) -> None:
    """Raise NonFinite if an update would write NaN or infinite numbers; tried on copies of ``storages``."""
    pairs = zip(program.variables, storages, strict=True)
    copies = [lazy_memory.clone(storage) if variable in program.writes else storage for variable, storage in pairs]
    program.commit(program.compute(feeds, copies, run)[1])
    of = dict(zip(program.variables, copies, strict=True))
    ensure_finite(program, [of[variable] for variable in program.writes])


def ensure_finite(program: Program, written: Sequence[torch.Tensor]) -> None:
    """Raise NonFinite unless the new values of the Variables in ``program.writes`` are finite."""
    bad = [v.name for v, s in zip(program.writes, written, strict=True) if not _all_finite([s])]
    if bad:
        raise NonFinite(
            f"the update of {', '.join(bad)} made NaN or infinite numbers of finite gradients; nothing was "
            "written. Take a smaller learning rate, or limit the gradients",
            node=bad[0],
        )


def _all_finite(values: Iterable[Any]) -> bool:
    return all(is_finite(tensor) for tensor in tensors(list(values)) if _has_numbers(tensor))


def _has_numbers(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and (tensor.is_floating_point() or tensor.is_complex())
