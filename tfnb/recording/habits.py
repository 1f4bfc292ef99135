"""What a user of autograd calls inside a recording: `.grad`, `requires_grad_`, hooks, `backward`, `optimizer.step`.

A torch function mode sees these calls, so nothing of torch is patched and the real `.grad` of a Parameter is neither
read nor written: a recording starts with every `.grad` None and leaves no trace. What is computed is asked from the
rooms above (gradients, train) when it is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import graph
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from tfnb.errors import FailedPrecondition, InvalidArgument, ShapeError, Unsupported
from tfnb.graph import Node, Value, Variable, current
from tfnb.recording.marks.tape import FROZEN
from tfnb.recording.marks.while_recording import Shared, swapped
from tfnb.recording.values.tensor import Tensor
from tfnb.recording.values.variables import known
from tfnb.recording.writes.in_place_calls import rebind, take_data

if TYPE_CHECKING:
    from tfnb.recording.dispatch.recorder import Recorder


class Habits(TorchFunctionMode):
    """The autograd state of one recording: gradients by their holder, what is retained, hooks by value."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.hooks: dict[Value, OrderedDict[int, Callable[..., Any]]] = {}
        self._grads = WeakIdKeyDictionary()  # Variable, recorded tensor or plain tensor -> its gradient
        self._retained = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        __tracebackhide__ = True
        row = TABLE.get(func)
        mine = current.recording() is self.recorder
        if row is None or not mine or _is_of_func(args):
            return func(*args, **(kwargs or {}))
        with self if row in _CALLS_HOOKS else nullcontext():
            return row(self, func, *args, **(kwargs or {}))

    # -- gradients and their holders ----------------------------------------------------------------------------

    def holder(self, tensor: Any) -> Any:
        """What a gradient belongs to: the Variable of a Parameter, else the tensor object."""
        if isinstance(tensor, Tensor | Variable):
            return tensor
        var = self.recorder.variable_of(tensor)
        return tensor if var is None else var  # a Variable has a length, which decides its truth

    def grad(self, holder: Any) -> torch.Tensor | None:
        """The gradient so far of a Variable or tensor."""
        return self._grads.get(holder)

    def set_grad(self, holder: Any, grad: torch.Tensor | None) -> None:
        """Replace the gradient; raises ShapeError or InvalidArgument for one that does not fit."""
        if grad is None:
            self._grads.pop(holder, None)
            return
        if not isinstance(grad, torch.Tensor):
            raise InvalidArgument(f"a .grad is a tensor or None, not {type(grad).__name__}{self.recorder.tape.at()}")
        if tuple(grad.shape) != tuple(holder.shape):
            found, wanted = getattr(grad, "spec", list(grad.shape)), getattr(holder, "spec", list(holder.shape))
            raise ShapeError(f"a .grad of shape {found} was assigned to a tensor of {wanted}{self.recorder.tape.at()}")
        if grad.dtype != holder.dtype:
            raise InvalidArgument(
                f"a .grad of {grad.dtype} was assigned to a tensor of {holder.dtype}{self.recorder.tape.at()}"
            )
        self._grads[holder] = grad

    def accumulate(self, holder: Any, grad: torch.Tensor, *, keep_graph: bool) -> None:
        """Add to the gradient as torch does: in place, unless the sum is to be differentiated again."""
        before = self._grads.get(holder)
        if before is None:
            self._grads[holder] = grad
        elif keep_graph:
            self._grads[holder] = before + grad
        else:
            with torch.no_grad():
                before.add_(grad)

    def leaves(self) -> list[tuple[Any, Any]]:
        """(holder, Variable or recorded tensor) of everything whose ``.grad`` a backward pass may fill."""
        read = (node.attrs["variable"] for node in self.recorder.nodes if node.op == "tfnb.read")
        found: list[tuple[Any, Any]] = [(v, v) for v in dict.fromkeys(read) if v.trainable]
        for tensor in list(self.recorder.live):
            if _flag(tensor) or tensor in self._retained:
                found.append((tensor, self.source(tensor)))
        return found

    def source(self, holder: Any) -> Any:
        """The Variable or recorded tensor whose gradient a holder's ``.grad`` is."""
        if isinstance(holder, Variable):
            return holder
        return self.recorder.tensor(self._born(holder.value) if _flag(holder) else holder.value)

    def _born(self, value: Value) -> Value:
        """The value of a leaf before what was written into it with grad mode off."""
        node = self.recorder.node(value.node)
        while {"no_grad", "in_place"} <= node.tags:
            value = node.inputs[0]
            node = self.recorder.node(value.node)
        return value

    # -- what autograd would know of a recorded tensor ------------------------------------------------------------

    def requires_grad(self, tensor: Tensor) -> bool:
        """Whether a gradient flows through this tensor to a leaf."""
        if _flag(tensor):
            return True
        from tfnb.gradients.eager import connected  # listed exception: the rules know what conducts

        return tensor.graph is self.recorder.graph and connected(self.recorder, tensor)

    def mark(self, tensor: Tensor, wanted: bool) -> Tensor:
        """``requires_grad_`` of a recorded tensor: a leaf from here on."""
        if not wanted:
            _set_flag(tensor, False)
        elif not self.requires_grad(tensor):
            if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
                raise InvalidArgument(
                    f"only floating-point and complex tensors can require gradients: {tensor.name} is {tensor.spec}"
                    f"{self.recorder.tape.at()}"
                )
            if any(tensor.value in node.inputs for node in self.recorder.nodes):  # earlier uses are no part of it
                rebind(self.recorder, tensor, torch.ops.aten.alias(tensor))
            _set_flag(tensor, True)
        return tensor

    def reread(self, var: Variable, *, thawed: bool) -> None:
        """A variable is frozen or trained from here on: what is computed from it now stands apart from what was; what
        was computed while it was frozen has no path to it."""
        rec = self.recorder
        base = rec._reads.get(var)
        if base is None or rec.tape.is_earlier(base.entry.value):
            return
        if base.version:  # written here: one value for all that follows
            used = (node for node in rec.new if base.entry.value in node.inputs and "no_grad" not in node.tags)
            if thawed and any(used):
                raise Unsupported(
                    f"requires_grad of {var.name} is set after it was written and used in this recording: set it before"
                    f"{rec.tape.at()}"
                )
            return
        if thawed:
            rec.tape.tag(base.entry.value.node, FROZEN)
        del rec._reads[var]

    def retain(self, tensor: Tensor) -> None:
        """``retain_grad``: the gradient of an inner value is kept in its ``.grad``."""
        if not self.requires_grad(tensor):
            raise FailedPrecondition(
                f"retain_grad() of {tensor.name}, which does not depend on anything that requires a gradient"
                f"{self.recorder.tape.at()}"
            )
        if not _flag(tensor):
            self._retained[tensor] = True

    def is_retained(self, tensor: Tensor) -> bool:
        """Whether ``retain_grad`` was called."""
        return tensor in self._retained

    def hook(self, tensor: Tensor, hook: Callable[..., Any]) -> RemovableHandle:
        """``register_hook``: called with the gradient of this value by every backward pass recorded later."""
        if not self.requires_grad(tensor):
            raise FailedPrecondition(
                f"a gradient hook on {tensor.name}, which does not require a gradient{self.recorder.tape.at()}"
            )
        hooks = self.hooks.setdefault(tensor.value, OrderedDict())
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle


