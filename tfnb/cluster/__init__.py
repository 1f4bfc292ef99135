"""The cluster: tasks and parameter servers on Dask; `connect` loads Dask on first use.

Each folder imports those before it: `wire` (messages), `server` (parameter servers), `queues` (their other ends),
`modes` (machines of steps and trainings), `tasks` (what computes), `engine` (carries out what machines say),
`members` (who takes part), `notebook` (what lives there of it), `recovery` (going on after a server was lost). `driver`
is the face, and `connected` knows which one is connected.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["Cluster", "connect"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tfnb.cluster' has no attribute {name!r}")
    return getattr(import_module("tfnb.cluster.driver"), name)
