"""Requests of the native tier: a step as JSON and tensors, for operands of given layouts. Contains no code.

The graph is the lowered one, after all passes, so the compiler's process runs no pass. `NativeRequest.key` digests what
the code depends on: ops, edges, control edges, attributes, specs, constants and tags of the nodes, feeds and fetches,
layouts of operands, the axes that vary, threads and torch's default dtype. Names of nodes and Variables, and the seed,
are no part of the key.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from tfnb.errors import Unimplemented
from tfnb.execution.lowering.lower import lower_optimized
from tfnb.execution.lowering.program import Program
from tfnb.graph import Contents, Dim, Graph, Node, Value
from tfnb.graph.forms.serial import graph_hash, read_graph, write_graph
from tfnb.graph.spec import dtype_name

GRAPH, ABOUT = "graph.json", "request.json"
FORMLESS = "formless"  # the fact that there is no package, and which ops have no form in C


class Operand(NamedTuple):
    """How one tensor lies in memory: dtype without "torch.", sizes, strides in elements, device."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str

    @classmethod
    def of(cls, x: torch.Tensor) -> Self:
        """The layout of a tensor."""
        return cls(dtype_name(x.dtype), tuple(x.shape), tuple(x.stride()), str(x.device))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]

    def resized(self, sizes: Mapping[int, int]) -> Operand:
        """One element behind the other, with other sizes of these axes."""
        shape = [sizes.get(axis, size) for axis, size in enumerate(self.shape)]
        return self._replace(shape=(*shape,), stride=tuple(torch.empty(shape, device="meta").stride()))

    def empty(self) -> torch.Tensor:
        """A tensor that lies so."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.torch_dtype, device=self.device)


class Axis(NamedTuple):
    """A varying axis: the operand's index, the axis, and the symbol of its size."""

    operand: int
    axis: int
    symbol: str


def varying_axes(program: Program) -> tuple[Axis, ...]:
    """The axes of the feeds that vary; raises Unimplemented for one whose size is computed from others."""
    by_id = program.whole.contents.by_id
    found = []
    for place, value in enumerate(program.feeds):
        for axis, size in enumerate(by_id[value.node].outputs[value.index].shape):
            if isinstance(size, Dim):
                if not size.is_symbol:
                    raise Unimplemented(f"the size {size} of a feed is computed from others")
                found.append(Axis(place, axis, size.expr))
    return tuple(found)


def resized(operands: Sequence[Operand], axes: Iterable[Axis], sizes: Mapping[str, int]) -> tuple[Operand, ...]:
    """The operands where the symbols are these numbers."""
    wanted: dict[int, dict[int, int]] = {}
    for place, axis, symbol in axes:
        wanted.setdefault(place, {})[axis] = sizes[symbol]
    return tuple(x.resized(wanted[place]) if place in wanted else x for place, x in enumerate(operands))


@dataclass(frozen=True)
class NativeRequest:
    """A step to compile. operands: its feeds, then the storages of its Variables; threads: for its loops.

    varying: axes of which the code takes any size from 2 on; the operands have an example.
    """

    graph: Graph
    fetches: tuple[tuple[int, int], ...]  # position of the node, and which of its outputs
    feeds: tuple[tuple[int, int], ...]
    operands: tuple[Operand, ...]
    threads: int
    default_dtype: str  # of torch, which ops take where nothing is said
    varying: tuple[Axis, ...] = ()

    @classmethod
    def of(cls, program: Program, args: Sequence[Any], *, varies: bool = False) -> Self:
        """For arguments as in a run: feeds, storages, the run's number. varies: for other sizes of the feeds, too."""
        graph = _closed(program)
        place = graph.contents.position
        fetches, feeds = (
            tuple((place[value.node], value.index) for value in values) for values in (program.fetches, program.feeds)
        )
        operands, axes = tuple(map(Operand.of, args[:-1])), varying_axes(program) if varies else ()
        operands = resized(operands, axes, _examples(operands, axes))
        default = dtype_name(torch.get_default_dtype())
        return cls(graph, fetches, feeds, operands, torch.get_num_threads(), default, axes)

    def as_asked(self) -> None:
        """Let torch compute in this process as in the one that asks."""
        torch.set_num_threads(self.threads)
        torch.set_default_dtype(getattr(torch, self.default_dtype))

    def program(self) -> Program:
        """The step, lowered."""
        nodes = self.graph.nodes
        fetches, feeds = (
            tuple(Value(nodes[place].id, index) for place, index in values) for values in (self.fetches, self.feeds)
        )
        return lower_optimized(self.graph, self.graph, fetches, feeds)

    def key(self) -> str:
        """sha256 of everything the code depends on, except versions and the machine (`package_cache.surroundings`)."""
        about = json.dumps([self._about(), [sorted(node.tags) for node in self.graph.nodes]])
        return hashlib.sha256(f"{graph_hash(self.graph.contents)} {about}".encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Write the request into an existing folder."""
        write_graph("step", self.graph.seed, self.graph.contents, folder / GRAPH)
        (folder / ABOUT).write_text(json.dumps(self._about()))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read a request written by `save`."""
        _, seed, contents = read_graph(folder / GRAPH, itertools.count().__next__, trusted=True)
        about = json.loads((folder / ABOUT).read_text())
        fetches, feeds = (tuple(tuple(value) for value in about[name]) for name in ("fetches", "feeds"))
        operands = tuple(Operand(dtype, tuple(shape), tuple(stride), device)
                         for dtype, shape, stride, device in about["operands"])  # fmt: skip
        varying = tuple(Axis(*axis) for axis in about["varying"])
        graph, settings = Graph("step", contents, seed=seed), (about["threads"], about["default_dtype"])
        return cls(graph, fetches, feeds, operands, *settings, varying)

    def _about(self) -> dict[str, Any]:
        names = "fetches", "feeds", "operands", "threads", "default_dtype", "varying"
        return {name: getattr(self, name) for name in names}


def _examples(operands: Sequence[Operand], axes: Iterable[Axis]) -> dict[str, int]:
    """A size for each symbol that no other axis has; the same for sizes between two powers of two."""
    taken = {size for operand in operands for size in operand.shape}
    found: dict[str, int] = {}
    for place, axis, symbol in axes:
        if symbol not in found:
            size = (1 << (operands[place].shape[axis] - 1).bit_length()) + 1
            while size in taken:
                size += 2
            found[symbol] = size
            taken.add(size)
    return found


def _closed(program: Program) -> Graph:
    """The graph that was lowered, with a placeholder for each value that is fed."""
    by_id, known = program.whole.contents.by_id, program.graph.contents.by_id
    fed = dict.fromkeys(value.node for value in program.feeds)
    if any(len(by_id[node].outputs) != 1 or (node in known and known[node].op != "tfnb.placeholder") for node in fed):
        raise Unimplemented("a fed value is one of several that a node gives")
    given = [known.get(node) or _placeholder(by_id[node]) for node in fed]
    rest = (node for node in program.graph.nodes if node.id not in fed)
    return program.graph.derive(Contents((*given, *rest)))


def _placeholder(node: Node) -> Node:
    if node.op == "tfnb.placeholder":
        return node
    return replace(node, op="tfnb.placeholder", inputs=(), attrs={}, control=(), tags=frozenset(), stream=None)
