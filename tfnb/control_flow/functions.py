"""`function`: a recorded function is one box of the graph, and may call itself. Semantics S-13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfnb.control_flow.recursion import LIMIT, Function
from tfnb.control_flow.staging.calls import converted


def function(fn: Callable[..., Any] | None = None, *, limit: int = LIMIT) -> Any:
    """A function whose nodes are one box under its name, and which may call itself.

    Tensors among its arguments, in lists, tuples and dicts, may be of any dtype and shape in each call; what else it is
    given is fixed while it is recorded. A function that calls nothing of its own is recorded in place. One that calls
    itself, at once or by others, becomes a node with a body: a `tfnb.cond` inside decides in each run how deep it goes.
    It may use tensors and Variables around it, and not write them. Such a function is called several times while it is
    recorded. Outside a recording it is just called.

    Raises InvalidArgument for a function that calls itself on every way, or with arguments that its body does not fit;
    a run, ResourceExhausted for a recursion that is deeper than ``limit``.

    >>> import torch, tfnb
    >>> @tfnb.function
    ... def factorial(n):
    ...     return tfnb.cond(n <= 1, lambda: torch.ones_like(n), lambda: n * factorial(n - 1))
    >>> with tfnb.record():
    ...     n = tfnb.placeholder(torch.tensor(3.0), name="n")
    ...     y = factorial(n)
    ...     dy, = tfnb.gradients(y, [n])  # d n (n - 1) / dn, as the recursion ends at one
    >>> tfnb.run([y, dy], {n: 5.0})
    [tensor(120.), tensor(154.)]
    """
    if fn is None:
        return lambda inner: Function(inner, limit, converted)
    return Function(fn, limit, converted)
