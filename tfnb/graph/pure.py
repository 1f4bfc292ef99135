"""Out-of-place twins of custom ops that write into their arguments: ops of the namespace ``tfnb_pure``.

The twin of ``lib::op`` is ``tfnb_pure::lib__op``. It copies what the op would write, runs the op on the copies, and
returns them, then what the op returns. Twins are made when first asked for, also by name in a graph file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

SPACE = "tfnb_pure"
_ALIAS = re.compile(r"\([a-z]\w*!?( -> [^)]*)?\)")
_made: list[torch.library.Library] = []  # a library that is collected takes its ops away


@lru_cache(maxsize=1024)
def pure(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The out-of-place twin of an op that writes plain tensor arguments; None if the op writes lists or optional
    tensors.
    """
    schema = op._schema
    written, fresh = _written(op), _fresh(op)
    if not written or any(str(a.type) != "Tensor" for a in schema.arguments if a.name in written):
        return None
    space, _, base = schema.name.partition("::")
    name = f"{space}__{base}" + (f".{op._overloadname}" if op._overloadname != "default" else "")
    arguments = _ALIAS.sub("", str(schema).partition("::")[2].rpartition(" -> ")[0]).partition("(")[2]
    returned = [str(schema.returns[i].type).replace("List[Tensor]", "Tensor[]") for i in fresh]
    library = torch.library.Library(SPACE, "FRAGMENT")
    _made.append(library)
    library.define(f"{name}({arguments} -> ({', '.join([*('Tensor' for _ in written), *returned])})")
    library.impl(name, on_copies(op, op), "CompositeExplicitAutograd")
    return getattr(getattr(getattr(torch.ops, SPACE), f"{space}__{base}"), op._overloadname)


def original(name: str) -> str | None:
    """``lib.op.overload`` for the name ``tfnb_pure.lib__op.overload`` of a twin; None for another op."""
    space, _, rest = name.partition(".")
    return rest.replace("__", ".", 1) if space == SPACE else None


def on_copies(op: torch._ops.OpOverload, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The function of the twin of ``op``: clone the written arguments, then run ``kernel`` on the clones."""
    names = [a.name for a in op._schema.arguments]
    written, fresh = _written(op), _fresh(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        given |= {name: given[name].clone() for name in written}
        positional = [given[name] for name in names[: len(args)]]
        result = kernel(*positional, **{name: given[name] for name in kwargs})
        results = result if isinstance(result, tuple) else (result,)
        outs = (*(given[name] for name in written), *(results[i] for i in fresh))
        return outs[0] if len(outs) == 1 else outs

    return run


def _written(op: torch._ops.OpOverload) -> list[str]:
    return [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def _fresh(op: torch._ops.OpOverload) -> list[int]:
    """Places of the results that are new tensors."""
    return [i for i, r in enumerate(op._schema.returns) if r.alias_info is None]
