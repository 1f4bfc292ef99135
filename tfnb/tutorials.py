"""The notebooks and pages shipped with tfnb: beside the package in a checkout, inside the installed package."""

from __future__ import annotations

import shutil
from pathlib import Path

_PACKAGE = Path(__file__).parent
INSTALLED = _PACKAGE / "notebooks"
NOTEBOOKS = INSTALLED if INSTALLED.is_dir() else _PACKAGE.parent / "notebooks"
QUICKSTART = "quickstart.ipynb"


def opened(into: Path) -> Path:
    """The quickstart to open: of a checkout itself, of an installed package a copy in the folder ``into``.

    All notebooks, pages and their pictures are copied there, but those that are there: they may hold what the user
    changed.
    """
    if NOTEBOOKS != INSTALLED:
        return NOTEBOOKS / QUICKSTART
    for file in (path for path in NOTEBOOKS.rglob("*") if path.suffix in (".ipynb", ".md", ".svg")):
        copy = into / file.relative_to(NOTEBOOKS)
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    return into / QUICKSTART
