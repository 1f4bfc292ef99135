"""A line search for the strong Wolfe conditions (Nocedal and Wright 2006, section 3.5), on numbers only.

It brackets a minimum and then narrows the bracket, with the rules and constants of `torch.optim.LBFGS`. A generator: it
yields steps along the direction, and is sent the loss and the slope there. Pure; imports nothing of the project.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import NamedTuple

DECREASE, CURVATURE = 1e-4, 0.9  # of the Wolfe conditions: sufficient decrease, and the share of the slope that is left
MOST = 25  # evaluations of a search


class LinePoint(NamedTuple):
    """A step along the direction, with the loss and the slope (the directional derivative) there."""

    step: float
    loss: float
    slope: float


Search = Generator[float, tuple[float, float], LinePoint]


def strong_wolfe(start: LinePoint, step: float, width: float, tolerance: float = 1e-9, most: int = MOST) -> Search:
    """Find a step from ``start`` that meets the strong Wolfe conditions; ``step`` is the first one to try.

    width: the largest number of the direction; a bracket that moves no Parameter by more than ``tolerance`` ends the
    search, and so do ``most`` evaluations: with the point of the least loss that is in the bracket then. A loss that is
    not finite counts as infinite: the search goes back from there.

    >>> search = strong_wolfe(LinePoint(0.0, 4.0, -4.0), 0.25, 1.0)
    >>> step = next(search)
    >>> while True:
    ...     try:
    ...         step = search.send(((2 - step) ** 2, 2 * (step - 2)))
    ...     except StopIteration as error:
    ...         end = error.value
    ...         break
    >>> abs(end.slope) <= 0.9 * 4
    True
    """
    before, point, tries = start, (yield from _evaluated(step)), 0
    while tries < most:
        if point.loss > _bound(start, point.step) or (tries > 1 and point.loss >= before.loss):
            break
        if abs(point.slope) <= -CURVATURE * start.slope:
            return point
        if point.slope >= 0:
            break
        least, largest = point.step + 0.01 * (point.step - before.step), 10 * point.step
        step = _minimum(before, point, least, largest)
        before, point = point, (yield from _evaluated(step))
        tries += 1
    bracket = [before, point] if tries < most else [start, point]
    return (yield from _narrowed(start, bracket, width, tolerance, most - tries))


def _narrowed(start: LinePoint, bracket: list[LinePoint], width: float, tolerance: float, most: int) -> Search:
    """Narrow a bracket until one of its points meets the conditions, or no evaluations are left."""
    low, is_stuck = _lower(bracket), False
    for _ in range(most):
        one, other = bracket
        if abs(other.step - one.step) * width <= tolerance:
            break
        step, is_stuck = _inside(bracket, is_stuck)
        point = yield from _evaluated(step)
        if point.loss > _bound(start, step) or point.loss >= bracket[low].loss:
            bracket[1 - low] = point
            low = _lower(bracket)
            continue
        is_found = abs(point.slope) <= -CURVATURE * start.slope
        if not is_found and point.slope * (bracket[1 - low].step - bracket[low].step) >= 0:
            bracket[1 - low] = bracket[low]
        bracket[low] = point
        if is_found:
            break
    return bracket[low]


def _evaluated(step: float) -> Search:
    loss, slope = yield step
    is_finite = math.isfinite(loss) and math.isfinite(slope)
    return LinePoint(step, loss, slope) if is_finite else LinePoint(step, math.inf, math.inf)


def _bound(start: LinePoint, step: float) -> float:
    """The largest loss at a step that counts as a sufficient decrease."""
    return start.loss + DECREASE * step * start.slope


def _lower(bracket: list[LinePoint]) -> int:
    return 0 if bracket[0].loss <= bracket[1].loss else 1


def _inside(bracket: list[LinePoint], is_stuck: bool) -> tuple[float, bool]:
    """The next step within a bracket, and whether it is close to an end: then the next one must not be."""
    one, other = bracket
    least, largest = min(one.step, other.step), max(one.step, other.step)
    step, margin = _minimum(one, other, least, largest), 0.1 * (largest - least)
    if min(largest - step, step - least) >= margin:
        return step, False
    if not is_stuck and least < step < largest:
        return step, True
    return (largest - margin if abs(step - largest) < abs(step - least) else least + margin), False


def _minimum(one: LinePoint, other: LinePoint, least: float, largest: float) -> float:
    """The minimum, within bounds, of the cubic through two points with these slopes; the middle where it has none."""
    first, last = (one, other) if one.step <= other.step else (other, one)
    bend = one.slope + other.slope - 3 * (one.loss - other.loss) / (one.step - other.step)
    square = bend * bend - one.slope * other.slope
    if not square >= 0 or math.isinf(square):
        return (least + largest) / 2
    root = math.sqrt(square)
    over = last.slope - first.slope + 2 * root
    if over == 0:
        return (least + largest) / 2
    at = last.step - (last.step - first.step) * ((last.slope + root - bend) / over)
    return min(max(at, least), largest)
