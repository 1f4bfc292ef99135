"""Code that only makes initial values: constructors of modules and optimizers inside a recording."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tfnb.graph.op_facts import Facts
from tfnb.recording.values.recording import Recording

_CONSTRUCTORS = frozenset({"__init__", "reset_parameters", "_reset_parameters", "initialize_parameters"})
_CONVERTERS = frozenset({"_apply"})  # of a module just made: .double(), .to(...)


def constructing(rec: Recording, own: Facts, args: Any) -> bool:
    """Whether the dispatched call only makes initial values: such a call runs for real, without a node."""
    mine = bool(args) and isinstance(args[0], torch.Tensor) and rec.is_unused(args[0])
    if own.writes and mine and isinstance(args[0], torch.nn.Parameter):
        return args[0].untyped_storage().data_ptr() != 0
    names = _CONSTRUCTORS | _CONVERTERS if mine else _CONSTRUCTORS
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame is not rec.stop:
        code = frame.f_code
        me = frame.f_locals.get(code.co_varnames[0]) if code.co_name in names and code.co_argcount else None
        if isinstance(me, (torch.nn.Module, torch.optim.Optimizer)):
            return True
        frame = frame.f_back
    return False


def fixed(args: object) -> Any:
    """The arguments of such a call: a size that becomes one of a parameter is the sample's from here on."""
    return tree_map_only(torch.SymInt, int, args)
