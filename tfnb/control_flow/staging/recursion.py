"""`function`, and functions that call themselves: how a user's recursion is recorded. Semantics S-13.

A call of the graph is recorded by `tfnb.recording.subgraphs.recursive_calls`. A function that nobody marked is
recorded in place, however often it calls itself; where a recorded value decides about that, `Statement.body` refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, update_wrapper
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_unflatten

from tfnb.control_flow.staging.statement import OPERATORS, status
from tfnb.control_flow.structure import flat, recorder_if_open, spec_of, tensors
from tfnb.errors import InvalidArgument
from tfnb.graph import Variable
from tfnb.recording import Recorder, Tensor
from tfnb.recording.marks.scopes import clean
from tfnb.recording.subgraphs.capture import Retry, retried
from tfnb.recording.subgraphs.recursive_calls import RecursiveDefinition, opened

LIMIT = 1000


def function(fn: Callable[..., Any] | None = None, *, limit: int = LIMIT) -> Any:
    """A function drawn as one box under its name, possibly recursive.

    Tensors among its arguments, in lists, tuples and dicts, may be of any dtype and shape in each call; what else it is
    given is fixed while it is recorded. A function that does not call itself is recorded in place. One that calls
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


def converted(function: Callable[..., Any]) -> Any:
    """``function`` as called from converted code; unchanged outside of converted code."""
    return OPERATORS.fn(function) if status.active else function


class Function:
    """The callable that `function` returns."""

    def __init__(
        self, fn: Callable[..., Any], limit: int = LIMIT, convert: Callable[[Any], Any] = lambda fn: fn
    ) -> None:
        if limit < 1:
            raise InvalidArgument(f"limit is how deep a function may call itself: at least 1, not {limit}")
        update_wrapper(self, fn)
        self.limit = limit
        self._fn, self._convert, self._name = fn, convert, clean(getattr(fn, "__name__", "function").strip("<>"))

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else _Method(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = recorder_if_open()
        if recorder is None:
            return self._fn(*args, **kwargs)
        call = Call(self, recorder, args, kwargs)
        known = recorder.calls.get(call.key)
        if isinstance(known, Call):
            known.calls_itself = True
            raise Retry(known)
        if known is not None:
            return call.recorded(known)

        def record() -> Any:
            if call.calls_itself:
                return self._recursive(call, scope)
            with opened(recorder, call.key, call):
                return self._convert(self._fn)(*args, **kwargs)

        with recorder.scope(self._name) as scope:
            return retried(call, record, recorder)

    def _recursive(self, call: Call, scope: str) -> Any:
        recorder = call.recorder
        definition = RecursiveDefinition(recorder, self._name, self.limit, [spec_of(t) for t in call.given])
        definition.generalise()

        def body(*given: object) -> list[Any]:
            args, kwargs = call.arguments(given)
            leaves, definition.form = flat(self._convert(self._fn)(*args, **kwargs))
            return list(tensors(recorder, leaves, self._name))

        with recorder.scope(f"{scope}/"):
            with opened(recorder, call.key, definition):
                definition.define(body, scope)
            return call.recorded(definition)


class Call:
    """One call in a recording, with tensors separated from fixed arguments."""

    def __init__(self, of: Function, recorder: Recorder, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.recorder, self.of, self._name = recorder, of, of._name
        self.leaves, self.form = flat((args, kwargs))
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, (torch.Tensor, Variable))]
        kinds = [_kind(self.leaves[i]) for i in self.places]
        fixed = [_fixed(leaf) for i, leaf in enumerate(self.leaves) if i not in self.places]
        self.calls_itself = False
        self.key: Hashable = (of, _text(self.form), tuple(self.places), tuple(fixed), tuple(kinds))

    @cached_property
    def given(self) -> list[Tensor]:
        """The tensors as recorded ones."""
        return tensors(self.recorder, [self.leaves[i] for i in self.places], self._name)

    def arguments(self, given: Sequence[Any]) -> Any:
        """The arguments of the function, with these tensors in their places."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, given, strict=True):
            leaves[place] = tensor
        return tree_unflatten(leaves, self.form)

    def recorded(self, definition: RecursiveDefinition) -> Any:
        """The results of a node."""
        found = definition.call(self.given)
        return tree_unflatten(found, definition.form)


class _Method:
    """A function of a class, called on one object."""

    def __init__(self, of: Function, instance: object) -> None:
        self._of, self._instance = of, instance

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self._of(self._instance, *args, **kwargs)


def _kind(leaf: torch.Tensor | Variable) -> Hashable:
    if isinstance(leaf, Variable):
        return leaf.spec.dtype, len(leaf.spec.shape), leaf.spec.device
    return leaf.dtype, leaf.dim(), leaf.device


def _fixed(leaf: object) -> Hashable:
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return type(leaf), leaf


def _text(form: TreeSpec) -> str:
    return str(form)
