"""A loss that is no mean over rows is named before tasks divide them; ordinary losses are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dask import array as dask_array
from torch import nn

import tfnb
from tfnb.cluster.notebook import divided_rows
from tfnb.cluster.notebook.steps_there import batches
from tfnb.errors import InvalidArgument
from tfnb.graph import lazy_memory
from tfnb.placement.placement import Piece
from tfnb.session import default_session

ROWS = 48
Build = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine has the time that a comparison takes."""
    monkeypatch.setattr(divided_rows, "SECONDS", 200.0)


def flat() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 4))


class Data:
    """Feeds that the losses take, by the letters of their arguments."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.x, self.y = torch.randn(ROWS, 3, 4), torch.randint(0, 4, (ROWS,))
        self.z = torch.where(torch.rand(ROWS) < 0.2, -100, self.y)  # some are to be ignored
        self.k = (torch.rand(ROWS, 4) > 0.4).float()  # a mask
        self.w = torch.rand(ROWS)
        self.t = torch.randint(0, 9, (ROWS, 5))  # words


def recorded(loss: Build, feeds: Sequence[torch.Tensor], name: str = "divided") -> tuple[Any, dict[Any, torch.Tensor]]:
    """A step of plain descent, and its data."""
    with tfnb.record(name):
        given = [tfnb.placeholder(rows[:8]) for rows in feeds]
        train = tfnb.train.SGD(0.1).minimize(loss(*given))
    return train, dict(zip(given, feeds, strict=True))


def seen(loss: Build, letters: str, *, batch: int = 16, tasks: int = 2) -> divided_rows.Observation:
    """What a look at a loss of these feeds tells, without a cluster."""
    data = Data()
    train, feeds = recorded(loss, [getattr(data, letter) for letter in letters])
    step = default_session(train.graph)._prepare(train, tuple(feeds)).code.step
    homes = {variable.key: (Piece(0, variable.key),) for variable in step.variables}
    parts = ([rows[at : at + batch] for rows in feeds.values()] for at in range(0, ROWS, batch))
    return divided_rows.look(step, homes, tasks, [b for b in batches(step, ((p, 0) for p in parts)) if b is not None])


# -- losses that are a mean over rows ----------------------------------------------------------------------------


def with_penalty() -> Build:
    m = flat()
    return lambda x, y: F.cross_entropy(m(x), y) + 0.1 * sum(p.square().sum() for p in m.parameters())


def with_dropouts() -> Build:
    m = nn.Sequential(nn.Dropout1d(0.3), nn.Flatten(), nn.Dropout(0.5), nn.AlphaDropout(0.1), nn.Linear(12, 4))
    return lambda x, y: F.cross_entropy(m(x), y, label_smoothing=0.1)


def with_norms_by_row() -> Build:
    m = nn.Sequential(nn.InstanceNorm1d(3), nn.GroupNorm(3, 3), nn.LayerNorm(4), nn.BatchNorm1d(3).eval(), flat())
    tracked = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
    return lambda x, y: F.cross_entropy(m(tracked(x)), y)


def of_words() -> Build:
    e, enc, h = nn.Embedding(9, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True), nn.Linear(8, 9)
    return lambda t: F.cross_entropy(h(enc(e(t)))[:, :-1].flatten(0, 1), t[:, 1:].flatten())


def with_sparse_rows() -> Build:
    e, h = nn.Embedding(9, 8, sparse=True), nn.Linear(8, 4)
    return lambda t, y: F.cross_entropy(h(e(t).mean(1)), y)


def recurrent() -> Build:
    r, h = nn.LSTM(4, 5, 2, dropout=0.3, batch_first=True), nn.Linear(5, 4)
    return lambda x, y: F.cross_entropy(h(r(x)[0][:, -1]), y)


def in_a_loop() -> Build:
    cell, h = nn.GRUCell(4, 5), nn.Linear(5, 4)

    def loss(x: Any, y: Any) -> Any:
        init = (0, torch.zeros(x.shape[0], 5))
        step = lambda t, s: (t + 1, F.dropout(cell(x[:, t], s), 0.3))  # noqa: E731
        return F.cross_entropy(h(tfnb.while_loop(lambda t, s: t < 3, step, init)[1]), y)

    return loss


def attentive() -> Build:
    """The bias of keys has a gradient of zero, but for what rounding leaves."""
    a, h = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 4)
    return lambda x, y: F.cross_entropy(h(a(x, x, x)[0].mean(1)), y)


def variational() -> Build:
    a, b = nn.Linear(12, 4), nn.Linear(2, 12)

    def loss(x: Any) -> Any:
        x = x.flatten(1)
        m, s = a(x).chunk(2, 1)
        z = m + torch.randn_like(m) * (s / 2).exp()
        return F.mse_loss(b(z), x) - 0.5 * (1 + s - m.square() - s.exp()).sum(1).mean()

    return loss


def noised() -> Build:
    a = nn.Linear(13, 12)

    def loss(x: Any) -> Any:
        x = x.flatten(1)
        t, noise = torch.randint(0, 100, (x.shape[0], 1)) / 100, torch.randn_like(x)
        return F.mse_loss(a(torch.cat([x * t + noise * (1 - t), t], 1)), noise)

    return loss


def mixed_up() -> Build:
    m = flat()

    def loss(x: Any, y: Any) -> Any:
        at, share = torch.randperm(x.shape[0]), torch.rand(())
        out = m(share * x + (1 - share) * x[at])
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[at])

    return loss


def of_pairs() -> Build:
    """Two batches behind each other: dropout masks are no slices of consecutive rows."""
    m = nn.Sequential(flat(), nn.Dropout(0.5))

    def loss(x: Any) -> Any:
        a, b = (m(torch.cat([x, -x])) * torch.rand(2 * x.shape[0], 4)).chunk(2)
        return (a - b).square().sum(1).mean()

    return loss


def summed_by_rows() -> Build:
    m = flat()
    return lambda x, y: F.cross_entropy(m(x), y, reduction="sum") / x.shape[0]


def of_rows_of_their_own() -> Build:
    """Maxima, masks and weights within a row."""
    m = flat()
    return lambda x, k, w: (m(x).max(1).values * w + (m(x) * k).sum(1) / (k.sum(1) + 1)).mean()


QUIET = {
    with_penalty: "xy", with_dropouts: "xy", with_norms_by_row: "xy", of_words: "t", with_sparse_rows: "ty",
    recurrent: "xy", in_a_loop: "xy", attentive: "xy", variational: "x", noised: "x", mixed_up: "xy", of_pairs: "x",
    summed_by_rows: "xy", of_rows_of_their_own: "xkw",
}  # fmt: skip


@pytest.mark.parametrize(("number", "make"), [*enumerate(QUIET)], ids=lambda one: getattr(one, "__name__", ""))
def test_nothing_is_said_of_a_mean_over_rows(number: int, make: Callable[[], Build]) -> None:
    assert seen(make(), QUIET[make], tasks=2 + number % 2) == divided_rows.Observation()


# -- and losses that are none -----------------------------------------------------------------------------------


def contrasted(m: nn.Module, x: Any) -> Any:
    z = F.normalize(m(x))
    return F.cross_entropy(z @ z.T / 0.5, torch.arange(x.shape[0]))


def normed_by_hand(m: nn.Module, x: Any) -> Any:
    z = m(x)
    return (((z - z.mean(0)) / (z.var(0) + 1e-3).sqrt()) ** 3 - 1).square().mean()


EXACT: dict[str, tuple[Callable[..., Any], str]] = {
    "a sum": (lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"), "xy"),
    "a sum in torch's loss": (lambda m, x, k: F.binary_cross_entropy_with_logits(m(x), k, reduction="sum"), "xk"),
    "a number of rows": (lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum") / 16, "xy"),
    "ignored": (lambda m, x, z: F.cross_entropy(m(x), z), "xz"),
    "ignored words": (
        lambda m, t: F.cross_entropy(F.one_hot(t, 9).float().transpose(1, 2) * m.get_parameter("1.bias").sum().exp()
                                     + m.get_parameter("1.bias")[0] * torch.arange(9.0)[:, None], t, ignore_index=0),
        "t",
    ),
    "smoothed": (lambda m, x, z: F.cross_entropy(m(x), z, label_smoothing=0.1), "xz"),
    "classes": (lambda m, x, y: F.cross_entropy(m(x), y, weight=torch.tensor([1.0, 5, 0.1, 2])), "xy"),
    "smoothed classes": (
        lambda m, x, y: F.cross_entropy(m(x), y, weight=torch.tensor([1.0, 5, 0.1, 2]), label_smoothing=0.2), "xy",
    ),
    "weights": (lambda m, x, y, w: (F.cross_entropy(m(x), y, reduction="none") * w).sum() / w.sum(), "xyw"),
    "a mask": (lambda m, x, k: (m(x).square() * k).sum() / k.sum(), "xk"),
    "a clamped mask": (lambda m, x, k: (m(x).square() * k).sum() / k.sum().clamp(min=40), "xk"),
    "an index": (lambda m, x, y: m(x).square().mean(1)[y > 1].mean(), "xy"),
    "a selection": (lambda m, x: torch.masked_select(m(x), m(x) > 0).mean(), "x"),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_nothing_is_said_of_a_weighted_mean_or_a_sum(name: str) -> None:
    loss, letters = EXACT[name]
    module = flat()
    assert seen(lambda *feeds: loss(module, *feeds), letters) == divided_rows.Observation()


NAMED: dict[str, tuple[Callable[..., Any], str, str]] = {
    "a sum beside a mean": (
        lambda m, x, y: F.cross_entropy(m(x), y) + 1e-2 * m(x).square().sum(), "xy", "add joins values that parts",
    ),
    "a penalty beside a sum": (
        lambda m, x, y: m(x).square().sum() + m.get_parameter("1.weight").square().sum(), "xy", "a term without rows",
    ),
    "two masks": (
        lambda m, x, k, w: (m(x) * k).sum() / k.sum() + (m(x).sum(1) * w).sum() / w.sum(), "xkw", "means by two masks",
    ),
    "learned weights": (
        lambda m, x: (lambda a: (m(x)[:, 0] * a).sum() / a.sum())(m(x)[:, 1].exp()), "x", "through which gradients",
    ),
    "a maximum": (lambda m, x, y: m(x).max(), "xy", "largest or smallest of all rows"),
    "a root": (lambda m, x: m(x).square().mean().sqrt(), "x", "sqrt of a mean over rows is no mean"),
    "contrast": (contrasted, "x", "its rows are computed with each other"),
    "a norm by hand": (normed_by_hand, "x", "its rows are computed with each other"),
    "a deviation": (lambda m, x: F.relu(3 - m(x).std(0)).mean(), "x", "statistic of all rows"),
}  # fmt: skip


BENT: dict[str, tuple[Callable[..., Any], str, str]] = {
    "flooding": (lambda m, x: (m(x).square().mean() + 5).abs() - 5, "x", "abs of a mean over rows is no mean of abs"),
    "a clamp": (lambda m, x: m(x).square().mean().clamp(max=99.0), "x", "clamp of a mean over rows is no mean of"),
    "a branch": (
        lambda m, x: (lambda loss: tfnb.cond(loss < 99, lambda: loss, lambda: loss / 2))(m(x).square().mean()), "x",
        "cond of a mean over rows is no mean of cond",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BENT)
def test_a_loss_that_other_rows_may_make_none_is_named(name: str) -> None:
    loss, letters, why = BENT[name]
    module = flat()
    (note,) = seen(lambda *feeds: loss(module, *feeds), letters).notes
    assert "a mean over the rows that were looked at, and may be none over others" in note and why in note, note


@pytest.mark.parametrize("name", NAMED)
def test_a_loss_that_is_none_is_named(name: str) -> None:
    loss, letters, why = NAMED[name]
    module = flat()
    (note,) = seen(lambda *feeds: loss(module, *feeds), letters).notes
    assert why in note and "test_divided_rows.py line " in note and "sums over all rows in mid-step" in note, note


def longest(out: Any, y: Any) -> Any:
    """A loss whose loop goes as far as the largest number of all rows: no table knows what it makes of them."""
    init = (0, torch.zeros(()))
    return tfnb.while_loop(lambda i, s: i < y.max(), lambda i, s: (i + 1, s + (out * (i + 1)).square().mean()), init)[1]


def test_what_one_batch_hides_another_shows() -> None:
    """The first batch is all zeros; in the first half of each other one, the loop's limit is that of the whole."""
    module, y = flat(), torch.arange(ROWS) % 4
    y[:16] = 0
    data = Data()
    train, feeds = recorded(lambda x, y: longest(module(x), y), [data.x, y])
    step = default_session(train.graph)._prepare(train, tuple(feeds)).code.step
    homes = {variable.key: (Piece(0, variable.key),) for variable in step.variables}
    taken = batches(step, (([data.x[at : at + 7], y[at : at + 7]], 0) for at in (0, 7, 16, 24)))
    found = divided_rows.look(step, homes, 2, [batch for batch in taken if batch is not None])
    assert ["the loss is no mean over rows" in note for note in found.notes] == [True] and found.is_settled


