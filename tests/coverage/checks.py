"""Checks of every OpInfo entry: each takes an entry and a sample, and gives None or a one-line reason.

The oracle is torch itself: the operator called eagerly, and torch.autograd in float64.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import tfnb
from tests.gradients.reference import compare

REAL = (torch.float64, torch.float32, torch.int64, torch.bool)
COMPLEX = torch.complex128
TOGETHER, ELEMENTS = 24, 1 << 16  # samples, and elements of their tensors, that share a recording
DRAWS = 48  # runs of a random operator whose statistics are compared
MET: set[str] = set()  # ops of the graphs that `first` and `second` made in this process


def name_of(info: Any) -> str:
    """The entry's name: ``sum``, ``norm.fro``."""
    return info.name + (f".{info.variant_test_name}" if info.variant_test_name else "")


@cache
def entries() -> dict[str, Any]:
    """PyTorch's table of operators by name. It takes seconds to load: runs that take none of its tests do without."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {name_of(info): info for info in sorted(op_db, key=name_of)}


def supports(info: Any, dtype: torch.dtype) -> bool:
    """Whether torch's own CPU kernel takes this dtype."""
    return dtype in info.supported_dtypes("cpu")


def has_kernel(info: Any) -> bool:
    """Whether torch runs the entry on the CPU at all."""
    found = [sample for dtype in real_dtypes(info) for sample in samples(info, dtype, most=1)]
    return any(_reason(lambda s=sample: _eager(info, s)) is None for sample in found)  # type: ignore[misc]


def real_dtypes(info: Any) -> list[torch.dtype]:
    """The dtypes in which the entry is recorded and replayed; if none fits, one dtype that the entry supports."""
    others = sorted(info.supported_dtypes("cpu"), key=lambda d: (d is not COMPLEX, str(d)))
    return [d for d in REAL if supports(info, d)] or others[:1]


def gradient_dtype(info: Any) -> torch.dtype | None:
    """float64, or complex128 for an entry that takes no real tensors; None where torch does not differentiate."""
    return next((d for d in (torch.float64, COMPLEX) if info.supports_autograd and supports(info, d)), None)


def samples(
    info: Any, dtype: torch.dtype, *, requires_grad: bool = False, seed: int = 0, most: int | None = None
) -> list[Any]:
    """PyTorch's samples of the entry, or the first of them, the same ones for the same seed.

    Left to itself OpInfo seeds each sample anew, and two lists of them would have the same values; and it looks on the
    stack for a unittest to blame, which under pytest takes far longer than everything that is done with the samples.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    return list(islice(info.sample_inputs_func(info, "cpu", dtype, requires_grad), most))


def pairs(info: Any, dtype: torch.dtype, *, most: int | None = None) -> list[tuple[Any, Any]]:
    """Samples with fresh inputs for each: tensors of the same shapes and dtypes, and in the operator's domain."""
    found = samples(info, dtype, most=most)
    others = samples(info, dtype, seed=1, most=most)
    others += [None] * (len(found) - len(others))
    return [(s, o if _alike(s, o) else _scaled(s)) for s, o in zip(found, others, strict=False)]


