"""Optimizer updates with the formulas of ``torch.optim``: functional ops, and in-place kernels over lists.

Each rule below defines both. The op is ``tfnb::NAME(w, grad, slots, rate=None, *, lr=None, ...)`` and gives
``[w, *slots]``, the new value of ``w`` and of each slot; it writes nothing. The learning rate is ``lr`` if it
is a number, else the 0-d tensor ``rate``; or ``rate`` is a float64 vector of the learning rate and the settings that
`NUMBERS` names, which count in place of those that are given, but for `SWITCHES` that are 0.
``FUSED["tfnb.NAME.default"](rows, lr=None, **settings)`` is its in-place twin for many variables at once: a row is the
flat inputs of one node, ``(w, grad, *slots)`` and then ``rate`` if there is no ``lr``; ``w`` and the slots are written.
They are bitwise equal: the op is the twin run on copies.

``tfnb::NAME_rows(w, grad, slots, indices, rate=None, *, lr=None, ...)`` does the same to some rows of ``w`` and of
the slots that are shaped like it: ``grad`` holds the gradients of the distinct rows ``indices``. Its in-place twin
takes rows ``(w, grad, *slots, indices)`` and touches, and copies, nothing else of a table.

The formulas are those of torch 2.13, by its fused kernels where it has some (not for adadelta and rmsprop). Those run
through memory in order and check neither shapes nor strides: what can fail is checked, and what needs memory is
allocated, before a write.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tfnb.kernels.define import op

Row = tuple[Tensor, ...]
Column = list[Tensor]
Rate = float | Tensor
Rates = Rate | tuple[float, ...]  # the learning rate, and the settings that NUMBERS names
Group = tuple[Column, Column, list[Column], Rates]  # ws, grads, slots, rate

FUSED: dict[str, Callable[..., None]] = {}
"""In-place twin of each op, by the op's qualified name."""

NUMBERS: dict[str, tuple[str, ...]] = {}
"""By the op's name, its settings that a vector has behind the learning rate: the numbers that a schedule may change."""

SWITCHES = frozenset({"weight_decay", "momentum", "dampening"})
"""Numbers that are 0 in another formula than otherwise: one without the product, or without the slot."""

PIECE = 2**16
"""Elements for each thread that a kernel with temporaries updates at a time: few enough to stay in the cache."""

_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_REDUCED = frozenset({torch.bfloat16, torch.float16})  # of which torch 2.13's fused SGD leaves most elements out


def update(kernel: Callable[..., None]) -> Callable[..., None]:
    """Define the op named like ``kernel(ws, grads, slots, rate, *, settings)``, and its entry in FUSED.

    ``ws`` and ``grads`` are columns, ``slots`` is a list of columns; the settings become the schema's.
    """

    def fused(rows: Sequence[Row], *, lr: float | None = None, **settings: object) -> None:
        rows, rates = _rated(rows, lr)
        late: list[tuple[Tensor, Tensor]] = []
        if rates and all([rate is rates[0] for rate in rates]) and _is_ready(rows):
            groups: list[Group] = [(*_columns(rows), rates[0])]
        else:
            _check(rows)
            groups = list(_groups(_plain(rows, late), rates))
        for ws, grads, slots, rate in groups:
            own = settings
            if isinstance(rate, tuple):
                rate, *numbers = rate
                own = settings | moved(kernel.__name__, settings, numbers)
            kernel(ws, grads, slots, rate, **own)
        for target, value in late:
            target.copy_(value)

    def functional(
        w: Tensor,
        grad: Tensor,
        slots: list[Tensor],
        rate: Tensor | None = None,
        *,
        lr: float | None = None,
        **settings: object,
    ) -> list[Tensor]:
        if (rate is None) == (lr is None):
            raise ValueError(f"{kernel.__name__} takes either the number lr or the tensor rate")
        new = [w.clone(), *(slot.clone() for slot in slots)]
        row = (new[0], grad, *new[1:]) if rate is None else (new[0], grad, *new[1:], rate)
        fused([row], lr=lr, **settings)
        return new

    def fake(w: Tensor, grad: Tensor, slots: list[Tensor], *_: object, **__: object) -> list[Tensor]:
        return [torch.empty_like(state) for state in (w, *slots)]

    NUMBERS[kernel.__name__] = tuple(p.name for p in _settings(kernel) if type(p.default) is float and p.name != "eps1")
    _define(kernel, "", fused, functional, fake)
    _define(kernel, "_rows", partial(_in_rows, fused), partial(_rows_of_copies, fused), fake)
    return kernel


