"""The optimizers of torch.optim: argument names, defaults, slot names and formulas are torch's.

`OPTIMIZERS` defines each once, for ``minimize`` and for ``optimizer.step()`` in a recording (`tfnb.train.from_torch`).
The classes below are those that a user makes without torch's; `Momentum` is SGD with another default.

``sparse`` says what a row-sparse gradient (`tfnb.IndexedSlices`) does. ``"exact"``: what the dense gradient would do,
which takes a pass over all rows where a row without gradient moves too (momentum, running means, weight decay), and on
devices other than the CPU. ``"lazy"``: only rows that are in the gradient change, and their slots; a count of steps is
that of all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from numbers import Real
from typing import Any, NamedTuple

import torch

from tfnb.errors import InvalidArgument
from tfnb.gradients import IndexedSlices
from tfnb.graph.lazy_memory import zeros_like
from tfnb.kernels import borrowed  # noqa: F401  defines torch.ops.tfnb
from tfnb.train.optimizer import LearningRate, Optimizer, Rate

SPARSE = ("exact", "lazy")


class Definition(NamedTuple):
    """The definition of a torch optimizer.

    op: of `tfnb.kernels.optim` or `borrowed`. slots: their names, in the order of the op; ``name?a&b`` only where the
    settings a and b are set. still: whether a row without gradient stays as it is, and its slots, so that exact steps
    need the others only. vector: op and first slot where the variable is no matrix. refuses: of which variables, and
    what torch says then.
    """

    op: str
    slots: str = ""
    still: Callable[[Mapping[str, Any]], bool] = lambda settings: False
    vector: tuple[str, str] | None = None
    refuses: tuple[Callable[[torch.Tensor], bool], str] | None = None


_COMPLEX = torch.is_complex, "complex parameters are not taken"
_ADAM = Definition("adam", "exp_avg exp_avg_sq step max_exp_avg_sq?amsgrad")
OPTIMIZERS: dict[str, Definition] = {
    "SGD": Definition(
        "sgd", "momentum_buffer?momentum step?momentum&dampening",
        lambda s: s["momentum"] == 0 and s["weight_decay"] == 0,
    ),
    "Adagrad": Definition(
        "adagrad", "sum step",
        lambda s: s["weight_decay"] == 0 and (s["eps"] > 0 or s["initial_accumulator_value"] > 0),  # else 0 / 0
    ),
    "RMSprop": Definition("rmsprop", "square_avg momentum_buffer?momentum grad_avg?centered step"),
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adadelta": Definition("adadelta", "square_avg acc_delta step"),
    "Adafactor": Definition(
        "adafactor", "row_var col_var step", vector=("adafactor_vector", "variance"), refuses=_COMPLEX
    ),
    "Adamax": Definition("adamax", "exp_avg exp_inf step"),
    "ASGD": Definition("asgd", "ax mu eta step"),
    "Muon": Definition("muon", "momentum_buffer", refuses=_COMPLEX),
    "NAdam": Definition("nadam", "exp_avg exp_avg_sq mu_product step"),
    "RAdam": Definition("radam", "exp_avg exp_avg_sq step"),
    "Rprop": Definition("rprop", "prev step_size step"),
    "SparseAdam": Definition(
        "sparse_adam", "exp_avg exp_avg_sq step",
        refuses=(lambda w: True, "gradients of tables by rows alone are taken, and this one is dense: take Adam"),
    ),
}  # fmt: skip
"""By the name of the class in torch.optim."""

_FUSED = {"sgd", "adagrad", "adam"}  # their kernels take counts of steps in float32
_BETWEEN = {"beta1": (0, 1), "beta2": (0, 1), "dampening": (-inf, inf), "beta2_decay": (-inf, inf)}  # else [0, inf)
_PAIRS = {
    "betas": ("beta1", "beta2"), "eps": ("eps1", "eps2"), "etas": ("etaminus", "etaplus"),
    "step_sizes": ("step_size_min", "step_size_max"),
}  # fmt: skip
OF_RATE = frozenset({"eta", "step_size"})  # slots that begin with the learning rate of the first step
_STARTS: Mapping[str, Callable[[torch.Tensor, UpdateRule], torch.Tensor]] = {
    "step": lambda w, rule: _count(w, 0.0, rule),
    "mu": lambda w, rule: _count(w, 1.0, rule),
    "mu_product": lambda w, rule: _count(w, 1.0, rule),
    "eta": lambda w, rule: _count(w, rule.lr, rule),
    "step_size": lambda w, rule: _full(w, rule.lr),
    "sum": lambda w, rule: _full(w, start) if (start := rule.initial_accumulator_value) else zeros_like(w),
    "row_var": lambda w, rule: w.new_zeros(*w.shape[:-1], 1),
    "col_var": lambda w, rule: w.new_zeros(*w.shape[:-2], 1, w.shape[-1]),
}
"""What a slot starts with; others with zeros."""


def _count(w: torch.Tensor, start: float, rule: UpdateRule) -> torch.Tensor:
    """A counter beside a variable, in the dtype of torch.optim; SparseAdam takes its powers in Python."""
    wide = torch.get_default_dtype() is torch.float64 and rule.definition.op not in _FUSED
    dtype = torch.float64 if wide or rule.kind == "SparseAdam" else torch.float32
    return torch.tensor(start, dtype=dtype, device=w.device)


def _full(w: torch.Tensor, value: float) -> torch.Tensor:
    return torch.full_like(w, complex(value, value) if w.is_complex() else value)


class UpdateRule(Optimizer):
    """An optimizer of `OPTIMIZERS`, with torch's settings by torch's names."""

    def __init__(self, kind: str, lr: LearningRate, *, sparse: str = "exact", **given: object) -> None:
        super().__init__(lr)
        if sparse not in SPARSE:
            raise InvalidArgument(f"{type(self).__name__}: sparse is one of {', '.join(SPARSE)}, not {sparse!r}")
        self.kind, self.definition = kind, OPTIMIZERS[kind]
        self.sparse = "lazy" if kind == "SparseAdam" else sparse
        if "eps" in given and kind != "Adafactor":  # which has two of them
            _setting(type(self).__name__, "eps", given["eps"])
        parts = parts_of(given)
        checked = {name: _setting(type(self).__name__, name, value) for name, value in parts.items()}
        self.initial_accumulator_value: float = checked.pop("initial_accumulator_value", 0.0)
        self.settings = checked
        self.still = self.definition.still(parts)

    def names(self, w: torch.Tensor) -> tuple[str, ...]:
        """The slots of a variable like ``w``."""
        if self._is_vector(w):
            return "variance", "step"
        rows = (name.partition("?") for name in self.definition.slots.split())
        return tuple(name for name, _, needed in rows if all(self.settings[n] for n in needed.split("&") if n))

    def initial(self, w: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: _STARTS[name](w, self) if name in _STARTS else zeros_like(w) for name in self.names(w)}

    def update(
        self, w: torch.Tensor, grad: torch.Tensor, slots: Mapping[str, torch.Tensor], lr: Rate
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        refused, why = self.definition.refuses or (lambda w: False, "")
        if refused(w):
            raise InvalidArgument(f"{self.kind}: {why}")
        settings = self.settings
        if settings.get("eps1", 0) is None:
            settings = settings | {"eps1": torch.finfo(w.dtype).eps}
        op = self.definition.vector[0] if self.definition.vector and self._is_vector(w) else self.definition.op
        new, *after = getattr(torch.ops.tfnb, op)(w, grad, list(slots.values()), **_rate(lr), **settings)
        return new, dict(zip(slots, after, strict=True))

    def update_rows(
        self, w: torch.Tensor, grad: IndexedSlices, slots: Mapping[str, torch.Tensor], lr: Rate
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        if self.sparse == "exact" and not (self.still and w.device.type == "cpu"):
            why = f"an exact {self.kind} step renews every row, sparse='lazy' those of the gradient"
            if self.still:  # the host would wait for the number of distinct rows, and nothing could be launched whole
                why = f"a step of {self.kind} on {w.device} does not count distinct rows, sparse='lazy' does"
            return self.update(w, grad.to_dense(why), slots, lr)
        rows, op = grad.coalesce(), getattr(torch.ops.tfnb, f"{self.definition.op}_rows")
        new, *after = op(w, rows.values, list(slots.values()), rows.indices, **_rate(lr), **self.settings)
        return new, dict(zip(slots, after, strict=True))

    def _is_vector(self, w: torch.Tensor) -> bool:
        return self.definition.vector is not None and w.dim() < 2

    def __repr__(self) -> str:
        name = self.kind if type(self) is UpdateRule else type(self).__name__
        shown = self.settings | ({"sparse": self.sparse} if self.sparse != "exact" else {})
        return f"{name}(lr={self.lr!r}, {', '.join(f'{name}={value}' for name, value in shown.items())})"


def settings_of(kind: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a torch param group used by the optimizer's op or by its initial slots."""
    schema = getattr(torch.ops.tfnb, OPTIMIZERS[kind].op).default._schema
    known = {argument.name for argument in schema.arguments if argument.kwarg_only} - {"lr"}
    known |= {"initial_accumulator_value"}
    return {name: value for name, value in group.items() if known.issuperset(part for part, _ in _parts(name, value))}


