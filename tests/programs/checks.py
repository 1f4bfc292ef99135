"""Properties of every random program; the oracle is eager torch.

Each check returns a word for what happened: ``ok``, or ``refused: ...`` where the recorder said that it cannot.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import tfnb
from tests.programs.program import Program, differences, labels, tame, tensors, tolerance
from tfnb.execution import lower
from tfnb.graph import Graph, Value
from tfnb.graph.check import check
from tfnb.memory import LAST
from tfnb.passes import PIPELINE, donate, order, split
from tfnb.passes.rewrite import Pass


class Recorded:
    """A program in a graph: its placeholders, and the values of its names."""

    def __init__(self, program: Program, *, batch: bool = False) -> None:
        self.program = program
        samples = program.make()
        with tfnb.record() as self.graph:
            self.held = {
                given.name: tfnb.placeholder(samples[given.name], shape=None if batch else given.shape)
                for given in program.inputs
            }
            self.results = program.run(dict(self.held))
        self.session = tfnb.Session(self.graph)
        self.tensors = tensors(self.results)

    def feeds(self, values: Mapping[str, torch.Tensor]) -> dict[Any, torch.Tensor]:
        """Values by placeholder."""
        return {self.held[name]: value for name, value in values.items()}


def recorded(program: Program, *, batch: bool = False) -> Recorded | str:
    """The program in a graph, or the text of its refusal: an error of ours with the line."""
    try:
        return Recorded(program, batch=batch)
    except tfnb.errors.TfnbError as error:
        assert ".py line " in str(error), f"an error without the line: {error}{program!r}"
        return f"refused: {str(error).splitlines()[0][:60]}"


def eagerly(program: Program, seed: int, batch: int | None = None) -> dict[str, Any] | None:
    """The eager results on other data; None if torch refuses, or the values tell nothing."""
    try:
        found = program.run(program.make(seed, batch))
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None
    return found if tame(found) else None


def same(
    got: Sequence[torch.Tensor], want: Mapping[str, Any], what: str, program: Program, rounding: float = 0.0
) -> None:
    """Raise AssertionError with the program where ``got`` is not ``want``."""
    found = differences(got, tensors(want), labels(want), rounding)
    assert not found, f"{what}: {'; '.join(found)}{program!r}"


def replays(program: Program) -> str:
    """A recording equals eager; a run on other data equals eager on that data, for every form of fetching."""
    want = program.run(program.make())
    got = recorded(program)
    if isinstance(got, str):
        return got
    check(got.graph.contents)
    assert labels(got.results) == labels(want)
    same([t.sample for t in got.tensors], want, "recorded", program)
    _handles_alike(got, want)
    other = eagerly(program, 2)
    if other is None:
        return "ok"
    feeds = got.feeds(program.make(2))
    same(got.session.run(got.tensors, feeds), other, "run", program)
    for key, value in program.make(2).items():
        assert torch.equal(feeds[got.held[key]], value), f"the run changed the feed {key}{program!r}"
    same([got.session.run(t, feeds) for t in got.tensors], other, "run one by one", program)
    call = got.session.make_callable(got.tensors, list(feeds))
    same(call(*feeds.values()), other, "callable", program)
    strided = {key: _oddly_strided(value) for key, value in feeds.items()}
    same(got.session.run(got.tensors, strided), other, "run on strided feeds", program)
    return "ok"


def _oddly_strided(value: torch.Tensor) -> torch.Tensor:
    """The same values with gaps and axes in another order."""
    wide = value.new_zeros([2 * n for n in reversed(value.shape)]).permute([*reversed(range(value.dim()))])
    view = wide[tuple(slice(None, None, 2) for _ in value.shape)]
    return view.copy_(value)


def _handles_alike(got: Recorded, want: Mapping[str, Any]) -> None:
    """Recorded tensors have the shapes, strides and identities that Python code would see."""
    program, plain = got.program, tensors(want)
    for t, w, name in zip(got.tensors, plain, labels(want), strict=True):
        assert tuple(t.shape) == tuple(w.shape), f"{name} has shape {tuple(t.shape)}, not {tuple(w.shape)}{program!r}"
        steps = [(a, b) for a, b, n in zip(t.stride(), w.stride(), w.shape, strict=True) if n > 1 and w.numel()]
        assert all(a == b for a, b in steps), f"{name} has strides {t.stride()}, not {w.stride()}{program!r}"
    ids = [[next(i for i, u in enumerate(row) if u is t) for t in row] for row in (got.tensors, plain)]
    assert ids[0] == ids[1], f"identity: {ids[0]}, not {ids[1]}{program!r}"


def files(program: Program) -> str:
    """A saved and loaded graph gives the same values."""
    got = recorded(program)
    other = eagerly(program, 2)
    if isinstance(got, str) or other is None:
        return "not asked"
    values = [t.value for t in got.tensors]
    places = {node.id: place for place, node in enumerate(got.graph.nodes)}
    with tempfile.TemporaryDirectory() as folder:
        got.graph.save(Path(folder) / "g.json")
        loaded = Graph.load(Path(folder) / "g.json")
    nodes = loaded.nodes
    feeds = {nodes[places[got.held[name].feed_value.node]]: v for name, v in program.make(2).items()}
    fetches = [nodes[places[v.node]].value(v.index) for v in values]
    same(tfnb.Session(loaded).run(fetches, feeds), other, "loaded", program)
    return "ok"


def passes(program: Program) -> str:
    """Each pass alone keeps every fetched value, and so does feeding an intermediate tensor with its own value."""
    got = recorded(program)
    other = eagerly(program, 2)
    if isinstance(got, str) or other is None:
        return "not asked"
    values = [t.value for t in got.tensors]
    keys = [held.feed_value for held in got.held.values()]
    feeds = [program.make(2)[name] for name in got.held]
    for run in (*PIPELINE, split, order):
        after = run(got.graph, values, keys)
        check(after.contents)
        lowered = lower(after, values, keys)
        found, _ = lowered.compute(feeds, [variable.storage for variable in lowered.variables])
        same(found, other, run.__name__, program)
    for value, tensor in zip(values, tensors(other), strict=True):
        if value not in keys:
            fed = dict(zip(keys, feeds, strict=True)) | {value: tensor}
            same(got.session.run(values, fed), other, f"run with {value} fed", program)
    return "ok"


def in_place(least: int) -> tuple[Pass, ...]:
    """The last passes, with donation of every piece of memory of so many bytes."""

    def donating(graph: Graph, fetches: Collection[Value] = (), feeds: Collection[Value] = ()) -> Graph:
        return donate(graph, fetches, feeds, least=least)

    return (*LAST[: LAST.index(donate)], donating)


def donates(program: Program) -> str:
    """All fetches have the same bits with and without donation, and no feed is written."""
    got = recorded(program)
    if isinstance(got, str) or eagerly(program, 2) is None:
        return "not asked"
    values = [t.value for t in got.tensors]
    keys = [held.feed_value for held in got.held.values()]
    feeds = [program.make(2)[name] for name in got.held]
    count = 0
    for wanted in [[value] for value in values] + [values[::2], values[1::2]]:
        outs = []
        for least in (1 << 40, 1):
            lowered = lower(got.graph, wanted, keys, in_place(least))
            count += len(lowered.donated)
            given = [feed.clone() for feed in feeds]
            before = [feed._version for feed in given]
            outs.append(lowered.compute(given, [variable.storage for variable in lowered.variables])[0])
            assert [feed._version for feed in given] == before, f"a feed was written{program!r}"
        for plain, donated in zip(*outs, strict=True):
            assert plain.stride() == donated.stride(), f"{donated.stride()}, not {plain.stride()}{program!r}"
            torch.testing.assert_close(donated, plain, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{m}{program!r}")
    return f"ok, {min(count, 1)}"


def batches(program: Program) -> str:
    """Recorded at one batch, run at others: equal to eager, or an error before the run."""
    if not any(given.varies for given in program.inputs):
        return "not asked"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # sizes that became constants
        got = recorded(program, batch=True)
    if isinstance(got, str):
        return got
    same([t.sample for t in got.tensors], program.run(program.make()), "recorded", program)
    outcomes = []
    for size in (1, 2, 7):
        want = eagerly(program, 2, size)
        if want is None:
            continue
        try:
            found = got.session.run(got.tensors, got.feeds(program.make(2, size)))
        except tfnb.errors.TfnbError as error:
            outcomes.append(f"batch {size} refused: {type(error).__name__}")
            continue
        except Exception as error:
            raise AssertionError(f"batch {size}: {type(error).__name__} {error}{program!r}") from error
        assert labels(want) == labels(got.results), f"batch {size}: other results{program!r}"
        same(found, want, f"batch {size}", program)
    return outcomes[0] if outcomes else "ok"


def differentiates(program: Program) -> str:
    """The symbolic gradients of all results equal the gradients of torch autograd."""
    plain = {k: v.requires_grad_(v.dtype.is_floating_point or v.dtype.is_complex) for k, v in program.make(1).items()}
    roots = {k: v for k, v in plain.items() if v.requires_grad}
    try:
        want = program.run({k: v * 1 if v.requires_grad else v for k, v in plain.items()})
        loss = _loss([t for t in tensors(want) if t.requires_grad])
        expected = torch.autograd.grad(loss, list(roots.values()), allow_unused=True)
    except (RuntimeError, IndexError):  # torch does not differentiate this program
        return "not asked"
    samples = program.make()
    flows = [t.requires_grad for t in tensors(want)]
    try:
        with tfnb.record():
            held = {g.name: tfnb.placeholder(samples[g.name], shape=g.shape) for g in program.inputs}
            results = program.run({k: v * 1 if k in roots else v for k, v in held.items()})
            ends = [t for t, flow in zip(tensors(results), flows, strict=True) if flow]
            got = tfnb.gradients(_loss(ends), [held[k] for k in roots], unconnected="zero")
    except tfnb.errors.TfnbError as error:
        return f"refused: {str(error).splitlines()[0][:60]}"
    zeros = [torch.zeros_like(x) if dx is None else dx for x, dx in zip(roots.values(), expected, strict=True)]
    narrowest = max(map(tolerance, tensors(want)))  # a gradient went through the dtypes on its way
    same([dx.sample for dx in got], dict(zip(roots, zeros, strict=True)), "gradient", program, narrowest)
    return "ok"


def _loss(ends: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number to which every element of ``ends`` counts differently."""
    real = [torch.view_as_real(t.resolve_conj()) if t.dtype.is_complex else t for t in ends]
    parts = [(t.double() * torch.arange(1, t.numel() + 1).view(t.shape)).sum() for t in real]
    return torch.stack(parts).mul(torch.arange(1, len(parts) + 1)).sum()
