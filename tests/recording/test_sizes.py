"""What Python asks of a size while recording: a run equals eager torch, or is refused with the line that asked."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import einops
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tfnb.errors import BranchChanged, ShapeError, TfnbError

Function = Callable[[torch.Tensor], torch.Tensor]
RECORDED = 5
ROWS = (0, 1, 2, 3, 4, 5, 6, 9)


_SQUARE = torch.arange(9.0, dtype=torch.float64).reshape(3, 3)


def _divergence(x: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
    normal = torch.distributions.MultivariateNormal
    return torch.distributions.kl_divergence(normal(x, covariance), normal(x * 0, torch.diag_embed(x.exp())))


def _sum(parts: Any) -> Any:
    return sum((part.sum(0) * (i + 2) for i, part in enumerate(parts)), torch.zeros(3, dtype=torch.float64))


# program -> the rows at which its run is refused
ALL = frozenset(ROWS) - {RECORDED}
ASKED: dict[str, tuple[Function, Any]] = {
    "== 0": (lambda x: x * 2 if x.shape[0] == 0 else x * 3, {0}),
    "!= 0": (lambda x: x * 3 if x.shape[0] != 0 else x * 2, {0}),
    "> 0": (lambda x: x * 3 if x.shape[0] > 0 else x * 2, {0}),
    ">= 1": (lambda x: x * 3 if x.shape[0] >= 1 else x * 2, {0}),
    "< 1": (lambda x: x * 2 if x.shape[0] < 1 else x * 3, {0}),
    "truth": (lambda x: x * 3 if x.shape[0] else x * 2, {0}),
    "not": (lambda x: x * 2 if not x.shape[0] else x * 3, {0}),
    "and": (lambda x: x * 3 if x.shape[0] and x.shape[1] else x * 2, {0}),
    "size()": (lambda x: x * 2 if x.size()[0] == 0 else x * 3, {0}),
    "size(0)": (lambda x: x * 2 if x.size(0) == 0 else x * 3, {0}),
    "numel": (lambda x: x * 2 if x.numel() == 0 else x * 3, {0}),
    "torch.numel": (lambda x: x * 2 if torch.numel(x) == 0 else x * 3, {0}),
    "nelement of a result": (lambda x: x * 2 if (x * 2)[1:].nelement() == 0 else x * 3, {0, 1}),
    "nbytes": (lambda x: x * 2 if x.nbytes == 0 else x * 3, {0}),
    "== 1": (lambda x: x * 2 if x.shape[0] == 1 else x * 3, {1}),
    "in": (lambda x: x * 2 if x.shape[0] in (0, 1) else x * 3, {0, 1}),
    "a whole shape": (lambda x: x * 2 if x.shape == (1, 3) else x * 3, {1}),
    "square": (lambda x: x * 2 if x.shape == x.t().shape else x * 3, {3}),
    "> 3": (lambda x: x * 2 if x.shape[0] > 3 else x * 3, {0, 1, 2, 3}),
    "% 2": (lambda x: x * 2 if x.shape[0] % 2 else x * 3, {0, 2, 4, 6}),
    "min": (lambda x: x * min(x.shape[0], 4), {0, 1, 2, 3, 4}),
    "max": (lambda x: x.sum(0) / max(x.shape[0], 1), {0}),
    "sym_max": (lambda x: x.sum(0) / torch.sym_max(x.shape[0], 1), set()),
    "sym_min": (lambda x: x.sum(0) * torch.sym_min(x.shape[0], 1), set()),
    "rows of a first row": (lambda x: x.sum(0) * x[:1].shape[0], set()),
    "rows of the others": (lambda x: x.sum(0) * x[1:].shape[0], set()),
    "rows of a pair": (lambda x: x.sum(0) * x[:2].shape[0], set()),
    "if another row": (lambda x: x * 2 if x[1:].shape[0] else x * 3, {0, 1}),
    "// 2": (lambda x: x[: x.size(0) // 2].sum(0), set()),
    "a place that may be behind the end": (
        lambda x: x.new_ones(x[: 2 * x.shape[0] - 8].shape[0]).sum() + x.sum(0), {0, 1, 2, 3, 9}
    ),
    "ceil": (lambda x: x[: -(-x.shape[0] // 2)].sum(0), set()),
    "int": (lambda x: x * int(x.shape[0]), ALL),
    "float": (lambda x: x * float(x.shape[0]), ALL),
    "len": (lambda x: x * len(x), ALL),
    "turns by len": (lambda x: sum(x * i for i in range(len(x))), ALL),
    "numbers up to len": (lambda x: x.T @ torch.arange(len(x)).to(x), ALL),
    "einsum of three": (lambda x: torch.einsum("bi,ij,jk->bk", x, _SQUARE, _SQUARE), set()),
    "einsum of four in one list": (lambda x: torch.einsum("bi,ij,jk,bk->b", [x, _SQUARE, _SQUARE, x]), set()),
    "einsum by numbers": (lambda x: torch.einsum(x, [0, 1], _SQUARE, [1, 2], x, [3, 2], [0]), set()),
    "a tensor of it": (lambda x: x.sum(0) * torch.tensor(x.shape[0], device=x.device), set()),
    "a tensor of a fraction": (lambda x: x * torch.as_tensor(x.shape[0] / 3, dtype=x.dtype), set()),
    "a tensor of sizes": (lambda x: x.sum() * torch.tensor(x.shape), set()),
    "a tensor of rows": (lambda x: x.sum() * torch.tensor([[x.shape[0], 1.5], (2, x.shape[1])]), set()),
    "a tensor of an answer": (lambda x: x.sum(0) * torch.tensor([x.shape[0] > 2, True, False]), {0, 1, 2}),
    "new_tensor": (lambda x: x.sum(0) * x.new_tensor([x.shape[0], 2, 3]), set()),
    "padded by it": (lambda x: F.pad(x.long(), [0, 1], value=x.shape[0] - 1), set()),
    "range": (lambda x: _sum([x] * x.shape[0]), ALL),
    "rows": (lambda x: _sum(row[None] for row in x), ALL),
    "split": (lambda x: _sum(x.split(2)), {0, 1, 2, 3, 4, 9}),
    "chunk": (lambda x: _sum(x.chunk(3)), {0, 1, 2, 4}),
    "assert": (lambda x: _asserted(x), {0}),
}  # fmt: skip


def _asserted(x: torch.Tensor) -> torch.Tensor:
    assert x.shape[0] > 0
    return x * 2


def outcomes(function: Function, draw: Callable[[int], torch.Tensor], rows: Any = ROWS) -> set[int]:
    """Record at one size and run at others: the rows that were refused; every other run has eager's result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a size that is fixed is said; test_symbols.py tests the words
        with tfnb.record():
            x = tfnb.placeholder(draw(RECORDED), name="x")
            y = function(x)
    refused = set()
    for count in rows:
        data = draw(count)
        try:
            got = tfnb.run(y, {x: data})
        except TfnbError as error:
            assert "line" in str(error) and ".py" in str(error)
            refused.add(count)
        else:
            torch.testing.assert_close(got, function(data))
    return refused


