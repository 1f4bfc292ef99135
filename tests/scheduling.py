"""Distribution of tests to processes: scopes that stay in one process, and the order of scopes."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

CLUSTER = "tests/cluster/"
ALONE = "tests/cluster/alone/"  # tests that name no Dask
FAULTS, REST = f"{CLUSTER}: processes that end or stand still", f"{CLUSTER}: the rest"
LONGEST = (
    FAULTS,
    REST,
    "tests/coverage/",
    "notebooks/",
    "tests/magics/",
    "tests/models/",
    "tests/control_flow/",
    ALONE,
)

# Files that end, stop or start processes, or wait for a clock. They stay together: two such clusters side by side
# would take each other's time.
WITH_FAULTS = (
    "deadlocks_there", "deploy", "ending", "faults", "killed_runners", "kills_in_parts", "lending",
    "lost_queue_servers", "lost_scheduler", "members", "memory_there", "modes", "partitions", "registry",
    "requests_there", "resident", "restarted", "shards", "soak", "stopping", "streams", "transport", "validation_there",
)  # fmt: skip


# File -> the one in whose process it runs, since both need what takes seconds to load.
WITH_ANOTHER = {
    "tests/recording/test_strides.py": "tests/coverage/test_opinfo.py",  # PyTorch's table of operators
    "tests/test_layers.py": "tests/test_house.py",  # syntax trees of all sources
    "tests/test_escaping.py": "tests/test_house.py",
}


def scope(nodeid: str) -> str:
    """The scope of a test, run as a whole by one process: its file, or a group of files that share a Dask cluster."""
    path = nodeid.split("::", 1)[0]
    path = WITH_ANOTHER.get(path, path)
    if not path.startswith(CLUSTER) or path.startswith(ALONE):
        return path
    return FAULTS if path.removeprefix(f"{CLUSTER}test_").removesuffix(".py") in WITH_FAULTS else REST


def place(nodeid: str) -> int:
    """The rank of a test in the order: long scopes come first, so that the processes end together."""
    name = scope(nodeid)
    return next((n for n, start in enumerate(LONGEST) if name.startswith(start)), len(LONGEST))


class Scheduling(LoadScopeScheduling):
    """Hands whole scopes to the processes."""

    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid)
