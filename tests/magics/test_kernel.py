"""A real kernel in its own process: what front ends send, and the interrupt button."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

TIMEOUT = 120


class Kernel:
    """Sends cells as a front end does."""

    def __init__(self) -> None:
        self.manager = KernelManager(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]))
        self.manager.start_kernel(extra_arguments=["--log-level=ERROR"])
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=TIMEOUT)

    def send(self, source: str, cell_id: str | None = None) -> str:
        """Send a cell; the id of the message."""
        content = {"code": source, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
        message = self.client.session.msg("execute_request", content, metadata={"cellId": cell_id} if cell_id else {})
        self.client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def outputs(self, sent: str) -> list[dict[str, Any]]:
        """What the cell published until the kernel was idle again; each with its ``type``."""
        found: list[dict[str, Any]] = []
        while True:
            message = self.client.get_iopub_msg(timeout=TIMEOUT)
            if message["parent_header"].get("msg_id") != sent:
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return found
            found.append({"type": message["msg_type"], **message["content"]})

    def run(self, source: str, cell_id: str | None = None) -> list[dict[str, Any]]:
        """Run a cell and wait for it."""
        return self.outputs(self.send(source, cell_id))

    def completions(self, source: str) -> list[str]:
        """What Tab offers at the end of the source."""
        reply = self.client.complete(source, len(source), reply=True, timeout=TIMEOUT)
        return list(reply["content"]["matches"])

    def text(self, expression: str) -> str:
        """The repr of an expression."""
        (result,) = (out for out in self.run(expression) if out["type"] == "execute_result")
        return str(result["data"]["text/plain"])

    def close(self) -> None:
        """End the process."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    assert not [out for out in kernel.run("%load_ext tfnb\nimport torch, tfnb") if out["type"] == "error"]
    yield kernel
    kernel.close()


def test_cell_id_of_the_front_end_is_the_identity(kernel: Kernel) -> None:
    cell = "%%tfgraph g\nx = tfnb.placeholder(torch.ones(2, 3))\ny = x * {}"
    kernel.run(cell.format(2), "one")
    kernel.run(cell.format(3), "one")
    assert kernel.text("len(tfnb.graph('g').nodes)") == "2"
    kernel.run(cell.format(4), "two")
    assert kernel.text("len(tfnb.graph('g').nodes)") == "4"


@pytest.mark.parametrize("jedi", [True, False])  # the default depends on IPython's version
def test_tab_after_a_magic_offers_what_the_magic_takes_alone(kernel: Kernel, jedi: bool) -> None:
    kernel.run(f"%config IPCompleter.use_jedi = {jedi}")
    kernel.run("%%tfgraph g --no-show\nx = tfnb.placeholder(torch.ones(2, 3))\nlossy = x * 2\nlos = 3", "one")
    options = kernel.completions("%tfgraph --")
    assert "--lazy" in options and "--device" in options and all(option.startswith("--") for option in options)
    assert kernel.completions("%%tfgraph --la") == ["--lazy"]
    assert kernel.completions("import math\nvalue = %tfrun los") == ["lossy"]
    names = kernel.completions("%tfgraph ")
    assert {"clear", "g", "--lazy"} <= set(names) and "print" not in names and "torch" not in names


