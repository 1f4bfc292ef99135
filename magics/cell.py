"""The body of a cell magic, run as a notebook cell: true lines, one-frame syntax errors, the user's names.

May import IPython; knows nothing of graphs. IPython hands a magic its body without saying where in the cell it stood,
so the cell is found from the Python frames and the input history, and the body is compiled under the cell's own file
name.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.interactiveshell import InteractiveShell

from tfnb.magics.tracebacks import shorten

_serial = itertools.count(1)
Converted = Callable[[Sequence[ast.stmt], ast.expr | None, str, int], Any]  # has ``run(names)``


class CellSyntaxError(Exception):
    """A body that is not Python; shown as one frame. Not a SyntaxError: IPython would ignore the rendering hook."""

    def __init__(self, error: SyntaxError, shell: InteractiveShell) -> None:
        super().__init__(str(error))
        self.error, self.shell = error, shell

    def _render_traceback_(self) -> list[str]:
        return self.shell.SyntaxTB.structured_traceback(type(self.error), self.error, None)


@dataclass(frozen=True, slots=True)
class CellProgram:
    """A compiled body: ``label`` is ``In[3]``, ``filename`` the file of its frames, ``silent`` a final semicolon."""

    shell: InteractiveShell
    label: str
    filename: str
    statements: CodeType
    result: CodeType | None
    silent: bool
    tree: ast.Module
    last: ast.expr | None

    def run(self, full_tracebacks: bool = False, converted: Converted | None = None) -> Any:
        """Run in the user's namespace; returns the value of a final expression. converted: replaces the body."""
        __tracebackhide__ = True
        shell = self.shell
        if converted is None or shell.user_global_ns is not shell.user_ns:
            return self._run(shell.user_global_ns, shell.user_ns, full_tracebacks)
        try:
            return self.converted(converted).run(shell.user_ns)
        except BaseException as error:
            if not full_tracebacks:
                shorten(error)
            raise

    @property
    def body(self) -> list[ast.stmt]:
        """The statements, with the final expression."""
        return [*self.tree.body, *([] if self.last is None else [ast.Expr(self.last)])]

    def converted(self, make: Converted) -> Any:
        """The body converted by ``make``."""
        return make(self.tree.body, self.last, self.filename, self.shell.compile.flags)

    def names(self, *, full_tracebacks: bool = False) -> dict[str, Any]:
        """Run on a copy of the user's namespace, and return the copy."""
        __tracebackhide__ = True
        names = dict(self.shell.user_ns)
        self._run(names, names, full_tracebacks)
        return names

    def _run(self, outer: dict[str, Any], names: dict[str, Any], full_tracebacks: bool) -> Any:
        __tracebackhide__ = True
        try:
            exec(self.statements, outer, names)
            return None if self.result is None else eval(self.result, outer, names)
        except BaseException as error:
            if not full_tracebacks:
                shorten(error)
            raise


def compiled(shell: InteractiveShell, magic: str, line: str, body: str) -> CellProgram:
    """The body of ``%%magic line``, ready to run; raises CellSyntaxError."""
    __tracebackhide__ = True
    label, filename = place(shell)
    text = _whole(shell, magic, line, body)
    linecache.cache[filename] = (len(text), None, [f"{row}\n" for row in text.splitlines()], filename)
    above = text.rstrip().count("\n") - body.rstrip().count("\n")
    blank = sum(1 for _ in itertools.takewhile(lambda row: not row.strip(), body.splitlines()))
    try:
        source = shell.transform_cell(body)  # drops leading blank lines
        tree = shell.transform_ast(shell.compile.ast_parse("\n" * (above + blank) + source, filename))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        compiler: Any = shell.compile  # annotated for text only
        statements = compiler(tree, filename, "exec")
        result = None if last is None else compiler(ast.Expression(last.value), filename, "eval")
    except SyntaxError as error:
        raise CellSyntaxError(_advise(error), shell) from None
    silent = DisplayHook.semicolon_at_end_of_expression(source)
    return CellProgram(shell, label, filename, statements, result, silent, tree, None if last is None else last.value)


def place(shell: InteractiveShell) -> tuple[str, str]:
    """Label and file name of the user's cell: the outermost one on the stack, since %%capture runs cells by itself."""
    found = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        known = shell.compile.format_code_name(filename)
        if known is not None:
            found = known[1], filename
        frame = frame.f_back
    if found is None:
        number = next(_serial)
        found = f"cell {number}", f"<tfgraph {number}>"
    return found


def _whole(shell: InteractiveShell, magic: str, line: str, body: str) -> str:
    """The raw text of the whole cell; rebuilt if missing in the history (store_history=False)."""
    raw = shell.history_manager.input_hist_raw[-1] if shell.history_manager else ""
    return raw if raw.rstrip().endswith(body.rstrip()) else f"%%{magic} {line}\n{body}"


def _advise(error: SyntaxError) -> SyntaxError:
    if "outside function" in str(error.msg) and ("await" in error.msg or "async" in error.msg):
        error.msg += "; a %%tfgraph cell cannot await: use `with tfnb.record():` in a plain cell"
    return error