def spread(items: list[Any], count: int) -> list[Any]:
    """All, or this many with equal gaps between them."""
    return items if len(items) <= count else [items[place * len(items) // count] for place in range(count)]


def _alike(sample: Any, other: Any) -> bool:
    """Whether two samples differ only in the values of their tensors."""
    (a, shape), (b, shape_too) = tree_flatten(_parts(sample)), tree_flatten(_parts(other) if other else None)
    return shape == shape_too and all(_interchangeable(x, y) for x, y in zip(a, b, strict=True))


def _interchangeable(x: Any, y: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return isinstance(y, torch.Tensor) and _layout(x) == _layout(y)
    return type(x) is type(y) and (x == y or x != x)


def _layout(x: torch.Tensor) -> Any:
    strides = x.stride() if x.layout is torch.strided else None
    return x.shape, x.dtype, x.layout, strides, x.is_conj(), x.is_neg()


def _scaled(sample: Any) -> Any:
    """The sample with its floating tensors a little smaller: probabilities and definite matrices stay what they are."""

    def smaller(x: Any) -> Any:
        moves = isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())
        return x * 0.9375 if moves else x

    return sample.transform(smaller)


def _parts(sample: Any) -> Any:
    return sample.input, sample.args, sample.kwargs


# -- the checks -----------------------------------------------------------------------------------------------------


def records(info: Any, sample: Any) -> str | None:
    """Recorded with placeholders of fixed shapes for its tensors: the values shown while recording are torch's."""
    return _reason(lambda: _Recorded(info, [sample]).shown())


def replays(info: Any, sample: Any, fresh: Any) -> str | None:
    """Run on fresh inputs: the values are torch's on these inputs. Draws are compared by seed and by distribution."""

    def check() -> None:
        recorded = _Recorded(info, [sample])
        recorded.shown()
        recorded.replayed([fresh])

    return _reason(check)


def first(info: Any, sample: Any) -> str | None:
    """Symbolic gradients equal torch.autograd's."""
    return _reason(lambda: _differentiate(info, [sample], second=False))


def second(info: Any, sample: Any) -> str | None:
    """Symbolic gradients of first and second order equal torch.autograd's."""
    return _reason(lambda: _differentiate(info, [sample], second=True))


def together(info: Any, cases: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, str | None]]:
    """The results of `replays` for each sample and its fresh inputs.

    Several share a recording and a session; those of which one fails, or draws, are asked one by one.
    """

    def check(group: list[tuple[Any, Any]]) -> None:
        recorded = _Recorded(info, [sample for sample, _ in group])
        assert len(group) == 1 or not recorded.is_random, "draws are compared one by one"
        recorded.shown()
        recorded.replayed([fresh for _, fresh in group])

    for group in groups(cases, lambda case: _parts(case[0])):
        if len(group) > 1 and _reason(lambda group=group: check(group)) is None:  # type: ignore[misc]
            yield from ((sample, None) for sample, _ in group)
        else:
            yield from ((sample, replays(info, sample, fresh)) for sample, fresh in group)


def differentiate(info: Any, cases: Iterable[Any], *, second: bool) -> Iterator[tuple[Any, str | None]]:
    """The results of `second`, or `first`, for each sample; several are differentiated at once, as by `together`."""
    for group in groups(cases, _parts):
        try:
            assert len(group) > 1
            _differentiate(info, group, second=second, alone=False)
        except (Exception, pytest.skip.Exception):  # one of them fails, or torch cannot do it: which?
            yield from ((s, _reason(lambda s=s: _differentiate(info, [s], second=second))) for s in group)  # type: ignore[misc]
        else:
            yield from ((sample, None) for sample in group)


def groups(cases: Iterable[Any], parts: Callable[[Any], Any]) -> Iterator[list[Any]]:
    """Cases in order, as many together as are small."""
    group: list[Any] = []
    size = 0
    for case in cases:
        here = sum(x.numel() for x in tree_leaves(parts(case)) if isinstance(x, torch.Tensor))
        if group and (len(group) == TOGETHER or size + here > ELEMENTS):
            yield group
            group, size = [], 0
        group.append(case)
        size += here
    if group:
        yield group


def _differentiate(info: Any, samples: list[Any], *, second: bool, alone: bool = True) -> None:
    leaves, structure = tree_flatten([_parts(sample) for sample in samples])
    leaves = [_precise(x) for x in leaves]

    def function(*leaves: Any) -> Any:
        return [_called(info, parts) for parts in tree_unflatten(leaves, structure)]

    MET.update(node.op for node in compare(function, leaves, second=second, first_alone=alone).nodes)


def _precise(x: Any) -> Any:
    """In float64 too where a sample mixes dtypes: what is left of a cancellation in float32 is noise."""
    mixed = isinstance(x, torch.Tensor) and x.requires_grad and x.dtype is torch.float32
    return x.detach().double().requires_grad_() if mixed else x


def _reason(check: Callable[[], None]) -> str | None:
    """None where the check passes or where torch itself cannot do it; else what went wrong, on one line."""
    try:
        check()
    except pytest.skip.Exception:
        return None
    except Exception as error:
        said = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {said[0]}"[:160]
    return None


# -- recording and running ------------------------------------------------------------------------------------------


class _Recorded:
    """An entry recorded at some samples, all in one graph."""

    def __init__(self, info: Any, samples: list[Any]) -> None:
        self.info, self.samples = info, samples
        feeds: list[Any] = []

        def placeholder(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            feed = tfnb.placeholder(x, shape=tuple(x.shape))
            feeds.append(feed)
            return feed

        made = [tree_map(_own, _parts(sample)) for sample in samples]
        with tfnb.record() as self.graph:
            self.results = [_called(info, tree_map(placeholder, parts)) for parts in made]
        self.feeds = feeds

    @property
    def is_random(self) -> bool:
        return any(node.stream is not None for node in self.graph.nodes)

    @property
    def is_empty(self) -> bool:
        """Whether the values are whatever memory held."""
        return "empty" in self.info.name

    def shown(self) -> None:
        """The samples of the results are torch's values."""
        expected = [_eager(self.info, sample) for sample in self.samples]
        got = tree_map(lambda x: x.sample if isinstance(x, tfnb.Tensor) else x, self.results)
        _same(got, expected, values=not (self.is_random or self.is_empty))

    def replayed(self, fresh: list[Any]) -> None:
        """A run on the tensors of other samples gives torch's values there."""
        got = self._run(fresh)
        _same(got, self._expected(fresh), values=not (self.is_random or self.is_empty))
        if self.is_random and not self.is_empty:
            _same(self._run(fresh), got)
            with _free_draws():
                _same_distribution(list(self._draws(fresh)), [self._expected(fresh) for _ in range(DRAWS)])

    def _expected(self, fresh: list[Any]) -> list[Any]:
        return [_eager(self.info, sample) for sample in fresh]

    def _values(self, fresh: list[Any]) -> list[torch.Tensor]:
        leaves = tree_leaves([_parts(sample) for sample in fresh])
        return [x.detach().clone() for x in leaves if isinstance(x, torch.Tensor)]

    def _run(self, fresh: list[Any]) -> Any:
        """The results in a session of its own: its first draws."""
        leaves, structure = tree_flatten(self.results)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, tfnb.Tensor)]
        feed = dict(zip(self.feeds, self._values(fresh), strict=True))
        ran = tfnb.Session(self.graph).run([leaves[i] for i in places], feed)
        for place, value in zip(places, ran, strict=True):
            leaves[place] = value
        return tree_unflatten(leaves, structure)

    def _draws(self, fresh: list[Any]) -> Iterator[Any]:
        fetches = [leaf for leaf in tree_leaves(self.results) if isinstance(leaf, tfnb.Tensor)]
        call = tfnb.Session(self.graph).make_callable(fetches, self.feeds)
        values = self._values(fresh)
        return (call(*values) for _ in range(DRAWS))


