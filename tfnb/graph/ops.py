"""Op names: resolve a qualified name (``aten.mm.default``) to torch's overload, and decide which ops a file may name.

Uses one private call of torch (tried on 2.13): the dispatcher's schema look-up, which knows ATen and custom ops
but not the TorchScript-only ones (``aten.save``), which read and write files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

import tfnb.kernels  # noqa: F401 - registers our ops, which a file may name
from tfnb.errors import UnknownOp
from tfnb.graph.pure import original, pure

WITH_GRADIENT = "tfnb.with_gradient"  # the identity of its values, with a gradient of its own
COND, WHILE = "tfnb.cond", "tfnb.while"
CALL = "tfnb.call"  # of a function that calls itself
IN_PLACE = "in place"  # tag of a node that writes into its first operand: only the pass that donates memory gives it
GRADIENT = frozenset({"gradient"})  # tags of a node of a backward pass
PRESENT = "present"  # tag of a truth value: whether a run has a gradient; of several parts of a batch, whether any has
HOISTED = "hoisted"  # tag of an update that was taken out of a branch: it is done if its gradient is there
STATEMENT = "statement"  # tag of an assign in torch's way (in place, by rebinding, of statistics): it belongs to a step
NAMED = "named"  # tag of a node whose name was given by ``name=``
STEP = "optimizer step"  # tag of the group that an optimizer's step is
LATE = "late"  # tag of a node whose value goes to other places when its own place has used it
UNORDERED, LOCKING = "unordered", "locking"  # tags of what `tfnb.unordered` has inside; of writes under a lock
OPTIONAL = "optional"  # attr of such a branch: places of outputs that are None where the other side was taken
REGIONS = frozenset({COND, WHILE})  # hold subgraphs: see tfnb.graph.subgraph
ENQUEUE, DEQUEUE, CLOSE, SIZE = "tfnb.enqueue", "tfnb.dequeue", "tfnb.close", "tfnb.size"
SET_STEP = "tfnb.set_step"  # of an accumulator
RENEW, FINISH = "tfnb.renew", "tfnb.finish"  # of a token
QUEUES = frozenset({ENQUEUE, DEQUEUE, CLOSE, SIZE, SET_STEP, RENEW, FINISH})  # use the attr ``queue``, and may wait
STRUCTURAL = REGIONS | QUEUES | {
    "tfnb.placeholder", "tfnb.constant", "tfnb.read", "tfnb.assign", "tfnb.group", "tfnb.guard", WITH_GRADIENT, CALL,
}  # fmt: skip
TRUSTED = frozenset({"aten", "prims", "tfnb"})  # namespaces that only compute
_PART = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def dispatched(packet: Any) -> Iterator[torch._ops.OpOverload]:
    """The overloads of a packet that the dispatcher has; others are TorchScript's alone."""
    for kind in packet.overloads():
        name = packet._qualified_op_name + ("" if kind == "default" else f".{kind}")
        if torch._C._dispatch_has_kernel(name):
            yield getattr(packet, kind)


@lru_cache(maxsize=8192)
def overload(op: str) -> torch._ops.OpOverload:
    """Torch's overload of a qualified name; raises UnknownOp naming op and namespace."""
    parts = op.split(".")
    if len(parts) != 3 or not all(map(_PART.fullmatch, parts)):
        raise UnknownOp(f"unknown op {op!r}: not of the form namespace.name.overload", op=op)
    space, name, kind = parts
    written = original(op)
    if written is not None:
        pure(overload(written))  # makes the twin
    try:
        torch._C._dispatch_find_schema_or_throw(f"{space}::{name}", "" if kind == "default" else kind)
        found = getattr(getattr(getattr(torch.ops, space), name), kind)
    except (RuntimeError, AttributeError) as error:
        cure = "import tfnb" if space == "tfnb" else f"import the library that registers {space} ops"
        cure = f"torch {torch.__version__} does not have it" if space in ("aten", "prims") else cure
        raise UnknownOp(f"unknown op {op} of namespace {space}: {cure}", op=op) from error
    return found
