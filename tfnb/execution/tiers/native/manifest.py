"""What a package says of itself, in a file beside its code."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tfnb.execution.tiers.native.request import Operand

ABOUT = "about.json"


@dataclass(frozen=True)
class About:
    """What a package is. operands: all of them; written: places of those that it writes; flag: its last output.

    fetched: for each output of the program that the call gives (fetches, and of a step that only computes also what is
    committed) its place among the outputs of the package, or ~place among the operands; None for nothing.
    """

    operands: tuple[Operand, ...]
    written: tuple[int, ...]
    fetched: tuple[int | None, ...]
    flag: bool

    def save(self, folder: Path) -> None:
        """Write it into a package."""
        (folder / ABOUT).write_text(json.dumps(asdict(self)))


def about(folder: Path) -> About:
    """That of a package."""
    found = json.loads((folder / ABOUT).read_text())
    operands = tuple(
        Operand(dtype, tuple(shape), tuple(stride), device) for dtype, shape, stride, device in found["operands"]
    )
    return About(operands, tuple(found["written"]), tuple(found["fetched"]), found["flag"])
