"""torch's own operators of control flow in a recording: `torch.cond` and its kin, as branches and loops of the graph.

They are called by functions of torch that look at their arguments first; what reaches these is flat. Other operators
that call functions are recorded as what torch computes them by, or refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DispatchKey

from tfnb.errors import Unsupported
from tfnb.recording.overrides.override_table import Row, Stage, override
from tfnb.recording.values.recording import Recording

Function = Callable[..., Any]


def _flow() -> Any:
    import tfnb.control_flow  # listed exception: control_flow stands above

    return tfnb.control_flow


def _cond(rec: Recording, pred: Any, then: Function, other: Function, operands: Sequence[Any] = ()) -> Any:
    return _flow().cond(pred, then, other, *operands)


def _while(rec: Recording, cond: Function, body: Function, carried: Sequence[Any], more: Sequence[Any] = ()) -> Any:
    return _flow().while_loop(
        lambda *state: cond(*state, *more), lambda *state: tuple(body(*state, *more)), tuple(carried)
    )  # fmt: skip


def _scan(
    rec: Recording, combine: Function, init: Sequence[Any], xs: Sequence[Any], more: Sequence[Any] = ()
) -> list[Any]:
    count = len(init)

    def iteration(carry: Any, rows: Any) -> Any:
        found = combine(*carry, *rows, *more)
        return tuple(found[:count]), tuple(found[count:])

    carry, ys = _flow().scan(iteration, tuple(init), tuple(xs))
    return [*carry, *ys]


def _map(rec: Recording, function: Function, xs: Sequence[Any], more: Sequence[Any] = ()) -> Any:
    return _flow().map_fn(lambda rows: function(*rows, *more), tuple(xs))


_FORMS: dict[str, Row] = {"cond": _cond, "while_loop": _while, "scan": _scan, "map_impl": _map}
for _name, _function in _FORMS.items():
    if hasattr(torch.ops.higher_order, _name):  # not all of them are in every release
        override(Stage.FUNCTION, getattr(torch.ops.higher_order, _name))(_function)
_PLAIN = frozenset({"flex_attention"})  # torch computes it by tensor code


def call(rec: Recording, op: Any, args: Any, kwargs: Any) -> Any:
    """Record a call of another operator that calls functions. Raises Unsupported where it has no form in a graph."""
    plain = op.py_kernels.get(DispatchKey.CompositeExplicitAutograd) if op.name() in _PLAIN else None
    if plain is None:
        raise Unsupported(
            f"torch's operator {op.name()} calls functions, and is not recorded: write it with tfnb.cond, while_loop, "
            f"scan, fold or map_fn, or as plain tensor code{rec.tape.at()}"
        )
    with rec.on():
        return plain(*args, **kwargs)
