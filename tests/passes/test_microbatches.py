"""Microbatches: torch by hand, and a synchronous round of as many workers, are the oracles."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tfnb.errors import BranchChanged, InvalidArgument, NonFinite, ShapeError, Unimplemented
from tfnb.execution import lower
from tfnb.kernels.random import REPLICA
from tfnb.passes import step_graph
from tfnb.passes.flow import merges
from tfnb.passes.microbatches import divide, in_microbatches
from tfnb.placement.partition import split
from tfnb.placement.placement import Piece
from tfnb.session import Session, default_session

ROWS = 11  # 4 microbatches of 3, 3, 3, 2


class Net:
    """A recorded step, always from the same weights, and data for it."""

    def __init__(self, *, dtype=torch.float64, dropout=False, norm=False, embedding=False, make=None, clip=False):
        torch.manual_seed(3)
        first = nn.Embedding(6, 5, sparse=True) if embedding else nn.Linear(4, 5)
        more = [*([nn.BatchNorm1d(5)] if norm else []), nn.Tanh(), *([nn.Dropout(0.4)] if dropout else [])]
        self.model = nn.Sequential(first, *more, nn.Linear(5, 3)).to(dtype)
        self.x = torch.randint(0, 6, (ROWS,)) if embedding else torch.randn(ROWS, 4, dtype=dtype)
        self.y = torch.randn(ROWS, 3, dtype=dtype)
        with tfnb.record() as self.graph:
            x, y = tfnb.placeholder(self.x[:2], name="x"), tfnb.placeholder(self.y[:2], name="y")
            loss = F.mse_loss(self.model(x), y)
            count = (y > 0).sum()
            grads = tfnb.gradients(loss, list(self.model.parameters())) if clip else None
            optimizer = (make or (lambda: tfnb.train.SGD(0.3, momentum=0.5)))()
            if grads is None:
                train = optimizer.minimize(loss)
            else:
                norm_ = torch.sqrt(sum((g * g).sum() for g in grads))
                scaled = [g * (0.1 / norm_) for g in grads]
                train = optimizer.apply_gradients(list(zip(scaled, self.model.parameters(), strict=True)))
                self.norm = norm_
        self.feeds, self.loss, self.count, self.train = (x, y), loss, count, train

    @property
    def state(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def step(self, microbatches, steps=3, session=None, **options):
        session = session or default_session(self.graph)
        call = session.make_callable(
            (self.train, (self.loss, self.count)), self.feeds, microbatches=microbatches, **options
        )
        return [call(self.x, self.y)[1] for _ in range(steps)]

    def sync(self, workers, steps=3):
        """The same steps by the parts of a synchronous round: what tasks compute, and the servers' mean of it."""
        fetches = [self.train.value, self.loss.value]
        step = step_graph(self.graph, fetches, [feed.value for feed in self.feeds])
        cut = split(step, {v.key: (Piece(0, v.key),) for v in step.variables}, parallel=True)
        assert cut.divides
        (server,) = cut.servers
        task = lower(cut.compute, [cut.fetches[1], *(b.value for b in server.borders)], cut.feeds)
        update = lower(server.graph, [server.target], server.feeds)
        told = []
        for run in range(steps):
            ranges, found = divide(ROWS, workers), []
            for place, (start, stop) in enumerate(ranges):
                storages = [variable.storage for variable in task.variables]
                values, _ = task.compute([self.x[start:stop], self.y[start:stop]], storages, run + place * REPLICA)
                found.append(values)
            rows = [stop - start for start, stop in ranges]
            merged = [
                merges.MERGES[border.kind].merge([values[at] for values in found], merges.ROWS.shares(rows))
                for at, border in enumerate(server.borders, 1)
            ]
            update.commit(update.compute(merged, [v.storage for v in update.variables], run)[1])
            told.append(merges.MERGES["grad"].merge([values[0] for values in found], merges.ROWS.shares(rows)))
        return told


