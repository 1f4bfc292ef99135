"""What recordings of one graph share in this process: symbols, samples, fakes, tensors of values.

Samples are kept up to a budget and computed again on demand from those of the placeholders.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from tfnb.graph import Graph, Node, Value
from tfnb.graph.subgraph import uses_queues
from tfnb.recording.interpret import evaluate, stream_seed
from tfnb.recording.shapes import Shapes
from tfnb.recording.symbols import Symbols

if TYPE_CHECKING:
    from tfnb.recording.commit import Derivative
    from tfnb.recording.outside import Met

SAMPLE_BUDGET = 1 << 30  # bytes, while a recording may still ask for them
KEPT_BUDGET = 64 << 20  # bytes, afterwards: training needs the memory


@contextmanager
def conjugating(complex: bool) -> Iterator[None]:
    """Inside a dispatch mode torch hides lazy conjugates from kernels that call others: here they see them."""
    if not complex:
        yield
        return
    hidden = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative):
        hidden = hidden.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), hidden):
        yield


def physical(tensor: Any) -> Any:
    """``tensor`` without the bits of a lazy conjugate or negation: recorded tensors hold the numbers themselves."""
    if not isinstance(tensor, torch.Tensor) or not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    with _disable_current_modes():
        return tensor.resolve_conj().resolve_neg()


class Workspace:
    """Symbols and samples of one graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = weakref.ref(graph)
        self.symbols = Symbols()
        self.shapes = Shapes(self.symbols)
        self.fakes: dict[Value, torch.Tensor] = {}
        self._apart: dict[Value, torch.Tensor] = {}  # fakes that stand for one value alone
        self._samples: dict[Value, torch.Tensor] = {}
        self._roots: dict[Value, torch.Tensor] = {}
        self.live = WeakIdKeyDictionary()  # recorded tensors of finished recordings that somebody still holds
        self.outside: dict[int, Met] = {}  # memory of plain tensors that recordings met, by storage
        self.rules: dict[int, Callable[..., Any]] = {}  # nodes with a gradient rule of their own
        self.derivatives: tuple[Derivative, ...] = ()
        self._bytes = 0

    @property
    def graph(self) -> Graph:
        graph = self._graph()
        assert graph is not None
        return graph

    def keep(self, value: Value, sample: torch.Tensor | None, *, root: bool = False) -> None:
        """Remember a sample; roots (what cannot be computed again) are never dropped."""
        if sample is None:
            return
        if root:
            self._roots[value] = sample
            return
        self._samples[value] = sample
        self._bytes += sample.numel() * sample.element_size()
        while self._bytes > SAMPLE_BUDGET and len(self._samples) > 1:
            dropped = self._samples.pop(next(iter(self._samples)))
            self._bytes -= dropped.numel() * dropped.element_size()

    def apart(self, entry: Any) -> torch.Tensor:
        """A fake tensor of this value alone: torch remembers with it the sizes that the value's data decide."""
        found = self._apart.get(entry.value)
        if found is None:
            with self.symbols.kernel():
                found = entry.fake.new_empty_strided(entry.fake.shape, entry.fake.stride())
            self._apart[entry.value] = found
        return found

    def settle(self, shown: Collection[int]) -> None:
        """After a recording: the oldest samples go, but for those of nodes that somebody holds a handle of."""
        for value in [v for v in self._samples if v.node not in shown]:
            if self._bytes <= KEPT_BUDGET:
                return
            dropped = self._samples.pop(value)
            self._bytes -= dropped.numel() * dropped.element_size()

    def renew(self, ids: Container[int]) -> None:
        """Nodes that compute from other values than before: samples come from those, sizes are those of now."""
        for value in [v for v in self._samples if v.node in ids]:
            dropped = self._samples.pop(value)
            self._bytes -= dropped.numel() * dropped.element_size()
        for value, fake in self.fakes.items():
            if value.node in ids:
                self.fakes[value] = self.symbols.renewed(fake)
        for tensor in list(self.live):
            tensor.renew(ids, self.symbols.renewed)

    def release(self, nodes: Iterable[Node]) -> None:
        """Drop fakes and samples of nodes that stand in a subgraph now."""
        for value in (node.value(index) for node in nodes for index in range(len(node.outputs))):
            self.fakes.pop(value, None)
            self._roots.pop(value, None)
            dropped = self._samples.pop(value, None)
            if dropped is not None:
                self._bytes -= dropped.numel() * dropped.element_size()

    def forget(self, ids: set[int]) -> None:
        """Drop everything about removed nodes."""
        for table in (self.fakes, self._apart, self._samples, self._roots):
            for value in [v for v in table if v.node in ids]:
                del table[value]
        for node_id in ids & self.rules.keys():
            del self.rules[node_id]
        self._bytes = sum(s.numel() * s.element_size() for s in self._samples.values())

    def sample(self, value: Value, by_id: dict[int, Node]) -> torch.Tensor | None:
        """The sample of a value, computed again if it was dropped; None where there is none."""
        found = self._roots.get(value)
        if found is None:
            found = self._samples.get(value)
        if found is not None:
            return found
        with (
            _disable_current_modes(),
            torch._C.DisableTorchFunction(),
        ):  # in an open recording nothing of it is recorded
            for node in _producers(value, by_id, self):
                outs = self._compute(node)
                if outs is None:
                    return None
                for index, out in enumerate(outs):
                    self.keep(node.value(index), out)
        return self._samples.get(value)

    def _known(self, value: Value) -> torch.Tensor | None:
        found = self._roots.get(value)
        return self._samples.get(value) if found is None else found

    def _compute(self, node: Node) -> tuple[torch.Tensor, ...] | None:
        match node.op:
            case "tfnb.constant":
                return (node.attrs["value"],)
            case "tfnb.read":
                return (physical(node.attrs["variable"].storage),)
            case "tfnb.placeholder":
                return None
        inputs = [self._known(v) for v in node.inputs]
        if uses_queues(node) or any(i is None for i in inputs):
            return None
        if node.op.startswith("tfnb.assign"):
            return (inputs[0],)  # type: ignore[return-value]
        return evaluate(node, inputs, self.symbols.number, self.graph.seed)


def _producers(value: Value, by_id: dict[int, Node], known: Workspace) -> list[Node]:
    """Nodes to compute for ``value``, in order, down to what is known."""
    order: dict[int, Node] = {}
    stack = [(value.node, False)]
    while stack:
        node_id, ready = stack.pop()
        if node_id in order or node_id not in by_id:
            continue
        node = by_id[node_id]
        if ready:
            order[node_id] = node
            continue
        stack.append((node_id, True))
        stack.extend((v.node, False) for v in node.inputs if known._known(v) is None)
    return list(order.values())


def workspace(graph: Graph) -> Workspace:
    """The workspace of a graph, made when first asked for."""
    if "workspace" not in graph.attached:
        graph.attached["workspace"] = Workspace(graph)
    return graph.attached["workspace"]


__all__ = ["Workspace", "conjugating", "physical", "stream_seed", "workspace"]
