"""The package of a request: out of the cache, or built by the compiler's process and kept."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tfnb.execution.compiling.compiler_process import BEHIND, COMPILER, NOBODY, OverBudget
from tfnb.execution.compiling.package_cache import FOLDER, cpp_compiler, digest, packages, surroundings

REQUEST = "request"  # folder
HURRY = 10.0  # seconds that steps which wait for their code wait for another process that compiles the same
OVER = "over"  # the fact that there will be no package, and why
LOOKED_AT, ENOUGH = 64, 3  # packages that tell how long this machine compiles: at most, at least
PROCESSOR, PREDICTED = "processor", "predicted"  # the seconds of a processor that its compilation took, and was to take
NO_COMPILER = "no C++ compiler: install g++, or set CXX to one"


@dataclass(frozen=True, slots=True)
class PackageFolder:
    """A folder of compiled code. facts: seconds of its compilation, and later findings."""

    key: str
    folder: Path
    facts: Mapping[str, Any]
    is_cached: bool

    def note(self, **facts: object) -> None:
        """Store facts for later loads of the package."""
        packages().note(self.key, facts)

    def drop(self) -> None:
        """Remove the package from the cache, so that no process loads the package again."""
        packages().drop(self.key)

    @property
    def cost(self) -> str:
        """The cost of compiling the package, in words."""
        return "from the cache" if self.is_cached else f"{self.facts['seconds']:.1f} s to compile"


def cached(request: str) -> PackageFolder | None:
    """The package of a request, by its digest, if already compiled on this machine.

    Raises OverBudget where that took too long.
    """
    key = _key(request)
    folder = packages().find(key)
    if folder is None:
        return None
    facts = packages().facts(key)
    if OVER in facts:
        raise OverBudget(facts[OVER])
    return PackageFolder(key, folder, facts, True)


def machine_scale() -> float:
    """How many times the predicted seconds of a processor packages took to compile here; 1 where few are known."""
    known = (facts for facts in packages().some_facts(LOOKED_AT) if {PROCESSOR, PREDICTED} <= facts.keys())
    found = [facts[PROCESSOR] / facts[PREDICTED] for facts in known]
    return statistics.median(found) if len(found) >= ENOUGH else 1.0


def remembered(request: str, facts: Mapping[str, Any]) -> PackageFolder:
    """Store facts about a request, which may have no code of its own."""
    key = _key(request)
    folder = packages().keep(key, packages().draft(), facts)
    packages().note(key, facts)  # where there was an entry
    return PackageFolder(key, folder, facts, False)


def compiled(
    request: str, write: Callable[[Path], None], build: str, owner: object, *, urgent: bool = False
) -> PackageFolder | str:
    """The `cached` package, else the result of ``build`` in the compiler's process; or a text with the reason for none.

    write: puts the request's files into a folder. build: ``module:function``, called with the folder of the package,
    in which the request is the folder `REQUEST`. owner: who waits; urgent: and runs nothing until then.
    """
    found = cached(request)
    if found is not None:
        return found
    if cpp_compiler() is None:
        return NO_COMPILER
    COMPILER.expect(owner)
    with packages().alone(_key(request), HURRY if urgent else BEHIND, partial(COMPILER.is_expected, owner)):
        if not COMPILER.is_expected(owner):
            return NOBODY
        return cached(request) or _built(request, write, build, owner, urgent)


def _built(
    request: str, write: Callable[[Path], None], build: str, owner: object, urgent: bool
) -> PackageFolder | str:  # fmt: skip
    facts: dict[str, Any] | str = "interrupted"
    try:
        draft = packages().draft()
    except OSError as error:
        return str(error)
    try:
        (draft / REQUEST).mkdir()
        write(draft / REQUEST)
        facts = COMPILER.build(build, draft, owner, urgent=urgent)
    except OSError as error:  # a full disk, say
        return f"{draft}: {error.strerror}: make room there, or set {FOLDER} to another folder"
    except OverBudget as error:
        packages().keep(_key(request), packages().draft(), {OVER: str(error)})
        raise
    finally:
        shutil.rmtree(draft if isinstance(facts, str) else draft / REQUEST, ignore_errors=True)
    if isinstance(facts, str):
        return facts
    key = _key(request)
    return PackageFolder(key, packages().keep(key, draft, facts), facts, False)


def _key(request: str) -> str:
    return digest(f"{surroundings()} {request}".encode())
