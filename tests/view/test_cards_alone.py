"""Cards of objects where no magics are loaded, as in marimo: each object makes its own HTML."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys, torch, tfnb
weight = tfnb.Variable(torch.ones(3, 1), name="weight")
queue = tfnb.FIFOQueue(4, [torch.float32], [()], name="spare")
with tfnb.record("net") as graph:
    x = tfnb.placeholder(torch.ones(4, 3), name="x")
    loss = (x @ weight - 2).square().mean()
    train = tfnb.train.SGD(0.01).minimize(loss)
    done = queue.enqueue(loss)
session = tfnb.Session(graph)
for shown, word in (
    (weight, "trainable"), (loss, "health"), (train, "inputs"), (done, "inputs"), (loss.spec, "float32"),
    (session, "runs"), (queue, "element"), (session.save(sys.argv[1]), "graph_hash"),
):
    html = shown._repr_html_()
    assert "<details" in html and word in html, (shown, html)
assert "IPython" not in sys.modules or sys.modules["IPython"].get_ipython() is None
"""


def test_objects_show_their_cards_without_magics(tmp_path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "card.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