def moved(op: str, settings: Mapping[str, Any], numbers: Sequence[Any]) -> dict[str, Any]:
    """The settings that the numbers of a vector stand for, behind its learning rate."""
    named = zip(NUMBERS[op], numbers, strict=True)
    return {name: number for name, number in named if name not in SWITCHES or settings.get(name)}


def _settings(kernel: Callable[..., None]) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(kernel).parameters.values() if p.kind is p.KEYWORD_ONLY]


def _define(kernel: Callable[..., None], form: str, fused: Any, functional: Any, fake: Any) -> None:
    name = f"{kernel.__name__}{form}"
    torch.library.define(f"tfnb::{name}", _schema(kernel, ", Tensor indices" if form else ""))
    torch.library.impl(f"tfnb::{name}", "CompositeExplicitAutograd", functional)
    torch.library.register_fake(f"tfnb::{name}", fake)
    FUSED[f"tfnb.{name}.default"] = fused


def _schema(kernel: Callable[..., None], more: str) -> str:
    """The op's schema; the settings are the kernel's keyword-only arguments, each of the type of its default."""
    texts = [f"{_TYPES[type(p.default)]} {p.name}={_text_of(p.default)}" for p in _settings(kernel)]
    state = f"Tensor w, Tensor grad, Tensor[] slots{more}, Tensor? rate=None, *, float? lr=None"
    return f"({', '.join([state, *texts])}) -> Tensor[]"


_TYPES = {bool: "bool", float: "float", int: "int", tuple: "float[]", type(None): "str?"}


def _text_of(default: object) -> str:
    return str(list(default) if isinstance(default, tuple) else default)


# ----- some rows of a table -------------------------------------------------------------------------------


def _in_rows(fused: Callable[..., None], rows: Sequence[Row], *, lr: float | None = None, **settings: object) -> None:
    """Apply the dense twin to the touched rows, then write them back; possible failures come before the writes."""
    small: list[Row] = []
    back: list[tuple[Tensor, Tensor | None, Tensor]] = []
    for w, grad, *rest in rows:
        rate = [] if lr is not None else [rest.pop()]
        *slots, indices = rest
        state = []
        for table in (w, *slots):
            is_table = table.shape == w.shape
            state.append(table.index_select(0, indices) if is_table else table.clone())
            back.append((table, indices if is_table else None, state[-1]))
        small.append((state[0], grad, *state[1:], *rate))
    fused(small, lr=lr, **settings)
    for table, where, value in back:
        if where is None:
            table.copy_(value)
        else:
            table.index_copy_(0, where, value)


def _rows_of_copies(
    fused: Callable[..., None], w: Tensor, grad: Tensor, slots: list[Tensor], indices: Tensor,
    rate: Tensor | None = None, *, lr: float | None = None, **settings: object,
) -> list[Tensor]:  # fmt: skip
    new = [w.clone(), *(slot.clone() for slot in slots)]
    row = (new[0], grad, *new[1:], indices)
    _in_rows(fused, [row if rate is None else (*row, rate)], lr=lr, **settings)
    return new


# ----- what comes before the first write -----------------------------------------------------------------


def _is_ready(rows: Sequence[Row]) -> bool:
    """Whether the fused kernels can take the rows as they are; on the hot path, hence the plain loops."""
    written = set()
    dtype = rows[0][0].dtype
    if dtype not in _DTYPES:
        return False
    for w, grad, *slots in rows:
        if not (grad.shape == w.shape and w.dtype is dtype and grad.dtype is dtype and w.is_cpu and grad.is_cpu):
            return False
        if not (w.is_contiguous() and grad.is_contiguous()):
            return False
        written.add(_storage(w))
        for slot in slots:
            if not slot.is_contiguous():
                return False
            written.add(_storage(slot))
    return all([_storage(row[1]) not in written for row in rows])


def _rated(rows: Sequence[Row], lr: float | None) -> tuple[list[Row], list[Rates]]:
    """The rows without their rates, grads contiguous, and the rate of each; rows that read one Variable have the same
    object.
    """
    if lr is not None:
        return [(w, grad.contiguous(), *slots) for w, grad, *slots in rows], [lr] * len(rows)
    known: dict[tuple[int, int, torch.device], Rates] = {}
    rates = []
    for w, *_, rate in rows:
        key = rate.data_ptr(), rate.dim(), w.device
        if key not in known:
            known[key] = _rate(rate, w)
        rates.append(known[key])
    return [(w, grad.contiguous(), *slots) for w, grad, *slots, _ in rows], rates


