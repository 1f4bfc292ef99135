"""Functions that are recorded as calls: those that the user says, and those that turn out to call themselves.

How such a function is converted is told by who makes it: this module knows nothing of AutoGraph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property, update_wrapper
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_unflatten

from tfnb.control_flow.structure import flat, recorder_if_open, spec_of, tensors
from tfnb.errors import InvalidArgument
from tfnb.graph import Variable
from tfnb.recording import Recorder, Tensor
from tfnb.recording.marks.scopes import clean
from tfnb.recording.subgraphs.capture import attempt
from tfnb.recording.subgraphs.recursive_calls import Again, Definition, opened

LIMIT = 1000


class Function:
    """What `function` returns."""

    def __init__(
        self, fn: Callable[..., Any], limit: int = LIMIT, convert: Callable[[Any], Any] = lambda fn: fn
    ) -> None:
        if limit < 1:
            raise InvalidArgument(f"limit is how deep a function may call itself: at least 1, not {limit}")
        update_wrapper(self, fn)
        self.limit = limit
        self._fn, self._convert, self._name = fn, convert, clean(getattr(fn, "__name__", "function").strip("<>"))

    @property
    def _key(self) -> Hashable:
        """Which function it is."""
        return self

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else _Method(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = recorder_if_open()
        if recorder is None:
            return self._fn(*args, **kwargs)
        call = Call(self, recorder, args, kwargs)
        if call.key in recorder.calls:
            definition = recorder.calls[call.key]
            if definition is None:
                raise Again(call.key)
            return call.recorded(definition)
        undo = attempt(recorder)
        try:
            with opened(recorder, call.key, None), recorder.scope(self._name) as scope:
                return self._convert(self._fn)(*args, **kwargs)
        except Again as again:
            if again.key != call.key:
                raise
            undo()
        return self._recursive(call, scope)

    def _recursive(self, call: Call, scope: str) -> Any:
        recorder = call.recorder
        definition = Definition(recorder, self._name, self.limit, [spec_of(t) for t in call.given])
        definition.generalise()

        def body(*given: Any) -> list[Any]:
            args, kwargs = call.arguments(given)
            leaves, definition.form = flat(self._convert(self._fn)(*args, **kwargs))
            return list(tensors(recorder, leaves, self._name))

        with recorder.scope(f"{scope}/"):
            with opened(recorder, call.key, definition):
                definition.define(body, scope)
            return call.recorded(definition)


class Call:
    """One call in a recording: tensors apart from what is fixed."""

    def __init__(self, of: Function, recorder: Recorder, args: Any, kwargs: Any) -> None:
        self.recorder, self.of, self._name = recorder, of._key, of._name
        self.leaves, self.form = flat((args, kwargs))
        self.places = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, (torch.Tensor, Variable))]
        kinds = [_kind(self.leaves[i]) for i in self.places]
        fixed = [_fixed(leaf) for i, leaf in enumerate(self.leaves) if i not in self.places]
        self.key: Hashable = (of._key, _text(self.form), tuple(self.places), tuple(fixed), tuple(kinds))

    @cached_property
    def given(self) -> list[Tensor]:
        """The tensors as recorded ones."""
        return tensors(self.recorder, [self.leaves[i] for i in self.places], self._name)

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


def _kind(leaf: torch.Tensor | Variable) -> Hashable:
    if isinstance(leaf, Variable):
        return leaf.spec.dtype, len(leaf.spec.shape), leaf.spec.device
    return leaf.dtype, leaf.dim(), leaf.device


def _fixed(leaf: Any) -> Hashable:
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return type(leaf), leaf


def _text(form: TreeSpec) -> str:
    return str(form)
