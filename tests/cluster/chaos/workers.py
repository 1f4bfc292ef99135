"""Workers under nannies, forked from one process that has imported what they need: up in seconds.

``python -m tests.cluster.chaos.workers SCHEDULER HOST COUNT FOLDER``; ends with the scheduler.
"""

from __future__ import annotations

import asyncio
import sys

from dask import config
from distributed import Nanny
from distributed.utils import get_mp_context

MODULES = ["distributed", "tfnb.cluster.tasks.task", "tests.cluster.settled"]


async def serve(scheduler: str, host: str, count: int, folder: str) -> None:
    """Until the last of them has ended."""
    options = {"nthreads": 1, "host": host, "local_directory": folder, "preload": ["tfnb.cluster.tasks.task"]}
    nannies = [await Nanny(scheduler, dashboard=False, **options) for _ in range(count)]
    await asyncio.gather(*(nanny.finished() for nanny in nannies))


if __name__ == "__main__":
    settings = {
        "distributed.worker.multiprocessing-method": "forkserver",
        "distributed.deploy.lost-worker-timeout": "24h",  # so long after a death a worker that is starting is closed
    }
    with config.set(settings):
        get_mp_context().set_forkserver_preload(MODULES)
        asyncio.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]))
