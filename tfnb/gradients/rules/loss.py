"""Rules for losses: torch's backward kernels, and their second order."""

from __future__ import annotations

from typing import Any

import torch

from tfnb.gradients.rule_table import Forward, composite, rule

aten = torch.ops.aten


def _reduced(loss: torch.Tensor, reduction: int) -> torch.Tensor:
    """torch's reduction codes: 0 none, 1 mean, 2 sum."""
    return loss if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()


# -- negative log likelihood: linear in the input --------------------------------------------------------------

for _name in ("nll_loss", "nll_loss2d"):
    _forward, _backward = getattr(aten, f"{_name}_forward").default, getattr(aten, f"{_name}_backward").default

    @rule(_forward, outputs=1)
    def _(n: Forward, dy: Any, back: Any = _backward) -> Any:
        dx = back(dy, n["self"], n["target"], n["weight"], n["reduction"], n["ignore_index"], n.outs[1])
        return {"self": dx}

    @rule(_backward)
    def _(n: Forward, dd: Any, forward: Any = _forward) -> Any:
        # the loss of dd itself, with the same weights
        return {"grad_output": forward(dd, n["target"], n["weight"], n["reduction"], n["ignore_index"])[0]}


# -- differences: both sides, one kernel -----------------------------------------------------------------------


def _two_sided(name: str, *extra: str) -> None:
    """A loss of input - target: its backward kernel serves the target with the sides swapped."""
    back = getattr(aten, f"{name}_backward").default

    def apply(n: Forward, dy: Any) -> Any:
        a, b = n["self"], n["target"]
        more = [n[argument] for argument in ("reduction", *extra)]
        return {"self": lambda: back(dy, a, b, *more), "target": lambda: back(dy, b, a, *more)}

    rule(getattr(aten, name).default)(apply)


_two_sided("mse_loss")
_two_sided("smooth_l1_loss", "beta")
_two_sided("huber_loss", "delta")


def _share(x: torch.Tensor, target: torch.Tensor, reduction: int) -> Any:
    """What the mean divides by."""
    return torch.broadcast_tensors(x, target)[0].numel() if reduction == 1 else 1


@composite(aten.mse_loss_backward.default)
def _(grad_output: Any, self: Any, target: Any, reduction: int) -> Any:
    return grad_output * (self - target) * 2 / _share(self, target, reduction)


@composite(aten.smooth_l1_loss_backward.default)
def _(grad_output: Any, self: Any, target: Any, reduction: int, beta: float) -> Any:
    d = self - target
    slope = torch.where(d.abs() < beta, d / beta, d.sgn()) if beta > 0 else d.sgn()
    return grad_output * slope / _share(self, target, reduction)


@composite(aten.huber_loss_backward.default)
def _(grad_output: Any, self: Any, target: Any, reduction: int, delta: float) -> Any:
    d = self - target
    return grad_output * d.clamp(-delta, delta) / _share(self, target, reduction)


# -- binary cross entropy --------------------------------------------------------------------------------------


@composite(aten.binary_cross_entropy.default)
def _(self: Any, target: Any, weight: Any = None, reduction: int = 1) -> Any:
    loss = (target - 1) * (-self).log1p().clamp_min(-100) - target * self.log().clamp_min(-100)
    return _reduced(loss if weight is None else loss * weight, reduction)


@rule(aten.binary_cross_entropy.default)
def _(n: Forward, dy: Any) -> Any:
    x, target, weight, reduction = n["self"], n["target"], n["weight"], n["reduction"]

    def to_target() -> torch.Tensor:
        slope = (1 - x).log().clamp_min(-100) - x.log().clamp_min(-100)
        scaled = dy * slope if weight is None else dy * slope * weight
        return scaled / x.numel() if reduction == 1 else scaled

    return {
        "self": lambda: aten.binary_cross_entropy_backward(dy, x, target, weight, reduction),
        "target": to_target,
    }


