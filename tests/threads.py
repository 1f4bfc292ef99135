"""Several pieces of work at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable


def at_once(*works: Callable[[], object]) -> None:
    """Run in a thread each; the first error of any is raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(len(works))

    def run(work: Callable[[], object]) -> None:
        try:
            start.wait(100)
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