def _flag(tensor: torch.Tensor) -> bool:
    """The tensor's own mark, set by ``requires_grad_`` and by ``torch.randn(3, requires_grad=True)``."""
    with torch._C.DisableTorchFunction():
        return tensor.requires_grad


def _set_flag(tensor: torch.Tensor, wanted: bool) -> None:
    with torch._C.DisableTorchFunction():
        tensor.requires_grad = wanted


class GradFn:
    """The node of a tensor, where torch would show the function of its backward pass."""

    def __init__(self, node: Node, at: str) -> None:
        self.node, self._at = node, at

    def name(self) -> str:
        """What was called."""
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


# -- the calls ----------------------------------------------------------------------------------------------------


def _get_grad(habits: Habits, func: Any, tensor: Any) -> torch.Tensor | None:
    var = None if isinstance(tensor, Tensor) else known(tensor)
    return habits.grad(tensor if var is None else var)


def _set_grad(habits: Habits, func: Any, tensor: Any, grad: Any) -> None:
    habits.set_grad(habits.holder(tensor), grad)


def _delete_grad(habits: Habits, func: Any, tensor: Any) -> None:
    habits.set_grad(habits.holder(tensor), None)


def _get_requires_grad(habits: Habits, func: Any, tensor: Any) -> bool:
    return habits.requires_grad(tensor) if isinstance(tensor, Tensor) else func(tensor)


def _set_requires_grad(habits: Habits, func: Any, tensor: Any, wanted: bool = True) -> Any:
    if isinstance(tensor, Tensor):
        return habits.mark(tensor, wanted)
    var = None if _flag(tensor) == wanted else known(tensor)
    if var is not None:
        habits.reread(var, thawed=wanted)
    return func(tensor, wanted)


def _is_leaf(habits: Habits, func: Any, tensor: Any) -> bool:
    return _flag(tensor) or not habits.requires_grad(tensor) if isinstance(tensor, Tensor) else func(tensor)


def _grad_fn(habits: Habits, func: Any, tensor: Any) -> Any:
    if not isinstance(tensor, Tensor):
        return func(tensor)
    return None if _is_leaf(habits, func, tensor) else GradFn(tensor.node, habits.recorder.tape.at())


