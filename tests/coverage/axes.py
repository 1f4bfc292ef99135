"""Varying axes: a sample of an operator recorded at one number of rows and run at others, against torch itself.

Batching is meaningful for a sample if axis 0 of its first tensor, together with that of the other tensors of the same
length that torch wants to vary with it, may have other lengths in plain torch, with as many results of the same ranks.
It is recorded with a length that no other axis has, where torch takes one: what happens otherwise is tested by itself
(tests/recording/test_symbols.py). Fresh rows are the sample's own in another order, real numbers a little smaller:
probabilities and definite matrices stay what they are.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import tfnb
from tfnb.errors import NoGradient, TfnbError

RECORDED = (7, 6, 8)
SIZES = (3, 5, 1, 64)
WRONG, REFUSED, FAILS = "wrong", "refused", "fails"  # how a reason begins; wrong: run without a word, other values
# torch reads beyond its arguments where their sizes do not fit: not tried at all, with rows of one tensor alone, or
# only with those of all
UNCHECKED = frozenset({"_segment_reduce"})
ALONE = frozenset({"_native_batch_norm_legit", "_batch_norm_with_update", "native_batch_norm"})
TOGETHER = frozenset({"linalg.ldl_solve", "lu_unpack"})


@dataclass(frozen=True)
class Case:
    """A sample with variable rows, namely the rows of the tensors at ``places`` among its leaves."""

    info: Any
    leaves: tuple[Any, ...]
    function: Callable[..., Any]  # of the leaves
    places: tuple[int, ...]
    rows: int  # how many it is recorded with
    others: tuple[int, ...]  # other numbers of rows that torch takes

    def at(self, rows: int) -> list[Any]:
        """The leaves with this many rows."""
        return _with_rows(self.leaves, self.places, rows)


def varies(case: Case) -> str | None:
    """None if a recording of the case gives torch's values and gradients at other sizes; else why not, in a line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            recording = _Recording(case)
        except Exception as error:
            return f"{FAILS} while recording: {_said(error)}"
    said = [str(w.message) for w in caught if "became the constant" in str(w.message)]
    said += [f"a value left the graph: {note}" for note in recording.graph.notes if "item()" in note]
    reasons = [r for r in (recording.wrong_at(rows, said) for rows in case.others) if r is not None]
    return min(reasons, key=lambda r: (WRONG, FAILS, REFUSED).index(r.split()[0]), default=None)


def case_of(info: Any, sample: Any) -> Case | None:
    """The sample with the fewest tensors that torch accepts at most sizes; None if batching is meaningless."""
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    if info.name in UNCHECKED or not tensors or not _has_rows(leaves[tensors[0]]):
        return None

    def function(*leaves: Any) -> Any:
        first, args, kwargs = tree_unflatten(leaves, spec)
        return info.op(first, *args, **kwargs)

    first, length = tensors[0], leaves[tensors[0]].shape[0]
    same = [i for i in tensors[1:] if _has_rows(leaves[i]) and leaves[i].shape[0] == length]
    best = None
    for more, rows in itertools.product(_choices(info, same), (*RECORDED, max(2, length))):
        places = (first, *more)
        others = _taken(function, leaves, places, rows)
        if len(others) >= 2 and (best is None or len(others) > len(best.others)):
            best = Case(info, tuple(leaves), function, places, rows, others)
            if len(others) == len(SIZES):
                break
    return best


def _has_rows(x: torch.Tensor) -> bool:
    return x.layout is torch.strided and x.dim() > 0 and x.shape[0] > 0


def _choices(info: Any, same: list[int]) -> Iterator[tuple[int, ...]]:
    """The choices of other tensors that vary with the first: none, then more."""
    if info.name in ALONE:
        yield ()
    elif info.name in TOGETHER:
        yield tuple(same)
    elif len(same) > 4:
        yield from ((), tuple(same))
    else:
        for count in range(len(same) + 1):
            yield from itertools.combinations(same, count)


