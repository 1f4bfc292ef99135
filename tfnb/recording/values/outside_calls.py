"""How a recorded tensor meets torch outside of a recording: calls compute on samples, and write nothing.

torch gets stand-ins whose sizes are numbers: much of its C++ takes no others. What torch then refuses is an error that
says what a recorded tensor is here, and what to do.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.overrides import resolve_name
from torch.utils._pytree import tree_leaves, tree_map

from tfnb.errors import FailedPrecondition, InvalidArgument, TfnbError
from tfnb.graph import current
from tfnb.interrupts import from_signal_handler
from tfnb.recording.marks.notes import calling_line

_WRITES = frozenset({"__set__", "__delete__", "__setitem__", "requires_grad_"})  # of which no op tells
_FACTS = frozenset({"dtype", "device", "layout", "ndim", "requires_grad", "grad_fn", "is_leaf"})  # properties
_PLAIN = frozenset({torch.Tensor.detach, torch.Tensor.data.__get__})  # type: ignore[attr-defined]  # by which programs get at a number
_KINDS: Mapping[type[Exception], type[TfnbError]] = {
    RuntimeError: FailedPrecondition, NotImplementedError: FailedPrecondition, ValueError: InvalidArgument,
}  # fmt: skip
"""Errors of torch, and what they become. Programs catch others by name, or they are part of Python's protocols."""


class RecordedTensor(torch.Tensor):
    """The half of a recorded tensor that torch calls where nothing is recorded."""

    @property
    def sample(self) -> torch.Tensor:
        """The plain value; raises where there is none."""
        raise NotImplementedError

    def found_sample(self) -> torch.Tensor | None:
        """The same, or None."""
        raise NotImplementedError

    def described(self) -> str:
        """Name and spec."""
        raise NotImplementedError

    def is_foreign(self) -> bool:
        """Whether no open recording is of its graph."""
        raise NotImplementedError

    def taken_outside(self, how: str) -> None:
        """Say that the user's line took the sample's value where nothing is recorded."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        __tracebackhide__ = True
        if not all(issubclass(kind, torch.Tensor) for kind in types):  # a Variable, which reads itself
            return NotImplemented
        if current.stack.open or torch._C._get_tracing_state() is not None:  # TorchScript follows this very tensor
            may_be = current.stack.open and not _asks_or_writes(func) and "out" not in (kwargs or {})
            if may_be and any(map(_is_foreign, tree_leaves((args, kwargs)))):
                # A tensor of another graph is a constant here. Its sizes are numbers, too: as symbols they would be
                # taken for sizes of this graph, which have the same names.
                args, kwargs = tree_map(lambda x: x.sample if _is_foreign(x) else x, (args, kwargs))
                return func(*args, **kwargs or {})
            return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})
        return _call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        __tracebackhide__ = True
        return _on_samples(func, args, kwargs or {})


class StandIn(torch.Tensor):
    """A recorded tensor within one call."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch documents
    __torch_dispatch__ = RecordedTensor.__torch_dispatch__  # type: ignore[assignment]
    recorded: RecordedTensor

    @staticmethod
    def __new__(cls, recorded: RecordedTensor, sample: torch.Tensor) -> StandIn:
        self = torch.Tensor._make_wrapper_subclass(
            cls, sample.shape, strides=sample.stride(), storage_offset=sample.storage_offset(), dtype=sample.dtype,
            device=sample.device, requires_grad=False,
        )  # fmt: skip
        self.recorded = recorded
        return self  # type: ignore[no-any-return]


def _is_foreign(x: object) -> bool:
    return isinstance(x, RecordedTensor) and x.is_foreign()


def _asks_or_writes(func: Callable[..., Any]) -> bool:
    """Whether a function of torch asks for a fact that is the same without a sample, or may write into its operand."""
    name = getattr(func, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name in _WRITES or getattr(getattr(func, "__self__", None), "__name__", "") in _FACTS


def _call(func: Callable[..., Any], args: Any, kwargs: object) -> Any:
    """A function of torch on stand-ins."""
    __tracebackhide__ = True
    name = getattr(func, "__name__", "")
    if name in _WRITES and isinstance(args[0], RecordedTensor):
        raise _refused(getattr(getattr(func, "__self__", func), "__name__", name), args[0])
    if func in _PLAIN:
        args[0].taken_outside("detach()")
    with torch._C.DisableTorchFunctionSubclass():
        given = tree_map(_stand_in, (args, kwargs))
        try:
            found = func(*given[0], **given[1])
        except tuple(_KINDS) as error:
            if type(error) not in _KINDS or from_signal_handler(error):
                raise
            raise _explained(func, error, (args, kwargs)) from error
    return found.recorded if isinstance(found, StandIn) else found  # `x.cpu()` of a tensor that is there


def _stand_in(x: Any) -> Any:
    sample = x.found_sample() if isinstance(x, RecordedTensor) else None
    return x if sample is None else StandIn(x, sample)


def _on_samples(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run an op on the samples; refuse an op that would write into them."""
    __tracebackhide__ = True
    for written in _written(func, args, kwargs):
        raise _refused(func._schema.name.partition("::")[2], written)

    def sample(x: object) -> Any:
        if isinstance(x, torch.SymInt):
            return x.node.hint
        recorded = recorded_of(x)
        if recorded is None:
            return x
        current.stack.used_outside.append(weakref.ref(recorded))
        return recorded.sample

    args, kwargs = tree_map(sample, (args, kwargs))
    return func(*args, **kwargs)


def recorded_of(x: object) -> RecordedTensor | None:
    """The recorded tensor that ``x`` is or stands for."""
    if isinstance(x, StandIn):
        return x.recorded
    return x if isinstance(x, RecordedTensor) else None


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[RecordedTensor]:
    """The recorded tensors that an op writes into."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (x for leaf in tree_leaves(given) if (x := recorded_of(leaf)) is not None)


def _refused(name: str, written: RecordedTensor) -> FailedPrecondition:
    return FailedPrecondition(
        f"{name} outside of a recording would change the sample of {written.described()}{calling_line()}\n"
        "  put this line into a cell, and each run does it, or take a clone of .sample"
    )


def _explained(func: Callable[..., Any], error: Exception, given: object) -> TfnbError:
    tensors = [x for x in tree_leaves(given) if isinstance(x, torch.Tensor)]
    listed = [x.described() if isinstance(x, RecordedTensor) else f"{x.dtype}{list(x.shape)}"[6:] for x in tensors]
    first = next((x.described() for x in tensors if isinstance(x, RecordedTensor)), "a tensor")
    asked = resolve_name(func) or getattr(func, "__name__", "a call")
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    return _KINDS[type(error)](
        f"{asked} outside of a recording failed: {reason}\n  inputs: {', '.join(listed)}{calling_line()}\n"
        f"  {first} is recorded, and outside of its recording stands for its sample: put this line into a cell, or "
        "take plain values, .sample or those of tfnb.run"
    )
