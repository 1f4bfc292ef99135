"""One sweep of an OpInfo entry: which columns of the coverage page it fails, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.coverage import axes, checks
from tests.coverage.known import UNBATCHED

COLUMNS = ("records", "replays", "complex", "first", "second", "varying")
BUILDS_ON = {"replays": "records", "complex": "records", "first": "records", "second": "first", "varying": "records"}
QUICK = 2  # samples of an entry in a quick sweep
WHOLE = 40  # samples of an entry and dtype in a whole one, spread over the few entries that have more
WHOLE_VARYING = 8  # those recorded with varying rows: each is run, and differentiated, at several sizes
Cases = Iterator[tuple[str, str | None]]  # column and what its check said, of sample after sample


def applies(info: Any) -> frozenset[str]:
    """The columns that mean something for this entry."""
    gradient = checks.gradient_dtype(info) is not None
    asked = {
        "records": True, "replays": True, "complex": checks.supports(info, checks.COMPLEX), "first": gradient,
        "second": gradient and bool(info.supports_gradgrad), "varying": checks.name_of(info) not in UNBATCHED,
    }  # fmt: skip
    return frozenset(column for column, asked_of in asked.items() if asked_of)


def builds_on(column: str) -> set[str]:
    """The columns without which this one means nothing."""
    below = BUILDS_ON.get(column)
    return {below, *builds_on(below)} if below else set()


def failures(info: Any, whole: frozenset[str]) -> dict[str, str]:
    """Column -> the first reason found, but for what follows from the failure of another column.

    Columns in ``whole`` see every sample (`WHOLE` at most), the others a few.
    """
    found: dict[str, str] = {}
    for columns, cases in _CASES.items():
        if "records" in found:
            break
        for column, said in cases(info, not whole.isdisjoint(columns)):
            if said:
                found.setdefault(column, said)
            if columns[0] in found:
                break
    return {column: said for column, said in found.items() if found.keys().isdisjoint(builds_on(column))}


def _values(info: Any, whole: bool) -> Cases:
    count = 0
    for place, dtype in enumerate(checks.real_dtypes(info)):
        for sample, fresh in _some(checks.pairs(info, dtype), whole, 1 if place else QUICK):
            count += 1
            said = checks.replays(info, sample, fresh)
            yield _blamed(said, "replays", said and checks.records(info, sample), "records")
    if not count:
        yield "records", "torch has no sample for the CPU"


def _complex(info: Any, whole: bool) -> Cases:
    if "complex" in applies(info):
        for sample, fresh in _some(checks.pairs(info, checks.COMPLEX), whole, 1):
            yield "complex", checks.replays(info, sample, fresh)


def _gradients(info: Any, whole: bool) -> Cases:
    dtype = checks.gradient_dtype(info)
    if dtype is None:
        return
    for sample in _some(checks.samples(info, dtype, requires_grad=True), whole, QUICK):
        if "second" in applies(info):
            said = checks.second(info, sample)
            yield _blamed(said, "second", said and checks.first(info, sample), "first")
        else:
            yield "first", checks.first(info, sample)


def _varying(info: Any, whole: bool) -> Cases:
    """Some sample has rows that may vary, and none has if `UNBATCHED` says so."""
    cases = batched(info, WHOLE_VARYING if whole else 1)
    expected = "varying" in applies(info)
    if bool(cases) is not expected:
        yield "varying", f"{len(cases)} samples have rows that may vary"
    for case in cases if expected else ():
        yield "varying", axes.varies(case)


def batched(info: Any, count: int) -> list[axes.Case]:
    """A few samples for which batching is meaningful."""
    dtype = checks.real_dtypes(info)[0]
    found = checks.samples(info, dtype, requires_grad=dtype is checks.gradient_dtype(info))
    cases = [axes.case_of(info, sample) for sample in checks.spread(found, WHOLE)]
    return checks.spread([case for case in cases if case], count)


_CASES: dict[tuple[str, ...], Callable[[Any, bool], Cases]] = {  # what all build on is the first of the columns
    ("records", "replays"): _values, ("complex",): _complex, ("first", "second"): _gradients,
    ("varying",): _varying,
}  # fmt: skip


def _blamed(said: str | None, column: str, basic: str | None, below: str) -> tuple[str, str | None]:
    """A failure is one of the column below where that fails too."""
    return (below, basic) if basic else (column, said)


def _some(samples: list[Any], whole: bool, count: int) -> list[Any]:
    return checks.spread(samples, WHOLE if whole else count)