def test_what_two_batches_hide_a_third_shows_however_slow_a_look_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divided_rows, "MORE", 0.0)
    y = torch.arange(ROWS) % 4
    y[32:40] = 0
    module = flat()
    train, feeds = recorded(lambda x, y: longest(module(x), y), [Data().x, y])
    step = default_session(train.graph)._prepare(train, tuple(feeds)).code.step
    homes = {variable.key: (Piece(0, variable.key),) for variable in step.variables}
    taken = batches(step, (([rows[at : at + 16] for rows in feeds.values()], 0) for at in range(0, ROWS, 16)))
    (note,) = divided_rows.look(step, homes, 2, [batch for batch in taken if batch is not None]).notes
    assert "the loss is no mean over rows" in note


def test_batch_norm_in_training_is_one_note_and_the_loss_is_compared_without_it() -> None:
    plain = nn.Sequential(nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(12, 4), nn.BatchNorm1d(4, affine=False))
    (note,) = seen(lambda x, y: F.cross_entropy(plain(x), y), "xy").notes
    assert "batch norm in training and 1 more" in note and "SyncBatchNorm" in note
    norm, root = seen(lambda x, y: F.cross_entropy(plain(x), y).sqrt(), "xy").notes
    assert "batch norm in training and 1 more" in norm and "sqrt of a mean" in root
    bare = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), flat())
    (note,) = seen(lambda x, y: F.cross_entropy(bare(x), y), "xy").notes
    assert "batch norm in training" in note


