"""Ops without a form in a graph: refused with the line and an alternative."""

from __future__ import annotations

from typing import Any

import torch

from tfnb.errors import Unsupported
from tfnb.recording.marks.notes import NESTED
from tfnb.recording.overrides.override_table import Stage, override
from tfnb.recording.values.recording import Recording

aten = torch.ops.aten

_SEQUENCE = ("draw", "ff_", "initialize_state_", "scramble_")


def _refused(why: str) -> Any:
    def refuse(rec: Recording, *args: object, **options: object) -> Any:
        raise Unsupported(f"{why}{rec.tape.at()}")

    return refuse


# what forward mode calls by itself; in the transforms of torch.func torch does not come here
override(Stage.OP, aten._fw_primal.default)(
    _refused("torch.func.linearize and torch.autograd.forward_ad are not recorded: use torch.func.jvp, or tfnb.jvp")
)
override(Stage.OP, aten._nested_tensor_from_tensor_list.default)(_refused(NESTED))
override(Stage.OP, *(getattr(aten, f"_sobol_engine_{name}").default for name in _SEQUENCE))(
    _refused(
        "torch.quasirandom.SobolEngine draws from its own sequence, and is not recorded: draw its points before "
        "the recording, and feed them; what a package draws at its first call and keeps is there after one call "
        "before it"
    )
)
