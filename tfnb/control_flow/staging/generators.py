"""Generators of the user's: a loop over one runs its code, with the body of the loop at each ``yield``.

The loops and branches of the generator then carry what the loop over it carries, and its loops end where that one is
left. What asks for one item after the other, as ``next`` and ``zip`` do, gets them from Python's generator.
"""

from __future__ import annotations

import functools
from collections import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

from tfnb.control_flow.frontend.source import bound
from tfnb.control_flow.staging.branching import branched
from tfnb.control_flow.staging.statement import OPERATORS, Setter, State, Statement, as_number, recorder_for, status
from tfnb.errors import Unsupported


@dataclass(frozen=True)
class Consumer:
    """A loop over a generator: its body, an optional test for continuing, and its carried names."""

    body: Callable[[Any], Any]
    more: Callable[[], Any] | None
    get: Callable[[], tuple[Any, ...]]
    set: Callable[[Any], None]
    names: tuple[str, ...]

    def carrying(self, name: str, slot: list[Any]) -> Consumer:
        """The same with the value in a list of one as another name."""

        def set_(values: Sequence[Any]) -> None:
            slot[0] = values[0]
            self.set(tuple(values[1:]))

        return replace(self, get=lambda: (slot[0], *self.get()), set=set_, names=(name, *self.names))


class Generator(abc.Generator[Any, Any, Any]):
    """A generator that has not begun: ``plain`` is Python's, and ``loop`` runs the code for a consumer."""

    def __init__(self, plain: Iterator[Any], loop: Callable[[Consumer], None]) -> None:
        self.plain, self._loop = plain, loop
        self.has_begun, self.left = False, ""

    def send(self, value: object) -> Any:
        """Send a value to the generator, like `next`."""
        if self.left:
            raise Unsupported(self.left)
        self.has_begun = True
        return self.plain.send(value) if isinstance(self.plain, abc.Generator) else next(self.plain)

    def throw(self, *error: Any) -> Any:
        """As Python's."""
        if not isinstance(self.plain, abc.Generator):
            raise error[0]
        return self.plain.throw(*error)

    def loop(self, consumer: Consumer) -> None:
        """Go over all items."""
        if self.has_begun:
            for each in self:
                if not _emitted(consumer, each):
                    return
            return
        depth, self.has_begun = status.depth, True
        left = _Left()

        def body(value: object) -> None:
            if not _emitted(consumer, value) and status.depth == depth:
                raise left

        try:
            self._loop(replace(consumer, body=body))
        except _Left as why:
            if why is not left:
                raise
        if consumer.more is None:
            self.plain = iter(())
        else:
            self.left = "a loop in a recording that has a `break` ends the generator that it goes over"

    def numbered(self, start: Any) -> Generator:
        """As ``enumerate`` gives them."""

        def loop(consumer: Consumer) -> None:
            count = [start]

            def body(value: object) -> None:
                index, count[0] = count[0], as_number(count[0] + 1)
                consumer.body((index, value))

            self.loop(replace(consumer, body=body).carrying("the number of enumerate", count))

        return Generator(enumerate(self.plain, start), loop)


class _Left(BaseException):  # the user's `except Exception` is not meant
    """A loop over a generator was left, and the generator ends."""


def _emitted(consumer: Consumer, value: object) -> bool:
    """Run the body for an item, unless the loop was left; returns whether the loop may go on in some run."""
    if consumer.more is None:
        consumer.body(value)
        return True
    test = consumer.more()
    recorder = recorder_for(test)
    if recorder is not None:
        st = Statement("for", recorder, consumer.names, consumer.get, consumer.set)
        branched(st, test, functools.partial(consumer.body, value), _nothing, len(consumer.names))
    elif test:
        consumer.body(value)
    goes_on = consumer.more()
    return recorder_for(goes_on) is not None or bool(goes_on)


def _nothing() -> None:
    pass


def generator_function(function: FunctionType, factory: CodeType) -> Callable[..., Generator]:
    """The function that gives a `Generator`, from the factory of its converted code."""

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Generator:
        def loop(consumer: Consumer) -> None:
            bound(factory, function, _operators(consumer))(*args, **kwargs)

        return Generator(function(*args, **kwargs), loop)

    return call


def _operators(consumer: Consumer) -> SimpleNamespace:
    """The operators of a generator's code: its statements carry the names of the consumer before their own."""
    own = OPERATORS

    def joined(get: State, set_: Setter, names: tuple[str, ...]) -> tuple[State, Setter, tuple[str, ...]]:
        count = len(consumer.names)

        def set_both(values: Sequence[Any]) -> None:
            consumer.set(tuple(values[:count]))
            set_(tuple(values[count:]))

        return lambda: (*consumer.get(), *get()), set_both, (*consumer.names, *names)

    def more(test: Callable[[], Any] | None) -> Callable[[], Any] | None:
        if consumer.more is None or test is None:
            return consumer.more or test
        first = consumer.more
        return lambda: own.and_(first(), test)

    def if_stmt(
        test: object, body: Callable[[], None], orelse: Callable[[], None], get: State, set_: Setter,
        names: tuple[str, ...], wanted: int,
    ) -> None:  # fmt: skip
        own.if_stmt(test, body, orelse, *joined(get, set_, names), len(consumer.names) + wanted)

    def while_stmt(
        test: Callable[[], Any], body: Callable[[], None], get: State, set_: Setter,
        names: tuple[str, ...], options: dict[str, Any],
    ) -> None:  # fmt: skip
        own.while_stmt(more(test), body, *joined(get, set_, names), options)

    def for_stmt(
        items: Iterable[Any], test: Callable[[], Any] | None, body: Callable[[Any], None], get: State, set_: Setter,
        names: tuple[str, ...], options: dict[str, Any],
    ) -> None:  # fmt: skip
        own.for_stmt(items, more(test), body, *joined(get, set_, names), options)

    return SimpleNamespace(
        **vars(own) | {"if_stmt": if_stmt, "while_stmt": while_stmt, "for_stmt": for_stmt, "yield_": consumer.body}
    )
