"""compare: curves at equal samples and equal time, with the significance of the difference; Variables are as before."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import tfnb
from tfnb.errors import InvalidArgument
from tfnb.fitting.comparing import Comparison, Point


def net() -> tuple[nn.Linear, Any, Any, dict[str, Any]]:
    torch.manual_seed(0)
    layer = nn.Linear(3, 1)
    with tfnb.record():
        x = tfnb.placeholder(torch.rand(4, 3), name="x")
        loss = (layer(nn.functional.dropout(x, 0.2)) - x.sum(1, keepdim=True)).square().mean()
        steps = {f"{lr:g}": tfnb.train.Adam(lr).minimize(loss) for lr in (0.001, 0.1)}
    return layer, x, loss, steps


def test_identical_modes_do_not_differ_and_other_ones_do_and_all_is_as_before() -> None:
    _, x, loss, steps = net()
    data = {x: torch.rand(50, 3)}
    tfnb.fit(steps["0.1"], data, steps=3)
    graph = loss.graph
    before = [variable.value() for variable in graph.variables]
    seed, next_run = graph.seed, tfnb.session.default_session(graph).runs.next
    modes = {"slow": {}, "same": {}, "quick": {"fetch": steps["0.1"]}}
    found = tfnb.compare(steps["0.001"], data, modes, watch=loss, epochs=6, batch_size=8)
    assert all(map(torch.equal, before, [variable.value() for variable in graph.variables]))
    assert (graph.seed, tfnb.session.default_session(graph).runs.next) == (seed, next_run)
    assert {len(runs) for runs in found.runs.values()} == {5}
    assert found.runs["slow"][0][-1].samples == 300 and found.runs["slow"][0][6].samples == 50
    values = [[point.value for point in run] for run in found.runs["slow"]]
    assert values == [[point.value for point in run] for run in found.runs["same"]]
    assert values[0] != values[1]  # another order, other random numbers
    assert found.chance("same", "samples") == 1 and found.chance("quick", "samples") < 0.05
    html = found._repr_html_()
    assert html.count("<polygon") == 6 and "quick" in html and "± " in repr(found) and found.name == "loss"


def test_steps_of_two_graphs_are_compared_and_the_variables_of_both_are_as_before() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 1)

    def recorded(lr: float) -> dict[str, Any]:
        with tfnb.record():
            x = tfnb.placeholder(torch.rand(4, 3), name="x")
            loss = (layer(x) - x.sum(1, keepdim=True)).square().mean()
            return {"fetch": tfnb.train.Adam(lr).minimize(loss), "watch": {"loss": loss}}

    modes = {f"{lr:g}": recorded(lr) for lr in (0.001, 0.1)}
    graphs = [how["fetch"].graph for how in modes.values()]
    before = [variable.value() for graph in graphs for variable in graph.variables]
    found = tfnb.compare(**modes["0.1"], data={"x": torch.rand(50, 3)}, modes=modes, seeds=4, epochs=6, batch_size=8)
    assert all(map(torch.equal, before, [variable.value() for graph in graphs for variable in graph.variables]))
    begins = [found.runs[name][0][0].value for name in modes]
    assert begins[0] == begins[1] and found.last("0.1", "samples")[0] < found.last("0.001", "samples")[0]
    with pytest.raises(InvalidArgument, match="follows at least one scalar, and in each mode the same ones"):
        tfnb.compare(
            **modes["0.1"],
            data={"x": torch.rand(50, 3)},
            modes={"a": {}, "b": {"watch": {"other": modes["0.1"]["watch"]["loss"]}}},
        )


def test_values_at_equal_samples_and_at_equal_time() -> None:
    """A mode with twice the rate, whose value falls half as quickly with each sample."""
    steady = [[Point(k, float(k), 100.0 - k) for k in range(1, 101)] for _ in range(3)]
    quick = [[Point(k, k / 2, 100 - k / 2 + seed) for k in range(1, 201)] for seed in range(3)]
    found = Comparison("loss", {"steady": steady, "quick": quick})
    assert (found.until("samples"), found.until("seconds")) == (100, 100.0)
    assert found.last("steady", "samples") == pytest.approx([4.5] * 3)  # the mean of 9 to 0
    assert found.last("quick", "samples") == pytest.approx([52.25, 53.25, 54.25])
    assert found.last("quick", "seconds") == pytest.approx([4.75, 5.75, 6.75])
    places, means, spreads = zip(*found.curve("quick", "seconds"), strict=True)
    assert places[-1] == 100 and means[0] > means[-1] and spreads == pytest.approx([1.0] * 40)


def test_values_that_are_not_finite_are_shown() -> None:
    runs = [[Point(k, float(k), math.nan if k > 5 else 1.0) for k in range(1, 11)] for _ in range(2)]
    found = Comparison("loss", {"a": runs, "<b>": runs})
    assert "nan" in repr(found) and "<b>" not in found._repr_html_()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"data": iter([])}, "DataLoader"), ({"modes": {}}, "modes is a dict"), ({"modes": {"a": 3}}, "a dict of"),
        ({"seeds": 0}, "at least 1"), ({"watch": []}, "at least one scalar"), ({"data": []}, "data is empty"),
        ({"modes": {"a": {}, "b": {"watch": []}}}, "the same ones"),
        ({"modes": {"a": {"batchsize": 3}}}, "mode a: fit has no option batchsize; it has .*batch_size"),
    ],
)  # fmt: skip
def test_bad_input_says_what_to_write_and_keeps_the_variables(change: dict[str, Any], text: str) -> None:
    layer, x, loss, steps = net()
    before = layer.weight.detach().clone()
    given = {"data": {x: torch.rand(50, 3)}, "modes": {"a": {}}, "watch": loss, "seeds": 1} | change
    with pytest.raises(InvalidArgument, match=text):
        tfnb.compare(steps["0.1"], **given)
    assert torch.equal(before, layer.weight)


def test_a_loader_and_several_values_are_compared_at_the_samples_that_were_read() -> None:
    _, x, loss, steps = net()
    rows = torch.utils.data.TensorDataset(torch.rand(50, 3))
    loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)
    state = torch.get_rng_state()
    found = tfnb.compare(
        steps["0.001"], loader, {"slow": {}, "same": {}}, watch={"a": loss, "b": loss}, feeds=(x,), epochs=2, seeds=2
    )
    assert torch.equal(state, torch.get_rng_state()) and [*found] == ["a", "b"]
    for name in found:
        slow, same = found[name].runs["slow"], found[name].runs["same"]
        assert [point.samples for point in slow[0]] == [8, 16, 24, 32, 40, 48, 50, 58, 66, 74, 82, 90, 98, 100]
        assert [[p.value for p in run] for run in slow] == [[p.value for p in run] for run in same]
    assert found._repr_html_().count("<table") == 2 and repr(found).count("same") == 2
