"""One sweep of an OpInfo entry: which columns of the coverage page it fails, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from tests.coverage import axes, checks
from tests.coverage.known import KNOWN, NO_CPU, TORCH_OF_PAGE, UNBATCHED

SAME_TORCH = torch.__version__.partition("+")[0] == TORCH_OF_PAGE  # on another, other entries may pass or fail
COLUMNS = ("records", "replays", "complex", "first", "second", "varying")
BUILDS_ON = {"replays": "records", "complex": "records", "first": "records", "second": "first", "varying": "records"}
QUICK = 1  # sample of an entry and dtype in a quick sweep, of the first few: to make them takes longer than to run them
FIRST = 16
VARYING = 8  # those recorded with varying rows, of 40: each is run, and differentiated, at several sizes
Cases = Iterator[tuple[str, str | None]]  # column and what its check said, of sample after sample


def applies(info: Any) -> frozenset[str]:
    """The columns that mean something for this entry: none where torch has no kernel for the CPU."""
    if checks.name_of(info) in NO_CPU:
        return frozenset()
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


def failures(info: Any, whole: frozenset[str], asked: Iterable[str] = COLUMNS) -> dict[str, str]:
    """Column -> the first reason found, but for what follows from the failure of another column.

    Columns in ``whole`` see every sample, the others a few.
    """
    if checks.name_of(info) in NO_CPU:
        return {"records": "torch has a kernel for the CPU"} if checks.has_kernel(info) else {}
    found: dict[str, str] = {}
    for columns, cases in _CASES.items():
        if "records" in found:
            break
        if set(columns).isdisjoint(asked):
            continue
        for column, said in cases(info, not whole.isdisjoint(columns)):
            if said:
                found.setdefault(column, said)
            if columns[0] in found:
                break
    return {column: said for column, said in found.items() if found.keys().isdisjoint(builds_on(column))}


def surprises(name: str, found: dict[str, str], asked: Iterable[str] = COLUMNS) -> list[str]:
    """What of the `failures` of an entry `known.py` does not say, or says and is not so."""
    if not SAME_TORCH:
        return [said for column, said in found.items() if column == "varying" and said.startswith(axes.WRONG)]
    new = [
        f"{column} fails, which known.py does not list: {said}"
        for column, said in found.items() if not any(name in KNOWN[c] for c in {column} | builds_on(column))
    ]  # fmt: skip
    wrong = [f"{c}: {said}, without a word" for c, said in found.items() if said.startswith(axes.WRONG)]
    mended = [
        f"{column} passes now: take it out of known.py, then `make page`"
        for column in asked if name in KNOWN[column] and column not in found
    ]  # fmt: skip
    return [*new, *wrong, *mended]


def _values(info: Any, whole: bool) -> Cases:
    some = 0
    for sample, said in checks.together(info, _all_pairs(info, whole)):
        some += 1
        yield _blamed(said, "replays", said and checks.records(info, sample), "records")
    if not some:
        yield "records", "torch has no sample for the CPU"


def _all_pairs(info: Any, whole: bool) -> Iterator[tuple[Any, Any]]:
    for dtype in checks.real_dtypes(info):
        yield from _pairs(info, dtype, whole)


def _complex(info: Any, whole: bool) -> Cases:
    if "complex" in applies(info):
        for _, said in checks.together(info, _pairs(info, checks.COMPLEX, whole)):
            yield "complex", said


def _gradients(info: Any, whole: bool) -> Cases:
    dtype = checks.gradient_dtype(info)
    if dtype is None:
        return
    found = checks.samples(info, dtype, requires_grad=True, most=None if whole else FIRST)
    second = "second" in applies(info)
    for sample, said in checks.differentiate(info, found if whole else _some(found), second=second):
        yield _blamed(said, "second", said and checks.first(info, sample), "first") if second else ("first", said)


def _varying(info: Any, whole: bool) -> Cases:
    """Some sample has rows that may vary, and none has if `UNBATCHED` says so."""
    cases = list(batched(info)) if whole else list(islice(batched(info), 1))
    expected = "varying" in applies(info)
    if bool(cases) is not expected:
        yield "varying", f"{len(cases)} samples have rows that may vary"
    for case in checks.spread(cases, VARYING) if expected else ():
        yield "varying", axes.varies(case if whole else replace(case, others=case.others[::2]))


def batched(info: Any) -> Iterator[axes.Case]:
    """Samples for which batching is meaningful."""
    dtype = checks.real_dtypes(info)[0]
    found = checks.samples(info, dtype, requires_grad=dtype is checks.gradient_dtype(info))
    cases = (axes.case_of(info, sample) for sample in checks.spread(found, 5 * VARYING))
    return (case for case in cases if case)


_CASES: dict[tuple[str, ...], Callable[[Any, bool], Cases]] = {  # what all build on is the first of the columns
    ("records", "replays"): _values, ("complex",): _complex, ("first", "second"): _gradients,
    ("varying",): _varying,
}  # fmt: skip


def _blamed(said: str | None, column: str, basic: str | None, below: str) -> tuple[str, str | None]:
    """A failure is one of the column below where that fails too."""
    return (below, basic) if basic else (column, said)


def _pairs(info: Any, dtype: Any, whole: bool) -> list[Any]:
    return checks.pairs(info, dtype) if whole else _some(checks.pairs(info, dtype, most=FIRST))


def _some(samples: list[Any]) -> list[Any]:
    """Not the first ones, which are scalars in many lists."""
    return checks.spread(samples[len(samples) // 3 :], QUICK)
