"""What a CUDA device has to show: `pytest -m cuda` on a machine that has one. The oracle is the CPU, or eager torch."""

from __future__ import annotations

import copy
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tfnb
from tests.benchmarks import compare
from tfnb.errors import FailedPrecondition, ResourceExhausted
from tfnb.execution.tiers import tiered
from tfnb.execution.tiers.captured_steps import WARM
from tfnb.execution.tracing.clocks import counter
from tfnb.kernels import random

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}  # TF32 and other orders of summing


@pytest.fixture
def auto(monkeypatch: pytest.MonkeyPatch) -> str:
    """The mode that captures; compiling waits for steps that take longer in all than these."""
    monkeypatch.setenv("TFNB_COMPILE", "auto")
    return "auto"


def images(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 1, 8, 8, generator=made), torch.randint(10, (rows,), generator=made)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))


def recorded(model: nn.Module, device: str, optimizer: Any = None) -> tuple[Any, list[Any], list[Any]]:
    model.to(device)
    with tfnb.record(device=device) as g:
        x, y = (tfnb.placeholder(part, name=name) for part, name in zip(images(4), "xy", strict=True))
        loss = F.cross_entropy(model(x), y)
        train = (optimizer or tfnb.train.Adam(1e-3)).minimize(loss)
    return g, [train, loss], [x, y]


def trained(device: str, rows: list[int], mode: str = "off", model: nn.Module | None = None) -> list[float]:
    g, fetches, keys = recorded(model or net(), device)
    session = tfnb.Session(g, compile=mode)
    steps = (dict(zip(keys, images(n, place), strict=True)) for place, n in enumerate(rows))
    return [float(session.run(fetches, feed)[1]) for feed in steps]


# -- recording, running, training ------------------------------------------------------------------------------


def test_the_model_of_the_readme_trains_as_on_the_cpu() -> None:
    rows = [32] * 10
    assert trained("cuda", rows) == pytest.approx(trained("cpu", rows), rel=1e-3)


def test_specs_variables_and_results_name_the_device_with_its_number() -> None:
    g, (_, loss), keys = recorded(net(), "cuda")
    here = f"cuda:{torch.cuda.current_device()}"
    assert {spec.device for node in g.nodes for spec in node.outputs} == {here}
    assert {str(variable.device) for variable in g.variables} == {here}
    assert str(tfnb.Session(g).run(loss, dict(zip(keys, images(3), strict=True))).device) == here


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device is not two")
def test_a_model_on_the_second_device_stays_there() -> None:
    g, (train, loss), keys = recorded(net(), "cuda:1")
    session, feed = tfnb.Session(g, compile="off"), dict(zip(keys, images(3), strict=True))
    assert str(session.run([train, loss], feed)[1].device) == "cuda:1"
    assert {str(variable.device) for variable in g.variables} == {"cuda:1"}


def test_a_model_that_was_moved_away_is_noticed() -> None:
    model = net()
    g, (_, loss), keys = recorded(model, "cuda")
    session, feed = tfnb.Session(g), dict(zip(keys, images(3), strict=True))
    session.run(loss, feed)
    model.cpu()
    with pytest.raises(FailedPrecondition, match="is on cpu now"):
        session.run(loss, feed)


def test_pinned_feeds_are_taken() -> None:
    g, (_, loss), keys = recorded(net(), "cuda")
    session, feed = tfnb.Session(g, compile="off"), dict(zip(keys, images(64), strict=True))
    wanted = session.run(loss, feed)
    assert torch.equal(session.run(loss, {key: value.pin_memory() for key, value in feed.items()}), wanted)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adagrad": lambda: tfnb.train.Adagrad(0.1),
    "adam": lambda: tfnb.train.Adam(0.01),
    "adamw": lambda: tfnb.train.AdamW(0.01),
    "rmsprop": lambda: tfnb.train.RMSProp(0.01, momentum=0.9, centered=True),
    "sgd": lambda: tfnb.train.SGD(0.1),
    "sgd with momentum and dampening": lambda: tfnb.train.SGD(0.1, momentum=0.9, dampening=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_move_weights_as_on_the_cpu(name: str) -> None:
    moved = []
    for device in ("cpu", "cuda"):
        model = net()
        g, fetches, keys = recorded(model, device, OPTIMIZERS[name]())
        session = tfnb.Session(g, compile="off")
        for place in range(3):
            session.run(fetches, dict(zip(keys, images(16, place), strict=True)))
        moved.append([parameter.detach().cpu() for parameter in model.parameters()])
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-2, atol=1e-3)


