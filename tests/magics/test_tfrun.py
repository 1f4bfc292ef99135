"""The magics that run, differentiate, list, save and load: each does what its function does, from names."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tfnb
from tfnb.magics.extension import NAMES

NET = """%%tfgraph net --no-show
torch.manual_seed(0)
model = nn.Linear(3, 2)
x = tfnb.placeholder(torch.ones(4, 3))
y = model(x)
loss = y.square().mean()
"""


@pytest.fixture
def net(notebook):
    notebook.ok(NET)
    return notebook


# -- %tfrun ----------------------------------------------------------------------------


def test_one_fetch_gives_its_value(net):
    value = net.ok("%tfrun loss -f x=torch.zeros(5, 3)").result
    assert torch.equal(value, net.names["model"].bias.detach().square().mean())


OTHER = "%%tfgraph other --no-show\nz = tfnb.placeholder(torch.ones(2), name='z') * 2"


@pytest.mark.parametrize("line", ["%tfrun loss", "%tfgrad loss", "%tfbreak loss if nan", "%tfprof loss"])
def test_a_node_that_the_named_graph_lacks_is_said_with_a_graph_that_has_it(net, line):
    net.ok(OTHER)
    ran = net.run(f"{line} -g other")
    assert "graph other has no node 'loss'; add -g net" in ran.out + ran.err + str(ran.error)
    assert net.run("%tfrun nothing").error is not None
    ran = net.run("%tfrun loss z")
    assert "no graph has all of loss, z: loss is in net; z is in other" in ran.out + ran.err + str(ran.error)


@pytest.mark.parametrize("is_held", [True, False])
def test_a_name_means_the_graph_of_the_notebooks_variable_then_the_latest_that_has_it(net, is_held):
    net.ok(OTHER)
    if not is_held:
        del net.names["loss"], net.names["y"]
    expected = net.names["model"].bias.detach().square().mean()
    assert torch.equal(net.ok("%tfrun loss -f x=torch.zeros(5, 3)").result, expected)
    assert torch.equal(net.ok("%tfrun y loss -f x=torch.zeros(5, 3)").result["loss"], expected)
    assert "no profiled run of loss yet" in str(net.run("%tfprof loss").error)
    assert sorted(net.ok("%tfgrad loss").result) == ["bias", "weight"]
    net.ok(OTHER)  # the latest again
    assert net.ok("%tfbreak loss if nan").result == tfnb.break_at(graph="net")
    net.ok("%tfbreak --off -g net")
    net.ok("%tfwatch loss")
    assert "loss" in repr(tfnb.watch(graph="net"))
    net.ok("%tfwatch bia* -q")
    assert "bias" in repr(tfnb.watch(graph="net"))
    assert "bias" in str(net.ok("%tfvars bia*").result)
    assert "prune" in str(net.ok("%tfdiff --passes loss").result)
    net.ok("%%tfgraph net --no-show\ntrain = tfnb.train.SGD(0.1).minimize(model(x).square().mean())")
    net.ok(OTHER)
    if not is_held:
        del net.names["train"]
    ways = "a = {'batch_size': 2}\nb = {'batch_size': 4}"
    net.ok(f"%%tfcompare train -w loss -f x=torch.ones(4,3) --seeds 1\n{ways}")


def test_the_variable_of_the_notebook_comes_before_the_latest_graph_with_the_name(net):
    net.ok("kept = loss")
    net.ok("%%tfgraph later --no-show\nx = tfnb.placeholder(torch.ones(2))\nloss = x.sum()")
    assert net.ok("%tfrun loss -f x=torch.ones(3)").result == 3
    net.ok("loss = kept")
    assert net.ok("%tfrun loss -f x=torch.zeros(5, 3)").result < 3
    assert net.ok("%tfrun loss -g later -f x=torch.ones(3)").result == 3
    assert net.ok("%tfrun kept -f x=torch.zeros(5, 3)").result == net.ok("%tfrun loss -f x=torch.zeros(5, 3)").result


def test_a_variable_of_the_notebook_that_holds_a_graph_is_meant_by_its_name(net):
    net.ok("with tfnb.record() as unlisted:\n    x = tfnb.placeholder(torch.ones(2))\n    total = x.sum()")
    assert net.ok("%tfgraph unlisted").result is net.names["unlisted"]
    assert net.ok("%tfgraph total").result is net.names["unlisted"]
    assert net.ok("%tfrun total -f x=torch.ones(3)").result == 3
    assert net.ok("%tfrun total -g unlisted -f x=torch.ones(3)").result == 3
    assert "+" in str(net.ok("%tfdiff net unlisted --text").result)
    assert "is not among the named ones" in str(net.run("%tfgraph unlisted rm").error)
    before = len(net.names["unlisted"].nodes)
    net.ok("%%tfgraph later --no-show\nw = nn.Parameter(torch.ones(2))")
    net.ok("with tfnb.record(unlisted):\n    cost = (x * w).sum()")
    (gradient,) = net.ok("%tfgrad cost").result.values()
    assert gradient.graph is net.names["unlisted"] and len(gradient.graph.nodes) > before
    assert "graph" not in tfnb.graphs()


def test_names_that_are_not_ascii_are_known_as_the_user_wrote_them(notebook):
    notebook.ok("%%tfgraph größen --no-show\ngröße = tfnb.placeholder(torch.ones(3))\nñ = größe * 2\nx_ = größe + 1")
    assert notebook.ok("%tfrun ñ -f größe=torch.ones(5)").result.tolist() == [2.0] * 5
    assert notebook.ok("%%tfrun x_\ngröße = torch.ones(2)").result.tolist() == [2.0] * 2
    notebook.ok("%%tfgraph größen --no-show\ngröße = tfnb.placeholder(torch.ones(3))\nñ = größe * 3")
    assert notebook.ok("%tfrun ñ -f größe=torch.ones(5)").result.tolist() == [3.0] * 5


def test_a_fed_expression_may_have_spaces_and_signs(net):
    value = net.ok("%tfrun y -f x=torch.tensor([[1.0, -2.0, 3.0], [-1.0, 0.5, -0.5]])").result
    assert torch.equal(value, net.names["model"](torch.tensor([[1.0, -2.0, 3.0], [-1.0, 0.5, -0.5]])).detach())


def test_several_fetches_give_a_dict(net):
    values = net.ok("%tfrun y loss -f x=torch.zeros(5, 3)").result
    assert set(values) == {"y", "loss"} and values["y"].shape == (5, 2)


def test_body_feeds_what_it_assigns_to_placeholders_and_keeps_the_names(net):
    value = net.ok("%%tfrun y\nrows = 7\nx = torch.zeros(rows, 3)").result
    assert value.shape == (7, 2)
    assert net.names["x"] is not None and isinstance(net.names["x"], tfnb.Tensor)
    assert "rows" not in net.names


def test_out_stores_and_quiet_shows_nothing(net):
    ran = net.ok("%tfrun y -q -o kept -f x=torch.zeros(1, 3)")
    assert ran.result is None and net.names["kept"].shape == (1, 2)


def test_steps_draw_from_an_iterator(net):
    net.ok("%%tfgraph net --no-show\nstep = tfnb.train.SGD(0.1).minimize(loss)")
    before = net.names["model"].weight.detach().clone()
    result = net.ok("%tfrun step -n 3 -f x=iter(torch.rand(5,4,3))").result
    assert result.steps == 3
    assert not torch.equal(before, net.names["model"].weight)


@pytest.mark.parametrize(
    "line, error, words",
    [
        ("%tfrun loss -f x=torch.zeros(5,4)", tfnb.errors.ShapeError, "(5, 4)"),
        ("%tfrun loss -f x=torch.zeros(5,3)+1j", tfnb.errors.FeedError, "complex64"),
    ],
)
def test_mistakes_name_what_was_found(net, line, error, words):
    number = net.count
    ran = net.run(line)
    assert isinstance(ran.error, error) and words in str(ran.error)
    assert ran.frames[-1] == f"Cell In[{number}], line 1"


@pytest.mark.parametrize(
    "line, error, words",
    [
        ("%tfrun loss", tfnb.errors.InvalidArgument, "placeholder x (float32[B, 3])"),
        ("%tfrun lss", tfnb.errors.NotFound, "near: loss"),
        ("%tfrun loss -f z=1", tfnb.errors.NotFound, "'z'"),
    ],
)
def test_mistakes_of_the_line_are_usage_errors_with_their_cause(net, line, error, words):
    ran = net.run(line)
    assert ran.err.startswith("UsageError: ") and words in ran.err and not ran.frames
    assert isinstance(ran.error.__cause__, error)


def test_a_float64_array_is_rounded_with_one_note(net):
    rows = "__import__('numpy').full((5,3),0.1)"
    with pytest.warns(UserWarning, match="float64 is fed for x") as notes:
        first, again = (net.ok(f"%tfrun loss -f x={rows}").result for _ in range(2))
    assert len(notes) == 1
    assert torch.equal(first, again) and torch.equal(first, net.ok("%tfrun loss -f x=torch.full((5,3),0.1)").result)


def test_feed_without_a_value_is_one_line(net):
    assert "NAME=EXPR was expected" in net.run("%tfrun loss -f x").err
    assert "UsageError: -f x=1 +: invalid syntax" in net.run("%tfrun loss -f x=1 +").err
    assert "UsageError: -f x=nope: name 'nope' is not defined" in net.run("%tfrun loss -f x=nope").err


def test_what_cannot_be_done_is_one_line(net):
    assert "there is no folder" in net.run("%tfgraph net export /no/such/folder/net.svg").err
    net.ok("%%tfgraph bare --no-show\nu = tfnb.placeholder(torch.ones(3))\ntotal = u.sum()")
    assert "graph bare has no trainable variables" in net.run("%tfgrad total -g bare").err


# -- %tfprof ----------------------------------------------------------------------------


def test_a_profiled_run_is_shown_and_written(net, tmp_path):
    value = net.ok("%tfrun loss -f x=torch.zeros(5, 3) --profile").result
    assert torch.equal(value, net.ok("%tfrun loss -f x=torch.zeros(5, 3)").result)
    trace = net.ok(f"%tfprof loss --trace {tmp_path / 'run.json'} --top 1").result
    assert (trace.title, trace.rows) == ("loss", 1)
    assert {event.line for event in trace.events} <= {"In[3]:5", "In[3]:6"}
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} == {event.name for event in trace.events}
    html = net.shell.display_formatter.format(trace)[0]["text/html"]
    assert "tfnb-timeline" in html and html.count("<tr>") == 4 * 2


def test_a_trace_that_cannot_be_written_says_what_to_do(net, tmp_path):
    net.ok("%tfrun loss -f x=torch.zeros(5, 3) --profile")
    ran = net.run(f"%tfprof --trace {tmp_path / 'nope' / 'run.json'}")
    assert f"there is no folder {tmp_path / 'nope'}: make it, or write to another one" in str(ran.error)
    assert ran.out.count("run.json") <= 3 and "tfnb/" not in ran.out  # no frame of ours


def test_profile_colours_by_bytes_too(net):
    net.ok("%tfrun loss -f x=torch.zeros(5, 3) --profile")
    assert "of the bytes" in net.ok("%tfprof --by bytes").result._repr_html_()


def test_profile_opens_and_prints_the_table_of_lines(net):
    net.ok("%tfrun loss -f x=torch.zeros(5, 3) --profile")
    trace = net.ok("%tfprof --by line").result
    assert "<details open><summary>lines" in trace._repr_html_()
    assert [row.name for row in trace.table(by="line")] == re.findall(r"bytes  (\S+)", repr(trace))
    assert "<details open><summary>places" in net.ok("%tfprof --by place").result._repr_html_()


@pytest.mark.filterwarnings("ignore:.*profiler")
def test_kernels_are_profiled_with_the_nodes_and_written(net, tmp_path):
    value = net.ok("%tfrun loss -f x=torch.zeros(5, 3) --kernels").result
    assert torch.equal(value, net.ok("%tfrun loss -f x=torch.zeros(5, 3)").result)
    trace = net.ok(f"%tfprof --trace {tmp_path / 'run.json'}").result
    assert "torch, cpu" in trace._repr_html_() and '"cpu_op"' in (tmp_path / "run.json").read_text()
    assert "leave out -n" in net.run("%tfrun loss -n 2 --kernels -f x=torch.zeros(5, 3)").err


def test_without_a_profiled_run_the_command_is_shown(net):
    wanted = "UsageError: no profiled run of graph net yet: %tfrun FETCH -f x=... --profile"
    assert wanted in net.run("%tfprof").err
    net.ok("%tfrun y -f x=torch.zeros(5, 3) --profile")
    net.ok("%tfprof")
    assert "no profiled run of loss yet: %tfrun loss -f x=... --profile" in net.run("%tfprof loss").err


def test_profile_of_many_steps_is_one_line(net):
    assert "leave out -n" in net.run("%tfrun loss -n 2 --profile -f x=torch.zeros(5, 3)").err


# -- %tfgrad ----------------------------------------------------------------------------


def test_gradients_of_all_trainable_variables(net):
    grads = net.ok("%tfgrad loss -o grads").result
    assert set(grads) == {"weight", "bias"} and net.names["grads"] is grads
    data = torch.rand(6, 3)
    model = net.names["model"]
    model(data).square().mean().backward()
    torch.testing.assert_close(tfnb.run(grads["weight"], {net.names["x"]: data}), model.weight.grad)


def test_gradients_by_pattern_are_replaced_by_a_rerun(net):
    for _ in range(3):
        assert set(net.ok("%tfgrad loss w*", cell_id="a").result) == {"weight"}
    size = len(tfnb.graph("net").nodes)
    net.ok("%tfgrad loss w*", cell_id="a")
    assert len(tfnb.graph("net").nodes) == size


def test_pattern_that_matches_nothing_is_one_line(net):
    ran = net.run("%tfgrad loss conv*")
    assert "no variable matches 'conv*'; there are: weight, bias" in ran.err


# -- %tfvars, %tfsave, %tfload ----------------------------------------------------------------------------


def test_variables_are_listed(net):
    table = net.ok("%tfvars").result
    assert list(table) == [("weight", "float32[2, 3]", 24, "cpu", True), ("bias", "float32[2]", 8, "cpu", True)]
    assert [row[0] for row in net.ok("%tfvars --sort bytes").result] == ["bias", "weight"]
    assert [row[0] for row in net.ok("%tfvars b*").result] == ["bias"]


def test_a_memory_budget_is_set_shown_and_taken_back(net):
    assert list(net.ok("%tfbudget 1.5KiB").result) == [("any", "", "", 1536, "")]
    value = net.ok("%tfrun loss -f x=torch.zeros(5, 3)").result
    (row,) = net.ok("%tfbudget").result
    assert row[0] == "x [5, 3]" and 32 < row[1] <= 1536 and row[2:4] == (32, 1536)  # 24 bytes of weight, 8 of bias
    assert row[4] == f"at most {row[1]} bytes, 32 of them Variables, 0 nodes again"
    net.ok("%tfbudget 9B")
    ran = net.run("%tfrun loss -f x=torch.zeros(5, 3)")
    assert isinstance(ran.error, tfnb.errors.ResourceExhausted) and f"budget is {row[1]:,} bytes" in str(ran.error)
    refused = net.run("%tfbudget 1").err
    assert refused.startswith("UsageError: a memory budget of 1 bytes holds no value of graph net; the least sensible")
    assert net.ok("%tfbudget").result.rows[-1][3] == 9
    net.ok("%tfbudget --off")
    assert torch.equal(net.ok("%tfrun loss -f x=torch.zeros(5, 3)").result, value)
    assert "not 'much'" in net.run("%tfbudget much").err


def test_the_slider_of_budgets_is_of_the_step_in_packs_that_ran_last(net):
    assert "no step of this graph in packs ran here" in net.run("%tfbudget --slider").err
    net.ok("%%tfgraph net --no-show\ntrain = tfnb.train.SGD(0.1).minimize(loss)")
    net.ok('tfnb.fit(train, {x: torch.ones(4, 3)}, memory_budget="1KB", microbatches=2)')
    slider = net.ok("%tfbudget --slider").result
    assert len(slider.slider.options) == 20 and "predicted" in slider.html.value
    assert slider.slider.options[0][0].endswith("bytes")


def test_table_says_the_same_as_text_and_html(net):
    table = net.ok("%tfvars").result
    html = table._repr_html_()
    assert all(str(cell) in repr(table) and str(cell) in html for row in table for cell in row)


def test_variables_survive_a_file(net, tmp_path):
    weight = net.names["model"].weight.detach().clone()
    saved = net.ok(f"%tfsave {tmp_path / 'net.safetensors'}").result
    html = tfnb.view.checkpoint_html(saved)
    for fact in ("net.safetensors", f"{Path(saved).stat().st_size:,}", "steps", *saved.specs, "float32["):
        assert fact in repr(saved) and fact in html
    with torch.no_grad():
        net.names["model"].weight.zero_()
    net.ok(f"%tfload {tmp_path / 'net.safetensors'}")
    assert torch.equal(net.names["model"].weight, weight)


def test_a_file_says_how_many_steps_were_taken(net, tmp_path):
    net.ok("%%tfgraph net --no-show\nstep = tfnb.train.SGD(0.1).minimize(model(x).mean())")
    net.ok("tfnb.fit(step, {x: torch.ones(24, 3)}, batch_size=8, epochs=2)")
    saved = net.ok(f"%tfsave {tmp_path / 'net.safetensors'}").result
    assert "steps and runs: 6\n" in repr(saved) and "unfinished" not in repr(saved)
    failing = "tfnb.fit(step, {x: torch.ones(24, 3)}, batch_size=8, callbacks=[lambda progress: 1 / 0])"
    net.ok(f"try:\n    {failing}\nexcept Exception:\n    pass")
    saved = net.ok(f"%tfsave {tmp_path / 'net.safetensors'}").result
    assert "unfinished fit: step" in repr(saved)


def test_a_file_gives_a_torch_optimizer_its_learning_rate(net, tmp_path):
    net.ok("opt = torch.optim.SGD(model.parameters(), lr=0.1)")
    net.ok("%%tfgraph net --no-show\nstep = tfnb.train.from_torch(opt).minimize(model(x).mean())")
    net.ok("opt.param_groups[0]['lr'] = 0.025")
    assert "SGD" in repr(net.ok(f"%tfsave {tmp_path / 'net.safetensors'}").result)
    net.ok("opt.param_groups[0]['lr'] = 0.1")
    with pytest.warns(UserWarning, match=r"^restored the param groups: SGD: lr 0.1 -> 0.025$"):
        net.ok(f"%tfload {tmp_path / 'net.safetensors'}")
    assert net.names["opt"].param_groups[0]["lr"] == 0.025
    net.ok("opt.param_groups[0]['lr'] = 0.1")
    net.ok(f"%tfload {tmp_path / 'net.safetensors'} --no-strict")
    assert net.names["opt"].param_groups[0]["lr"] == 0.1


def test_file_that_lacks_a_variable_lists_it(net, tmp_path):
    net.ok(f"%tfsave {tmp_path / 'net.safetensors'}")
    net.ok("%%tfgraph net --no-show\nextra = tfnb.Variable(torch.zeros(2), name='extra')\nz = y + extra")
    ran = net.run(f"%tfload {tmp_path / 'net.safetensors'}")
    assert isinstance(ran.error.__cause__, tfnb.errors.TfnbError) and "extra" in ran.err and not ran.frames
    net.ok(f"%tfload --no-strict {tmp_path / 'net.safetensors'}")


def _notes(ran):
    texts = [bundle.get("text/plain", "") for bundle in ran.shown] + ran.out.splitlines()
    return "\n".join(text for text in texts if text.startswith("note: "))


TRAINED = """%%tfgraph training --no-show
model = nn.Linear(3, 2)
x = tfnb.placeholder(torch.ones(4, 3))
train = tfnb.train.Adam(0.1).minimize(model(x).square().mean())
"""
EVALUATED = "%%tfgraph evaluation --no-show\nz = model(tfnb.placeholder(torch.ones(4, 3)))"


def test_a_file_has_the_optimizers_variables_where_the_latest_graph_only_evaluates(notebook, tmp_path):
    notebook.ok(TRAINED)
    notebook.ok("import copy\nplain = copy.deepcopy(model)")
    notebook.ok("data = torch.arange(12.0).reshape(4, 3)\ntfnb.run(train, {x: data})")
    notebook.ok(EVALUATED)
    ran = notebook.ok(f"%tfsave {tmp_path / 'm.safetensors'}")
    assert set(ran.result.specs) == set(notebook.names["train"].graph.contents.variables) and not _notes(ran)
    notebook.ok("for _ in range(3): tfnb.run(train, {x: data})")
    assert not _notes(notebook.ok(f"%tfload {tmp_path / 'm.safetensors'}"))
    notebook.ok("tfnb.run(train, {x: data})")
    plain = notebook.names["plain"]  # two steps in all
    optimizer = torch.optim.Adam(plain.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        plain(notebook.names["data"]).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(notebook.names["model"].state_dict(), plain.state_dict())


def test_what_other_graphs_have_and_a_file_lacks_is_said_by_name(notebook, tmp_path):
    file = tmp_path / "m.safetensors"
    notebook.ok(TRAINED)
    notebook.ok(EVALUATED)
    ran = notebook.ok(f"%tfsave {file} -g evaluation")
    assert set(ran.result.specs) == {"weight", "bias"}
    said = _notes(ran)
    assert "not in" in said and "of graph training" in said and "%tfsave FILE -g training" in said and "Adam" in said
    notebook.ok("data = torch.ones(4, 3)\ntfnb.run(train, {x: data})")
    said = _notes(notebook.ok(f"%tfload {file}"))  # the file has not all of the graph that trains
    assert "graph evaluation was restored; as they are stay" in said and "of graph training" in said
    notebook.ok(f"%tfsave {file} -g training")
    said = _notes(notebook.ok(f"%tfload {file} -g evaluation"))
    assert "has more, for no variable of graph evaluation" in said and "as they are stay" in said
    notebook.ok("%%tfgraph apart --no-show\nother = nn.Linear(2, 2)(tfnb.placeholder(torch.ones(3, 2)))")
    said = _notes(notebook.ok(f"%tfsave {file}"))
    assert "of graph training" in said and "of graph evaluation" in said
    assert "apart" not in _notes(notebook.ok(f"%tfsave {file} -g training"))
    assert not _notes(notebook.ok(f"%tfsave {file} -q"))


def test_a_file_of_the_safetensors_library_is_read(net, tmp_path):
    file = tmp_path / "theirs.safetensors"
    found = {name: value + 1 for name, value in net.names["model"].state_dict().items()}
    save_file({f"model.{name}": value for name, value in found.items()}, file)
    pairs = " ".join(f"--map model.{name}={name}" for name in found)
    assert "it has, for no variable here: model." in str(net.run(f"%tfload {file}").error)
    net.ok(f"%tfload {file} --no-strict {pairs}")
    for name, value in net.names["model"].state_dict().items():
        assert torch.equal(value, found[name])


# -- %tfdiff ----------------------------------------------------------------------------


def test_two_graphs_are_compared_by_a_drawing_or_by_lines(net):
    net.ok(
        NET.replace("graph net", "graph wider").replace("Linear(3, 2)", "Linear(3, 5)").replace("y.sq", "y.exp().sq")
    )
    found = net.ok("%tfdiff net wider -o d").result
    assert [node.name for node in found.added] == ["exp"] and "weight" in {node.name for node in found.changed}
    html = net.shell.display_formatter.format(found)[0]["text/html"]
    assert "<svg" in html and "added" in html
    shown = net.shell.display_formatter.format(net.ok("%tfdiff net wider --text").result)[0]
    assert shown["text/plain"].startswith("--- net\n+++ wider") and "text/html" not in shown


def test_a_graph_is_compared_with_what_the_passes_make_of_it(net):
    net.ok("%%tfgraph net --append --no-show\nz = (loss * 1).exp()")
    found = net.ok("%tfdiff --passes z").result
    assert "mul" in {node.name for node in found.diff().removed}
    assert "predicted peak" in net.shell.display_formatter.format(found)[0]["text/html"]
    lines = net.shell.display_formatter.format(net.ok("%tfdiff --passes z --text").result)[0]["text/plain"].splitlines()
    assert lines[0].split() == ["after", "nodes", "bytes", "made", "predicted", "peak"] and "--- net" in lines


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%tfdiff net", "two graphs are compared; got: net (or is it %tfdiff --passes?)"),
        ("%tfdiff net nett", "no graph named 'nett'"),
        ("%tfdiff --passes los", "no node 'los'"),
    ],
)
def test_what_cannot_be_compared_is_said(net, line, said):
    assert said in str(net.run(line).error or net.run(line).err)


# -- all ----------------------------------------------------------------------------


def test_a_file_that_is_not_there_is_one_line(net, tmp_path):
    ran = net.run(f"%tfload {tmp_path / 'none.safetensors'}")
    assert ran.err.startswith("UsageError: there is no file") and ran.err.count("\n") == 1


@pytest.mark.parametrize("name", ["tfgrad", "tfprof", "tfdiff", "tfvars", "tfbudget", "tfsave", "tfload", "tfcluster"])
def test_line_magics_say_so_in_a_cell(net, name):
    assert f"%{name} is a line magic" in net.run(f"%%{name}\n3").err


@pytest.mark.parametrize("name", NAMES)
def test_every_magic_explains_itself_with_an_example(net, name, capsys):
    (bundle,) = net.ok(f"%{name} -h").shown
    assert "--out" in bundle["text/plain"] and f"%{name} " in bundle["text/plain"].split("options:")[0]
    net.shell.run_cell(f"%{name}?")
    assert "--quiet" in capsys.readouterr().out


@pytest.mark.slow
def test_cluster_that_nobody_started_is_an_error_within_its_deadline(net):
    ran = net.run("%tfcluster tcp://127.0.0.1:1 --timeout 2")
    assert isinstance(ran.error, tfnb.errors.TfnbError) and "127.0.0.1:1" in str(ran.error)
    assert net.ok("%tfrun loss -f x=torch.zeros(5, 3)").result.shape == ()


def test_a_training_ends_where_an_iterator_ends(net):
    net.ok("%%tfgraph net --no-show\nstep = tfnb.train.SGD(0.1).minimize(loss)\n")
    assert net.ok("%tfrun step -n 100 -f x=iter(torch.rand(5,4,3))").result.steps == 5


def test_a_pattern_that_matches_no_variable_is_told(net):
    assert "no variable matches 'zz*'; there are: weight, bias" in net.run("%tfvars zz*").err


def test_progress_is_shown_when_asked_for(net, caplog):
    net.ok("%%tfgraph net --no-show\nstep = tfnb.train.SGD(0.1).minimize(loss)\n")
    assert "-n N" in net.run("%tfrun step --progress-after 0 -f x=torch.rand(4, 3)").err
    with caplog.at_level("INFO", "tfnb.fit"):
        net.ok("import time\ndef slow():\n    while True:\n        time.sleep(0.15)\n        yield torch.rand(4, 3)")
        net.ok("%tfrun step -n 3 -f x=slow()")
        assert not any(": step " in record.message for record in caplog.records)
        net.ok("%tfrun step -n 3 --progress-after 0.1 -f x=slow()")
    assert any(": step " in record.message for record in caplog.records)


def test_an_error_in_a_callback_shows_the_lines_of_the_user_only(net):
    net.ok("%%tfgraph net --no-show\nstep = tfnb.train.SGD(0.1).minimize(loss)")
    net.ok("def broken(progress):\n    raise RuntimeError('mine')")
    ran = net.run("tfnb.fit(step, {x: torch.rand(4, 3)}, callbacks=broken)")
    assert str(ran.error) == "mine" and [frame.split(",")[0][:4] for frame in ran.frames] == ["Cell", "Cell"]


def test_a_training_in_the_background_is_stopped_and_gone_on_with(net):
    net.ok("%%tfgraph net --no-show\nstep = tfnb.train.SGD(0.1).minimize(loss)")
    net.ok("def endless():\n    while True:\n        yield torch.rand(4, 3)")
    assert "-n N" in net.run("%tfrun step -a -f x=torch.rand(4, 3)").err
    handle = net.ok("%tfrun step loss -n 100000 -a -f x=endless()").result
    assert isinstance(handle, tfnb.RunHandle) and not handle.is_done
    assert net.ok("%tfrun loss -f x=torch.zeros(4, 3)").result.isfinite()
    handle.stop()
    done = handle.result(timeout=60)
    assert done.stopped and list(handle.metrics) == ["loss"]
    assert net.ok(f"%tfrun step -n {done.steps + 3} --resume -f x=endless()").result.steps == 3
