"""Rules for ops that work element by element: arithmetic, functions of one variable, comparisons that pick."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from typing import Any

import torch

from tfnb.gradients.rule_table import Forward, composite, conj, nograd, overloads, partials, rule

aten = torch.ops.aten

_FLAT = """
    bitwise_and bitwise_not bitwise_or bitwise_xor ceil eq floor floor_divide ge gt isfinite
    isinf isnan isneginf isposinf isreal le logical_and logical_not logical_or logical_xor lt ne round sign signbit
    trunc
    special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
    special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
    special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he
    special_laguerre_polynomial_l special_legendre_polynomial_p special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1 special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0
"""
for _name in _FLAT.split():
    nograd(*overloads(_name))

# -- functions of one variable ------------------------------------------------------------------------------


def _x(n: Forward) -> torch.Tensor:
    """The input, conjugate: f'(conj x) is the conjugate of f'(x) for the functions below."""
    return conj(n.inputs[0])


def _y(n: Forward) -> torch.Tensor:
    return conj(n.out)


_LN2, _LN10 = math.log(2.0), math.log(10.0)
_TWO_OVER_ROOT_PI = 2.0 / math.sqrt(math.pi)

partials(aten.abs.default, lambda n, dy: dy * n["self"].sgn())
partials(aten.acos.default, lambda n, dy: dy * -(1 - _x(n) * _x(n)).rsqrt())
partials(aten.acosh.default, lambda n, dy: dy * (_x(n) * _x(n) - 1).rsqrt())
partials(aten.asin.default, lambda n, dy: dy * (1 - _x(n) * _x(n)).rsqrt())
partials(aten.asinh.default, lambda n, dy: dy * (_x(n) * _x(n) + 1).rsqrt())
partials(aten.atan.default, lambda n, dy: dy / (_x(n) * _x(n) + 1))
partials(aten.atanh.default, lambda n, dy: dy / (1 - _x(n) * _x(n)))
partials(aten.cos.default, lambda n, dy: dy * -_x(n).sin())
partials(aten.cosh.default, lambda n, dy: dy * _x(n).sinh())
partials(aten.deg2rad.default, lambda n, dy: dy * (math.pi / 180))
partials(aten.digamma.default, lambda n, dy: dy * torch.polygamma(1, _x(n)))
partials(aten.erf.default, lambda n, dy: dy * (_TWO_OVER_ROOT_PI * (-_x(n) * _x(n)).exp()))
partials(aten.erfc.default, lambda n, dy: dy * (-_TWO_OVER_ROOT_PI * (-_x(n) * _x(n)).exp()))
partials(aten.erfinv.default, lambda n, dy: dy * ((_y(n) * _y(n)).exp() / _TWO_OVER_ROOT_PI))
partials(aten.exp.default, lambda n, dy: dy * _y(n))
partials(aten.exp2.default, lambda n, dy: dy * (_y(n) * _LN2))
partials(aten.expm1.default, lambda n, dy: dy * (_y(n) + 1))
partials(aten.frac.default, lambda n, dy: dy)
partials(aten.i0.default, lambda n, dy: dy * torch.special.i1(_x(n)))


def _by_second(op: Any, derivative: Callable[[Forward], torch.Tensor]) -> None:
    """An op whose derivative by its first argument nobody knows, torch neither."""

    def apply(n: Forward, dy: Any) -> Any:
        return NotImplemented if n.needs("self") else [None, lambda: dy * derivative(n)][-len(n.inputs) :]

    rule(op)(apply)


def _density(n: Forward) -> torch.Tensor:
    """Of the gamma distribution of shape ``self``, which igamma integrates."""
    a, x = n["self"], n["other"]
    return torch.exp((a - 1) * torch.log(x) - x - torch.lgamma(a))


def _zeta(n: Forward) -> torch.Tensor:
    return -n["self"] * torch.special.zeta(n["self"] + 1, n["other"])


_by_second(aten.igamma.default, _density)
_by_second(aten.igammac.default, lambda n: -_density(n))
for _op in (aten.special_zeta.default, aten.special_zeta.self_scalar, aten.special_zeta.other_scalar):
    _by_second(_op, _zeta)
partials(aten.lgamma.default, lambda n, dy: dy * _x(n).digamma())
partials(aten.log.default, lambda n, dy: dy / _x(n))
partials(aten.log10.default, lambda n, dy: dy / (_x(n) * _LN10))
partials(aten.log1p.default, lambda n, dy: dy / (_x(n) + 1))
partials(aten.log2.default, lambda n, dy: dy / (_x(n) * _LN2))
partials(aten.neg.default, lambda n, dy: -dy)
partials(aten.polygamma.default, lambda n, dy: dy * torch.polygamma(n["n"] + 1, _x(n)))
partials(aten.rad2deg.default, lambda n, dy: dy * (180 / math.pi))
partials(aten.reciprocal.default, lambda n, dy: -dy * _y(n) * _y(n))
partials(aten.rsqrt.default, lambda n, dy: dy * (-0.5 * _y(n) * _y(n) * _y(n)))
partials(aten.sin.default, lambda n, dy: dy * _x(n).cos())
partials(aten.sinh.default, lambda n, dy: dy * _x(n).cosh())
partials(aten.sqrt.default, lambda n, dy: dy / (2 * _y(n)))
partials(aten.tan.default, lambda n, dy: dy * (_y(n) * _y(n) + 1))
partials(aten.nan_to_num.default, lambda n, dy: dy * _x(n).isfinite())
partials(aten.special_entr.default, lambda n, dy: dy * (-_x(n).log() - 1).where(_x(n) >= 0, -math.inf))
partials(aten.special_erfcx.default, lambda n, dy: dy * (2 * _x(n) * _y(n) - _TWO_OVER_ROOT_PI))
partials(aten.special_i0e.default, lambda n, dy: dy * (torch.special.i1e(_x(n)) - _x(n).sgn() * _y(n)))
partials(aten.special_ndtri.default, lambda n, dy: dy * (math.sqrt(2 * math.pi) * (_y(n) * _y(n) / 2).exp()))
partials(
    aten.special_log_ndtr.default,  # phi(x) / Phi(x), through erfcx where Phi(x) would underflow
    lambda n, dy: dy / torch.special.erfcx(_x(n) * -math.sqrt(0.5)) * math.sqrt(2 / math.pi),
)


@rule(aten.special_i1.default)
def _(n: Forward, dy: Any) -> Any:
    x, near = n.inputs[0], n.inputs[0].abs() <= torch.finfo(n.inputs[0].dtype).eps
    inside = torch.where(near, 1.0, x)  # d i1 = i0 - i1/x, 1/2 at 0
    return (dy * torch.where(near, 0.5, torch.i0(inside) - n.out / inside),)


@rule(aten.special_i1e.default)
def _(n: Forward, dy: Any) -> Any:
    x, near = n.inputs[0], n.inputs[0].abs() <= torch.finfo(n.inputs[0].dtype).eps
    inside = torch.where(near, 1.0, x)
    return (dy * torch.where(near, 0.5, torch.special.i0e(inside) - n.out * (x.sgn() + 1 / inside)),)


@rule(aten.frexp.Tensor, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    return (dy / torch.exp2(n.outs[1]),)


@rule(aten.nextafter.default)
def _(n: Forward, dy: Any) -> Any:
    same = n["self"] == n["other"]
    return lambda: dy.masked_fill(same, 0.0), lambda: dy.where(same, 0.0)


@rule(aten.sinc.default)
def _(n: Forward, dy: Any) -> Any:
    x = _x(n) * math.pi
    inside = torch.where(x == 0, 1.0, x)
    return (dy * torch.where(x == 0, 0.0, math.pi * (x * x.cos() - x.sin()) / inside / inside),)


@rule(aten.logit.default)
def _(n: Forward, dy: Any) -> Any:
    x, eps = n.inputs[0], n["eps"]
    dx = dy / (x * (1 - x))
    if eps is None:
        return (dx.where((x >= 0) & (x <= 1), math.nan),)
    return (dx.where((x >= eps) & (x <= 1 - eps), 0.0),)


@composite(aten.mvlgamma.default)
def _(self: torch.Tensor, p: int) -> torch.Tensor:
    terms = [(self - i / 2).lgamma() for i in range(p)]
    return sum(terms[1:], terms[0]) + p * (p - 1) / 4 * math.log(math.pi)


# -- arithmetic of two ----------------------------------------------------------------------------------------


def _c(n: Forward, name: str) -> Any:
    """An argument, tensor or number, conjugate."""
    return conj(n[name]) if isinstance(n[name], torch.Tensor) else _conjugate(n[name])


def _conjugate(number: Any) -> Any:
    return number.conjugate() if isinstance(number, complex) else number


partials(aten.add.Scalar, lambda n, dy: dy)
partials(aten.add.Tensor, lambda n, dy: dy, lambda n, dy: _times(dy, n["alpha"]))
partials(aten.sub.Scalar, lambda n, dy: dy)
partials(aten.sub.Tensor, lambda n, dy: dy, lambda n, dy: _times(-dy, n["alpha"]))
partials(aten.rsub.Scalar, lambda n, dy: _times(-dy, n["alpha"]))
partials(aten.rsub.Tensor, lambda n, dy: _times(-dy, n["alpha"]), lambda n, dy: dy)
partials(aten.mul.Scalar, lambda n, dy: dy * _c(n, "other"))
partials(aten.mul.Tensor, lambda n, dy: dy * _c(n, "other"), lambda n, dy: dy * _c(n, "self"))
partials(aten.div.Scalar, lambda n, dy: dy / _c(n, "other"))
partials(aten.div.Tensor, lambda n, dy: dy / _c(n, "other"), lambda n, dy: -dy * (_y(n) / _c(n, "other")))
partials(aten.addcdiv.default, lambda n, dy: dy, lambda n, dy: _times(dy, n["value"]) / _c(n, "tensor2"),
         lambda n, dy: _times(-dy, n["value"]) * _c(n, "tensor1") / (_c(n, "tensor2") * _c(n, "tensor2")))  # fmt: skip
partials(aten.addcmul.default, lambda n, dy: dy, lambda n, dy: _times(dy, n["value"]) * _c(n, "tensor2"),
         lambda n, dy: _times(dy, n["value"]) * _c(n, "tensor1"))  # fmt: skip
partials(aten.lerp.Scalar, lambda n, dy: dy * (1 - _c(n, "weight")), lambda n, dy: dy * _c(n, "weight"))
partials(aten.lerp.Tensor, lambda n, dy: dy * (1 - _c(n, "weight")), lambda n, dy: dy * _c(n, "weight"),
         lambda n, dy: dy * conj(n["end"] - n["self"]))  # fmt: skip


def _times(dy: torch.Tensor, factor: Any) -> torch.Tensor:
    return dy if factor == 1 else dy * _conjugate(factor)


@rule(aten.div.Tensor_mode, aten.div.Scalar_mode)
def _(n: Forward, dy: Any) -> Any:
    if n["rounding_mode"] is not None:
        return (None,) * len(n.inputs)
    a, b = _c(n, "self"), _c(n, "other")
    return {"self": lambda: dy / b, "other": lambda: -dy * (a / b / b)}


@rule(aten.fmod.Tensor, aten.remainder.Tensor)
def _(n: Forward, dy: Any) -> Any:
    mode = "trunc" if "fmod" in n.op else "floor"
    return {"self": dy, "other": lambda: -dy * torch.div(n["self"], n["other"], rounding_mode=mode)}


partials(aten.fmod.Scalar, lambda n, dy: dy)
partials(aten.remainder.Scalar, lambda n, dy: dy)
partials(aten.remainder.Scalar_Tensor, lambda n, dy: -dy * torch.div(n["self"], n["other"], rounding_mode="floor"))


@rule(aten.pow.Tensor_Scalar)
def _(n: Forward, dy: Any) -> Any:
    x, exponent = _x(n), _c(n, "exponent")
    if exponent == 0:
        return (None,)
    if exponent == 2:
        return (dy * (2 * x),)
    return (dy * (exponent * x.pow(exponent - 1)),)


def _pow_exponent(n: Forward, dy: torch.Tensor) -> torch.Tensor:
    """dy * out * log(base), and 0 where the base is 0 and the exponent not negative."""
    base, exponent = n["self"], _c(n, "exponent")
    decays = exponent.real >= 0
    if isinstance(base, torch.Tensor):
        zero = (base == 0) & decays
        return dy * torch.where(zero, 0.0, _y(n) * conj(base).masked_fill(zero, 1).log())
    if n.out.is_complex() and base != 0:
        return dy * (_y(n) * cmath.log(base).conjugate())
    return dy * (_y(n) * math.log(base)) if base > 0 else dy * torch.where(decays, 0.0, _y(n) * math.nan)


def _pow_base(n: Forward, dy: torch.Tensor) -> torch.Tensor:
    base, exponent = _c(n, "self"), _c(n, "exponent")
    return dy * torch.where(exponent == 0, 0.0, exponent * base.pow(exponent - 1))


partials(aten.pow.Scalar, _pow_exponent)
partials(aten.pow.Tensor_Tensor, _pow_base, _pow_exponent)


@rule(aten.atan2.default)
def _(n: Forward, dy: Any) -> Any:
    y, x = n.inputs
    square = x * x + y * y
    scaled = (dy / square).masked_fill(square == 0, 0.0)
    return lambda: scaled * x, lambda: -scaled * y


@rule(aten.hypot.default)
def _(n: Forward, dy: Any) -> Any:
    a, b = n.inputs
    return lambda: dy * (a / n.out), lambda: dy * (b / n.out)


@rule(aten.copysign.Tensor, aten.copysign.Scalar)
def _(n: Forward, dy: Any) -> Any:
    x = n["self"]
    ratio = torch.where(x == 0, 0.0, n.out / x)
    return [dy * ratio] + [None] * (len(n.inputs) - 1)


@rule(aten.ldexp.Tensor)
def _(n: Forward, dy: Any) -> Any:
    return {"self": lambda: dy * torch.exp2(_c(n, "other")), "other": lambda: dy * (_y(n) * _LN2)}


@rule(aten.logaddexp.default)
def _(n: Forward, dy: Any) -> Any:
    a, b = map(conj, n.inputs)
    return lambda: dy * torch.sigmoid(a - b), lambda: dy * torch.sigmoid(b - a)


@rule(aten.logaddexp2.default)
def _(n: Forward, dy: Any) -> Any:
    a, b = map(conj, n.inputs)
    return lambda: dy / (1 + torch.exp2(b - a)), lambda: dy / (1 + torch.exp2(a - b))


@rule(aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other)
def _(n: Forward, dy: Any) -> Any:
    x, y = n["self"], n["other"]

    def first() -> torch.Tensor:
        logarithm = y.log() if isinstance(y, torch.Tensor) else math.log(y)
        return dy * (logarithm * ~((x == 0) & (torch.as_tensor(y) <= 0)))

    return {"self": first, "other": lambda: dy * (x / y)}


@rule(aten.special_xlog1py.default)
def _(n: Forward, dy: Any) -> Any:
    x, y = n["self"], n["other"]
    return lambda: dy * y.log1p().masked_fill((x == 0) & (y <= -1), 0.0), lambda: dy * (x / (y + 1))


# -- picking --------------------------------------------------------------------------------------------------


def _pick(n: Forward, dy: torch.Tensor, first_wins: torch.Tensor, tie: torch.Tensor) -> Any:
    """All of dy to the winner, half to each on a tie."""
    shared = torch.where(tie, dy / 2, dy)
    return lambda: shared.where(first_wins | tie, 0.0), lambda: shared.where(~first_wins, 0.0)


@rule(aten.maximum.default)
def _(n: Forward, dy: Any) -> Any:
    a, b = n.inputs
    return _pick(n, dy, a > b, a == b)


@rule(aten.minimum.default)
def _(n: Forward, dy: Any) -> Any:
    a, b = n.inputs
    return _pick(n, dy, a < b, a == b)


@rule(aten.fmax.default)
def _(n: Forward, dy: Any) -> Any:
    a, b = n.inputs
    first = (a >= b) | b.isnan()
    return lambda: dy.where(first, 0.0), lambda: dy.where(~first, 0.0)


@rule(aten.fmin.default)
def _(n: Forward, dy: Any) -> Any:
    a, b = n.inputs
    first = (a <= b) | b.isnan()
    return lambda: dy.where(first, 0.0), lambda: dy.where(~first, 0.0)


def _inside(n: Forward, x: torch.Tensor) -> torch.Tensor | None:
    """Where clamp let ``x`` through."""
    low = None if n["min"] is None else x >= n["min"]
    high = None if n["max"] is None else x <= n["max"]
    return high if low is None else low if high is None else low & high


@rule(aten.clamp.default)
def _(n: Forward, dy: Any) -> Any:
    return (dy.where(_inside(n, n["self"]), 0.0),)


@rule(aten.clamp.Tensor)
def _(n: Forward, dy: Any) -> Any:
    x, low, high = n["self"], n["min"], n["max"]

    def below() -> torch.Tensor:
        lost = x < low if high is None else (x < low) & (low < high)
        return dy.where(lost, 0.0)

    def above() -> torch.Tensor:
        lost = x > high if low is None else (x > high) | (low > high)
        return dy.where(lost, 0.0)

    return {"self": lambda: dy.where(_inside(n, x), 0.0), "min": below, "max": above}


partials(aten.clamp_min.default, lambda n, dy: dy.where(n["self"] >= n["min"], 0.0))
partials(aten.clamp_max.default, lambda n, dy: dy.where(n["self"] <= n["max"], 0.0))
partials(aten.clamp_min.Tensor, lambda n, dy: dy.where(n["self"] >= n["min"], 0.0),
         lambda n, dy: dy.where(n["self"] < n["min"], 0.0))  # fmt: skip
partials(aten.clamp_max.Tensor, lambda n, dy: dy.where(n["self"] <= n["max"], 0.0),
         lambda n, dy: dy.where(n["self"] > n["max"], 0.0))  # fmt: skip
partials(aten.where.self, None, lambda n, dy: dy.where(n["condition"], 0.0),
         lambda n, dy: dy.where(~n["condition"], 0.0))  # fmt: skip
partials(aten.masked_fill.Scalar, lambda n, dy: dy.masked_fill(n["mask"], 0.0), None)
partials(aten.masked_fill.Tensor, lambda n, dy: dy.masked_fill(n["mask"], 0.0), None,
         lambda n, dy: dy.where(n["mask"], 0.0))  # fmt: skip