@pytest.mark.parametrize("microbatches", [4, 50])
@pytest.mark.parametrize("kind", ["plain", "dropout", "embedding", "float32", "bfloat16", "adam"])
def test_equals_a_synchronous_round_of_as_many_workers_bitwise(kind, microbatches):
    options = {
        "plain": {}, "dropout": {"dropout": True}, 
        "embedding": {"embedding": True, "make": lambda: tfnb.train.SGD(0.3)},
        "float32": {"dtype": torch.float32}, "bfloat16": {"dtype": torch.bfloat16},
        "adam": {"make": lambda: tfnb.train.Adam(0.01)},
    }[kind]  # fmt: skip
    here, there = Net(**options), Net(**options)
    losses, expected = here.step(microbatches), there.sync(microbatches)
    assert [a.item() for a, _ in losses] == [b.item() for b in expected]
    for name, value in here.state.items():
        assert torch.equal(value, there.state[name]), name


def test_equals_the_whole_batch_where_the_loss_is_a_mean_over_rows():
    many, one = Net(clip=True), Net(clip=True)
    for (a, n), (b, m) in zip(many.step(4), one.step(1), strict=True):
        assert abs(a - b) < 1e-12 and n == m == (many.y > 0).sum()
    for name, value in many.state.items():
        assert torch.allclose(value, one.state[name], rtol=0, atol=1e-12), name


def test_what_is_computed_of_averaged_gradients_is_done_once():
    net = Net(clip=True)
    call = default_session(net.graph).make_callable((net.train, net.norm), net.feeds, microbatches=3)
    loss = F.mse_loss(net.model(net.x), net.y)
    grads = torch.autograd.grad(loss, list(net.model.parameters()))
    assert torch.allclose(call(net.x, net.y)[1], torch.cat([g.flatten() for g in grads]).norm(), rtol=1e-12)


def test_batch_norm_moves_once_for_each_microbatch_as_accumulated_by_hand():
    net = Net(norm=True, make=lambda: tfnb.train.SGD(0.3))
    twin = Net(norm=True).model
    optimizer = torch.optim.SGD(twin.parameters(), 0.3)
    for _ in range(3):
        for start, stop in divide(ROWS, 4):
            (F.mse_loss(twin(net.x[start:stop]), net.y[start:stop]) * ((stop - start) / ROWS)).backward()
        optimizer.step()
        optimizer.zero_grad()
    net.step(4)
    for name, value in net.state.items():
        assert torch.allclose(value, twin.state_dict()[name], rtol=1e-12, atol=1e-14), name
    assert net.state["1.num_batches_tracked"] == 12


def test_a_short_batch_has_fewer_microbatches_where_one_of_a_single_row_breaks_batch_norm():
    net, made = Net(norm=True), Net(norm=True)
    x, y = net.feeds
    optimizer = torch.optim.SGD(made.model.parameters(), 0.3, momentum=0.5)
    for start, stop in ((0, 6), (6, 11)):  # 11 rows by 6: the last 5 are 3, 2 and not 2, 2, 1
        optimizer.zero_grad()
        for one, other in zip(
            *(t[start:stop].tensor_split(3 if start == 0 else 2) for t in (made.x, made.y)), strict=True
        ):
            (F.mse_loss(made.model(one), other) * (len(one) / (stop - start))).backward()
        optimizer.step()
    with pytest.warns(UserWarning, match=r"recorded for B .*, so that a batch of 5 rows .* into 2 microbatches, not 3"):
        tfnb.fit(net.train, {x: net.x, y: net.y}, batch_size=6, shuffle=False, microbatches=3, exact=False)
    for name, value in made.state.items():
        torch.testing.assert_close(net.state[name], value, msg=name)