def _rate(rate: Tensor, w: Tensor) -> Rates:
    """A number if available without waiting for a device, else the form expected by the fused kernels.

    A vector is waited for: those kernels take settings as numbers only.
    """
    if rate.dim():
        return tuple(rate.tolist())
    return float(rate) if rate.is_cpu else rate.to(w.device, torch.float32)


def _check(rows: Sequence[Row]) -> None:
    for w, grad, *_ in rows:
        if grad.shape != w.shape or grad.dtype != w.dtype or grad.device != w.device:
            raise ValueError(f"grad is {_text(grad)}, but the variable it updates is {_text(w)}: they must be alike")
        if w.dtype not in _DTYPES and not w.is_complex():
            raise TypeError(f"a variable to be updated is floating-point or complex, not {_text(w)}")


def _text(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} on {x.device}"


def _plain(rows: Sequence[Row], late: list[tuple[Tensor, Tensor]]) -> list[Row]:
    """The rows with complex seen as pairs of reals, variables contiguous, too, and no grad that is also written.

    A gradient can be the very storage of a variable: that of ``(a * b).sum()`` for ``a`` is ``b``.
    """
    written = {_storage(x) for w, _, *slots in rows for x in (w, *slots)}
    plain = []
    for row in rows:
        if row[0].is_complex():
            row = tuple(torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in row)
        w, grad, *slots = row
        if _storage(grad) in written:
            grad = grad.clone()
        plain.append((_staged(w, late), grad, *(_staged(slot, late) for slot in slots)))
    return plain


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _staged(x: Tensor, late: list[tuple[Tensor, Tensor]]) -> Tensor:
    """``x``, or a contiguous copy to be copied back after the kernels."""
    if x.is_contiguous():
        return x
    copy = x.contiguous()
    late.append((x, copy))
    return copy


def _columns(rows: Sequence[Row]) -> tuple[Column, Column, list[Column]]:
    ws, grads, *slots = map(list, zip(*rows, strict=True))
    return ws, grads, slots


def _groups(rows: Sequence[Row], rates: Sequence[Rates]) -> Iterator[Group]:
    """Rows of one device, dtype and rate together: on CUDA one kernel launch takes no other mixture."""
    groups: dict[tuple[object, ...], tuple[list[Row], Rates]] = {}
    for row, rate in zip(rows, rates, strict=True):
        key = (row[0].device, row[0].dtype, _storage(rate) if isinstance(rate, Tensor) else rate)
        groups.setdefault(key, ([], rate))[0].append(row)
    for group, rate in groups.values():
        yield (*_columns(group), rate)


# ----- the rules -----------------------------------------------------------------------------------------


@update
def adadelta(
    ws: Column,
    grads: Column,
    slots: list[Column],
    rate: Rate,
    *,
    rho: float = 0.9,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> None:
    """w -= rate * d, where d = sqrt(acc + eps) / sqrt(square + eps) * g, with running means of d*d and g*g.

    Slots: square_avg, acc_delta, step. torch has no fused kernel for this rule. The temporaries are allocated once,
    before the first write, and each piece of the variables uses them again.
    """
    *means, steps = slots
    pieces = [*_pieces([ws, grads, *means])]
    for (ws, grads, squares, sums), (roots, deltas, ready) in zip(pieces, _scratch(pieces, 3), strict=True):
        if maximize or weight_decay != 0:
            torch._foreach_copy_(ready, grads)
            grads = ready
        if maximize:
            torch._foreach_neg_(grads)
        if weight_decay != 0:
            torch._foreach_add_(grads, ws, alpha=weight_decay)
        torch._foreach_mul_(squares, rho)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - rho)
        for column, made in ((squares, roots), (sums, deltas)):
            torch._foreach_copy_(made, column)
            torch._foreach_add_(made, eps)
            torch._foreach_sqrt_(made)
        torch._foreach_div_(deltas, roots)
        torch._foreach_mul_(deltas, grads)
        torch._foreach_mul_(sums, rho)
        torch._foreach_addcmul_(sums, deltas, deltas, value=1 - rho)
        if isinstance(rate, Tensor):  # of a device, which nobody waits for
            torch._foreach_mul_(deltas, rate)
            torch._foreach_sub_(ws, deltas)
        else:
            torch._foreach_add_(ws, deltas, alpha=-rate)
    torch._foreach_add_(steps, 1)


