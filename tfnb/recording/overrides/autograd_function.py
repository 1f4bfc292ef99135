"""torch.autograd.Function in a recording: its forward is recorded, and its own backward is its gradient.

The forward runs as in torch, with grad mode off, and its results pass through one ``tfnb.with_gradient`` node. When
that node is differentiated, ``backward`` runs under the recorder. Uses private names of torch (tried with 2.11 and
2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from tfnb.errors import InvalidArgument, NoGradient, StaleNode, Unsupported
from tfnb.graph import Variable
from tfnb.interrupts import from_signal_handler
from tfnb.recording.marks.scopes import clean
from tfnb.recording.subgraphs.own_gradient import (
    FILLS,
    OwnRule,
    attach,
    floats,
    kept,
    open_recorder,
    sealed,
    written_at,
)
from tfnb.recording.subgraphs.recompute import CHECKPOINTS
from tfnb.recording.values.recording import Recording, open_recording
from tfnb.recording.values.tensor import Tensor
from tfnb.recording.writes.in_place_calls import rebind

_Base: Any = torch.autograd.function._SingleLevelFunction
_ONCE = once_differentiable(lambda ctx: None).__code__
_ARRAYS = ("numpy()", "tolist()")


class Context(FunctionCtx):
    """``ctx`` of one call, as in torch: holds the values saved by forward for backward."""

    to_save: tuple[Any, ...] = ()
    dirty_tensors: tuple[Any, ...] = ()
    non_differentiable: tuple[Any, ...] = ()
    materialize_grads = True
    needs_input_grad: tuple[bool, ...] = ()

    def __init__(self, function: Callable[..., Any]) -> None:
        self._forward_cls = function

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The arguments of ``save_for_backward``."""
        return tuple(self.to_save)

    def settle(self, recorder: Recording) -> None:
        """After forward: freeze the saved values."""
        self.to_save = tuple(kept(recorder, t) if isinstance(t, torch.Tensor) else t for t in self.to_save)
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and value.node.op == "tfnb.constant":
                setattr(self, name, kept(recorder, value))


def recorded_apply(original: Callable[..., Any]) -> Any:
    """`Function.apply` while something is recorded."""
    return classmethod(_apply)


def _apply(cls: type, *args: object, **kwargs: object) -> Any:
    recorder = open_recording()
    if recorder is None or not issubclass(cls, torch.autograd.Function):
        return super(_Base, cls).apply(*args, **kwargs)
    if cls in CHECKPOINTS:
        return CHECKPOINTS[cls](recorder, *args)
    return _record(recorder, cls, args, kwargs)