# Of a fresh machine jedi reads Python's own stubs first, for 4 seconds and more; without it the way to it is the same.
@pytest.mark.parametrize("jedi", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tab_elsewhere_offers_python_names(kernel: Kernel, jedi: bool) -> None:
    kernel.run(f"%config IPCompleter.use_jedi = {jedi}")
    kernel.run("%%tfgraph g --no-show\nx = tfnb.placeholder(torch.ones(2, 3))\nlossy = x * 2\nlossless = 3", "one")
    assert "lossless" in kernel.completions("%tfrun lossy -f x=loss")
    assert "lossless" in kernel.completions("%%tfgraph g\nloss")
    assert "lossless" in kernel.completions("y = loss")


def test_result_stands_above_the_drawing(kernel: Kernel) -> None:
    outputs = kernel.run("%%tfgraph h\nx = tfnb.placeholder(torch.ones(2, 3))\nx.sum()", "three")
    shown = [out["type"] for out in outputs if out["type"] in ("execute_result", "display_data")]
    assert shown == ["execute_result", "display_data"]
    assert "<svg" in outputs[-1]["data"]["text/html"]


def test_error_is_one_short_traceback(kernel: Kernel) -> None:
    outputs = kernel.run("%%tfgraph h\nx = tfnb.placeholder(torch.ones(2, 3))\ny = x @ x", "three")
    (error,) = (out for out in outputs if out["type"] == "error")
    assert error["ename"] == "ShapeError"
    assert not any("recording" in frame or "site-packages" in frame for frame in error["traceback"])


def test_tracebacks_of_staged_statements_show_the_text_of_their_lines(kernel: Kernel) -> None:
    cell = "%%tfgraph g\na = tfnb.placeholder(torch.ones(4), name='a')\nif a.sum() > 0:\n    y = a @ torch.ones(3)\ny"
    (error,) = (out for out in kernel.run(cell) if out["type"] == "error")
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error["traceback"]))
    last = text.rpartition("Cell In[")[2]
    assert "      3 if a.sum() > 0:\n----> 4     y = a @ torch.ones(3)\n" in last
    assert "      1 %%tfgraph g\n" in last


def test_interrupt_leaves_the_graph_and_the_next_cell_works(kernel: Kernel) -> None:
    kernel.run("%%tfgraph i --no-show\nx = tfnb.placeholder(torch.ones(2, 3))\ny = x * 2", "four")
    before = kernel.text("tfnb.graph('i').text()")
    endless = "x = tfnb.placeholder(torch.ones(2, 3))\nprint('go', flush=True)\nwhile True:\n    y = x * 2"
    sent = kernel.send(f"%%tfgraph i\n{endless}", "four")
    while kernel.client.get_iopub_msg(timeout=TIMEOUT)["msg_type"] != "stream":
        time.sleep(0.01)
    kernel.manager.interrupt_kernel()
    (error,) = (out for out in kernel.outputs(sent) if out["type"] == "error")
    assert error["ename"] == "KeyboardInterrupt"
    assert kernel.text("tfnb.graph('i').text()") == before
    assert kernel.text("tfnb.run(y, {x: torch.ones(1, 3)})") == "tensor([[2., 2., 2.]])"


def test_what_is_watched_is_renewed_in_place_below_its_cell(kernel: Kernel) -> None:
    kernel.run("%%tfgraph w -q\nv = tfnb.Variable(torch.zeros(()), name='v')\nmore = v.assign_add(torch.ones(()))")
    (begun,) = (out for out in kernel.run("%tfwatch v --every 1") if out["type"] == "display_data")
    outputs = kernel.run("for _ in range(200): tfnb.run(more)")
    renewed = [out for out in outputs if out["type"] == "update_display_data"]
    assert {out["transient"]["display_id"] for out in renewed} == {begun["transient"]["display_id"]}
    assert 1 <= len(renewed) <= 40 and "step 200: 200" in renewed[-1]["data"]["text/plain"]
    assert "<svg" in renewed[-1]["data"]["text/html"]
    assert not [out for out in outputs if out["type"] in ("display_data", "error")]


SMALL_STEPS = """%%tfgraph t --no-show
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
x = tfnb.placeholder(torch.rand(8, 256))
loss = model(x).square().mean()
train = tfnb.train.SGD(1e-4).minimize(loss)
"""
EIGHT_SECONDS = """
import time
began = time.time()
result = tfnb.fit(train, {x: torch.rand(64, 256)}, batch_size=64, steps=10**6, watch=[loss],
                  callbacks=[type("End", (), {"on_step": lambda self, p: began + 8 < time.time() and p.stop()})()])
"""


@pytest.mark.slow
def test_progress_costs_little(kernel: Kernel) -> None:
    """It is shown at most ten times a second however many steps there are, and does not grow with them."""
    kernel.run("from torch import nn")
    kernel.run(SMALL_STEPS)
    outputs = kernel.run(EIGHT_SECONDS)
    sizes = [len(str(out["data"])) for out in outputs if out["type"] == "update_display_data"]
    seconds = float(kernel.text("result.seconds"))
    assert 1 <= len(sizes) <= seconds / 0.1 + 2
    assert max(sizes) < 20_000
