"""Recorded numbers beside tensors, in a step of a class of the user's own: as Python's numbers in torch."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tfnb.control_flow.staging.statement import as_number, is_number
from tfnb.recording import Tensor


class NumberMode(TorchFunctionMode):
    """Recorded numbers in the place of Python's: they take the dtype of a tensor beside them, and may be a scale.

    As in torch's kernels, numbers beside tensors of 16 bits compute in float32.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, args = dict(kwargs or {}), list(args)
        name = getattr(func, "__name__", "")
        if args and is_number(args[0]):  # `+=` gives a name another number, and leaves the number of other names
            func = _AUGMENTED.get(name, func)
        if name.startswith("_foreach_") and any(map(_has_number, (*args, *kwargs.values()))):
            return self._each(name.removeprefix("_foreach_"), args, kwargs)
        if name in _FILLED and any(map(is_number, args)):  # torch takes a plain number only
            number = next(x for x in args if is_number(x))
            found = _FILLED[name](*(x for x in args if x is not number), **kwargs)
            return found.mul_(number.to(found.dtype))
        numbers = any(map(is_number, (*args, *kwargs.values())))
        tensors = [x for x in args if isinstance(x, torch.Tensor) and not is_number(x)]
        if not tensors:
            found = func(*args, **kwargs)
            return as_number(found) if numbers and isinstance(found, torch.Tensor) else found
        kinds = {x.dtype for x in tensors if x.is_floating_point()}
        is_narrow = numbers and kinds and kinds <= _NARROW and "dtype" not in kwargs
        given = [x.float() if is_narrow and isinstance(x, torch.Tensor) and x.dtype in _NARROW else x for x in args]
        beside = torch.float32 if is_narrow else next((x.dtype for x in tensors if x.is_floating_point()), None)
        dtype = beside or torch.get_default_dtype()
        given = [x.to(dtype) if is_number(x) else x for x in given]
        kwargs = {key: x.to(dtype) if is_number(x) else x for key, x in kwargs.items()}
        scale = _SCALES.get(name.rstrip("_"))
        if scale is not None and isinstance(kwargs.get(scale), Tensor):  # torch takes a plain number only
            factor = kwargs.pop(scale)
            if is_narrow and scale == "alpha":  # which torch's kernels round
                factor = factor.to(args[1].dtype)
            given[1] = given[1] * factor
        found = func(*given, **kwargs)
        if given[0] is not args[0] and ((name.endswith("_") and not name.endswith("__")) or name.startswith("__i")):
            return args[0].copy_(found)
        is_wide = is_narrow and isinstance(found, torch.Tensor) and found.dtype == torch.float32
        return found.to(functools.reduce(torch.promote_types, kinds)) if is_wide else found

    def _each(self, name: str, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
        """A function of lists of tensors, as one of each tensor."""
        scale = _SCALES.get(name.rstrip("_"))
        if scale == "value" and len(args) > 3:
            kwargs = {**kwargs, scale: args.pop()}
        if "scalars" in kwargs:
            kwargs = {"value" if key == "scalars" else key: x for key, x in kwargs.items()}
        count = next(len(x) for x in args if isinstance(x, (list, tuple)))
        own = getattr(torch.Tensor, name) if isinstance(args[0], (list, tuple)) else getattr(torch, name)
        found = [
            self.__torch_function__(own, (), [_nth(x, i) for x in args], {key: _nth(x, i) for key, x in kwargs.items()})
            for i in range(count)
        ]
        return None if name.endswith("_") else tuple(found)


def _has_number(item: Any) -> bool:
    return any(map(is_number, item)) if isinstance(item, (list, tuple)) else is_number(item)


def _nth(item: Any, index: int) -> Any:
    return item[index] if isinstance(item, (list, tuple)) else item


_AUGMENTED = {
    "add_": operator.add, "sub_": operator.sub, "mul_": operator.mul, "div_": operator.truediv,
    "floor_divide_": operator.floordiv, "remainder_": operator.mod, "pow_": operator.pow,
}  # fmt: skip
_NARROW = {torch.float16, torch.bfloat16}
_FILLED: Mapping[str, Callable[..., torch.Tensor]] = {
    "full_like": torch.ones_like, "new_full": torch.Tensor.new_ones, "full": torch.ones,
}  # fmt: skip
_SCALES = {"add": "alpha", "sub": "alpha", "addcmul": "value", "addcdiv": "value"}
