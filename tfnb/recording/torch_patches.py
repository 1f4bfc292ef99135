"""All that a recording patches in torch, and in Python's and NumPy's random modules, with the reason for each.

The patches are there while any thread records. A replacement asks `open_recording()`, which is of its own thread,
and does as torch does where that is None. What torch offers hooks for is no patch: forward hooks of modules
(`dispatch.module_hooks`) and the hook before an optimizer's step. `surroundings` also puts aside what torch keeps
beside the tensors: caches of autocast and of parametrisations, TorchScript's optimising executor, compiled code.
"""

from __future__ import annotations

import os
import random
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from types import FrameType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributions
import torch.nn.utils.stateless
import torch.optim.swa_utils
import torch.utils.checkpoint
import torch.utils.data
from torch.autograd import graph
from torch.nn.utils import parametrize
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from tfnb.errors import Unsupported
from tfnb.recording.marks.lasting_state import HOOKS, MODE
from tfnb.recording.marks.notes import NESTED
from tfnb.recording.marks.settings import REPLACES
from tfnb.recording.marks.user_code import is_foreign
from tfnb.recording.marks.while_recording import SharedContext, swapped
from tfnb.recording.overrides.autograd_function import recorded_apply
from tfnb.recording.overrides.averaged_models import recorded_update
from tfnb.recording.overrides.loader_batches import batch
from tfnb.recording.overrides.override_table import module_rows
from tfnb.recording.overrides.rng_state import FollowedGenerator
from tfnb.recording.overrides.size_arguments import same_size
from tfnb.recording.subgraphs.recompute import checkpoint_generator
from tfnb.recording.values.python_draws import functions_of, making, of_class, of_module, seeding
from tfnb.recording.values.recording import Recording, open_recording
from tfnb.recording.values.tensor import Tensor

Original = Callable[..., Any]

_COPIES = {"aten.clone.default", "aten.detach.default", "aten.alias.default", "aten._to_copy.default"}


class Patch(NamedTuple):
    """A patch: attributes of one or more owners, the factory of each replacement, and the reason."""

    owners: Callable[[], list[Any]]
    names: tuple[str, ...]
    make: Callable[[Any], Any]
    why: str

    def places(self) -> Iterator[tuple[Any, str]]:
        """(owner, name) of each attribute to patch; AttributeError if no owner has the name: torch renamed the
        attribute.
        """
        owners = self.owners()
        for name in self.names:
            having = [owner for owner in owners if hasattr(owner, name)]
            if not having:
                raise AttributeError(f"{name} of {owners} is not there to be patched")
            yield from ((owner, name) for owner in having)

    def replacement(self, owner: object, name: str) -> Any:
        """What stands in place of an attribute; a function tells which one it replaces."""
        original = getattr(owner, name)
        new = self.make(original)
        if isinstance(new, FunctionType) and new is not original:
            setattr(new, REPLACES, original)
        return new


