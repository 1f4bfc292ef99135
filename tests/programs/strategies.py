"""Hypothesis strategies: random programs of torch calls, views and writes that torch itself accepts.

A step is a template of one line. Its fields are drawn against the values that the program has so far, the line is run
by torch, and dropped if torch refuses it or the values grow wild. So every program drawn runs eagerly.
"""

from __future__ import annotations

import string
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from tests.programs.program import Input, Overlaps, Program, count, tame

# Fields of templates: see _FIELDS. The assigned name is put in front of a value. Where torch's own gradient is wrong
# (polar of lengths that are not positive, kron of what is written later, logical_not_), the template keeps off that.
POINTWISE = """
    {a}.abs() | -{a} | torch.tanh({a}) | {a}.sigmoid() | torch.relu({a}) | {a}.square() | {a}.sin() | {a}.cos()
    F.gelu({a}) | F.softplus({a}) | F.elu({a}) | F.leaky_relu({a}, 0.1) | F.silu({a}) | {a}.sign() | {a}.floor()
    {a}.logical_not() | {a}.isnan() | {a}.to({dtype}) | {a}.float() | {a}.double() | {a}.long() | {a}.bool()
    {a}.clone() | {a}.contiguous() | {a}.clamp(-1, 1) | {a}.clamp_min(0) | F.hardtanh({a}) | {a}.exp().log1p()
    F.dropout({a}, 0.5, training=False) | torch.zeros_like({a}) | torch.full_like({a}, 2)
    {a}.new_ones({a}.shape) | {a}.type_as({b}) | torch.ones_like({a}, dtype={dtype}) | {a}.positive()
    {a}.clone().requires_grad_(False) | {a}.conj() | {a}.angle() | {a}.conj() * 1 | {a}.to(torch.complex64)
    torch.complex({a}.float(), {a}.float()) | torch.polar({a}.float().square() + 1, {a}.float())
    {a}.sgn() | torch.relu6({a})
    {a}.reciprocal().nan_to_num(0, 0, 0) | {a}.round() | {a}.frac() | F.threshold({a}, 0.5, 0) | F.hardswish({a})
"""
BINARY = """
    {a} + {b} | {a} - {b} | {a} * {b} | {a} + {s} | {s} - {a} | {a} * {s} | {a} / 2 | {a} / ({b}.abs() + 1)
    torch.maximum({a}, {b}) | torch.minimum({a}, {b}) | torch.where({a} > {b}, {a}, {b}) | {a} == {b} | {a} > {s}
    {a} <= {b} | {a} // 2 | {a} % 3 | torch.add({a}, {b}, alpha=2) | torch.rsub({a}, {b}) | {a} ** 2
    torch.lerp({a}, {b}, 0.25) | torch.addcmul({a}, {b}, {c}, value=2) | torch.atan2({a}, {b}) | {a} & {b}
    {a} ^ {b} | torch.where({mask}, {a}, {s}) | torch.where({mask}, {a}, {b}) | {a}.masked_fill({mask}, {s})
    {a} @ {b} | torch.matmul({a}, {b}.mT) | F.linear({a}, {b}) | torch.bmm({a}, {b})
    F.mse_loss({a}.double(), {b}.double())
    torch.dot({a}, {b}) | torch.outer({a}, {b}) | torch.addmm({a}, {b}, {c}) | torch.baddbmm({a}, {b}, {c})
    torch.mv({a}, {b}) | F.conv1d({a}, {b}) | F.conv1d({a}, {b}, padding=1)
    torch.einsum('...i,...i->...', {a}, {b}) | F.cosine_similarity({a}, {b}, dim={d}) | torch.fmod({a}, 2)
    torch.logical_or({a}, {b}) | torch.hypot({a}, {b}) | torch.einsum('ij,jk->ik', {a}, {b})
    torch.kron({a} * 1, {b} * 1)
    torch.einsum('...ij->...ji', {a}) | F.conv2d({a}, {b}) | F.conv_transpose1d({a}, {b}) | torch.vdot({a}, {b})
    torch.cdist({a}, {b}) | torch.tensordot({a}, {b}, 1) | torch.inner({a}, {b}) | torch.where({mask}, {b}, 0)
    F.scaled_dot_product_attention({a}, {a}, {a}) | torch.logaddexp({a}, {b}) | torch.bucketize({a}, {a}.unique())
"""
REDUCE = """
    {a}.sum() | {a}.sum({d}) | {a}.sum({d}, keepdim={k}) | {a}.mean({d}, keepdim={k}) | {a}.mean() | {a}.amax({d})
    {a}.amin({d}, keepdim={k}) | {a}.max({d}, keepdim={k}).values | {a}.min({d}).indices | {a}.max()
    {a}.prod({d}) | {a}.var({d}) | {a}.std({d}, unbiased=False) | {a}.any({d}) | {a}.all() | {a}.argmax({d})
    {a}.norm() | {a}.sum(({d}, {e})) | {a}.logsumexp({d}) | {a}.median({d}).values | {a}.count_nonzero({d})
    {a}.numel() * {a} | {a}.softmax({d}) | F.log_softmax({a}, {d}) | F.layer_norm({a}, {a}.shape[-1:])
    {a}.cumsum({d}) | {a}.cumprod({d}) | {a}.sort({d}).values | {a}.sort({d}, descending={k}).indices
    {a}.topk(1, {d}).values | F.normalize({a}, dim={d}) | {a}.argsort({d}, stable=True) | {a}.cummax({d}).values
    {a}.diff(dim={d}) | {a}.logcumsumexp({d}) | {a}.trace() | F.cross_entropy({a}, {a}.argmax(1))
    F.one_hot({a}.long().clamp(0, 3), 4) | F.avg_pool1d({a}, 2) | {a}.nansum() | F.max_pool1d({a}, 2)
    F.batch_norm({a}, None, None, training=True) | F.group_norm({a}, 1) | {a}.norm(dim={d})
    F.rms_norm({a}, {a}.shape[-1:]) | F.instance_norm({a}) | torch.linalg.vector_norm({a}, 1, {d}) | {a}.aminmax()[0]
    list({a}.topk(1, {d})) | list({a}.sort({d}, stable=True)) | list(torch.var_mean({a}, {d})) | {a}.kthvalue(1, {d})[0]
    torch.fft.fft({a}).real | torch.fft.rfft({a}, dim={d}).abs() | F.adaptive_avg_pool1d({a}, 2) | {a}.quantile(0.5)
"""
SHAPES = """
    torch.cat([{a}, {b}], {d}) | torch.stack([{a}, {b}], {d}) | torch.cat([{a}, {a}]) | torch.hstack([{a}, {b}])
    {a}.repeat(2, *[1] * ({a}.dim() - 1)) | {a}.repeat_interleave(2, {d}) | {a}.flip({d}) | {a}.roll(1, {d})
    {a}.tril() | F.pad({a}, (1, 0)) | F.pad({a}, (0, -1)) | {a}[{idx}] | {a}.index_select({d}, {pick})
    {a}.gather({d}, {at}) | {a}.take({idx}) | torch.take_along_dim({a}, {at}, {d}) | F.embedding({idx}, {a})
    {a}[..., {last}] | {a}[{mask}].sum() | {a}.scatter({d}, {at}, {s})
    {a}.index_add({d}, {pick}, {a}.index_select({d}, {pick})) | {a}.index_fill({d}, {pick}, {s})
    {a}.scatter_add({d}, {at}, {a}) | torch.broadcast_to({a}, (2, *{a}.shape)).clone() | {a}.tile(2)
    {a}.rot90(1, ({d}, {e})) | {a}.select_scatter({a}.select({d}, 0) * 2, {d}, -1) | {a}.diagonal().clone()
    torch.diag({a}) | {a}.triu(1) | torch.meshgrid({a}, {b}, indexing='ij')[0] | torch.arange({a}.shape[0]) * {s}
    {a}.unfold({d}, 1, 1).contiguous() | {a}.index_put(({idx},), {a}[{idx}] * 2)
    {a}.masked_scatter({mask}, {a}.flip(0)) | torch.cartesian_prod({a}, {b}) | torch.vstack([{a}, {b}])
    {a}.scatter_reduce({d}, {at}, {a}, 'amax') | {a}.scatter_reduce({d}, {at}, {a}, 'mean', include_self=False)
    {a}.index_reduce({d}, {pick}, {a}.index_select({d}, {pick}), 'amin') | {a}.index_copy({d}, {pick}, {a}[{idx}])
    {a}.slice_scatter({a}[:1] + 1, 0, 0, 1) | {a}.diagonal_scatter({a}.diagonal() * 2) | {a}[{idx}, {idx}]
    {a}[None, {idx}] | {a}[:, {last}] | F.pad({a}, (1, 1), mode='reflect') | torch.block_diag({a}, {b})
    torch.cat([{a}[:0], {a}]) | torch.zeros(0).sum() + {a} | {a}.new_zeros(0).to({a}.dtype)
"""
VIEWS = """
    {a}[{i}] | {a}[{i}:] | {a}[:{i}] | {a}[..., {j}] | {a}[:, {j}] | {a}[..., {j}:] | {a}[None] | {a}[..., None]
    {a}[::2] | {a}[..., ::2] | {a}.t() | {a}.T | {a}.mT | {a}.transpose({d}, {e}) | {a}.permute({perm})
    {a}.movedim({d}, {e}) | {a}.swapaxes({d}, {e}) | {a}.view(-1) | {a}.view({shape}) | {a}.reshape(-1)
    {a}.reshape({shape}) | {a}.flatten() | {a}.unflatten({d}, (1, -1)) | {a}.unflatten({d}, (-1, 2))
    {a}.expand(2, *{a}.shape) | {a}.expand_as({b}) | {a}.squeeze() | {a}.squeeze({d}) | {a}.unsqueeze({d})
    {a}.narrow({d}, {i}, 1) | {a}.select({d}, {i}) | {a}.detach() | {a}.diagonal() | {a}.diagonal(1, {d}, {e})
    {a}.as_strided({strided}) | {a}.unfold({d}, 2, 2) | {a}.unfold({d}, 2, 1) | {a}.data | {a}.view_as({b})
    {a}.ravel() | {a}.chunk(2, {d})[-1] | {a}.split(1, {d})[0] | {a}.tensor_split(2, {d})[0] | {a}.unbind({d})[-1]
    list({a}.unbind({d})) | list({a}.chunk(2, {d})) | list({a}.split(1, {d})) | {a}.real | {a}.alias()
    {a}[{i}, {j}] | {a}[{i}][{j}:] | {a}.view({a}.shape) | {a}.reshape_as({b}) | {a}.contiguous()
    {a}.to({a}.dtype) | {a}.swapdims({d}, {e}) | {a}.movedim(0, -1) | {a}.flatten(0, 1) | [{a}, {b}]
    {a}.expand(-1, *{a}.shape[1:]) | {a} | list({a}.split_with_sizes([1, {a}.shape[{d}] - 1], {d}))
    {a}.adjoint() | {a}.narrow({d}, 0, {a}.shape[{d}]) | torch.view_as_real({a}) | {a}.imag | {a}.mH | {a}[:0]
    {a}.view(torch.int32) | {a}[..., -1:] | {a}.unbind({d})[0][None] | torch.atleast_2d({a}) | {a}.squeeze((0, -1))
"""
WRITES = """
    {a} += {s} | {a} *= {s} | {a} -= {b} | {a} += {b} | {a} *= {a} | {a} /= 2 | {a}.add_({b}, alpha=2)
    {a}.add_({a}) | {a}[{i}] = {s} | {a}[..., {j}] = {s} | {a}[:, {j}] = {s} | {a}[{mask}] = {s} | {a}[{i}] = {b}
    {a}[:] = {b} | {a}[...] = {s} | {a}[{i}:] += {s} | {a}[..., {j}] *= 2 | {a}[{i}] += {b} | {a}[{idx}] = {s}
    {a}[{idx}] += 1 | {a}[{mask}] += 1 | {a}[{i}, {j}] = {s} | {a}[::2] = {s}
    {a}[..., 1:] = {a}[..., :-1].clone() | {a}[None] = {s} | {a}[{mask}] = {a}[{mask}] * 2 | {a}.relu_()
    {a}.abs_() | {a}.tanh_() | {a}.neg_() | {a}.sigmoid_() | {a}.zero_() | {a}.fill_({s}) | {a}.fill_({a}.sum())
    {a}.copy_({b}) | {a}.mul_({b}) | {a}.sub_({b}) | {a}.clamp_(-1, 1) | {a}.masked_fill_({mask}, {s})
    {a}.floor_() | {a}.scatter_({d}, {at}, {s}) | {a}.scatter_add_({d}, {at}, {a})
    {a}.index_fill_({d}, {pick}, {s}) | {a}.cumsum_({d})
    {a}.index_add_({d}, {pick}, {a}.index_select({d}, {pick}))
    {a}.index_copy_({d}, {pick}, {a}.index_select({d}, {pick}) * 2) | {a}.index_put_(({idx},), {a}[{idx}] * 2)
    {a}.index_put_(({idx},), {a}.new_ones(()), accumulate=True) | {a}.tril_()
    {a}.masked_scatter_({mask}, {a}.flip(0)) | {a}.addcmul_({b}, {b}) | {a}.lerp_({b}, 0.5) | {a}.pow_(2)
    {a}.fill_diagonal_({s}) | {a}.squeeze_() | {a}.squeeze_({d}) | {a}.unsqueeze_({d}) | {a}.t_()
    {a}.transpose_({d}, {e}) | {a}.swapaxes_({d}, {e}) | torch.add({a}, {s}, out={b})
    torch.mul({a}, {b}, out={a}) | torch.sum({a}, {d}, out={o}) | torch.cat([{a}, {a}], out={o})
    torch.sub({a}, {b}, out={o}) | torch.cumsum({a}, {d}, out={a}) | torch.tanh({a}, out={o})
    torch.matmul({a}, {b}, out={o}) | torch._foreach_add_([{a}, {b}], 1) | torch._foreach_mul_([{a}], 2)
    torch._foreach_zero_([{a}, {b}]) | F.relu({a}, inplace=True) | F.leaky_relu({a}, 0.1, inplace=True)
    F.dropout({a}, 0.5, False, True) | F.elu_({a}) | {a}.data.add_(1) | {a}.detach().mul_(2) | {a}.t().add_({b})
    {a}.view(-1)[0] = {s} | {a}.flatten()[-1] = {s} | {a}.diagonal().fill_({s}) | {a}.unsqueeze({d}).mul_(2)
    {a}.transpose({d}, {e}).copy_({a}.clone()) | {a}.reshape(-1).add_(1) | {a}.addmm_({b}, {c})
    {a}.eq_({b})
    {a}[{i}], {a}[{j}] = {a}[{j}].clone(), {a}[{i}].clone() | torch.swapaxes({a}, {d}, {e})[{i}] = {s}
    {a}.sort({d}).values.add_(1) | torch.stack([{a}, {b}], out={o}) | torch.where({mask}, {a}, {b}, out={a})
    torch.clamp({a}, -1, 1, out={a}) | {a}.expand_as({b}).add_(1) | {a}.put_({idx}, {a}.take({idx}))
    {a}.resize_({shape}) | {a}.resize_as_({b}) | {a}.real.add_(1) | {a}.imag.mul_(2) | torch.view_as_real({a}).zero_()
    torch.sort({a}, {d}, out=({o}, torch.empty(0, dtype=torch.int64))) | torch.stack([{a}, {a}], out={o})
    torch.index_select({a}, {d}, {pick}, out={o}) | torch.gather({a}, {d}, {at}, out={o}) | torch.mm({a}, {b}, out={o})
    torch.where({mask}, {a}, {b}, out={o}) | torch.mean({a}, {d}, out={o}) | torch.exp({a}, out={a}[:]) | {a}.sgn_()
    torch.maximum({a}, {b}, out={a}.t()) | torch.arange({a}.shape[0], out={o})
    {a}.scatter_reduce_({d}, {at}, {a}, 'sum')
    {a}[{idx}, {idx}] = {s} | {a}[:, {last}] = {s} | {a}[None, {idx}] += 1 | {a}[{i}:].t().add_(1)
    {a}[..., None][0] += 1
    {a}.index_reduce_({d}, {pick}, {a}.index_select({d}, {pick}), 'amax') | {a}.flatten(0, 1)[::2].mul_({s})
    {a}.fill_({s}).zero_() | {a}.round_() | {a}.triu_(1)
    {a}.select({d}, 0).unsqueeze(0).copy_({b})
    torch._foreach_copy_([{a}], [{b}]) | {a}.expand(2, *{a}.shape)[0].add_(1) | {a}.expand(2, *{a}.shape).mul_(2)
    {a}.renorm_(2, {d}, 1.0) | {a}.as_strided({strided}).add_(1) | {a}.unfold({d}, 2, 2).mul_(2)
"""