def _called(info: Any, parts: Any) -> Any:
    start, args, kwargs = parts
    return info.op(start, *args, **kwargs)


def _eager(info: Any, sample: Any) -> Any:
    return _called(info, tree_map(_own, _parts(sample)))


def _own(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def _same(got: Any, expected: Any, *, values: bool = True) -> None:
    """Equal in structure, dtypes and shapes, and in values: bitwise, or up to 1e-6 of the largest."""
    ours, theirs = tree_leaves(got), tree_leaves(expected)
    assert len(ours) == len(theirs), f"{len(ours)} results, torch gives {len(theirs)}"
    for x, y in zip(ours, theirs, strict=True):
        if not isinstance(y, torch.Tensor):
            assert not isinstance(x, torch.Tensor), f"a tensor, torch gives {y!r}"
            assert x == y or x != x, f"{x!r}, torch gives {y!r}"
            continue
        assert isinstance(x, torch.Tensor), f"{x!r}, torch gives a tensor"
        assert (x.dtype, x.shape, x.layout) == (y.dtype, y.shape, y.layout), (
            f"{x.dtype} {list(x.shape)}, torch gives {y.dtype} {list(y.shape)}"
        )
        if values and not _equal(x, y):
            x, y = _wider(x), _wider(y)
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6 * _largest(y), equal_nan=True)


def _equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.layout is torch.strided and torch.equal(_wider(x), _wider(y))


def _wider(x: torch.Tensor) -> torch.Tensor:
    """The same numbers in a dtype that torch compares: it does not compare complex32 and float8."""
    if x.dtype is torch.complex32:
        return x.to(torch.complex64)
    return x.to(torch.float32) if x.is_floating_point() and x.element_size() == 1 else x


def _largest(y: torch.Tensor) -> float:
    sizes = y.detach().abs().to(torch.float64) if y.numel() and y.layout is torch.strided else torch.zeros(1)
    return float(sizes.nan_to_num(0, 0, 0).amax())


def _same_distribution(ours: list[Any], theirs: list[Any]) -> None:
    """The same mean and spread of every element and of all together in many draws, up to seven standard errors."""
    for x, y in zip(_columns(ours), _columns(theirs), strict=True):
        if not y.numel():
            continue
        scale = y.abs().median() + 1e-6  # bounded values, so that draws without a mean (cauchy) have moments too
        x, y = torch.atan(x / scale), torch.atan(y / scale)
        for a, b in ((x, y), (x.square(), y.square()), (x.mean(1), y.mean(1)), (x.std(1), y.std(1))):
            errors = ((a.var(0) + b.var(0)) / DRAWS).sqrt()
            off = (a.mean(0) - b.mean(0)).abs() - 7 * errors
            assert off.nan_to_num().amax() <= 1e-6, "the draws have another distribution than torch's"


def _columns(draws: list[Any]) -> Iterator[torch.Tensor]:
    """Of each result, one row a draw."""
    for results in zip(*(tree_leaves(draw) for draw in draws), strict=True):
        if isinstance(results[0], torch.Tensor):
            plain = [torch.view_as_real(r.resolve_conj()) if r.is_complex() else r for r in results]
            yield torch.stack(plain).to(torch.float64).reshape(len(plain), -1)


@contextmanager
def _free_draws() -> Iterator[None]:
    """OpInfo seeds its random operators anew in each call; inside, they draw on."""
    holders = [m for m in list(sys.modules.values()) if m is not None and "wrapper_set_seed" in vars(m)]
    seeding = [m.wrapper_set_seed for m in holders]
    for module in holders:
        module.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    try:
        yield
    finally:
        for module, function in zip(holders, seeding, strict=True):
            module.wrapper_set_seed = function
