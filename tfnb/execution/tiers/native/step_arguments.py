"""Tensors in two files: operands with which the compiler's process tries a package, and constants of its code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tfnb.execution.tiers.native.request import Operand

ABOUT, DATA = "arguments.json", "arguments"
CONSTANTS = "constants"  # folder in a package


def save_arguments(args: Sequence[Any], folder: Path) -> None:
    """Write tensors and the run's number into a folder that is there; no tensor that lies densely is copied."""
    *tensors, run = args
    (folder / ABOUT).write_text(json.dumps([[Operand.of(x) for x in tensors], run]))
    with (folder / DATA).open("wb") as file:
        for x in tensors:
            data = x.detach().resolve_conj().resolve_neg().contiguous()
            file.write(data.view(-1).view(torch.uint8).numpy().data)


def load_arguments(folder: Path) -> list[Any]:
    """Load the operands of `save_arguments`, with their strides."""
    operands, run = json.loads((folder / ABOUT).read_text())
    found: list[Any] = []
    with (folder / DATA).open("rb") as file:
        for operand in operands:
            x = Operand(*operand).empty()
            data = torch.empty(x.shape, dtype=x.dtype)
            file.readinto(data.view(-1).view(torch.uint8).numpy().data)
            found.append(data if data.stride() == x.stride() else x.copy_(data))
    return [*found, run]
