"""A torch function mode that answers autograd's functions and attributes from the state of the recording."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tfnb.eager.backward import autograd_backward, autograd_grad, tensor_backward
from tfnb.eager.outside import explained
from tfnb.eager.state import AutogradState
from tfnb.eager.steps import recorded_steps
from tfnb.errors import Unsupported
from tfnb.graph import Node, current
from tfnb.recording import Recorder, Tensor
from tfnb.recording.marks.lasting_state import FLAG, flag
from tfnb.recording.marks.user_code import is_foreign
from tfnb.recording.overrides.override_table import OVERRIDES, Stage, override
from tfnb.recording.values.variables import known

_PACKAGE = str(Path(__file__).parents[1])
_ROWS = OVERRIDES[Stage.AUTOGRAD]


@contextmanager
def facade(recorder: Recorder) -> Iterator[None]:
    """Inside, torch's autograd and optimizers are recorded."""
    explained()
    state = AutogradState(recorder)
    recorder.autograd = state
    with recorded_steps(), Calls(state):
        yield


class Calls(TorchFunctionMode):
    """Calls of one recording, each by the row of its function in the table of overrides."""

    def __init__(self, state: AutogradState) -> None:
        super().__init__()
        self.state = state

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        __tracebackhide__ = True
        row, kwargs = _ROWS.get(func), kwargs or {}
        if row is None or current.recording() is not self.state.recorder or _is_of_func(args):
            return func(*args, **kwargs)
        with self if func in _PASSES else nullcontext():  # hooks are called inside, with the same state
            found = row(self.state, *args, **kwargs)
        return func(*args, **kwargs) if found is NotImplemented else found


def _is_of_func(args: object) -> bool:
    """Whether torch.func makes the call: it has its own autograd for its wrapped tensors."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return torch._C._are_functorch_transforms_active() or any(
        wrapped(t) for t in tree_leaves(args) if isinstance(t, torch.Tensor)
    )


class GradFn:
    """The node of a tensor, where torch would show the function of its backward pass."""

    def __init__(self, node: Node, at: str) -> None:
        self.node, self._at = node, at

    def name(self) -> str:
        """The op that was called."""
        return self.node.op

    def __repr__(self) -> str:
        return f"<grad_fn of {self.node.name}: {self.node.op}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Unsupported(
            f"grad_fn.{name} is not recorded, the backward pass is nodes of the graph: use Tensor.register_hook for a "
            f"gradient, graph.nodes to look around{self._at}"
        )


def _grad_fn(state: AutogradState, tensor: Tensor) -> GradFn | None:
    return None if state.is_leaf(tensor) else GradFn(tensor.node, state.recorder.tape.at())


def _after_accumulation(state: AutogradState, tensor: Tensor, hook: Callable[..., Any]) -> Any:
    raise Unsupported(
        "register_post_accumulate_grad_hook on a recorded tensor is not recorded: use register_hook, or read "
        f".grad after backward(){state.recorder.tape.at()}"
    )


def _freeze(state: AutogradState, tensor: torch.Tensor, requires_grad: bool = True) -> Any:
    """``requires_grad_`` of a plain tensor."""
    var = None if flag(tensor) == requires_grad else known(tensor)
    if var is not None:
        state.reread(var, thawed=requires_grad)
        state.recorder.python.sets_flag(var)
    if flag(tensor) != requires_grad:
        state.recorder.lasting.keep(FLAG, tensor)
    return tensor.requires_grad_(requires_grad)


def _read_grad(state: AutogradState, tensor: torch.Tensor) -> torch.Tensor | None:
    """``.grad``, with a note where a branch decides about the gradient: the user's code may ask whether it is None."""
    found = state.grad(tensor)
    if found is not None and state.present(state.holder(tensor)) is not None and not is_foreign(_caller()):
        state.recorder.warn(
            "a branch decides whether there is a .grad: in runs where plain PyTorch has None it reads as zeros here, "
            "and `is None` is answered as if it was there. In such runs an optimizer leaves the Parameter as it is"
        )
    return found


def _caller() -> str:
    """The file of the code that asks torch, outside of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_filename


def _hook_outside(state: AutogradState, tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
    """``register_hook`` of a Parameter: torch's own, refused in branches, since a hook stays for all runs."""
    if state.recorder.inside:
        raise state.hooked_outside(getattr(state.holder(tensor), "name", "a Parameter"))
    return NotImplemented


def _detach(state: AutogradState, tensor: torch.Tensor) -> Any:
    """``detach_``: an ordinary op, refused in branches for a tensor of outside, whose history each run would lose."""
    inside = state.recorder.inside
    if inside and inside[-1].is_outer(tensor):
        name = getattr(state.holder(tensor), "name", "a Parameter")
        raise Unsupported(
            f"detach_() of {name} inside of a branch, loop or function of the graph in which it is not computed, which "
            f"a run may leave out: bind the name to `detach()` of it there, as in `h = h.detach()`"
            f"{state.recorder.tape.at()}"
        )
    return NotImplemented


def _of_kind(recorded: Callable[..., Any], plain: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """The row of a method: of a recorded tensor, and of a Parameter or another plain one."""

    def row(state: AutogradState, tensor: torch.Tensor, *args: object, **kwargs: object) -> Any:
        own = recorded if isinstance(tensor, Tensor) else plain
        return NotImplemented if own is None else own(state, tensor, *args, **kwargs)

    return row


_METHODS: Mapping[Any, Callable[..., Any]] = {
    torch.Tensor.grad.__get__: _read_grad,  # type: ignore[union-attr]
    torch.Tensor.grad.__set__: AutogradState.set_grad,  # type: ignore[union-attr]
    torch.Tensor.grad.__delete__: AutogradState.set_grad,  # type: ignore[union-attr]
    torch.Tensor.requires_grad.__get__: _of_kind(AutogradState.requires_grad),  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__set__: _of_kind(AutogradState.mark, _freeze),  # type: ignore[attr-defined]
    torch.Tensor.requires_grad_: _of_kind(AutogradState.mark, _freeze),
    torch.Tensor.is_leaf.__get__: _of_kind(AutogradState.is_leaf),  # type: ignore[attr-defined]
    torch.Tensor.grad_fn.__get__: _of_kind(_grad_fn),  # type: ignore[attr-defined,union-attr]
    torch.Tensor.detach_: _detach,
    torch.detach_: _detach,
    torch.Tensor.retain_grad: _of_kind(AutogradState.retain),
    torch.Tensor.retains_grad.__get__: _of_kind(AutogradState.is_retained),  # type: ignore[attr-defined]
    torch.Tensor.register_hook: _of_kind(AutogradState.register_hook, _hook_outside),
    torch.Tensor.register_post_accumulate_grad_hook: _of_kind(_after_accumulation),
}
_PASSES: Mapping[Any, Callable[..., Any]] = {
    torch.Tensor.backward: tensor_backward,
    torch.autograd.backward: autograd_backward,
    torch.autograd.grad: autograd_grad,
}
for _function, _row in {**_METHODS, **_PASSES}.items():
    override(Stage.AUTOGRAD, _function)(_row)
