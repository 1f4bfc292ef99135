"""The cluster: transport, tasks, parameter servers, step machines. Dask is loaded when `connect` is first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["Cluster", "connect"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tfnb.cluster' has no attribute {name!r}")
    return getattr(import_module("tfnb.cluster.driver"), name)
