"""Rules for activation functions and softmax: torch's own backward kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tfnb.gradients.rule_table import Forward, composite, partials, rule

aten = torch.ops.aten

partials(aten.sigmoid.default, lambda n, dy: aten.sigmoid_backward(dy, n.out))
partials(aten.tanh.default, lambda n, dy: aten.tanh_backward(dy, n.out))
partials(aten.relu.default, lambda n, dy: aten.threshold_backward(dy, n.out, 0))
partials(aten.gelu.default, lambda n, dy: aten.gelu_backward(dy, n["self"], approximate=n["approximate"]))
partials(aten.silu.default, lambda n, dy: aten.silu_backward(dy, n["self"]))
partials(aten._softmax.default,
         lambda n, dy: aten._softmax_backward_data(dy, n.out, n["dim"], n["self"].dtype))  # fmt: skip
partials(aten._log_softmax.default,
         lambda n, dy: aten._log_softmax_backward_data(dy, n.out, n["dim"], n["self"].dtype))  # fmt: skip


@rule(aten.rrelu_with_noise_functional.default)
def _(n: Forward, dys: Sequence[Any]) -> Any:  # the second output is the slopes drawn: no gradient passes there
    if n["training"]:
        return dys[0] * n.outs[1], None
    return aten.leaky_relu_backward(dys[0], n["self"], (n["lower"] + n["upper"]) / 2, False), None


@rule(
    aten.fake_quantize_per_tensor_affine_cachemask.default, aten.fake_quantize_per_channel_affine_cachemask.default,
    aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default,
    aten._fused_moving_avg_obs_fq_helper_functional.default, outputs=1, saves=True,
)  # fmt: skip
def _(n: Forward, dy: torch.Tensor) -> Any:  # quantized and back: straight through, but for what was beyond the range
    return {"self": dy * n.outs[1]}


@rule(aten.log_sigmoid_forward.default, outputs=1, saves=True)
def _(n: Forward, dy: torch.Tensor) -> Any:
    return (aten.log_sigmoid_backward(dy, n["self"], n.outs[1]),)


@composite(aten.glu_backward.default)
def _(grad_output: Any, self: torch.Tensor, dim: int) -> Any:
    a, b = self.chunk(2, dim)
    s = torch.sigmoid(b)
    return torch.cat([grad_output * s, grad_output * a * s * (1 - s)], dim)
