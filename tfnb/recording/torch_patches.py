"""What of torch holds state beside the tensors, put aside for the time of a recording.

Caches of autocast and of parametrisations would carry plain casts of parameters into a recording, cut off from them,
and recorded ones out of it. TorchScript's optimising executor would fix sizes that vary. What `torch.compile` gave runs
as the code it was given: a recording sees torch's calls, not what a compiler makes of them. What is read from a file is
a plain tensor. A size that is looked up in a table says that it cannot be. `len` of recorded tensors, `Size.numel` and
the one function of torch that broadcasts numbers alone (`torch.distributions.kl_divergence` calls it) give and take
sizes that vary.
"""

from __future__ import annotations

import builtins
import ctypes
import gc
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import _disable_current_modes

from tfnb.graph import current
from tfnb.recording.marks.while_recording import Shared, swapped
from tfnb.recording.values.recording import open_recording
from tfnb.recording.values.tensor import Tensor


@contextmanager
def surroundings() -> Iterator[None]:
    """Inside: empty caches, plain TorchScript, and nothing compiled."""
    with ExitStack() as stack:
        stack.enter_context(_without_caches())
        stack.enter_context(_plain_code())
        stack.enter_context(_plain_files())
        stack.enter_context(_sizes_without_hash())
        stack.enter_context(_broadcast_sizes())
        stack.enter_context(_multiplied_sizes())
        stack.enter_context(_lengths())
        stack.enter_context(_plain_numbers())
        yield


@contextmanager
def _without_caches() -> Iterator[None]:
    cached = dict(parametrize._cache)
    parametrize._cache.clear()
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        parametrize._cache.clear()
        parametrize._cache.update(cached)
        torch.clear_autocast_cache()


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Compiled code runs eagerly, also what is compiled inside. The compiler takes seconds to load, so only if used."""
    original: Callable[..., Any] = torch.compile

    def compile(*args: Any, **kwargs: Any) -> Any:
        torch.compile = original  # type: ignore[assignment]
        compiled = original(*args, **kwargs)
        stack.enter_context(_eagerly())
        return compiled

    with ExitStack() as stack:
        stack.enter_context(torch.jit.optimized_execution(False))
        is_loaded = "torch._dynamo.eval_frame" in sys.modules
        stack.enter_context(_eagerly() if is_loaded else swapped((torch, "compile", compile)))
        yield


@contextmanager
def _eagerly() -> Iterator[None]:
    """What was compiled runs as it was written; a compiled module is the module."""
    kind = sys.modules["torch._dynamo.eval_frame"].OptimizedModule

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)

    with swapped((kind, "__call__", call)), torch.compiler.set_stance("force_eager"):
        yield


def _unrecorded(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with _disable_current_modes() if current.recording() is not None else nullcontext():
            return original(*args)

    return call


def _no_key(original: Callable[[torch.SymInt], int]) -> Callable[[torch.SymInt], int]:
    """Packages that keep a table by shapes (einops) go another way where a size has no hash, so it has none here."""

    def of(size: torch.SymInt) -> int:
        try:
            return original(size)
        except TypeError as error:
            rec = open_recording()
            if rec is None:
                raise
            raise TypeError(
                f"a size that varies is no key of a table ({error}): with int(size) it is the sample's, and fixed, "
                f"and shape= of the placeholder gives it a number from the start{rec.tape.at()}"
            ) from None

    return of


def _broadcast(original: Callable[[Any, Any], torch.Size]) -> Callable[[Any, Any], torch.Size]:
    def call(a: Any, b: Any) -> torch.Size:
        varies = any(isinstance(size, torch.SymInt) for size in (*a, *b))
        return torch.broadcast_shapes(a, b) if varies else original(a, b)

    return call


@contextmanager
def _symbolic_numel() -> Iterator[None]:
    """``x.shape.numel()`` is the product of sizes, also where they vary: torch's own method fixes them.

    A class of C takes no attributes, so this one goes into the dict behind them.
    """
    (members,) = gc.get_referents(torch.Size.__dict__)
    original = members["numel"]

    def numel(sizes: torch.Size) -> Any:
        """Number of elements of a tensor of this shape."""
        return math.prod(sizes) if any(isinstance(size, torch.SymInt) for size in sizes) else original(sizes)

    try:
        _put(members, numel)
        yield
    finally:
        _put(members, original)


def _put(members: dict[str, Any], numel: Callable[[torch.Size], Any]) -> None:
    members["numel"] = numel
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(torch.Size))  # whose look-ups are cached


_builtin = builtins.len


def varying_len(obj: Any, /) -> int:
    """``len`` while something is recorded: of a recorded tensor it is a size, which may vary."""
    return obj.shape[0] if type(obj) is Tensor and obj.dim() else _builtin(obj)


def _written(original: Callable[[Any, str], str]) -> Callable[[Any, str], str]:
    def write(number: Any, spec: str) -> str:
        """As the sample's number where a width or precision is asked for, which the name of a size has not."""
        return format(number.node.hint, spec) if spec and number.node.has_hint() else original(number, spec)

    return write


def _numbers() -> AbstractContextManager[None]:
    """What Python's numbers have and torch's sizes have not."""
    return swapped(
        (torch.SymInt, "__divmod__", lambda a, b: (a // b, a % b)),
        (torch.SymInt, "__rdivmod__", lambda b, a: (a // b, a % b)),
        *((kind, "__format__", _written(kind.__format__)) for kind in (torch.SymInt, torch.SymFloat)),
    )


_plain_code = Shared(_uncompiled)
_plain_files = Shared(lambda: swapped((torch._utils, "_rebuild_tensor", _unrecorded(torch._utils._rebuild_tensor))))
_sizes_without_hash = Shared(lambda: swapped((torch.SymInt, "__hash__", _no_key(torch.SymInt.__hash__))))
_broadcast_sizes = Shared(lambda: swapped((torch._C, "_infer_size", _broadcast(torch._C._infer_size))))
_multiplied_sizes = Shared(_symbolic_numel)
_lengths = Shared(lambda: swapped((builtins, "len", varying_len)))
_plain_numbers = Shared(_numbers)
