"""torch.func inside a recording: values, replay at another batch, and further gradients through the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap

import tfnb
from tfnb.errors import Unsupported

torch.manual_seed(0)
LAYER = torch.nn.Linear(3, 2).double()
MATRIX = torch.randn(3, 3, dtype=torch.float64)


def f(z: torch.Tensor) -> torch.Tensor:
    return (z.sin() * z).sum()


class Squared(torch.autograd.Function):
    """Five times what the derivative would be, halved: so that it is seen."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, dy):
        return dy * 5 * ctx.saved_tensors[0]


def per_sample(x: torch.Tensor) -> torch.Tensor:
    """The gradient of a layer's weight for each row."""

    def loss(parameters: Any, row: torch.Tensor) -> torch.Tensor:
        return functional_call(LAYER, parameters, (row.unsqueeze(0),)).pow(2).sum()

    return vmap(grad(loss), in_dims=(None, 0))(dict(LAYER.named_parameters()), x)["weight"]


CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "grad": grad(f),
    "grad of grad": grad(lambda z: grad(f)(z).pow(2).sum()),
    "grad_and_value": lambda x: grad_and_value(f)(x)[0] * grad_and_value(f)(x)[1],
    "grad with aux": lambda x: grad(lambda z: (f(z), z.exp()), has_aux=True)(x)[1],
    "grad over a closure": lambda x: grad(lambda z: (z * x).sum())(x * 2),
    "grad of a Parameter": lambda x: grad(lambda w: functional_call(LAYER, {"weight": w}, (x,)).pow(2).sum())(
        LAYER.weight
    ),
    "vjp": lambda x: vjp(torch.sin, x)[1](x)[0],
    "jvp": lambda x: jvp(torch.sin, (x,), (x * x,))[1],
    "jacrev": jacrev(lambda z: z.sin() * z[0]),
    "jacfwd": jacfwd(lambda z: z.sin() * z[0]),
    "hessian": hessian(f),
    "vmap": vmap(lambda row: row.sin() * row.sum()),
    "vmap over columns": vmap(lambda column: column * 2, in_dims=1, out_dims=1),
    "vmap with a size": vmap(lambda column: column.sum() / column.shape[0], in_dims=1),
    "vmap with a matrix": vmap(lambda row: MATRIX @ row),
    "vmap of vmap": vmap(vmap(lambda a: a * a)),
    "vmap over two": lambda x: vmap(torch.dot)(x, x * 2),
    "vmap over numbers": lambda x: vmap(lambda i: x[i].sum() * 2)(torch.arange(3)),
    "vmap of grad": vmap(grad(f)),
    "vmap of jacrev": vmap(jacrev(torch.sin)),
    "per-sample gradients": per_sample,
    "functional_call": lambda x: functional_call(LAYER, {"weight": x[:2] * 1.0}, (x,)),
    "grad of a Function": grad(lambda z: Squared.apply(z).sum()),
    "vmap of a Function": vmap(Squared.apply),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_at_two_batches(name: str) -> None:
    if name in ("jacrev", "jacfwd", "hessian") and torch.__version__ < (2, 12):
        pytest.skip("torch 2.11 makes a number of the size, and a warning says so")
    data = torch.randn(4, 3, dtype=torch.float64)
    with tfnb.record():
        x = tfnb.placeholder(data)
        y = CASES[name](x)
        (dx,) = tfnb.gradients(y.sum(), [x])
    for rows in (data, torch.randn(6, 3, dtype=torch.float64)):
        leaf = rows.clone().requires_grad_()
        want = CASES[name](leaf)
        got, got_dx = tfnb.run([y, dx], {x: rows})
        torch.testing.assert_close(got, want.detach())
        torch.testing.assert_close(got_dx, torch.autograd.grad(want.sum(), leaf)[0])


def test_a_batch_that_python_counts_takes_no_other_count() -> None:
    with tfnb.record():
        x = tfnb.placeholder(torch.randn(4, 3), name="x")
        y = vmap(lambda row: row * 2, chunk_size=2)(x)
    fed = torch.randn(4, 3)
    assert torch.equal(tfnb.run(y, {x: fed}), fed * 2)
    for rows in (1, 2, 3, 5, 6):
        with pytest.raises(tfnb.errors.ShapeError, match=r"recorded for .*B(?s:.*)test_func.py line"):
            tfnb.run(y, {x: torch.randn(rows, 3)})


def test_linearize_is_refused_with_the_line() -> None:
    with tfnb.record(), pytest.raises(Unsupported, match=r"torch.func.linearize(.|\n)*test_func\.py line"):
        torch.func.linearize(torch.sin, tfnb.placeholder(torch.randn(4, 3)))
