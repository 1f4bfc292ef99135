"""Functions written as text: recorded by AutoGraph on one sample, and compared with plain Python at others."""

from __future__ import annotations

import linecache
import textwrap
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

import tfnb

_numbers = count()
Sizes = (torch.SymInt, torch.SymFloat, torch.SymBool)


def function(body: str, **names: Any) -> Callable[..., Any]:
    """``def f(x)`` with this body, whose source is there, and what it finds around it."""
    source = "def f(x):\n" + textwrap.indent(body.strip("\n"), "    ") + "\n"
    found: Callable[..., Any] = module(source, f"<written {next(_numbers)}>", nn=torch.nn, tfnb=tfnb, **names)["f"]
    return found


def module(source: str, name: str, **names: Any) -> dict[str, Any]:
    """What a file of this name and text holds after it ran; its lines are there for whoever asks for them."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {"torch": torch, **names}
    exec(compile(source, name, "exec"), space)
    return space


def blocks(text: str) -> list[tuple[str, str]]:
    """(name, body) of each block, which begins with a line ``# name``."""
    pairs = (block.lstrip("# ").partition("\n") for block in text.strip().split("\n\n# "))
    return [(name.strip(), body) for name, _, body in pairs]


def compared(
    body: str,
    sample: torch.Tensor,
    feeds: Sequence[torch.Tensor],
    refusals: tuple[type[Exception], ...] = (),
    **names: Any,
) -> tuple[tuple[str, ...], int]:
    """The notes of the recording, and how many feeds a run refused with one of ``refusals``; all others must agree."""
    f = function(body, **names)
    with tfnb.record() as graph:
        x = tfnb.placeholder(sample.clone(), name="x")
        out = tfnb.autograph(f)(x)
    leaves, form = tree_flatten(out)
    fetched = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    refused = 0
    for fed in feeds:
        try:
            found = iter(tfnb.run(fetched, {x: fed}) if fetched else [])
        except refusals:
            refused += 1
            continue
        wanted, wanted_form = tree_flatten(f(fed.clone()))
        assert len(leaves) == len(wanted), (form, wanted_form)
        for leaf, want in zip(leaves, wanted, strict=True):
            got = next(found) if isinstance(leaf, torch.Tensor) else leaf
            if isinstance(got, Sizes):
                continue  # not a value of the run
            if not isinstance(want, (torch.Tensor, bool, int, float)):
                assert got == want
                continue
            a, b = torch.as_tensor(got), torch.as_tensor(want)
            torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-6, equal_nan=True)
    return graph.notes, refused