def _matrix(rows: int) -> torch.Tensor:
    return torch.randn(rows, 3, dtype=torch.float64)


@pytest.mark.parametrize("name", ASKED)
def test_a_decision_by_a_size_is_right_or_refused(name: str) -> None:
    function, refused = ASKED[name]
    assert outcomes(function, _matrix) == refused


@pytest.mark.filterwarnings("ignore:.*branch of a recorded value")
def test_a_batch_of_distributions_that_torch_compares_by_numbers_needs_a_fixed_size() -> None:
    eye = torch.eye(3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="expected int at position 0, but got: SymInt"), tfnb.record():
        _divergence(tfnb.placeholder(_matrix(5)), eye)
    with tfnb.record():
        x = tfnb.placeholder(_matrix(5), shape=(5, 3))
        y = _divergence(x, eye)
    data = _matrix(5)
    torch.testing.assert_close(tfnb.run(y, {x: data}), _divergence(data, eye))


def test_a_size_is_no_key_so_that_packages_which_keep_tables_by_shapes_go_without() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(5, 3))
        with pytest.raises(TypeError, match="unhashable"):
            {x.shape: 1}  # noqa: B018
        y = einops.rearrange(x, "b (g k) -> (b g) k", g=3)
    assert tfnb.run(y, {x: torch.ones(7, 3)}).shape == (21, 1)


def test_the_refusal_names_placeholder_axis_and_line() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(5, 3), name="x")
        y = x * 2 if x.shape[0] == 0 else x * 3
    with pytest.raises(ShapeError, match=r"B != 0, and these feeds have B = 0 \(axis 0 of x\)(.|\n)*shape\[0\] == 0"):
        tfnb.run(y, {x: torch.ones(0, 3)})


