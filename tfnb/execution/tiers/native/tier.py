"""The native tier: asked by the chooser, it lets a step be compiled in another process and loads the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tfnb.errors import Unimplemented
from tfnb.execution.compiling.compiled_packages import PackageFolder, cached, compiled
from tfnb.execution.compiling.compiler_process import NOBODY, OverBudget
from tfnb.execution.lowering.program import Program, written
from tfnb.execution.tiers.interface import Abandoned, Forward, Request
from tfnb.execution.tiers.native.call import Package
from tfnb.execution.tiers.native.direct import Direct
from tfnb.execution.tiers.native.exportable import Given, Parts, split
from tfnb.execution.tiers.native.manifest import About, about
from tfnb.execution.tiers.native.request import NativeRequest
from tfnb.execution.tiers.native.step_arguments import save_arguments

ADVICE = "a loop of the graph (tfnb.fold, or for x in a tensor, in a cell) compiles its body once"


class Native:
    """The tier: a whole step as one call. varies: for feeds of any size from 2 on, else for those of the request."""

    name = "compiled"

    def __init__(self, *, varies: bool = False) -> None:
        self.varies = varies

    def made(self, request: Request) -> Forward | str:
        """The code for operands that lie as these do."""
        program = request.program.undonated()
        parts = split(program)
        if isinstance(parts, str):
            return parts
        wanted = NativeRequest.of(program, request.args, varies=self.varies)

        def write(folder: Path) -> None:
            wanted.save(folder)
            save_arguments(request.args, folder)

        try:
            package = compiled(wanted.key(), write, BUILD, request.owner, urgent=request.urgent)
        except OverBudget as error:
            raise Abandoned(f"{error} to compile: {ADVICE}") from None
        if package == NOBODY:
            raise Abandoned(NOBODY)
        return package if isinstance(package, str) else _opened(package, program, parts)

    def recalled(self, program: Program, shapes: Sequence[torch.Size]) -> NativeStep | VaryingStep | None:
        """The code for feeds of these sizes, one element behind the other, if it lies in the cache."""
        program = program.undonated()
        parts = split(program)
        if isinstance(parts, str):
            return None
        by_id = program.whole.contents.by_id
        specs = [by_id[value.node].outputs[value.index] for value in program.feeds]
        feeds = [torch.empty(shape, dtype=spec.dtype) for shape, spec in zip(shapes, specs, strict=True)]
        storages = [variable.storage for variable in program.variables]
        package = cached(NativeRequest.of(program, (*feeds, *storages, 0), varies=self.varies).key())
        return None if package is None else _opened(package, program, parts)


def _opened(package: PackageFolder, program: Program, parts: Parts) -> NativeStep | VaryingStep:
    try:
        step = loaded(package.folder, program, parts)
    except Exception:
        package.drop()
        raise
    step.package = package
    return step


def loaded(folder: Path, program: Program, parts: Parts | None = None) -> NativeStep | VaryingStep:
    """The step of a package that was built for this program. parts: its `split`, where that is known."""
    found, known = about(folder), parts or split(program)
    if isinstance(known, str):
        raise Unimplemented(known)
    first, rest, why = known

    def step(about: About) -> NativeStep:
        operands = about.operands[: len(program.feeds) + len(program.variables)]
        package = Package(folder, about, Given.of(first, operands))
        return NativeStep(package, program, None if rest is None else written(rest))

    whole = VaryingStep(found, len(program.feeds), step) if found.varying else step(found)
    whole.lacks = why
    return whole


MOST_SHAPES = 16  # of one package that are ready to be called
BUILD = "tfnb.execution.tiers.native.package:build_in"


class NativeStep:
    """Computes a step as ``program.forward`` does.

    rest: generated code that takes what the package gives, where that is not all; lacks: why. A step that ``writes``
    takes feeds, storages and the run's number as three, gives the fetches and has written the rest. Raises Unfit or
    OperandRefused, and then wrote nothing.
    """

    def __init__(self, package: Package, program: Program, rest: Forward | None) -> None:
        self.package: PackageFolder | None = None
        self.lacks = ""
        self._rest, self._package, self._places = rest, package, package.about.fetched
        self._feeds, self._n_fetches = len(program.feeds), program.n_fetches
        self._variables, self._written = program.variables, program.writes
        self.writes = bool(package.about.written)
        self._made = all(place is None or place >= 0 for place in self._places)
        self._direct: Direct | None = None

    def direct(self) -> Callable[..., list[Any] | None] | None:
        """`Direct.call` of the whole step, after a call of it; None where there is none."""
        if not self._made or self._rest is not None or (self._written and not self.writes):
            return None
        places = self._places[: self._n_fetches]
        self._direct = self._package.direct(self._variables, self._written, places, self._direct)
        return None if self._direct is None else self._direct.call

    def __call__(self, *args: Any) -> Sequence[Any]:
        feeds, storages, run = args if self.writes else (args[: self._feeds], args[self._feeds : -1], args[-1])
        found = self._package(feeds, storages, run)
        if self._made and self._rest is None:
            return [None if place is None else found[place] for place in self._places]
        given = [*feeds, *storages, run]
        outs = [None if at is None else found[at] if at >= 0 else given[~at] for at in self._places]
        return outs if self._rest is None else self._rest(*outs)


class VaryingStep:
    """The same for feeds of many sizes: `NativeStep` of one package, made when a size is first met."""

    def __init__(self, about: About, feeds: int, made: Callable[[About], NativeStep]) -> None:
        self.package: PackageFolder | None = None
        self.lacks = ""
        self.writes = bool(about.written)
        self._about, self._feeds, self._made = about, feeds, made
        self._steps: dict[tuple[torch.Size, ...], NativeStep] = {}

    def __call__(self, *args: Any) -> Sequence[Any]:
        feeds = args[0] if self.writes else args[: self._feeds]
        shapes = tuple([feed.shape for feed in feeds])
        step = self._steps.get(shapes)
        if step is None:
            step = self._made(self._about.at(shapes))
            self._steps = dict([*self._steps.items()][1 - MOST_SHAPES :]) | {shapes: step}
        return step(*args)
