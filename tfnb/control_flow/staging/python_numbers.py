"""Python numbers of recorded values: 0-d tensors that each run has its own of. Semantics S-20.

Where Python itself needs the number (the place in a list, an argument of a package), the recording takes the sample's
and keeps a guard that a run has the same one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from tfnb.control_flow.staging.statement import as_number, is_number, plain_number, status
from tfnb.control_flow.structure import SIZES, recorder_if_open
from tfnb.recording import Recorder, Tensor
from tfnb.recording.overrides.python_answers import stands_for_number


def _recorded(item: Any) -> tuple[Recorder, Tensor] | None:
    """The open recording and the recorded tensor, if the item is a single number that varies between runs."""
    recorder = None if status.off or not isinstance(item, torch.Tensor) else recorder_if_open()
    if recorder is None or item.numel() != 1:
        return None
    is_here = isinstance(item, Tensor) and item.graph is recorder.graph
    if not is_here and (isinstance(item, Tensor) or recorder.variable_of(item) is None):
        return None
    handle = recorder.handle(item)
    return None if recorder.tape.is_fixed(recorder._entry(handle).value) else (recorder, handle)


def _number(recorder: Recorder, tensor: Tensor, dtype: torch.dtype) -> Any:
    found = recorder.handle(tensor.detach().reshape(()).to(dtype, copy=True))
    recorder.tape.numbers.add(recorder._entry(found).value)
    return as_number(found)


def _kind(tensor: Tensor, kind: type | None) -> torch.dtype:
    """The dtype of a Python number of this kind; by default the tensor's kind, with the digits of Python's."""
    if kind is int or (kind is None and not tensor.is_floating_point() and not tensor.is_complex()):
        return torch.bool if kind is None and tensor.dtype == torch.bool else torch.int64
    if kind is bool:
        return torch.bool
    return torch.promote_types(tensor.dtype, torch.float64)


def _taken(function: Callable[..., Any], kind: type | None) -> Callable[..., Any]:
    """``float`` and the like, leaving recorded values in the graph."""

    def number(*args: object, **kwargs: object) -> Any:
        found = _recorded(args[0]) if len(args) == 1 and not kwargs else None
        return function(*args, **kwargs) if found is None else _number(*found, _kind(found[1], kind))

    return number


def item_of(function: Callable[..., Any], owner: type | None) -> Callable[..., Any] | None:
    """The stand-in for the method ``item`` of a recorded tensor; None for any other method."""
    if getattr(function, "__name__", "") != "item" or _recorded(owner) is None:
        return None
    return functools.partial(_taken(lambda _: function(), None), owner)


def _round(number: Any, digits: int | None = None) -> Any:
    found = _recorded(number)
    if found is None:
        return round(number, digits)
    recorder, tensor = found
    rounded = tensor.detach() if tensor.dtype == torch.int64 else torch.round(tensor.detach(), decimals=digits or 0)
    return _number(recorder, recorder.handle(rounded), torch.int64 if digits is None else rounded.dtype)


def _rounded(function: Callable[..., Any], rounding: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """``math.floor`` and its like: ``rounding`` of a recorded number, as an integer that each run has its own of."""

    def number(item: Any) -> Any:
        found = _recorded(item)
        if found is None:
            return function(item)
        recorder, tensor = found
        exact = rounding(tensor.detach()) if tensor.is_floating_point() else tensor.detach()
        return _number(recorder, recorder.handle(exact), torch.int64)

    return number


def _computed(function: Callable[..., Any], compute: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A function of ``math`` of recorded numbers: each run has its own, nan or inf where Python raises."""

    def number(*args: Any) -> Any:
        found = [_recorded(item) for item in args]
        recorder = next((each[0] for each in found if each is not None), None)
        if recorder is None:
            return function(*args)
        dtypes = [_kind(each[1], float) for each in found if each is not None]
        dtype = functools.reduce(torch.promote_types, dtypes)
        whole = [torch.full((), item, dtype=dtype) if each is None else _number(recorder, each[1], dtype)
                 for item, each in zip(args, found, strict=True)]  # fmt: skip
        result = compute(*whole)
        return _number(recorder, recorder.handle(result), result.dtype)

    return number


def _log(x: torch.Tensor, base: torch.Tensor | None = None) -> torch.Tensor:
    return torch.log(x) if base is None else torch.log(x) / torch.log(base)


def _is_taken(item: Any) -> bool:
    """Whether a recorded value is a Python number that staged code took, or computed from such numbers alone."""
    found = _recorded(item)
    return found is not None and stands_for_number(found[0], found[0]._entry(found[1]).value)