def _rows(text: str) -> list[str]:
    return [row.strip() for line in text.strip().splitlines() for row in line.split(" | ") if row.strip()]


VALUES = {name: _rows(text) for name, text in {
    "pointwise": POINTWISE, "binary": BINARY, "reduce": REDUCE, "shapes": SHAPES, "views": VIEWS,
}.items()}  # fmt: skip
STATEMENTS = _rows(WRITES)
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64)
SCALARS = ("1", "2", "0.5", "-1", "0")
BATCH = 5  # no other axis has this length, so nothing broadcasts with the batch by accident


@st.composite
def programs(
    draw: st.DrawFn, *, size: int = 8, writes: bool = True, dtypes: Sequence[torch.dtype] = DTYPES, batch: bool = False
) -> Program:
    """A program of up to ``size`` lines. batch: axis 0 of the inputs varies."""
    program = Program(tuple(draw(inputs(dtypes=dtypes, batch=batch))))
    values = program.run(program.make())
    kinds = [*VALUES, "views", "again", *(["writes"] * 3 if writes else [])]
    for at in range(draw(st.integers(size // 2, size))):
        kind = draw(st.sampled_from(kinds))
        before = [line.partition(" = ")[2] for line in program.lines if line.partition(" = ")[0].isalnum()]
        if kind == "again":
            line = f"v{at} = {draw(st.sampled_from(before)) if before else 'x0'}"
        elif kind == "writes":
            line = _line(draw, values, STATEMENTS)
        else:
            line = f"v{at} = {_line(draw, values, VALUES[kind])}"
        found = _tried(program.then(line))
        if found is not None:
            program, values = program.then(line), found
    return program


def inputs(*, dtypes: Sequence[torch.dtype], batch: bool) -> st.SearchStrategy[list[Input]]:
    """One to three inputs whose shapes often broadcast."""
    sizes = st.sampled_from([1, 2, 3, 4, 0]) if not batch else st.sampled_from([1, 2, 3, 4])
    shapes = st.lists(sizes, max_size=3 if not batch else 2).map(tuple)
    some = shapes | st.sampled_from([(3, 4), (4,), (2, 3, 4), (3, 3), (2, 2)] if not batch else [(3, 4), (4,), (3, 3)])
    dtype = st.sampled_from([dtypes[0], *dtypes])
    rows = st.lists(st.tuples(some, dtype), min_size=1, max_size=3)
    lead = (BATCH,) if batch else ()
    return rows.map(lambda found: [Input(f"x{i}", d, (*lead, *s), batch) for i, (s, d) in enumerate(found)])


def _tried(program: Program) -> dict[str, Any] | None:
    """The eager results of the program; None if torch refuses or warns."""
    try:
        with warnings.catch_warnings(), Overlaps():
            warnings.simplefilter("ignore")
            found = program.run(program.make())
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError):
        return None
    return found if tame(found) else None


def _line(draw: st.DrawFn, values: dict[str, Any], templates: list[str]) -> str:
    template = draw(st.sampled_from(templates))
    filled = _Filled(draw, values)
    wanted = dict.fromkeys(field for _, field, _, _ in string.Formatter().parse(template) if field)
    return template.format(**{name: filled.field(name) for name in wanted})


class _Filled:
    """The fields of one line, drawn in the order asked for; most are about the operand ``a``."""

    def __init__(self, draw: st.DrawFn, values: dict[str, Any]) -> None:
        self.draw = draw
        self.places = _places(values)
        self.name, self.a = draw(st.sampled_from(list(self.places.items())))
        self.used = [self.name]
        self.dim = self._int(max(self.a.dim(), 1))

    def field(self, name: str) -> str:
        return str(_FIELDS[name](self))

    def _int(self, below: int) -> int:
        return self.draw(st.integers(0, max(below - 1, 0)))

    def fitting(self) -> str:
        """An operand that broadcasts with ``a``, if there is one; sometimes any."""
        fits = [name for name, t in self.places.items() if _broadcasts(t.shape, self.a.shape)]
        self.used.append(self.draw(st.sampled_from(fits if self._int(4) else list(self.places))))
        return self.used[-1]

    def other(self) -> str:
        """An operand that shares no memory with those drawn so far, or a new tensor."""
        taken = {self.places[name].untyped_storage()._cdata for name in self.used}
        free = [name for name, t in self.places.items() if t.untyped_storage()._cdata not in taken]
        return self.draw(st.sampled_from(["torch.empty(0)", *free]))

    def mask(self) -> str:
        found = [n for n, t in self.places.items() if t.dtype is torch.bool and _broadcasts(t.shape, self.a.shape)]
        return self.draw(st.sampled_from([f"({self.name} > 0)", *found]))

    def shape(self) -> tuple[int, ...]:
        sizes = [int(s) for s in self.a.shape]
        rest = count(sizes[1:])
        some = [(-1,), (1, *sizes), (*sizes, 1), (*sizes[:1], -1), (-1, *sizes[1:]), (-1, rest or 1), (2, -1)]
        return self.draw(st.sampled_from(some))

    def indices(self, axis: int) -> str:
        length = self.a.shape[axis] if self.a.dim() else 1
        return f"torch.tensor({[self._int(length) for _ in range(self._int(3) + 1)]})"

    def strided(self) -> str:
        """Sizes and strides inside the first element's reach."""
        room = count(self.a.shape)
        step = self.draw(st.sampled_from([1, 2]))
        size = max(1, room // (2 * step))
        return self.draw(st.sampled_from([f"({size},), ({step},)", f"(2, {max(1, size // 2)}), (1, {step})"]))


_FIELDS: dict[str, Callable[[_Filled], Any]] = {
    "a": lambda f: f.name,
    "b": _Filled.fitting,
    "c": _Filled.fitting,
    "s": lambda f: f.draw(st.sampled_from(SCALARS)),
    "d": lambda f: f.dim - (f.a.dim() if f._int(2) else 0),
    "e": lambda f: f._int(f.a.dim()),
    "i": lambda f: f._int(f.a.shape[0] if f.a.dim() else 1),
    "j": lambda f: f._int(f.a.shape[-1] if f.a.dim() else 1),
    "k": lambda f: f.draw(st.booleans()),
    "dtype": lambda f: f.draw(st.sampled_from(DTYPES)),
    "mask": _Filled.mask,
    "shape": _Filled.shape,
    "o": _Filled.other,
    "perm": lambda f: ", ".join(map(str, f.draw(st.permutations(range(f.a.dim()))))),
    "idx": lambda f: f.indices(0),
    "last": lambda f: f.indices(-1),
    "pick": lambda f: f.indices(f.dim),
    "at": lambda f: f"torch.zeros_like({f.name}, dtype=torch.int64)",
    "strided": _Filled.strided,
}


def _places(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The possible operands: names, and places in lists."""
    found: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        items = {name: value} if isinstance(value, torch.Tensor) else {f"{name}[{i}]": v for i, v in enumerate(value)}
        found |= {place: item for place, item in items.items() if isinstance(item, torch.Tensor)}
    return found


def _broadcasts(one: Sequence[int], other: Sequence[int]) -> bool:
    pairs = zip(reversed(one), reversed(other), strict=False)
    return all(a == b or a == 1 or b == 1 for a, b in pairs)