def _detect_causal(original: Original) -> Any:
    def detect(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        varies = isinstance(mask, Tensor) and any(isinstance(length, torch.SymInt) for length in mask.shape)
        if varies and is_causal is None and open_recording() is not None:
            return False
        return bool(original(mask, is_causal, size))

    return detect


def _new_parameter(original: Original) -> Any:
    def new(cls: object, data: object = None, requires_grad: bool = True) -> Any:
        rec = open_recording()
        if rec is None:
            return original(cls, data, requires_grad)
        if isinstance(data, Tensor) and rec.inside:  # of a branch or loop, which every run makes anew
            made = data.detach().clone().requires_grad_(requires_grad)
            made._is_param = True  # for isinstance(p, torch.nn.Parameter)
            return made
        with _disable_current_modes():
            plain = data.sample.detach().clone() if isinstance(data, Tensor) else data
            parameter = original(cls, plain, requires_grad)
        rec.born[parameter] = not isinstance(data, Tensor) or not rec.tape.is_computed(rec.look(data).value)
        if isinstance(data, Tensor) and _is_copy(rec, data):
            rec.warn(
                "a Parameter that is made here is a copy of another one as of this recording: each run goes on with "
                "what the last one left in it. To begin each run with the values of now, compute with clones "
                "(torch.func.functional_call), or copy them here: `p.copy_(q)` under torch.no_grad()"
            )
        return parameter

    return staticmethod(new)


def _is_copy(rec: Recording, data: Tensor) -> bool:
    """Whether a recorded tensor is a copy of a Variable."""
    node = rec.node(rec.look(data).value.node)
    while node.op in _COPIES:
        node = rec.node(node.inputs[0].node)
    return node.op == "tfnb.read"


def _call_module(original: Original) -> Any:
    def call(self: torch.nn.Module, *args: object, **kwargs: object) -> Any:
        __tracebackhide__ = True
        rec = open_recording()
        rows = () if rec is None or "forward" in self.__dict__ else module_rows(type(self))
        forward = next((found for row in rows if (found := row(rec, self)) is not NotImplemented), None)
        if forward is None:
            return original(self, *args, **kwargs)
        self.__dict__["forward"] = MethodType(forward, self)
        try:
            return original(self, *args, **kwargs)
        finally:
            self.__dict__.pop("forward", None)

    return call


def _validate_sample(original: Original) -> Any:
    def validate(self: torch.distributions.Distribution, value: object) -> None:
        rec, batch = open_recording(), self._batch_shape
        rows = value.shape[: value.dim() - len(self._event_shape)] if isinstance(value, torch.Tensor) else ()
        if rec is None or len(rows) != len(batch) or not all(map(partial(_fits, rec), rows, batch)):
            return original(self, value)
        self._batch_shape = torch.Size()
        try:
            return original(self, value)
        finally:
            self._batch_shape = batch

    return validate


def _fits(rec: Recording, one: object, other: object) -> bool:
    """Whether an axis of a value stands for one of a distribution's batch, in every run."""
    return any(isinstance(size, int) and size == 1 for size in (one, other)) or same_size(rec, one, other)


def _reparametrize(original: Original) -> Any:
    @contextmanager
    def reparametrize(
        module: torch.nn.Module, tensors: dict[str, Any], *args: object, **kwargs: object
    ) -> Iterator[Any]:
        rec = open_recording()
        lending = nullcontext() if rec is None else rec.scopes.lending(tensors.values())
        with lending, original(module, tensors, *args, **kwargs) as orig:
            yield orig

    return reparametrize


def _zero_grad(original: Original) -> Any:
    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        original(self, set_to_none)
        if (rec := open_recording()) is not None:
            is_module = isinstance(self, torch.nn.Module)
            groups = () if is_module else self.param_groups
            parameters = self.parameters() if is_module else chain.from_iterable(group["params"] for group in groups)
            rec.carried.zero(parameters, is_kept=not set_to_none)

    return zero_grad


def _call_compiled(original: Original) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs) if open_recording() is None else self._orig_mod(*args, **kwargs)

    return call


def _format_size(original: Original) -> Any:
    def text(self: torch.SymInt, spec: str) -> str:
        rec = open_recording()
        if rec is None or not self.node.has_hint() or is_foreign(sys._getframe(1).f_code.co_filename):
            return original(self, spec)
        rec.text_of("format()")
        return format(self.node.hint, spec)

    return text


def _text_of_size(original: Original) -> Any:
    how = {"__str__": "str()", "__repr__": "repr()"}[original.__name__]

    def text(self: torch.SymInt) -> str:
        rec = open_recording()
        if rec is None or not self.node.has_hint() or is_foreign(_asking(sys._getframe(1)).f_code.co_filename):
            return original(self)
        rec.text_of(how)
        return str(self.node.hint)

    return text


def _environment_read(original: Original) -> Any:
    def look_up(self: Any, name: str) -> str:
        rec = open_recording()
        if rec is not None and not is_foreign(_asking(sys._getframe(1)).f_code.co_filename):
            rec.python.reads_environment(name, self._data.get(self.encodekey(name)) and original(self, name))
        return original(self, name)

    return look_up


def _asking(frame: FrameType) -> FrameType:
    """The frame outside of Python's own frozen modules, such as that of ``os.getenv``, and of what stages calls."""
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith("<frozen") or frame.f_globals.get("__name__", "").startswith(_STAGING)
    ):
        frame = frame.f_back
    return frame


