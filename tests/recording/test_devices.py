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
from tfnb.feeding import converted
from tfnb.graph import Spec
from tfnb.kernels import random

FAKE = """
import torch
torch.cuda._lazy_init = lambda: None  # shapes need no driver
import tfnb
with tfnb.record(lazy=True) as g:
    x = tfnb.placeholder(shape=(None, 3), device="cuda:1", name="x")
    loss = {loss}
for node in g.nodes:
    print(node.name, node.attrs.get("device"), *[spec.device for spec in node.outputs])
"""


def recorded(loss: str) -> dict[str, list[str]]:
    """Device attr and output devices of each node of a graph on fake CUDA devices, in a process of its own."""
    code = FAKE.format(loss=loss)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    return {name: facts for name, *facts in map(str.split, found.stdout.splitlines())}


def test_what_is_computed_stays_on_the_device_of_the_placeholder() -> None:
    nodes = recorded("(x * x.new_ones(3) + torch.rand_like(x)).sum()")
    assert {facts[-1] for facts in nodes.values()} == {"cuda:1"}


def test_a_factory_without_a_number_is_recorded_with_that_of_the_current_device() -> None:
    nodes = recorded("torch.zeros(3, device='cuda')")
    assert nodes["loss"] == ["cuda:0", "cuda:0"]


def test_a_gradient_goes_back_to_the_device_that_its_value_came_from() -> None:
    nodes = recorded("tfnb.gradients([x.sum().to('cuda:0')], [x])[0]")
    assert nodes["loss"][-1] == "cuda:1"


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
        assert converted(on("cuda:0"), spec, "elsewhere", None).device == torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted(on("cuda:0"), spec, "elsewhere", None)


def test_a_feed_that_is_there_is_taken_as_it_is() -> None:
    given = on("cuda:1")
    assert converted(given, Spec(torch.float32, (2,), "cuda:1"), "x", None) is given


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