class Branching(nn.Module):
    """A branch of Python by the number of rows."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x):
        return self.line(x) if x.shape[0] >= 4 else self.line(x) * 0


def test_microbatches_take_no_branch_that_their_rows_would_not():
    net, model = Net(), Branching()
    with tfnb.record() as graph:
        x, y = tfnb.placeholder(net.x, name="x"), tfnb.placeholder(net.y, name="y")
        loss = F.mse_loss(model(x), y)
        count = torch.ones_like(y[:, 0]).mean() * y.shape[0]  # rows of a microbatch; of all of them their sum
        train = tfnb.train.SGD(0.1).minimize(loss)
    call = default_session(graph).make_callable((train, count), (x, y), microbatches=4)
    with pytest.warns(
        UserWarning,
        match=r"test_microbatches.py.*recorded for B >= 4, so that a batch of 11 rows .* into 2 microbatches, not 4",
    ):
        assert float(call(net.x, net.y)[1]) == pytest.approx(6 + 5)
    assert float(call(net.x[:7], net.y[:7])[1]) == pytest.approx(7)  # the whole of it
    with pytest.raises(ShapeError, match="recorded for B >= 4"):
        call(net.x[:3], net.y[:3])


@pytest.mark.parametrize("executor", ["dataflow", "parts"])
def test_values_do_not_depend_on_the_executor(executor):
    here, there = Net(dropout=True), Net(dropout=True)
    expected = here.step(4)
    with Session(there.graph, executor=executor) as session:
        found = there.step(4, session=session)
    assert [a.item() for a, _ in expected] == [a.item() for a, _ in found]
    for name, value in here.state.items():
        assert torch.equal(value, there.state[name]), name


def test_the_body_holds_no_more_than_a_microbatch():
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(2, 64), name="x")
        h = x
        for _ in range(8):
            h = torch.tanh(layer(h))
        train = tfnb.train.SGD(0.1).minimize(h.square().mean())
    step = in_microbatches(step_graph(graph, [train.value], [x.value])).step
    outside = [node for node in step.graph.nodes if node.op != "tfnb.placeholder"]
    batch = {size for node in outside for spec in node.outputs for size in spec.shape if not isinstance(size, int)}
    assert all("B" not in str(size) for size in batch)
    assert sum(node.op == "tfnb.while" for node in outside) == 1


def test_a_variable_that_a_batch_writes_itself_is_written_by_each_microbatch():
    seen = torch.zeros((), dtype=torch.float64)
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(2, 3, dtype=torch.float64), name="x")
        total = tfnb.Variable(seen, name="total", trainable=False)
        add = total.assign_add(x.sum())
        after = total.read() + 0.0
    with pytest.warns(UserWarning, match=r"writes total itself.*microbatches=4"):
        call = default_session(graph).make_callable(add, [x], microbatches=4)
    call(torch.ones(9, 3, dtype=torch.float64))
    assert total.value() == 27
    with pytest.warns(UserWarning, match="writes total itself"):
        fetched = default_session(graph).make_callable([add, after], [x], microbatches=2)
    assert fetched(torch.ones(2, 3, dtype=torch.float64))[0] == 33 == total.value()


class Follows(nn.Module):
    """Keeps a mean over the rows of a batch in a buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("center", torch.zeros(3))

    def forward(self, x):
        self.center.lerp_(x.detach().mean(0), 0.5)
        return self.layer(x)


def test_a_buffer_that_a_batch_writes_is_told_and_those_of_batch_norm_are_told_by_their_op():
    model = Follows()
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(2, 3))
        train = tfnb.train.SGD(0.1).minimize(model(x).square().mean())
    with pytest.warns(UserWarning, match=r"writes center itself.*microbatches=2"):
        default_session(graph).make_callable(train, [x], microbatches=2)


def test_a_watched_number_that_is_no_mean_over_rows_is_told():
    torch.manual_seed(0)
    with tfnb.record():
        w = nn.Parameter(torch.ones(3))
        x = tfnb.placeholder(torch.ones(2, 3), name="x")
        loss = (x * w).square().mean()
        grown, spread = loss.exp(), (x * w).std()
        train = tfnb.train.SGD(0.01).minimize(loss)
    data = {x: torch.randn(8, 3)}
    tfnb.fit(train, data, batch_size=8, microbatches=2, watch=[loss])
    with pytest.warns(UserWarning) as told:
        tfnb.fit(train, data, batch_size=8, microbatches=2, watch={"grown": grown, "spread": spread})
    first, second = (str(each.message) for each in told)
    assert "exp of a mean over rows is no mean of exp over parts" in first and "2 microbatches divide" in first
    assert "std is a statistic of all rows, and a microbatch has only its own" in second


