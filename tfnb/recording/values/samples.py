"""The samples of one graph: kept up to a budget, and recomputed on demand from roots.

Those cannot be computed: what placeholders and constants hold, and the values of Variables. Where one of these has
changed since, a sample that nobody had looked at is computed from what they hold now, all of it: never from some old
and some new values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.errors import TfnbError
from tfnb.graph import Dim, Graph, Node, Value, Variable
from tfnb.graph.subgraph import uses_queues
from tfnb.interrupts import from_signal_handler
from tfnb.recording.marks.python_guards import stamp
from tfnb.recording.values.interpret import evaluate

SAMPLE_BUDGET = 128 << 20  # bytes, while a recording may still ask for them: a step shall need more than its recording
KEPT_BUDGET = 64 << 20  # bytes, afterwards, until the first run: that needs the memory


@contextmanager
def conjugating(complex: bool) -> Iterator[None]:
    """Inside, kernels that call others see lazy conjugates, which torch hides within a dispatch mode."""
    if not complex:
        yield
        return
    hidden = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative):
        hidden = hidden.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), hidden):
        yield


def physical(tensor: object) -> Any:
    """``tensor`` without the bits of a lazy conjugate or negation: recorded tensors hold the numbers themselves."""
    if not isinstance(tensor, torch.Tensor) or not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    with _disable_current_modes():
        return tensor.resolve_conj().resolve_neg()


class Samples:
    """The known sample values of one graph while recording."""

    def __init__(self, number: Callable[[Dim], Any], graph: Callable[[], Graph | None]) -> None:
        self._number, self._graph = number, graph
        self._roots: dict[Value, torch.Tensor] = {}
        self._kept: dict[Value, torch.Tensor] = {}
        self._reads: dict[Value, Variable] = {}
        self._stamps: dict[Value, Any] = {}  # of roots and reads, as they were when they were met
        self._absent: set[int] = set()  # nodes that depend on a placeholder without a sample
        self.bytes = 0  # of those kept, without Variables, whose memory is there anyway

    @property
    def _seed(self) -> int:
        graph = self._graph()
        assert graph is not None
        return graph.seed

    # -- keeping ------------------------------------------------------------------------------------------------

    def root(self, value: Value, sample: torch.Tensor | None) -> None:
        """Keep a sample that cannot be recomputed; such samples are never dropped."""
        if sample is not None:
            self._roots[value] = sample
            self._stamps[value] = stamp(sample)

    def read(self, value: Value, variable: Variable, sample: torch.Tensor | None) -> None:
        """Keep the value of a Variable, which may change later."""
        if sample is not None:
            self._reads[value] = variable
            self._stamps[value] = stamp(sample)
            self.keep(value, sample)

    def keep(self, value: Value, sample: torch.Tensor | None) -> None:
        """Remember a sample, within the budget."""
        if sample is None:
            return
        self._drop(value)
        self._kept[value] = sample
        self.bytes += self._bytes(value, sample)
        while self.bytes > SAMPLE_BUDGET and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))

    def lacks(self, node: int) -> None:
        """Mark a node as without samples, since one of its inputs has none."""
        self._absent.add(node)

    def is_absent(self, value: Value) -> bool:
        """Whether the sample is known to be absent."""
        return value.node in self._absent

    def settle(self, shown: Collection[int], budget: int = KEPT_BUDGET) -> None:
        """After a recording: drop the oldest samples, except for nodes with a living handle."""
        for value in list(self._kept):  # of a thread that runs, another one may be recording
            if self.bytes <= budget:
                return
            if value.node not in shown:
                self._drop(value)

    def forget(self, values: Iterable[Value]) -> None:
        """Drop all state of these values."""
        for value in values:
            self._drop(value)
            for table in (self._roots, self._reads, self._stamps):
                table.pop(value, None)
            self._absent.discard(value.node)

    def renew(self, ids: Collection[int]) -> None:
        """Nodes that compute from other values than before."""
        for value in [v for v in self._kept if v.node in ids]:
            self._drop(value)
        self._absent.difference_update(ids)

    def of(self, ids: Collection[int]) -> list[Value]:
        """The values of these nodes with a known sample or stamp."""
        return [v for v in {**self._roots, **self._kept, **self._stamps} if v.node in ids]

    def _drop(self, value: Value) -> None:
        dropped = self._kept.pop(value, None)
        if dropped is not None:
            self.bytes -= self._bytes(value, dropped)

    def _bytes(self, value: Value, sample: torch.Tensor) -> int:
        return 0 if value in self._reads else sample.numel() * sample.element_size()

    # -- computing ----------------------------------------------------------------------------------------------

    def known(self, value: Value) -> torch.Tensor | None:
        """The sample, if available without computing."""
        found = self._roots.get(value)
        return self._kept.get(value) if found is None else found

    def compute(self, value: Value, others: Collection[Value], by_id: Mapping[int, Node]) -> dict[Value, torch.Tensor]:
        """The samples of ``value`` and of ``others`` where there are any, each node computed once.

        Raises what a kernel raises on the way to ``value``; others that cannot be computed are left out.
        """
        if self.is_absent(value):
            return {}
        self._look_at_roots()
        needed = self._producers([value], by_id)
        order = {**needed, **self._producers(others, by_id)}
        left = Counter([*(v for node in order.values() for v in node.inputs), value, *others])
        found = {v: sample for v in left if (sample := self.known(v)) is not None}
        failed = False
        with _disable_current_modes(), torch._C.DisableTorchFunction():  # nothing of it is recorded
            for node in order.values():
                try:
                    outs = self._outputs(node, found)
                except Exception as error:
                    if node.id in needed or from_signal_handler(error):
                        raise
                    failed = True
                    continue
                if not outs and node.outputs and not failed:
                    self.lacks(node.id)
                for at, out in ((node.value(index), out) for index, out in enumerate(outs)):
                    self.keep(at, out)
                    if left[at]:
                        found[at] = out
                left.subtract(node.inputs)
                for used in (v for v in node.inputs if not left[v]):
                    found.pop(used, None)
        if value not in found and value.node in by_id:
            self.lacks(value.node)
        return found

    def _look_at_roots(self) -> None:
        """Drop the samples that were computed from values that have changed since."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():  # a look at a Variable is no read
            now = {v: stamp(sample) for v, sample in self._roots.items()}
            now |= {v: at for v, variable in self._reads.items() if (at := _stamp_of(variable)) is not None}
        if any(self._stamps[v] != at for v, at in now.items()):
            self._stamps |= now
            self._kept.clear()
            self.bytes = 0

    def _producers(self, values: Iterable[Value], by_id: Mapping[int, Node]) -> dict[int, Node]:
        """Nodes to compute for these values, in order, down to known samples."""
        order: dict[int, Node] = {}
        stack = [(value.node, False) for value in values if self.known(value) is None]
        while stack:
            node_id, ready = stack.pop()
            if node_id in order or node_id not in by_id:
                continue
            node = by_id[node_id]
            if ready:
                order[node_id] = node
                continue
            stack.append((node_id, True))
            stack.extend((v.node, False) for v in node.inputs if self.known(v) is None)
        return order

    def _outputs(self, node: Node, found: Mapping[Value, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The samples of one node's outputs; none where an input has no sample."""
        match node.op:
            case "tfnb.constant":
                return (node.attrs["value"],)
            case "tfnb.read":
                return (physical(node.attrs["variable"].storage),)
            case "tfnb.placeholder":
                return ()
        if uses_queues(node) or any(v not in found for v in node.inputs):
            return ()
        inputs = [found[v] for v in node.inputs]
        if node.op.startswith("tfnb.assign"):
            return (inputs[0],)
        dtypes = (*(spec.dtype for spec in node.outputs), *(tensor.dtype for tensor in inputs))
        with conjugating(any(dtype.is_complex for dtype in dtypes)):
            outs = evaluate(node, inputs, self._number, self._seed)
        return tuple(map(physical, outs))


def _stamp_of(variable: Variable) -> Any:
    """The stamp of the value here; None where there is none."""
    try:
        return stamp(variable.storage)
    except TfnbError:
        return None