# -- checks of torch's Python layer ---------------------------------------------------------------------------------

CHECKED: dict[str, tuple[Function, set[int]]] = {  # the rows that eager torch refuses as well
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), {1}),
    "BatchNorm1d": (lambda x: nn.BatchNorm1d(3, track_running_stats=False).double()(x), {1}),
    "group_norm": (lambda x: F.group_norm(x, 3), {1}),
    "instance_norm": (lambda x: F.instance_norm(x.t()[None]), {1}),
}


@pytest.mark.parametrize("name", CHECKED)
def test_a_check_of_torch_holds_in_every_run(name: str) -> None:
    function, refused = CHECKED[name]
    assert outcomes(function, _matrix, range(1, 7)) == refused
    for rows in refused:
        with pytest.raises(ValueError, match="more than 1"):
            function(_matrix(rows))


@pytest.mark.parametrize("blocks", [1, 2])
def test_a_check_of_torch_concerns_its_own_line_alone(blocks: int) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.randn(5, 3))
        before = net.eval()(x)
        trained = net.train()(x)
    if blocks == 2:
        with tfnb.record(graph):
            before = net.eval()(x)
    row = torch.randn(1, 3)
    torch.testing.assert_close(tfnb.run(before, {x: row}), net.eval()(row).detach())
    with pytest.raises(ShapeError, match=r"B != 1(.|\n)*trained = net.train\(\)\(x\)"):
        tfnb.run(trained, {x: row})


# -- layout ---------------------------------------------------------------------------------------------------------

CHANNELS = torch.channels_last