def _unrecorded(original: Original) -> Any:
    def call(*args: object) -> Any:
        with _disable_current_modes() if open_recording() is not None else nullcontext():
            return original(*args)

    return call


def _refused(why: str, but: Callable[[Any], bool] = lambda first: False) -> Callable[[Original], Any]:
    """Replace a call by an error inside a recording. ``but``: predicate on the first argument for calls that stay
    allowed.
    """

    def make(original: Original) -> Any:
        is_method = "." in original.__qualname__

        def call(*args: object, **kwargs: object) -> Any:
            rec = open_recording()
            if rec is not None and not (args and but(args[0])):
                called = type(args[0]).__qualname__ if is_method else original.__module__
                label = f"{called}.{original.__name__}".removesuffix(".__enter__")
                raise Unsupported(f"{label}{why}{rec.tape.at()}")
            return original(*args, **kwargs)

        return call

    return make


def _delete(original: Original) -> Any:
    def delete(self: torch.nn.Module, name: str) -> None:
        rec = open_recording()
        if rec is not None and any(map(partial(_is_earlier, rec), _lost(rec, self, name))):
            raise Unsupported(f"del {type(self).__name__}.{name}{_FOR_GOOD}{rec.tape.at()}")
        original(self, name)

    return delete


def _is_earlier(rec: Recording, tensor: object) -> bool:
    """Whether a tensor was there before the recording."""
    return isinstance(tensor, torch.Tensor) and not isinstance(tensor, Tensor) and tensor not in rec.born


def _lost(rec: Recording, module: torch.nn.Module, name: str) -> list[Any]:
    """The tensors that a module loses with this attribute; of a buffer that holds a recorded one its own."""
    own, binding = vars(module), rec.tape.bindings.get((id(module), name))
    inner = own.get("_modules", {}).get(name)
    if inner is not None:
        return [*inner.parameters(), *inner.buffers()]
    return [
        table.get(name) if binding is None else binding.original
        for table in (own.get("_parameters", {}), own.get("_buffers", {}))
    ]


def _load(original: Original) -> Any:
    def load_state_dict(
        self: torch.nn.Module, state_dict: object, strict: bool = True, assign: bool = False, **more: object
    ) -> Any:
        rec = open_recording()
        own = chain(self.parameters(), self.buffers())
        if rec is not None and assign and any(map(partial(_is_earlier, rec), own)):
            raise Unsupported(
                f"{type(self).__name__}.load_state_dict(assign=True){_FOR_GOOD}, or leave out assign=True: each run "
                f"then writes these values into its Variables{rec.tape.at()}"
            )
        return original(self, state_dict, strict, assign, **more)

    return load_state_dict


def _set_mode(original: Original) -> Any:
    def train(self: torch.nn.Module, mode: bool = True) -> Any:
        if (rec := open_recording()) is not None:
            rec.lasting.keep(MODE, self)
        return original(self, mode)

    return train


def _register(original: Original) -> Any:
    def make(self: RemovableHandle, hooks_dict: object, *, extra_dict: object = None) -> None:
        original(self, hooks_dict, extra_dict=extra_dict)
        _keep_hooks(self)  # the caller adds the hook when it has its handle

    return make


def _remove(original: Original) -> Any:
    def remove(self: RemovableHandle) -> None:
        _keep_hooks(self)
        original(self)

    return remove


def _keep_hooks(handle: RemovableHandle) -> None:
    """Keep the hooks of a handle in the journal of an open recording."""
    rec = open_recording()
    for ref in () if rec is None else (handle.hooks_dict_ref, *handle.extra_dict_ref):
        if rec is not None and (hooks := ref()) is not None:
            rec.lasting.keep(HOOKS, hooks)


def _not_nested(original: Original) -> Any:
    def call() -> Any:
        if (rec := open_recording()) is not None:
            raise Unsupported(f"{NESTED}{rec.tape.at()}")
        return original()

    return call


def _is_new(scheduler: torch.optim.lr_scheduler.LRScheduler) -> bool:
    """Whether a scheduler is being made: constructors step, too."""
    return "_last_lr" not in scheduler.__dict__ or getattr(scheduler, "_is_initial", False)