def test_rows_of_a_table_are_updated_as_on_the_cpu() -> None:
    tables = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        table = nn.Embedding(50, 4).to(device)
        with tfnb.record(device=device) as g:
            i = tfnb.placeholder(torch.tensor([1, 2, 1]), name="i")
            train = tfnb.train.LazyAdam(0.1).minimize(table(i).square().sum())
        session = tfnb.Session(g, compile="off")
        for _ in range(3):
            session.run(train, {i: torch.tensor([3, 7, 3, 49])})
        tables.append(table.weight.detach().cpu())
    torch.testing.assert_close(tables[1], tables[0], **CLOSE)


# -- control flow ----------------------------------------------------------------------------------------------


def newton(x: Any) -> Any:
    def iteration(guess: Any, n: Any) -> Any:
        return (guess + x / guess) / 2, n + 1

    zero = x.new_zeros((), dtype=torch.int64)
    guess, n = tfnb.while_loop(lambda g, n: (g * g - x).abs().max() > 1e-4, iteration, (x / 2 + 1, zero))
    return tfnb.cond(x.sum() > 10, lambda: guess, lambda: -guess) + n


@pytest.mark.parametrize("executor", ["auto", "dataflow"])
def test_loops_and_branches_run_as_on_the_cpu(executor: str) -> None:
    found = []
    for device in ("cpu", "cuda"):
        with tfnb.record(device=device) as g:
            x = tfnb.placeholder(torch.tensor([2.0, 3.0]), name="x")
            root = newton(x)
            (slope,) = tfnb.gradients([root.sum()], [x])
        session = tfnb.Session(g, compile="off", executor=executor)
        found.append([v.cpu() for n in (2.0, 40.0) for v in session.run([root, slope], {x: torch.tensor([n, 9.0, 1])})])
    torch.testing.assert_close(found[1], found[0], **CLOSE)


def scanned(device: str, budget: int | None = None, **how: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    w = nn.Parameter((0.1 * torch.randn(64, 64)).to(device))
    with tfnb.record(device=device) as g:
        xs = tfnb.placeholder(torch.randn(200, 32, 64), shape=[200, 32, 64], name="xs")
        h, _ = tfnb.scan(lambda h, x: ((h @ w + x).tanh(), h), xs[0] * 0, xs, **how)
        loss = h.square().sum()
        (dw,) = tfnb.gradients([loss], [w])
    session = tfnb.Session(g, compile="off", memory_budget=budget)
    return [value.cpu() for value in session.run([loss, dw], {xs: torch.randn(200, 32, 64)})]


def test_rows_that_move_to_pinned_memory_come_back_as_they_were() -> None:
    wanted, got = scanned("cuda"), scanned("cuda", budget=6 << 20, swap_memory=True)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_a_budget_is_kept_or_refused() -> None:
    g, fetches, keys = recorded(net(), "cuda")
    feed = dict(zip(keys, images(256), strict=True))
    with pytest.raises(ResourceExhausted, match="smallest"):
        tfnb.Session(g, memory_budget=1000).run(fetches, feed)
    assert float(tfnb.Session(g, memory_budget=64 << 20).run(fetches, feed)[1]) > 0


# -- random streams --------------------------------------------------------------------------------------------


def dropped() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)
    )


