"""`function`: a recorded function is one box of the graph, and may call itself. Semantics S-13."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import update_wrapper
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_unflatten

from tfnb.control_flow.staging.calls import converted
from tfnb.control_flow.structure import flat, recorder_if_open, spec_of, tensors
from tfnb.errors import InvalidArgument
from tfnb.graph import Variable
from tfnb.recording import Recorder, Tensor
from tfnb.recording.calls import Again, Definition, opened
from tfnb.recording.regions import attempt
from tfnb.recording.scopes import clean

LIMIT = 1000


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
        return lambda inner: Function(inner, limit)
    return Function(fn, limit)


class Function:
    """What `function` returns."""

    def __init__(self, fn: Callable[..., Any], limit: int = LIMIT) -> None:
        if limit < 1:
            raise InvalidArgument(f"limit is how deep a function may call itself: at least 1, not {limit}")
        update_wrapper(self, fn)
        self.limit = limit
        self._fn, self._name = fn, clean(getattr(fn, "__name__", "function").strip("<>"))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else _Method(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = recorder_if_open()
        if recorder is None:
            return self._fn(*args, **kwargs)
        call = _Call(self, recorder, args, kwargs)
        if call.key in recorder.calls:
            definition = recorder.calls[call.key]
            if definition is None:
                raise Again(call.key)
            return call.recorded(definition)
        undo = attempt(recorder)
        try:
            with opened(recorder, call.key, None), recorder.scope(self._name) as scope:
                return converted(self._fn)(*args, **kwargs)
        except Again as again:
            if again.key != call.key:
                raise
            undo()
        return self._recursive(call, scope)

    def _recursive(self, call: _Call, scope: str) -> Any:
        recorder = call.recorder
        definition = Definition(recorder, self._name, self.limit, [spec_of(t) for t in call.given])
        definition.generalise()

        def body(*given: Any) -> list[Any]:
            args, kwargs = call.arguments(given)
            leaves, definition.form = flat(converted(self._fn)(*args, **kwargs))
            return list(tensors(recorder, leaves, self._name))

        with recorder.scope(f"{scope}/"):
            with opened(recorder, call.key, definition):
                definition.define(body, scope)
            return call.recorded(definition)


class _Call:
    """One call in a recording: tensors apart from what is fixed."""

    def __init__(self, of: Function, recorder: Recorder, args: Any, kwargs: Any) -> None:
        self.recorder = recorder
        self.leaves, self.form = flat((args, kwargs))
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, (torch.Tensor, Variable))]
        self.given: list[Tensor] = tensors(recorder, [self.leaves[i] for i in self.places], of._name)
        kinds = [(s.dtype, len(s.shape), s.device) for s in map(spec_of, self.given)]
        fixed = [_fixed(leaf) for i, leaf in enumerate(self.leaves) if i not in self.places]
        self.key: Hashable = (of, _text(self.form), tuple(self.places), tuple(fixed), tuple(kinds))

    def arguments(self, given: Any) -> Any:
        """What the function is called with, for these tensors."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, given, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self.form)

    def recorded(self, definition: Definition) -> Any:
        """The results of a node."""
        found = definition.call(self.given)
        return tree_unflatten(found, definition.form)


class _Method:
    """A function of a class, called on one object."""

    def __init__(self, of: Function, instance: Any) -> None:
        self._of, self._instance = of, instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._of(self._instance, *args, **kwargs)


def _fixed(leaf: Any) -> Hashable:
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return type(leaf), leaf


def _text(form: TreeSpec) -> str:
    return str(form)
