"""Rules for products of matrices and vectors, and for factorisations and solves.

Factorisations follow Giles, "Collected matrix derivative results for forward and reverse mode algorithmic
differentiation" (2008), real matrices only.
"""

from __future__ import annotations

from typing import Any

import torch

from tfnb.gradients.rules.shape import turned
from tfnb.gradients.table import Forward, composite, nograd, rule

aten = torch.ops.aten

nograd(
    aten._linalg_check_errors.default, aten.geqrf.default, aten.linalg_ldl_factor_ex.default,
    aten.linalg_ldl_solve.default, aten.linalg_matrix_rank.default,
)  # fmt: skip

# -- products --------------------------------------------------------------------------------------------------


def _product(a: Any, b: Any, like: Any, *, turn: str = "") -> Any:
    """``a @ b``, those in ``turn`` transposed, in the memory layout of ``like``: a gradient lies as what it updates."""
    rows, columns = like.stride()[-2:]
    if isinstance(rows, int) and rows == 1 and not (isinstance(columns, int) and columns == 1):
        return ((b if "b" in turn else turned(b)) @ (a if "a" in turn else turned(a))).mT
    return (turned(a) if "a" in turn else a) @ (turned(b) if "b" in turn else b)


@rule(aten.mm.default, aten.bmm.default)
def _(n: Forward, dy: Any) -> Any:  # [.., B, K] @ [.., K, N] -> [.., B, N]
    a, b = n.inputs
    return lambda: _product(dy, b, a, turn="b"), lambda: _product(a, dy, b, turn="a")


@rule(aten.mv.default)
def _(n: Forward, dy: Any) -> Any:
    a, v = n.inputs
    return lambda: torch.outer(dy, v), lambda: a.t() @ dy


@rule(aten.dot.default, aten.vdot.default)
def _(n: Forward, dy: Any) -> Any:
    a, b = n.inputs
    return lambda: dy * b, lambda: dy * a


def _times(x: torch.Tensor, factor: Any) -> torch.Tensor:
    return x if factor == 1 else x * factor


@rule(aten.addmm.default, aten.baddbmm.default)
def _(n: Forward, dy: Any) -> Any:  # beta * bias + alpha * a @ b
    _, a, b = n.inputs
    scaled = _times(dy, n["alpha"])
    return (
        lambda: _times(dy, n["beta"]),
        lambda: _product(scaled, b, a, turn="b"),
        lambda: _product(a, scaled, b, turn="a"),
    )


@rule(aten.addmv.default)
def _(n: Forward, dy: Any) -> Any:
    _, a, v = n.inputs
    scaled = _times(dy, n["alpha"])
    return lambda: _times(dy, n["beta"]), lambda: torch.outer(scaled, v), lambda: a.t() @ scaled


@rule(aten.addr.default)
def _(n: Forward, dy: Any) -> Any:
    _, a, b = n.inputs
    scaled = _times(dy, n["alpha"])
    return lambda: _times(dy, n["beta"]), lambda: scaled @ b, lambda: scaled.t() @ a


@rule(aten.addbmm.default)
def _(n: Forward, dy: Any) -> Any:
    _, a, b = n.inputs
    scaled = _times(dy, n["alpha"])
    return lambda: _times(dy, n["beta"]), lambda: scaled @ b.mT, lambda: a.mT @ scaled


@rule(aten.linalg_cross.default)
def _(n: Forward, dy: Any) -> Any:
    a, b = n.inputs
    return lambda: aten.linalg_cross(b, dy, dim=n["dim"]), lambda: aten.linalg_cross(dy, a, dim=n["dim"])


@composite(aten._trilinear.default)
def _(i1: Any, i2: Any, i3: Any, expand1: Any, expand2: Any, expand3: Any, sumdim: Any, unroll_dim: int = 1) -> Any:
    for dims, which in ((expand1, 0), (expand2, 1), (expand3, 2)):
        for dim in sorted(dims):
            i1, i2, i3 = (t.unsqueeze(dim) if k == which else t for k, t in enumerate((i1, i2, i3)))
    product = i1 * i2 * i3
    return product.sum(sumdim) if sumdim else product