def test_coarse_numbers_are_compared_as_such() -> None:
    m = nn.Sequential(nn.Flatten(), nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))

    def loss(x: Any, y: Any, **options: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            out = m(x)
        return F.cross_entropy(out.float(), y, **options)

    assert seen(loss, "xy") == divided_rows.Observation()
    (note,) = seen(lambda x, y: loss(x, y) ** 2, "xy").notes
    assert "pow of a mean" in note


def test_the_autocast_of_a_caller_does_not_reach_the_look() -> None:
    m = nn.Sequential(nn.Flatten(), nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 4))
    train, feeds = recorded(lambda x, y: F.cross_entropy(m(x), y), [Data().x, Data().y])
    step = default_session(train.graph)._prepare(train, tuple(feeds)).code.step
    batch = next(iter(batches(step, [([*feeds.values()], 0)])))
    assert batch is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert divided_rows.look_at_microbatches(step, 4, batch) == divided_rows.Observation()


def test_a_look_that_takes_too_long_or_too_much_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    m = flat()
    loss = lambda x, y: F.cross_entropy(m(x), y, reduction="sum")  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(divided_rows, "SECONDS", 0.0)
        (note,) = seen(loss, "xy").notes
        assert "was not looked at: it takes more than" in note
    monkeypatch.setattr(lazy_memory, "free", lambda: 1000)
    (note,) = seen(loss, "xy").notes
    assert "was not looked at: this process has not the memory" in note


