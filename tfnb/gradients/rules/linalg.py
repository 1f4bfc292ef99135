"""Rules for products of matrices and vectors, and for factorisations and solves.

Factorisations follow Giles, "Collected matrix derivative results for forward and reverse mode algorithmic
differentiation" (2008), the transpose read as the adjoint.
"""

from __future__ import annotations

from typing import Any

import torch

from tfnb.gradients.rule_table import Forward, composite, conj, nograd, rule
from tfnb.gradients.rules.shape import turned

aten = torch.ops.aten

nograd(
    aten._linalg_check_errors.default, aten.geqrf.default, aten.linalg_ldl_factor_ex.default,
    aten.linalg_ldl_solve.default, aten.linalg_matrix_rank.default,
)  # fmt: skip

# -- products --------------------------------------------------------------------------------------------------


def _product(a: Any, b: Any, like: Any, *, turn: str = "") -> Any:
    """``a @ b``, those in ``turn`` transposed, in the memory layout of ``like``: a gradient lies as what it updates."""
    *batch, rows, columns = like.stride()
    product = torch.bmm if batch else torch.mm
    if isinstance(rows, int) and rows == 1 and not (isinstance(columns, int) and columns == 1):
        return product(b if "b" in turn else turned(b), a if "a" in turn else turned(a)).mT
    return product(turned(a) if "a" in turn else a, turned(b) if "b" in turn else b)


@rule(aten.mm.default, aten.bmm.default)
def _(n: Forward, dy: Any) -> Any:  # [.., B, K] @ [.., K, N] -> [.., B, N]
    a, b = map(conj, n.inputs)
    return lambda: _product(dy, b, a, turn="b"), lambda: _product(a, dy, b, turn="a")


@rule(aten._grouped_mm.default)
def _(n: Forward, dy: Any) -> Any:  # of 2-d arguments, offs splits the axis that the groups do not share
    a, b, offs = n["self"], n["mat2"], n["offs"]
    return {"self": lambda: aten._grouped_mm(dy, b.mT, offs), "mat2": lambda: aten._grouped_mm(a.mT, dy, offs)}


@rule(aten.mv.default)
def _(n: Forward, dy: Any) -> Any:
    a, v = map(conj, n.inputs)
    return lambda: torch.outer(dy, v), lambda: a.t() @ dy


@rule(aten.dot.default)
def _(n: Forward, dy: Any) -> Any:
    a, b = map(conj, n.inputs)
    return lambda: dy * b, lambda: dy * a


@rule(aten.vdot.default)
def _(n: Forward, dy: Any) -> Any:
    a, b = n.inputs
    return lambda: conj(dy) * b, lambda: dy * a


def _times(x: torch.Tensor, factor: Any) -> torch.Tensor:
    return x if factor == 1 else x * (factor.conjugate() if isinstance(factor, complex) else factor)


@rule(aten.addmm.default, aten.baddbmm.default)
def _(n: Forward, dy: Any) -> Any:  # beta * bias + alpha * a @ b
    _, a, b = map(conj, n.inputs)
    scaled = _times(dy, n["alpha"])
    return (
        lambda: _times(dy, n["beta"]),
        lambda: _product(scaled, b, a, turn="b"),
        lambda: _product(a, scaled, b, turn="a"),
    )


@rule(aten.addmv.default)
def _(n: Forward, dy: Any) -> Any:
    _, a, v = map(conj, n.inputs)
    scaled = _times(dy, n["alpha"])
    return lambda: _times(dy, n["beta"]), lambda: torch.outer(scaled, v), lambda: a.t() @ scaled


@rule(aten.addr.default)
def _(n: Forward, dy: Any) -> Any:
    _, a, b = map(conj, n.inputs)
    scaled = _times(dy, n["alpha"])
    return lambda: _times(dy, n["beta"]), lambda: scaled @ b, lambda: scaled.t() @ a


@rule(aten.addbmm.default)
def _(n: Forward, dy: Any) -> Any:
    _, a, b = map(conj, n.inputs)
    scaled = _times(dy, n["alpha"])
    return lambda: _times(dy, n["beta"]), lambda: scaled @ b.mT, lambda: a.mT @ scaled


@rule(aten.linalg_cross.default)
def _(n: Forward, dy: Any) -> Any:
    a, b = map(conj, n.inputs)
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
    inverse = n.out.mH
    return (-inverse @ dy @ inverse,)