def _scratch(pieces: list[list[Column]], count: int) -> list[list[Column]]:
    """So many columns of temporaries for each piece, like its first column; all pieces have the same memory."""
    if len(pieces) == 1:
        return [[[torch.empty_like(x) for x in pieces[0][0]] for _ in range(count)]]
    sizes = [[x.numel() for x in piece[0]] for piece in pieces]
    rows = pieces[0][0][0].new_empty(count, max(map(sum, sizes)))
    return [[[*row[: sum(each)].split(each)] for row in rows] for each in sizes]


def _pieces(columns: list[Column]) -> Iterator[list[Column]]:
    """Split columns into flat pieces for one update after the other; on CPU a piece is short enough for the cache.
    What is one piece stays as it is.
    """
    length = PIECE * torch.get_num_threads()
    if not columns[0][0].is_cpu or sum(x.numel() for x in columns[0]) <= length:
        yield columns  # on a device one launch for all
        return
    piece: list[Sequence[Tensor]] = []
    total = 0
    for row in zip(*columns, strict=True):
        flat = [x.view(-1) for x in row]
        for part in zip(*(x.split(length) for x in flat), strict=True) if len(flat[0]) > length else [flat]:
            if piece and total + part[0].numel() > length:
                yield [[*column] for column in zip(*piece, strict=True)]
                piece, total = [], 0
            piece.append(part)
            total += part[0].numel()
    yield [[*column] for column in zip(*piece, strict=True)]


@update
def adagrad(
    ws: Column,
    grads: Column,
    slots: list[Column],
    rate: Rate,
    *,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    eps: float = 1e-10,
    maximize: bool = False,
) -> None:
    """w -= rate / (1 + (t-1) * lr_decay) * g / (sqrt(sum of g*g) + eps). Slots: sum, step."""
    sums, steps = slots
    torch._foreach_add_(steps, 1)
    torch._fused_adagrad_(
        ws,
        grads,
        sums,
        steps,
        lr=rate,
        lr_decay=lr_decay,
        weight_decay=weight_decay,
        eps=eps,
        maximize=maximize,
    )


@update
def adam(
    ws: Column,
    grads: Column,
    slots: list[Column],
    rate: Rate,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
) -> None:
    """w -= rate * m / (sqrt(v) + eps), with m, v the running means of g, g*g without their start-up bias.

    Slots: exp_avg, exp_avg_sq, step, with ``amsgrad`` max_exp_avg_sq. ``decoupled_weight_decay`` is AdamW's decay.
    """
    exp_avgs, exp_avg_sqs, steps, *maxima = slots
    torch._foreach_add_(steps, 1)
    fused = torch._fused_adamw_ if decoupled_weight_decay else torch._fused_adam_
    fused(
        ws,
        grads,
        exp_avgs,
        exp_avg_sqs,
        maxima[0] if amsgrad else [],
        steps,
        lr=rate,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=amsgrad,
        maximize=maximize,
    )


@update
def rmsprop(
    ws: Column,
    grads: Column,
    slots: list[Column],
    rate: Rate,
    *,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
    maximize: bool = False,
) -> None:
    """w -= rate * g / (sqrt(running mean of g*g) + eps), through a buffer if ``momentum`` is not 0.

    Slots: square_avg, with ``momentum`` momentum_buffer, with ``centered`` grad_avg, and step, which torch counts and
    uses nowhere. There is no fused kernel in torch, so all temporaries are made before the writes.
    """
    *slots, counts = slots
    old = iter(slots)
    if maximize:
        grads = list(torch._foreach_neg(grads))
    if weight_decay != 0:
        grads = list(torch._foreach_add(grads, ws, alpha=weight_decay))
    new = [torch._foreach_mul(next(old), alpha)]
    torch._foreach_addcmul_(new[0], grads, grads, value=1 - alpha)
    if momentum != 0:
        new.append(torch._foreach_mul(next(old), momentum))
    if centered:
        new.append(torch._foreach_lerp(next(old), grads, 1 - alpha))
        scale = torch._foreach_addcmul(new[0], new[-1], new[-1], value=-1)
        torch._foreach_sqrt_(scale)
    else:
        scale = torch._foreach_sqrt(new[0])
    torch._foreach_add_(scale, eps)
    if momentum != 0:
        torch._foreach_addcdiv_(new[1], grads, scale)
    if isinstance(rate, Tensor):  # of a device, which nobody waits for
        steps = new[1] if momentum != 0 else torch._foreach_div(grads, scale)
        torch._foreach_sub_(ws, torch._foreach_mul(steps, rate))
    elif momentum != 0:
        torch._foreach_add_(ws, new[1], alpha=-rate)
    else:
        torch._foreach_addcdiv_(ws, grads, scale, value=-rate)
    for column, values in zip(slots, new, strict=True):
        torch._foreach_copy_(column, values)
    torch._foreach_add_(counts, 1)