# -- solves and factorisations ---------------------------------------------------------------------------------


@rule(aten.linalg_inv_ex.default, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    inverse = n.out.mT
    return (-inverse @ dy @ inverse,)


@rule(aten.linalg_matrix_exp.default)
def _(n: Forward, dy: Any) -> Any:
    a = n["self"].mT  # exp of [[A', dY], [0, A']] holds the cotangent in its upper right block
    zero = torch.zeros_like(a)
    big = torch.cat([torch.cat([a, dy], -1), torch.cat([zero, a], -1)], -2)
    size = a.shape[-1]
    return (torch.linalg.matrix_exp(big)[..., :size, size:],)


@rule(aten._linalg_det.default, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    return ((dy * n.out)[..., None, None] * torch.linalg.inv(n["A"]).mT,)


@rule(aten._linalg_slogdet.default, outputs=2)
def _(n: Forward, dys: Any) -> Any:
    return (dys[1][..., None, None] * torch.linalg.inv(n["A"]).mT,)


@rule(aten.linalg_cholesky_ex.default, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    low = n.out.mT if n["upper"] else n.out
    dlow = dy.mT if n["upper"] else dy
    inner = (low.mT @ dlow.tril()).tril()
    inner = inner + inner.tril(-1).mT  # symmetric, so one triangular solve from each side
    half = torch.linalg.solve_triangular(low.mT, inner, upper=True)
    return (torch.linalg.solve_triangular(low, half, upper=False, left=False) / 2,)


@composite(aten.cholesky.default)
def _(self: torch.Tensor, upper: bool = False) -> torch.Tensor:
    return torch.linalg.cholesky_ex(self, upper=upper).L


@composite(aten.cholesky_inverse.default)
def _(self: torch.Tensor, upper: bool = False) -> torch.Tensor:
    return torch.linalg.inv(self.triu().mT @ self.triu() if upper else self.tril() @ self.tril().mT)


@composite(aten.cholesky_solve.default)
def _(self: torch.Tensor, input2: torch.Tensor, upper: bool = False) -> torch.Tensor:
    low = input2.mT if upper else input2
    half = torch.linalg.solve_triangular(low, self, upper=False)
    return torch.linalg.solve_triangular(low.mT, half, upper=True)


@rule(aten.linalg_solve_triangular.default)
def _(n: Forward, dy: Any) -> Any:
    a, x, left, upper, unit = n["self"], n.out, n["left"], n["upper"], n["unitriangular"]
    db = aten.linalg_solve_triangular(a.mT, dy, upper=not upper, left=left, unitriangular=unit)

    def factor() -> torch.Tensor:
        da = -(db @ x.mT if left else x.mT @ db)
        return da.triu(int(unit)) if upper else da.tril(-int(unit))

    return factor, db


@composite(aten.triangular_solve.default)
def _(self: Any, A: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False) -> Any:
    left, upper = (A.mT, not upper) if transpose else (A, upper)
    return aten.linalg_solve_triangular(left, self, upper=upper, unitriangular=unitriangular), A.clone()


@rule(aten._linalg_solve_ex.default, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    a, b, x, left = n["A"], n["B"], n.out, n["left"]
    vector = b.dim() == 1 or (b.dim() == a.dim() - 1)
    db = torch.linalg.solve(a.mT, dy, left=left)

    def factor() -> torch.Tensor:
        if vector:
            return -(db.unsqueeze(-1) * x.unsqueeze(-2))
        return -(db @ x.mT if left else x.mT @ db)

    return factor, db


@rule(aten._linalg_eigh.default)
def _(n: Forward, dys: Any) -> Any:
    values, vectors = n.outs if n["compute_v"] else aten._linalg_eigh(n["A"], n["UPLO"])
    inner = torch.zeros_like(vectors) if dys.given(0) is None else torch.diag_embed(dys[0])
    if dys.given(1) is not None:
        gaps = values.unsqueeze(-2) - values.unsqueeze(-1)
        eye = torch.eye(vectors.shape[-1], dtype=torch.bool, device=vectors.device)
        inner = inner + (vectors.mT @ dys[1] / gaps.masked_fill(eye, 1.0)).masked_fill(eye, 0.0)
    da = vectors @ inner @ vectors.mT
    return ((da + da.mT) / 2,)


@rule(aten.linalg_qr.default)
def _(n: Forward, dys: Any) -> Any:
    q, r = n.outs
    if n["mode"] == "r" or r.shape[-2] < r.shape[-1] or r.shape[-2] != q.shape[-1]:
        return NotImplemented
    m: Any = (r @ dys[1].mT if dys.given(1) is not None else 0) - (dys[0].mT @ q if dys.given(0) is not None else 0)
    symmetric = m.tril() + m.tril(-1).mT
    right = q @ symmetric + (dys[0] if dys.given(0) is not None else 0)
    return (torch.linalg.solve_triangular(r.mT, right, upper=False, left=False),)


@composite(aten.linalg_qr.default)
def _(A: torch.Tensor, mode: str = "reduced") -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = A.shape[-2:]
    if columns <= rows:
        return torch.linalg.qr(A)
    q, square = torch.linalg.qr(A[..., :rows])  # a wide matrix: the first columns give q
    return q, torch.cat([square, q.mT @ A[..., rows:]], -1)


@rule(aten._linalg_svd.default)
def _(n: Forward, dys: Any) -> Any:
    outs = n.outs if n["compute_uv"] else aten._linalg_svd(n["A"])
    k = outs[1].shape[-1]  # full matrices have columns beyond, which carry no gradient
    u, s, v = outs[0][..., :k], outs[1], outs[2][..., :k, :].mT
    eye = torch.eye(s.shape[-1], dtype=torch.bool, device=s.device)
    gaps = ((s.unsqueeze(-2) - s.unsqueeze(-1)) * (s.unsqueeze(-2) + s.unsqueeze(-1))).masked_fill(eye, 1.0)
    inner = torch.zeros_like(gaps) if dys.given(1) is None else torch.diag_embed(dys[1])
    outer: Any = 0
    if dys.given(0) is not None:
        du = dys[0][..., :k]
        skew = (u.mT @ du) / gaps
        inner = inner + (skew + skew.mT).masked_fill(eye, 0.0) * s.unsqueeze(-2)
        if u.shape[-2] > s.shape[-1]:
            rest = du - u @ (u.mT @ du)
            outer = outer + (rest / s.unsqueeze(-2)) @ v.mT
    if dys.given(2) is not None:
        dv = dys[2][..., :k, :].mT
        skew = (v.mT @ dv) / gaps
        inner = inner + s.unsqueeze(-1) * (skew + skew.mT).masked_fill(eye, 0.0)
        if v.shape[-2] > s.shape[-1]:
            rest = dv - v @ (v.mT @ dv)
            outer = outer + u @ (rest / s.unsqueeze(-2)).mT
    return (u @ inner @ v.mT + outer,)


@rule(aten.linalg_pinv.atol_rtol_tensor)
def _(n: Forward, dy: Any) -> Any:
    # Golub and Pereyra 1973: three terms, grouped so that the products stay on the short side
    a, x, d = n["self"], n.out, dy.mT
    if a.shape[-2] <= a.shape[-1]:
        k = d @ x
        far = k @ x.mT
        return {"self": -(x @ k).mT + far - (a @ x) @ far + (x.mT @ x) @ (d - k @ a)}
    k = x @ d
    far = x.mT @ k
    return {"self": -(k @ x).mT + (d - a @ k) @ x @ x.mT + far - (far @ x) @ a}