def _written(x: torch.Tensor, write: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    y = x * 2
    write(y)
    return y


LAYOUT: dict[str, tuple[Function, set[int]]] = {
    "is_contiguous": (lambda x: x * 2 if x.is_contiguous() else x * 3, set()),
    "is_contiguous of t()": (lambda x: x * 2 if x.t().is_contiguous() else x * 3, {0, 1}),
    "is_contiguous of columns": (lambda x: x * 2 if x[:, 1:].is_contiguous() else x * 3, {0, 1}),
    "is_contiguous of a copy": (lambda x: x * 2 if x.t().contiguous().is_contiguous() else x * 3, set()),
    "channels last": (lambda x: x * 2 if x[:, :, None, None].is_contiguous(memory_format=CHANNELS) else x * 3, set()),
    "columns as channels": (lambda x: x * 2 if x.t()[None, :, :, None].is_contiguous(memory_format=CHANNELS) else x * 3,
                            set()),
    "rows as channels": (lambda x: x * 2 if x[None, :, :, None].is_contiguous(memory_format=CHANNELS) else x * 3,
                         {1}),
    "stride": (lambda x: x * 2 if x.t().stride() == (1, 3) else x * 3, set()),
    "stride of a copy": (lambda x: x * 2 if x.t().contiguous().stride(0) == 1 else x * 3, {0, 1}),
    "times stride": (lambda x: x * x.t().contiguous().stride(0), set()),
    "storage_offset": (lambda x: x * 2 if x[2:].storage_offset() == 6 else x * 3, {0, 1}),
    "times storage_offset": (lambda x: x * x[1:].storage_offset(), set()),
    "is_same_size": (lambda x: x * 2 if x.is_same_size(x.t()) else x * 3, {3}),
    "view of a column": (lambda x: x[:, :1].view(-1), set()),
    "a write to a copy": (lambda x: _written(x, lambda y: y.t().contiguous().add_(1)), {0, 1}),
    "a write to a reshaped copy": (lambda x: _written(x, lambda y: y.t().reshape(-1).add_(1)), {0, 1}),
    "a write to a flat copy": (lambda x: _written(x, lambda y: y.t().flatten().add_(1)), {0, 1}),
    "a write to a copy of no one's": (lambda x: (x * 2).t().contiguous().add_(1), set()),
    "a write to a view": (lambda x: _written(x, lambda y: y.reshape(-1).add_(1)), set()),
    "view of one of two": (lambda x: x[None].expand(2, -1, -1)[:1].view(-1), set()),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUT)
def test_a_decision_by_the_layout_is_right_or_refused(name: str) -> None:
    function, refused = LAYOUT[name]
    assert outcomes(function, _matrix) == refused


@pytest.mark.parametrize(
    "ask",
    [lambda x: x.data_ptr(), lambda x: x.t().dim_order(),
     lambda x: x.t().view(-1)],
)  # fmt: skip
def test_what_a_run_would_not_keep_is_refused_while_recording(ask: Any) -> None:
    with pytest.raises(TfnbError, match=r"test_sizes\.py line"), tfnb.record():
        ask(tfnb.placeholder(torch.ones(5, 3)))


# -- sizes that only the data of a run tell -------------------------------------------------------------------------

DATA = {
    "sample": torch.tensor([[1.0, -1.0], [-2.0, 2.0], [3.0, -4.0]]),
    "negative": -torch.ones(3, 2),
    "positive": torch.ones(3, 2),
    "one": torch.tensor([[1.0, -1.0]]),
    "more": torch.tensor([[1.0, 2.0], [-1.0, -3.0], [0.5, -3.0], [-1.0, -1.0]]),
}
OF_DATA: dict[str, tuple[Function, set[str]]] = {
    "any": (lambda x: x.sum() if (x > 0).nonzero().numel() > 0 else x.sum() * 2, {"negative"}),
    "none": (lambda x: x.sum() * 2 if x[x > 0].numel() == 0 else x.sum(), {"negative"}),
    "two masks": (lambda x: x.sum() * 2 if x[x > 0].numel() > 2 * x[x <= 0].numel() else x.sum(), {"positive"}),
    "all counted": (lambda x: x.sum() if x[x > 0].numel() + x[x <= 0].numel() == x.numel() else x * 2, set()),
    "share": (lambda x: x.sum() * (x[x > 0].shape[0] + 1) / (x[x <= 0].shape[0] + 1), set()),
    "int": (lambda x: x.sum() * int(x[x > 0].shape[0]), {"negative", "positive", "one"}),
    "len": (lambda x: x.sum() * len(x[x > 0]), {"negative", "positive", "one"}),
    "range": (lambda x: sum(x.sum() * i for i in range(x[x > 0].shape[0])), {"negative", "positive", "one"}),
    "rows": (lambda x: sum(row.sum() * 2 for row in x[x > 0]), {"negative", "positive", "one"}),
    "unique": (lambda x: x.sum() * 2 if x.sign().unique().numel() == 2 else x.sum(), {"negative", "positive"}),
    "same mask": (lambda x: x[x > 0] * (x * 2)[x > 0], set()),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*Python took the")
@pytest.mark.parametrize("name", OF_DATA)
def test_a_decision_by_a_size_of_data_is_right_or_refused(name: str) -> None:
    function, refused = OF_DATA[name]
    with tfnb.record():
        x = tfnb.placeholder(DATA["sample"], name="x")
        y = function(x)
    found = set()
    for label, data in DATA.items():
        try:
            got = tfnb.run(y, {x: data})
        except BranchChanged as error:
            assert error.line and error.cell == "test_sizes.py"
            found.add(label)
        else:
            torch.testing.assert_close(got, function(data))
    assert found == refused


def test_a_decision_by_a_size_of_data_warns_and_needs_samples() -> None:
    with pytest.warns(UserWarning, match="Python took the True branch"), tfnb.record():
        x = tfnb.placeholder(torch.ones(3))
        _ = x * 2 if x[x > 0].numel() > 0 else x
    with pytest.raises(ShapeError, match=r"asks for N > 0, which only the data(.|\n)*test_sizes\.py"), tfnb.record():
        x = tfnb.placeholder(shape=("B",))
        _ = x * 2 if x[x > 0].numel() > 0 else x


@pytest.mark.filterwarnings("ignore:.*Python took the")
def test_the_adaptive_softmax_runs_where_the_same_clusters_are_used() -> None:
    torch.manual_seed(0)
    layer = nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10], div_value=2.0).double()
    weights = list(layer.parameters())
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(20, 8, dtype=torch.float64))
        labels = tfnb.placeholder(torch.arange(20))
        found = layer(x, labels)
        fetches = [*found, *tfnb.gradients(found.loss, weights)]
    for rows in (torch.arange(20).flip(0), torch.cat([torch.arange(20), torch.randint(20, (13,))])):
        data = torch.randn(len(rows), 8, dtype=torch.float64)
        expected = layer(data, rows)
        for got, want in zip(
            tfnb.run(fetches, {x: data, labels: rows}),
            [*expected, *torch.autograd.grad(expected.loss, weights)], strict=True,
        ):  # fmt: skip
            torch.testing.assert_close(got, want.detach())
    with pytest.raises(BranchChanged, match=r"test_sizes\.py line"):
        tfnb.run(fetches, {x: torch.randn(4, 8, dtype=torch.float64), labels: torch.zeros(4, dtype=torch.int64)})