def _is_python_number(item: Any) -> bool:
    """Whether an item is a plain number in plain PyTorch, and a recorded one or a size that varies here."""
    return isinstance(item, SIZES) or is_number(item) or _is_taken(item)


def _divmod(number: Any, by: Any) -> Any:
    """``divmod``: sizes that vary and recorded numbers have no method for it."""
    if _is_python_number(number) or _is_python_number(by):
        return number // by, number % by
    return divmod(number, by)


def _python_type(item: Any) -> type:
    """The type that an item has in plain PyTorch: ``int`` of a size that varies, ``torch.Tensor`` of a recorded one."""
    if isinstance(item, SIZES):
        return type(plain_number(item))
    if _is_python_number(item):
        kinds = {bool: item.dtype == torch.bool, float: item.is_floating_point(), complex: item.is_complex(), int: True}
        return next(kind for kind, fits in kinds.items() if fits)
    return torch.Tensor if type(item) is Tensor else type(item)


def _type(*args: Any, **kwargs: Any) -> Any:
    """``type``: of one argument the type in plain PyTorch."""
    return type(*args, **kwargs) if len(args) != 1 or kwargs else _python_type(args[0])


def _isinstance(item: Any, kinds: Any) -> bool:
    """``isinstance``: a number that staged code took from a tensor is a Python number; a size is an ``int``, too."""
    if isinstance(item, torch.Tensor) and _is_python_number(item):
        return issubclass(_python_type(item), kinds)
    return isinstance(item, kinds) or (isinstance(item, SIZES) and issubclass(_python_type(item), kinds))


def recorded(item: Any) -> Any:
    """The recorded value of a Parameter or buffer that is one number; other items unchanged."""
    found = _recorded(item) if isinstance(item, torch.Tensor) and not isinstance(item, Tensor) else None
    return item if found is None else found[1]


def needed(item: object) -> Any:
    """The sample's number in place of a recorded one; a run must have the same."""
    found = _recorded(item)
    if found is None:
        return item
    recorder, tensor = found
    recorder.tape.numbers.add(recorder._entry(tensor).value)
    return tensor.item()


def given(item: Any) -> Any:
    """The argument that a function of a package gets: the number itself where staged code took one."""
    return needed(item) if _is_taken(item) else item


def shown(item: Any) -> Any:
    """The value to print: for a number that of the sample, with a note."""
    if not is_number(item) or status.depth:
        return item
    found = _recorded(item)
    return item.sample.item() if found is None else _sampled(*found, "print()")


def _text(function: Callable[..., str]) -> Callable[..., str]:
    """``str`` and ``repr``: the text of a recorded number or size is that of the sample's, as in an f-string."""

    def text(*args: Any, **kwargs: Any) -> str:
        item: Any = args[0] if len(args) == 1 and not kwargs else None
        recorder = None if status.off else recorder_if_open()
        if recorder is not None and isinstance(item, SIZES) and item.node.has_hint():
            recorder.text_of(f"{function.__name__}()")
            return function(item.node.hint)
        if recorder is not None and _is_taken(item):
            return function(_sampled(recorder, item, f"{function.__name__}()"))
        return function(*args, **kwargs)

    return text


def _sampled(recorder: Recorder, tensor: Tensor, how: str) -> Any:
    recorder.text_of(how)
    return tensor.sample.item()


_OF_MATH = (
    "sqrt",
    "pow",
    "exp",
    "expm1",
    "log2",
    "log10",
    "log1p",
    "sin",
    "cos",
    "tan",
    "asin",
    "acos",
    "atan",
    "atan2",
    "sinh",
    "cosh",
    "tanh",
    "asinh",
    "acosh",
    "atanh",
    "hypot",
    "copysign",
    "fmod",
    "erf",
    "erfc",
    "isfinite",
    "isinf",
    "isnan",
)  # of the same names in torch
NUMBERS: dict[Any, Callable[..., Any]] = {
    **{kind: _taken(kind, kind) for kind in (float, int, bool)}, round: _round, str: _text(str), repr: _text(repr),
    math.floor: _rounded(math.floor, torch.floor), math.ceil: _rounded(math.ceil, torch.ceil),
    math.trunc: _rounded(math.trunc, torch.trunc), math.log: _computed(math.log, _log),
    **{getattr(math, name): _computed(getattr(math, name), getattr(torch, name)) for name in _OF_MATH},
    math.fabs: _computed(math.fabs, torch.abs), math.degrees: _computed(math.degrees, torch.rad2deg),
    math.radians: _computed(math.radians, torch.deg2rad), divmod: _divmod, type: _type, isinstance: _isinstance,
}  # fmt: skip
