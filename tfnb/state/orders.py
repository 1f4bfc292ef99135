"""Orders of queues: the sequence of the elements, and how many may be taken. One small class for each kind of queue.

What waits, and who comes next, is the business of `tfnb.state.queue_machine`, which is the same for all of them.
Pure; the owner calls with its lock held. Semantics S-77 to S-80.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from tfnb.errors import InvalidArgument

Element = Sequence[torch.Tensor]


class Order(Protocol):
    """The elements that a queue stores. ``noun``: the elements' name in messages."""

    noun: str

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Element]: ...

    def spare(self, closed: bool, required: int) -> int:
        """The number of elements ready for a dequeue that needs at least ``required`` of them stored."""

    def put(self, element: Element) -> bool:
        """Add an element; False if the order drops the element."""

    def take(self) -> Element:
        """The element that comes next."""

    def put_back(self, element: Element, place: int) -> None:
        """An element that was taken comes next again, behind ``place`` others that came back, too."""

    def contents(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """The complete contents, as JSON and tensors; `fill` restores them."""

    def fill(self, facts: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        """Restore the `contents` of another order of the same class."""

    def begun(self) -> Iterable[tuple[int, torch.Tensor]]:
        """The parts of incomplete elements: their places in an element, and tensors."""

    def takes_late(self, elements: Sequence[Element]) -> bool:
        """Whether the elements may be put even after the queue was closed."""

    def coming(self) -> int:
        """The number of elements that may still come after the queue is closed."""

    def cancel(self) -> None:
        """Drop incomplete elements: the queue was closed, and their other parts cannot come any more."""


class Whole:
    """Elements that are put as a whole: none is to come after a close."""

    def begun(self) -> Iterable[tuple[int, torch.Tensor]]:
        """Nothing."""
        return ()

    def takes_late(self, elements: Sequence[Element]) -> bool:
        """None."""
        return False

    def coming(self) -> int:
        """None."""
        return 0

    def cancel(self) -> None:
        """Nothing was begun."""

    def contents(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Its elements."""
        return packed(self)  # type: ignore[arg-type]

    def fill(self, facts: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        """Put the saved elements."""
        for element in unpacked(facts, tensors):
            self.put(element)  # type: ignore[attr-defined]


def packed(elements: Iterable[Element]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Elements as the number of tensors of each, and all tensors."""
    found = list(elements)
    return {"lengths": [len(element) for element in found]}, [tensor for element in found for tensor in element]


def unpacked(facts: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> list[Element]:
    """The elements that were packed."""
    left = iter(tensors)
    return [tuple(next(left) for _ in range(length)) for length in facts["lengths"]]


class Arrival(Whole, deque[Element]):
    """First in, first out.

    >>> line = Arrival("abc")
    >>> first, second = line.take(), line.take()
    >>> line.put_back(second, 0), line.put_back(first, 0), list(line)
    (None, None, ['a', 'b', 'c'])
    """

    noun = "elements"

    def spare(self, closed: bool, required: int = 1) -> int:
        """All elements."""
        return len(self)

    take = deque.popleft

    def put(self, element: Element) -> bool:
        """Append the element."""
        self.append(element)
        return True

    def put_back(self, element: Element, place: int) -> None:
        """Insert the element at ``place``, counted from the front."""
        self.insert(place, element)


class ShuffledOrder(Whole):
    """Any element may come next, each as likely as the others; ``least`` stay until the queue is closed.

    What comes is a function of the seed and of what was done before.

    >>> pool = ShuffledOrder(least=2, seed=0)
    >>> for word in "abcd":
    ...     _ = pool.put(word)
    >>> pool.spare(closed=False), pool.spare(closed=True), sorted(pool.take() for _ in range(4))
    (2, 4, ['a', 'b', 'c', 'd'])
    """

    noun = "elements"

    def __init__(self, least: int, seed: int | None) -> None:
        self.least = least
        self._elements: list[Element] = []
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return len(self._elements)

    def __iter__(self) -> Iterator[Element]:
        return iter(self._elements)

    def spare(self, closed: bool, required: int = 1) -> int:
        """All elements but ``least``, which stay for mixing; all of a closed queue."""
        return len(self) if closed else max(0, len(self) - self.least)

    def put(self, element: Element) -> bool:
        """One element more."""
        self._elements.append(element)
        return True

    def take(self) -> Element:
        """One that chance picks; the last one fills its place."""
        found = self._elements
        place = self._random.randrange(len(found))
        found[place], found[-1] = found[-1], found[place]
        return found.pop()

    def put_back(self, element: Element, place: int) -> None:
        """Return the element to the pool, from where elements are picked at random."""
        self._elements.append(element)

    def contents(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Its elements, and the state of chance."""
        facts, tensors = super().contents()
        return facts | {"random": self._random.getstate()}, tensors

    def fill(self, facts: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        """Put the saved elements, and restore the state of the random generator."""
        super().fill(facts, tensors)
        version, numbers, gauss = facts["random"]
        self._random.setstate((version, tuple(numbers), gauss))


class RankedOrder(Whole):
    """A priority queue: the element whose first tensor is smallest comes next; equal ones in order of arrival.

    >>> ranked = RankedOrder()
    >>> for element in [(2, "a"), (1, "b"), (1, "c")]:
    ...     _ = ranked.put(element)
    >>> first = ranked.take()
    >>> ranked.put_back(first, 0)
    >>> [word for _, word in ranked]
    ['b', 'c', 'a']
    """

    noun = "elements"

    def __init__(self) -> None:
        self._elements: list[Element] = []  # the next one is the last
        self._ranks: list[int] = []  # of each, negative, so that they grow

    def __len__(self) -> int:
        return len(self._elements)

    def __iter__(self) -> Iterator[Element]:
        return reversed(self._elements)

    def spare(self, closed: bool, required: int = 1) -> int:
        """All elements, once there are enough: a later one may have a smaller rank."""
        return len(self) if closed or len(self) >= required else 0

    def put(self, element: Element) -> bool:
        """Insert the element behind all elements of its rank."""
        self._insert(bisect_left, element)
        return True

    def take(self) -> Element:
        """The one of the smallest rank."""
        self._ranks.pop()
        return self._elements.pop()

    def put_back(self, element: Element, place: int) -> None:
        """Insert the element before all elements of its rank."""
        self._insert(bisect_right, element)

    def _insert(self, side: Callable[[list[int], int], int], element: Element) -> None:
        rank = -int(element[0])
        place = side(self._ranks, rank)
        self._ranks.insert(place, rank)
        self._elements.insert(place, element)


class KeyedOrder:
    """Elements that come in parts, under a key. Complete elements may be taken, in the order of their keys' first
    parts.

    What is put: the number of a part, the key, the part. What is taken: a number that grows with each new key, the key,
    all parts. A key may be used again once its element is whole.

    >>> keyed = KeyedOrder(parts=2)
    >>> [keyed.put(p) for p in [(0, 7, "a"), (0, 5, "b"), (1, 5, "B")]], len(keyed), keyed.coming()
    ([True, True, True], 1, 1)
    >>> keyed.put((1, 7, "A")), [(int(at), int(key), *parts) for at, key, *parts in keyed]
    (True, [(0, 7, 'a', 'A'), (1, 5, 'b', 'B')])
    """

    noun = "whole elements"

    def __init__(self, parts: int) -> None:
        self._count = 0
        self._parts = parts
        self._begun: dict[int, tuple[int, dict[int, torch.Tensor]]] = {}  # number and parts of each key
        self._whole: list[tuple[int, Element]] = []  # in the order of their numbers

    def __len__(self) -> int:
        return len(self._whole)

    def __iter__(self) -> Iterator[Element]:
        return (element for _, element in self._whole)

    def spare(self, closed: bool, required: int = 1) -> int:
        """All complete elements."""
        return len(self)

    def put(self, element: Element) -> bool:
        """One part more; raises InvalidArgument for a part that its key has."""
        part, key = int(element[0]), int(element[1])
        number, found = self._begun.get(key, (self._count, {}))
        if part in found:
            raise InvalidArgument(f"key {key} has part {part} already")
        if key not in self._begun:
            self._count += 1
            self._begun[key] = number, found
        found[part] = element[2]
        if len(found) == self._parts:
            del self._begun[key]
            ends = torch.tensor(number), torch.tensor(key)
            self.put_back((*ends, *(found[place] for place in range(self._parts))), 0)
        return True

    def take(self) -> Element:
        """The one whose key came first."""
        return self._whole.pop(0)[1]

    def put_back(self, element: Element, place: int) -> None:
        """Insert the element at the place of its key."""
        insort(self._whole, (int(element[0]), element), key=lambda found: found[0])

    def begun(self) -> Iterable[tuple[int, torch.Tensor]]:
        """The parts of incomplete elements; in an element, parts stand behind the number and the key."""
        return [(2 + place, part) for _, found in self._begun.values() for place, part in found.items()]

    def takes_late(self, elements: Sequence[Element]) -> bool:
        """Parts of elements that were begun."""
        return all(int(key) in self._begun for _, key, _ in elements)

    def coming(self) -> int:
        """The number of incomplete elements."""
        return len(self._begun)

    def cancel(self) -> None:
        """Drop incomplete elements."""
        self._begun.clear()

    def contents(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """The complete elements, and the parts of the incomplete ones."""
        facts, tensors = packed(self)
        begun = [[key, number, list(parts)] for key, (number, parts) in self._begun.items()]
        parts = [part for _, found in self._begun.values() for part in found.values()]
        return facts | {"count": self._count, "begun": begun}, tensors + parts

    def fill(self, facts: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        """Restore complete elements, and the parts of incomplete ones."""
        self._count = facts["count"]
        for element in unpacked(facts, tensors):
            self.put_back(element, 0)
        left = iter(tensors[sum(facts["lengths"]) :])
        for key, number, places in facts["begun"]:
            self._begun[key] = number, {place: next(left) for place in places}


ORDERS: Mapping[str, Callable[[Mapping[str, Any]], Order]] = {
    "fifo": lambda options: Arrival(),
    "padding": lambda options: Arrival(),
    "shuffle": lambda options: ShuffledOrder(options["min_after_dequeue"], options["seed"]),
    "priority": lambda options: RankedOrder(),
    "barrier": lambda options: KeyedOrder(options["parts"]),
}
"""The order of each kind of queue, made of the queue's options."""
