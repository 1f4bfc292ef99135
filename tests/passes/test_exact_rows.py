"""A step whose rows several tasks divide has the values of one machine, whatever its loss makes of rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import tfnb
from tests.models.idioms import IDIOMS
from tests.models.test_idioms import ROWS, SLOW, SameDraws, close, plain, tensors
from tfnb.errors import BranchChanged
from tfnb.graph import Value
from tfnb.passes import step_graph
from tfnb.passes.flow.exact_rows import StepOverRows, over_rows
from tfnb.passes.microbatches import divide


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Taken:
    """Steps over rows, their parts in this process."""

    def __init__(self, over: StepOverRows) -> None:
        self.over, self.session = over, tfnb.Session(over.step.whole, compile="off", executor="parts")

    def __call__(self, feeds: Sequence[torch.Tensor]) -> list[Any]:
        step, by_id = self.over.step, self.over.step.whole.contents.by_id
        fed = self.over.fed(feeds, divide(self.over.rows(feeds), len(self.over.tasks)))
        named = {by_id[value.node].name: tensor for value, tensor in zip(step.feeds, fed, strict=True)}
        nodes = [(by_id[value.node], value.index) for value in step.fetches]
        return list(self.session.run([f"{n.name}:{at}" if n.outputs else n.name for n, at in nodes], named))


def over(graph: Any, fetches: Sequence[Value], feeds: Sequence[Any], tasks: int) -> StepOverRows:
    found = over_rows(step_graph(graph, fetches, [fed.value for fed in feeds]), range(tasks))
    assert found is not None
    return found


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def normalized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Unflatten(1, (1, 3)), nn.BatchNorm1d(1, affine=False))


def dropped() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.3), nn.Linear(5, 3), nn.Dropout(0.3))


def convolved() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.3), nn.Linear(3, 3), nn.LayerNorm(3))


def recurrent() -> nn.Module:
    torch.manual_seed(0)
    lstm = nn.LSTM(2, 3, batch_first=True)

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = lstm

        def forward(self, x: Any) -> Any:
            return self.lstm(x.reshape(-1, 2, 2))[0][:, -1]

    return Last()


def bagged() -> nn.Module:
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(6, 3, mode="max")

    class Bagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = bag

        def forward(self, x: Any) -> Any:
            return self.bag((x.abs() * 2).long().clamp(max=5))

    return Bagged()


def contrast(out: Any, y: Any) -> Any:
    z = F.normalize(out, dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(out.shape[0]))


LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Any], int]] = {  # and how many nodes are gathered
    "mean": (net, lambda out, y: out.square().mean(), 0),
    "sum": (net, lambda out, y: out.square().sum(), 0),
    "cross entropy": (
        net,
        lambda out, y: F.cross_entropy(out, y, weight=torch.tensor([1.0, 2.0, 3.0]), ignore_index=2),
        0,
    ),
    "cross entropy of rows": (net, lambda out, y: F.cross_entropy(out, y, reduction="none").sqrt().sum(), 0),
    "huber": (net, lambda out, y: F.huber_loss(out, F.one_hot(y, 3).to(out.dtype)), 0),
    "bce": (net, lambda out, y: F.binary_cross_entropy(out.sigmoid(), F.one_hot(y, 3).to(out.dtype)), 0),
    "mask": (net, lambda out, y: (out.square().sum(1) * (y == 1)).sum() / (y == 1).sum().clamp(min=1), 0),
    "root": (net, lambda out, y: out.square().mean().sqrt(), 0),
    "away from the mean": (net, lambda out, y: (out - out.mean(0)).square().mean() + out.mean(0).square().sum(), 0),
    "largest": (net, lambda out, y: out.amax(0).sum() - out.amin(), 0),
    "dice": (net, lambda out, y: 1 - (out.sigmoid() * F.one_hot(y, 3)).sum() / (out.sigmoid().sum() + y.sum()), 0),
    "penalty": (net, lambda out, y: out.square().mean() + 1e-2 * out.sum(0).norm(), 0),
    "square of a loss": (net, lambda out, y: F.mse_loss(out.tanh(), F.one_hot(y, 3).to(out.dtype)) ** 2, 0),
    "perplexity": (net, lambda out, y: F.cross_entropy(F.hardswish(out), y).exp(), 0),
    "logsumexp": (net, lambda out, y: torch.logsumexp(out, 0).sum(), 0),
    "deviation": (net, lambda out, y: out.std(0).sum(), 0),
    "deviation of all": (net, lambda out, y: out.std() + out.var((0, 1), correction=0, keepdim=True).sum(), 0),
    "deviation and mean": (net, lambda out, y: sum(map(torch.sum, torch.var_mean(out, 0, correction=2))), 0),
    "norm": (net, lambda out, y: out.norm(dim=0).sum() + torch.linalg.vector_norm(out), 0),
    "infinite": (net, lambda out, y: torch.logsumexp(out.masked_fill(y[:, None] == 0, -torch.inf), (0, 1)), 0),
    "contrast": (net, contrast, 3),
    "order": (net, lambda out, y: (out.sort(0).values * torch.arange(out.shape[0]).unsqueeze(1)).mean(), 1),
    "dropped": (dropped, lambda out, y: out.square().sum(1).median() + out.std(0).sum(), 3),
    "batch norm": (normalized, lambda out, y: (out**3).mean(), 0),
    "images": (convolved, lambda out, y: F.cross_entropy(out, y), 0),
    "recurrent": (recurrent, lambda out, y: F.cross_entropy(out, y), 0),
    "largest of bags": (bagged, lambda out, y: F.cross_entropy(out, y), 20),
}


@pytest.mark.parametrize("tasks", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LOSSES)
def test_values_are_those_of_one_machine(name: str, tasks: int) -> None:
    """The loss, all gradients by a step of SGD, running statistics, and values in rows; batches of other lengths."""
    make, loss_of, most = LOSSES[name]
    found = []
    for is_divided in (False, True):
        model = make()
        with tfnb.record("divided") as graph:
            x, y = tfnb.placeholder(torch.randn(8, 4), name="x"), tfnb.placeholder(torch.randint(0, 3, (8,)), name="y")
            out = model(x)
            loss = loss_of(out, y)
            train = tfnb.train.SGD(0.1).minimize(loss)
        rows, states = torch.Generator().manual_seed(3), list[Any]()
        step = over(graph, [loss.value, out.value, train.value], [x, y], tasks)
        take, session = Taken(step), tfnb.Session(graph, compile="off")
        for count in (13, 7):
            feeds = torch.randn(count, 4, generator=rows), torch.randint(0, 3, (count,), generator=rows)
            if is_divided:
                states += take(feeds)[:2]
            else:
                states += session.run([loss, out, train], {x: feeds[0], y: feeds[1]})[:2]
        found.append([*states, *(value.clone() for value in model.state_dict().values())])
        assert len(step.gathered) <= most, [node.name for node in step.gathered]
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW or at % 4 > 0))
     for at, name in enumerate(sorted(IDIOMS, key=SLOW.__contains__))],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_programs_as_people_write_them(name: str) -> None:
    """Also what they draw is what one machine draws."""
    torch.manual_seed(1)
    state, step, draws = IDIOMS[name]()
    torch.manual_seed(1)
    twin, twin_step, _ = IDIOMS[name]()
    batches = [[draw(rows) for draw in draws] for rows in ROWS]
    with tfnb.record() as graph:
        fed = [tfnb.placeholder(sample) for sample in batches[0]]
        leaves = [leaf for leaf in tree_leaves(step(*fed)) if isinstance(leaf, torch.Tensor)]
    recorded = {at: leaf.value for at, leaf in enumerate(leaves) if hasattr(leaf, "value")}
    draws_of = [node.value(len(node.outputs) - 1) for node in graph.nodes if node.stream is not None]
    done = [node.value() for node in graph.nodes if node.op in ("tfnb.group", "tfnb.assign")]
    take = Taken(over(graph, [*recorded.values(), *draws_of, *done], fed, 2 + len(name) % 2))
    for rows, batch in zip(ROWS[1:], batches[1:], strict=True):
        found = take(batch)
        with SameDraws(found[len(recorded) :][: len(draws_of)]):
            expected = plain(twin_step(*(tensor.clone() for tensor in batch)))
        close(found[: len(recorded)], [expected[at] for at in recorded], f"{rows} rows, result")
        close(tensors(state), tensors(twin), f"{rows} rows, state")


def test_what_a_step_does_below_its_updates_is_done() -> None:
    """A count below `step()` is an effect of it, and so is the branch that Python took there."""
    model, rows = net(), torch.randn(8, 4)
    model.register_buffer("count", torch.zeros(()))
    with tfnb.record("below") as graph, pytest.warns(UserWarning, match="BranchChanged"):
        x = tfnb.placeholder(rows, name="x")
        loss = model(x).square().mean()
        train = tfnb.train.SGD(0.1).minimize(loss)
        model.count += (x > 0).sum()
        if x.square().sum() > 1e6:
            model.count += 1
    take = Taken(over(graph, [train.value], [x], 2))
    model.count.zero_()
    take([rows])
    assert int(model.count) == int((rows > 0).sum())
    with pytest.raises(BranchChanged):
        take([rows * 1e6])


def test_a_feed_that_one_task_needs_whole_is_gathered() -> None:
    with tfnb.record("fed") as graph:
        x = tfnb.placeholder(torch.randn(8, 2), name="x")
        last = x.cumsum(0).flip(0)
    rows = torch.randn(7, 2)
    (found,) = Taken(over(graph, [last.value], [x], 3))([rows])
    torch.testing.assert_close(found, rows.cumsum(0).flip(0), rtol=0, atol=1e-14)


def test_a_time_axis_of_varying_length_stays_beside_the_rows() -> None:
    """Rows times steps in time are one axis; a sum over rows is padded with a number, once."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    with tfnb.record("time") as graph:
        x = tfnb.placeholder(torch.randn(6, 5, 3), name="x", shape=(None, None, 3))
        out = layer(x.reshape(-1, 3)).reshape(x.shape[0], x.shape[1], 2)
        padded = F.pad(out.sum((0, 1)), (1, 1), value=3.0)
        loss = out.square().mean().sqrt() + padded.sum()
        (grad,) = tfnb.gradients(loss, [layer.weight])
    divided = over(graph, [out.value, padded.value, grad.value], [x], 3)
    assert not divided.gathered
    rows = torch.randn(7, 4, 3)
    found, expected = Taken(divided)([rows]), tfnb.Session(graph).run([out, padded, grad], {x: rows})
    torch.testing.assert_close(found, list(expected), rtol=1e-12, atol=1e-13)


