"""Where NaN and infinite numbers of a step began, as data and in sentences.

A number that is not finite began in the op that made it of finite ones, or was given: fed, or in a Variable before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tfnb.errors import NonFinite
from tfnb.execution.tracing.health import Health
from tfnb.execution.tracing.iterations import Path
from tfnb.graph import Graph, Node


@dataclass(frozen=True, slots=True)
class KnownValue:
    """A value of a step: its name, spec, health, its numbers if few, and the origin of nonfinite ones."""

    name: str
    spec: str
    health: Health
    numbers: tuple[float, ...] = ()  # all, where they are few
    origin: Origin | None = None  # of what is not finite

    def __str__(self) -> str:
        if self.numbers:
            return f"{self.name}, {self.spec}: {', '.join(f'{number:.4g}' for number in self.numbers)}"
        return f"{self.name}, {self.spec}: {self.health!r}"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where numbers that are not finite began.

    ``node``: the op that made them of finite ``inputs``; None: ``value`` was given so, as a feed, constant or Variable.
    ``iterations`` are the numbers of the loops around it, the first is 0. ``before``: of a NaN that an op made of
    infinite numbers, where those began.
    """

    node: Node | None
    value: KnownValue
    inputs: tuple[KnownValue, ...] = ()
    path: Path = ()
    iterations: tuple[int, ...] = ()
    before: Origin | None = None

    @property
    def first(self) -> Origin:
        """The first origin: the infinite numbers from which an op made NaN, else this origin."""
        return self.before or self

    def lines(self, graph: Graph) -> Iterator[str]:
        """Sentences for people: the op, its line, its inputs."""
        made = _made(self.value.health)
        if self.node is None:
            yield f"{self.value.name} held {made} before the step ({self.value.spec}: {self.value.health!r})"
            return
        if self.before is not None:
            yield from self.before.lines(graph)
            yield f"{self.node.op} made {made} of infinite numbers"
        else:
            yield f"{self.node.op} made {made} of finite numbers"
        yield f"  node {self.node.name}{self._where(graph)}"
        if self.iterations:
            yield f"  in iteration {', '.join(str(number + 1) for number in self.iterations)} of its loop"
        yield from (f"  input {known}" for known in self.inputs)

    def _where(self, graph: Graph) -> str:
        assert self.node is not None
        made = f", {self.node.source}" if self.node.source else ""
        of = None if self.node.forward is None else graph.contents.by_id.get(self.node.forward)
        return made if of is None or of.source is None else f"{made}\n  in the gradient of {of.name}, {of.source}"


def _made(found: Health) -> str:
    """``nan and +inf``."""
    return " and ".join(word for word, count in found.counts if count and word in ("nan", "-inf", "+inf"))


def not_finite(results: Iterable[KnownValue], graph: Graph) -> NonFinite:
    """The error of a step whose results are not all finite: about the first that is not, NaN first."""
    bad = sorted((known for known in results if known.origin), key=lambda known: not known.health.nan)
    if not bad:
        return NonFinite("the step gave NaN or infinite numbers; when it ran again with probes, it did not")
    known, origin = bad[0], bad[0].origin
    assert origin is not None
    node = origin.first.node or origin.node
    text = "\n".join([f"{known.name} is not finite: {known.health!r}", *origin.lines(graph)])
    return NonFinite(text, **({} if node is None else node.where), details=origin)
