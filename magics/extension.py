"""``%load_ext tfnb`` and ``%unload_ext tfnb``: magics, events, completion, reprs and short tracebacks, all taken back.

May import IPython and this room.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display

import tfnb
from tfnb.errors import DeadlockError, TfnbError, name_cells
from tfnb.magics.complete import line_matcher
from tfnb.magics.magics import TfnbMagics
from tfnb.magics.tracebacks import shorten
from tfnb.magics.watch_names import settle

NAMES = (
    "tfgraph", "tfrun", "tfprof", "tfdiff", "tfgrad", "tfcluster", "tfvars", "tfbudget", "tfsave", "tfload", "tfwatch",
    "tfbreak", "tfcompare", "tfcache",
)  # fmt: skip
SHOWN = (
    "tfnb.graph.graph.Graph", "tfnb.graph.variable.Variable", "torch.tfnb.Tensor",  # what torch thinks its module is
    "tfnb.graph.spec.Spec", "tfnb.recording.values.tensor.Operation", "tfnb.session.session.Session",
    "tfnb.fitting.fit_loop.RunResult", "tfnb.fitting.background.RunHandle", "tfnb.execution.tracing.trace.Trace",
    "tfnb.magics.text_table.Table", "tfnb.watching.Watch", "tfnb.graph.queue.Queue",
    "tfnb.session.breakpoints.BreakpointValues",
    "tfnb.fitting.comparing.Comparison", "tfnb.state.checkpoint.Checkpoint",
)  # fmt: skip

PICTURES = ("tfnb.graph.graph.Graph", "tfnb.execution.tracing.trace.Trace")  # those of them that have an SVG, too

# What is shown without frames of tfnb. OSError: a file that the user named, a connection.
SHORT = (TfnbError, KeyboardInterrupt, OSError)

_loaded: dict[int, TfnbMagics] = {}
_matchers: dict[int, Callable[..., Any]] = {}  # of Tab, one of each shell
_named: dict[int, Callable[[], None]] = {}  # what takes back that cells have names in messages


def load(shell: InteractiveShell) -> None:
    """Register everything; loading twice is the same as once."""
    if id(shell) in _loaded:
        return
    magics = _loaded[id(shell)] = TfnbMagics(shell=shell)
    _matchers[id(shell)] = line_matcher(magics, NAMES)
    shell.register_magics(magics)
    magics.watch.attach()
    shell.input_transformers_cleanup.append(magics.sticky)
    _named[id(shell)] = name_cells(lambda filename: (shell.compile.format_code_name(filename) or ("", None))[1])
    shell.events.register("post_run_cell", magics.lives.follow)
    shell.events.register("post_run_cell", settle)
    shell.events.register("post_run_cell", _user_code_ran)
    shell.events.register("post_run_cell", magics.hand_over)
    completer: Any = shell.Completer
    completer.custom_matchers.append(_matchers[id(shell)])
    for name in SHOWN:
        for formatter, function in _formatters(shell, magics, name):
            formatter.for_type_by_name(*name.rsplit(".", 1), function)
    if not shell.custom_exceptions:  # somebody else's handler stays
        shell.set_custom_exc(SHORT, _show_short)
    tfnb.load_in_background(_import_torch)


def _user_code_ran(_result: object = None) -> None:
    """Announce that a cell may have changed recorded Python state, if the recording room is loaded."""
    tell = getattr(sys.modules.get("tfnb.recording"), "user_code_ran", None)
    if tell is not None:
        tell()


def _import_torch() -> None:
    """Import torch and the needs of recordings in the background: the first recording would wait otherwise."""
    from tfnb.recording.shapes.fakes import imported  # listed exception: torch takes seconds to load

    imported()


def unload(shell: InteractiveShell) -> None:
    """Take everything back."""
    magics = _loaded.pop(id(shell), None)
    if magics is None:
        return
    magics.watch.detach()
    shell.input_transformers_cleanup.remove(magics.sticky)
    _named.pop(id(shell))()
    shell.events.unregister("post_run_cell", magics.lives.follow)
    shell.events.unregister("post_run_cell", settle)
    shell.events.unregister("post_run_cell", _user_code_ran)
    shell.events.unregister("post_run_cell", magics.hand_over)
    completer: Any = shell.Completer
    completer.custom_matchers.remove(_matchers.pop(id(shell)))
    for name in NAMES:
        for kind in ("line", "cell"):
            shell.magics_manager.magics[kind].pop(name, None)
    for name in SHOWN:
        for formatter, _ in _formatters(shell, magics, name):
            _forget(formatter, name)
    if shell.custom_exceptions == SHORT:
        shell.set_custom_exc((), None)


def _formatters(shell: InteractiveShell, magics: TfnbMagics, name: str) -> Iterator[tuple[Any, Any]]:
    """Who shows our objects: text from the bundle, HTML and pictures only where they are wanted."""
    shown: Any = shell.display_formatter
    yield shown.mimebundle_formatter, _text
    yield shown.formatters["text/html"], magics.html
    if name in PICTURES:
        yield shown.formatters["image/svg+xml"], magics.svg


def _text(shown: object, include: object = None, exclude: object = None) -> dict[str, str]:
    return {"text/plain": repr(shown)}


def _forget(formatter: Any, name: str) -> None:
    """A function moves from the deferred table to the type's when the type is first shown."""
    formatter.deferred_printers.pop(tuple(name.rsplit(".", 1)), None)
    for kind in list(formatter.type_printers):
        if f"{kind.__module__}.{kind.__qualname__}" == name:
            formatter.type_printers.pop(kind)


def _show_short(
    shell: InteractiveShell, kind: type, error: BaseException, traceback: TracebackType | None, tb_offset: Any = None
) -> list[str]:
    """Show a tfnb error, an OSError or an interrupt without tfnb's own frames."""
    if not _loaded[id(shell)].full_tracebacks:
        shorten(error)
    shell.showtraceback((kind, error, error.__traceback__), tb_offset=tb_offset)
    if isinstance(error, DeadlockError) and error.details is not None:
        display({"text/html": tfnb.view.layout.svg(error.details.dot()), "text/plain": str(error.details)}, raw=True)
    return []