def test_images_are_enlarged_row_by_row() -> None:
    with tfnb.record("images") as graph:
        x = tfnb.placeholder(torch.randn(6, 2, 4, 4), name="x")
        (grad,) = tfnb.gradients(F.interpolate(x, scale_factor=2, mode="bilinear").std(), [x])
    rows = torch.randn(7, 2, 4, 4)
    divided = over(graph, [grad.value], [x], 2)
    assert not divided.gathered
    found, expected = Taken(divided)([rows]), tfnb.Session(graph).run([grad], {x: rows})
    torch.testing.assert_close(found, list(expected), rtol=1e-12, atol=1e-13)


def _bags(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(nn.TransformerEncoderLayer(4, 2, 8, 0.5, batch_first=True)(x), 0.3)


LAID_OUT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: F.dropout((x * 2).transpose(0, 1), 0.5),
    "permuted": lambda x: F.dropout(x.permute(2, 0, 1).square()[1], 0.5),
    "selected": lambda x: F.dropout(torch.tanh(x.transpose(0, 1))[-1], 0.5),
    "like": lambda x: torch.randn_like(x.transpose(1, 2)) * x.transpose(1, 2),
    "lstm": lambda x: nn.LSTM(4, 3, 2, batch_first=True, dropout=0.5)(x)[0],
    "gru, time first": lambda x: nn.GRU(4, 3, 2, dropout=0.5)(x.transpose(0, 1))[0],
    "encoder": _bags,
    "images": lambda x: F.dropout(nn.Conv2d(4, 3, 1)(x[..., None, None, :, :].transpose(1, 2)[:, 0].transpose(1, 3)
                                                     .to(memory_format=torch.channels_last)), 0.5),
    "text": lambda x: F.dropout(nn.Conv1d(4, 3, 3)(x.transpose(1, 2)), 0.5),
    "weights": lambda x: F.dropout(nn.Conv2d(4, 3, 1).to(memory_format=torch.channels_last)(
        x.transpose(1, 2)[..., None].expand(-1, 4, 5, 2).contiguous()), 0.5),
    "mixed": lambda x: F.dropout(x.transpose(1, 2)[:, :4, :4] + x[:, :4, :4], 0.5),
    "attention": lambda x: F.dropout(F.scaled_dot_product_attention(
        q := x.view(x.shape[0], 5, 2, 2).transpose(1, 2), q, q), 0.5),
    "gathered": lambda x: F.dropout(F.prelu(x.transpose(1, 2), torch.tensor([0.1])), 0.5),
}  # fmt: skip


