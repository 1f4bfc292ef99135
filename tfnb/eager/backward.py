"""`torch.autograd.backward` and `torch.autograd.grad` of recorded tensors: gradients as nodes, with torch's arguments.

As in torch, what a backward pass computes is a constant to later ones unless `create_graph` is set: it is recorded with
grad mode off. A graph is never freed, so `retain_graph` says nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from tfnb.eager.state import AutogradState
from tfnb.errors import FailedPrecondition, InvalidArgument, ShapeError, Unsupported
from tfnb.gradients.presence import presences
from tfnb.gradients.walker import differentiate, sources
from tfnb.graph import Variable
from tfnb.recording import Recorder, Tensor
from tfnb.recording.subgraphs.own_gradient import FILLS

Seeds = torch.Tensor | Sequence[torch.Tensor | None] | None  # cotangents of the outputs; None: of scalars, ones

_filling: ContextVar[bool] = ContextVar("filling", default=False)  # whether a `backward` is under way


def tensor_backward(
    state: AutogradState, tensor: torch.Tensor, gradient: torch.Tensor | None = None, retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: torch.Tensor | Sequence[torch.Tensor] | None = None,
) -> None:  # fmt: skip
    """``tensor.backward()``."""
    autograd_backward(state, tensor, gradient, create_graph=create_graph, inputs=inputs)


def autograd_backward(
    state: AutogradState,
    tensors: torch.Tensor | Sequence[torch.Tensor],
    grad_tensors: Seeds = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Seeds = None,
    inputs: torch.Tensor | Sequence[torch.Tensor] | None = None,
) -> None:
    """Add d sum(tensors * grads) / d leaf to the ``.grad`` of every leaf, or of ``inputs`` only.

    Raises FailedPrecondition if no leaf is connected, ShapeError for a loss without ``grads`` that is no scalar.
    """
    recorder = state.recorder
    ys = _outputs(recorder, tensors)
    seeds = _seeds(recorder, ys, grad_variables if grad_tensors is None else grad_tensors)
    leaves = state.leaves() if inputs is None else _chosen(state, inputs)
    with _under_way() as within:
        present = presences(recorder, [y.value for y in ys], sources(recorder, [x for _, x in leaves]))
        found = _gradients(recorder, ys, [x for _, x in leaves], seeds, create_graph) if leaves else []
    if recorder.refuse is not None and not within and _reached(leaves, found):
        recorder.refuse(FILLS)  # in the rule of an op that `gradients` differentiates: nobody would ask for them
    if all(dx is None for dx in found):
        raise FailedPrecondition(
            f"backward() of {', '.join(y.name for y in ys)}: nothing that requires a gradient has a path to it; "
            f"looked at: {_names(x for _, x in leaves)}. detach(), .data, integer casts and torch.no_grad() cut paths"
            f"{recorder.tape.at()}"
        )
    for (holder, _), dx, presence in zip(leaves, found, present, strict=True):
        if dx is not None:
            state.accumulate(holder, dx, presence, keep_graph=create_graph)
            for hook in holder.after_hooks if isinstance(holder, Variable) else ():
                hook()


@contextmanager
def _under_way() -> Iterator[bool]:
    """Inside, additions to ``.grad`` are handled by the caller; yields whether that was so before."""
    token = _filling.set(True)
    try:
        yield token.old_value is True
    finally:
        _filling.reset(token)


def _reached(leaves: Sequence[tuple[Any, Any]], found: Sequence[object]) -> bool:
    return any(isinstance(holder, Variable) and dx is not None for (holder, _), dx in zip(leaves, found, strict=True))


def autograd_grad(
    state: AutogradState, outputs: Any, inputs: Any, grad_outputs: Seeds = None, retain_graph: bool | None = None,
    create_graph: bool = False, only_inputs: bool = True, allow_unused: bool | None = None,
    is_grads_batched: bool = False, materialize_grads: bool = False,
) -> Any:  # fmt: skip
    """d sum(outputs * grad_outputs) / d input for each of ``inputs``: a tuple, or a dict where inputs is one.

    Raises FailedPrecondition for an input that no output depends on, unless unused ones are allowed.
    """
    if is_grads_batched:
        raise Unsupported(
            f"torch.autograd.grad(is_grads_batched=True) is not recorded: call it once for each row of grad_outputs"
            f"{state.recorder.tape.at()}"
        )
    if materialize_grads and allow_unused is False:
        raise InvalidArgument(
            "torch.autograd.grad: materialize_grads=True needs allow_unused=True, or nothing, not False"
        )
    recorder = state.recorder
    ys = _outputs(recorder, outputs)
    xs = [x for _, x in _chosen(state, inputs)]
    found = _gradients(recorder, ys, xs, _seeds(recorder, ys, grad_outputs), create_graph)
    unused = [x for x, dx in zip(xs, found, strict=True) if dx is None]
    if unused and not allow_unused and not materialize_grads:
        raise FailedPrecondition(
            f"torch.autograd.grad of {', '.join(y.name for y in ys)}: no path from {_names(unused)}; "
            f"allow_unused=True gives None for it, materialize_grads=True zeros{recorder.tape.at()}"
        )
    if materialize_grads:
        found = [torch.zeros_like(x) if dx is None else dx for x, dx in zip(xs, found, strict=True)]
    return dict(zip(inputs, found, strict=True)) if isinstance(inputs, dict) else tuple(found)


# -- arguments ------------------------------------------------------------------------------------------------------


def _listed(items: torch.Tensor | Variable | dict[Any, Any] | Iterable[Any]) -> list[Any]:
    if isinstance(items, dict):
        return list(items.values())
    return [items] if isinstance(items, torch.Tensor | Variable) else list(items)


def _outputs(recorder: Recorder, tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[Tensor]:
    ys: list[Any] = [y.read() if isinstance(y, Variable) else y for y in _listed(tensors)]
    for y in ys:
        if not isinstance(y, Tensor) or y.graph is not recorder.graph:
            what = f"of graph {y.graph.name}" if isinstance(y, Tensor) else f"a plain {type(y).__name__}"
            raise InvalidArgument(
                f"inside a recording, gradients are those of tensors recorded in it; this one is {what}: "
                f"compute it here, or differentiate it outside{recorder.tape.at()}"
            )
    return ys


def _seeds(recorder: Recorder, ys: Sequence[Tensor], grads: Seeds) -> list[Any]:
    seeds = [None] * len(ys) if grads is None else _listed(grads)
    if len(seeds) != len(ys):
        raise InvalidArgument(f"{len(seeds)} gradients were given for {len(ys)} outputs{recorder.tape.at()}")
    for y, seed in zip(ys, seeds, strict=True):
        if seed is None and any(size != 1 for size in y.spec.shape):
            raise ShapeError(
                f"a gradient is implied for scalars only: {y.name} is {y.spec}; pass gradient=, or take its mean() or "
                f"sum(){recorder.tape.at()}"
            )
    return seeds


def _chosen(state: AutogradState, inputs: torch.Tensor | Sequence[torch.Tensor]) -> list[tuple[Any, Any]]:
    """(holder, x) for each of the inputs that the user named."""
    found = []
    for x in _listed(inputs):
        holder = state.holder(x)
        if not isinstance(holder, Variable | Tensor):
            raise InvalidArgument(
                f"a gradient is taken with respect to a Parameter, Variable or recorded tensor, not a plain "
                f"{type(x).__name__}{state.recorder.tape.at()}"
            )
        found.append((holder, state.source(holder)))
    if not found:
        raise InvalidArgument(f"no input to differentiate with respect to{state.recorder.tape.at()}")
    return found


def _names(xs: Iterable[Any]) -> str:
    names = [x.name for x in xs]
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") or "nothing"


# -- the pass -------------------------------------------------------------------------------------------------------


def _gradients(recorder: Recorder, ys: list[Any], xs: list[Any], seeds: list[Any], create_graph: bool) -> list[Any]:
    with torch.set_grad_enabled(create_graph):
        found = differentiate(recorder, ys, xs, seeds)
        return [dx if dx is None else _handle(recorder, dx, create_graph) for dx in found]


def _handle(recorder: Recorder, dx: Any, create_graph: bool) -> Tensor:
    """A handle of its own, so that a write into one gradient is no write into another."""
    if not isinstance(dx, Tensor):
        dx = torch.clone(dx)
    if not create_graph and "no_grad" not in dx.node.tags:  # a value of the forward pass, handed through
        dx = dx.detach()
    return recorder.tensor(dx.value)
