"""The connected cluster of this process. Imports nothing heavy: the session asks here at every run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_current: list[Any] = []
notices: list[Callable[[], str]] = []  # that a cluster was lost, until a run here has said so


def connected(own: object = None) -> Any:
    """The Cluster of one's ``own``, else the connected one, or None."""
    return own if own is not None else _current[-1] if _current else None


def everyone() -> tuple[Any, ...]:
    """All connected Clusters."""
    return tuple(_current)


def connect(cluster: object) -> None:
    """Make ``cluster`` the one that runs go to."""
    notices.clear()
    _current.append(cluster)


def disconnect(cluster: object) -> None:
    """Forget ``cluster``; harmless if not connected."""
    if cluster in _current:
        _current.remove(cluster)