def _retain_grad(habits: Habits, func: Any, tensor: Any) -> Any:
    return habits.retain(tensor) if isinstance(tensor, Tensor) else func(tensor)


def _retains_grad(habits: Habits, func: Any, tensor: Any) -> bool:
    return habits.is_retained(tensor) if isinstance(tensor, Tensor) else func(tensor)


def _register_hook(habits: Habits, func: Any, tensor: Any, hook: Callable[..., Any]) -> Any:
    return habits.hook(tensor, hook) if isinstance(tensor, Tensor) else func(tensor, hook)


def _after_accumulation(habits: Habits, func: Any, tensor: Any, hook: Callable[..., Any]) -> Any:
    if isinstance(tensor, Tensor):
        raise Unsupported(
            "register_post_accumulate_grad_hook on a recorded tensor is not recorded: use register_hook, or read "
            f".grad after backward(){habits.recorder.tape.at()}"
        )
    return func(tensor, hook)


def _tensor_backward(
    habits: Habits, func: Any, tensor: Any, gradient: Any = None, retain_graph: Any = None,
    create_graph: bool = False, inputs: Any = None,
) -> None:  # fmt: skip
    _backward(habits, func, tensor, gradient, retain_graph, create_graph, inputs=inputs)


def _backward(
    habits: Habits, func: Any, tensors: Any, grad_tensors: Any = None, retain_graph: Any = None,
    create_graph: bool = False, grad_variables: Any = None, inputs: Any = None,
) -> None:  # fmt: skip
    from tfnb.gradients.eager import backward  # listed exception: gradients stands above

    given = grad_variables if grad_tensors is None else grad_tensors
    backward(habits, tensors, given, create_graph=create_graph, inputs=inputs)


def _autograd_grad(
    habits: Habits, func: Any, outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: Any = None,
    create_graph: bool = False, only_inputs: bool = True, allow_unused: bool | None = None,
    is_grads_batched: bool = False, materialize_grads: bool = False,
) -> Any:  # fmt: skip
    from tfnb.gradients.eager import grad  # listed exception: gradients stands above

    if is_grads_batched:
        raise Unsupported(
            f"torch.autograd.grad(is_grads_batched=True) is not recorded: call it once for each row of grad_outputs"
            f"{habits.recorder.tape.at()}"
        )
    return grad(
        habits, outputs, inputs, grad_outputs, create_graph=create_graph, allow_unused=allow_unused,
        materialize=materialize_grads,
    )  # fmt: skip


def _set_data(habits: Habits, func: Any, tensor: Any, new: Any) -> None:
    """``x.data = new``: other memory, which gradients do not see. Modules made here are converted for real."""
    recorder = habits.recorder
    is_initial = is_lazy(tensor) or recorder.is_unused(tensor)
    if not isinstance(new, torch.Tensor) or (is_initial and not isinstance(new, Tensor)):
        func(tensor, new)
        return
    if tuple(new.shape) != tuple(tensor.shape) or new.dtype != tensor.dtype:
        raise Unsupported(
            f"inside a recording .data = ... cannot make a tensor of {tensor.dtype}{list(tensor.shape)} one of "
            f"{new.dtype}{list(new.shape)}: convert a module or tensor outside{recorder.tape.at()}"
        )
    if new is not tensor:
        with recorder.on():
            take_data(recorder, tensor, new)


