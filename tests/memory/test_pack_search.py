"""The search for packs and microbatches; ``microbatches="auto"``: the whole step where it fits, else the quickest."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise, product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tfnb
from tests.memory.test_moves import chain
from tests.memory.test_pack_steps import Training
from tfnb.errors import InvalidArgument, ResourceExhausted, Unimplemented
from tfnb.execution.pack_step import PackPlan, PackStep
from tfnb.memory import pack_search
from tfnb.memory.moves import need
from tfnb.memory.pack_search import doubled, fewest, packed, packings, searched, simulated
from tfnb.memory.pack_tasks import PackPiece, Phase, Role, tasks_of
from tfnb.memory.packs import LayerPacks
from tfnb.train.batches import batches
from tfnb.widgets.budget_slider import BudgetSlider

ROWS = 16


def trained(net: str, microbatches: int | str, budget: int | str | None) -> tuple[Training, list[torch.Tensor], str]:
    """Two epochs of `tfnb.fit`; the values, and what is told."""
    made = Training(net, rows=2 * ROWS)
    result = tfnb.fit(
        made.train, {made.x: made.rows, made.y: made.labels}, batch_size=ROWS, epochs=2, microbatches=microbatches,
        memory_budget=budget, exact=False,
    )  # fmt: skip
    return made, [variable.value().clone() for variable in made.graph.variables], result.memory


@given(least=st.integers(1, 80), most=st.integers(1, 64))
def test_the_fewest_that_fit_are_found(least: int, most: int) -> None:
    assert fewest(lambda count: count >= least, most) == (least if least <= most else None)


@given(first=st.integers(1, 80), most=st.integers(1, 80))
def test_a_number_is_tried_with_its_doubles(first: int, most: int) -> None:
    found = doubled(first, max(first, most))
    assert found[0] == first and found[-1] <= max(first, most) < 2 * found[-1]
    assert all(2 * one == other for one, other in pairwise(found))


@st.composite
def spaces(draw: st.DrawFn) -> tuple[list[list[Any]], Callable[..., float]]:
    """A chain of layers on a budget: packings and numbers of microbatches, and the simulated time of each point."""
    layers = draw(st.integers(2, 5))
    weights = draw(st.lists(st.integers(1, 9), min_size=layers, max_size=layers))
    rows, rate = 8, draw(st.sampled_from([0.5, 2.0, 8.0]))
    steps = {}
    for count in (1, 2, 4, 8):
        tasks, sizes = chain(layers, count, weights)
        sizes = {i: size * rows // count if i.role is Role.BORDER else size for i, size in sizes.items()}
        pieces = dict.fromkeys(replace(task.piece, work=task.piece.work * rows // count) for task in tasks)
        steps[count] = tuple(pieces), sizes
    start = draw(st.sampled_from([0.0, 0.5]))  # of each piece, so that few microbatches are quick

    def seconds(piece: PackPiece, count: int) -> float:
        passes = {Phase.FORWARD: 1, Phase.BACKWARD: 3, Phase.UPDATE: 0}[piece.phase]
        return start + passes * weights[piece.pack] * rows / count / 4

    def simulate(forward: tuple[int, ...], backward: tuple[int, ...], count: int) -> float:
        return simulated(
            *(steps[count][0], count, steps[count][1], budget), LayerPacks(forward, backward), rate,
            lambda piece: seconds(piece, count),
        )  # fmt: skip

    pieces, sizes = steps[8]
    least = max(need(task, sizes) for task in tasks_of(pieces, 8))
    budget = least + draw(st.integers(0, 3 * 9 * layers))
    packs = packings(weights, weights)
    return [packs, packs, [1, 2, 4, 8]], simulate


@settings(max_examples=20, deadline=None)
@given(space=spaces())
def test_the_search_is_within_a_twentieth_of_all_points_and_always_the_same(
    space: tuple[list[list[Any]], Callable[..., float]],
) -> None:
    axes, simulate = space
    known = cache(simulate)
    with patch.object(pack_search, "SMALL", 0):  # one axis after the other
        found = searched(axes, known)
        assert found == searched(axes, known)
    assert simulate(*found[0]) <= 1.05 * min(known(*point) for point in product(*axes))


@settings(max_examples=15, deadline=None)
@given(axes=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True), min_size=1, max_size=2))
def test_a_small_space_is_tried_whole(axes: list[list[int]]) -> None:
    points = searched(axes, lambda *point: float(sum(point) % 7))
    assert sorted(points) == sorted(product(*axes))
    assert [sum(point) % 7 for point in points] == sorted(sum(point) % 7 for point in points)


# -- packs of layers -----------------------------------------------------------------------------------------------


def random_packing(layers: int, chosen: random.Random) -> LayerPacks:
    """Consecutive layers in packs, of the forward and of the backward pass."""
    joins = [[chosen.random() < 0.5 for _ in range(layers - 1)] for _ in range(2)]
    return LayerPacks(*(tuple(accumulate((not joined for joined in of), initial=0)) for of in joins))


@pytest.fixture(params=["dense", "batch norm", "tied", "dropout", pytest.param("transformer", marks=pytest.mark.slow)])
def packs(request: pytest.FixtureRequest) -> Iterator[tuple[Training, list[tuple[PackStep, PackStep]]]]:
    """A training, and its step in one pack a layer beside itself in some random packs."""
    torch.set_default_dtype(torch.float64)
    made, chosen = Training(request.param), random.Random(request.param)
    finest = PackStep(made.programs(), (2,) * 8)
    found = []
    for _ in range(2):
        packing = random_packing(finest.of.cut.layers, chosen)
        found.append((finest, PackStep(made.programs(packing), (2,) * 8)))
    yield made, found
    torch.set_default_dtype(torch.float32)


def test_pieces_of_packs_are_those_of_the_cut_and_packs_have_the_bits_of_single_layers(
    packs: tuple[Training, list[tuple[PackStep, PackStep]]],
) -> None:
    """The simulated pieces have the tensors of those that are cut, and at least their work."""
    made, steps = packs
    feeds = {made.x.value: made.rows, made.y.value: made.labels}
    for finest, step in steps:
        borders = {item.key: size for item, size in finest.sizes.items() if item.role is Role.BORDER}
        simulated = {(piece.phase, piece.pack): piece for piece in packed(finest.pieces, step.of.cut.packing, borders)}
        assert [*simulated] == [(piece.phase, piece.pack) for piece in step.pieces]
        for piece in step.pieces:
            like = simulated[piece.phase, piece.pack]
            for part in ("weights", "state", "written", "gradients", "takes", "gives"):
                assert {*getattr(like, part)} == {*getattr(piece, part)}, (step.of.cut.packing, piece, part)
            assert like.work >= piece.work
        budget = max(finest.least, step.least)
        storages = {v: v.storage for v in finest.of.variables}
        ran = [one.compute(feeds, storages, one.planned(budget), budget, run=7) for one in (finest, step)]
        (want, values), (got, new) = ran
        assert want.fetched.keys() == got.fetched.keys() and values.keys() == new.keys()
        assert all(torch.equal(want.fetched[key], got.fetched[key]) for key in want.fetched)
        assert all(torch.equal(values[v].read(), new[v].read()) for v in values)


# -- what is chosen ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "count"), [("60KB", 3), ("150KB", 1)])
def test_the_number_is_told_and_has_the_bits_of_as_many_microbatches_without_a_budget(budget: str, count: int) -> None:
    made, values, told = trained("dense", "auto", budget)
    assert re.match(
        rf"kept \d+\.\d KB of {budget[:-2]}\.0 KB: 4 packs x {count} microbatch(es)?, \d+\.\d KB a step", told
    )
    assert re.search(r" move, [1-9]\.\d times the time predicted without a budget; Variables of 107.7 KB on the", told)
    session = tfnb.session.default_session(made.graph)
    assert any(told in line for line in session.status()) and isinstance(session.plan, PackPlan)
    assert len(session.plan.step.rows) == count
    plain = Training("dense", rows=2 * ROWS)
    alone = tfnb.Session(plain.graph, compile="off")
    for batch in batches({plain.x: plain.rows, plain.y: plain.labels}, batch_size=ROWS, epochs=2).each:
        alone.make_callable([plain.train], batch.keys, microbatches=count)(*batch.values)
    assert all(map(torch.equal, values, [variable.value() for variable in plain.graph.variables]))


def test_a_step_that_keeps_the_budget_as_a_whole_is_not_divided() -> None:
    made, values, told = trained("dense", "auto", "400KB")
    assert re.match(r"at most \d+,\d+ bytes, 107,744 of them Variables, 0 nodes again", told)
    assert all(map(torch.equal, values, trained("dense", 1, None)[1]))
    session = tfnb.session.default_session(made.graph)
    with session.limited("400KB"):
        assert all("microbatch" not in at for at, _ in session.plans())


def test_the_number_is_the_quickest_of_the_fewest_that_fit_and_their_doubles() -> None:
    """Beside all numbers of microbatches, planned one by one."""
    made = Training("dense")
    programs, budget = made.programs(), 45_000
    steps = {count: PackStep(programs, (ROWS // count,) * count) for count in (1, 2, 4, 8, 16)}
    fitting = {count: step for count, step in steps.items() if step.least <= budget}
    ends = {count: step.times(step.planned(budget)).end for count, step in fitting.items()}
    assert 1 not in ends and len(ends) > 1
    session = tfnb.Session(made.graph, compile="off", memory_budget=budget)
    session.make_callable([made.train], [made.x, made.y], microbatches="auto")(made.rows, made.labels)
    assert isinstance(session.plan, PackPlan)
    rows = session.plan.step.rows
    assert session.plan.times.end <= min(ends.values())
    assert PackStep(programs, rows).least <= budget
    assert len(rows) == 1 or PackStep(programs, tuple([max(rows) + 1] * (ROWS // (max(rows) + 1)))).least > budget


@pytest.mark.parametrize("net", ["dense", "batch norm", "one layer"])
def test_the_least_budget_that_is_named_works_and_one_byte_less_does_not(net: str) -> None:
    made = Training(net)

    def run(budget: int) -> object:
        session = tfnb.Session(made.graph, compile="off", memory_budget=budget)
        call = session.make_callable([made.loss, made.train], [made.x, made.y], microbatches="auto")
        call(made.rows, made.labels)
        return session.plan

    with pytest.raises(ResourceExhausted, match=r"largest task, |largest node, ") as raised:
        run(1000)
    least = int(re.findall(r"feasible budget is ([\d,]+)", str(raised.value))[0].replace(",", ""))
    assert raised.value.details == least and run(least) is not None
    with pytest.raises(ResourceExhausted, match=f"feasible budget is {least:,} bytes"):
        run(least - 1)


def test_each_size_of_a_batch_has_its_number_and_the_largest_is_told() -> None:
    """A whole step may group products of layers, which packs do one by one: the bits of the last batch may differ."""
    found = []
    for microbatches, budget in (("auto", "60KB"), (3, None)):
        made = Training("dense", rows=22)
        result = tfnb.fit(
            made.train, {made.x: made.rows, made.y: made.labels}, batch_size=ROWS, microbatches=microbatches,
            memory_budget=budget, exact=False,
        )  # fmt: skip
        found.append([variable.value().clone() for variable in made.graph.variables])
        if budget:
            plan = tfnb.session.default_session(made.graph).plan
            assert isinstance(plan, PackPlan) and sum(plan.step.rows) == 6 and "4 packs x 3 microb" in result.memory
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


def test_a_callable_keeps_the_budget_that_it_was_made_with() -> None:
    made = Training("dense")
    session = tfnb.Session(made.graph, compile="off")
    with session.limited("80KB"):
        call = session.make_callable([made.train], [made.x, made.y], microbatches="auto")
    call(made.rows, made.labels)
    assert isinstance(session.plan, PackPlan) and session.plan.budget == 80_000 and session.memory_budget is None


def test_a_step_that_cannot_be_divided_runs_as_a_whole_if_it_fits() -> None:
    """Rows on axis 1: no batch to divide."""
    with tfnb.record() as graph:
        x = tfnb.placeholder(shape=(3, "B"), name="x")
        w = tfnb.Variable(torch.ones(2, 3), name="w")
        train = tfnb.train.SGD(0.1).minimize((w @ x).square().mean())
    assert tfnb.fit(
        train, [{x: torch.ones(3, 5)}], memory_budget="1MB", microbatches="auto", steps=1
    ).memory.startswith("at most")  # fmt: skip
    with pytest.raises((ResourceExhausted, Unimplemented, InvalidArgument), match=r"no placeholder|divide"):
        tfnb.fit(train, [{x: torch.ones(3, 5)}], memory_budget="40", microbatches="auto", steps=1)
    assert torch.equal(w.value(), tfnb.run(w)) and graph.variables


def test_auto_without_a_budget_is_refused_before_anything_runs() -> None:
    made = Training("dense")
    before = [variable.value().clone() for variable in made.graph.variables]
    data = {made.x: made.rows, made.y: made.labels}
    with pytest.raises(InvalidArgument, match="'auto' are chosen by a memory budget, and there is none"):
        tfnb.fit(made.train, data, microbatches="auto")
    with pytest.raises(InvalidArgument, match="or 'auto' with memory_budget in this process, not 'many'"):
        tfnb.fit(made.train, data, microbatches="many")
    with pytest.raises(InvalidArgument, match="mode='pipeline' has none: say how many"):
        tfnb.fit(made.train, data, microbatches="auto", mode="pipeline", memory_budget="1GB")
    with pytest.raises(InvalidArgument, match="belong to mode='sync', not to 'async'"):
        tfnb.fit(made.train, data, microbatches="auto", mode="async", memory_budget="1GB")
    with pytest.raises(InvalidArgument, match="an int of at least 1"):
        tfnb.Session(made.graph).make_callable(made.train, [made.x, made.y], microbatches=0)
    assert all(map(torch.equal, before, [variable.value() for variable in made.graph.variables]))
    assert not tfnb.session.default_session(made.graph).state.trained


# -- what is drawn ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan() -> PackPlan:
    """The plan of a step in four packs that ran once."""
    made = Training("dense")
    session = tfnb.Session(made.graph, compile="off", memory_budget="80KB")
    assert session.plan is None
    session.make_callable([made.train], [made.x, made.y], microbatches=2)(made.rows, made.labels)
    assert isinstance(session.plan, PackPlan)
    return session.plan


def bars_of(html: str) -> list[list[str]]:
    """The titles of the bars of each picture."""
    return [re.findall(r"<title>([^<]*)</title>", picture) for picture in html.split("<svg")[1:]]


def test_a_plan_draws_each_copy_and_task_predicted_above_measured(plan: PackPlan) -> None:
    html = plan._repr_html_()
    predicted, measured = bars_of(html)
    acts = [move for move in plan.schedule.moves if move.act in ("in", "run", "out")]
    assert len(predicted) == len(measured) == len(acts) == len(plan.times.bars)
    tasks = [str(task) for task in plan.step.tasks]
    for titles, unit in ((predicted, r"\d+\.\d % of the step"), (measured, r"\d.* [mµu]?s")):
        assert all(re.search(rf": {unit}$", title) for title in titles)
        assert sorted(name for title in titles if (name := title.rpartition(":")[0]) in tasks) == sorted(tasks)
    assert html.startswith(f"<div>{plan}</div>") and html.index("predicted") < html.index("measured in")
    assert {line.split(": ")[0] for line in predicted} >= {"weight 0.0.weight", "forward of pack 0, microbatch 1"}


def test_measured_bars_follow_each_other_and_make_the_step(plan: PackPlan) -> None:
    assert plan.last is not None
    ends = [bar.end for bar in plan.last.bars]
    assert all(bar.start <= bar.end for bar in plan.last.bars) and ends == sorted(ends)
    assert all(later.start >= end for end, later in zip(ends, plan.last.bars[1:], strict=False))


def test_other_budgets_go_from_the_least_to_one_beyond_which_nothing_changes(plan: PackPlan) -> None:
    budgets = [one.budget for one in plan.others]
    assert len(budgets) == 20 and budgets == sorted(set(budgets)) and budgets[0] == plan.step.least
    assert plan.at(10**9).schedule.moves == plan.others[-1].schedule.moves and repr(plan) == str(plan)
    assert plan.others[0].slowdown > plan.others[-1].slowdown >= 1
    assert plan.others[-1].schedule.moved == min(one.schedule.moved for one in plan.others)
    assert plan._repr_html_().count("<tr>") == 21


def test_the_slider_draws_the_chosen_budget_and_leaves_the_first_picture_when_saved(plan: PackPlan) -> None:
    slider = BudgetSlider(["one", "one", "three"], lambda at: f"<b>{at}</b>", 2)
    assert slider.html.value == "<b>2</b>"
    slider.slider.value = 0
    assert slider.html.value == "<b>0</b>"
    assert slider._repr_mimebundle_()["text/html"] == "<b>2</b>"
