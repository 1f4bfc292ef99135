"""The compiler's process, from the side of the process that runs steps: started on demand, ended when unused.

Compiling takes Python's lock for seconds where it runs, and a compiler may take the process with it. So it runs in one
of its own, which is spawned, never forked. Every wait has a deadline. The process is killed with what it started when
nobody waits for it any more, at the interpreter's end, or when it takes too long. It ends itself when it has been idle,
or when this process is no more.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from tfnb.execution.compiling.package_cache import packages

START, BUILD, END = 60.0, 900.0, 10.0  # seconds: to be there, to compile one step, to be gone after a kill
NICE = 16  # levels, where nobody waits: Linux gives it 29 parts of a busy processor to 1024 of a step, 2.8 %
BEHIND = 3600.0  # seconds to compile what nobody waits for, on processors that steps keep busy
BUDGET = 600.0  # seconds of a processor for one step
IDLE = 60.0  # seconds
LOG = "log.txt"  # what it and the compilers that it starts print
NOBODY = "nobody waits for the compiler"


class OverBudget(Exception):
    """Raised when a build has used up its processor seconds and was ended."""


class CompilerProcess:
    """Builds folders, one at a time, in a process of its own."""

    def __init__(
        self, *, deadline: float = BUILD, behind: float = BEHIND, idle: float = IDLE, budget: float = BUDGET
    ) -> None:  # fmt: skip
        self.deadline, self.behind, self.idle, self.budget = deadline, behind, idle, budget
        self._owners: weakref.WeakSet[object] = weakref.WeakSet()
        self._fresh()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._fresh)

    def _fresh(self) -> None:
        """As without a process: one that was forked leaves the process of its parent alone."""
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._child: _Child | None = None
        self._for: object = None  # owner of what is being built
        self._closed = False
        self._owners.clear()

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        child = self._child
        return None if child is None or child.is_gone else child.process.pid

    def build(self, call: str, folder: Path, owner: object, *, urgent: bool = False) -> dict[str, Any] | str:
        """Let the process call ``module:function`` with ``folder``; returns the result, with the ``seconds`` used.

        Text where it failed: why. Raises OverBudget where it took too many seconds of a processor.

        urgent: steps wait for it; else it leaves the processors to whoever else wants them. A process that dies in the
        middle is started once more. An owner that was released gets `NOBODY`.
        """
        asked = {"build": call, "folder": str(folder), "nice": 0 if urgent else NICE, "budget": self.budget}
        message, why = json.dumps(asked).encode(), NOBODY
        self._owners.add(owner)
        with self._turn:
            for _ in range(2):
                child = self._running(owner)
                if child is None:
                    return NOBODY
                try:
                    answer = json.loads(child.answer(message, self.deadline if urgent else self.behind))
                except TimeoutError as error:
                    child.kill()
                    return f"the compiler's process {error}"
                except (EOFError, OSError):
                    why = f"the compiler's process {child.kill(END)}"
                else:
                    if answer.get("over"):
                        child.kill()  # it may have been importing
                        raise OverBudget(answer["error"])
                    return str(answer["error"]) if "error" in answer else dict(answer)
                finally:
                    self._for = None
        return why if self.is_expected(owner) else NOBODY

    def expect(self, owner: object) -> None:
        """Register an owner that will request a build, until released."""
        self._owners.add(owner)

    def is_expected(self, owner: object) -> bool:
        """Whether the owner is still registered."""
        return owner in self._owners and not self._closed

    def _running(self, owner: object) -> _Child | None:
        """The running process, started if necessary; None for a released owner."""
        with self._lock:
            if not self.is_expected(owner):
                return None
            if self._child is None or self._child.is_gone:
                self._end()
                self._child = _Child(self.idle)
            self._for = owner
            return self._child

    def release(self, owner: object) -> None:
        """Remove an owner: the process ends if its current build is for this owner, or if no owner is left."""
        with self._lock:
            self._owners.discard(owner)
            if self._for is owner or not self._owners:
                self._end()

    def close(self) -> None:
        """End the process for good."""
        with self._lock:
            self._closed = True
            self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


class _Child:
    """One compiler process, in its own process group, out of reach of Ctrl-C, with a scratch folder for its files."""

    def __init__(self, idle: float) -> None:
        self.scratch = packages().draft()
        self.pipe, theirs = Pipe()
        self._is_ready, self._said = False, ""
        environment = {
            **os.environ, "TMPDIR": str(self.scratch), "TORCHINDUCTOR_CACHE_DIR": str(self.scratch / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else it starts processes of its own
        }  # fmt: skip
        given = (str(theirs.fileno()), str(os.getpid()), str(idle))
        with theirs, (self.scratch / LOG).open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", Path(__file__).with_name("compile_loop.py"), *given],
                pass_fds=[theirs.fileno()], start_new_session=True, cwd=self.scratch, env=environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended, or its scratch folder in the cache was removed."""
        return self.process.poll() is not None or not self.scratch.exists()

    def answer(self, message: bytes, deadline: float) -> bytes:
        """The process's answer; raises EOFError or OSError if the process is gone, TimeoutError at the deadline."""
        if not self._is_ready:
            self._received(START, "start")
            self._is_ready = True
        self.pipe.send_bytes(message)
        return self._received(deadline, "compile the step")

    def _received(self, seconds: float, what: str) -> bytes:
        if not self.pipe.poll(seconds):
            raise TimeoutError(f"did not {what} within {seconds:g} s")
        return self.pipe.recv_bytes()

    def kill(self, grace: float = 0.0) -> str:
        """Kill the process and its children, and remove the scratch folder; returns a text with the exit status."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(grace)
        with suppress(ProcessLookupError, PermissionError):  # the group is gone
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END)
        with suppress(OSError):
            self._said = (self.scratch / LOG).read_text(errors="replace").strip().rpartition("\n")[2]
        shutil.rmtree(self.scratch, ignore_errors=True)
        code = self.process.returncode or 0
        return f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended ({code}): {self._said}"


COMPILER = CompilerProcess()