def parts_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of torch by the names of the op.

    >>> parts_of({"betas": (0.9, 0.999), "eps": 1e-8})
    {'beta1': 0.9, 'beta2': 0.999, 'eps': 1e-08}
    """
    return dict(part for item in settings.items() for part in _parts(*item))


def _parts(name: str, value: object) -> list[tuple[str, Any]]:
    """A setting of torch under the names of the op, which has one name for each part of a pair."""
    if name not in _PAIRS or (name == "eps" and isinstance(value, Real)):  # some have one eps, others a pair
        return [(name, value)]
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InvalidArgument(f"{name} is a pair, {' and '.join(_PAIRS[name])}, not {value!r}")
    return list(zip(_PAIRS[name], value, strict=True))


def _rate(lr: Rate) -> dict[str, Rate]:
    return {"lr": lr} if isinstance(lr, float) else {"rate": lr}


def _setting(owner: str, name: str, value: object) -> Any:
    if isinstance(value, bool) or name in ("eps1", "ns_coefficients", "ns_steps", "adjust_lr_fn"):
        return value
    low, high = _BETWEEN.get(name, (0, inf))
    if not isinstance(value, Real) or not low <= float(value) < high:
        limits = f"from {low} to below {high}" if high < inf else f"of at least {low}"
        raise InvalidArgument(f"{owner}: {name} must be a number {limits}, not {value!r}")
    return float(value)


class SGD(UpdateRule):
    """Stochastic gradient descent, with momentum if nonzero."""

    def __init__(
        self, lr: LearningRate = 1e-3, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0,
        nesterov: bool = False, *, maximize: bool = False, sparse: str = "exact",
    ) -> None:  # fmt: skip
        super().__init__(
            "SGD", lr, sparse=sparse, momentum=momentum, dampening=dampening, weight_decay=weight_decay,
            nesterov=bool(nesterov), maximize=bool(maximize),
        )  # fmt: skip
        if nesterov and (momentum == 0 or dampening != 0):
            raise InvalidArgument(
                f"{type(self).__name__}: nesterov needs a momentum and no dampening, "
                f"got momentum={momentum}, dampening={dampening}"
            )


class Momentum(SGD):
    """SGD with momentum."""

    def __init__(
        self, lr: LearningRate = 1e-3, momentum: float = 0.9, dampening: float = 0.0, weight_decay: float = 0.0,
        nesterov: bool = False, *, maximize: bool = False, sparse: str = "exact",
    ) -> None:  # fmt: skip
        super().__init__(lr, momentum, dampening, weight_decay, nesterov, maximize=maximize, sparse=sparse)


class Nesterov(Momentum):
    """Momentum whose gradient counts as if taken ahead (Nesterov 1983, in the form of Sutskever et al. 2013).

    ``b = momentum*b + g; w -= lr * (g + momentum*b)``: `torch.optim.SGD` with ``nesterov=True``.

    >>> Nesterov(0.1).settings["nesterov"]
    True
    """

    def __init__(
        self, lr: LearningRate = 1e-3, momentum: float = 0.9, weight_decay: float = 0.0, *, maximize: bool = False,
        sparse: str = "exact",
    ) -> None:  # fmt: skip
        super().__init__(lr, momentum, 0.0, weight_decay, True, maximize=maximize, sparse=sparse)


class Adadelta(UpdateRule):
    """Steps as long as a running mean of past ones, over that of gradients, each by its root (Zeiler 2012).

    >>> Adadelta(rho=0.95)
    Adadelta(lr=1.0, rho=0.95, eps=1e-06, weight_decay=0.0, maximize=False)
    """

    def __init__(
        self, lr: LearningRate = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0, *,
        maximize: bool = False, sparse: str = "exact",
    ) -> None:  # fmt: skip
        super().__init__(
            "Adadelta", lr, sparse=sparse, rho=rho, eps=eps, weight_decay=weight_decay, maximize=bool(maximize)
        )
        if rho > 1:
            raise InvalidArgument(f"{type(self).__name__}: rho is the weight of the past, from 0 to 1, not {rho}")


class Adagrad(UpdateRule):
    """Steps divided by the root of all squared gradients so far (Duchi et al. 2011)."""

    def __init__(
        self, lr: LearningRate = 1e-2, lr_decay: float = 0.0, weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0, eps: float = 1e-10, *, maximize: bool = False, sparse: str = "exact",
    ) -> None:  # fmt: skip
        super().__init__(
            "Adagrad", lr, sparse=sparse, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps,
            maximize=bool(maximize), initial_accumulator_value=initial_accumulator_value,
        )  # fmt: skip


class RMSProp(UpdateRule):
    """Steps divided by the root of a running mean of squared gradients (Hinton's lecture 6e; Graves 2013 centered)."""

    def __init__(
        self, lr: LearningRate = 1e-2, alpha: float = 0.99, eps: float = 1e-8, weight_decay: float = 0.0,
        momentum: float = 0.0, centered: bool = False, *, maximize: bool = False, sparse: str = "exact",
    ) -> None:  # fmt: skip
        super().__init__(
            "RMSprop", lr, sparse=sparse, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum,
            centered=bool(centered), maximize=bool(maximize),
        )  # fmt: skip


class Adam(UpdateRule):
    """Running means of the gradient and its square (Kingma and Ba 2015); ``amsgrad`` after Reddi et al. 2018."""

    def __init__(
        self, lr: LearningRate = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False, *, maximize: bool = False, decoupled_weight_decay: bool = False,
        sparse: str = "exact",
    ) -> None:  # fmt: skip
        super().__init__(
            "Adam", lr, sparse=sparse, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=bool(amsgrad),
            maximize=bool(maximize), decoupled_weight_decay=bool(decoupled_weight_decay),
        )  # fmt: skip


class AdamW(Adam):
    """Adam with weight decay outside the gradient (Loshchilov and Hutter 2019)."""

    def __init__(
        self, lr: LearningRate = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False, *, maximize: bool = False, sparse: str = "exact",
    ) -> None:  # fmt: skip
        super().__init__(
            lr, betas, eps, weight_decay, amsgrad, maximize=maximize, decoupled_weight_decay=True, sparse=sparse
        )


class LazyAdam(Adam):
    """Adam that changes only the rows of a row-sparse gradient; plain Adam on dense gradients."""

    def __init__(
        self, lr: LearningRate = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(lr, betas, eps, weight_decay, amsgrad, maximize=maximize, sparse="lazy")
