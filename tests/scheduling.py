"""Which tests stay in one process, and which scopes are taken first, when processes run tests side by side."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

CLUSTER = "tests/cluster/"
LONGEST = (CLUSTER, "tests/coverage/", "notebooks/", "tests/magics/", "tests/models/", "tests/control_flow/")


def scope(nodeid: str) -> str:
    """The scope of a test, which one process runs whole: its file, or its group of files that share a Dask cluster."""
    return CLUSTER if nodeid.startswith(CLUSTER) else nodeid.split("::", 1)[0]


def place(nodeid: str) -> int:
    """The rank of a test in the order: what takes longest comes first, so that the processes end together."""
    return next((n for n, path in enumerate(LONGEST) if nodeid.startswith(path)), len(LONGEST))


class Scheduling(LoadScopeScheduling):
    """Hands whole scopes to the processes."""

    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid)