def _is_off(scaler: Any) -> bool:
    return not scaler.is_enabled()


def _keeps(hooks: object) -> bool:
    """Hooks that only say where a value is kept are allowed: the run decides that."""
    return isinstance(hooks, graph.save_on_cpu)


_STAGING = "tfnb.control_flow.staging"
_SCHEDULER = (
    "() inside a recording would change the rate once, while recording: call it outside, between runs; a recorded "
    "optimizer.step() reads the rate at each run"
)
_FOR_GOOD = " inside a recording would change the module for good: do so before the recording"
_SCALER = (
    "() inside a recording would decide once, while recording, which steps are taken: use bfloat16, which needs no "
    "scaling, or GradScaler(enabled=False), or scale the loss by a number of your own"
)
_PACKING = (
    " are not called for what is recorded: use tfnb.recompute or torch.utils.checkpoint to save memory, or a "
    "torch.autograd.Function"
)
_GROUP = " is not recorded: use Tensor.register_hook, or read .grad after backward()"


def _schedulers(kind: type[Any] = LRScheduler) -> list[type[Any]]:
    own = [kind] if "step" in vars(kind) else []
    return [*own, *chain.from_iterable(map(_schedulers, kind.__subclasses__()))]


def _compiled_modules() -> list[Any]:
    return [torch._dynamo.eval_frame.OptimizedModule]  # which the first Symbols imported


def _jagged() -> list[Any]:
    return [torch.nested._internal.nested_tensor]  # which the first Symbols imported


def _loaders() -> list[Any]:
    return [torch.utils.data.DataLoader, torch.utils.data.dataloader._BaseDataLoaderIter]


def _python_generators() -> list[Any]:
    return [random.Random, random.SystemRandom]


def _one(owner: object) -> Callable[[], list[Any]]:
    return lambda: [owner]


