"""``tfnb run``: a notebook from the shell, cell by cell, in a kernel of its own.

`NotebookRun` executes the cells by nbclient and writes the executed notebook after each of them. `with_parameters` is
papermill's convention for parameters, `ProgressLines` says when a line of progress is due. May import `tfnb.errors`
only; nbclient, of the extra ``run``, is loaded when a notebook runs.
"""

from __future__ import annotations

import ast
import asyncio
import math
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from tfnb.errors import InvalidArgument, Unavailable

FINISHED, FAILED, NOT_BEGUN = 0, 1, 2  # exit statuses: all cells ran; a cell failed or was stopped; no cell ran
PATIENCE = 10.0  # seconds for a cell to end after an interrupt, before its kernel is killed
QUIET = 2.0  # seconds without progress
RARELY = 60.0  # seconds between two lines of progress in a log, at most

# What the kernel evaluates before and after the cells; no name is left in the notebook's namespace.
CONNECT = "__import__('tfnb').connect({!r});"
CLOSE = "[each.close() for each in __import__('tfnb.cluster.connected', fromlist=['']).everyone()[::-1]];"

_FRAME = re.compile(r"Cell In\[(\d+)\], line (\d+)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


# -- parameters ---------------------------------------------------------------------------------------------------


def with_parameters(notebook: Any, parameters: Mapping[str, object]) -> None:
    """Add a cell that assigns ``parameters`` after the cell tagged ``parameters``, as papermill does.

    A cell that an earlier run injected is replaced. Raises InvalidArgument where no cell has the tag, or where it
    assigns no such name.
    """
    if not parameters:
        return
    tagged = [cell for cell in notebook.cells if "parameters" in _tags(cell)]
    if not tagged:
        raise InvalidArgument(
            f"-p {' '.join(parameters)}: no cell of the notebook has the tag parameters. Tag the cell that assigns the "
            "defaults (in JupyterLab: Property Inspector, Common Tools, Cell Tags)"
        )
    known = assigned_names(tagged[0].source)
    if unknown := [name for name in parameters if name not in known]:
        raise InvalidArgument(
            f"-p {' '.join(unknown)}: not assigned in the cell tagged parameters, "
            f"which has {', '.join(known) or 'no names'}"
        )
    lines = ["# Parameters", *(f"{name} = {_literal(value)}" for name, value in parameters.items())]
    injected = import_module("nbformat.v4").new_code_cell("\n".join(lines), metadata={"tags": ["injected-parameters"]})
    cells = [cell for cell in notebook.cells if "injected-parameters" not in _tags(cell)]
    place = next(at for at, cell in enumerate(cells) if cell is tagged[0])
    notebook.cells = [*cells[: place + 1], injected, *cells[place + 1 :]]


def assigned_names(source: str) -> tuple[str, ...]:
    """The names that a cell of plain Python assigns at its top level; lines of magics are left out.

    >>> assigned_names("%load_ext tfnb\\nepochs = 2\\nlr: float = 1e-3  # of Adam")
    ('epochs', 'lr')
    """
    if source.lstrip().startswith("%%"):
        raise InvalidArgument(
            f"the cell tagged parameters is a {source.split()[0]} cell: move the assignments to a cell of plain "
            "Python, which the injected cell can follow"
        )
    plain = "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines())
    try:
        statements = ast.parse(plain).body
    except SyntaxError as error:
        raise InvalidArgument(f"line {error.lineno} of the cell tagged parameters: {error.msg}") from None
    targets: list[ast.expr] = []
    for statement in statements:
        if isinstance(statement, ast.Assign):
            targets += statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets.append(statement.target)
    stored = (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
    return tuple(dict.fromkeys(stored))


def parameter(text: str) -> object:
    """The value of a parameter, typed as papermill types it: a bool, None, an int, a float, else text.

    >>> parameter("3"), parameter("1e-3"), parameter("True"), parameter("adam")
    (3, 0.001, True, 'adam')
    """
    words: dict[str, object] = {"True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _literal(value: object) -> str:
    return f"float({str(value)!r})" if isinstance(value, float) and not math.isfinite(value) else repr(value)


def _tags(cell: Any) -> Sequence[str]:
    return cell.metadata.get("tags", [])


# -- progress -----------------------------------------------------------------------------------------------------


class ProgressLines:
    """Says when a line of progress is due: never in the first two seconds, then ever more rarely in a log.

    every: seconds between two lines; without it they double, up to a minute.

    >>> progress = ProgressLines(12, now=0.0)
    >>> progress.begin(3, now=1.0)
    >>> [second for second in range(300) if progress.line(second)]
    [2, 4, 8, 16, 32, 64, 124, 184, 244]
    """

    def __init__(self, cells: int, now: float, every: float | None = None) -> None:
        self._cells, self._every = cells, every
        self._began = self._cell_began = now
        self._cell = 0
        self._due = now + QUIET

    def begin(self, cell: int, now: float) -> None:
        """The cell of this number is running from ``now`` on."""
        self._cell, self._cell_began = cell, now

    def line(self, now: float) -> str | None:
        """``cell 3 of 12, 5 s (44 s in all)``, if due."""
        if now < self._due:
            return None
        passed = now - self._began
        self._due = now + (self._every or min(passed, RARELY))
        place = f"cell {self._cell} of {self._cells}" if self._cell else "starting"
        return f"{place}, {now - self._cell_began:.0f} s ({passed:.0f} s in all)"


class Terminal:
    """Standard error: a line of progress is rewritten in place on a terminal, and is a line of its own in a log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.rewrites = stream.isatty()
        self._passing = False

    def say(self, text: str) -> None:
        """Write lines that stay."""
        self._stream.write(("\r\x1b[K" if self._passing else "") + text + "\n")
        self._stream.flush()
        self._passing = False

    def progress(self, line: str) -> None:
        """Write the line of progress."""
        if not self.rewrites:
            self.say(line)
            return
        self._stream.write("\r\x1b[K" + line)
        self._stream.flush()
        self._passing = True

    def clear(self) -> None:
        """Remove the line of progress."""
        if self._passing:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
        self._passing = False


# -- the run ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellFailure:
    """How a cell failed or was stopped: ``, line 4``, the error in a line or more, and its traceback as text."""

    line: str
    error: str
    traceback: str = ""


class NotebookRun:
    """One run of a notebook file.

    path: the notebook. out: the file for the executed notebook, ``NAME.run.ipynb`` beside it by default. cluster: an
    address or scheduler file, or a number of local processes, that the kernel connects to before the first cell.
    timeout: seconds that one cell may take.
    """

    def __init__(
        self, path: Path, out: Path | None = None, *, cluster: str | None = None,
        parameters: Mapping[str, object] | None = None, timeout: float | None = None, stream: TextIO | None = None,
    ) -> None:  # fmt: skip
        if timeout is not None and not timeout > 0:
            raise InvalidArgument(f"--timeout {timeout}: a number of seconds above 0 was expected")
        self._nbformat, nbclient = _libraries()
        self.notebook = _read(self._nbformat, path)
        self.out = path.with_suffix(".run.ipynb") if out is None else out
        if not self.out.parent.is_dir():
            raise InvalidArgument(f"-o {self.out}: there is no folder {self.out.parent}")
        if not os.access(self.out.parent, os.W_OK):
            raise InvalidArgument(f"-o {self.out}: the folder {self.out.parent} cannot be written to")
        with_parameters(self.notebook, parameters or {})
        self._path, self._cluster, self._timeout = path, cluster, timeout
        self._terminal = Terminal(sys.stderr if stream is None else stream)
        self._numbers = _clear(self.notebook)  # of cells with code, by their index
        every = 0.5 if self._terminal.rewrites else None
        self._progress = ProgressLines(len(self._numbers), time.monotonic(), every)
        self._signals = 0
        self._is_deaf = False  # the kernel was interrupted, and did not answer
        self._stopped = asyncio.Event()
        # nbclient executes cells of a notebook of its own, which may have one that is not written.
        self._steps = self._nbformat.v4.new_notebook(cells=[], metadata=self.notebook.metadata)
        self._client = nbclient.NotebookClient(
            self._steps, kernel_name="python3", record_timing=False, store_widget_state=False, timeout=None,
        )  # fmt: skip

    def run(self) -> int:
        """Execute all cells, write the executed notebook, and return the exit status."""
        try:
            return asyncio.run(self._run())
        except OSError as error:  # a disk that is full
            self._terminal.say(f"{self.out} could not be written: {error}")
            return FAILED

    async def _run(self) -> int:
        self._catch_signals()
        kernel = self._client.create_kernel_manager()
        ticking = asyncio.ensure_future(self._tick())
        try:
            status, said = await self._in_kernel(kernel)
        finally:
            ticking.cancel()
            self._terminal.clear()
            if self._client.kc is not None:
                self._client.kc.stop_channels()
            if kernel.has_kernel:
                await kernel.shutdown_kernel(now=self._is_deaf)
        self._terminal.say(said)
        return status

    async def _in_kernel(self, kernel: object) -> tuple[int, str]:
        """Start the kernel, connect, and run the cells. Returns the exit status, and a text."""
        starting = asyncio.ensure_future(self._start(kernel))
        if not await self._ended(starting, None):
            self._is_deaf = True
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return NOT_BEGUN, "stopped before the first cell"
        if error := starting.exception():
            return NOT_BEGUN, f"the kernel did not start: {error}"
        if self._cluster is not None and (failure := await self._hidden(CONNECT.format(_target(self._cluster)))):
            return NOT_BEGUN, f"--cluster {self._cluster}: {failure.error}. No cell ran"
        return await self._run_cells()

    async def _start(self, kernel: Any) -> None:
        await kernel.start_kernel(extra_arguments=["--log-level=ERROR"], cwd=str(self._path.parent.absolute()))
        self._client.km = kernel
        await self._client.async_start_new_kernel_client()

    async def _run_cells(self) -> tuple[int, str]:
        self._write()
        for index, number in self._numbers.items():
            self._progress.begin(number, time.monotonic())
            failure = await self._execute(self.notebook.cells[index])
            self._write()
            if failure is not None:
                place = f"{self._path}: cell {number} of {len(self._numbers)}{failure.line}"
                error = failure.error.splitlines()[0] if failure.traceback else failure.error
                said = [f"{place}: {error}", failure.traceback, f"{self.out} has the outputs up to there"]
                return FAILED, "\n".join(filter(None, said))
        if self._cluster is not None and (failure := await self._hidden(CLOSE)):
            return FAILED, f"{self.out} is complete, but closing the cluster failed: {failure.error}"
        return FINISHED, f"{self.out}: {len(self._numbers)} cells ran"

    async def _hidden(self, code: str) -> CellFailure | None:
        """Execute a cell that is not of the notebook, and has deadlines of its own."""
        return await self._execute(self._nbformat.v4.new_code_cell(code), is_counted=False)

    async def _execute(self, cell: object, *, is_counted: bool = True) -> CellFailure | None:
        """Execute a cell, until it ends, is interrupted, or its time is over."""
        self._steps.cells.append(cell)
        executed = self._client.async_execute_cell(cell, len(self._steps.cells) - 1, store_history=is_counted)
        execution = asyncio.ensure_future(executed)
        if not await self._ended(execution, self._timeout if is_counted else None):
            return await self._interrupt(cell, execution)
        error = execution.exception()
        if error is not None:
            return _failure(cell, error)
        return CellFailure("", "stopped after this cell") if self._signals else None

    async def _ended(self, work: asyncio.Future[Any], timeout: float | None) -> bool:
        """Wait until ``work`` ends (True), or until a signal comes or the timeout is over."""
        stopping = asyncio.ensure_future(self._stopped.wait())
        await asyncio.wait({work, stopping}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        return work.done()

    async def _interrupt(self, cell: object, execution: asyncio.Future[Any]) -> CellFailure:
        """Interrupt the kernel, and wait for the cell a little, or until a second signal."""
        stopped = "stopped" if self._signals else f"stopped after {self._timeout:g} s (--timeout)"
        with suppress(RuntimeError):  # the kernel is gone
            await self._client.km.interrupt_kernel()
        ends = time.monotonic() + PATIENCE
        while not execution.done() and time.monotonic() < ends and self._signals < 2:
            await asyncio.wait({execution}, timeout=0.1)
        self._is_deaf = not execution.done()
        execution.cancel()
        await asyncio.gather(execution, return_exceptions=True)
        return CellFailure(
            _line(cell), stopped + (", and killed: it did not end when interrupted" if self._is_deaf else "")
        )

    def _catch_signals(self) -> None:
        """Let Ctrl-C and SIGTERM interrupt the cell; a second one kills its kernel."""
        loop = asyncio.get_running_loop()
        with suppress(NotImplementedError):  # on Windows
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self._stop)

    def _stop(self) -> None:
        self._signals += 1
        self._stopped.set()

    async def _tick(self) -> None:
        while True:
            if line := self._progress.line(time.monotonic()):
                self._terminal.progress(line)
            await asyncio.sleep(0.25)

    def _write(self) -> None:
        """Replace the file at once: a run that is killed leaves the notebook as of its last cell."""
        draft = self.out.with_name(f".{self.out.name}.{os.getpid()}")
        try:
            draft.write_text(self._nbformat.writes(self.notebook), encoding="utf-8")
            draft.replace(self.out)
        finally:
            draft.unlink(missing_ok=True)


def _libraries() -> tuple[Any, Any]:
    try:
        return import_module("nbformat"), import_module("nbclient")
    except ImportError as error:
        raise Unavailable(f"{error.name} is not installed: pip install 'tfnb[run]'") from None


def _read(nbformat: Any, path: Path) -> Any:
    """The notebook of a file, in the newest format."""
    try:
        notebook = nbformat.v4.upgrade(nbformat.read(path, as_version=4))
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}") from None
    except Exception as error:  # whatever nbformat makes of a file that is no notebook
        raise InvalidArgument(f"{path} is no notebook: {error}") from None
    language = notebook.metadata.get("kernelspec", {}).get("language", "python")
    if language != "python":
        raise InvalidArgument(f"{path} is a notebook of {language}: its cells run in this Python")
    return notebook


def _clear(notebook: Any) -> dict[int, int]:
    """Drop the outputs of earlier runs; returns the number of each cell with code, by its index."""
    code = [index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    for index in code:
        notebook.cells[index].outputs, notebook.cells[index].execution_count = [], None
    counted = (index for index in code if notebook.cells[index].source.strip())
    return {index: number for number, index in enumerate(counted, 1)}


def _target(cluster: str) -> int | str:
    """What `tfnb.connect` takes: a number of tasks, an address, or a scheduler file by a path from anywhere."""
    if cluster.isdigit():
        return int(cluster)
    return str(Path(cluster).absolute()) if Path(cluster).is_file() else cluster


def _failure(cell: Any, error: Any) -> CellFailure:
    """The failure of a cell by nbclient's error."""
    if not hasattr(error, "ename"):
        return CellFailure("", f"{error}. Where a process needs more memory than there is, the system kills it")
    return CellFailure(_line(cell), f"{error.ename}: {error.evalue}", _traceback(cell))


def _line(cell: Any) -> str:
    """``, line 4``: of the innermost frame in this cell, which may call a function of another one."""
    found = [line for number, line in _FRAME.findall(_traceback(cell)) if number == str(cell.execution_count)]
    return f", line {found[-1]}" if found else ""


def _traceback(cell: Any) -> str:
    """The traceback among a cell's outputs, without colours."""
    lines = (line for output in cell.outputs if output.output_type == "error" for line in output.traceback)
    return _COLOUR.sub("", "\n".join(lines))