def _to_numpy(habits: Habits, func: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """The memory of a plain tensor as an array; torch would ask for a detached handle, and get a recorded one."""
    with _disable_current_modes():
        return func(habits.recorder.outside.written(tensor), *args, **kwargs)


def _deepcopy(habits: Habits, func: Any, tensor: Any, memo: Any) -> Any:
    """A copy of a tensor of outside is a tensor of its own, with the values that it has here."""
    recorder = habits.recorder
    if isinstance(tensor, Tensor | torch.nn.Parameter):
        return func(tensor, memo)
    with _disable_current_modes():
        copy = func(tensor, memo)
        written = recorder.outside.written(tensor, "deepcopy()")
        if written is not tensor:
            copy.copy_(written)
    recorder.born[copy] = True
    return copy


TABLE: Mapping[Any, Callable[..., Any]] = {
    torch.Tensor.grad.__get__: _get_grad,  # type: ignore[union-attr]
    torch.Tensor.grad.__set__: _set_grad,  # type: ignore[union-attr]
    torch.Tensor.grad.__delete__: _delete_grad,  # type: ignore[union-attr]
    torch.Tensor.__deepcopy__: _deepcopy,
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__get__: _get_requires_grad,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__set__: _set_requires_grad,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad_: _set_requires_grad,
    torch.Tensor.is_leaf.__get__: _is_leaf,  # type: ignore[attr-defined]
    torch.Tensor.grad_fn.__get__: _grad_fn,  # type: ignore[attr-defined,union-attr]
    torch.Tensor.retain_grad: _retain_grad,
    torch.Tensor.retains_grad.__get__: _retains_grad,  # type: ignore[attr-defined]
    torch.Tensor.register_hook: _register_hook,
    torch.Tensor.register_post_accumulate_grad_hook: _after_accumulation,
    torch.Tensor.backward: _tensor_backward,
    torch.Tensor.numpy: _to_numpy,
    torch.Tensor.__array__: _to_numpy,
    torch.autograd.backward: _backward,
    torch.autograd.grad: _autograd_grad,
}


def _is_of_func(args: Any) -> bool:
    """Whether torch.func calls: it has an autograd of its own, in which its wrapped tensors stand."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return torch._C._are_functorch_transforms_active() or any(
        wrapped(t) for t in tree_leaves(args) if isinstance(t, torch.Tensor)
    )


_CALLS_HOOKS = frozenset({_tensor_backward, _backward, _autograd_grad})  # user code runs inside, with the same habits


# -- optimizers and schedulers --------------------------------------------------------------------------------------


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """``optimizer.step()`` of a torch optimizer becomes a recorded step, or is refused.

    torch's own hook before each step lets the step run over no parameters; its closure records and gives the Operation.
    """
    if current.recording() is None:
        return None
    from tfnb.train.from_torch import from_torch  # listed exception: train stands above

    twin = from_torch(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")

    def record() -> Any:
        if closure is not None:
            closure()
        return twin.step()

    idle = object.__new__(type(optimizer))
    idle.__dict__.update(optimizer.__dict__, param_groups=[])
    return (idle, record), {}


@contextmanager
def _steps() -> Iterator[None]:
    schedulers = [kind for kind in _all_schedulers(LRScheduler) if "step" in vars(kind)]
    names = ("scale", "unscale_", "step", "update")
    handle = register_optimizer_step_pre_hook(_before_step)
    try:
        with swapped(
            *((kind, "step", _without_schedule(kind.step)) for kind in schedulers),
            *((torch.amp.GradScaler, name, _without_scaler(name)) for name in names),
            (saved_tensors_hooks, "__enter__", _without_packing(saved_tensors_hooks.__enter__)),
            (torch.autograd.graph, "register_multi_grad_hook", _without_group(graph.register_multi_grad_hook)),
        ):
            yield
    finally:
        handle.remove()


recorded_steps = Shared(_steps)


def _without_schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    """A scheduler's step is Python: inside a recording it would happen once, not in each run."""

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder: Any = current.recording()
        is_new = "_last_lr" not in self.__dict__ or getattr(self, "_is_initial", False)  # constructors step, too
        if recorder is not None and not is_new:
            raise Unsupported(
                f"{type(self).__name__}.step() inside a recording would change the rate once, while recording: "
                "call it outside, between runs; a recorded optimizer.step() reads the rate at each run"
                f"{recorder.tape.at()}"
            )
        return original(self, *args, **kwargs)

    return step


def _without_scaler(name: str) -> Callable[..., Any]:
    """A scaler looks at gradients and decides in Python whether a step is taken; one that is disabled does nothing."""
    original = getattr(torch.amp.GradScaler, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder: Any = current.recording()
        if recorder is not None and self.is_enabled():
            raise Unsupported(
                f"GradScaler.{name}() inside a recording would decide once, while recording, which steps are "
                "taken: use bfloat16, which needs no scaling, or GradScaler(enabled=False), or scale the loss by "
                f"a number of your own{recorder.tape.at()}"
            )
        return original(self, *args, **kwargs)

    return method


def _without_packing(original: Callable[..., Any]) -> Callable[..., Any]:
    """What a backward pass needs are values of the graph: nothing is packed. Where it would be kept is the run's."""

    def enter(self: Any) -> Any:
        recorder: Any = current.recording()
        if recorder is not None and not isinstance(self, graph.save_on_cpu):
            raise Unsupported(
                "torch.autograd.graph.saved_tensors_hooks are not called for what is recorded: use tfnb.recompute or "
                f"torch.utils.checkpoint to save memory, or a torch.autograd.Function{recorder.tape.at()}"
            )
        return original(self)

    return enter


def _without_group(original: Callable[..., Any]) -> Callable[..., Any]:
    def register(*args: Any, **kwargs: Any) -> Any:
        recorder: Any = current.recording()
        if recorder is not None:
            raise Unsupported(
                "torch.autograd.graph.register_multi_grad_hook is not recorded: use Tensor.register_hook, or read "
                f".grad after backward(){recorder.tape.at()}"
            )
        return original(*args, **kwargs)

    return register


def _all_schedulers(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _all_schedulers(child)