def test_draws_inside_of_a_loop_are_not_compared_and_said() -> None:
    m = flat()

    def loss(x: Any, y: Any) -> Any:
        init = (0, torch.zeros_like(m(x)))
        step = lambda t, s: (t + 1, s + m(x) * torch.rand(x.shape[0], 1))  # noqa: E731
        return F.cross_entropy(tfnb.while_loop(lambda t, s: t < 2, step, init)[1], y)

    (note,) = seen(loss, "xy").notes
    assert "was not looked at" in note and "draws random numbers" in note


def test_a_look_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    m = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3), flat())
    before = [t.clone() for t in m.state_dict().values()]
    states: list[torch.Tensor] = []
    look = divided_rows._Comparing.first

    def watched(self: Any, given: Any) -> Any:
        states.append(torch.get_rng_state())
        found = look(self, given)
        states.append(torch.get_rng_state())
        return found

    monkeypatch.setattr(divided_rows._Comparing, "first", watched)
    seen(lambda x, y: F.cross_entropy(m(x) * torch.rand(x.shape[0], 1), y), "xy")
    assert all(torch.equal(a, b) for a, b in zip(m.state_dict().values(), before, strict=True))
    assert len(states) == 2 and torch.equal(*states)


# -- on a cluster -----------------------------------------------------------------------------------------------


