"""The table of overrides: torch calls with a recording of their own.

A row is registered with ``@override(Stage, *keys)``. The stages are in the order in which one call meets them. A row is
called with the recorder and the arguments of the call, and gives what the call would, or NotImplemented: then the call
goes on as if it had no row. Knows nothing of recordings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, TypeVar

Row = Callable[..., Any]
_Row = TypeVar("_Row", bound=Row)


class Stage(Enum):
    """The stages of a call at which an override may match, first to last."""

    MODULE = "a call of a module, by its class or a base of it; the row gives the forward to use for this call"
    AUTOGRAD = "a function or attribute of torch's autograd; the row gets the autograd state in place of the recorder"
    FUNCTION = "a torch function, before torch looks at the arguments: what torch would read as a number is still whole"
    ANSWER = "an op that answers Python: the row gives the samples' answer, with a note or a guard"
    OP = "an op, before it is taken apart; the row calls other ops"
    SHAPE = "an op that became a node: the row gives fake results for fake arguments, and is called with these alone"


OVERRIDES: dict[Stage, dict[Any, Row]] = {stage: {} for stage in Stage}


def override(stage: Stage, *keys: object) -> Callable[[_Row], _Row]:
    """Decorator: the function is the row of these ops, functions or classes at a stage.

    >>> @override(Stage.FUNCTION, len)
    ... def _len(rec, items):
    ...     return items.shape[0] if hasattr(items, "shape") else NotImplemented
    >>> OVERRIDES[Stage.FUNCTION].pop(len) is _len
    True
    """

    def register(row: _Row) -> _Row:
        rows = OVERRIDES[stage]
        for key in keys:
            if key in rows:
                raise ValueError(f"{key} has two rows at {stage.name}")
            rows[key] = row
        return row

    return register


def module_rows(kind: type) -> Iterator[Row]:
    """The rows at `Stage.MODULE` of a class and its bases, the nearest first."""
    rows = OVERRIDES[Stage.MODULE]
    return (rows[base] for base in kind.__mro__ if base in rows)
