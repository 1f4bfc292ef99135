"""``%tfgraph export``: a graph into a file, whose suffix says the format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from IPython.core.error import UsageError

import tfnb

_EXPORTS = {".svg": "graph_svg", ".html": "graph_html", ".dot": "graph_dot"}


def exported(graph: Any, file: str | None) -> Path:
    """The file that was written; raises UsageError."""
    path = Path(file or f"{graph.name}.svg")
    if not path.parent.is_dir():
        raise UsageError(f"cannot export {path.name}: there is no folder {path.parent}")
    if path.suffix == ".json":
        graph.save(path)
    elif path.suffix in _EXPORTS:
        path.write_text(getattr(tfnb.view, _EXPORTS[path.suffix])(graph))
    else:
        raise UsageError(f"cannot export {path.name}: its suffix says the format, one of .json {' '.join(_EXPORTS)}")
    return path
