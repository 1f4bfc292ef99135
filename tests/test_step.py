"""A step in parts computes what one run does, each thing once, and writes at its end or not at all."""

from __future__ import annotations

import pytest
import torch

import tfnb
from tfnb.errors import BranchChanged, FeedError, InvalidArgument, ShapeError


def graph() -> tuple[tfnb.Session, dict[str, object]]:
    v = tfnb.Variable(torch.zeros(2), name="v")
    with tfnb.record() as g:
        a = tfnb.placeholder(torch.zeros(3, 2), name="a")
        b = tfnb.placeholder(torch.zeros(3, 2), name="b")
        noise = torch.rand(2)
        total = (a + noise).sum(0)
        scaled = total * b.mean(0)
        train = v.assign_add(scaled)
    return tfnb.Session(g), {"a": a, "b": b, "noise": noise, "total": total, "scaled": scaled, "train": train, "v": v}


def test_parts_equal_a_run_and_share_what_they_computed() -> None:
    session, n = graph()
    a, b = torch.randn(4, 2), torch.randn(4, 2)
    with session.step([n["total"], n["noise"], n["scaled"]], [n["a"], n["b"]]) as step:
        total, noise = step.fetch((n["total"], n["noise"]), {n["a"]: a})
        scaled = step.fetch({"scaled": n["scaled"]}, {n["b"]: b})["scaled"]
    torch.testing.assert_close(total, (a + noise).sum(0))
    torch.testing.assert_close(scaled, total * b.mean(0))


def test_a_feed_may_come_from_an_earlier_fetch() -> None:
    session, n = graph()
    with session.step([n["total"], "scaled"], ["a", n["b"]]) as step:
        total = step.fetch(n["total"], {"a": torch.ones(4, 2)})
        step.feed({n["b"]: total.expand(4, 2)})
        torch.testing.assert_close(step.fetch("scaled"), total * total)


def test_variables_are_written_at_the_last_fetch() -> None:
    session, n = graph()
    v = n["v"]
    with session.step([n["train"], n["total"]], [n["a"], n["b"]]) as step:
        written = step.fetch(n["train"], {n["a"]: torch.ones(2, 2), n["b"]: torch.ones(2, 2)})
        assert torch.equal(v.value(), torch.zeros(2))
        step.fetch(n["total"])
    assert torch.equal(v.value(), written) and not torch.equal(written, torch.zeros(2))


def test_leaving_early_writes_nothing_and_says_what_was_never_fed() -> None:
    session, n = graph()
    with session.step([n["total"], n["train"]], [n["a"], n["b"]]) as step:
        step.fetch(n["total"], {n["a"]: torch.ones(2, 2)})
    assert torch.equal(n["v"].value(), torch.zeros(2))
    with pytest.raises(InvalidArgument, match="left early, nothing was written; never fed: b"):
        step.fetch(n["train"])


def test_mistakes_name_the_fetch_or_feed() -> None:
    session, n = graph()
    ones = torch.ones(2, 2)
    with session.step([n["total"], n["scaled"]], [n["a"], n["b"]]) as step:
        with pytest.raises(InvalidArgument, match=r"fetch total can't be computed .* so far; missing: a"):
            step.fetch(n["total"])
        with pytest.raises(InvalidArgument, match="fetch noise was not specified"):
            step.fetch(n["noise"])
        with pytest.raises(InvalidArgument, match="feed noise was not specified"):
            step.feed({n["noise"]: torch.ones(2)})
        with pytest.raises(FeedError, match="cannot feed"):
            step.feed({n["a"]: "words"})
        with pytest.raises(ShapeError, match="has shape"):
            step.feed({n["a"]: torch.ones(2, 3)})
        step.fetch(n["total"], {n["a"]: ones})
        with pytest.raises(InvalidArgument, match="fetch total has already been fetched"):
            step.fetch(n["total"])
        with pytest.raises(InvalidArgument, match="feed a has already been fed"):
            step.feed({n["a"]: ones})
        with pytest.raises(ShapeError, match="B"):
            step.feed({n["b"]: torch.ones(2, 1)})
        step.fetch(n["scaled"], {n["b"]: ones})
        with pytest.raises(InvalidArgument, match="step is finished: everything was fetched"):
            step.fetch(n["scaled"])
    with pytest.raises(InvalidArgument, match=r"record v\.read\(\)"):
        session.step([n["v"]])


def test_a_failing_feed_leaves_the_others_to_be_given() -> None:
    session, n = graph()
    with session.step([n["scaled"]], [n["a"], n["b"]]) as step:
        with pytest.raises(ShapeError):
            step.feed({n["a"]: torch.ones(5, 2), n["b"]: torch.ones(5, 3)})
        assert step.fetch(n["scaled"], {n["a"]: torch.ones(2, 2), n["b"]: torch.ones(2, 2)}).shape == (2,)


@pytest.mark.filterwarnings("ignore:.*Python took")
def test_guards_of_branches_are_checked() -> None:
    with tfnb.record() as g:
        a, b = tfnb.placeholder(torch.ones(2)), tfnb.placeholder(torch.ones(2))
        y = a + 1
        z = y * b if y.sum() > 0 else b
    with tfnb.Session(g).step([y, z], [a, b]) as step:
        step.fetch(y, {a: -9 * torch.ones(2)})
        with pytest.raises(BranchChanged):
            step.fetch(z, {b: torch.ones(2)})


@pytest.mark.filterwarnings("ignore:.*Python took")
def test_a_guard_of_several_fetches_is_checked_once() -> None:
    with tfnb.record() as g:
        a = tfnb.placeholder(torch.ones(2))
        y = a * 2 if a.sum() > 0 else a
        z = torch.ones(2) + 3
    with tfnb.Session(g).step([y, z], [a]) as step:
        assert step.fetch(y, {a: torch.ones(2)}).tolist() == [2, 2]
        assert step.fetch(z).tolist() == [4, 4]


def test_intermediate_values_are_dropped_when_nobody_may_ask_any_more() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.ones(2), name="x")
        y = x.exp().sin().cos()
        z = x + 1
    with tfnb.Session(g).step([y, z], [x]) as step:
        step.fetch(y, {x: torch.ones(2)})
        assert sum(isinstance(value, torch.Tensor) for value in step._known.values()) == 1  # x itself
        torch.testing.assert_close(step.fetch(z), torch.full((2,), 2.0))


def test_an_op_that_fails_after_a_feed_is_dropped_says_so() -> None:
    with tfnb.record() as g:
        x, i = tfnb.placeholder(torch.ones(3), name="x"), tfnb.placeholder(torch.tensor(0), name="i")
        first, second = x * 2, torch.arange(4)[i]
    with tfnb.Session(g).step([first, second], [x, i]) as step:
        step.fetch(first, {x: torch.ones(3)})
        with pytest.raises(InvalidArgument, match=r"failed: .*\n.*node .*\n.*fed: i: int64"):
            step.fetch(second, {i: torch.tensor(7)})


def test_a_feed_that_is_memory_which_the_step_writes_is_read_before() -> None:
    first, second = (tfnb.Variable(torch.tensor([1.0, 2.0]), name=name, trainable=False) for name in "ab")
    with tfnb.record() as graph:
        x = tfnb.placeholder(torch.zeros(2), shape=(2,))
        one, other = first.assign_add(x), second.assign_add(x)
    with tfnb.Session(graph).step([one, other], [x]) as step:
        step.fetch(one, {x: first.storage})
        step.fetch(other)
    assert (first.value().tolist(), second.value().tolist()) == ([2.0, 4.0], [2.0, 4.0])
