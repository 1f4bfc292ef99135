"""A random program: inputs and lines of Python over torch, so that a failure prints code that runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

MOST = 1e4  # values beyond this, and what is not a number, say nothing about the order of things


@dataclass(frozen=True)
class Input:
    """A tensor that a program starts from; axis 0 is the batch where ``varies``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    varies: bool = False

    def make(self, seed: int, batch: int | None = None) -> torch.Tensor:
        """Halves between -2 and 2: sums of them are exact in any order."""
        shape = (batch, *self.shape[1:]) if self.varies and batch is not None else self.shape
        found = torch.Generator().manual_seed(seed * 1009 + sum(map(ord, self.name)))
        whole = torch.randint(-4, 5, shape, generator=found)
        if self.dtype is torch.bool:
            return whole > 0
        if self.dtype.is_complex:
            return torch.complex(whole / 2, torch.randint(-4, 5, shape, generator=found) / 2).to(self.dtype)
        return (whole / (2 if self.dtype.is_floating_point else 1)).to(self.dtype)

    def __str__(self) -> str:
        return f"{self.name} = torch.tensor({self.make(1).tolist()}, dtype={self.dtype})"


@dataclass(frozen=True)
class Program:
    """``lines`` over ``inputs``; every name assigned in them is a result."""

    inputs: tuple[Input, ...]
    lines: tuple[str, ...] = ()

    def then(self, *lines: str) -> Program:
        """The program with more lines."""
        return replace(self, lines=(*self.lines, *lines))

    def make(self, seed: int = 1, batch: int | None = None) -> dict[str, torch.Tensor]:
        """Values for the inputs."""
        return {given.name: given.make(seed, batch) for given in self.inputs}

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The values of all names at the end of the program: tensors, or lists of tensors."""
        names = {"torch": torch, "F": F, **inputs}
        for line in self.lines:
            exec(_compiled(line), names)
        return {name: names[name] for name in names if name not in ("torch", "F") and not name.startswith("__")}

    def __repr__(self) -> str:
        return "\n" + "\n".join((*map(str, self.inputs), *self.lines)) + "\n"


class Overlaps(TorchDispatchMode):
    """Raises RuntimeError for a call that writes some places that it reads elsewhere too: torch leaves open in which
    order, and says so only where it notices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
        for argument in func._schema.arguments:
            if argument.alias_info is None or not argument.alias_info.is_write or "foreach" in func._schema.name:
                continue
            target = given.get(argument.name)
            others = [leaf for name, item in given.items() if name != argument.name for leaf in tree_flatten(item)[0]]
            if isinstance(target, torch.Tensor) and any(_overlap(target, other) for other in others):
                raise RuntimeError(f"{func} reads what it writes")
        return func(*args, **(kwargs or {}))


def _overlap(a: torch.Tensor, b: Any) -> bool:
    """Whether two tensors share some places and are not the same places in the same order."""
    if not isinstance(b, torch.Tensor) or a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    place = [(x.shape, x.stride(), x.storage_offset(), x.dtype) for x in (a, b)]
    return place[0] != place[1] and not _places(a).isdisjoint(_places(b))


def _places(x: torch.Tensor) -> set[int]:
    """The bytes of its storage that a tensor shows."""
    whole = x.untyped_storage().nbytes()
    wide = x.element_size()
    strides = [*(step * wide for step in x.stride()), 1]
    return set(torch.arange(whole).as_strided((*x.shape, wide), strides, x.storage_offset() * wide).flatten().tolist())


@cache
def _compiled(line: str) -> CodeType:
    return compile(line, "<string>", "exec")


def tensors(results: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among results, those in lists too, in order."""
    return [leaf for leaf in tree_flatten(list(results.values()))[0] if isinstance(leaf, torch.Tensor)]


def tame(results: Mapping[str, Any]) -> bool:
    """Whether every value is a number of moderate size."""
    return all(
        bool((t.detach().abs() <= MOST).all()) for t in tensors(results) if t.numel() and t.dtype is not torch.bool
    )


def differences(
    got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], names: Sequence[str], rounding: float = 0.0
) -> list[str]:
    """The differences in dtypes, shapes, and values beyond ``rounding`` and the rounding of the dtype."""
    found = []
    for g, w, name in zip(got, want, names, strict=True):
        g, w = g.detach(), w.detach()
        if g.dtype != w.dtype or g.shape != w.shape:
            found.append(f"{name}: {g.dtype} {list(g.shape)}, not {w.dtype} {list(w.shape)}")
            continue
        least = max(rounding, tolerance(w))
        if not torch.allclose(_wide(g), _wide(w), rtol=least, atol=least, equal_nan=True):
            found.append(f"{name}: {g.tolist()}, not {w.tolist()}")
    return found


def _wide(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.complex128 if t.dtype.is_complex else torch.float64)


def tolerance(want: torch.Tensor) -> float:
    """Rounding of the dtype; sums are taken in another order in few places."""
    return 1e-5 if want.dtype in (torch.float32, torch.complex64) else 1e-9


def labels(results: Mapping[str, Any]) -> list[str]:
    """A name for each of `tensors`."""
    found = []
    for name, value in results.items():
        found += [name] if isinstance(value, torch.Tensor) else [f"{name}[{i}]" for i in range(len(value))]
    return found


def count(shape: Sequence[int]) -> int:
    """Elements of a shape."""
    return math.prod(shape)