@pytest.mark.parametrize(
    ("watched", "shown", "claim"),
    [
        (lambda x, y: (torch.bincount(y, minlength=5) > 0).sum(), 8, "no sum over rows. What is shown is the sum of"),
        (lambda x, y: y.max() + 1, 8, "no sum over rows. What is shown is the sum of"),
        (
            lambda x, y: (x - x.mean(0)).abs().amax(),
            0.5,
            "no extreme of rows by themselves: its rows are computed with",
        ),
        (lambda x, y: (y > 2).any(), True, ""),
        (lambda x, y: (y > 0).all(), False, ""),
        (lambda x, y: torch.full((), x.shape[0]), 8, ""),
    ],
    ids=["classes", "greatest label", "distance", "any", "all", "rows"],
)
def test_a_watched_count_or_answer_that_is_not_that_of_all_rows_is_told(watched, shown, claim):
    """The number of classes is no sum of those of parts, and so on; whether any row is so is known of the parts."""
    with tfnb.record():
        w = nn.Parameter(torch.ones(()))
        x, y = tfnb.placeholder(torch.ones(2), name="x"), tfnb.placeholder(torch.zeros(2, dtype=torch.long), name="y")
        train, seen = tfnb.train.SGD(0.01).minimize((x * w).square().mean()), watched(x, y)
    data = {x: torch.tensor([0.0, 1, 0, 1, 4, 4, 5, 5]), y: torch.arange(8) % 4}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = tfnb.fit(train, data, batch_size=8, shuffle=False, microbatches=2, watch={"seen": seen})
    assert found.history[0]["seen"] == shown
    assert [claim in str(each.message) for each in told] == [True] * bool(claim)


def test_a_watched_norm_of_averaged_gradients_hides_no_loss_that_is_no_mean():
    with tfnb.record():
        w = nn.Parameter(torch.ones(3))
        x = tfnb.placeholder(torch.ones(2, 3), name="x")
        (grad,) = tfnb.gradients((x * w).square().mean().sqrt(), [w])
        train = tfnb.train.SGD(0.01).apply_gradients([(grad, w)])
        norm = grad.norm()
    with pytest.warns(UserWarning, match=r"sqrt of a mean over rows.*divided over 2 microbatches"):
        tfnb.fit(train, {x: torch.randn(8, 3)}, batch_size=8, microbatches=2, watch=[norm])


def test_nothing_is_written_of_a_step_that_is_not_finite():
    net = Net()
    net.y[-1] = float("inf")
    before = net.state
    with pytest.raises(NonFinite):
        net.step(4, steps=1, check="nan")
    for name, value in before.items():
        assert torch.equal(value, net.state[name])


def test_what_microbatches_cannot_do_is_refused_by_name():
    net = Net()
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.ones(2, 3), name="x")
        fixed = tfnb.placeholder(torch.ones(2, 3), shape=(2, 3), name="fixed")
        rows = x.exp()
        tfnb.print(x.sum())
        shown = (fixed * 2).sum()
        middle = x.long().median()
    session = default_session(graph)
    with pytest.raises(Unimplemented, match=r"rows.*fetch or watch real numbers and counts"):
        session.make_callable(rows, [x], microbatches=2)
    with pytest.raises(Unimplemented, match=r"middle.*and the sum of counts"):  # a sum of medians says nothing
        session.make_callable(middle, [x], microbatches=2)
    with pytest.raises(InvalidArgument, match="varies on axis 0: fixed"):
        session.make_callable(shown, [fixed], microbatches=2)
    call = default_session(net.graph).make_callable(net.train, net.feeds, microbatches=2)
    with pytest.raises((InvalidArgument, ShapeError)):
        call(net.x[:0], net.y[:0])


