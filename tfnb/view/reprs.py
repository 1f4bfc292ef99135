"""Small reprs as HTML, in a ``details`` element without script.

Takes anything that looks like a recorded tensor (``name spec node sample``), an Operation (``node graph``), a Session
or a queue, and what a graph is made of; reads no remote value.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tfnb.errors import StaleNode
from tfnb.graph import Spec, Variable
from tfnb.graph.queue import Queue
from tfnb.graph.spec import dtype_name
from tfnb.view import facts
from tfnb.view.style import LIGHT
from tfnb.widgets.escaping import xml

Facts = list[tuple[str, str]]

_BARS = 24
FEW = 4  # numbers that a closed repr shows
_TABLE = (
    'style="border-collapse:collapse;max-width:520px;overflow-wrap:anywhere;font:12px Menlo,Consolas,monospace;'
    'margin:4px 0"'
)
_CELL = 'style="text-align:left;padding:1px 12px 1px 0;vertical-align:top"'


def tensor_html(tensor: Any) -> str:
    """A recorded tensor: spec, origin, and sample."""
    sample = tensor.found_sample()
    badge = '<span style="background:#e8ecf2;color:#3d4d66;border-radius:8px;padding:0 7px">sample</span> '
    shown = badge + _glance(sample) if isinstance(sample, torch.Tensor) else ""
    try:
        return _details(f"{tensor.name}  {tensor.spec}", tensor_facts(tensor), shown)
    except StaleNode as gone:
        return _details(str(tensor.spec), [("graph", str(gone))], shown)


def tensor_facts(tensor: Any) -> Facts:
    """Facts about a recorded tensor, for HTML and text."""
    node, spec, sample = tensor.node, tensor.spec, tensor.found_sample()
    found = [("device", spec.device), ("bytes", _bytes(spec)), ("from", f"{node.name} = {node.op}")]
    if node.source:
        found.append(("line", str(node.source)))
    if isinstance(sample, torch.Tensor):
        found += [("sample", _numbers(sample)), ("health", health(sample))]
    return found


def variable_html(variable: Variable) -> str:
    """A Variable: spec, home, and its value if that is here."""
    return _details(f"{variable.name}  {variable.spec}", variable_facts(variable), "")


def variable_facts(variable: Variable) -> Facts:
    """Facts about a Variable, for HTML and text; remote values are not fetched."""
    here = variable.home is None
    found = [("bytes", _bytes(variable.spec)), ("home", "here" if here else str(variable.home))]
    found.append(("trainable", "yes" if variable.trainable else "no"))
    return [*found, ("value", _numbers(variable.kept) if here else "not fetched: use .value()")]


def checkpoint_html(checkpoint: Any) -> str:
    """A file of variables: its path, step, and contents."""
    return _details(f"{checkpoint.file}  {len(checkpoint.specs)} variables", checkpoint.facts, "")


def values_html(values: Any) -> str:
    """Tensors by name, with a ``title``: spec, numbers or histogram, and health of each."""
    rows = "".join(
        f"<tr><th {_CELL}>{xml(name)}</th><td {_CELL}>{xml(str(Spec.of(value)))}</td><td {_CELL}>{_glance(value)}</td>"
        f"<td {_CELL}>{xml(health(value))}</td></tr>"
        for name, value in values.items()
    )
    return f"<div><code>{xml(values.title)}</code></div><table {_TABLE}>{rows}</table>"


def spec_html(spec: Spec) -> str:
    """A Spec: dtype, sizes, varying sizes, bytes."""
    return _details(str(spec), spec_facts(spec), "")


def spec_facts(spec: Spec) -> Facts:
    """Facts about a Spec, for HTML and text."""
    varies = ", ".join(spec.symbols) or "nothing"
    return [("dtype", dtype_name(spec.dtype)), ("varies", varies), ("device", spec.device), ("bytes", _bytes(spec))]


def operation_html(operation: Any) -> str:
    """An Operation: its op, and its position in the code."""
    try:
        return _details(f"{operation.name}  {operation.node.op}", operation_facts(operation), "")
    except StaleNode as gone:
        return _details("Operation", [("graph", str(gone))], "")


def operation_facts(operation: Any) -> Facts:
    """Facts about an Operation, for HTML and text: ``inputs`` are the first `FEW` of its inputs and dependencies."""
    node, contents = operation.node, operation.graph.contents
    used = (*(value.node for value in node.inputs), *node.control)
    names = dict.fromkeys(contents.shown(contents.by_id[at]) for at in used)
    more = f", … {len(names) - FEW} more" if len(names) > FEW else ""
    found = [("graph", operation.graph.name), ("inputs", ", ".join([*names][:FEW]) + more)]
    return found + ([("line", str(node.source))] if node.source else [])


def session_html(session: object) -> str:
    """A Session: its home, and the code of its signatures."""
    return _details(repr(session)[1:-1], session_facts(session), "")


def session_facts(session: Any) -> Facts:
    """Facts about a Session, for HTML and text."""
    cluster, budget = session.cluster, session.memory_budget
    found = [("runs", "here" if cluster is None else f"on a cluster: {', '.join(cluster.tasks)}")]
    found += [] if budget is None else [("memory budget", facts.amount(budget))]
    found += [("code", line) for line in session.status()[-FEW:]]
    trained = session.state.trained
    return found + ([("training", f"{trained} steps, not at its end")] if trained else [])


def queue_html(queue: Queue) -> str:
    """A queue, accumulator or barrier: its level, its waiters, and its contents."""
    return _details(repr(queue).strip("<>"), queue_facts(queue), "")


def queue_facts(queue: Queue) -> Facts:
    """Facts about a queue, for HTML and text; for a queue on a server, as last reported."""
    parts = (f"{dtype_name(dtype)}{_shape(shape)}" for dtype, shape in queue.components)
    found = [
        ("level", repr(queue).strip("<>").partition(": ")[2]),
        ("element", ", ".join(parts)),
        ("bytes", facts.amount(0 if queue.machine is None else queue.machine.nbytes)),
    ]
    found += [(name, str(option)) for name, option in queue.options.items()]
    return found + [
        (name, str(text)) for name, text in (("device", queue.device), ("container", queue.container)) if text
    ]


def _shape(shape: tuple[int | None, ...] | None) -> str:
    """``[3, ?]``: sizes, with a question mark for those that vary by element; empty for any shape."""
    return " of any shape" if shape is None else f"[{', '.join('?' if n is None else str(n) for n in shape)}]"


def health(tensor: torch.Tensor) -> str:
    """Counts of NaN and infinity, or the range.

    >>> health(torch.tensor([1.0, float("nan")]))
    '1 NaN'
    """
    if tensor.numel() == 0:
        return "empty"
    if not tensor.is_floating_point():
        return "ok"
    bad = {"NaN": int(tensor.isnan().sum()), "infinite": int(tensor.isinf().sum())}
    if any(bad.values()):
        return ", ".join(f"{count} {word}" for word, count in bad.items() if count)
    return f"ok, {facts.number(tensor.min().item())} to {facts.number(tensor.max().item())}"


def _bytes(spec: Any) -> str:
    if spec.symbols:
        return f"{facts.amount(facts.bytes_of(spec))} at {', '.join(f'{s}={facts.BATCH}' for s in spec.symbols)}"
    return facts.amount(math.prod(spec.shape) * spec.dtype.itemsize)


def _numbers(tensor: torch.Tensor) -> str:
    """At most `facts.PREVIEW` numbers."""
    flat = tensor.detach().flatten()[: facts.PREVIEW].tolist()
    more = f", … {tensor.numel() - len(flat):,} more" if tensor.numel() > len(flat) else ""
    return "[" + ", ".join(map(facts.number, flat)) + more + "]" if tensor.dim() else facts.number(flat[0])


def _details(title: str, found: Facts, extra: str) -> str:
    rows = "".join(f"<tr><th {_CELL}>{xml(name)}</th><td {_CELL}>{xml(text)}</td></tr>" for name, text in found)
    return f"<details><summary><code>{xml(title)}</code> {extra}</summary><table {_TABLE}>{rows}</table></details>"


def _glance(sample: torch.Tensor) -> str:
    """Few numbers as they are, many as a histogram."""
    return f"<code>{xml(_numbers(sample))}</code>" if sample.numel() <= FEW else _histogram(sample)


def histogram(tensor: Any) -> dict[str, Any]:
    """``{"histogram": {"counts", "low", "high"}}`` of the finite values, for a live drawing; nothing of few numbers."""
    values = _finite(tensor) if isinstance(tensor, torch.Tensor) and tensor.numel() > FEW else None
    if values is None:
        return {}
    counts = [int(count) for count in torch.histc(values, 2 * _BARS).tolist()]
    low, high = (facts.number(bound.item()) for bound in values.aminmax())
    return {"histogram": {"counts": counts, "low": low, "high": high}}


def _finite(tensor: torch.Tensor) -> torch.Tensor | None:
    """The finite values; None where they do not differ."""
    if tensor.is_complex() or tensor.layout != torch.strided:
        return None
    values = tensor.detach().flatten().float()
    values = values[values.isfinite()]
    return None if values.numel() < 2 or values.min() == values.max() else values


def _histogram(tensor: torch.Tensor) -> str:
    """A sparkline of the values, as inline SVG."""
    values = _finite(tensor)
    if values is None:
        return ""
    counts = torch.histc(values, _BARS).tolist()
    bars = "".join(
        f'<rect x="{3 * place}" y="{16 - height}" width="2" height="{height}"/>'
        for place, height in enumerate(max(1, round(15 * count / max(counts))) for count in counts)
    )
    return f'<svg width="{3 * _BARS}" height="16" role="img" fill="{LIGHT["forward"].line}">{bars}</svg>'
