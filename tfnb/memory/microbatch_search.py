"""The number of microbatches of a step on a byte budget: the fewest that fit, or more if those are quicker. Pure."""

from __future__ import annotations

from collections.abc import Callable


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


def quickest(fits: Callable[[int], bool], seconds: Callable[[int], float], most: int) -> int | None:
    """The fewest that fit, doubled for as long as twice as many are predicted quicker; None if none fit.

    Smaller microbatches leave room for tensors, which need not move then; more kernels are started for that.

    >>> quickest(lambda count: count >= 3, lambda count: abs(count - 11), 64)
    12
    """
    found = fewest(fits, most)
    while found is not None and 2 * found <= most and seconds(2 * found) < seconds(found):
        found *= 2
    return found
