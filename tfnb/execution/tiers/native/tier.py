"""The native tier: compiles steps in another process and loads the packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tfnb.errors import Unimplemented
from tfnb.execution.compiling.compiled_packages import PackageFolder, cached, compiled, remembered
from tfnb.execution.compiling.compiler_process import NOBODY, OverBudget
from tfnb.execution.lowering.program import Program
from tfnb.execution.tiers.graph_split import cut
from tfnb.execution.tiers.interface import Abandoned, TierRequest
from tfnb.execution.tiers.native.call import Package
from tfnb.execution.tiers.native.direct import Direct
from tfnb.execution.tiers.native.exportable import ExtraOperands, obstacles
from tfnb.execution.tiers.native.manifest import About, about
from tfnb.execution.tiers.native.request import FORMLESS, NativeRequest, Operand
from tfnb.execution.tiers.native.segments import SEGMENTS, SegmentedStep, fitting, given, operands
from tfnb.execution.tiers.native.step_arguments import save_arguments
from tfnb.graph.variable import Variable
from tfnb.graph.variable_locks import NOTHING

ADVICE = "a loop of the graph (tfnb.fold, or for x in a tensor, in a cell) compiles its body once"


class NativeTier:
    """The tier: a whole step as one call, or its segments. varies: for feeds of any size from 2 on, not for one."""

    name = "compiled"

    def __init__(self, *, varies: bool = False) -> None:
        self.varies = varies

    def made(self, request: TierRequest) -> Step | str:
        """The code for operands that lie as these do."""
        program = request.program.undonated()
        unfit = obstacles(program)
        if not unfit:
            package = self._package(program, request)
            if isinstance(package, str) or FORMLESS not in package.facts:
                return package if isinstance(package, str) else _opened(package, program)
            if not (unfit := obstacles(program, package.facts[FORMLESS])):
                return f"{', '.join(package.facts[FORMLESS])} has no form in C"
        return self._in_segments(program, request, unfit)

    def _package(self, program: Program, request: TierRequest) -> PackageFolder | str:
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
        return package

    def _in_segments(self, program: Program, request: TierRequest, unfit: Mapping[fx.Node, str]) -> Step | str:
        """A step of packages, for operands as they lie where the step runs now."""
        why = next(iter(unfit.values()))
        found = cut(program, unfit.keys())
        if found is None:
            return why
        code, segments = found
        seconds, layouts, reasons = 0.0, list[Sequence[Operand] | None](), [why]
        for segment, args in zip(segments, given(code, segments, request.args), strict=True):
            layout = operands(args)
            part = "it takes what is no tensor" if layout is None else self._part(request, segment.program, args)
            if isinstance(part, str):
                layouts.append(None)
                reasons.append(part)
            else:
                layouts.append(layout)
                segment.forward = fitting(part, layout or ())
                seconds += part.package.facts["seconds"]
        if not any(layout is not None for layout in layouts):
            return "; ".join(dict.fromkeys(reasons))
        key = NativeRequest.of(program, request.args, varies=self.varies).key()
        package = remembered(key, {"seconds": seconds, SEGMENTS: layouts})
        return SegmentedStep(code, "; ".join(dict.fromkeys(reasons)), package)

    def _part(self, request: TierRequest, program: Program, args: Sequence[Any]) -> Step | str:
        """The step of a segment; why there is none, though other segments may have one."""
        try:
            found = self.made(replace(request, program=program, args=args))
        except Unimplemented as error:
            return str(error)
        if isinstance(found, str) or found.package.facts.get("agrees", True):
            return found
        return str(found.package.facts["status"])

    def recalled(self, program: Program, shapes: Sequence[torch.Size]) -> Step | None:
        """The cached code for contiguous feeds of these sizes, if any."""
        by_id = program.whole.contents.by_id
        specs = [by_id[value.node].outputs[value.index] for value in program.feeds]
        feeds = [torch.empty(shape, dtype=spec.dtype) for shape, spec in zip(shapes, specs, strict=True)]
        return self._recalled(program, [*feeds, *map(_lies, program.variables), 0])

    def _recalled(self, program: Program, args: Sequence[Any]) -> Step | None:
        program = program.undonated()
        package = cached(NativeRequest.of(program, args, varies=self.varies).key())
        if package is None:
            return None
        if SEGMENTS not in package.facts:
            return None if FORMLESS in package.facts else _opened(package, program)
        unfit = obstacles(program, package.facts.get(FORMLESS, ()))
        found = cut(program, unfit.keys())
        if found is None:
            return None
        code, segments = found
        for segment, layout in zip(segments, package.facts[SEGMENTS], strict=True):
            if layout is not None:
                lies = [Operand(dtype, tuple(shape), tuple(stride), on) for dtype, shape, stride, on in layout]
                part = self._recalled(segment.program, [*(x.empty() for x in lies), 0])
                if part is None:
                    return None
                segment.forward = fitting(part, lies)
        return SegmentedStep(code, next(iter(unfit.values())), package)


def _lies(variable: Variable) -> torch.Tensor:
    """A tensor with the layout of a Variable's value; contiguous on a cluster's task, where the Variable
    has no value.
    """
    if variable.initialized:
        return variable.storage
    spec = variable.spec
    return torch.empty(spec.sizes({}), dtype=spec.dtype, device=spec.device)


def _opened(package: PackageFolder, program: Program) -> NativeStep | VaryingStep:
    try:
        step = loaded(package.folder, program)
    except Exception:
        package.drop()
        raise
    step.package = package
    return step


def loaded(folder: Path, program: Program) -> NativeStep | VaryingStep:
    """The step of a package that was built for this program."""
    found = about(folder)

    def step(about: About) -> NativeStep:
        at = about.operands[: len(program.feeds) + len(program.variables)]
        lasts = all(variable.initialized for variable in program.variables)  # a task is given new ones in each step
        return NativeStep(Package(folder, about, ExtraOperands.of(program, at), lasts=lasts), program)

    return VaryingStep(found, len(program.feeds), step) if found.varying else step(found)


MOST_SHAPES = 16  # of one package that are ready to be called
BUILD = "tfnb.execution.tiers.native.package:build_in"


class NativeStep:
    """Computes a step as ``program.forward`` does.

    A step that ``writes`` takes feeds, storages and the run's number as three, gives the fetches and has written the
    rest. Raises Unfit or OperandRefused, and then wrote nothing.
    """

    package: PackageFolder

    def __init__(self, package: Package, program: Program) -> None:
        self._package, self._places = package, package.about.fetched
        self._feeds, self._n_fetches = len(program.feeds), program.n_fetches
        self._variables, self._written = program.variables, program.writes
        self._access = program.access or NOTHING
        self.writes = bool(package.about.written)
        self._made = all(place is None or place >= 0 for place in self._places)
        self._direct: Direct | None = None

    def direct(self) -> Callable[..., list[Any] | None] | None:
        """`Direct.call` of the whole step, after a first call; None if unavailable."""
        if not self._made or (self._written and not self.writes):
            return None
        places = self._places[: self._n_fetches]
        self._direct = self._package.direct(self._variables, self._access, self._written, places, self._direct)
        return None if self._direct is None else self._direct.call

    def __call__(self, *args: Any) -> Sequence[Any]:
        feeds, storages, run = args if self.writes else (args[: self._feeds], args[self._feeds : -1], args[-1])
        found = self._package(feeds, storages, run)
        if self._made:
            return [None if place is None else found[place] for place in self._places]
        given = [*feeds, *storages, run]
        return [None if at is None else found[at] if at >= 0 else given[~at] for at in self._places]


class VaryingStep:
    """The same for feeds of many sizes: `NativeStep` of one package, made when a size is first met."""

    package: PackageFolder

    def __init__(self, about: About, feeds: int, made: Callable[[About], NativeStep]) -> None:
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


Step = NativeStep | VaryingStep | SegmentedStep