@pytest.mark.parametrize("name", LAID_OUT)
def test_draws_are_those_of_one_machine_however_the_operand_is_laid_out(name: str) -> None:
    torch.manual_seed(0)
    with tfnb.record("laid") as graph:
        x = tfnb.placeholder(torch.randn(6, 5, 4), name="x", shape=(None, 5, 4))
        out = LAID_OUT[name](x)
    graph.seed, rows = 3, torch.randn(7, 5, 4)
    (found,) = Taken(over(graph, [out.value], [x], 2))([rows])
    expected = tfnb.Session(graph, compile="off").run(out, {x: rows})
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_what_has_no_rows_is_not_divided() -> None:
    with tfnb.record("fixed") as graph:
        x = tfnb.placeholder(torch.ones(3), name="x", shape=(3,))
        loss = x.sum()
    assert over_rows(step_graph(graph, [loss.value], [x.value]), range(2)) is None


@pytest.mark.parametrize("kinds", [(torch.float16,) * 2, (torch.bfloat16,) * 2, (torch.float16, torch.float32)])
def test_numbers_of_few_bits_are_summed_in_more(kinds: tuple[torch.dtype, torch.dtype]) -> None:
    """Means whose sums are beyond the largest float16, and batch norm, whose weights may have more bits than rows."""
    dtype, of_weights = kinds
    rows = (10 + 3 * torch.randn(8, 2, 4096)).to(dtype)
    norm = nn.BatchNorm1d(2, dtype=of_weights)
    twin = copy.deepcopy(norm)

    def step(norm: nn.Module, x: Any) -> list[Any]:
        out = norm(x)
        (grad,) = torch.autograd.grad(out.float().tanh().sum(), [norm.weight])
        return [x.mean(), F.mse_loss(x, torch.zeros_like(x)), out, grad]

    with tfnb.record("narrow") as graph:
        x = tfnb.placeholder(rows[:4], name="x")
        values = step(norm, x)
        done = tfnb.effects()
    found = Taken(over(graph, [*(value.value for value in values), done.value], [x], 2))([rows])[:4]
    near = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 2 * torch.finfo(dtype).eps}
    torch.testing.assert_close(found, step(twin, rows), **near)
    torch.testing.assert_close(norm.state_dict(), twin.state_dict(), **near)
