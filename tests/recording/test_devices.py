"""Devices by their number: in specs, feeds, factories, gradients and Variables.

Other devices than the CPU are fake tensors, which need no driver, and ``meta``.
"""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tfnb
from tfnb.errors import FailedPrecondition, FeedError
from tfnb.graph import Spec
from tfnb.kernels import random
from tfnb.session.feeding import _moved as moved

FAKE = """
import torch
torch.cuda._lazy_init = lambda: None  # shapes need no driver
import tfnb
with tfnb.record(lazy=True) as g:
    x = tfnb.placeholder(shape=(None, 3), device="cuda:1", name="x")
    loss = (x * x.new_ones(3) + torch.rand_like(x)).sum()
before = {node.name for node in g.nodes}
with tfnb.record(g, lazy=True):
    made = torch.zeros(3, device="cuda")
    slope = tfnb.gradients([x.sum().to("cuda:0")], [x])[0]
for node in g.nodes:
    print(node.name, node.name in before, node.attrs.get("device"), *[spec.device for spec in node.outputs])
"""


@pytest.mark.slow
def test_nodes_have_the_device_of_what_they_are_computed_from_or_the_current_one() -> None:
    """On fake CUDA devices, in a process of its own."""
    found = subprocess.run([sys.executable, "-c", FAKE], capture_output=True, text=True, timeout=200)
    assert found.returncode == 0, found.stderr
    nodes = {name: facts for name, *facts in map(str.split, found.stdout.splitlines())}
    assert {facts[-1] for facts in nodes.values() if facts[0] == "True"} == {"cuda:1"}
    assert nodes["made"][1:] == ["cuda:0", "cuda:0"]
    assert nodes["slope"][-1] == "cuda:1"


def test_a_sample_on_another_device_gives_the_spec_its_device() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.zeros(4, 3, device="meta"))
        y = x.sum(0)
    assert (x.spec.device, y.spec.device) == ("meta", "meta")


def test_a_feed_is_moved_to_the_device_of_the_placeholder() -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.zeros(4, 3, device="meta"))
        y = x + 1
    assert tfnb.Session(g).run(y, {x: torch.ones(2, 3)}).device.type == "meta"


def on(device: str) -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(2, device=device)


def test_a_feed_on_another_accelerator_is_moved_and_that_is_said_once() -> None:
    spec = Spec(torch.float32, (2,), "cpu")
    with pytest.warns(UserWarning, match=r"moves what is fed for elsewhere from cuda:0 to cpu"):
        assert moved(on("cuda:0"), spec, "elsewhere", None).device == torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moved(on("cuda:0"), spec, "elsewhere", None)


def test_a_feed_that_is_there_is_taken_as_it_is() -> None:
    given = on("cuda:1")
    assert moved(given, Spec(torch.float32, (2,), "cuda:1"), "x", None) is given


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_feed_for_a_device_that_is_not_there_is_said_with_the_placeholder() -> None:
    with tfnb.record(lazy=True) as g:
        x = tfnb.placeholder(shape=(None,), device="cuda:1", name="x")
        y = x + 1
    with pytest.raises(FeedError, match=r"cannot feed x, which is float32\[B\] on cuda:1: .*\n  recorded at"):
        tfnb.Session(g).run(y, {x: torch.ones(2)})


def test_a_module_that_was_moved_after_the_recording_is_noticed() -> None:
    model = nn.Linear(3, 2, device="meta")
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.zeros(4, 3, device="meta"))
        y = model(x)
    session = tfnb.Session(g)
    session.run(y, {x: torch.zeros(4, 3)})
    model.to_empty(device="cpu")
    with pytest.raises(FailedPrecondition, match=r"recorded on meta, and its module is on cpu now: .*to\('meta'\)"):
        session.run(y, {x: torch.zeros(4, 3)})


def test_a_variable_is_stored_where_its_spec_says() -> None:
    v = tfnb.Variable(torch.zeros(2, device="meta"))
    v.store(torch.ones(2))
    assert (v.spec.device, v.device, v.storage.device.type) == ("meta", "meta", "meta")


def test_the_first_device_draws_from_its_own_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", ("first", "second"))
    found = [random._default_generator(torch.device(name)) for name in ("cuda:0", "cuda:1", "cuda")]
    assert found == ["first", "second", "second"]
