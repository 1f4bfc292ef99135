"""%%tfgraph and %tfgraph: who recorded what, options, drawings, failing cells."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
import zlib
from typing import Any

import networkx
import pytest
import torch
from IPython.core.completer import provisionalcompleter

import tfnb
from tfnb.errors import ShapeError, StaleNode
from tfnb.magics.extension import NAMES
from tfnb.magics.live import LiveDrawing, fetched

X = "x = tfnb.placeholder(torch.ones(2, 3))"


def text(name="g"):
    return tfnb.graph(name).text()


# -- loading ----------------------------------------------------------------------------


@pytest.mark.slow
def test_loading_prints_nothing_and_imports_torch_in_the_background():
    program = (
        "from IPython.core.interactiveshell import InteractiveShell as S; import sys, threading; s = S.instance();"
        "s.run_cell('%load_ext tfnb'); s.run_cell('%reload_ext tfnb');"
        "print('torch._dynamo' in sys.modules, s.find_line_magic('tfgraph') is not None);"
        "[t.join() for t in threading.enumerate() if t.name == 'tfnb-imports'];"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "True", "True"], done.stderr


@pytest.mark.slow
def test_a_name_that_is_used_while_torch_loads_waits_for_it():
    program = (
        "from IPython.core.interactiveshell import InteractiveShell as S; import threading, time; s = S.instance();"
        "s.run_cell('%load_ext tfnb'); import tfnb; time.sleep(0.02);"
        "print(any(t.name == 'tfnb-imports' for t in threading.enumerate()));"
        "print(tfnb.connect.__name__, tfnb.record.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", "connect", "record"], done.stderr
    assert not done.stderr


def test_unloading_takes_everything_back(notebook):
    shell = notebook.shell
    notebook.ok("%unload_ext tfnb")
    assert shell.find_line_magic("tfgraph") is None and shell.find_cell_magic("tfgraph") is None
    assert shell.custom_exceptions == ()
    assert shell.Completer.custom_matchers == []
    assert shell.events.callbacks["pre_run_cell"] == [] or all(
        "CellWatch" not in repr(callback) for callback in shell.events.callbacks["pre_run_cell"]
    )
    notebook.ok("%load_ext tfnb")


def test_loading_again_registers_once(notebook):
    notebook.ok("%reload_ext tfnb")
    ran = notebook.ok(f"%%tfgraph g\n{X}")
    assert len(ran.drawings) == 1


# -- which cell is this ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("cell_id", ["abc", None])
def test_rerun_replaces_and_never_duplicates(notebook, cell_id):
    cell = f"%%tfgraph g --no-show\n{X}\ny = x * 2"
    notebook.ok(cell, cell_id=cell_id)
    first = text()
    for _ in range(5):
        notebook.ok(cell, cell_id=cell_id)
    number = notebook.count - 1
    assert text() == first.replace("In[3]", f"In[{number}]")


def test_edited_cell_replaces_its_nodes_by_the_front_ends_id(notebook):
    notebook.ok(f"%%tfgraph g --no-show\n{X}\ny = x * 2", cell_id="a")
    notebook.ok(f"%%tfgraph g --no-show\n{X}\nz = x - 2", cell_id="a")
    assert "z" in tfnb.graph("g") and "y" not in tfnb.graph("g")


def test_edited_cell_without_an_id_is_said_to_stay_and_can_be_removed(notebook):
    first = notebook.count
    notebook.ok(f"%%tfgraph g --no-show\n{X}\ny = x * 2")
    ran = notebook.ok(f"%%tfgraph g --no-show\n{X}\ny = x * 3")
    (note,) = (bundle["text/plain"] for bundle in ran.shown)
    assert note.startswith(f"note: In[{first}] recorded x, y too") and f"%tfgraph rm In[{first}]" in note
    notebook.ok(f"%tfgraph rm In[{first}]")
    assert [node.source.label for node in tfnb.graph("g").nodes] == [f"In[{first + 1}]"] * 2
    assert "recorded nothing in graph g" in notebook.run("%tfgraph rm In[99]").err


def test_cell_under_capture_keeps_its_identity(notebook):
    notebook.ok(f"%%tfgraph g --no-show\n{X}\ny = x * 2", cell_id="a")
    notebook.ok(f"%%capture\n%%tfgraph g --no-show\n{X}\nz = x * 2", cell_id="a")
    assert len(tfnb.graph("g").placeholders) == 1 and "y" not in tfnb.graph("g")


def test_cells_of_one_graph_share_it(notebook):
    notebook.ok(f"%%tfgraph g --no-show\n{X}", cell_id="a")
    notebook.ok("%%tfgraph g --no-show\ny = x * 2", cell_id="b")
    assert len(tfnb.graph("g").nodes) == 2


def test_append_keeps_earlier_nodes(notebook):
    notebook.ok(f"%%tfgraph g --no-show\n{X}", cell_id="a")
    for _ in range(2):
        notebook.ok("%%tfgraph g --append --no-show\ny = x * 2", cell_id="b")
    assert len(tfnb.graph("g").select(op="aten.mul*")) == 2


def test_without_a_name_the_current_graph_is_meant(notebook):
    notebook.ok(f"%%tfgraph g --no-show\n{X}", cell_id="a")
    notebook.ok("%%tfgraph --no-show\ny = x * 2", cell_id="b")
    assert list(tfnb.graphs()) == ["g"] and "y" in tfnb.graph("g")


def test_fetching_what_a_rerun_removed_names_the_cell(notebook):
    notebook.ok(f"%%tfgraph g --no-show\n{X}\ny = x * 2\nold = y", cell_id="a")
    notebook.ok(f"%%tfgraph g --no-show\n{X}\ny = x - 2", cell_id="a")
    ran = notebook.run("old.node")
    assert isinstance(ran.error, StaleNode) and "by an earlier run of In[3]" in str(ran.error)


# -- failing cells ----------------------------------------------------------------------------


def test_an_op_that_fails_is_drawn_red_below_what_its_cell_recorded(notebook):
    notebook.ok(f"%%tfgraph g --no-show\n{X}\nabove = x * 2", cell_id="a")
    cell = "%%tfgraph g\nlayer = nn.Linear(5, 2)\nbefore = above + 1\nafter = layer(before.exp())\nlast = after + 1"
    ran = notebook.run(cell, cell_id="b")
    assert isinstance(ran.error, ShapeError)
    (shown,) = [bundle for bundle in ran.shown if "image/svg+xml" in bundle]
    picture = shown["image/svg+xml"]
    assert "t-failing" in picture and "addmm failed" in picture and "aten.addmm.default(inputs=[" in picture
    assert "after = layer(before.exp())" in picture and "last" not in picture
    assert [node.name for node in tfnb.graph("g").nodes] == ["x", "above"]
    for quiet in ("-q", "--no-show"):
        assert notebook.run(cell.replace("g\n", f"g {quiet}\n", 1), cell_id="b").drawings == []
    caught = "%%tfgraph g\ntry:\n    x @ x\nexcept ValueError:\n    1 / 0"
    assert notebook.run(caught, cell_id="b").drawings == [], "another error ended the cell"


@pytest.mark.parametrize("failure", ["1 / 0", "x @ x", "raise KeyboardInterrupt", "bad syntax"])
def test_failing_rerun_leaves_everything_as_it_was(notebook, failure):
    notebook.ok("model = nn.BatchNorm1d(3)")
    notebook.ok(f"%%tfgraph g --no-show\n{X}\ny = model(x)", cell_id="a")
    before, mean, random = text(), notebook.names["model"].running_mean.clone(), torch.get_rng_state()
    ran = notebook.run(f"%%tfgraph g\n{X}\ny = model(x) + torch.rand(3)\n{failure}", cell_id="a")
    assert ran.error is not None and len(ran.drawings) == (failure == "x @ x")
    assert text() == before
    assert torch.equal(notebook.names["model"].running_mean, mean)
    assert torch.equal(torch.get_rng_state(), random)
    assert notebook.ok("y.node.name").result == "y"  # the handle of before


def test_an_interrupted_run_is_shown_without_inner_frames(notebook):
    notebook.ok(f"%%tfgraph g --no-show\n{X}\nstep = tfnb.train.SGD(0.1).minimize(nn.Linear(3, 1)(x).sum())")
    notebook.ok("def batches():\n    yield {x: torch.ones(2, 3)}\n    raise KeyboardInterrupt('stop')")
    number = notebook.count
    ran = notebook.run("tfnb.fit(step, batches(), steps=9)")
    assert isinstance(ran.error, KeyboardInterrupt) and ran.frames[0] == f"Cell In[{number}], line 1"
    assert not any("File" in frame for frame in ran.frames)


STUCK = """
@torch.library.custom_op("tfnb_stuck::op", mutates_args=())
def op(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 2:
        raise KeyboardInterrupt
    return x + 1
op.register_fake(torch.empty_like);
"""


def test_an_interrupted_loop_is_shown_without_generated_code(notebook):
    notebook.ok(STUCK)
    notebook.ok(
        "%%tfgraph g --no-show\nz = tfnb.placeholder(torch.ones(2))\nout = z\nwhile out.sum() < 9:\n    out = op(out)"
    )
    ran = notebook.run("tfnb.run(out, {z: torch.ones(3)})")
    assert isinstance(ran.error, KeyboardInterrupt)
    assert "eval_with_key" not in ran.out and "regions.py" not in ran.out and "control.py" not in ran.out


def test_interrupted_cell_leaves_the_next_one_working(notebook):
    notebook.run(f"%%tfgraph g\n{X}\nraise KeyboardInterrupt")
    ran = notebook.ok(f"%%tfgraph g\n{X}\nx.sum()")
    assert ran.result.sample == 6.0


# -- options ----------------------------------------------------------------------------


def test_input_makes_a_tensor_a_placeholder(notebook):
    notebook.ok("a = torch.ones(4, 5, 8)")
    for _ in range(2):  # and again, when `a` already is one
        notebook.ok("%%tfgraph g --no-show -i a:B,T,_\nb = a * 2", cell_id="a")
        assert str(notebook.names["a"].spec) == "float32[B, T, 8]"
    assert [node.name for node in tfnb.graph("g").placeholders] == ["a"]


@pytest.mark.parametrize("option, words", [("a:B", "a has 2 axes, 1 are named"), ("c", "there is no variable 'c'")])
def test_input_that_does_not_fit_is_one_line(notebook, option, words):
    notebook.ok("a = torch.ones(4, 5)")
    ran = notebook.run(f"%%tfgraph g -i {option}\nb = 2")
    assert ran.err.startswith("UsageError: ") and words in ran.err and ran.err.count("\n") == 1
    assert type(notebook.names["a"]) is torch.Tensor


def test_out_stores_the_graph(notebook):
    notebook.ok(f"%%tfgraph g --no-show -o kept\n{X}")
    assert notebook.names["kept"] is tfnb.graph("g")


def test_lazy_records_shapes_only(notebook):
    notebook.ok("a = torch.ones(2, 3)")
    notebook.ok("%%tfgraph g --lazy --no-show\nx = tfnb.placeholder(a)\ny = x * 2")
    assert "no sample" in repr(notebook.names["y"])


def test_device_is_where_placeholders_go(notebook):
    notebook.ok("%%tfgraph g -d meta --lazy --no-show\nz = torch.zeros(3)")
    assert notebook.names["z"].device.type == "meta"


@pytest.mark.parametrize("line, near", [("--devce cpu", "--device"), ("--lazzy", "--lazy"), ("--no-shw", "--no-show")])
def test_unknown_option_is_one_line_with_the_nearest(notebook, line, near):
    ran = notebook.run(f"%%tfgraph g {line}\n{X}")
    assert ran.err.startswith("UsageError: unrecognized arguments: ") and ran.err.count("\n") == 1
    assert f"did you mean {near}?" in ran.err
    assert tfnb.graphs() == {}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "tfgraph"])
def test_an_option_of_another_magic_is_said_to_be_one(notebook, name):
    ran = notebook.run(f"%{name} --devce=cpu")
    assert ran.err == "UsageError: unrecognized arguments: --devce=cpu; did you mean --device of %tfgraph?\n"


@pytest.mark.parametrize("name", ["nodev", "cuda:99", "cpu:x"])
def test_a_device_that_is_not_there_is_a_usage_error_before_anything_is_recorded(notebook, name):
    ran = notebook.run(f"%%tfgraph on_{name[:3]} -d {name}\nx = tfnb.constant(1.0)")
    assert ran.err.startswith(f"UsageError: -d {name}: ") and ran.err.count("\n") == 1
    assert f"on_{name[:3]}" not in tfnb.graphs()


@pytest.mark.parametrize(
    "line, words",
    [
        ("%tfwatch y --every x", "argument --every: invalid int value: 'x'; usage: %tfwatch [--every K]"),
        ("%tfcache maybe", "usage: %tfcache [--clear]"),
        ("%tfcache --devce cpu", "unrecognized arguments: --devce; did you mean --device of %tfgraph?"),
        ("%tfgraph --qqqqq", "unrecognized arguments: --qqqqq; usage: %tfgraph [-i NAME[:DIMS]]"),
        ("%tfwatch nothing", "no node or variable 'nothing'"),
        ("%tfwatch y --every 0", "an int of at least 1"),
        ("%tfbreak nothing", "no node 'nothing'"),
        ("%tfbreak y if (", "is no expression"),
        ("%tfdiff --passes nothing", "no node 'nothing'"),
        ("%tfcluster here", "no scheduler address"),
        ("%tfcluster 0", "at least one compute task"),
        ("%tfrun y -f x=1/0", "-f x=1/0: ZeroDivisionError: division by zero"),
        ("%tfrun y -n -1 -f x=1", "-n -1: a number of steps"),
        ("%%tfgraph g -i torch\nz = 1", "torch is no sample"),
    ],
)
def test_a_usage_error_is_one_line_without_a_traceback(notebook, line, words):
    notebook.ok(f"%%tfgraph g --no-show\n{X}\ny = x + 1")
    ran = notebook.run(line)
    assert ran.err.startswith("UsageError: ") and words in ran.err and ran.err.count("\n") == 1
    assert not ran.frames


def test_full_tracebacks_show_where_a_usage_error_comes_from(notebook):
    notebook.ok(f"%%tfgraph g --no-show\n{X}")
    notebook.ok("%config TfnbMagics.full_tracebacks = True")
    assert isinstance(notebook.run("%tfwatch nothing").error, tfnb.errors.NotFound)


@pytest.mark.parametrize("magic", ["%tfgraph?", "%%tfgraph?"])
def test_question_mark_shows_the_options(notebook, magic, capsys):
    notebook.shell.run_cell(magic)
    assert "--lazy" in capsys.readouterr().out


def test_help_shows_options_and_an_example(notebook):
    (bundle,) = notebook.ok("%tfgraph -h").shown
    assert "--append" in bundle["text/plain"] and "%%tfgraph digits" in bundle["text/plain"]


# -- what is shown ----------------------------------------------------------------------------


def test_drawing_stands_below_the_result(notebook, monkeypatch):
    order = []
    monkeypatch.setattr(notebook.shell.displayhook, "write_format_data", lambda *_: order.append("result"))
    monkeypatch.setattr(notebook.shell.display_pub, "publish", lambda *_, **__: order.append("drawing"))
    notebook.shell.run_cell(f"%%tfgraph g\n{X}\ny = x * 2\nx.sum()", store_history=True)
    assert order == ["result", "drawing"]


def test_drawing_waits_for_the_end_of_the_cell_under_time_too(notebook):
    ran = notebook.ok(f"%%time\n%%tfgraph g\n{X}\nx.sum()")
    assert ran.result.sample == 6.0 and len(ran.drawings) == 1


@pytest.mark.parametrize("option", ["--no-show", "-q"])
def test_nothing_is_drawn_when_not_wanted(notebook, option):
    assert notebook.ok(f"%%tfgraph g {option}\n{X}").drawings == []


def test_static_drawing_holds_no_widget(notebook):
    ran = notebook.ok(f"%%tfgraph g\n{X}")
    assert not any("application/vnd.jupyter.widget-view+json" in bundle for bundle in ran.shown)


def test_live_widget_stands_below_its_static_twin(notebook):
    ran = notebook.ok(f"%%tfgraph g --live\n{X}\ny = x * 2")
    static, live = ran.shown
    assert "application/vnd.jupyter.widget-view+json" in live and "text/html" not in live
    assert f'data-tfnb="{LiveDrawing(tfnb.graph("g"), f"In[{notebook.count - 1}]").widget.twin}"' in static["text/html"]


def test_live_line_works_before_the_first_run_and_below_a_static_twin(notebook):
    notebook.ok(f"%%tfgraph g --no-show\n{X}\ny = x * 2")
    ran = notebook.ok("%tfgraph g --live")
    (static,) = (bundle for bundle in ran.shown if "text/html" in bundle)
    assert f'data-tfnb="{ran.result.twin}"' in static["text/html"]
    assert not notebook.ok("%tfgraph g --live -q -o live").shown and notebook.names["live"].twin == ran.result.twin


@pytest.mark.parametrize("node", ["add", "y"])
def test_a_click_before_the_first_run_says_what_to_do(notebook, node):
    notebook.ok("%%tfgraph g --no-show\nx = tfnb.placeholder(torch.tensor(3.))\nwhile x > 1:\n    x = x - 1\ny = x + 1")
    live = LiveDrawing(tfnb.graph("g"), None)
    inner = next(name for name in live.drawing.contents.by_name if name not in tfnb.graph("g"))
    assert "%tfrun --profile" in live.fetch(inner)["preview"] and "2" in live.fetch("y")["preview"]


def test_click_fetches_the_value_of_now(notebook):
    notebook.ok(f"%%tfgraph g --no-show\n{X}\nv = tfnb.Variable(torch.ones(3), name='v')\ny = x + v")
    assert "[2., 2., 2.]" in fetched(tfnb.graph("g"), "y")["preview"]
    notebook.ok("v.assign(torch.zeros(3))")
    assert "float32[B, 3]: ok, 1 to 1" in fetched(tfnb.graph("g"), "y")["preview"]


def test_same_cell_same_bytes(notebook):
    cell = f"%%tfgraph g\n{X}\ny = (x * 2).sum()"
    first = notebook.ok(cell, cell_id="a").drawings
    notebook.shell.execution_count -= 1
    assert notebook.ok(cell, cell_id="a").drawings == first


def test_notes_are_shown_once(notebook):
    ran = notebook.ok(f"%%tfgraph g --no-show\n{X}\nn = x.sum().tolist()")
    notes = [bundle["text/plain"] for bundle in ran.shown]
    assert len(notes) == 1 and "line 3 `tolist()` took the sample's value" in notes[0]


def test_reprs_can_be_switched_to_text(notebook):
    notebook.ok(f"%%tfgraph g --no-show\n{X}")
    graph = tfnb.graph("g")
    shell = notebook.shell
    assert "text/html" in shell.display_formatter.format(graph)[0]
    notebook.ok("%config TfnbMagics.repr = 'text'")
    assert set(shell.display_formatter.format(graph)[0]) == {"text/plain"}
    notebook.ok("%config TfnbMagics.repr = 'html'")


def test_outputs_carry_a_picture_for_where_html_is_cleaned(notebook):
    (shown,) = notebook.ok(f"%%tfgraph g\n{X}\ny = x * 2").shown
    assert shown["image/svg+xml"].startswith("<svg") and shown["image/svg+xml"] in shown["text/html"]
    formats = notebook.shell.display_formatter.format(tfnb.graph("g"))[0]
    assert {"image/svg+xml", "text/html", "text/plain"} <= formats.keys()
    assert formats.keys() == tfnb.graph("g")._repr_mimebundle_().keys()


@pytest.mark.parametrize("name, words", [("y", "sample"), ("v", "trainable"), ("tfnb.graph('g')", "tfnb-page")])
def test_objects_are_shown_as_html(notebook, name, words):
    notebook.ok(f"%%tfgraph g --no-show\n{X}\nv = tfnb.Variable(torch.ones(3), name='v')\ny = x + v")
    shown = notebook.shell.display_formatter.format(notebook.ok(name).result)[0]
    assert words in shown["text/html"] and shown["text/plain"]


@pytest.mark.parametrize("name", ["net", "a/b", "net-2"])
@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_graph_name_in_quotes_is_what_is_between_them(notebook, name, quote):
    notebook.ok(f"%%tfgraph {quote}{name}{quote} --no-show\n{X}")
    assert list(tfnb.graphs()) == [name]
    assert notebook.ok(f"%tfgraph {quote}{name}{quote}").result is tfnb.graph(name)


@pytest.mark.parametrize(
    "line",
    ["%%tfgraph my graph\nx = 1", "%%tfgraph 'my graph'\n1", "%%tfgraph -g 'my graph'\n1", "%tfgraph 'my graph' on"],
)
def test_a_name_with_blanks_is_no_graph_name(notebook, line):
    ran = notebook.run(line)
    assert ran.err == "UsageError: 'my graph' is no graph name: one word without blanks is, such as my_graph\n"
    assert not tfnb.graphs()
    with pytest.raises(tfnb.errors.InvalidArgument, match="such as my_graph"), tfnb.record("my graph"):
        pass


FAILING = {
    "an error": "%%tfgraph h\ny = x + 1\n1 / 0",
    "no Python": "%%tfgraph h\nx +",
    "an unknown option": "%%tfgraph h --nope\ny = x + 1",
    "an unknown name": "%%tfgraph h -i nothing\ny = x + 1",
    "an open quote": '%%tfgraph "h\ny = x + 1',
    "two names": "%%tfgraph h k\ny = x + 1",
    "no gradient": "%tfgrad -g other z",
    "an unknown cell": "%tfgraph other rm In[99]",
    "an unknown folder": "%tfgraph other export nowhere/g.svg",
}


@pytest.mark.parametrize("cell", FAILING)
def test_a_failing_magic_leaves_the_current_graph(notebook, cell):
    notebook.ok("%%tfgraph other --no-show\nz = tfnb.constant(torch.arange(3)) + 1")
    notebook.ok(f"%%tfgraph g --no-show\n{X}")
    ran = notebook.run(FAILING[cell])
    assert ran.error is not None or "UsageError" in ran.err
    assert tfnb.graph().name == "g" and list(tfnb.graphs()) == ["other", "g"]


# -- the line form ----------------------------------------------------------------------------


def test_bare_line_is_the_current_graph(notebook):
    notebook.ok(f"%%tfgraph g --no-show\n{X}")
    assert notebook.ok("%tfgraph").result is tfnb.graph("g")
    assert notebook.ok("%tfgraph g show").result is tfnb.graph("g")


def test_ls_lists_and_rm_removes(notebook):
    notebook.ok(f"%%tfgraph g --no-show\n{X}")
    notebook.ok(f"%%tfgraph h --no-show\n{X}\ny = x + 1")
    assert [row[:2] for row in notebook.ok("%tfgraph ls").result] == [("g", 1), ("h", 2)]
    notebook.ok("%tfgraph rm g")
    assert list(tfnb.graphs()) == ["h"]


def test_clear_empties_the_graph(notebook):
    notebook.ok(f"%%tfgraph g --no-show\n{X}")
    assert "drops the 1 nodes of graph g; add --yes" in notebook.run("%tfgraph g clear").err
    assert len(tfnb.graph("g").nodes) == 1
    notebook.ok("%tfgraph g clear --yes -q")
    assert tfnb.graph("g").nodes == ()
    assert "was cleared" in str(notebook.run("x.node").error)


@pytest.mark.parametrize(
    "suffix, start", [("svg", "<svg"), ("html", "<"), ("dot", "digraph"), ("json", "{"), ("graphml", "<")]
)
def test_export_by_suffix(notebook, tmp_path, suffix, start):
    notebook.ok(f"%%tfgraph g --no-show\n{X}")
    path = tmp_path / f"g.{suffix}"
    notebook.ok(f"%tfgraph g export {path}")
    assert path.read_text().lstrip().removeprefix("<?xml").startswith(start) or start in path.read_text()
    if suffix == "json":
        json.loads(path.read_text())
    if suffix == "graphml":
        found, nodes = networkx.read_graphml(path, node_type=int), tfnb.graph("g").nodes
        assert [found.nodes[node.id]["op"] for node in nodes] == [node.op for node in nodes]
        assert set(found.edges()) == {(value.node, node.id) for node in nodes for value in node.inputs}


def test_export_as_an_image_in_colours_with_text(notebook, tmp_path):
    resvg_py = pytest.importorskip("resvg_py", reason="optional extra [png]")
    notebook.ok(f"%%tfgraph g --no-show\n{X}\nrates = x.exp().sin()")
    if "none is installed here" in notebook.run(f"%tfgraph g export {tmp_path / 'g.png'}").err:
        pytest.skip("no font to write with")
    png = (tmp_path / "g.png").read_bytes()
    svg = tfnb.view.graph_svg(tfnb.graph("g"))
    (size,) = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert png.startswith(b"\x89PNG")
    assert list(struct.unpack(">II", png[16:24])) == pytest.approx([2 * float(side) for side in size], abs=1)
    name = tfnb.graph("g").placeholders[0].name
    bare = resvg_py.svg_to_bytes(svg_string=re.sub("<text.*?</text>|<style>.*?</style>", "", svg), zoom=2)
    assert name in svg and dark(png) > dark(bare) + 200, "the letters of the names are ink"


def dark(png):
    """How many bytes of the pixels of an image are dark."""
    header = struct.unpack(">IIBB", png[16:26])
    width, colours = header[0], {2: 3, 6: 4}[header[3]]
    at, data = 8, b""
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        data += png[at + 8 : at + 8 + size] if png[at + 4 : at + 8] == b"IDAT" else b""
        at += size + 12
    lines, before, found = zlib.decompress(data), bytes(width * colours), 0
    for row in range(0, len(lines), width * colours + 1):
        kind, line = lines[row], bytearray(lines[row + 1 : row + 1 + width * colours])
        for i in range(len(line)):
            left, up = (line[i - colours] if i >= colours else 0), before[i]
            corner = before[i - colours] if i >= colours else 0
            line[i] = (line[i] + (0, left, up, (left + up) // 2, paeth(left, up, corner))[kind]) % 256
        before, found = bytes(line), found + sum(byte < 100 for byte in line)
    return found


def paeth(left, up, corner):
    """The PNG filter of that name."""
    return min((left, up, corner), key=lambda each: abs(left + up - corner - each))


def test_export_as_an_image_says_what_to_install(notebook, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    notebook.ok(f"%%tfgraph g --no-show\n{X}")
    assert "pip install 'tfnb[png]'" in notebook.run(f"%tfgraph g export {tmp_path / 'g.png'}").err
    assert not (tmp_path / "g.png").exists()


@pytest.mark.parametrize(
    "line, words",
    [
        ("%tfgraph other", "no graph named 'other'"),
        ("%tfgraph g export g.bmp", ".json .svg"),
        ("%tfgraph g h", "verbs"),
    ],
)
def test_mistakes_are_one_line(notebook, line, words):
    notebook.ok(f"%%tfgraph g --no-show\n{X}")
    ran = notebook.run(line)
    assert ran.err.startswith("UsageError: ") and words in ran.err and ran.err.count("\n") == 1


@pytest.mark.parametrize(
    "line, found", [("%tfgraph --l", "--lazy"), ("%%tfgraph ", "g"), ("%tfrun ", "x"), ("%tfcluster --", "--ps")]
)
def test_tab_completes_options_and_names(notebook, line, found):
    notebook.ok(f"%%tfgraph g --no-show\n{X}")
    notebook.ok("%%tfgraph later --no-show\nz = tfnb.placeholder(torch.ones(2))")
    with provisionalcompleter():
        assert found in [each.text for each in notebook.shell.Completer.completions(line, len(line))]


def test_two_spellings_build_equal_graphs(notebook):
    body = [X, "model = nn.Linear(3, 2)", "y = model(x).relu().sum()"]
    torch.manual_seed(0)
    notebook.ok("%%tfgraph a --no-show\n" + "\n".join(body))
    torch.manual_seed(0)
    notebook.ok("with tfnb.record('b'):\n    " + "\n    ".join(body))

    def without_lines(name):
        return [row.split("#")[0].rstrip() for row in text(name).replace(f"graph {name}", "graph").splitlines()]

    assert without_lines("a") == without_lines("b")


def test_module_edited_on_disk_records_anew(notebook, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "edited_net.py"
    module.write_text("def f(x):\n    return x + 1\n")
    notebook.ok("%load_ext autoreload\n%autoreload 2\nimport edited_net")
    cell = f"%%tfgraph g --no-show\n{X}\ny = edited_net.f(x)"
    notebook.ok(cell, cell_id="a")
    module.write_text("def f(x):\n    return x * 222\n")
    notebook.ok(cell, cell_id="a")
    assert [node.op for node in tfnb.graph("g").nodes] == ["tfnb.placeholder", "aten.mul.Tensor"]
    notebook.ok("%autoreload 0")
    sys.modules.pop("edited_net")


def test_cells_below_on_are_recorded_until_off_and_magics_among_them_run(notebook):
    assert "into graph my_net" in notebook.ok("%tfgraph my_net on").shown[0]["text/plain"]
    notebook.ok(f"# a plain cell\n{X}\nif x.sum() > 100:\n    y = x * 2\nelse:\n    y = x * 3", cell_id="a")
    assert notebook.ok("%tfrun y -f x=torch.ones(1, 3)").result.tolist() == [[3.0] * 3]
    ran = notebook.run("z = y + 1\nz.nonsense", cell_id="b")
    assert ran.frames[-1] == "Cell In[6], line 2"
    notebook.ok("z = y + 1", cell_id="b")
    assert notebook.ok("%tfrun z -f x=torch.full((1, 3), 200.0)").result.tolist() == [[401.0] * 3]
    assert "no more recorded into graph my_net" in notebook.ok("%tfgraph off").shown[0]["text/plain"]
    nodes = len(tfnb.graph("my_net").nodes)
    notebook.ok("w = torch.ones(2) + 1")
    assert len(tfnb.graph("my_net").nodes) == nodes and not isinstance(notebook.names["w"], tfnb.Tensor)


@pytest.mark.parametrize(
    "name, words",
    [
        ("step", ["inputs", "In[6] line 2"]),
        ("session", ["runs", "here"]),
        ("spec", ["float32", "varies", "nothing", "4 bytes"]),
        ("queue", ["FIFOQueue", "1 of 5 elements, open", "float32[3], int64", "20 bytes"]),
    ],
)
def test_operations_sessions_specs_and_queues_have_cards(notebook, name, words):
    notebook.ok("queue = tfnb.FIFOQueue(5, [torch.float32, torch.int64], [(3,), ()], name='<b>')")
    notebook.ok("queue.enqueue((torch.ones(3), torch.tensor(1)))")
    notebook.ok(f"%%tfgraph g --no-show\n{X}\nw = nn.Parameter(torch.ones(3))\nloss = (x * w).sum()")
    notebook.ok("%%tfgraph g --no-show\nstep = tfnb.train.SGD(0.1).minimize(loss)")
    notebook.ok("session, spec = tfnb.session.default_session(tfnb.graph('g')), loss.spec")
    html = notebook.shell.display_formatter.format(notebook.names[name])[0]["text/html"]
    assert html.startswith("<details>") and all(word in html for word in words) and "<b>" not in html, html


def test_a_cell_that_records_nothing_says_so_and_draws_no_empty_graph(notebook):
    ran = notebook.ok("%%tfgraph nothing\n# only a comment")
    (shown,) = ran.shown
    assert "this cell recorded nothing" in shown["text/plain"] and "tfnb.placeholder" in shown["text/plain"]
    ran = notebook.ok("%%tfgraph nothing\nx = tfnb.placeholder(torch.ones(3))")
    assert len(ran.shown) == 1 and "<svg" in ran.shown[0]["text/html"]
    assert not notebook.ok("%%tfgraph other -q\n# only a comment").shown
    notebook.ok("%tfgraph on other")
    assert not notebook.ok("import os").shown, "an ordinary cell under %tfgraph on records nothing as a rule"
    notebook.ok("%tfgraph off")


def test_cells_below_tfgraph_on_run_fit_and_call_what_cells_above_recorded(notebook: Any) -> None:
    """Their runs are those of cells that are not recorded, and the graph gets no node of them."""
    for name, opt in (("model", "opt"), ("plain", "other")):
        notebook.ok(f"torch.manual_seed(0)\n{name}, rows = nn.Linear(3, 1), torch.rand(8, 3)")
        notebook.ok(f"{opt} = torch.optim.SGD({name}.parameters(), 0.1)")
    notebook.ok("%tfgraph on followed --no-show")
    notebook.ok("x = tfnb.placeholder(rows)\nloss = model(x).square().mean()")
    notebook.ok("opt.zero_grad()\nloss.backward()\nstep = opt.step()")
    count = len(tfnb.graph("followed").nodes)
    notebook.ok("for _ in range(3):\n    found, _ = tfnb.run([loss, step], {x: rows})")
    notebook.ok("tfnb.fit(step, {x: rows}, batch_size=8, steps=2, watch=())")
    notebook.ok("call = tfnb.Session('followed').make_callable([loss, step], [x])")
    notebook.ok("last, _ = call(rows)\nscaled = last * 2 + found.item()")
    assert len(tfnb.graph("followed").nodes) == count + 3, "the last cell's own"
    notebook.ok("%tfgraph off")
    names, losses = notebook.names, []
    for _ in range(6):
        losses.append(names["plain"](names["rows"]).square().mean())
        names["other"].zero_grad()
        losses[-1].backward()
        names["other"].step()
    assert [names["found"].item(), names["last"].item()] == pytest.approx(
        [losses[2].item(), losses[5].item()], rel=1e-5
    )
    assert tfnb.run(names["scaled"]).item() == pytest.approx(2 * losses[5].item() + losses[2].item(), rel=1e-5)


@pytest.mark.parametrize("name", ["loss", "train"])
def test_what_is_no_more_in_the_graph_is_shown_as_that(notebook, name):
    notebook.ok(
        "%%tfgraph left --no-show\nw = nn.Parameter(torch.ones(3))\nloss = w.sum()\n"
        "train = tfnb.train.SGD(0.1).minimize(loss)"
    )
    notebook.ok("%tfgraph left clear --yes")
    (shown,) = notebook.ok(f"display({name})").shown
    assert "not in graph left any more" in shown["text/html"] and "cleared" in shown["text/html"]
    assert notebook.names[name].graph is tfnb.graph("left") and repr(notebook.names[name])


@pytest.mark.parametrize("line", ["%tfgraph exprt x.svg", "%tfgraph g exprt x.svg"])
def test_a_mistyped_verb_is_told(notebook, line):
    notebook.ok("%%tfgraph g --no-show\nx = tfnb.placeholder(torch.ones(3))")
    assert "did you mean export?" in notebook.run(line).err
    assert "did you mean refresh?" in notebook.run("%tfgraph refesh").err


def test_a_new_graph_may_have_a_name_that_is_almost_a_verb(notebook):
    assert "recorded into graph lstm" in str(notebook.ok("%tfgraph on lstm").shown)
    notebook.ok("%tfgraph off")


def test_an_input_that_cells_prepare_is_fed_as_it_was_given(notebook: Any) -> None:
    notebook.ok("b = torch.ones(3, 4)")
    notebook.ok("%%tfgraph prepared --no-show -i b:B,4\nb = b / 4\ntotal = b.sum()")
    notebook.ok("%%tfgraph prepared --no-show\nb = b - 1\nless = b.sum()")
    notebook.ok("found = tfnb.run([total, less], {b: torch.full((2, 4), 8.0)})")
    assert [value.item() for value in notebook.names["found"]] == [16.0, 8.0]