def said(step: Any, data: Any, **options: Any) -> list[str]:
    """The warnings of a fit."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        tfnb.fit(step, data, shuffle=False, **{"batch_size": 8, **options})
    return [str(one.message) for one in found]


def rooted(name: str) -> tuple[nn.Module, Any, dict[Any, torch.Tensor]]:
    torch.manual_seed(3)
    module, data = flat(), Data()
    return module, *recorded(lambda x, y: F.cross_entropy(module(x), y).sqrt(), [data.x, data.y], name)


def test_a_fit_says_it_once_for_each_recording_and_number_of_tasks(connect: Callable[..., Any]) -> None:
    cluster = connect(2)
    _, step, data = rooted("once")
    (note,) = said(step, data)
    assert "sqrt of a mean over rows is no mean" in note and "divided over 2 tasks" in note and "exact=False" in note
    assert said(step, data) == []
    _, again, more = rooted("once")  # recorded again
    assert len(said(again, more)) == 1
    for options in ({"exact": False}, {"mode": "async"}):
        assert said(*rooted("others")[1:], **options) == []
    _, fed, feeds = rooted("feeds")
    rows = [dict(zip(feeds, part, strict=True)) for part in zip(*(v.split(8) for v in feeds.values()), strict=True)]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        steps = tfnb.fit(fed, rows).steps
    assert (len(found), steps) == (1, 6)
    _, chunked, arrays = rooted("chunks")
    pieces = {key: dask_array.from_array(rows.numpy(), chunks=(5, *rows.shape[1:])) for key, rows in arrays.items()}
    assert len(said(chunked, pieces)) == 1
    cluster.close()
    connect(3)
    (note,) = said(step, data)
    assert "divided over 3 tasks" in note
    (note,) = said(step, data, backup=1)  # two make a step, and average
    assert "without backup tasks sums over all rows" in note
    assert said(step, data, backup=1) == []


def test_a_look_leaves_a_training_as_it_is(connect: Callable[..., Any]) -> None:
    cluster, found = connect(2), []
    for exact in (None, True):
        module, step, data = rooted("same")
        said(step, data, exact=exact, epochs=2)
        cluster.pull()
        found.append([p.detach().clone() for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("exact", "kind"), [("no", InvalidArgument), (0, InvalidArgument)])
def test_what_exact_may_be(exact: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="exact"):
        tfnb.fit(*rooted("options")[1:], exact=exact)


def test_how_many_rows_of_a_batch_a_task_takes(connect: Callable[..., Any]) -> None:
    """The table of the README: the gradient is the number of rows of a step."""
    cluster, rows = connect(2), torch.ones(64, 1)
    module = nn.Linear(1, 1, bias=False)
    with tfnb.record("rows"):
        x = tfnb.placeholder(rows[:4])
        step = tfnb.train.SGD(1.0).minimize(module(x).sum())

    def took(train: Callable[[], Any]) -> float:
        with torch.no_grad():
            module.weight.zero_()
        train()
        cluster.pull()
        return -float(module.weight.detach())

    assert took(lambda: tfnb.fit(step, {x: rows}, batch_size=64, exact=False)) == 64  # 32 and 32, added up
    assert took(lambda: tfnb.fit(step, {x: rows}, batch_size=64, mode="async")) == 64
    assert took(lambda: tfnb.fit(step, {x: rows}, epochs=2, batch_size=64, mode="async")) == 2 * 64
    assert took(lambda: tfnb.run(step, {x: rows})) == 64


def test_a_later_batch_whose_feeds_have_different_lengths_is_looked_at(connect: Callable[..., Any]) -> None:
    """Each task has all rows of the shorter one, and a sum over them counts twice; a mean does not."""
    connect(2)
    for reduce, count in ((torch.sum, 1), (torch.mean, 0)):
        weight = nn.Parameter(torch.ones(2))
        with tfnb.record("uneven"):
            x, z = (tfnb.placeholder(torch.ones(rows, 2), name=name) for rows, name in ((4, "x"), (3, "z")))
            step = tfnb.train.SGD(0.01).minimize(reduce((x @ weight).square()) + reduce((z @ weight).sin()))
        feeds = [{x: torch.randn(8, 2), z: torch.randn(rows, 2)} for rows in (8, 5, 8, 5)]
        notes = said(step, feeds, batch_size=None)
        assert len(notes) == count and all("feeds of different lengths" in note for note in notes), notes