@update
def sgd(
    ws: Column,
    grads: Column,
    slots: list[Column],
    rate: Rate,
    *,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> None:
    """w -= rate * g, through b = momentum*b + (1-dampening)*g if ``momentum`` is not 0.

    Slots: with ``momentum`` momentum_buffer, starting at zero; with ``dampening`` also step, because the
    first step takes g undampened.
    """
    buffers, *steps = slots if momentum != 0 else ([],)
    apply = partial(
        _sgd_each if ws[0].is_cpu and ws[0].dtype in _REDUCED else torch._fused_sgd_,
        lr=rate,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=maximize,
    )
    if not steps:
        apply(ws, grads, buffers, is_first_step=False)
        return
    is_first = [step == 0 for step in torch.stack(steps[0]).tolist()]  # waits for a device once, not for each
    for flag in set(is_first):
        apply(*(_where(column, is_first, flag) for column in (ws, grads, buffers)), is_first_step=flag)
    torch._foreach_add_(steps[0], 1)


def _sgd_each(
    ws: Column, grads: Column, buffers: Column, *, lr: Rate, momentum: float, dampening: float, weight_decay: float,
    nesterov: bool, maximize: bool, is_first_step: bool,
) -> None:  # fmt: skip
    """``torch._fused_sgd_`` in torch.optim's plain loop: lists of calls round the settings to the dtype, too."""
    for place, (w, step) in enumerate(zip(ws, grads, strict=True)):
        step = -step if maximize else step
        if weight_decay != 0:
            step = step.add(w, alpha=weight_decay)
        if momentum != 0:
            buffer = buffers[place]
            buffer.copy_(step) if is_first_step else buffer.mul_(momentum).add_(step, alpha=1 - dampening)
            step = step.add(buffer, alpha=momentum) if nesterov else buffer
        w.add_(step, alpha=-float(lr))


def _where(column: Column, flags: list[bool], flag: bool) -> Column:
    return [x for x, is_flag in zip(column, flags, strict=True) if is_flag is flag]


# ----- a gradient that is a product ----------------------------------------------------------------------


def _in_products(rows: Sequence[Row], *, lr: float, momentum: float = 0.0) -> None:
    """``sgd`` with ``grad = left @ right``, without making the gradient, for rows (w, left, *slots, right).

    What shares memory with what is written is copied before a write.
    """
    written = {_storage(state) for w, _, *slots, _ in rows for state in (w, *slots)}

    def apart(x: Tensor) -> Tensor:
        return x.clone() if _storage(x) in written else x

    ready = []
    for w, left, *slots, right in rows:
        inner = left.shape[1:] == right.shape[:1] and left.dtype is right.dtype is w.dtype
        if not inner or (left.shape[0], right.shape[1]) != w.shape:
            raise ValueError(f"{_text(left)} @ {_text(right)} is no gradient of the variable {_text(w)}")
        if len(slots) != (momentum != 0) or any(slot.shape != w.shape or slot.dtype is not w.dtype for slot in slots):
            raise ValueError(f"with momentum={momentum}, the slots of {_text(w)} are not {[*map(_text, slots)]}")
        ready.append((w, slots, apart(left), apart(right)))
    for w, slots, left, right in ready:
        if slots:
            slots[0].addmm_(left, right, beta=momentum)
            w.add_(slots[0], alpha=-lr)
        else:
            w.addmm_(left, right, alpha=-lr)


@op(
    "(Tensor w, Tensor left, Tensor[] slots, Tensor right, *, float lr, float momentum=0.0) -> Tensor[]",
    lambda w, left, slots, right, **settings: [torch.empty_like(state) for state in (w, *slots)],
)
def sgd_product(
    w: Tensor, left: Tensor, slots: Sequence[Tensor], right: Tensor, *, lr: float, momentum: float = 0.0
) -> list[Tensor]:
    """``sgd`` with ``grad = left @ right``, without making the gradient: the new ``w``, and with momentum
    its buffer.
    """
    new = [state.clone() for state in (w, *slots)]
    _in_products([(new[0], left, *new[1:], right)], lr=lr, momentum=momentum)
    return new


SGD, SGD_PRODUCT = "tfnb.sgd.default", "tfnb.sgd_product.default"
FUSED[SGD_PRODUCT] = _in_products
