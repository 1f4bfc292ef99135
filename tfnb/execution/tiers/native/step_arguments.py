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
            data = x.detach().resolve_conj().resolve_neg().contiguous().as_strided((x.numel(),), (1,))
            file.write(data.view(torch.uint8).numpy().data)  # one element may have any stride


def load_arguments(folder: Path) -> list[Any]:
    """Load the operands of `save_arguments`, with their strides."""
    operands, run = json.loads((folder / ABOUT).read_text())
    found: list[Any] = []
    with (folder / DATA).open("rb") as file:
        for operand in operands:
            x = Operand(*operand).empty()
            data = torch.empty(x.shape, dtype=x.dtype)
            file.readinto(data.view(-1).view(torch.uint8).numpy().data)
            own = tuple(
                slice(1 if stride == 0 else None) for stride in x.stride()
            )  # once what an expanded axis repeats
            x[own].copy_(data[own])
            found.append(x)
    return [*found, run]
