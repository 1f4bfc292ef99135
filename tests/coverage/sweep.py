"""One sweep of an OpInfo entry: which columns of the coverage page it fails, and why."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from tests.coverage import checks

COLUMNS = ("records", "replays", "complex", "first", "second", "varying")
HAS_VARYING = importlib.util.find_spec("tests.coverage.varying") is not None
QUICK = 2  # samples of an entry in a quick sweep
Cases = Iterator[str | None]  # what a check said of sample after sample


def applies(info: Any) -> frozenset[str]:
    """The columns that mean something for this entry."""
    gradient = checks.gradient_dtype(info) is not None
    asked = {
        "records": True, "replays": True, "complex": checks.supports(info, checks.COMPLEX), "first": gradient,
        "second": gradient and bool(info.supports_gradgrad), "varying": HAS_VARYING,
    }  # fmt: skip
    return frozenset(column for column, asked_of in asked.items() if asked_of)


def failures(info: Any, whole: frozenset[str]) -> dict[str, str]:
    """Column -> the first reason found. Columns in ``whole`` see every sample, the others a few.

    An entry that does not record is not asked for more, nor for its second order one without the first.
    """
    found: dict[str, str] = {}
    for column in COLUMNS:
        if column not in applies(info) or "records" in found or (column == "second" and "first" in found):
            continue
        reason = next((said for said in _CASES[column](info, column in whole) if said), None)
        if reason:
            found[column] = reason
    return found


def _records(info: Any, whole: bool) -> Cases:
    dtypes = checks.real_dtypes(info)
    count = 0
    for dtype in dtypes[: None if whole else 1]:
        for sample in _some(checks.samples(info, dtype), whole, 1):
            count += 1
            yield checks.records(info, sample)
    if not count:
        yield "torch has no sample for the CPU"


def _replays(info: Any, whole: bool) -> Cases:
    for place, dtype in enumerate(checks.real_dtypes(info)):
        for sample, fresh in _some(checks.pairs(info, dtype), whole, 1 if place else QUICK):
            yield checks.replays(info, sample, fresh)


def _complex(info: Any, whole: bool) -> Cases:
    for sample, fresh in _some(checks.pairs(info, checks.COMPLEX), whole, 1):
        yield checks.replays(info, sample, fresh)


def _gradients(check: Callable[[Any, Any], str | None]) -> Callable[[Any, bool], Cases]:
    def cases(info: Any, whole: bool) -> Cases:
        dtype = checks.gradient_dtype(info)
        assert dtype is not None
        for sample in _some(checks.samples(info, dtype, requires_grad=True), whole, QUICK):
            yield check(info, sample)

    return cases


def _varying(info: Any, whole: bool) -> Cases:
    from tests.coverage.varying import varies  # type: ignore[import-not-found,unused-ignore]

    for sample in _some(checks.samples(info, checks.real_dtypes(info)[0]), whole, QUICK):
        yield varies(info, sample)


_CASES: dict[str, Callable[[Any, bool], Cases]] = {
    "records": _records, "replays": _replays, "complex": _complex, "varying": _varying,
    "first": _gradients(checks.first), "second": _gradients(checks.second),
}  # fmt: skip


def _some(samples: list[Any], whole: bool, count: int) -> list[Any]:
    """All, or a few spread over the list."""
    return samples if whole else samples[:: max(1, len(samples) // count)][:count]