def _record(recorder: Recording, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One call of a Function: its results, with its own gradient."""
    with_context = cls.setup_context is not torch.autograd.Function.setup_context
    if kwargs:
        raise TypeError(f"{cls.__name__}.apply takes no keyword arguments, got {', '.join(kwargs)}")
    args = tuple(recorder.read(a) if isinstance(a, Variable) else a for a in args)
    wanted = [i for i, a in enumerate(args) if _conducts(recorder, a)] if torch.is_grad_enabled() else []
    before = [recorder._entry(args[i]) for i in wanted]
    ctx = Context(cls)
    ctx.needs_input_grad = tuple(i in wanted and a.requires_grad for i, a in enumerate(args))  # as torch says it

    def refuse(how: str) -> None:
        if how in _ARRAYS:
            raise Unsupported(_left(cls.forward, _whose(cls), "forward", how) + recorder.tape.at())

    with torch.no_grad(), recorder.scope(clean(cls.__name__)), sealed(recorder, refuse):
        if with_context:
            result = cls.forward(*args)
            cls.setup_context(ctx, args, result)
        else:
            result = cls.forward(ctx, *args)
        outs = list(result) if isinstance(result, (tuple, list)) else [result]
    ends = [i for i, out in enumerate(outs) if floats(out) and not _among(out, ctx.non_differentiable)]
    if wanted and ends:
        values = [recorder._entry(outs[i]) for i in ends]
        handles = [None if _among(outs[i], args) else outs[i] for i in ends]
        rule = OwnRule(_Backward(cls, ctx, wanted, len(args), outs, ends), written_at(_backward_of(cls)))
        ended = attach(recorder, handles, values, before, rule, clean(cls.__name__))
        for i, new in zip(ends, ended, strict=True):
            if _among(outs[i], ctx.dirty_tensors):
                rebind(recorder, outs[i], new)
            else:
                outs[i] = new
    ctx.settle(recorder)
    return tuple(outs) if isinstance(result, tuple) else outs if isinstance(result, list) else outs[0]


def _conducts(recorder: Recording, value: Any) -> bool:
    """Whether a gradient may be wanted for an argument: recorded, or the tensor of a Variable."""
    return floats(value) and (isinstance(value, Tensor) or recorder.variable_of(value) is not None)


def _among(value: torch.Tensor, others: Any) -> bool:
    return any(value is other for other in others)


def _backward_of(cls: Any) -> Callable[..., Any]:
    return cls.backward if cls.vjp is torch.autograd.Function.vjp else cls.vjp


def _whose(cls: type) -> str:
    return f"the torch.autograd.Function {cls.__name__}"


def run_backward(function: Callable[..., Any], whose: str, part: str, ctx: Context, grads: Sequence[Any]) -> Any:
    """Run a user's backward under the recorder; raises NoGradient if the call cannot be recorded."""

    def refuse(how: str) -> None:
        if how == FILLS:
            raise Unsupported(
                "it adds to the .grad of Parameters with a backward() of its own, which loss.backward() alone sees: "
                "train by that and optimizer.step(), or return these gradients"
            )
        raise Unsupported(_left(function, whose, part, how))

    try:
        with sealed(open_recorder(), refuse):
            return function(ctx, *grads)
    except (NoGradient, StaleNode):
        raise
    except Exception as error:
        if from_signal_handler(error):
            raise
        raise NoGradient(f"the {part} of {whose} ({written_at(function)}) cannot be recorded: {error}") from error


def _left(function: Callable[..., Any], whose: str, part: str, how: str) -> str:
    return (
        f"the {part} of {whose} ({written_at(function)}) takes a value out of the graph with {how}, so a run on other "
        "data would use the sample's; write it in torch calls, or make it a torch.library.custom_op"
    )


class _Backward:
    """The rule of one call: runs the Function's backward under the recorder."""

    def __init__(
        self, cls: type, ctx: Context, wanted: list[int], arguments: int, outs: list[Any], ends: list[int]
    ) -> None:
        self.cls, self.ctx, self.wanted, self.arguments = cls, ctx, wanted, arguments
        self.ends, self.others = ends, {i: out for i, out in enumerate(outs) if i not in ends}
        self.outputs = len(outs)

    def __call__(self, n: Any, dys: Sequence[torch.Tensor | None]) -> list[Any]:
        needed = {place: n.needed[i] for i, place in enumerate(self.wanted)}
        self.ctx.needs_input_grad = tuple(needed.get(i, False) for i in range(self.arguments))
        grads = self._called([self._cotangent(i, dys) for i in range(self.outputs)])
        found = [grads[place] for place in self.wanted]
        return self._once(n, dys, found) if _backward_of(self.cls).__code__ is _ONCE else found

    def _cotangent(self, out: int, dys: Any) -> torch.Tensor | None:
        if out in self.ends:
            place = self.ends.index(out)
            return dys[place] if self.ctx.materialize_grads else dys.given(place)
        other = self.others[out]
        return torch.zeros_like(other) if isinstance(other, torch.Tensor) and self.ctx.materialize_grads else None

    def _called(self, grads: list[Any]) -> list[Any]:
        function = _backward_of(self.cls)
        result = run_backward(function, _whose(self.cls), "backward", self.ctx, grads)
        found = list(result) if isinstance(result, (tuple, list)) else [result]
        while len(found) > self.arguments and found[-1] is None:
            found.pop()
        odd = next((g for g in found if g is not None and not isinstance(g, torch.Tensor)), None)
        if len(found) != self.arguments or odd is not None:
            raise InvalidArgument(
                f"Num gradients {len(found)} of {self.cls.__name__} do not match num inputs {self.arguments}\n"
                f"  rule: {written_at(function)}; it returns one entry per argument of forward, a tensor or None"
                + (f", not {type(odd).__name__}" if odd is not None else ""), op=self.cls.__name__,
            )  # fmt: skip
        return found

    def _once(self, n: Any, dys: Any, found: list[Any]) -> list[Any]:
        """The gradients of a ``once_differentiable`` backward, marked so that differentiating again raises
        NoGradient.
        """
        recorder = open_recorder()
        where = written_at(_backward_of(self.cls))

        def refuse(n: object, dys: object) -> Any:
            raise NoGradient(
                f"the backward of the torch.autograd.Function {self.cls.__name__} ({where}) is marked "
                "once_differentiable: it has no second derivative"
            )

        places = [i for i, dx in enumerate(found) if dx is not None]
        args = [*n.inputs[: len(self.wanted)], *(dys.given(i) for i in range(len(self.ends)))]
        entries = [recorder._entry(a) for a in args if a is not None]
        values = [recorder._entry(found[i]) for i in places]
        results = attach(recorder, [None] * len(places), values, entries, OwnRule(refuse, where), "once_differentiable")
        return [results[places.index(i)] if i in places else None for i in range(len(found))]