@pytest.mark.parametrize("microbatches", [2, 5, 16])
def test_extremes_over_rows_are_those_of_all_rows(microbatches):
    rows = torch.randn(16, 3, dtype=torch.float64)
    rows[11, 1] = torch.nan
    with tfnb.record() as graph:
        x = tfnb.placeholder(rows[:2], name="x")
        known, scores = x[:, ::2], (x[:, ::2] * 100).long()
        found = [known.amax(), known.min(), x.max(), scores.max(), scores.amin(), x.half().max()]
    values = default_session(graph).make_callable(found, [x], microbatches=microbatches)(rows)
    known, scores = rows[:, ::2], (rows[:, ::2] * 100).long()
    assert [v.item() for v in values[:2]] == [known.max().item(), known.min().item()] and values[2].isnan()
    assert [v.item() for v in values[3:5]] == [scores.max().item(), scores.min().item()] and values[5].isnan()
    assert values[3].dtype is torch.int64 and values[5].dtype is torch.float16


def test_a_watched_extreme_is_no_mean_and_is_not_said_to_be_one(recwarn):
    net = Net()
    with tfnb.record(net.graph):
        largest = net.feeds[0].max()
    feeds = dict(zip(net.feeds, (net.x, net.y), strict=True))
    found = tfnb.fit(net.train, feeds, batch_size=6, epochs=1, shuffle=False, microbatches=3, watch={"max": largest})
    assert not [note for note in recwarn if "no mean over rows" in str(note.message)]
    starts = range(0, len(net.x), 6)
    assert found.history[0]["max"] <= max(net.x[start : start + 6].max().item() for start in starts)


def test_fit_accumulates_and_says_which_loss_is_no_mean_over_rows():
    many, one = Net(), Net()
    told = tfnb.fit([many.train, many.loss], dict(zip(many.feeds, (many.x, many.y), strict=True)), batch_size=6,
                    epochs=2, microbatches=4, watch={"loss": many.loss, "count": many.count})  # fmt: skip
    whole = tfnb.fit(one.train, dict(zip(one.feeds, (one.x, one.y), strict=True)), batch_size=6, epochs=2,
                     watch={"loss": one.loss, "count": one.count})  # fmt: skip
    assert told.steps == whole.steps == 4
    assert told.history == [pytest.approx(entry, rel=1e-12) for entry in whole.history]
    for name, value in many.state.items():
        assert torch.allclose(value, one.state[name], rtol=0, atol=1e-12), name
    with tfnb.record():
        w = nn.Parameter(torch.ones(3))
        x = tfnb.placeholder(torch.ones(2, 3), name="x")
        train = tfnb.train.SGD(0.01).minimize((x * w).square().mean().sqrt())
    with pytest.warns(UserWarning, match=r"sqrt of a mean.*divided over 2 microbatches.*Leave out microbatches"):
        tfnb.fit(train, {x: torch.randn(8, 3)}, batch_size=8, microbatches=2)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"microbatches": 0}, InvalidArgument, "at least 1, or 'auto' with memory_budget in this process, not 0"),
        ({"microbatches": True}, InvalidArgument, "at least 1, or 'auto' with memory_budget in this process, not True"),
        ({"microbatches": 2.0}, InvalidArgument, "at least 1, or 'auto' with memory_budget in this process, not 2.0"),
        ({"microbatches": 2, "mode": "async"}, InvalidArgument, "microbatches=2 belong to mode='sync', not to 'async'"),
        ({"microbatches": 2, "backup": 1}, InvalidArgument, "there is no backup=1"),
        ({"mode": "pipeline"}, InvalidArgument, "say how many, microbatches=8"),
        ({"microbatches": 2, "schedule": "gpipe"}, InvalidArgument, "schedule='gpipe' belongs to mode='pipeline'"),
        ({"microbatches": 2, "mode": "pipeline", "schedule": "x"}, InvalidArgument, "one of '1f1b', 'gpipe', not 'x'"),
        ({"microbatches": 2, "mode": "pipeline", "backup": 1}, InvalidArgument, "backup=1 belongs to mode='sync'"),
    ],
)
def test_wrong_microbatches_are_refused(options, error, message):
    net = Net()
    with pytest.raises(error, match=message):
        tfnb.fit(net.train, dict(zip(net.feeds, (net.x, net.y), strict=True)), **options)


