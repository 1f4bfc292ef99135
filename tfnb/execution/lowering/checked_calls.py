"""Calls of generated code that are objects: a draw of random numbers, and checks of branches and sizes."""

from __future__ import annotations

from typing import Any

import torch

from tfnb.graph import Guard, Node
from tfnb.graph.ops import overload
from tfnb.kernels.random import drawn, mix, seeded
from tfnb.recording.values.interpret import held, sizes_hold


class RandomCall:
    """A random op that draws from its node's stream: called with the run's number first."""

    def __init__(self, node: Node, graph_seed: int) -> None:
        self.op, self.device = overload(node.op), torch.device(node.outputs[0].device)
        self.place = (graph_seed, node.owner.index if node.owner else 0, node.stream or 0)
        self.__name__ = "draw"  # for the generated code

    def __call__(self, run: int, *args: object, **kwargs: object) -> Any:
        return seeded(self.op, mix(*self.place, run), self.device, args, kwargs)


class SeededCall:
    """A drawing with its own generator, which `seed` sets for the run: for code captured once."""

    def __init__(self, drawing: RandomCall, generator: torch.Generator) -> None:
        self.op, self.place, self.generator = drawing.op, drawing.place, generator
        self.__name__ = "draw"  # for the generated code

    def __call__(self, run: int, *args: object, **kwargs: object) -> Any:
        return drawn(self.op, self.generator, args, kwargs)

    def seed(self, run: int) -> None:
        """Set the generator to the stream of this run."""
        self.generator.manual_seed(mix(*self.place, run))


class Branch:
    """A guard on a Python branch taken while recording: called with the value of its condition."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.__name__ = "branch"  # for the generated code

    def __call__(self, value: torch.Tensor) -> None:
        held(self.node, value)


class Relation:
    """A relation between sizes inside a loop or branch: called with the sizes."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.__name__ = "relation"  # for the generated code

    def __call__(self, *sizes: int) -> None:
        sizes_hold(self.guard, dict(zip(self.guard.symbols, sizes, strict=True)))
