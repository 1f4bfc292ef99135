"""The compiler's process: builds one folder after the other, as requested over a socket, and ends with its parent.

``python compile_loop.py FD PARENT IDLE``. A message is JSON: what to call, as ``module:function``, the folder to call
it with, how nice to be, and how many seconds of a processor it may take. The answer says how long that took
and what the function gives, or in one line why it failed. Imports nothing until it is asked.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")  # Linux may share processors by session first: a nice level holds within one
LOOKED = 0.5  # seconds between two looks whether the parent is there


def serve(pipe: Connection, idle: float, drafts: list[Path]) -> None:
    """Build on request, until idle for ``idle`` seconds or the parent hangs up.

    drafts: the folders that nobody needs when the parent is gone; that of a build is among them until it is answered.
    """
    front = level = os.nice(0)
    pipe.send_bytes(b"{}")
    while pipe.poll(idle):
        message = json.loads(pipe.recv_bytes())
        if level != (level := front + message["nice"]):
            be_nice(level)
        drafts.append(Path(message["folder"]))
        answer = built(message["build"], drafts[-1], message["budget"])
        drafts.pop()
        pipe.send_bytes(json.dumps(answer).encode())


def be_nice(level: int) -> None:
    """Leave the processors to others, to this nice level; back to the front goes where the system allows it."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, level)
    with suppress(OSError):
        AUTOGROUP.write_text(str(min(level, 19)))


def built(build: str, folder: Path, budget: float) -> dict[str, object]:
    """Call ``module:function`` with the folder; gives its facts, the seconds and those of a processor, or the error in
    one line.

    One that takes more than ``budget`` seconds of a processor is ended, and is ``over`` it.
    """
    start, begun = time.perf_counter(), _used()
    end = begun + budget
    try:
        module, _, name = build.partition(":")
        with bounded(end):
            facts = getattr(import_module(module), name)(folder) or {}
    except (Exception, Over) as error:  # compilers raise anything, and make other errors of one
        if _used() > end:
            return {"error": f"it takes more than {budget:g} s of a processor", "over": True}
        lines = str(error).strip().splitlines()
        return {"error": f"{type(error).__name__}: {lines[0] if lines else ''}"}
    return {"seconds": time.perf_counter() - start, "processor": _used() - begun, **facts}


class Over(BaseException):
    """Raised when a build exceeds its processor time; not caught by an ``except Exception`` in a compiler."""


@contextmanager
def bounded(end: float) -> Iterator[None]:
    """Raise Over in this thread, the main one, once this process has used so many seconds of a processor.

    Those of the compilers that it starts count when they end. It is raised until it gets through: Python drops what is
    raised in some callbacks.
    """
    is_over, thread = threading.Event(), threading.get_ident()

    def watch() -> None:
        while not is_over.wait(LOOKED):
            if _used() > end:
                signal.pthread_kill(thread, signal.SIGXCPU)

    def stop(*_: object) -> None:
        if not is_over.is_set():
            raise Over

    signal.signal(signal.SIGXCPU, stop)
    threading.Thread(target=watch, name="tfnb-budget", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _used() -> float:
    return sum(os.times()[:4])


def _end_with(parent: int, drafts: list[Path]) -> None:
    """End this process and its compilers when the parent is gone: no process waits for the results then."""
    while os.getppid() == parent:
        time.sleep(LOOKED)
    for draft in reversed(drafts):
        shutil.rmtree(draft, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def main(descriptor: int, parent: int, idle: float) -> None:
    """Run in a process group of its own, in its scratch folder."""
    os.umask(0o077)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    drafts = [Path.cwd()]
    threading.Thread(target=_end_with, args=(parent, drafts), name="tfnb-parent", daemon=True).start()
    try:
        serve(Connection(descriptor), idle, drafts)
    except (EOFError, OSError):  # the parent hung up
        return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
