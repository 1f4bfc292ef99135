"""The notebooks shipped with tfnb: beside the package in a checkout, inside the installed package."""

from __future__ import annotations

import shutil
from pathlib import Path

_PACKAGE = Path(__file__).parent
INSTALLED = _PACKAGE / "notebooks"
NOTEBOOKS = INSTALLED if INSTALLED.is_dir() else _PACKAGE.parent / "notebooks"
QUICKSTART = "quickstart.ipynb"


def opened(into: Path) -> Path:
    """The quickstart to open: of a checkout itself, of an installed package a copy in the folder ``into``.

    All notebooks are copied there, but those that are there: they may hold what the user changed.
    """
    if NOTEBOOKS != INSTALLED:
        return NOTEBOOKS / QUICKSTART
    into.mkdir(parents=True, exist_ok=True)
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        if not (into / notebook.name).exists():
            shutil.copyfile(notebook, into / notebook.name)
    return into / QUICKSTART
