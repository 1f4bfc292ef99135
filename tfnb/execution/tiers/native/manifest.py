"""The manifest of a package, in a file beside its code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tfnb.execution.tiers.interface import Unfit
from tfnb.execution.tiers.native.request import Axis, Operand, resized

ABOUT = "about.json"
LEAST = 2  # of a size that varies: torch takes 0 and 1 for numbers of their own


@dataclass(frozen=True)
class About:
    """Manifest of a package. operands: all; written: indices of those it writes; flag: its last output.

    fetched: for each output of the program that the call gives (fetches, and of a step that only computes also what is
    committed) its place among the outputs of the package, or ~place among the operands; None for nothing.
    varying: axes of any size from 2 on, of which the operands have an example.
    """

    operands: tuple[Operand, ...]
    written: tuple[int, ...]
    fetched: tuple[int | None, ...]
    flag: bool
    varying: tuple[Axis, ...] = ()

    @property
    def outputs(self) -> int:
        """The number of tensors that a call of the package makes, the flag included."""
        return 1 + max([-1, *(place for place in self.fetched if place is not None)]) + self.flag

    def at(self, shapes: Sequence[Sequence[int]]) -> About:
        """The same for feeds of these shapes only; raises Unfit where they are none of its sizes."""
        sizes: dict[str, int] = {}
        for place, axis, symbol in self.varying:
            if place < len(shapes):
                size = shapes[place][axis] if len(shapes[place]) == len(self.operands[place].shape) else 0
                if size < LEAST or sizes.setdefault(symbol, size) != size:
                    raise Unfit
        return replace(self, operands=resized(self.operands, self.varying, sizes), varying=())

    def save(self, folder: Path) -> None:
        """Write the manifest into a package."""
        (folder / ABOUT).write_text(json.dumps(asdict(self)))


def about(folder: Path) -> About:
    """The manifest of a package."""
    found = json.loads((folder / ABOUT).read_text())
    operands = tuple(
        Operand(dtype, tuple(shape), tuple(stride), device) for dtype, shape, stride, device in found["operands"]
    )
    varying = tuple(Axis(*axis) for axis in found["varying"])
    return About(operands, tuple(found["written"]), tuple(found["fetched"]), found["flag"], varying)
