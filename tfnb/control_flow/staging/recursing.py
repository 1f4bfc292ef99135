"""Functions that call themselves where a run decides how deep: they become `tfnb.function` by themselves.

A function whose branches all end by Python, or by sizes, is recorded in place, however often it calls itself. Where a
recorded value decides, both sides of the branch are recorded, and so without end: from the first such call on it is a
recursion of the graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_unflatten

from tfnb.control_flow.recursion import Call, Function
from tfnb.control_flow.staging.statement import as_number, status, tensor_of
from tfnb.control_flow.structure import recorder_if_open
from tfnb.recording.subgraphs.capture import attempt
from tfnb.recording.subgraphs.recursive_calls import Again

_DEEP = 16  # calls in branches of each other that differ by numbers: from here on those are tensors
_named: WeakKeyDictionary[CodeType, bool] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Entered:
    """A call that is being recorded in place, and inside of how many branches of recorded values."""

    call: Call
    depth: int


class _Numbers(BaseException):
    """A function calls itself with other and other numbers: ``call`` began it, with those in ``places``."""

    def __init__(self, call: Call, places: list[int]) -> None:
        self.call, self.places = call, places


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
        if any(other.call.key == call.key and other.depth < _depth() for other in mine):
            raise Again(call.key)
        if len({entered.depth for entered in mine}) > _DEEP and (places := _numbers(mine[0].call, call)):
            raise _Numbers(mine[0].call, places)
        undo = attempt(recorder)
        try:
            with _entered(call):
                return self._fn(*args, **kwargs)
        except Again as again:
            if again.key != call.key:
                raise
            undo()
            with recorder.scope(self._name) as scope:
                return self._recursive(call, scope)
        except _Numbers as numbers:
            if numbers.call is not call:
                raise
            undo()
            for place in numbers.places:
                call.leaves[place] = as_number(tensor_of(recorder, torch.as_tensor(call.leaves[place])))
        args, kwargs = tree_unflatten(call.leaves, call.form)
        return self(*args, **kwargs)


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