def test_draws_are_reproducible_and_leave_torch_alone() -> None:
    before = torch.cuda.get_rng_state()
    first, second = (trained("cuda", [16] * 3, model=dropped()) for _ in range(2))
    assert first == second and len(set(first)) == 3
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_a_generator_of_its_own_draws_what_the_seed_draws() -> None:
    device, op = torch.device("cuda", torch.cuda.current_device()), torch.ops.aten.native_dropout.default
    x, own = torch.ones(1000, device=device), torch.Generator(device)
    own.manual_seed(7)
    args = (x, 0.5, True)
    assert torch.equal(random.drawn(op, own, args, {})[0], random.seeded(op, 7, device, args, {})[0])


# -- captured steps --------------------------------------------------------------------------------------------


def launched(model: nn.Module, rows: list[int], mode: str) -> tuple[list[float], tfnb.Session]:
    g, fetches, keys = recorded(model, "cuda")
    session = tfnb.Session(g, compile=mode)
    steps = (dict(zip(keys, images(n, place), strict=True)) for place, n in enumerate(rows))
    return [float(session.run(fetches, feed)[1]) for feed in steps], session


@pytest.mark.parametrize("make", [net, dropped])
def test_captured_steps_train_as_the_code_does(make: Callable[[], nn.Module], auto: str) -> None:
    rows = [32, 7] * (WARM + 6)
    got, session = launched(make(), rows, auto)
    assert ["launched whole" in status for status in session.status()] == [True, True], session.status()
    assert got == pytest.approx(launched(make(), rows, "off")[0], rel=1e-3)


def test_results_stay_what_they_were_after_the_next_launch(auto: str) -> None:
    with tfnb.record(device="cuda") as g:
        x = tfnb.placeholder(torch.zeros(3), name="x")
        y = x
        for _ in range(10):
            y = (y + 1).sin()
    session, plain = tfnb.Session(g, compile=auto), tfnb.Session(g, compile="off")
    kept = [session.run(y, {x: torch.full((3,), float(i))}) for i in range(WARM + 5)]
    assert "launched whole" in session.status()[0]
    wanted = [plain.run(y, {x: torch.full((3,), float(i))}) for i in range(WARM + 5)]
    torch.testing.assert_close(kept, wanted, rtol=0, atol=0)


def test_a_parameter_that_lies_elsewhere_is_captured_again(auto: str) -> None:
    model = dropped().eval()
    g, (_, loss), keys = recorded(model, "cuda")
    session, feed = tfnb.Session(g, compile=auto), dict(zip(keys, images(8), strict=True))
    for _ in range(WARM + 2):
        session.run(loss, feed)
    model[1].weight.data = torch.randn(64, 64, device="cuda")
    x, y = (part.cuda() for part in images(8))
    wanted = F.cross_entropy(model(x), y)
    torch.testing.assert_close(session.run(loss, feed), wanted.detach(), **CLOSE)
    assert "launched whole" in session.status()[0], session.status()
    assert torch.rand(3, device="cuda").shape == (3,), "torch's own generator draws for a capture"


def test_a_launch_on_another_stream_waits_for_the_one_before(auto: str) -> None:
    g, fetches, keys = recorded(net(), "cuda")
    session, streams = tfnb.Session(g, compile=auto), [torch.cuda.Stream() for _ in range(2)]
    got = []
    for place in range(WARM + 20):
        stream = torch.cuda.default_stream() if place <= WARM else streams[place % 2]  # code as it is waits for nobody
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            got.append(session.run(fetches, dict(zip(keys, images(64, place), strict=True)))[1])
    torch.cuda.synchronize()
    assert [float(loss) for loss in got] == pytest.approx(trained("cuda", [64] * (WARM + 20)), rel=1e-3)


def test_other_threads_run_beside_launches(auto: str) -> None:
    g, (_, loss), keys = recorded(net(), "cuda")
    session, feed = tfnb.Session(g, compile=auto), dict(zip(keys, images(16), strict=True))
    wanted = float(session.run(loss, feed))
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.extend([float(session.run(loss, feed)) for _ in range(50)]))
    thread.start()
    mine = [float(session.run(loss, feed)) for _ in range(50)]
    thread.join()
    assert [*mine, *found] == pytest.approx([wanted] * 100, rel=1e-3)


@torch.library.custom_op("tfnb_test::waits", mutates_args=())
def waits(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.sum())


