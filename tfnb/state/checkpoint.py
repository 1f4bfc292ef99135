"""Variable files: one safetensors file of labelled tensors with digests. No pickle."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tfnb.errors import CheckpointIncompatible, NotFound
from tfnb.graph import Spec
from tfnb.graph.files import read_tensors, write_tensors


def save(path: str | Path, variables: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> None:
    """Write the tensors and the metadata, atomically."""
    write_tensors(Path(path), variables, dict(meta))


def load(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the metadata; raises CheckpointCorrupt naming file and key."""
    tensors, meta, _ = read_tensors(Path(path))
    return tensors, meta


def match(
    have: Mapping[str, torch.Tensor], want: Mapping[str, Spec], *, strict: bool = True,
    mapping: Mapping[str, str] | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Label -> tensor for every wanted variable; raises before anything could be assigned."""
    found = {}
    for label, spec in want.items():
        key = (mapping or {}).get(label, label)
        if key not in have:
            if strict:
                near = difflib.get_close_matches(key, list(have), 3)
                raise NotFound(f"no variable {key!r} in the checkpoint; near: {', '.join(near) or 'none'}")
            continue
        if tuple(have[key].shape) != tuple(spec.shape) or have[key].dtype != spec.dtype:
            got = Spec(have[key].dtype, tuple(have[key].shape))
            raise CheckpointIncompatible(f"variable {label} is {spec}, and the checkpoint holds {got}")
        found[label] = have[key]
    return found
