"""The live view, which `%tfgraph --live` and `%tfcluster --live` open: a cluster and the drawing of a graph."""

from __future__ import annotations

import pytest

from tfnb.__main__ import main

WIDGET = "application/vnd.jupyter.widget-view+json"
CELL = """%%tfgraph net --no-show
weight = tfnb.Variable(torch.ones(3, 1), name="weight")
x = tfnb.placeholder(torch.ones(4, 3), name="x")
loss = (x @ weight - 2).square().mean()
train = tfnb.train.SGD(0.01).minimize(loss)"""
PLACED = """%%tfgraph placed --no-show
with tfnb.device("task:0", soft=True):
    a = tfnb.placeholder(torch.ones(4)) * 2
with tfnb.device("task:1", soft=True):
    b = a + 1"""


TRAINED = (
    "%load_ext tfnb\nimport torch, tfnb",
    "%tfcluster 1 --live",
    CELL,
    '%tfwatch -g net "weight:hist"',
    "%tfcluster --live",
    "result = tfnb.fit(train, {x: torch.ones(64, 3)}, batch_size=8, epochs=4, watch=[loss])\n"
    "print(len(result.curve), result.curve == tfnb.session.connected().status().curve)",
    "%%tfgraph other --live\ny = tfnb.placeholder(torch.ones(2)) * 2",
    "%tfcluster -g net --live",
    "%tfgraph net --live",
    "%tfcluster --close",
)


@pytest.mark.slow
def test_both_magics_show_the_cluster_the_curves_and_a_drawing_and_a_saved_notebook_their_last_state(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    path = tmp_path / "live.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in TRAINED]), path)
    assert main(["run", str(path), "-o", str(path)]) == 0
    cells = nbformat.read(path, as_version=4).cells
    alone, trained, other, net, last = (
        [output.data for output in cells[at].outputs if "data" in output] for at in (1, 4, 6, 7, 8)
    )
    assert len(alone) == 2 and "Dask cluster, connected" in alone[0]["text/plain"]  # no graph was there
    assert WIDGET in alone[1] and "text/html" not in alone[1]  # the slider over steps
    assert "".join(cells[5].outputs[-1]["text"]) == "32 True\n"
    for drawn, name in ((trained, "net"), (other, "other"), (net, "net"), (last, "net")):
        card, slider, static, live = drawn
        assert "task:0" in card["text/html"] and WIDGET in slider and WIDGET in live
        assert f"<b>{name}</b>" in static["text/html"] and static["text/plain"].startswith(f"{name}: ")
    card = trained[0]["text/html"]  # of the state in which the next cell opened the view
    assert "loss: " in card and "<polyline" in card and "net: watched for" in card and "step 32" in card
    assert last[0]["text/plain"].startswith("Dask cluster, closed") and "loss: " in last[0]["text/html"]
    assert net[0]["text/plain"].startswith("Dask cluster, connected")


def test_boxes_glow_by_their_places(notebook):
    notebook.ok(PLACED)
    live = notebook.ok("%tfgraph placed --live").result
    drawing = next(iter(notebook.ok("get_ipython()").result.magics_manager.registry["TfnbMagics"].lives._of.values()))
    colours = {str(place): colour for place, colour in drawing.drawing.sites.colours.items()}
    drawing.glow({"task:1": 0.75, "ps:0": 1.0})
    assert live.glow == {colours["task:1"]: 0.75}
    assert all('class="site"' in live.picture["svg"] and colour in live.picture["svg"] for colour in colours.values())


def test_without_a_cluster_there_is_the_drawing_alone(notebook):
    notebook.ok(CELL)
    (static,) = notebook.ok("%tfgraph net --live").shown
    assert "tfnb-page" in static["text/html"]
