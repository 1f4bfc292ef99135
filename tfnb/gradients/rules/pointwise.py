"""Rules for the arithmetic and the functions that most nets are made of; for the others autograd's formulas serve."""

from __future__ import annotations

from typing import Any

import torch

from tfnb.gradients.rule_table import Forward, nograd, overloads, partials, rule

aten = torch.ops.aten

nograd(*overloads("floor_divide"))
for _name in ("ceil", "floor", "round", "sign", "trunc"):  # zeros, as in torch: weight decay and momentum go on
    for _op in overloads(_name):
        partials(_op, lambda n, dy: torch.zeros_like(dy))

# -- functions of one variable ------------------------------------------------------------------------------

partials(aten.abs.default, lambda n, dy: dy * n["self"].sgn())
partials(aten.cos.default, lambda n, dy: dy * -n["self"].sin())
partials(aten.exp.default, lambda n, dy: dy * n.out)
partials(aten.log.default, lambda n, dy: dy / n["self"])
partials(aten.neg.default, lambda n, dy: -dy)
partials(aten.reciprocal.default, lambda n, dy: -dy * n.out * n.out)
partials(aten.rsqrt.default, lambda n, dy: dy * (-0.5 * n.out * n.out * n.out))
partials(aten.sgn.default, lambda n, dy: dy * 0)
partials(aten.sin.default, lambda n, dy: dy * n["self"].cos())
partials(aten.sqrt.default, lambda n, dy: dy / (2 * n.out))

# -- arithmetic of two ----------------------------------------------------------------------------------------


def _times(dy: torch.Tensor, factor: Any) -> torch.Tensor:
    return dy if factor == 1 else dy * factor


partials(aten.add.Scalar, lambda n, dy: dy)
partials(aten.add.Tensor, lambda n, dy: dy, lambda n, dy: _times(dy, n["alpha"]))
partials(aten.sub.Scalar, lambda n, dy: dy)
partials(aten.sub.Tensor, lambda n, dy: dy, lambda n, dy: _times(-dy, n["alpha"]))
partials(aten.rsub.Scalar, lambda n, dy: _times(-dy, n["alpha"]))
partials(aten.rsub.Tensor, lambda n, dy: _times(-dy, n["alpha"]), lambda n, dy: dy)
partials(aten.mul.Scalar, lambda n, dy: dy * n["other"])
partials(aten.mul.Tensor, lambda n, dy: dy * n["other"], lambda n, dy: dy * n["self"])
partials(aten.div.Scalar, lambda n, dy: dy / n["other"])
partials(aten.div.Tensor, lambda n, dy: dy / n["other"], lambda n, dy: -dy * (n.out / n["other"]))


@rule(aten.pow.Tensor_Scalar)
def _(n: Forward, dy: torch.Tensor) -> Any:
    x, exponent = n["self"], n["exponent"]
    if exponent == 0:
        return (torch.zeros_like(dy),)
    if exponent == 2:
        return (dy * (2 * x),)
    return (dy * (exponent * x.pow(exponent - 1)),)


# -- picking --------------------------------------------------------------------------------------------------

partials(aten.where.self, None, lambda n, dy: dy.where(n["condition"], 0.0),
         lambda n, dy: dy.where(~n["condition"], 0.0))  # fmt: skip
partials(aten.masked_fill.Scalar, lambda n, dy: dy.masked_fill(n["mask"], 0.0), None)
