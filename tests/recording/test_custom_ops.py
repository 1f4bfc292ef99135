"""torch.library ops in a recording: shapes, writes, replay, files; and the gradients they were registered with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tfnb
from tests.gradients.reference import compare
from tfnb.graph import Graph

SPACE = "tfnb_tests"


def op(name: str, **options: Any) -> Callable[..., Any]:
    return torch.library.custom_op(f"{SPACE}::{name}", **{"mutates_args": (), **options})


@op("swish")
def swish(x: torch.Tensor, beta: float) -> torch.Tensor:
    return x * torch.sigmoid(beta * x)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.beta = inputs[1]


def _swish_backward(ctx: Any, dy: torch.Tensor) -> Any:
    (x,) = ctx.saved_tensors
    s = torch.sigmoid(ctx.beta * x)
    return dy * 3 * (s + ctx.beta * x * s * (1 - s)), None  # three times the derivative, so that it is seen


swish.register_autograd(_swish_backward, setup_context=_keep)


@op("scaled")
def scaled(x: torch.Tensor, *, by: float = 2.0) -> torch.Tensor:
    return x * x * by


def _keep_scaled(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)
    ctx.by = keyword_only_inputs["by"]


scaled.register_autograd(lambda ctx, dy: 5 * dy * ctx.by * ctx.saved_tensors[0], setup_context=_keep_scaled)


@op("joined")
def joined(xs: list[torch.Tensor], w: torch.Tensor) -> torch.Tensor:
    return torch.cat([x * w for x in xs])


def _joined_backward(ctx: Any, dy: torch.Tensor) -> Any:
    *xs, w = ctx.saved_tensors
    assert ctx.needs_input_grad == ([True] * len(xs), True)
    parts = dy.split([x.shape[0] for x in xs])
    return [7 * part * w for part in parts], sum((part * x).sum(0) for part, x in zip(parts, xs, strict=True))


joined.register_autograd(_joined_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(
    *inputs[0], inputs[1]))  # fmt: skip


@op("halves")
def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x.sin(), x.cos(), (x > 0).long()


def _keep_halves(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], output[0])
    ctx.mark_non_differentiable(output[2])


halves.register_autograd(
    lambda ctx, ds, dc, di: 2 * ds * ctx.saved_tensors[1] + dc * ctx.saved_tensors[0], setup_context=_keep_halves
)


@op("parts")
def parts(x: torch.Tensor, n: int) -> list[torch.Tensor]:
    return [x * i for i in range(n)]


parts.register_autograd(
    lambda ctx, dys: (sum(dy * 11 for dy in dys), None), setup_context=lambda ctx, inputs, output: None
)


@op("add_into", mutates_args={"x"})
def add_into(x: torch.Tensor, y: torch.Tensor, alpha: float = 1.0) -> None:
    x.add_(y, alpha=alpha)


@op("push", mutates_args={"x", "count"})
def push(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    count.add_(1)
    return x.sum()


@op("in_numpy")
def in_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.sort(x.numpy(), axis=-1))


OLD = torch.library.Library(SPACE, "FRAGMENT")
OLD.define("old(Tensor x, int n=3) -> Tensor")
OLD.impl("old", lambda x, n=3: x * n, "CPU")
OLD.define("old_composite(Tensor x) -> Tensor")
OLD.impl("old_composite", lambda x: x.sin() * 2, "CompositeImplicitAutograd")
OLD.define("old_write(Tensor(a!) x, Tensor y) -> Tensor(a!)")
OLD.impl("old_write", lambda x, y: x.copy_(y * 3), "CPU")
OLD.define("kernel(Tensor x) -> Tensor")
OLD.impl("kernel", lambda x: x * 2, "CompositeExplicitAutograd")
torch.library.register_autograd(
    f"{SPACE}::kernel", lambda ctx, dy: dy * 7 * ctx.x, lib=OLD,
    setup_context=lambda ctx, inputs, output: setattr(ctx, "x", inputs[0]),
)  # fmt: skip
OPS = torch.ops.tfnb_tests


class Applied(torch.autograd.Function):
    """What the Autograd kernel of an op of the old way applies."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        with torch._C._AutoDispatchBelowAutograd():
            return OPS.applied(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return 13 * dy * ctx.saved_tensors[0].sin()


OLD.define("applied(Tensor x) -> Tensor")
OLD.impl("applied", lambda x: x * 2, "CPU")
OLD.impl("applied", Applied.apply, "Autograd")


class Other(torch.autograd.Function):
    """A kernel that computes by another op, and applies its own op in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return OPS.applied(x) * 2

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return OPS.indirect(dy)


OLD.define("indirect(Tensor x) -> Tensor")
OLD.impl("indirect", lambda x: x * 4, "CPU")
OLD.impl("indirect", Other.apply, "Autograd")


def added(x: torch.Tensor) -> torch.Tensor:
    a = x * 1
    row = a[1:]
    add_into(row, x[:-1], alpha=2.0)
    return a * x


def pushed(x: torch.Tensor) -> torch.Tensor:
    a, count = x * 1, torch.zeros(())
    total = push(a, count)
    total = total + push(a, count)
    return a * total + count


def old_write(x: torch.Tensor) -> torch.Tensor:
    a = x * 1
    b = OPS.old_write(a, x)
    return a + b


CASES: dict[str, Callable[..., Any]] = {
    "no fake": lambda x: swish(x, 1.5) * x,
    "keyword only": lambda x: scaled(x, by=3.0),
    "keyword default": lambda x: scaled(x),
    "a list of tensors": lambda x: joined([x, x[:2]], x[0]),
    "several results": lambda x: halves(x)[0] * halves(x)[1] + halves(x)[2],
    "a list of results": lambda x: parts(x, 3)[2] + parts(x, 3)[1],
    "a write": added,
    "writes and a result": pushed,
    "defined the old way": lambda x: OPS.old(x) + OPS.old(x, 5),
    "with a registered gradient": lambda x: OPS.kernel(x * 2),
    "with an Autograd kernel": lambda x: OPS.applied(x) * x,
    "by another op": lambda x: OPS.indirect(x) * x,
    "composite": lambda x: OPS.old_composite(x),
    "an old write": old_write,
}
DIFFERENTIABLE = ("no fake", "keyword only", "keyword default", "a list of tensors", "several results",
                  "a list of results", "with a registered gradient", "with an Autograd kernel",
                  "by another op", "composite")  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_recorded_at_one_batch_it_runs_at_others(name: str) -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(4, 3))
        y = CASES[name](x)
    for rows in (2, 4, 7):
        data = torch.randn(rows, 3)
        torch.testing.assert_close(tfnb.run(y, {x: data}), CASES[name](data.clone()))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_its_registered_gradient_is_used_twice(name: str) -> None:
    compare(CASES[name], [torch.randn(4, 3, dtype=torch.float64, requires_grad=True)])


def test_code_that_is_not_torch_needs_a_fake_or_a_fixed_shape() -> None:
    data = torch.randn(4, 3)
    with tfnb.record():
        x = tfnb.placeholder(data, shape=(4, 3))
        y = in_numpy(x)
    other = torch.randn(4, 3)
    assert torch.equal(tfnb.run(y, {x: other}), other.sort(-1).values)
    with tfnb.record():
        x = tfnb.placeholder(data)
        with pytest.raises(tfnb.errors.Unsupported, match=r"in_numpy.*\n  at test_custom_ops.*register_fake"):
            in_numpy(x)


def test_an_op_without_a_gradient_says_how_to_register_one() -> None:
    @op("lonely")
    def lonely(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with tfnb.record():
        x = tfnb.placeholder(torch.randn(3))
        y = lonely(x)
        with pytest.raises(tfnb.errors.NoGradient, match=r"no gradient rule for tfnb_tests.lonely.default") as caught:
            tfnb.gradients(y, x)
        assert "test_custom_ops.py line" in str(caught.value)
        assert "@tfnb.register_gradient('tfnb_tests.lonely.default')" in str(caught.value)
        tfnb.register_gradient(lonely)(lambda n, dy: dy * 2)
        assert tfnb.gradients(y.sum(), x)[0].sample.tolist() == [2.0, 2.0, 2.0]


def test_mistakes_of_a_registered_backward() -> None:
    @op("wrong")
    def wrong(x: torch.Tensor, k: int) -> torch.Tensor:
        return x * k

    wrong.register_autograd(lambda ctx, dy: dy)
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(3))
        y = wrong(x, 2)
        with pytest.raises(tfnb.errors.NoGradient, match=r"tfnb_tests.wrong.*number of gradients.*\n.*wrong.*test_cu"):
            tfnb.gradients(y, x)
        wrong.register_autograd(lambda ctx, dy: (torch.from_numpy(dy.numpy()), None))
        with pytest.raises(tfnb.errors.NoGradient, match=r"wrong.* cannot be recorded: .numpy"):
            tfnb.gradients(y, x)
        wrong.register_autograd(lambda ctx, dy: (dy * float(dy.sum()), None))
        with pytest.raises(tfnb.errors.NoGradient, match=r"wrong.* takes a value out of the graph with"):
            tfnb.gradients(y, x)


def test_a_write_travels_in_a_file(tmp_path: Path) -> None:
    with tfnb.record() as g:
        x = tfnb.placeholder(torch.randn(4, 3), name="x")
        y = added(x)
    assert "tfnb_pure.tfnb_tests__add_into.default" in [n.op for n in g.nodes]
    g.save(tmp_path / "g.json")
    with pytest.raises(tfnb.errors.UntrustedOp):
        Graph.load(tmp_path / "g.json")
    loaded = Graph.load(tmp_path / "g.json", trusted=True)
    data = torch.randn(5, 3)
    assert torch.equal(tfnb.Session(loaded).run("y", {"x": data}), tfnb.run(y, {x: data}))


def test_a_write_into_a_list_is_refused() -> None:
    @op("into_list", mutates_args={"xs"})
    def into_list(xs: list[torch.Tensor]) -> None:
        for x in xs:
            x.add_(1)

    with tfnb.record():
        x = tfnb.placeholder(torch.randn(3))
        with pytest.raises(tfnb.errors.Unsupported, match=r"into_list.default writes in place and has no out-of-place"):
            into_list([x])
