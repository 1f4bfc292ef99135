"""Rules for losses: torch's backward kernels."""

from __future__ import annotations

from typing import Any

import torch

from tfnb.gradients.rule_table import Forward, composite, partials, rule

aten = torch.ops.aten


for _name in ("nll_loss", "nll_loss2d"):
    _forward, _backward = getattr(aten, f"{_name}_forward").default, getattr(aten, f"{_name}_backward").default

    @rule(_forward, outputs=1, saves=True)
    def _(n: Forward, dy: torch.Tensor, back: Any = _backward) -> Any:
        dx = back(dy, n["self"], n["target"], n["weight"], n["reduction"], n["ignore_index"], n.outs[1])
        return {"self": dx}


partials(aten.mse_loss.default,
         lambda n, dy: aten.mse_loss_backward(dy, n["self"], n["target"], n["reduction"]),
         lambda n, dy: aten.mse_loss_backward(dy, n["target"], n["self"], n["reduction"]))  # fmt: skip

# -- a linear layer and its cross entropy in one op, by chunks of rows ------------------------------------------


@composite("torch_nn._linear_cross_entropy_batch_chunked.default")
def _(
    input: torch.Tensor, linear_weight: torch.Tensor, target: torch.Tensor, linear_bias: torch.Tensor | None,
    weight: torch.Tensor | None, reduction: str, ignore_index: int, label_smoothing: float, *chunking: object,
) -> tuple[torch.Tensor, None, None, None]:  # fmt: skip
    rows = torch.nn.functional.linear(input, linear_weight, linear_bias)
    loss = torch.nn.functional.cross_entropy(
        rows, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    return loss, None, None, None  # the others are saved gradients


@composite("torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default")
def _(
    input: torch.Tensor, linear_weight: torch.Tensor, target: torch.Tensor, linear_bias: torch.Tensor | None,
    weight: torch.Tensor | None, ignore_index: int, *chunking: object,
) -> torch.Tensor:  # fmt: skip
    rows = torch.nn.functional.linear(input, linear_weight, linear_bias)
    return torch.nn.functional.cross_entropy(rows, target, weight, ignore_index=ignore_index, reduction="none")