def test_stages_of_a_pipeline_give_the_bits_of_one_device():
    """A loop over microbatches that is cut by the tasks which nodes ask for, in this process."""

    def trained(executor, *, stages):
        torch.manual_seed(5)
        layers = [nn.Linear(4, 4).double() for _ in range(3)]
        with tfnb.record() as graph:
            x = h = tfnb.placeholder(torch.ones(2, 4, dtype=torch.float64), name="x")
            for at, layer in enumerate(layers):
                with tfnb.device(f"task:{at}" if stages else None):
                    h = F.dropout(torch.tanh(layer(h)), 0.2)
            loss = h.square().mean()
            train = tfnb.train.Adam(0.01).minimize(loss)
        data = torch.linspace(-1, 1, 40, dtype=torch.float64).reshape(10, 4)
        with Session(graph, executor=executor) as session:
            call = session.make_callable((train, loss), [x], microbatches=4)
            losses = [call(data)[1].item() for _ in range(2)]
        return losses, [parameter.detach().clone() for layer in layers for parameter in layer.parameters()]

    losses, weights = trained("parts", stages=True)
    expected, others = trained("dataflow", stages=False)
    assert losses == expected
    assert all(map(torch.equal, weights, others))


def _jumps(layers, on, x):
    """A U: values come back to earlier stages, and gradients are sums over stages."""
    with on(0):
        h = layers[0](x).tanh()
    with on(1):
        g = layers[1](h).tanh()
    with on(0):
        h = layers[2](g + h)
    with on(1):
        return h.square().mean()


def _sums(layers, on, x):
    """A product that is added to a matrix, at one stage and over two."""
    with on(0):
        h = layers[0](x).tanh()
        h = h + h @ layers[1].weight
    with on(1):
        return (h + h @ layers[2].weight.t()).square().mean()


def _unrolled(layers, on, x):
    """Many products by one weight."""
    with on(0):
        rows = [layers[0](x + step).tanh() for step in range(12)]
    with on(1):
        h = rows[0]
        for row in rows:
            h = (layers[1](row) + layers[2](h)).tanh()
        return h.square().mean()


def _recurrent(layers, on, x):
    with on(0):
        h, _ = layers[3](x[:, None].expand(-1, 5, -1))
    with on(1):
        h, _ = layers[4](h)
        return layers[2](h[:, -1]).square().mean()


def _spectra(layers, on, x):
    """The gradient of a product with a complex number takes a constant, which lies outside of the loop."""
    with on(0):
        h = torch.fft.rfft(layers[0](x).tanh())
    with on(1):
        return layers[1](torch.fft.irfft(h * (1 + 0.5j), n=4)).square().mean()


@pytest.mark.parametrize("net", [_jumps, _sums, _unrolled, _recurrent, _spectra])
def test_stages_have_the_bits_of_the_same_requests_in_one_part(net):
    """Products are stacked, and sums taken into them, at each place apart: in one process, too."""

    def trained(executor):
        torch.manual_seed(5)
        layers = nn.ModuleList([*(nn.Linear(4, 4) for _ in range(3)), *(nn.GRU(4, 4, batch_first=True) for _ in "ab")])
        layers = layers.double()
        with tfnb.record() as graph:
            x = tfnb.placeholder(torch.ones(2, 4, dtype=torch.float64), name="x")
            loss = net(layers, lambda task: tfnb.device(f"task:{task}", soft=True), x)
            train = tfnb.train.Adam(0.01).minimize(loss)
        data = torch.linspace(-1, 1, 44, dtype=torch.float64).reshape(11, 4).sin()
        with Session(graph, executor=executor, compile="off") as session:
            call = session.make_callable((train, loss), [x], microbatches=4)
            losses = [call(data)[1].item() for _ in range(3)]
        return losses, [parameter.detach().clone() for parameter in layers.parameters()]

    (losses, weights), (expected, others) = trained("parts"), trained("auto")
    assert losses == expected
    assert all(map(torch.equal, weights, others))


def _penalty(net, x, y):
    """Mean squares with R1's penalty: the slope of the net in its inputs."""
    x = x.clone().requires_grad_(True)
    out = net(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, y) + 0.1 * slope.square().sum(1).mean()


