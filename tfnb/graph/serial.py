"""Graph files (being written)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tfnb.graph.contents import Contents


def write_graph(name: str, seed: int, contents: Contents, path: Path) -> None:
    raise NotImplementedError


def read_graph(path: Path, new_id: Callable[[], int]) -> tuple[str, int, Contents]:
    raise NotImplementedError
