"""Rules for complex tensors: their parts, Fourier transforms, and which rules of the other families hold for them.

Cotangents are conjugate Wirtinger derivatives, as in torch. Where the input is real the walker takes the real part.
"""

from __future__ import annotations

from typing import Any

import torch

from tfnb.gradients.rule_table import COMPLEX, Forward, partials, rule

aten = torch.ops.aten

# -- parts -----------------------------------------------------------------------------------------------------

partials(aten._conj_physical.default, lambda n, dy: dy.conj())
partials(aten.view_as_real.default, lambda n, dy: torch.view_as_complex(dy.contiguous()))
partials(aten.view_as_complex.default, lambda n, dy: torch.view_as_real(dy))
partials(aten.complex.default, lambda n, dy: dy, lambda n, dy: dy.imag)
# not dy times the sign of the result: the length may be 0 or negative
partials(aten.polar.default, lambda n, dy: dy * torch.polar(torch.ones_like(n["abs"]), -n["angle"]),
         lambda n, dy: dy * n.out.conj() * -1j)  # fmt: skip


@rule(aten.angle.default)
def _(n: Forward, dy: Any) -> Any:
    z = n["self"]
    if not z.is_complex():
        return (dy * 0,)  # 0 or pi
    size = (z * z.conj()).real
    return ((dy / size).masked_fill(size == 0, 0.0) * (z * 1j),)


@rule(aten.sgn.default)
def _(n: Forward, dy: Any) -> Any:
    if not dy.is_complex():
        return (dy * 0,)
    size = n["self"].abs()
    across = dy - n.out * (dy * n.out.conj()).real  # what moves along the radius is lost
    return ((across / size).masked_fill(size == 0, 0.0),)


# -- Fourier transforms: linear, so each is the transform back -------------------------------------------------


def _c2c(dy: torch.Tensor, n: Forward, forward: bool) -> torch.Tensor:
    return aten._fft_c2c(dy, n["dim"], n["normalization"], forward)


partials(aten._fft_c2c.default, lambda n, dy: _c2c(dy, n, not n["forward"]))


@rule(aten._fft_r2c.default)
def _(n: Forward, dy: Any) -> Any:
    last = n["dim"][-1]
    if n["onesided"]:  # the other half was not returned
        dy = _padded(dy, last, n["self"].shape[last] - dy.shape[last])
    return (_c2c(dy, n, False),)


@rule(aten._fft_c2r.default)
def _(n: Forward, dy: Any) -> Any:
    last = n["dim"][-1]
    half = aten._fft_r2c(dy, n["dim"], n["normalization"], True)
    twice = dy.shape[last] - half.shape[last]  # these were read for themselves and for their mirror images
    inner = half.narrow(last, 1, twice)
    rest = half.shape[last] - twice - 1
    return (torch.cat([half.narrow(last, 0, 1), inner * 2, half.narrow(last, twice + 1, rest)], last),)


def _padded(x: torch.Tensor, dim: int, count: Any) -> torch.Tensor:
    return aten.constant_pad_nd(x, [0, 0] * (x.dim() - 1 - dim % x.dim()) + [0, count])


# -- rules of all families that hold for complex tensors: the others refuse them -------------------------------

_HOLD = """
    _conj_physical _fft_c2c _fft_c2r _fft_r2c _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd
    _to_copy _unsafe_masked_index _unsafe_masked_index_put_accumulate _unsafe_view abs acos acosh add.Scalar add.Tensor
    addbmm addcdiv addcmul addmm addmv addr alias alias_copy angle as_strided as_strided_scatter asin
    asinh atan atanh baddbmm block_diag bmm cat channel_shuffle cholesky_inverse cholesky_solve clone col2im complex
    constant_pad_nd convolution convolution_backward copy cos cosh cumprod cumsum diag_embed diagonal diagonal_backward
    diagonal_copy diagonal_scatter div.Scalar div.Tensor dot exp exp2 expand expand_copy expm1 fill.Tensor flip gather
    im2col index.Tensor index_add index_copy index_fill.int_Scalar index_fill.int_Tensor index_put index_select
    ldexp.Tensor lerp.Scalar lerp.Tensor linalg_cholesky_ex linalg_cross linalg_eig linalg_inv_ex linalg_lstsq
    linalg_lu linalg_lu_factor_ex linalg_matrix_exp linalg_pinv.atol_rtol_tensor linalg_qr linalg_solve_triangular
    linalg_vector_norm log log10 log1p log2 logaddexp logsumexp lu_unpack masked_fill.Scalar masked_fill.Tensor
    masked_scatter masked_select mean mean.dim mm mul.Scalar mul.Tensor mv narrow_copy neg norm.Scalar
    norm.ScalarOpt_dim permute permute_copy pixel_shuffle pixel_unshuffle polar pow.Scalar pow.Tensor_Scalar
    pow.Tensor_Tensor prod prod.dim_int put reciprocal reflection_pad1d reflection_pad1d_backward reflection_pad2d
    reflection_pad2d_backward reflection_pad3d reflection_pad3d_backward repeat replication_pad1d
    replication_pad1d_backward replication_pad2d replication_pad2d_backward replication_pad3d
    replication_pad3d_backward roll rot90 rsqrt rsub.Scalar rsub.Tensor scatter.src scatter.value scatter_add
    select.int select_backward select_scatter sgn sigmoid sigmoid_backward sin sinc sinh slice.Tensor slice_backward
    slice_scatter split.Tensor split_with_sizes split_with_sizes_copy sqrt squeeze squeeze.dim squeeze.dims
    squeeze_copy squeeze_copy.dim stack std.correction std_mean.correction sub.Tensor sum sum.dim_IntList t t_copy take
    tan tanh tanh_backward trace transpose.int transpose_copy.int tril triu unbind.int unbind_copy.int unfold
    unfold_backward unfold_copy unsafe_split.Tensor unsqueeze unsqueeze_copy var.correction var_mean.correction vdot
    view view_as_complex view_as_real view_copy where.self
"""
for _name in _HOLD.split():
    _name = _name if _name.startswith(("prims.", "tfnb.")) else f"aten.{_name}"
    COMPLEX.add(_name if _name.count(".") > 1 or _name.startswith("tfnb.") else f"{_name}.default")
