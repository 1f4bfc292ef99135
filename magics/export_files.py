"""``%tfgraph export``: a graph into a file, whose suffix says the format."""

from __future__ import annotations

from pathlib import Path

from IPython.core.error import UsageError

import tfnb
from tfnb.errors import FailedPrecondition

_EXPORTS = {  # suffix -> a function of tfnb.view, and its options
    ".svg": ("graph_svg", {}),
    ".html": ("graph_html", {"limit": 16 << 20}),  # a file may hold what an output should not
    ".dot": ("graph_dot", {}),
    ".graphml": ("graph_graphml", {}),
    ".png": ("graph_png", {}),
}


def exported(graph: tfnb.Graph, file: str | None) -> Path:
    """The file that was written; raises UsageError."""
    path = Path(file or f"{graph.name}.svg")
    if not path.parent.is_dir():
        raise UsageError(f"cannot export {path.name}: there is no folder {path.parent}")
    if path.suffix == ".json":
        graph.save(path)
    elif path.suffix in _EXPORTS:
        try:
            name, options = _EXPORTS[path.suffix]
            found = getattr(tfnb.view, name)(graph, **options)
        except FailedPrecondition as error:
            raise UsageError(f"cannot export {path.name}: {error}") from error
        path.write_bytes(found.encode() if isinstance(found, str) else found)
    else:
        raise UsageError(f"cannot export {path.name}: its suffix says the format, one of .json {' '.join(_EXPORTS)}")
    return path
