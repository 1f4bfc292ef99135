"""Definition of our ops: a schema, a fake implementation, and a function for every device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def op(
    schema: str, fake: Callable[..., Any], tags: Sequence[torch.Tag] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Define ``tfnb::NAME`` from a function of the same name."""

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        name = f"tfnb::{function.__name__}"
        torch.library.define(name, schema, tags=tags)
        torch.library.impl(name, "CompositeExplicitAutograd", torch.no_grad()(function))
        torch.library.register_fake(name, fake)
        return function

    return define
