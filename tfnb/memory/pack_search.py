"""The search for the packs and microbatches of a step on a byte budget, by simulated time. Pure.

A point of the space is a packing of the forward pass, one of the backward pass, and a number of microbatches. Harmony,
whose search this follows, chooses a number of microbatches for each pass. Here both have one, as a backward pass does
its forward pass anew: with the same rows it has the same bits, dropout and batch norm included. Pieces of packs are put
together from those of single layers (`packed`), so that a point is simulated without cutting the step again; the point
that is chosen is cut, and measured exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import product
from math import inf, prod
from typing import Any

from tfnb.memory.lane_clock import lane_times
from tfnb.memory.moves import MovePolicy, need, schedule
from tfnb.memory.pack_tasks import DeviceItem, PackPiece, Phase, Role, tasks_of
from tfnb.memory.packs import LayerPacks, balanced

SMALL = 24  # points of a space that is tried whole
SIMULATED = tuple(MovePolicy(ahead=ahead, drain=drain, share=0.5) for ahead, drain in ((16, 2), (16, 8)))


def fewest(fits: Callable[[int], bool], most: int) -> int | None:
    """The smallest number up to ``most`` that fits, if more fit wherever fewer do; None if not even ``most`` fits.

    >>> fewest(lambda count: 64 / count <= 10, 64), fewest(lambda count: False, 64)
    (7, None)
    """
    high = 1
    while high < most and not fits(high):
        high = min(2 * high, most)
    if not fits(high):
        return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def doubled(first: int, most: int) -> list[int]:
    """A number and its doubles up to ``most``.

    >>> doubled(3, 30)
    [3, 6, 12, 24]
    """
    return [first << at for at in range((most // first).bit_length())]


def packings(bytes_of: Sequence[float], seconds_of: Sequence[float]) -> list[tuple[int, ...]]:
    """Candidates for the pack of each layer, the finest first: balanced by bytes or seconds, or with a large last pack.

    Layers of the last pack are not computed again.

    >>> packings([1, 1, 1], [1, 1, 1])
    [(0, 1, 2), (0, 1, 1), (0, 0, 0)]
    """
    count = len(bytes_of)
    counts = sorted({-(-count // each) for each in range(1, count + 1)}, reverse=True)
    found = [tuple(balanced(sizes, packs)) for packs in counts for sizes in (bytes_of, seconds_of)]
    found += [(*range(last), *[last] * (count - last)) for last in range(count - 2, max(-1, count - 5), -1)]
    return sorted(dict.fromkeys(found), key=lambda pack_of: -pack_of[-1])


PieceGroups = dict[tuple[Phase, int], list[PackPiece]]


def packed(
    pieces: Sequence[PackPiece], packing: LayerPacks, sizes: Mapping[Hashable, int]
) -> dict[PackPiece, list[PackPiece]]:  # fmt: skip
    """The pieces of packs, in order, each with the pieces of single layers that take its time.

    sizes: of border values. Work is an upper bound: a backward piece holds the work of all its layers.
    """
    groups, again = _groups(pieces, packing)
    last = Phase.BACKWARD, packing.backward[-1]  # its layers have no forward piece
    own = {piece.pack: piece.takes for piece in pieces if piece.phase is Phase.BACKWARD}
    taken = {key: _union(piece.takes for piece in group) for key, group in groups.items()}
    inside: dict[tuple[Phase, int], set[Hashable]] = {}
    for key, group in groups.items():
        made = {value for piece in group for value in piece.gives}
        for piece in again.get(key, ()):  # what its own backward piece takes is not done anew
            made |= {value for value in piece.gives if key == last or value not in own.get(piece.pack, ())}
        inside[key] = made.intersection(taken[key])
    wanted = {value for key, values in taken.items() for value in values if value not in inside[key]}
    found = {}
    for (phase, pack), group in groups.items():
        within, is_last = inside[phase, pack], (phase, pack) == last
        anew = [piece for piece in again.get((phase, pack), ()) if is_last or not within.isdisjoint(piece.gives)]
        work = (max if phase is Phase.FORWARD else sum)(piece.work for piece in group)
        found[PackPiece(
            phase, pack, weights=_union(piece.weights for piece in (*anew, *group)),
            state=_union(piece.state for piece in (*anew, *group)),
            written=frozenset(_union(tuple(piece.written) for piece in (*(anew if is_last else ()), *group))),
            gradients=_union(piece.gradients for piece in group),
            takes=tuple(value for value in taken[phase, pack] if value not in within),
            gives=tuple(value for value in _union(piece.gives for piece in group) if value in wanted),
            work=work + sum(sizes.get(value, 0) for value in within),
        )] = group  # fmt: skip
    return found


def _groups(pieces: Sequence[PackPiece], packing: LayerPacks) -> tuple[PieceGroups, PieceGroups]:
    """The pieces of single layers in each piece of a pack, and forward pieces of the layers of each backward one."""
    groups: PieceGroups = {}
    again: PieceGroups = {}
    for piece in pieces:
        back = packing.backward[piece.pack]
        if piece.phase is not Phase.FORWARD:
            groups.setdefault((piece.phase, back), []).append(piece)
            continue
        again.setdefault((Phase.BACKWARD, back), []).append(piece)
        if back < packing.backward[-1]:
            groups.setdefault((piece.phase, packing.forward[piece.pack]), []).append(piece)
    return groups, again


def simulated(
    pieces: Sequence[PackPiece], microbatches: int, sizes: Mapping[DeviceItem, int], budget: int, packing: LayerPacks,
    link: float, seconds: Callable[[PackPiece], float],
) -> float:  # fmt: skip
    """The time of a step in packs, infinite if the budget is too small. pieces, seconds: of single layers."""
    borders = {item.key: size for item, size in sizes.items() if item.role is Role.BORDER}
    made = packed(pieces, packing, borders)
    tasks = tasks_of([*made], microbatches)
    if max((need(task, sizes) for task in tasks), default=0) > budget:
        return inf
    lasts = {piece: sum(map(seconds, group)) for piece, group in made.items()}
    plans = (schedule(tasks, sizes, budget, policy) for policy in SIMULATED)
    return min(lane_times(plan, tasks, sizes, link, lambda task: lasts[task.piece]).end for plan in plans)


def _union(parts: Iterable[Sequence[Hashable]]) -> tuple[Hashable, ...]:
    return tuple(dict.fromkeys(value for part in parts for value in part))


def searched(axes: Sequence[Sequence[Any]], seconds: Callable[..., float]) -> list[tuple[Any, ...]]:
    """The points of a space that were tried, the quickest first.

    axes: the values of each coordinate. A small space is tried whole. In a large one each coordinate in turn goes to
    its best value while the others stay, from the first values and from the last ones, until none moves. seconds: of a
    point, infinite if it does not fit.

    >>> searched([[1, 2, 3], [5, 6]], lambda x, y: abs(2 * x - y))[0]
    (3, 6)
    """
    known: dict[tuple[Any, ...], float] = {}

    def of(point: tuple[Any, ...]) -> float:
        if point not in known:
            known[point] = seconds(*point)
        return known[point]

    if prod(map(len, axes)) <= SMALL:
        for point in product(*axes):
            of(point)
    else:
        for start in (0, -1):
            here: tuple[Any, ...] = tuple(axis[start] for axis in axes)
            before = None
            while here != before:
                before = here
                for at, axis in enumerate(axes):
                    here = min(((*here[:at], value, *here[at + 1 :]) for value in axis), key=of)
    return sorted(known, key=known.__getitem__)