def _attack(net, x, y):
    shift = torch.zeros_like(x, requires_grad=True)
    (slope,) = torch.autograd.grad(F.mse_loss(net(x + shift), y), shift)
    return F.mse_loss(net(x + 0.1 * slope.sign()), y)


def _checked(net, x, y):
    """The Parameters are read behind an assertion that each microbatch makes."""
    assert (x > -9).all()
    return F.mse_loss(net(x), y)


def _trained(loss_of, budget=None):
    torch.manual_seed(6)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    plain, (xs, ys) = copy.deepcopy(net), torch.randn(2, 12, 3, dtype=torch.float64)
    theirs = torch.optim.SGD(plain.parameters(), 0.2)
    for at in (0, 6):
        theirs.zero_grad()
        loss_of(plain, xs[at : at + 6], ys[at : at + 6]).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)  # done once, of averaged gradients
        theirs.step()
    with tfnb.record():
        x, y = tfnb.placeholder(xs[:4]), tfnb.placeholder(ys[:4])
        optimizer = torch.optim.SGD(net.parameters(), 0.2)
        loss = loss_of(net, x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        step = optimizer.step()
    options = {"batch_size": 6, "shuffle": False, "microbatches": 3, "watch": loss, "memory_budget": budget}
    return net, plain, lambda xs=xs: tfnb.fit(step, {x: xs, y: ys}, **options)


@pytest.mark.parametrize("loss_of", [_penalty, _attack, _checked])
def test_a_microbatch_has_slopes_and_assertions_of_its_rows(loss_of):
    net, plain, fit = _trained(loss_of)
    fit()
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_an_assertion_of_a_microbatch_that_does_not_hold_keeps_the_step_from_writing():
    net, _, fit = _trained(_checked)
    before = copy.deepcopy(net.state_dict())
    bad = torch.zeros(12, 3, dtype=torch.float64)
    bad[5] = -10.0
    with pytest.raises(BranchChanged):
        fit(bad)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_budget_names_a_slope_that_it_cannot_plan():
    _, _, fit = _trained(_penalty, "10MB")
    with pytest.raises(Unimplemented, match=r"takes .*, a derivative by rows, and a memory_budget plans one backward"):
        fit()


def _rows_checked(net, x, y, limit):
    assert (x < limit).all()
    return F.mse_loss(net(x), y)


def _state_checked(net, x, y, limit):
    assert net[0].bias.sum() < limit
    return F.mse_loss(net(x), y)


def _layer_checked(net, x, y, limit):
    h = net[:2](x)
    assert (h < limit).all()
    return F.mse_loss(net[2:](h), y)


CHECKS = {"rows": (_rows_checked, 9.0), "state": (_state_checked, 3.0), "layer": (_layer_checked, 0.9999)}


@pytest.mark.parametrize("budget", [None, "1MB"])
@pytest.mark.parametrize("place", [*CHECKS, "loss", "norm", "update", "count"])
def test_an_assertion_anywhere_is_asked_before_anything_is_written(place, budget):
    """Those of rows by each microbatch; those of averaged gradients, and of new values, once."""
    torch.manual_seed(6)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    net.register_buffer("count", torch.tensor(0.0))
    xs, ys = torch.randn(2, 6, 3, dtype=torch.float64)
    halves = []
    for rows in (slice(0, 3), slice(3, 6), slice(0, 6)):
        net.zero_grad()
        F.mse_loss(net(xs[rows]), ys[rows]).backward()
        halves.append(float(torch.stack([p.grad.norm() for p in net.parameters()]).norm()))
    net.zero_grad()
    limit = (max(halves[:2]) + halves[2]) / 2  # below the norm of a microbatch, above that of the batch
    with tfnb.record():
        x, y = tfnb.placeholder(xs), tfnb.placeholder(ys)
        optimizer = torch.optim.SGD(net.parameters(), 0.2)
        loss = CHECKS[place][0](net, x, y, CHECKS[place][1]) if place in CHECKS else F.mse_loss(net(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        if place == "norm":
            assert norm < limit
        step = optimizer.step()
        if place == "loss":
            assert loss < 50
        if place == "update":
            assert net[0].bias.sum() < 3
        if place == "count":  # of no rows, and nothing of the step is computed of it
            assert net.count < 3
    options = {"batch_size": 6, "shuffle": False, "microbatches": 2, "memory_budget": budget, "exact": False}
    assert tfnb.fit(step, {x: xs, y: ys}, **options).steps == 1
    if place in ("state", "update", "layer"):
        with torch.no_grad():
            net[0].bias.add_(9)
    net.count.fill_(9 * (place == "count"))
    bad = (xs + 20 * (place == "rows"), ys + 1e3 * (place in ("loss", "norm")))
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(BranchChanged):
        tfnb.fit(step, {x: bad[0], y: bad[1]}, **options)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("how", ["average", "own", "forward"])
def test_what_counts_steps_below_backward_is_written_once_in_a_step(how):
    """Averaged models, and means of weights by a count of one's own; a count in the forward is one of microbatches."""

    class Counting(nn.Linear):
        def __init__(self):
            super().__init__(4, 3, dtype=torch.float64)
            self.register_buffer("seen", torch.tensor(0))
            self.register_buffer("mean", torch.zeros(3, 4, dtype=torch.float64))

        def forward(self, x):
            if how == "forward":
                self.seen += 1
            return super().forward(x)

    def step(model, average, optimizer, parts):
        optimizer.zero_grad()
        losses = [F.mse_loss(model(x), y) * (x.shape[0] / ROWS) for x, y in parts]
        sum(losses).backward()
        optimizer.step()
        if average is not None:
            average.update_parameters(model)
        with torch.no_grad():
            if how != "forward":
                model.seen += 1
            if how == "own":
                model.mean += (model.weight - model.mean) / model.seen
        return sum(losses)

    def made():
        torch.manual_seed(3)
        model = Counting()
        average = torch.optim.swa_utils.AveragedModel(model) if how == "average" else None
        return model, average, torch.optim.SGD(model.parameters(), 0.1)

    x, y = torch.randn(ROWS, 4, dtype=torch.float64), torch.randn(ROWS, 3, dtype=torch.float64)
    twin, kept = made(), made()
    for _ in range(3):
        step(*twin, [(x[start:stop], y[start:stop]) for start, stop in divide(ROWS, 4)])
    with tfnb.record():
        fed = tfnb.placeholder(x, name="x"), tfnb.placeholder(y, name="y")
        step(*kept, [fed])
        everything = tfnb.effects()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if how == "forward" else "error")
        tfnb.fit(
            everything, dict(zip(fed, (x, y), strict=True)), batch_size=ROWS, epochs=3, microbatches=4, shuffle=False
        )
    for want, found in zip(twin[:2], kept[:2], strict=True):
        if want is not None:
            torch.testing.assert_close(found.state_dict(), want.state_dict(), rtol=1e-12, atol=1e-13)


def test_batch_norm_behind_another_nets_step_counts_its_batches():
    def made():
        torch.manual_seed(3)
        nets = nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 1))
        nets = [net.double() for net in nets]
        return nets, [torch.optim.SGD(net.parameters(), 0.1) for net in nets]

    def step(nets, optimizers, parts):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            sum(net(x).square().sum() for x in parts).backward()
            optimizer.step()

    x, twin, kept = torch.randn(ROWS, 4, dtype=torch.float64), made(), made()
    for _ in range(3):
        step(*twin, [x[start:stop] for start, stop in divide(ROWS, 4)])
    with tfnb.record():
        fed = tfnb.placeholder(x, name="x")
        step(*kept, [fed])
        everything = tfnb.effects()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of batch norm
        tfnb.fit(everything, {fed: x}, batch_size=ROWS, epochs=3, microbatches=4, shuffle=False, exact=False)
    for want, found in zip(twin[0], kept[0], strict=True):
        torch.testing.assert_close(found.state_dict(), want.state_dict(), rtol=1e-12, atol=1e-13)
