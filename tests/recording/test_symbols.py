"""Sizes stay symbolic; what a recording relied on is a guard, or unifies symbols, or is said."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tfnb
from tfnb.errors import ShapeError


def test_size_arithmetic_stays_symbolic() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.zeros(6, 4))
        a = torch.arange(x.shape[0] * 2 + 1)
        b = x.reshape(x.shape[0] // 2, -1)
        c = x.flatten()
    assert [str(t.spec) for t in (a, c)] == ["int64[1 + 2*B]", "float32[4*B]"]
    for rows in (2, 8, 64):
        got = tfnb.run([a, b, c], {x: torch.zeros(rows, 4)})
        assert [t.shape[0] for t in got] == [2 * rows + 1, rows // 2, 4 * rows]


def test_a_conv_net_recorded_at_32_runs_at_any_batch_without_warnings() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tfnb.record() as g:
            x, y = tfnb.placeholder(torch.randn(32, 1, 8, 8)), tfnb.placeholder(torch.randint(10, (32,)))
            loss = F.cross_entropy(net(x), y)
    assert not g.guards and str(y.spec) == str(x.spec).replace("float32", "int64").replace(", 1, 8, 8", "")
    for rows in (1, 7, 64, 1000):
        a, b = torch.randn(rows, 1, 8, 8), torch.randint(10, (rows,))
        torch.testing.assert_close(tfnb.run(loss, {x: a, y: b}), F.cross_entropy(net(a), b).detach())


def test_a_guard_of_the_users_line_is_checked_before_the_run() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.zeros(6, 4))
        y = x * 2 if x.shape[0] > 4 else x * 3
    assert [guard.expr for guard in g.guards] == ["B > 4"]
    assert tfnb.run(y, {x: torch.ones(5, 4)}).sum() == 40
    with pytest.raises(ShapeError, match=r"recorded for B > 4(.|\n)*B = 3(.|\n)*x.shape\[0\] > 4"):
        tfnb.run(y, {x: torch.ones(3, 4)})


def test_iterating_over_the_batch_fixes_it_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="became the constant 3"), tfnb.record():
        x = tfnb.placeholder(torch.ones(3, 2), name="x")
        total = sum(row.sum() for row in x)
    assert tfnb.run(total, {x: torch.ones(3, 2)}) == 6
    with pytest.raises(ShapeError, match="Cannot feed"):
        tfnb.run(total, {x: torch.ones(4, 2)})


def test_accidental_equality_warns_with_the_line_and_fixes_the_size() -> None:
    with pytest.warns(UserWarning, match=r"size B became the constant 8 at .*x \+ torch.ones\(8\)"), tfnb.record():
        x = tfnb.placeholder(torch.ones(8), name="x")
        y = x + torch.ones(8)
    assert tfnb.run(y, {x: torch.ones(8)}).sum() == 16
    with pytest.raises(ShapeError):
        tfnb.run(y, {x: torch.ones(7)})


def test_without_samples_accidental_equality_fails_at_recording() -> None:
    with pytest.raises(ShapeError, match=r"float32\[B\](.|\n)*float32\[8\]"), tfnb.record():
        tfnb.placeholder(shape=(None,)) + torch.ones(8)


def test_letters_vary_together_and_unequal_feeds_are_named() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 3), shape=("B", "T"))
        y = tfnb.placeholder(torch.ones(4), shape=("B",))
        z = x.sum(1) * y
    assert str(x.spec) == "float32[B, T]"
    with pytest.raises(ShapeError, match="B is 2 in another feed"):
        tfnb.run(z, {x: torch.ones(2, 5), y: torch.ones(3)})


def test_samples_of_different_length_under_one_letter_fail() -> None:
    with pytest.raises(ShapeError, match="size B is 4"), tfnb.record():
        tfnb.placeholder(torch.ones(4), shape=("B",))
        tfnb.placeholder(torch.ones(5), shape=("B",))
    told = r"size B is 4 in the sample of x \(.*test_symbols.py.*\) and 2 in this one \(one row is recorded as two\)"
    with pytest.raises(ShapeError, match=rf"{told}: one letter is one size"), tfnb.record():
        tfnb.placeholder(torch.ones(4), name="x")
        tfnb.placeholder(torch.ones(1), shape=("B",))
    with pytest.raises(ShapeError, match="size N is 3 on an earlier axis and 4 in this one"), tfnb.record():
        tfnb.placeholder(torch.ones(3, 4), shape=("N", "N"))


@pytest.mark.parametrize("rows", [0, 1])
def test_one_row_is_recorded_doubled_and_said_once(rows: int) -> None:
    net = nn.Linear(3, 2)
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(rows, 3))
        y = net(x).sum(1)
    assert len(g.notes) == 1 and "2 rows" in g.notes[0]
    for n in (1, 2, 64):
        data = torch.randn(n, 3)
        torch.testing.assert_close(tfnb.run(y, {x: data}), net(data).sum(1).detach())


def test_a_fed_intermediate_binds_the_batch() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 3))
        h = x * 2
        y = h + torch.zeros(h.shape[0], 1)
    assert torch.equal(tfnb.run(y, {h: torch.ones(5, 3)}), torch.ones(5, 3))


def test_data_dependent_sizes_run_at_other_counts() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.tensor([1.0, -1.0, 2.0]))
        y = x[x > 0]
        z = y.sum()
    for data in ([1.0, 2.0, 3.0], [-1.0], [5.0, -1.0]):
        t = torch.tensor(data)
        got = tfnb.run([y, z], {x: t})
        assert torch.equal(got[0], t[t > 0]) and torch.equal(got[1], t[t > 0].sum())


def test_scalar_placeholders_have_no_varying_axis() -> None:
    with tfnb.record():
        rate = tfnb.placeholder(0.5)
        y = rate * 2
    assert str(rate.spec) == "float32[]" and tfnb.run(y, {rate: 3}) == 6


def test_a_lazy_recording_has_shapes_only_and_runs() -> None:
    net = nn.Linear(3, 2)
    with tfnb.record(lazy=True):
        x = tfnb.placeholder(torch.randn(4, 3))
        z = tfnb.placeholder(torch.tensor([1.0, 2.0, 3.0]))
        y = net(x) + z.sum()
    assert str(y.spec) == "float32[B, 2]" and "no sample" in repr(y)
    data = torch.randn(5, 3)
    torch.testing.assert_close(tfnb.run(y, {x: data, z: torch.ones(2)}), (net(data) + 2).detach())


def test_shape_errors_speak_of_letters_and_leave_no_log(caplog: pytest.LogCaptureFixture) -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.ones(4, 3))
        with pytest.raises(ShapeError, match=r"\[B, 3\] X \[5, 2\]"):
            x @ torch.ones(5, 2)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_wrong_channels_of_a_batch_norm_fail_in_a_lazy_recording() -> None:
    with pytest.raises(Exception, match="length 7"), tfnb.record(lazy=True):
        F.batch_norm(tfnb.placeholder(torch.randn(4, 5, 6)), torch.ones(7), torch.ones(7), training=True)