@composite(aten.binary_cross_entropy_backward.default)
def _(grad_output: Any, self: Any, target: Any, weight: Any = None, reduction: int = 1) -> Any:
    slope = grad_output * (self - target) / ((1 - self) * self).clamp_min(1e-12)
    slope = slope if weight is None else slope * weight
    return slope / self.numel() if reduction == 1 else slope


@rule(aten.binary_cross_entropy_with_logits.default)
def _(n: Forward, dy: Any) -> Any:
    x, target, weight, pos = n["self"], n["target"], n["weight"], n["pos_weight"]
    scaled = dy if weight is None else dy * weight
    scaled = scaled / x.numel() if n["reduction"] == 1 else scaled

    def to_input() -> torch.Tensor:
        if pos is None:
            return scaled * (torch.sigmoid(x) - target)
        t = pos * target
        return scaled * ((t + 1 - target) * torch.sigmoid(x) - t)

    def to_target() -> torch.Tensor:
        if pos is None:
            return scaled * -x
        return scaled * (pos * torch.nn.functional.softplus(-x) - torch.nn.functional.softplus(x))

    return {"self": to_input, "target": to_target}


# -- margins ---------------------------------------------------------------------------------------------------


@composite(aten.soft_margin_loss.default)
def _(self: Any, target: Any, reduction: int = 1) -> Any:
    return _reduced(torch.nn.functional.softplus(-target * self), reduction)


@composite(aten.multi_margin_loss.default)
def _(self: Any, target: Any, p: Any = 1, margin: Any = 1, weight: Any = None, reduction: int = 1) -> Any:
    rows = self if self.dim() == 2 else self.reshape(1, -1)
    target = target.reshape(-1, 1)
    loss = (margin - rows.gather(1, target) + rows).clamp_min(0)
    loss = loss * loss if p == 2 else loss
    loss = loss if weight is None else loss * weight[target]
    loss = loss.scatter(1, target, 0.0).mean(1)
    return _reduced(loss if self.dim() == 2 else loss.reshape([]), reduction)


@rule(aten.multilabel_margin_loss_forward.default, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    args = (n["self"], n["target"], n["reduction"], n.outs[1])
    return aten.multilabel_margin_loss_backward(dy, *args), None


@composite(aten.multilabel_margin_loss_backward.default)
def _(grad_output: Any, self: Any, target: Any, reduction: int, is_target: Any) -> Any:
    ones = torch.ones_like(grad_output)  # piecewise linear: the slope is a constant
    slope = aten.multilabel_margin_loss_backward(ones, self, target, reduction, is_target).detach()
    return slope * (grad_output.unsqueeze(-1) if grad_output.dim() and reduction == 0 else grad_output)


# -- a linear layer and its cross entropy in one op, by chunks of rows ------------------------------------------


@composite("torch_nn._linear_cross_entropy_batch_chunked.default")
def _(input: Any, linear_weight: Any, target: Any, linear_bias: Any, weight: Any, reduction: str, ignore_index: int,
      label_smoothing: float, *chunking: Any) -> Any:  # fmt: skip
    rows = torch.nn.functional.linear(input, linear_weight, linear_bias)
    loss = torch.nn.functional.cross_entropy(
        rows, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    return loss, None, None, None  # the others are saved gradients


@composite("torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default")
def _(input: Any, linear_weight: Any, target: Any, linear_bias: Any, weight: Any, ignore_index: int,
      *chunking: Any) -> Any:  # fmt: skip
    rows = torch.nn.functional.linear(input, linear_weight, linear_bias)
    return torch.nn.functional.cross_entropy(rows, target, weight, ignore_index=ignore_index, reduction="none")


# -- connectionist temporal classification ---------------------------------------------------------------------


@rule(aten._ctc_loss.default, aten._ctc_loss.Tensor, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    names = ("log_probs", "targets", "input_lengths", "target_lengths")
    back = aten._ctc_loss_backward.Tensor if n.op.endswith("Tensor") else aten._ctc_loss_backward.default
    dx = back(dy, *(n[a] for a in names), n.outs[0], n.outs[1], n["blank"], n["zero_infinity"])
    return [dx] + [None] * (len(n.inputs) - 1)