@waits.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_capture_that_fails_leaves_a_device_that_works(auto: str) -> None:
    with tfnb.record(device="cuda") as g:
        x = tfnb.placeholder(torch.ones(3), name="x")
        y = waits(x)
        for _ in range(10):
            y = (y + 1).sin()
    session, plain = tfnb.Session(g, compile=auto), tfnb.Session(g, compile="off")
    for i in range(WARM + 3):
        feed = {x: torch.full((3,), float(i))}
        torch.testing.assert_close(session.run(y, feed), plain.run(y, feed), rtol=0, atol=0)
    assert "not captured: " in session.status()[0]
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    rows = [32] * (WARM + 4)
    got, later = launched(net(), rows, auto)
    assert "launched whole" in later.status()[0]
    assert got == pytest.approx(launched(net(), rows, "off")[0], rel=1e-3)


@pytest.mark.parametrize("optimizer", ["adam", "sgd with momentum and dampening"])
def test_steps_that_are_compiled_are_launched_whole_and_say_so(optimizer: str) -> None:
    rows = [32, 7] * (WARM + 4)

    def stepped(mode: str) -> tuple[list[float], tfnb.Session]:
        g, fetches, keys = recorded(net(), "cuda", OPTIMIZERS[optimizer]())
        session = tfnb.Session(g, compile=mode)
        feeds = (dict(zip(keys, images(n, place), strict=True)) for place, n in enumerate(rows))
        return [float(session.run(fetches, feed)[1]) for feed in feeds], session

    got, session = stepped("now")
    assert [bool(re.search("]: compiled; .*launched whole", line)) for line in session.status()] == [True, True], (
        session.status()
    )
    assert got == pytest.approx(stepped("off")[0], rel=5e-3)  # TF32, which one of both may take


def test_a_step_that_draws_is_not_compiled_and_says_so() -> None:
    status = launched(dropped(), [32] * (WARM + 4), "now")[1].status()[0]
    assert re.search(r"generated code \(.* draws\), launched whole", status), status


def test_code_is_compiled_in_the_background_where_it_pays(auto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered, "WORTH_COMPILING", 0.0)
    with tfnb.record(device="cuda") as g:
        x = tfnb.placeholder(torch.zeros(4096, 4096), name="x")
        y = x
        for _ in range(20):
            y = (y + 1).sin() * 0.5
    session, feed = tfnb.Session(g, compile=auto), {x: torch.rand(4096, 4096, device="cuda")}
    wanted, end = tfnb.Session(g, compile="off").run(y, feed), time.monotonic() + 200
    while not (found := session.status()) or not ("compiled: " in found[0] and "launched whole" in found[0]):
        torch.testing.assert_close(session.run(y, feed), wanted, **CLOSE)
        assert time.monotonic() < end and "generated code (" not in str(session.status()), session.status()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("length", [64, 77])
def test_attention_has_the_gradients_of_torch(dtype: torch.dtype, causal: bool, length: int) -> None:
    q, k, v = (torch.randn(2, 4, length, 32, device="cuda", dtype=dtype) for _ in range(3))
    with tfnb.record(device="cuda") as g:
        xs = [tfnb.placeholder(x, shape=tuple(x.shape), name=name) for x, name in zip((q, k, v), "qkv", strict=True)]
        out = F.scaled_dot_product_attention(*xs, is_causal=causal)
        found = tfnb.gradients([(out.float() ** 2).sum()], xs)
    got = tfnb.Session(g, compile="off").run([out, *found], dict(zip(xs, (q, k, v), strict=True)))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*leaves, is_causal=causal)
    (wanted.float() ** 2).sum().backward()
    room = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else CLOSE
    torch.testing.assert_close(got, [wanted.detach(), *(x.grad for x in leaves)], **room)


