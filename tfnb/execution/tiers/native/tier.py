"""The native tier: asked by the chooser, it compiles a step and loads the package."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tfnb.execution.lowering.program import Program
from tfnb.execution.tiers.interface import Forward, Request
from tfnb.execution.tiers.native.call import Package
from tfnb.execution.tiers.native.exportable import Given, obstacle
from tfnb.execution.tiers.native.manifest import about
from tfnb.execution.tiers.native.request import NativeRequest


class Native:
    """The tier: a whole step as one call."""

    name = "compiled"

    def made(self, request: Request) -> Forward | str:
        """The code for operands that lie as these do."""
        program = request.program.undonated()
        why = obstacle(program)
        if why is not None:
            return why
        from tfnb.execution.tiers.native import package  # listed exception: inductor takes seconds to load

        if why := package.obstacle():
            return why
        with tempfile.TemporaryDirectory(prefix="tfnb-") as folder:  # a library that is loaded needs no file
            package.build(NativeRequest.of(program, request.args), Path(folder))
            return loaded(Path(folder), program)


def loaded(folder: Path, program: Program) -> NativeStep:
    """The step of a package that was built for this program."""
    found = about(folder)
    operands = found.operands[: len(program.feeds) + len(program.variables)]
    return NativeStep(Package(folder, found, Given.of(program, operands)), len(program.feeds))


class NativeStep:
    """Computes a step as ``program.forward`` does; where ``writes``, gives the fetches and has written the rest.

    Raises Unfit or OperandRefused, and then wrote nothing.
    """

    def __init__(self, package: Package, feeds: int) -> None:
        self._package, self._feeds, self._places = package, feeds, package.about.fetched
        self.writes = bool(package.about.written)
        self._plain = self._places == tuple(range(len(self._places)))

    def __call__(self, *args: Any) -> Sequence[Any]:
        found = self._package(args[: self._feeds], args[self._feeds : -1], args[-1])
        return found if self._plain else tuple(_at(place, found, args) for place in self._places)


def _at(place: int | None, found: Sequence[torch.Tensor], args: Sequence[Any]) -> torch.Tensor | None:
    return None if place is None else found[place] if place >= 0 else args[~place]  # type: ignore[no-any-return]