@rule(aten.linalg_matrix_exp.default)
def _(n: Forward, dy: Any) -> Any:
    a = n["self"].mH  # exp of [[A', dY], [0, A']] holds the cotangent in its upper right block
    zero = torch.zeros_like(a)
    big = torch.cat([torch.cat([a, dy], -1), torch.cat([zero, a], -1)], -2)
    size = a.shape[-1]
    return (torch.linalg.matrix_exp(big)[..., :size, size:],)


@rule(aten._linalg_det.default, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    return ((dy * conj(n.out))[..., None, None] * torch.linalg.inv(n["A"]).mH,)


@rule(aten._linalg_slogdet.default, outputs=2)
def _(n: Forward, dys: Any) -> Any:
    dlog = dys[1]
    if dlog.dtype != dys[0].dtype:  # a complex sign turns with the determinant
        dlog = dlog - 1j * (dys[0].conj() * n.outs[0]).imag
    return (dlog[..., None, None] * torch.linalg.inv(n["A"]).mH,)


@rule(aten.linalg_cholesky_ex.default, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    low = n.out.mH if n["upper"] else n.out
    dlow = dy.mH if n["upper"] else dy
    inner = (low.mH @ dlow.tril()).tril()
    inner = inner + inner.tril(-1).mH  # symmetric, so one triangular solve from each side
    half = torch.linalg.solve_triangular(low.mH, inner, upper=True)
    return (torch.linalg.solve_triangular(low, half, upper=False, left=False) / 2,)


@composite(aten.cholesky.default)
def _(self: torch.Tensor, upper: bool = False) -> torch.Tensor:
    return torch.linalg.cholesky_ex(self, upper=upper).L


def _factor(n: Forward, factor: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """From the cotangent of A in A = L L' or U' U to the factor's; as in torch, of all its elements, read or not."""
    both = d + d.mH
    return factor @ both if n["upper"] else both @ factor


@rule(aten.cholesky_inverse.default)
def _(n: Forward, dy: Any) -> Any:
    return (_factor(n, n["self"], -n.out @ dy @ n.out),)


@rule(aten.cholesky_solve.default)
def _(n: Forward, dy: Any) -> Any:
    db = torch.cholesky_solve(dy, n["input2"], n["upper"])
    return db, lambda: _factor(n, n["input2"], -db @ n.out.mH)


@rule(aten.linalg_solve_triangular.default)
def _(n: Forward, dy: Any) -> Any:
    a, x, left, upper, unit = n["self"], n.out, n["left"], n["upper"], n["unitriangular"]
    db = aten.linalg_solve_triangular(a.mH, dy, upper=not upper, left=left, unitriangular=unit)

    def factor() -> torch.Tensor:
        da = -(db @ x.mH if left else x.mH @ db)
        return da.triu(int(unit)) if upper else da.tril(-int(unit))

    return factor, db


@composite(aten.triangular_solve.default)
def _(self: Any, A: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False) -> Any:
    left, upper = (A.mH, not upper) if transpose else (A, upper)
    return aten.linalg_solve_triangular(left, self, upper=upper, unitriangular=unitriangular), A.clone()


@rule(aten._linalg_solve_ex.default, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    a, b, x, left = n["A"], n["B"], n.out, n["left"]
    vector = b.dim() == 1 or (b.dim() == a.dim() - 1)
    db = torch.linalg.solve(a.mH, dy, left=left)

    def factor() -> torch.Tensor:
        if vector:
            return -(db.unsqueeze(-1) * conj(x).unsqueeze(-2))
        return -(db @ x.mH if left else x.mH @ db)

    return factor, db


@rule(aten._linalg_eigh.default)
def _(n: Forward, dys: Any) -> Any:
    values, vectors = n.outs if n["compute_v"] else aten._linalg_eigh(n["A"], n["UPLO"])
    inner = torch.diag_embed(dys[0]).to(vectors.dtype)
    if dys.given(1) is not None:
        gaps = values.unsqueeze(-2) - values.unsqueeze(-1)
        eye = torch.eye(vectors.shape[-1], dtype=torch.bool, device=vectors.device)
        inner = inner + (vectors.mH @ dys[1] / gaps.masked_fill(eye, 1.0)).masked_fill(eye, 0.0)
    da = vectors @ inner @ vectors.mH
    return ((da + da.mH) / 2,)


@rule(aten.linalg_eig.default)
def _(n: Forward, dys: Any) -> Any:
    values, vectors = n.outs
    inner = torch.diag_embed(dys[0])
    if dys.given(1) is not None:  # vectors have length one: what would lengthen them is lost
        eye = torch.eye(vectors.shape[-1], dtype=torch.bool, device=vectors.device)
        turn = vectors.mH @ dys[1]
        turn = turn - vectors.mH @ (vectors * turn.diagonal(0, -2, -1).real.unsqueeze(-2))
        gaps = (values.unsqueeze(-2) - values.unsqueeze(-1)).conj()
        inner = inner + (turn / gaps.masked_fill(eye, 1.0)).masked_fill(eye, 0.0)
    return (torch.linalg.solve(vectors.mH, inner @ vectors.mH),)


@rule(aten.linalg_qr.default)
def _(n: Forward, dys: Any) -> Any:
    q, r = n.outs
    if n["mode"] == "r" or r.shape[-2] < r.shape[-1] or r.shape[-2] != q.shape[-1]:
        return NotImplemented
    m: Any = (r @ dys[1].mH if dys.given(1) is not None else 0) - (dys[0].mH @ q if dys.given(0) is not None else 0)
    low = m.tril(-1)
    symmetric = low + low.mH + torch.diag_embed(m.diagonal(0, -2, -1).real)
    right = q @ symmetric + (dys[0] if dys.given(0) is not None else 0)
    return (torch.linalg.solve_triangular(r.mH, right, upper=False, left=False),)


@composite(aten.linalg_qr.default)
def _(A: torch.Tensor, mode: str = "reduced") -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = A.shape[-2:]
    if columns <= rows:
        return torch.linalg.qr(A)
    q, square = torch.linalg.qr(A[..., :rows])  # a wide matrix: the first columns give q
    return q, torch.cat([square, q.mH @ A[..., rows:]], -1)


@rule(aten._linalg_svd.default)
def _(n: Forward, dys: Any) -> Any:
    outs = n.outs if n["compute_uv"] else aten._linalg_svd(n["A"])
    k = outs[1].shape[-1]  # full matrices have columns beyond, which carry no gradient
    u, s, v = outs[0][..., :k], outs[1], outs[2][..., :k, :].mH
    eye = torch.eye(s.shape[-1], dtype=torch.bool, device=s.device)
    gaps = ((s.unsqueeze(-2) - s.unsqueeze(-1)) * (s.unsqueeze(-2) + s.unsqueeze(-1))).masked_fill(eye, 1.0)
    inner = torch.diag_embed(dys[1]).to(u.dtype)
    outer: Any = 0
    if dys.given(0) is not None:
        du = dys[0][..., :k]
        turn = u.mH @ du
        skew = turn / gaps
        inner = inner + (skew + skew.mH).masked_fill(eye, 0.0) * s.unsqueeze(-2)
        if u.is_complex():  # the phases of u and v turn together
            inner = inner + torch.diag_embed(1j * turn.diagonal(0, -2, -1).imag / s)
        if u.shape[-2] > s.shape[-1]:
            rest = du - u @ (u.mH @ du)
            outer = outer + (rest / s.unsqueeze(-2)) @ v.mH
    if dys.given(2) is not None:
        dv = dys[2][..., :k, :].mH
        skew = (v.mH @ dv) / gaps
        inner = inner + s.unsqueeze(-1) * (skew + skew.mH).masked_fill(eye, 0.0)
        if v.shape[-2] > s.shape[-1]:
            rest = dv - v @ (v.mH @ dv)
            outer = outer + u @ (rest / s.unsqueeze(-2)).mH
    return (u @ inner @ v.mH + outer,)


def _pinv(a: torch.Tensor, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """From the cotangent of x, the pseudoinverse of a, to that of a.

    Golub and Pereyra 1973: three terms, grouped so that the products stay on the short side.
    """
    d = dy.mH
    if a.shape[-2] <= a.shape[-1]:
        k = d @ x
        far = k @ x.mH
        return -(x @ k).mH + far - (a @ x) @ far + (x.mH @ x) @ (d - k @ a)
    k = x @ d
    far = x.mH @ k
    return -(k @ x).mH + (d - a @ k) @ x @ x.mH + far - (far @ x) @ a


@rule(aten.linalg_pinv.atol_rtol_tensor)
def _(n: Forward, dy: Any) -> Any:
    return {"self": _pinv(n["self"], n.out, dy)}


@rule(aten.linalg_lstsq.default, outputs=2)
def _(n: Forward, dys: Any) -> Any:
    a, b, x, dx, dsquares = n["self"], n["b"], n.out, dys[0], dys.given(1)
    vector = b.dim() == 1 or b.dim() == a.dim() - 1
    b, x, dx = (t.unsqueeze(-1) if vector else t for t in (b, x, dx))
    inverse = torch.linalg.pinv(a)
    db, da = inverse.mH @ dx, _pinv(a, inverse, dx @ b.mH)
    if dsquares is not None and n.outs[1].numel():  # squares of the rest, which is orthogonal to a's columns
        rest = 2 * (b - a @ x) * dsquares.unsqueeze(-2)
        db, da = db + rest, da - rest @ x.mH
    return da, db.squeeze(-1) if vector else db


# -- LU --------------------------------------------------------------------------------------------------------


def _lu(low: torch.Tensor, up: torch.Tensor, dlow: torch.Tensor, dup: torch.Tensor) -> torch.Tensor:
    """Cotangent of low @ up, a unit lower and an upper triangular matrix, one of them perhaps with a rest."""
    k = up.shape[-2]
    low, low_rest, dlow_rest = low[..., :k, :], low[..., k:, :], dlow[..., k:, :]
    up, up_rest, dup_rest = up[..., :k], up[..., k:], dup[..., k:]
    inner = (low.mH @ dlow[..., :k, :] - dup_rest @ up_rest.mH).tril(-1)
    inner = inner + (dup[..., :k] @ up.mH - low_rest.mH @ dlow_rest).triu()
    right = torch.linalg.solve_triangular(up.mH, torch.cat([inner, dlow_rest], -2), upper=False, left=False)
    wide = torch.cat([right[..., :k, :], dup_rest], -1)
    top = torch.linalg.solve_triangular(low.mH, wide, upper=True, unitriangular=True)
    return top if dlow.shape[-2] == k else torch.cat([top, right[..., k:, :]], -2)


@rule(aten.linalg_lu.default)
def _(n: Forward, dys: Any) -> Any:
    p, low, up = n.outs
    da = _lu(low, up, dys[1], dys[2])
    return (p @ da if n["pivot"] else da,)


@rule(aten.linalg_lu_factor_ex.default, outputs=1)
def _(n: Forward, dy: Any) -> Any:
    p, low, up = torch.lu_unpack(n.out, n.outs[1])
    return (p @ _lu(low, up, dy[..., : low.shape[-1]].tril(-1), dy[..., : up.shape[-2], :].triu()),)


@rule(aten.lu_unpack.default)
def _(n: Forward, dys: Any) -> Any:
    low, up = dys[1].tril(-1), dys[2].triu()
    low = aten.constant_pad_nd(low, [0, up.shape[-1] - low.shape[-1]])
    return low + aten.constant_pad_nd(up, [0, 0, 0, low.shape[-2] - up.shape[-2]]), None


@composite(aten.linalg_lu_solve.default)
def _(LU: Any, pivots: Any, B: Any, *, left: bool = True, adjoint: bool = False) -> torch.Tensor:
    solve, (p, low, up), b = torch.linalg.solve_triangular, torch.lu_unpack(LU, pivots), B if left else B.mH
    if adjoint == left:
        x = p @ solve(low.mH, solve(up.mH, b, upper=False), upper=True, unitriangular=True)
    else:
        x = solve(up, solve(low, p.mH @ b, upper=False, unitriangular=True), upper=True)
    return x if left else x.mH


# -- products of Householder reflections -----------------------------------------------------------------------


def _reflections(a: torch.Tensor, tau: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """v and t with (1 - tau_1 v_1 v_1') ... (1 - tau_k v_k v_k') = 1 - v t v' (Schreiber and van Loan 1989)."""
    rows, k = a.shape[-2], tau.shape[-1]
    v = a[..., :k].tril(-1) + torch.eye(rows, k, dtype=a.dtype, device=a.device)
    inner = (v.mH @ v).triu(1) * tau.unsqueeze(-1)
    return v, torch.linalg.solve_triangular(inner, torch.diag_embed(tau), upper=True, unitriangular=True)


@composite(aten.linalg_householder_product.default)
def _(input: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
    v, t = _reflections(input, tau)
    rows, columns = input.shape[-2:]
    return torch.eye(rows, columns, dtype=v.dtype, device=v.device) - v @ t @ v[..., :columns, :].mH


@composite(aten.ormqr.default)
def _(self: Any, input2: Any, input3: Any, left: bool = True, transpose: bool = False) -> torch.Tensor:
    v, t = _reflections(self, input2)
    t = t.mH if transpose else t
    return input3 - (v @ (t @ (v.mH @ input3)) if left else ((input3 @ v) @ t) @ v.mH)
