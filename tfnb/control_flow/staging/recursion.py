"""`function`, and functions that call themselves: how a user's recursion is recorded. Semantics S-13.

A function whose branches all end by Python, or by sizes, is recorded in place, however often it calls itself. Where a
recorded value decides, both sides of the branch are recorded, and so without end: from the first such call on it is a
call of the graph, as `tfnb.recording.subgraphs.recursive_calls` records it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, update_wrapper
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import TreeSpec, tree_unflatten

from tfnb.control_flow.staging.statement import OPERATORS, as_number, status, tensor_of
from tfnb.control_flow.structure import flat, recorder_if_open, spec_of, tensors
from tfnb.errors import InvalidArgument
from tfnb.graph import Variable
from tfnb.recording import Recorder, Tensor
from tfnb.recording.marks.scopes import clean
from tfnb.recording.subgraphs.capture import Retry, retried
from tfnb.recording.subgraphs.recursive_calls import Definition, opened

LIMIT = 1000
_DEEP = 16  # calls in branches of each other that differ by numbers: from here on those are tensors
_named: WeakKeyDictionary[CodeType, bool] = WeakKeyDictionary()


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


def converted(function: Any) -> Any:
    """``function`` as converted code calls it; as it is, where none runs."""
    return OPERATORS.fn(function) if status.active else function


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
        self.calls_itself = False
        self.numbers: list[int] = []  # places of numbers that are others in each call
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


# -- functions that turn out to call themselves ----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Entered:
    """A call that is being recorded in place, and inside of how many branches of recorded values."""

    call: Call
    depth: int


def names_itself(code: CodeType) -> bool:
    """Whether a function has its own name in its code, so that it may call itself."""
    if code not in _named:
        _named[code] = code.co_name in set(_names(code))
    return _named[code]


def _names(code: CodeType) -> Iterator[str]:
    yield from itertools.chain(code.co_names, code.co_freevars)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


class Recursing(Function):
    """The user's ``function``, which may call itself, and what it was ``converted`` to."""

    def __init__(self, function: FunctionType, converted: FunctionType) -> None:
        super().__init__(converted)
        self._of = function

    @property
    def _key(self) -> Hashable:
        return self._of

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        recorder = recorder_if_open()
        if recorder is None or status.off:
            return self._of(*args, **kwargs)
        call = Call(self, recorder, args, kwargs)
        definition = recorder.calls.get(call.key)
        if definition is not None:
            return call.recorded(definition)
        mine = [entered for entered in status.calls if entered.call.of is self._of]
        same = [entered for entered in mine if entered.call.key == call.key]
        if any(other.depth < _depth() for other in same):
            same[-1].call.calls_itself = True
            raise Retry(same[-1].call)
        if len({entered.depth for entered in mine}) > _DEEP and (places := _numbers(mine[0].call, call)):
            mine[0].call.numbers = places
            raise Retry(mine[0].call)

        def record() -> Any:
            if call.calls_itself:
                with recorder.scope(self._name) as scope:
                    return self._recursive(call, scope)
            if call.numbers:
                for place in call.numbers:
                    call.leaves[place] = as_number(tensor_of(recorder, torch.as_tensor(call.leaves[place])))
                given, named = tree_unflatten(call.leaves, call.form)
                return self(*given, **named)
            with _entered(call):
                return self._fn(*args, **kwargs)

        return retried(call, record, recorder)


def _depth() -> int:
    """How many branches and loops that recorded values decide are around."""
    return status.depth - len(status.sized)


@contextmanager
def _entered(call: Call) -> Iterator[None]:
    status.calls.append(Entered(call, _depth()))
    try:
        yield
    finally:
        status.calls.pop()


def _numbers(first: Call, call: Call) -> list[int]:
    """Where two calls of the same form have other numbers."""
    if first.form != call.form:
        return []
    pairs = enumerate(zip(first.leaves, call.leaves, strict=True))
    return [i for i, (a, b) in pairs if type(a) in (int, float) and (type(a) is not type(b) or a != b)]
