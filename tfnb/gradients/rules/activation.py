"""Rules for activation functions: torch's own backward kernels, and what those become when differentiated."""

from __future__ import annotations

import math
from typing import Any

import torch

from tfnb.gradients.rule_table import Forward, composite, conj, partials, rule

aten = torch.ops.aten


def _x(n: Forward) -> torch.Tensor:
    return n.inputs[0]


# -- sigmoid and tanh: backward kernels take the output --------------------------------------------------------

partials(aten.sigmoid.default, lambda n, dy: aten.sigmoid_backward(dy, n.out))
partials(aten.sigmoid_backward.default, lambda n, dd: aten.sigmoid_backward(dd, conj(n["output"])),
         lambda n, dd: conj(dd) * n["grad_output"] * (1 - 2 * conj(n["output"])))  # fmt: skip
partials(aten.tanh.default, lambda n, dy: aten.tanh_backward(dy, n.out))
partials(aten.tanh_backward.default, lambda n, dd: aten.tanh_backward(dd, conj(n["output"])),
         lambda n, dd: conj(dd) * n["grad_output"] * (-2 * conj(n["output"])))  # fmt: skip

# -- piecewise linear: the derivative is constant between the kinks --------------------------------------------

partials(aten.relu.default, lambda n, dy: aten.threshold_backward(dy, n.out, 0))
partials(aten.threshold.default, lambda n, dy: aten.threshold_backward(dy, _x(n), n["threshold"]))
partials(aten.threshold_backward.default, lambda n, dd: aten.threshold_backward(dd, n["self"], n["threshold"]), None)
partials(aten.hardtanh.default, lambda n, dy: aten.hardtanh_backward(dy, _x(n), n["min_val"], n["max_val"]))
partials(aten.hardtanh_backward.default,
         lambda n, dd: aten.hardtanh_backward(dd, n["self"], n["min_val"], n["max_val"]), None)  # fmt: skip
partials(aten.hardsigmoid.default, lambda n, dy: aten.hardsigmoid_backward(dy, _x(n)))
partials(aten.hardsigmoid_backward.default, lambda n, dd: aten.hardsigmoid_backward(dd, n["self"]), None)
partials(aten.hardshrink.default, lambda n, dy: aten.hardshrink_backward(dy, _x(n), n["lambd"]))
partials(aten.hardshrink_backward.default, lambda n, dd: aten.hardshrink_backward(dd, n["self"], n["lambd"]), None)
partials(aten.softshrink.default, lambda n, dy: aten.softshrink_backward(dy, _x(n), n["lambd"]))
partials(aten.softshrink_backward.default, lambda n, dd: aten.softshrink_backward(dd, n["self"], n["lambd"]), None)
partials(aten.leaky_relu.default, lambda n, dy: aten.leaky_relu_backward(dy, _x(n), n["negative_slope"], False))
partials(aten.leaky_relu_backward.default,
         lambda n, dd: aten.leaky_relu_backward(dd, n["self"], n["negative_slope"], False), None)  # fmt: skip
partials(aten._prelu_kernel.default, lambda n, dy: dy.where(n["self"] >= 0, n["weight"] * dy),
         lambda n, dy: (n["self"] * dy).where(n["self"] < 0, 0.0))  # fmt: skip


@rule(aten.rrelu_with_noise_functional.default)
def _(n: Forward, dys: Any) -> Any:  # the second output is the slopes drawn: no gradient passes there
    if n["training"]:
        return dys[0] * n.outs[1], None
    return aten.leaky_relu_backward(dys[0], n["self"], (n["lower"] + n["upper"]) / 2, False), None


# -- smooth: the backward kernel is linear in its first argument, the second order goes through plain torch ----

partials(aten.elu.default,
         lambda n, dy: aten.elu_backward(dy, n["alpha"], n["scale"], n["input_scale"], False, n["self"]))  # fmt: skip
partials(aten.celu.default, lambda n, dy: aten.elu_backward(dy, n["alpha"], 1, 1 / n["alpha"], False, n["self"]))
partials(aten.gelu.default, lambda n, dy: aten.gelu_backward(dy, _x(n), approximate=n["approximate"]))
partials(aten.silu.default, lambda n, dy: aten.silu_backward(dy, _x(n)))
partials(aten.mish.default, lambda n, dy: aten.mish_backward(dy, _x(n)))
partials(aten.hardswish.default, lambda n, dy: aten.hardswish_backward(dy, _x(n)))
partials(aten.softplus.default, lambda n, dy: aten.softplus_backward(dy, _x(n), n["beta"], n["threshold"]))
partials(aten.softplus_backward.default,
         lambda n, dd: aten.softplus_backward(dd, n["self"], n["beta"], n["threshold"]),
         lambda n, dd: _softplus2(n, dd))  # fmt: skip