def test_a_step_of_sgd_on_a_table_waits_for_no_count_of_rows(auto: str) -> None:
    torch.manual_seed(0)
    table, plain = nn.Embedding(100, 8, device="cuda"), nn.Embedding(100, 8, device="cuda")
    plain.load_state_dict(table.state_dict())
    with tfnb.record(device="cuda") as g:
        i = tfnb.placeholder(torch.tensor([1, 2, 1]), name="i")
        loss = table(i).square().sum().sin() + table(i).sum().cos()
        train = tfnb.train.SGD(0.1).minimize(loss)
    session, ids = tfnb.Session(g, compile=auto), torch.tensor([3, 7, 3], device="cuda")
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(WARM + 3):
        session.run(train, {i: ids})
        optimizer.zero_grad()
        (plain(ids).square().sum().sin() + plain(ids).sum().cos()).backward()
        optimizer.step()
    assert "launched whole" in session.status()[0], session.status()
    torch.testing.assert_close(table.weight.detach(), plain.weight.detach(), **CLOSE)


# -- files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("saved", "restored"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_checkpoints_go_from_device_to_device(saved: str, restored: str, tmp_path: Path) -> None:
    g, fetches, keys = recorded(net(), saved)
    feed = dict(zip(keys, images(8), strict=True))
    session = tfnb.Session(g, compile="off")
    session.run(fetches, feed)
    session.save(tmp_path / "variables.safetensors")
    there, (_, loss), others = recorded(copy.deepcopy(net()), restored)
    session_there = tfnb.Session(there, compile="off").restore(tmp_path / "variables.safetensors")
    got = session_there.run(loss, dict(zip(others, images(8), strict=True)))
    torch.testing.assert_close(got.cpu(), session.run(fetches[1], feed).cpu(), **CLOSE)


def test_a_graph_file_keeps_the_device(tmp_path: Path) -> None:
    g, (_, loss), keys = recorded(net(), "cuda")
    g.save(tmp_path / "graph.tfnb")
    tfnb.Session(g).save(tmp_path / "variables.safetensors")
    read = tfnb.Graph.load(tmp_path / "graph.tfnb")
    session = tfnb.Session(read, compile="off").restore(tmp_path / "variables.safetensors")
    got = session.run(loss.node.name, dict(zip("xy", images(8), strict=True)))
    wanted = tfnb.Session(g, compile="off").run(loss, dict(zip(keys, images(8), strict=True)))
    torch.testing.assert_close(got, wanted, **CLOSE)


# -- clocks ----------------------------------------------------------------------------------------------------


def products(count: int) -> Callable[[], torch.Tensor]:
    x = torch.randn(4096, 4096, device="cuda")

    def call() -> torch.Tensor:
        y = x
        for _ in range(count):
            y = y @ x
        return y

    return call


def test_seconds_are_those_of_the_device_and_not_of_starting_it() -> None:
    seconds = []
    for count in (4, 40):
        clock, call = counter(torch.device("cuda", torch.cuda.current_device())), products(count)
        call()
        torch.cuda.synchronize()
        clock.of(call)
        torch.cuda.synchronize()
        clock.of(lambda: None)
        seconds.append(clock.total)
    assert seconds[1] > 5 * seconds[0] > 0  # ten times the work


@pytest.mark.parametrize("how", [True, "kernels"])
def test_traces_have_times_of_the_device(how: Any) -> None:
    g, fetches, keys = recorded(net(), "cuda")
    session, feed = tfnb.Session(g, compile="off"), dict(zip(keys, images(64), strict=True))
    session.run(fetches, feed)
    session.run(fetches, feed, trace=how)
    trace = session.trace
    assert trace is not None
    assert {event.device for event in trace.events} == {f"cuda:{torch.cuda.current_device()}"}
    assert all(event.end >= event.start for event in trace.events) and trace.seconds > 0
    if how == "kernels":
        assert trace.kernels and all(event.thread.startswith("stream") for event in trace.kernels)


@pytest.mark.timeout(600)
def test_a_small_comparison_runs_on_the_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--quick", "--rows", "mlp-32", "--libraries", "torch_eager", "tfnb_off", "tfnb_now"]
    compare.main([*options, "--device", "cuda", "--out", str(tmp_path)])
    table = (tmp_path / "compare.md").read_text()
    assert "| mlp-32 | tfnb_off |" in table and "not timed" not in table