CUTS: dict[str, Function] = {
    "a part": lambda x: x[1:3].sum(),
    "from a place on": lambda x: x[3:].exp().sum() + x[3:].sum(0).sin().sum(),
    "all but some": lambda x: (x[:-2] * x.sum()).sum() + x[-3:].mean(1).sum(),
    "every other": lambda x: x[1::2].sum(0).square().sum() + x[1:5:3].sum(),
    "expanded": lambda x: (x[:1].sum(0, keepdim=True).expand(x[2:].shape[0], -1) * x[2:]).sum(),
}


@pytest.mark.parametrize("recorded", [1, 2, 4])
@pytest.mark.parametrize("name", sorted(CUTS))
def test_the_gradient_of_a_part_holds_at_every_size(name: str, recorded: int) -> None:
    """Also where the part has one row, or none, for the samples."""
    program = CUTS[name]
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(recorded, 2, dtype=torch.float64), shape=("B", 2))
        (slope,) = tfnb.gradients(program(x).square(), [x])
    for rows in ROWS:
        fed = torch.randn(rows, 2, dtype=torch.float64, requires_grad=True)
        (want,) = torch.autograd.grad(program(fed).square(), fed)
        torch.testing.assert_close(tfnb.run(slope, {x: fed.detach()}), want)


@pytest.mark.parametrize("ask", [len, lambda x: x.shape.numel()], ids=["len", "numel of a shape"])
def test_what_python_has_as_a_number_fixes_the_size_and_says_so(ask: Any) -> None:
    with pytest.warns(UserWarning, match=r"size B became the constant 4 at (.|\n)*x.sum\(\) / ask\(x\)"), tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 3))
        y = x.sum() / ask(x)
    assert tfnb.run(y, {x: torch.ones(4, 3)}) == 12 / ask(torch.ones(4, 3))
    with pytest.raises(ShapeError, match=r"shape \(7, 3\) for Tensor x"):
        tfnb.run(y, {x: torch.ones(7, 3)})


@pytest.mark.filterwarnings("ignore:.*branch of a recorded value", "ignore:.*left the graph")
@pytest.mark.parametrize("function", [
    lambda x, u: x + len(u), lambda x, u: sum((x * v.item() for v in u), x), lambda x, u: x * u.shape[0] * 2,
], ids=["len", "rows", "size"])  # fmt: skip
def test_a_size_that_only_data_of_the_cell_show_is_known_where_only_it_is_used(function: Any) -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 2))
        y = function(x, torch.unique(torch.tensor([1.0, 2.0, 2.0])))
    batch = torch.randn(3, 2)
    torch.testing.assert_close(tfnb.run(y, {x: batch}), function(batch, torch.tensor([1.0, 2.0])))


def test_rows_of_a_tensor_whose_size_is_computed_have_one_axis_less() -> None:
    """As `zip` of two tensors gives them: their number is that of the sample, and their shapes are torch's."""
    with pytest.warns(UserWarning, match=r"size|Python took"), tfnb.record():
        x, y = tfnb.placeholder(torch.ones(6, 4)), tfnb.placeholder(torch.arange(8.0))
        n = min(x.shape[0], y.shape[0])
        total = sum((a * b for a, b in zip(x[:n].unbind(), y[:n].unbind(), strict=True)), torch.zeros(4))
    assert total.shape == (4,)
    fed = torch.randn(6, 4), torch.randn(9)
    torch.testing.assert_close(tfnb.run(total, {x: fed[0], y: fed[1]}), (fed[0] * fed[1][:6, None]).sum(0))


def test_a_staged_sum_over_two_tensors_row_by_row() -> None:
    def summed(x: torch.Tensor, y: torch.Tensor) -> Any:
        total = 0
        for a, b in zip(x, y, strict=False):
            total = total + a * b
        return total

    with tfnb.record():
        x, y = tfnb.placeholder(torch.ones(6, 4)), tfnb.placeholder(torch.arange(6.0))
        total = tfnb.autograph(summed)(x, y)
    fed = torch.randn(6, 4), torch.randn(6)
    torch.testing.assert_close(tfnb.run(total, {x: fed[0], y: fed[1]}), summed(*fed))
