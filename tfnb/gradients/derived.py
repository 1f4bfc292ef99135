"""Gradients by autograd's own formula of an op, recorded while it runs.

The op is called once more on stand-ins for the recorded tensors, with autograd on. That computes nothing, since the
call gives what was recorded. Then autograd runs backward from there, and each ATen call that it makes is recorded. So
the result can be differentiated again. Complex tensors and sizes that vary are autograd's to handle. What a library
registered with torch as the gradient of its op is run in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from tfnb.errors import NoGradient
from tfnb.gradients.rule_table import Cotangents, Forward, Rule, gives_one
from tfnb.graph import current
from tfnb.graph.op_facts import unbind
from tfnb.graph.ops import overload
from tfnb.graph.setting import setting
from tfnb.graph.spec import flows
from tfnb.recording.dispatch.recorded_call import absent
from tfnb.recording.subgraphs.own_gradient import sealed
from tfnb.recording.values.recording import Recording

_KEYS = ("AutogradFunctionality", "AutogradOther", "ADInplaceOrView")
_REFUSED = re.compile(
    "not implemented|not differentiable|not support automatic differentiation|only concrete integers"
    "|no autograd formula"
)
_KERNEL = re.compile(r"^Autograd\w*(?:\[alias\])?: registered at", re.MULTILINE)


def dispatched_to_autograd() -> AbstractContextManager[None]:
    """Inside, calls reach autograd's kernels, which recordings exclude."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in _KEYS:
        excluded = excluded - torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return torch._C._ForceDispatchKeyGuard(included, excluded)  # type: ignore[no-any-return]


class AutogradStandIn(torch.Tensor):
    """Has the dtype and layout of a recorded tensor, with an autograd history; its shape is that of ``like``."""

    recorded: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, recorded: torch.Tensor, like: torch.Tensor | None = None) -> AutogradStandIn:
        made: AutogradStandIn = torch.Tensor._make_wrapper_subclass(
            cls, (recorded if like is None else like).shape, strides=recorded.stride(),
            storage_offset=recorded.storage_offset(), dtype=recorded.dtype, device=recorded.device,
            layout=recorded.layout,
        )  # fmt: skip
        made.recorded = recorded
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Sequence[type], args: object = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        raise AssertionError(f"{func} was called outside of {Derivation.__name__}")


class Derivation(TorchDispatchMode):
    """Records autograd's calls on stand-ins; the first call of ``op`` returns stand-ins for ``outs``."""

    def __init__(self, recorder: Recording, op: OpOverload, outs: list[Any]) -> None:
        super().__init__()
        self.recorder, self.op, self.outs = recorder, op, outs
        self.open = current.stack.open
        self.grad = torch.is_grad_enabled()
        self.is_first = True

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # how autograd takes an output that it saved: its gradient flows on
            return AutogradStandIn(args[0].recorded)
        if func is torch.ops.aten._conj.default and not isinstance(args[0], torch.Tensor):  # a number of the user's
            return torch.tensor(args[0].conjugate())
        if func is self.op and self.is_first:
            self.is_first = False
            return _grouped(
                func, [None if out.spec == absent(out.spec.device) else AutogradStandIn(out) for out in self.outs]
            )
        args, kwargs = tree_map_only(AutogradStandIn, lambda x: x.recorded, (args, kwargs or {}))
        with setting(current.stack, open=self.open), self.recorder.on(), torch.set_grad_enabled(self.grad):
            found = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, AutogradStandIn, found)


def _grouped(op: OpOverload, outs: list[Any]) -> Any:
    """Outputs as the op returns them."""
    if gives_one(str(op)):
        return outs[0]
    return outs if str(op._schema.returns[0].type) == "List[Tensor]" else tuple(outs)


def has_formula(op: str) -> bool:
    """Whether torch may know the gradient of an op: true for ATen ops, and for ops with an Autograd kernel.

    That kernel is what ``register_autograd`` of torch.library makes, or what a library in C++ registered.
    """
    if op.startswith("aten."):
        return True
    which = None if op.count(".") < 2 or op.startswith(("prims.", "tfnb.")) else overload(op)
    return which is not None and _KERNEL.search(torch._C._dispatch_dump(which._name)) is not None


def derived_rule(op: str, recorder: Recording) -> Rule:
    """The rule of autograd for an ATen op; returns NotImplemented if torch has none for these sizes."""

    def rule(n: Forward, dys: object) -> Any:
        mode = Derivation(recorder, overload(op), [*n.outs])
        given = [dys.given(i) for i in range(len(dys))] if isinstance(dys, Cotangents) else [dys]
        try:
            with (
                torch._C.DisableTorchFunction(), _disable_current_modes(), mode, dispatched_to_autograd(),
                setting(current.stack, open=[]),  # while torch works on stand-ins its Functions are its own
                nullcontext() if op.startswith("aten.") else sealed(recorder, partial(_left, op)),
            ):  # fmt: skip
                return _backward(n, given, mode)
        except RuntimeError as error:
            if _REFUSED.search(str(error)):
                return NotImplemented
            if op.startswith("aten."):
                raise
            node = n.out.node  # type: ignore[attr-defined]  # recorded
            text = f"the gradient that {op} was registered with cannot be recorded: {error}"
            raise NoGradient(f"{text}\n  node {node.name}, {node.source}", **node.where) from error

    return Rule(rule)


def _left(op: str, how: str) -> None:
    raise NoGradient(
        f"the gradient that {op} was registered with takes a value out of the graph with {how}, so a run on other data "
        "would use the sample's: write it in torch calls"
    )


def _backward(n: Forward, given: list[Any], mode: Derivation) -> list[Any]:
    """The cotangents of a node's inputs."""
    inputs = [AutogradStandIn(x) for x in n.inputs]
    for x, needed in zip(inputs, n.needed, strict=True):
        x.requires_grad = needed and flows(x.dtype)
    standing = Forward(n.op, inputs, (), n.attrs, n.needed)
    args, kwargs = unbind(mode.op, {name: standing[name] for name in n.attrs})
    with (
        torch.enable_grad(),
        torch._C._DisablePythonDispatcher(),
    ):  # Python ones of torch: some are wrong
        found = mode.op(*args, **kwargs)
    mode.is_first = False  # a kernel may call another op in its place, and this one in its backward
    outs = found if isinstance(found, (list, tuple)) else [found]
    pairs = [
        (y, AutogradStandIn(dy, y)) for y, dy in zip(outs, given, strict=True) if dy is not None and y.requires_grad
    ]
    wanted = [x for x in inputs if x.requires_grad]
    if not pairs:
        return [None] * len(inputs)
    ys, dys = zip(*pairs, strict=True)
    is_torchs = n.op.startswith("aten.")
    with nullcontext() if is_torchs else torch._C._AutoDispatchBelowAutograd():  # ops of libraries are recorded whole
        grads: Iterator[Any] = iter(torch.autograd.grad(ys, wanted, dys, allow_unused=True, create_graph=mode.grad))
    dxs = [next(grads) if x.requires_grad else None for x in inputs]
    return [None if dx is None else dx.recorded for dx in dxs]
