"""What of torch holds state beside the tensors, put aside for the time of a recording.

Caches of autocast and of parametrisations would carry plain casts of parameters into a recording, cut off from them,
and recorded ones out of it. TorchScript's optimising executor would fix sizes that vary. What `torch.compile` gave runs
as the code it was given: a recording sees torch's calls, not what a compiler makes of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.utils import parametrize


@contextmanager
def surroundings() -> Iterator[None]:
    """Inside: empty caches, plain TorchScript, and nothing compiled."""
    with ExitStack() as stack:
        stack.enter_context(_without_caches())
        stack.enter_context(torch.jit.optimized_execution(False))
        stack.enter_context(_uncompiled(stack))
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
def _uncompiled(stack: ExitStack) -> Iterator[None]:
    """Compiled code runs eagerly, also what is compiled inside. The compiler takes seconds to load, so only if used."""
    original: Callable[..., Any] = torch.compile

    def compile(*args: Any, **kwargs: Any) -> Any:
        torch.compile = original  # type: ignore[assignment]
        compiled = original(*args, **kwargs)
        stack.enter_context(_eagerly())
        return compiled

    is_loaded = "torch._dynamo" in sys.modules
    if not is_loaded:
        torch.compile = compile  # type: ignore[assignment]
    try:
        with _eagerly() if is_loaded else nullcontext():
            yield
    finally:
        torch.compile = original  # type: ignore[assignment]


@contextmanager
def _eagerly() -> Iterator[None]:
    """What was compiled runs as it was written; a compiled module is the module."""
    kind = sys.modules["torch._dynamo.eval_frame"].OptimizedModule
    own = kind.__dict__.get("__call__")
    kind.__call__ = lambda self, *args, **kwargs: self._orig_mod(*args, **kwargs)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        if own is None:
            del kind.__call__
        else:
            kind.__call__ = own