partials(aten.glu.default, lambda n, dy: aten.glu_backward(dy, _x(n), n["dim"]))


@rule(aten.log_sigmoid_forward.default, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    return (aten.log_sigmoid_backward(dy, n["self"], n.outs[1]),)


def _softplus2(n: Forward, dd: torch.Tensor) -> torch.Tensor:
    scaled = n["self"] * n["beta"]
    s = torch.sigmoid(scaled)
    return (dd * n["grad_output"] * (s * (1 - s) * n["beta"])).where(scaled <= n["threshold"], 0.0)


@composite(aten.elu_backward.default)
def _(grad_output: Any, alpha: Any, scale: Any, input_scale: Any, is_result: bool, self_or_result: Any) -> Any:
    x = self_or_result
    low = x + alpha * scale if is_result else (x * input_scale).exp() * (alpha * scale)
    return torch.where(x <= 0, grad_output * input_scale * low, grad_output * scale)


@composite(aten.gelu_backward.default)
def _(grad: Any, self: Any, *, approximate: str = "none") -> Any:
    x = self
    if approximate == "none":
        pdf = (x * x * -0.5).exp() / math.sqrt(2 * math.pi)
        return grad * (0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * pdf)
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    t = torch.tanh(inner)
    return grad * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope)


@composite(aten.silu_backward.default)
def _(grad_output: Any, self: Any) -> Any:
    s = torch.sigmoid(self)
    return grad_output * (s * (1 + self * (1 - s)))


@composite(aten.mish_backward.default)
def _(grad_output: Any, self: Any) -> Any:
    t, s = torch.tanh(torch.nn.functional.softplus(self)), torch.sigmoid(self)
    return grad_output * (t + self * s * (1 - t * t))


@composite(aten.hardswish_backward.default)
def _(grad_output: Any, self: Any) -> Any:
    return torch.where(self < -3, grad_output * 0, torch.where(self <= 3, grad_output * (self / 3 + 0.5), grad_output))


@composite(aten.glu_backward.default)
def _(grad_output: Any, self: Any, dim: int) -> Any:
    a, b = self.chunk(2, dim)
    s = torch.sigmoid(b)
    return torch.cat([grad_output * s, grad_output * a * s * (1 - s)], dim)


@composite(aten.log_sigmoid_backward.default)
def _(grad_output: Any, self: Any, buffer: Any) -> Any:
    return grad_output * torch.sigmoid(-self)


# -- softmax ---------------------------------------------------------------------------------------------------


@rule(aten._softmax.default)
def _(n: Forward, dy: Any) -> Any:
    return (aten._softmax_backward_data(dy, n.out, n["dim"], n["self"].dtype),)


@rule(aten._softmax_backward_data.default)
def _(n: Forward, dd: Any) -> Any:
    dy, y, dim = n["grad_output"], n["output"], n["dim"]  # y * (dy - sum(dy * y))

    def output() -> torch.Tensor:
        return dd * (dy - (dy * y).sum(dim, keepdim=True)) - dy * (dd * y).sum(dim, keepdim=True)

    return lambda: aten._softmax_backward_data(dd, y, dim, y.dtype), output


@rule(aten._safe_softmax.default)
def _(n: Forward, dy: Any) -> Any:
    return (n.out * (dy - (dy * n.out).sum(n["dim"], keepdim=True)),)


@rule(aten._log_softmax.default)
def _(n: Forward, dy: Any) -> Any:
    return (aten._log_softmax_backward_data(dy, n.out, n["dim"], n["self"].dtype),)


@rule(aten._log_softmax_backward_data.default)
def _(n: Forward, dd: Any) -> Any:
    dy, p, dim = n["grad_output"], n["output"].exp(), n["dim"]  # dy - exp(y) * sum(dy)
    return lambda: dd - (dd * p).sum(dim, keepdim=True), lambda: -dd * p * dy.sum(dim, keepdim=True)
