"""The thread's stack of open recordings, and the interface of a recording for the rooms below `tfnb.recording`.

Only the stack: what a recording does is `tfnb.recording`'s. Everything that differs inside a recording asks here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.graph.setting import setting

if TYPE_CHECKING:
    from tfnb.graph.graph import Graph
    from tfnb.graph.node import Node
    from tfnb.graph.variable import Variable


P = ParamSpec("P")
R = TypeVar("R")


class Autograd(Protocol):
    """Gradients and hooks of an open recording; `tfnb.eager` implements the protocol."""

    @property
    def hooks(self) -> Mapping[Any, Mapping[int, Callable[..., Any]]]: ...  # by value

    def grad(self, tensor: torch.Tensor | Variable) -> torch.Tensor | None: ...

    def set_grad(self, tensor: torch.Tensor | Variable, grad: torch.Tensor | None = None) -> None: ...

    def held(self, holder: torch.Tensor | Variable) -> torch.Tensor | None: ...

    def present(self, holder: torch.Tensor | Variable) -> torch.Tensor | None: ...

    def saved(self) -> Any: ...

    def put_back(self, saved: Any) -> None: ...

    def holders(self) -> list[Any]: ...

    def changed_since(self, saved: Any) -> list[Any]: ...

    def left(self) -> dict[Any, Any]: ...

    def differs(self, holder: Any, left: Any) -> bool: ...

    def join(self, holder: Any, grad: Any, taken: Any, sides: Any) -> None: ...


class OpenRecording(Protocol):
    """An open recording, as the rooms above `tfnb.graph` use one."""

    @property
    def graph(self) -> Graph: ...

    @property
    def tape(self) -> Any: ...

    def node(self, node_id: int) -> Node: ...

    def read(self, variable: Variable) -> torch.Tensor: ...

    def look(self, tensor: Any) -> Any: ...

    def write(self, var: Variable, kind: str, *args: object) -> torch.Tensor: ...

    @property
    def autograd(self) -> Autograd: ...

    def escaped(self, value: object, how: str) -> None: ...

    def is_taken(self, tensor: Any) -> bool: ...

    def text_of(self, how: str) -> None: ...

    def branch(
        self, tensor: torch.Tensor, outcome: bool, *, is_check: bool = False, raises: str | None = None
    ) -> None: ...


class _Stack(threading.local):
    def __init__(self) -> None:
        self.open: list[OpenRecording] = []
        self.left: list[OpenRecording] = []  # those around a run, which is no part of them
        self.used_outside = deque[Callable[[], Any]](
            maxlen=1
        )  # the last recorded tensor in an op outside, while it lives


stack = _Stack()
extensions: list[Callable[[Any], AbstractContextManager[None]]] = []
"""What every recording opens with: registered by the rooms above, called with the recorder."""


def recording() -> OpenRecording | None:
    """The innermost open recording of this thread."""
    return stack.open[-1] if stack.open else None


def open_of(graph: Graph) -> OpenRecording | None:
    """The open recording of this thread that records into a graph, also from within a run."""
    return next((recording for recording in (*stack.left, *stack.open) if recording.graph is graph), None)


def unrecorded(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose work belongs to no recording that is open where it is called, such as a run of another graph.

    >>> import torch, tfnb
    >>> with tfnb.record():
    ...     double = tfnb.placeholder(torch.ones(2)) * 2
    >>> with tfnb.record() as graph:
    ...     found = tfnb.run(double, {double.node.inputs[0]: torch.ones(2)})
    >>> found, len(graph.nodes)
    (tensor([2., 2.]), 0)
    """

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        __tracebackhide__ = True
        if not stack.open:
            return function(*args, **kwargs)
        with setting(stack, open=[], left=[*stack.left, *stack.open]), _disable_current_modes():
            return function(*args, **kwargs)

    return called


def is_recorded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a recorded one."""
    return hasattr(type(tensor), "sample")


def plain(value: Any) -> Any:
    """A recorded tensor's sample; anything else unchanged."""
    if type(value) is torch.Tensor or not isinstance(value, torch.Tensor):
        return value
    return getattr(value, "sample", value)
