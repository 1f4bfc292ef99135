"""The cluster: tasks and parameter servers on Dask; `connect` loads Dask on first use.

Each folder imports only folders before it: `wire` (messages), `server` (parameter servers), `queues` (proxies of queues
on servers), `modes` (machines of steps and trainings), `tasks` (compute tasks), `engine` (drives the machines),
`members` (membership), `notebook` (the notebook's values and display), `recovery` (after a server was lost). `driver`
is the blocking interface, and `connected` has the connected cluster.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["Cluster", "connect"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'tfnb.cluster' has no attribute {name!r}")
    return getattr(import_module("tfnb.cluster.driver"), name)
