"""Packs of layers: layers by module path, and consecutive layers in packs (semantics S-191, S-192). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from tfnb.graph import Node


def layers(nodes: Iterable[Node]) -> dict[int, int]:
    """The layer of each forward node that stands in a numbered child of a module, by its id.

    A layer is the module path up to its first number, such as ``model.h.3``; layers are in order of first use.
    """
    order: dict[tuple[str, ...], int] = {}
    found: dict[int, int] = {}
    for node in nodes:
        at = next((at for at, name in enumerate(node.scope) if name.isdecimal()), None)
        if at is not None and "gradient" not in node.tags and "update" not in node.tags:
            found[node.id] = order.setdefault(node.scope[: at + 1], len(order))
    return found


class LayerPacks(NamedTuple):
    """The pack of each layer in the forward pass, and in the backward pass; both ascend with the layers.

    Layers of the last backward pack have no forward piece of their own: their forward pass is a part of the backward.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def one_each(layers: int) -> LayerPacks:
    """A pack for each layer."""
    return LayerPacks(tuple(range(layers)), tuple(range(layers)))


def greedy(sizes: Sequence[float], capacity: float) -> list[int]:
    """The pack of each layer: a pack takes layers as long as its sum stays within the capacity.

    >>> greedy([3, 3, 3, 5], 6), greedy_reverse([3, 3, 3, 5], 6)
    ([0, 0, 1, 2], [0, 1, 1, 2])
    """
    packs, pack, total = [], 0, 0.0
    for at, size in enumerate(sizes):
        if at and total + size > capacity:
            pack, total = pack + 1, 0.0
        packs.append(pack)
        total += size
    return packs


def greedy_reverse(sizes: Sequence[float], capacity: float) -> list[int]:
    """`greedy` from the last layer, so that the first pack is the small one."""
    packs = greedy(sizes[::-1], capacity)[::-1]
    return [packs[0] - pack for pack in packs]


def balanced(sizes: Sequence[float], packs: int) -> list[int]:
    """The pack of each layer, by bytes or by seconds, with the least largest sum: exact, by dynamic programming.

    >>> balanced([4, 1, 1, 4, 2], 3)
    [0, 0, 1, 1, 2]
    """
    count, sums = len(sizes), [0.0, *accumulate(sizes)]
    packs = min(packs, count)
    best = [[sums[stop] for stop in range(count + 1)]]  # of the first layers, in one pack, in two ...
    cuts: list[list[int]] = [[0] * (count + 1)]
    for used in range(1, packs):
        row, cut = [0.0] * (count + 1), [0] * (count + 1)
        for stop in range(used + 1, count + 1):
            row[stop], cut[stop] = min(
                (max(best[-1][start], sums[stop] - sums[start]), start) for start in range(used, stop)
            )
        best.append(row)
        cuts.append(cut)
    found, stop = [0] * count, count
    for used in range(packs - 1, -1, -1):
        start = cuts[used][stop]
        found[start:stop] = [used] * (stop - start)
        stop = start
    return found
