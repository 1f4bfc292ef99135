"""``%tfwatch`` in a shell: names, patterns and histograms in one line, over `tfnb.watch`."""

from __future__ import annotations

import pytest

NET = """%%tfgraph net --no-show
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
x = tfnb.placeholder(torch.randn(4, 3))
loss = model(x).square().mean()
train = tfnb.train.SGD(0.1).minimize(loss)
"""


@pytest.fixture
def net(notebook):
    notebook.ok(NET)
    return notebook


def test_expressions_are_followed_in_runs_and_shown_as_text_and_picture(net):
    begun = net.ok('%tfwatch loss, "0.*":hist --every 1')
    assert begun.result is None and "nothing yet" in begun.shown[0]["text/plain"]
    net.ok("for _ in range(3): tfnb.run(train, {x: torch.ones(4, 3)})")
    seen = net.ok("seen = %tfwatch\nseen").result
    assert list(seen.courses) == ["loss", "0.weight", "0.bias"] and len(seen.courses["loss"].points) == 3
    assert [course.is_histogram for course in seen.courses.values()] == [False, True, True]
    net.ok("tfnb.fit(train, {x: torch.ones(8, 3)}, batch_size=4)")
    stopped = net.ok("%tfwatch --stop").result
    assert stopped is seen and "watched for 5 steps, every 1, stopped" in repr(seen)
    net.ok("tfnb.run(train, {x: torch.ones(4, 3)})")
    assert seen.steps == 5


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("%tfwatch lss", "near: loss"),
        ("%tfwatch", "nothing is watched in graph net"),
        ("%tfwatch loss --evry 3", "did you mean --every?"),
        ("%tfwatch loss --every 0", "at least 1"),
    ],
)
def test_bad_input_is_one_error(net, line, text):
    ran = net.run(line)
    assert ran.error is not None and text in ran.out + ran.err + str(ran.error)


def test_a_breakpoint_hands_the_inputs_of_its_node_to_the_next_cell(net):
    assert repr(net.ok("%tfbreak loss if value > 50").result) == "[loss if value > 50]"
    net.ok("tfnb.run(train, {x: torch.ones(4, 3)})")
    ran = net.run("tfnb.fit(train, {x: -1000 * torch.ones(8, 3)}, batch_size=4)")
    assert "stopped at loss if value > 50, In[" in str(ran.error) and len(ran.frames) == 1
    values, (card,) = net.ok("stopped").result, ran.shown
    assert list(values)[-1] == "loss" and values["loss"] > 50
    assert all(f">{name}</th>" in card["text/html"] for name in values) and "In[" in card["text/html"]
    assert net.ok("%tfbreak --off").result == []
    net.ok("tfnb.fit(train, {x: -1000 * torch.ones(8, 3)}, batch_size=4)")
    assert "near: loss" in str(net.run("%tfbreak los if nan").error)


def test_options_may_stand_behind_the_condition_of_a_breakpoint(net):
    net.ok("%%tfgraph later --no-show\nz = tfnb.placeholder(torch.ones(3))")
    net.ok("%tfbreak loss if value > 50 -o points -g net")
    assert repr(net.names["points"]) == "[loss if value > 50]"
    assert "not g: tfnb.break_at takes" in str(net.run("%tfbreak -g net loss if value > -g").error)
    net.ok("%tfbreak --off -g net")


def test_ways_to_train_are_compared(net):
    net.ok("images = torch.randn(40, 3)")
    body = "base = 4\nsmall = dict(batch_size=base)\nlarge = {'batch_size': 20}"
    ran = net.ok(f"%%tfcompare train -w loss --seeds 2 -e 3 -f x=images\n{body}")
    assert list(ran.result.runs) == ["small", "large"] and len(ran.result.runs["small"][1]) == 30
    assert "base" not in net.names and "<svg" in ran.result._repr_html_()
    assert "near: loss" in str(net.run("%%tfcompare train -w los -f x=images\na = {}").error)
    net.ok("from torch.utils.data import DataLoader\nloader = DataLoader(images, batch_size=8)")
    ran = net.ok("%%tfcompare train -w loss -w loss --data loader --feeds x --seeds 2\na = {}")
    assert [*ran.result] == ["loss", "loss_1"] and len(ran.result["loss"].runs["a"][0]) == 5


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        ("%tfcompare train -w loss", "is a cell magic"),
        ("%%tfcompare train -f x=1\na = {}", "-w LOSS"),
        ("%%tfcompare train -w loss\na = {}", "--data EXPR"),
        ("%%tfcompare train -w loss --data nosuch\na = {}", "--data: name 'nosuch' is not defined"),
        ("%%tfcompare train -w loss --data iter([])\na = {}", "a DataLoader or a list"),
    ],
)
def test_a_comparison_that_lacks_something_says_what_to_write(net, cell, text):
    ran = net.run(cell)
    assert text in ran.out + ran.err + str(ran.error)


def test_runs_after_an_edit_reuse_values(net):
    assert net.ok("%tfcache").result is None
    net.ok("%tfcache on")
    net.ok("tfnb.run(loss, {x: torch.ones(4, 3)})\ntfnb.run(loss, {x: torch.ones(4, 3)})")
    assert "7 nodes were reused, 7 computed" in repr(net.ok("%tfcache").result)
    assert net.ok("%tfcache --clear").result.bytes == 0 and net.ok("%tfcache off").result is None


@pytest.mark.parametrize("line", ["%tfbreak loss if nan", "%tfbreak --off", "%tfwatch loss", "%tfcache on"])
def test_without_a_graph_a_magic_says_so_in_one_line(notebook, line):
    ran = notebook.run(line)
    assert "UsageError: no graph yet: record one" in ran.err and not ran.frames


def test_a_further_output_that_is_not_finite_is_named_as_it_was_assigned(notebook):
    notebook.ok("%%tfgraph outputs\nx = tfnb.placeholder(torch.ones(3))\nlow, high = torch.aminmax(x)")
    ran = notebook.run("tfnb.run(high, {x: [1.0, float('nan')]}, check='nan')")
    assert str(ran.error).startswith("high is not finite: 1 number: 1 nan")


def test_a_tensor_is_watched_in_its_own_graph_though_another_one_is_later(notebook):
    notebook.ok("%%tfgraph first\nx = tfnb.placeholder(torch.ones(3))\nlow = x.min()")
    notebook.ok("%%tfgraph second\ny = tfnb.placeholder(torch.ones(3))\nhigh = y.max()")
    notebook.ok("%tfwatch low -q")
    notebook.ok("assert 'watch' in tfnb.graph('first').attached and 'watch' not in tfnb.graph('second').attached")