PATCHES = (
    Patch(_one(torch.nn.Parameter), ("__new__",), _new_parameter,
          "a Parameter made inside holds plain values: what was drawn becomes its Variable's initial value"),
    Patch(_one(torch.nn.Module), ("__call__",), _call_module,
          "AutoGraph converts a module's forward for the time of a call; a recurrent layer takes packed sequences"),
    Patch(_one(torch.autograd.function._SingleLevelFunction), ("apply",), recorded_apply,
          "a Function's own backward is its gradient. A program may hold `Function.apply` from long before, which "
          "calls the `apply` of its base: so that one is shadowed"),
    Patch(_one(torch.utils.checkpoint), ("_checkpoint_without_reentrant_generator",), checkpoint_generator,
          "what checkpoint(use_reentrant=False) runs is computed again by the backward pass of a run"),
    Patch(_one(torch.distributions.Distribution), ("_validate_sample",), _validate_sample,
          "it asks of each size whether it is 1, also where both have the same one: a batch of one row were refused"),
    Patch(_one(torch.nn.modules.transformer), ("_detect_is_causal_mask",), _detect_causal,
          "it asks the values of a mask for a hint to kernels, which have the mask itself: where sizes vary, a run of "
          "one row, whose mask of zeros is causal, were refused"),
    Patch(_one(torch.nn.Module), ("__delattr__",), _delete,
          "torch has no hook for what a module loses; a module that was there before is not changed by a recording"),
    Patch(_one(torch.nn.Module), ("load_state_dict",), _load,
          "with assign=True a module that was there before would hold other Parameters afterwards"),
    Patch(_one(torch.nn.Module), ("train",), _set_mode, "a branch that sets a mode would set it for all runs"),
    Patch(_one(RemovableHandle), ("__init__",), _register,
          "every hook of a tensor, module or optimizer has a handle: a branch would register it for all runs"),
    Patch(_one(RemovableHandle), ("remove",), _remove, "the same, of a hook that a branch removes"),
    Patch(_one(torch.nn.utils.stateless), ("_reparametrize_module",), _reparametrize,
          "for the time of a functional_call a module holds tensors that are no parameters of its own"),
    Patch(lambda: [torch.optim.Optimizer, torch.nn.Module], ("zero_grad",), _zero_grad,
          "where every .grad is None it does nothing that could be heard"),
    Patch(_compiled_modules, ("__call__",), _call_compiled,
          "a compiled module is the module: a recording sees torch's calls, not what a compiler makes of them"),
    Patch(_loaders, ("__iter__", "__next__"), batch, "how a loader draws is no part of the graph, and a batch is data"),
    Patch(_one(torch._utils), ("_rebuild_tensor",), _unrecorded, "what is read from a file is a plain tensor"),
    Patch(_one(torch.random), ("default_generator",), FollowedGenerator,
          "seeds given inside are noted with their line, since recorded draws have streams of their own"),
    Patch(_one(random), ("random", "getrandbits"), of_module, "numbers that Python draws are noted with their line"),
    Patch(_python_generators, ("random", "getrandbits"), of_class, "the same, of `random.uniform` and all others"),
    Patch(_one(random.Random), ("seed",), seeding, "a function that seeds a generator draws the same at each call"),
    Patch(_one(np.random), ("default_rng",), making, "the same, of NumPy"),
    Patch(_one(np.random), functions_of(np.random), of_module, "the same, of NumPy"),
    Patch(_one(time), functions_of(time), of_module, "the same, of clocks"),
    Patch(_one(os), functions_of(os), of_module, "the same, of the system"),
    Patch(_one(secrets), functions_of(secrets), of_module, "the same, of secrets"),
    Patch(_one(uuid), functions_of(uuid), of_module, "the same, of identifiers"),
    Patch(_one(type(os.environ)), ("__getitem__",), _environment_read,
          "a variable of the environment that the program reads is a setting"),
    Patch(_one(torch.optim.swa_utils.AveragedModel), ("update_parameters",), recorded_update,
          "it asks in Python whether it is the first update, which each run has to decide"),
    Patch(_schedulers, ("step",), _refused(_SCHEDULER, _is_new), "a scheduler's step is Python: it would happen once"),
    Patch(_one(torch.amp.GradScaler), ("scale", "unscale_", "step", "update"), _refused(_SCALER, _is_off),
          "a scaler decides in Python whether a step is taken"),
    Patch(_one(graph.saved_tensors_hooks), ("__enter__",), _refused(_PACKING, _keeps),
          "what a backward pass needs are values of the graph, which nothing packs"),
    Patch(_one(torch.Tensor), ("as_subclass",), _unrecorded,
          "of a plain tensor it gives a plain one, and wants no recorded alias of it"),
    Patch(_jagged, ("_nt_view_dummy",), _not_nested,
          "a nested tensor of the jagged layout is made of a class of torch's, which asks recorded values for memory"),
    Patch(_one(torch.SymInt), ("__str__", "__repr__"), _text_of_size,
          "the same as of an f-string, also in the text of a shape"),
    Patch(_one(torch.SymInt), ("__format__",), _format_size,
          "an f-string of a size has the sample's number, as one of a recorded number has, and is noted with its line"),
    Patch(_one(graph), ("register_multi_grad_hook",), _refused(_GROUP),
          "its hook hangs on the engine of autograd, which a recording has not"),
)  # fmt: skip


@contextmanager
def _made() -> Iterator[None]:
    changes = [(owner, name, patch.replacement(owner, name)) for patch in PATCHES for owner, name in patch.places()]
    with swapped(*changes), torch.compiler.set_stance("force_eager"), torch.jit.optimized_execution(False):
        yield


_patches = SharedContext(_made)


@contextmanager
def surroundings() -> Iterator[None]:
    """Inside: the patches of the table, empty caches, plain TorchScript, and nothing compiled."""
    with ExitStack() as stack:
        stack.enter_context(_without_caches())
        stack.enter_context(_patches())
        yield


@contextmanager
def _without_caches() -> Iterator[None]:
    """Empty the caches of parametrizations and autocast inside: they would carry plain casts into a recording, and
    recorded ones out.
    """
    cached = dict(parametrize._cache)
    parametrize._cache.clear()
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        parametrize._cache.clear()
        parametrize._cache.update(cached)
        torch.clear_autocast_cache()