def _taken(function: Any, leaves: Any, places: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """The sizes that torch takes, with results of the ranks that ``rows`` gives."""
    ranks = _ranks(function, _with_rows(leaves, places, rows))
    if not ranks:
        return ()
    return tuple(n for n in SIZES if n != rows and _ranks(function, _with_rows(leaves, places, n)) == ranks)


def _ranks(function: Any, leaves: list[Any]) -> list[int] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return [t.dim() for t in _tensors(function(*map(_own, leaves)))]
        except Exception:  # whatever torch raises: it does not take them
            return None


def _with_rows(leaves: Iterable[Any], places: tuple[int, ...], rows: int) -> list[Any]:
    found = list(leaves)
    for place in places:
        x = found[place].detach()
        real = x.itemsize > 1 and (x.is_floating_point() or x.is_complex())
        y = x.flip(0) * 0.9375 if real else x.flip(0)
        pool = torch.cat([x, y, x[::2]])[rows % 3 :]
        found[place] = pool[torch.arange(rows) % len(pool)].requires_grad_(found[place].requires_grad)
    return found


def _own(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _tensors(result: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]


# -- one recording, run at several sizes ------------------------------------------------------------------------------


class _Recording:
    """A case recorded once: its results, and their gradients where torch and tfnb have them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        samples = [x.detach() if isinstance(x, torch.Tensor) else x for x in case.at(case.rows)]
        with tfnb.record() as self.graph:
            leaves = [self._placeholder(i, leaf) for i, leaf in enumerate(samples)]
            self.outs = _tensors(case.function(*leaves))
        self.held = {i: x for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
        self.is_recorded = [isinstance(out, tfnb.Tensor) for out in self.outs]
        self.has_values = "empty" not in case.info.name and all(node.stream is None for node in self.graph.nodes)
        self.xs = [i for i in self.held if case.leaves[i].requires_grad]
        self.dxs = self._gradients()
        if self.dxs and (self.wrong_at(case.rows, []) or "").startswith(f"{WRONG} at {case.rows}: gradient"):
            self.dxs = []  # not right for the size it was recorded with: another column's matter

    def _placeholder(self, place: int, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        sizes = ["B" if place in self.case.places and axis == 0 else n for axis, n in enumerate(leaf.shape)]
        return tfnb.placeholder(leaf, shape=sizes)

    def _gradients(self) -> list[Any]:
        if not self.xs or not self.has_values or not all(self.is_recorded):
            return []
        if any(y.dtype != torch.float64 for y in self.outs):
            return []
        try:
            with tfnb.record(self.graph):
                return tfnb.gradients(self.outs, [self.held[i] for i in self.xs], [_cotangent(y) for y in self.outs])
        except NoGradient:
            return []

    def wrong_at(self, rows: int, said: list[str]) -> str | None:
        """The reason why a run with this many rows is wrong; ``said``: warnings of the recording."""
        leaves = self.case.at(rows)
        fetches = [o for o, recorded in zip(self.outs, self.is_recorded, strict=True) if recorded]
        fetches += [dx for dx in self.dxs if dx is not None]
        try:
            got = tfnb.run(fetches, {x: leaves[i].detach() for i, x in self.held.items()})
        except TfnbError as error:
            return f"{REFUSED} at {rows}: {said[0] if said else _said(error)}"
        except Exception as error:
            return f"{FAILS} at {rows}: {_said(error)}"
        results = _tensors(self.case.function(*map(_own, leaves)))
        expected = [e for e, recorded in zip(results, self.is_recorded, strict=True) if recorded]
        values, rest = got[: len(expected)], iter(got[len(expected) :])
        differs = _different(values, expected, self.has_values)
        if differs is None and (gradients := self._expected_gradients(leaves)):
            dxs = [
                next(rest) if dx is not None else torch.zeros_like(e) for dx, e in zip(self.dxs, gradients, strict=True)
            ]
            differs = _different(dxs, gradients, True)
            differs = differs and f"gradient: {differs}"
        if differs is None:
            return None
        return f"{REFUSED} at {rows}: {said[0]}" if said else f"{WRONG} at {rows}: {differs}"

    def _expected_gradients(self, leaves: list[Any]) -> list[torch.Tensor]:
        if not self.dxs:
            return []
        plain = [_own(x) for x in leaves]
        starts = [plain[i] for i in self.xs]
        try:
            ys = [y for y in _tensors(self.case.function(*plain)) if y.requires_grad]
            found = torch.autograd.grad(ys, starts, [_cotangent(y) for y in ys], allow_unused=True)
        except RuntimeError:  # torch cannot
            return []
        return [torch.zeros_like(x) if dx is None else dx for x, dx in zip(starts, found, strict=True)]


def _cotangent(y: torch.Tensor) -> torch.Tensor:
    """Something uneven that both sides compute from the result."""
    return torch.cos(3 * y.detach())


def _different(got: list[Any], expected: list[torch.Tensor], values: bool) -> str | None:
    for x, y in zip(got, expected, strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"{x.dtype} {list(x.shape)}, torch gives {y.dtype} {list(y.shape)}"
        try:
            if values and not (x.itemsize == 1 and x.is_floating_point()):
                torch.testing.assert_close(x, y.detach(), rtol=1e-6, atol=1e-7, equal_nan=True)
        except AssertionError as error:
            return _said(error)
    return None


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]
