"""The optimizers of torch.optim: argument names, defaults and formulas are torch's.

Each names its op of `tfnb.kernels.optim` and its slots, in the order of the op. `Momentum` is SGD with another default,
and the slots carry torch's names, so that states compare by name.

``sparse`` says what a row-sparse gradient (`tfnb.IndexedSlices`) does. ``"exact"``: what the dense gradient would do,
which takes a pass over all rows where a row without gradient moves too (momentum, running means, weight decay).
``"lazy"``: only rows that are in the gradient change, and their slots; a count of steps is that of all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from numbers import Real
from typing import Any

import torch

from tfnb.errors import InvalidArgument
from tfnb.gradients import IndexedSlices
from tfnb.kernels import optim  # noqa: F401  defines torch.ops.tfnb
from tfnb.train.optimizer import Optimizer, Rate

SPARSE = ("exact", "lazy")
_BETWEEN = {"beta1": (0, 1), "beta2": (0, 1), "dampening": (-inf, inf)}  # [low, high); others are [0, inf)


class _Rule(Optimizer):
    """An optimizer whose update is one op.

    still: whether a row without gradient stays as it is, and its slots, so that exact steps need the others only.
    """

    def __init__(
        self, op: Any, lr: Any, slots: Mapping[str, bool], sparse: str, still: bool = False, **settings: Any
    ) -> None:  # fmt: skip
        super().__init__(lr)
        if sparse not in SPARSE:
            raise InvalidArgument(f"{type(self).__name__}: sparse is one of {', '.join(SPARSE)}, not {sparse!r}")
        self.op, self.sparse, self.still = op, sparse, still
        self.slot_names = tuple(name for name, is_kept in slots.items() if is_kept)
        self.settings = {name: _setting(type(self).__name__, name, value) for name, value in settings.items()}

    def names(self, w: torch.Tensor) -> tuple[str, ...]:
        """The slots of a variable like ``w``."""
        return self.slot_names

    def initial(self, w: torch.Tensor) -> dict[str, torch.Tensor]:
        step = torch.zeros((), dtype=torch.float32, device=w.device)
        return {name: step if name == "step" else torch.zeros_like(w) for name in self.slot_names}

    def update(
        self, w: torch.Tensor, grad: torch.Tensor, slots: Mapping[str, torch.Tensor], lr: Rate
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        new, *after = self.op(w, grad, list(slots.values()), **_rate(lr), **self.settings)
        return new, dict(zip(slots, after, strict=True))

    def update_rows(
        self, w: torch.Tensor, grad: IndexedSlices, slots: Mapping[str, torch.Tensor], lr: Rate
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        if self.sparse == "exact" and not self.still:
            why = f"an exact {type(self).__name__} step renews every row, sparse='lazy' those of the gradient"
            return self.update(w, grad.to_dense(why), slots, lr)
        rows, op = grad.coalesce(), getattr(torch.ops.tfnb, f"{self.op.__name__}_rows")
        new, *after = op(w, rows.values, list(slots.values()), rows.indices, **_rate(lr), **self.settings)
        return new, dict(zip(slots, after, strict=True))

    def __repr__(self) -> str:
        shown = self.settings | ({"sparse": self.sparse} if self.sparse != "exact" else {})
        settings = ", ".join(f"{name}={value}" for name, value in shown.items())
        return f"{type(self).__name__}(lr={self.lr!r}, {settings})"


def _rate(lr: Rate) -> dict[str, Rate]:
    return {"lr": lr} if isinstance(lr, float) else {"rate": lr}


def _setting(owner: str, name: str, value: Any) -> float | bool:
    if isinstance(value, bool):
        return value
    low, high = _BETWEEN.get(name, (0, inf))
    if not isinstance(value, Real) or not low <= float(value) < high:
        limits = f"from {low} to below {high}" if high < inf else f"of at least {low}"
        raise InvalidArgument(f"{owner}: {name} must be a number {limits}, not {value!r}")
    return float(value)


class SGD(_Rule):
    """Stochastic gradient descent, with momentum if it is not 0."""

    def __init__(
        self, lr: Any = 1e-3, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0,
        nesterov: bool = False, *, maximize: bool = False, sparse: str = "exact",
    ) -> None:  # fmt: skip
        super().__init__(
            torch.ops.tfnb.sgd, lr, {"momentum_buffer": momentum != 0, "step": momentum != 0 and dampening != 0},
            sparse, still=momentum == 0 and weight_decay == 0,
            momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=bool(nesterov),
            maximize=bool(maximize),
        )  # fmt: skip
        if nesterov and (momentum == 0 or dampening != 0):
            raise InvalidArgument(
                f"{type(self).__name__}: nesterov needs a momentum and no dampening, "
                f"got momentum={momentum}, dampening={dampening}"
            )


class Momentum(SGD):
    """SGD with momentum."""

    def __init__(
        self, lr: Any = 1e-3, momentum: float = 0.9, dampening: float = 0.0, weight_decay: float = 0.0,
        nesterov: bool = False, *, maximize: bool = False, sparse: str = "exact",
    ) -> None:  # fmt: skip
        super().__init__(lr, momentum, dampening, weight_decay, nesterov, maximize=maximize, sparse=sparse)


class Adagrad(_Rule):
    """Steps divided by the root of all squared gradients so far (Duchi et al. 2011)."""

    def __init__(
        self, lr: Any = 1e-2, lr_decay: float = 0.0, weight_decay: float = 0.0, initial_accumulator_value: float = 0.0,
        eps: float = 1e-10, *, maximize: bool = False, sparse: str = "exact",
    ) -> None:  # fmt: skip
        super().__init__(
            torch.ops.tfnb.adagrad, lr, {"sum": True, "step": True},
            sparse, still=weight_decay == 0 and (eps > 0 or initial_accumulator_value > 0),  # else 0 / 0
            lr_decay=lr_decay, weight_decay=weight_decay, eps=eps, maximize=bool(maximize),
        )  # fmt: skip
        self.start = _setting(type(self).__name__, "initial_accumulator_value", initial_accumulator_value)

    def initial(self, w: torch.Tensor) -> dict[str, torch.Tensor]:
        slots = super().initial(w)
        return {**slots, "sum": torch.full_like(w, complex(self.start, self.start) if w.is_complex() else self.start)}


class RMSProp(_Rule):
    """Steps divided by the root of a running mean of squared gradients (Hinton's lecture 6e; Graves 2013 centered)."""

    def __init__(
        self, lr: Any = 1e-2, alpha: float = 0.99, eps: float = 1e-8, weight_decay: float = 0.0, momentum: float = 0.0,
        centered: bool = False, *, maximize: bool = False, sparse: str = "exact",
    ) -> None:  # fmt: skip
        super().__init__(
            torch.ops.tfnb.rmsprop, lr, {"square_avg": True, "momentum_buffer": momentum != 0, "grad_avg": centered},
            sparse,
            alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum, centered=bool(centered),
            maximize=bool(maximize),
        )  # fmt: skip


class Adam(_Rule):
    """Running means of the gradient and its square (Kingma and Ba 2015); ``amsgrad`` after Reddi et al. 2018."""

    def __init__(
        self, lr: Any = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
        amsgrad: bool = False, *, maximize: bool = False, decoupled_weight_decay: bool = False,
        sparse: str = "exact",
    ) -> None:  # fmt: skip
        beta1, beta2 = betas
        super().__init__(
            torch.ops.tfnb.adam, lr, {"exp_avg": True, "exp_avg_sq": True, "step": True, "max_exp_avg_sq": amsgrad},
            sparse,
            beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, amsgrad=bool(amsgrad),
            maximize=bool(maximize), decoupled=bool(decoupled_weight_decay),
        )  # fmt: skip


class AdamW(Adam):
    """Adam with weight decay outside the gradient (Loshchilov and Hutter 2019)."""

    def __init__(
        self, lr: Any = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2,
        amsgrad: bool = False, *, maximize: bool = False, sparse: str = "exact",
    ) -> None:  # fmt: skip
        super().__init__(
            lr, betas, eps, weight_decay, amsgrad, maximize=maximize, decoupled_weight_decay=True, sparse=sparse
        )


class LazyAdam(Adam):
    """Adam that changes only the rows of a row-sparse gradient; on dense gradients it is Adam."""

    def __init__(
        self, lr: Any = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
        amsgrad: bool = False, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(lr, betas, eps, weight_decay, amsgrad, maximize=maximize, sparse="lazy")


# ----- what else torch.optim has -------------------------------------------------------------------------


class Borrowed(_Rule):
    """The rule of a torch optimizer whose update is torch's own function, see `tfnb.kernels.borrowed`.

    kind: the optimizer's name; op: that of the update; settings: as in torch's param groups, which checked them.
    """

    def __init__(self, kind: str, op: str, slots: str, lr: Any, **settings: Any) -> None:
        sparse = "lazy" if kind == "SparseAdam" else "exact"
        super().__init__(getattr(torch.ops.tfnb, op), lr, dict.fromkeys(slots.split(), True), sparse)
        self.kind, self.given = kind, settings
        self.settings = dict(part for item in settings.items() for part in _parts(*item))

    def initial(self, w: torch.Tensor) -> dict[str, torch.Tensor]:
        made = {name: _STARTS.get(name, _zeros)(w, self.lr) for name in self.names(w)}
        if self.kind == "SparseAdam":  # torch counts by a number of Python, and takes powers of it
            made["step"] = made["step"].double()
        return made

    def update(
        self, w: torch.Tensor, grad: torch.Tensor, slots: Mapping[str, torch.Tensor], lr: Rate
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        _check_kind(self.kind, w)
        return super().update(w, grad, slots, lr)

    update_rows = _Rule.update_rows  # `update` says nothing new of rows

    def __repr__(self) -> str:
        return f"{self.kind}(lr={self.lr!r}, {', '.join(f'{name}={value}' for name, value in self.given.items())})"


class Factored(Borrowed):
    """Adafactor: of a matrix it keeps the means of rows and columns, of a vector those of its elements."""

    def names(self, w: torch.Tensor) -> tuple[str, ...]:
        return self.slot_names if w.dim() > 1 else ("variance", "step")

    def update(
        self, w: torch.Tensor, grad: torch.Tensor, slots: Mapping[str, torch.Tensor], lr: Rate
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        _check_kind(self.kind, w)
        least = self.settings["eps1"]
        settings = self.settings | {"eps1": torch.finfo(w.dtype).eps if least is None else least}
        op = self.op if w.dim() > 1 else torch.ops.tfnb.adafactor_vector
        new, *after = op(w, grad, list(slots.values()), **_rate(lr), **settings)
        return new, dict(zip(slots, after, strict=True))


def _check_kind(kind: str, w: torch.Tensor) -> None:
    """Refuse, in what is no step by rows, what torch refuses."""
    if kind == "SparseAdam":
        raise InvalidArgument("SparseAdam takes gradients of tables by rows alone, and this one is dense: take Adam")
    if kind in ("Muon", "Adafactor") and w.is_complex():
        raise InvalidArgument(f"{kind} does not take complex parameters")


_PARTS = {
    "betas": ("beta1", "beta2"), "eps": ("eps1", "eps2"), "etas": ("etaminus", "etaplus"),
    "step_sizes": ("step_size_min", "step_size_max"),
}  # fmt: skip


def _parts(name: str, value: Any) -> list[tuple[str, Any]]:
    """A setting of torch by the names of the op, which has one for each part of a pair."""
    return (
        list(zip(_PARTS[name], value, strict=True))
        if name in _PARTS and not isinstance(value, Real)
        else [(name, value)]
    )


def _zeros(w: torch.Tensor, lr: float) -> torch.Tensor:
    return torch.zeros_like(w)


def _scalar(start: float, w: torch.Tensor) -> torch.Tensor:
    """A number beside a variable, of the dtype that torch.optim gives it."""
    wide = torch.get_default_dtype() is torch.float64
    return torch.tensor(start, dtype=torch.float64 if wide else torch.float32, device=w.device)


_STARTS: Mapping[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "step": lambda w, lr: _scalar(0.0, w),
    "mu": lambda w, lr: _scalar(1.0, w),
    "mu_product": lambda w, lr: _scalar(1.0, w),
    "eta": lambda w, lr: _scalar(lr, w),
    "step_size": lambda w, lr: torch.full_like(w, complex(lr, lr) if w.is_complex() else lr),
    "row_var": lambda w, lr: w.new_zeros(*w.shape[:-1], 1),
    "col_var": lambda w, lr: w.new_zeros(*w.shape[:-2], 1, w.shape[-1]),
}
