"""Questions of a plain block for the type of a size or tensor, from its source: pure functions over syntax trees.

While a block is recorded a size that varies is a ``torch.SymInt`` and a tensor a ``tfnb.Tensor``, and code that asks
for ``int`` or ``torch.Tensor`` by ``type`` or ``isinstance`` goes another way than in plain PyTorch. Cells and
functions marked ``@tfnb.autograph`` answer as plain PyTorch does.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType, FunctionType

from tfnb.errors import file_label
from tfnb.graph import SourceLine
from tfnb.recording.cells.statements import Note
from tfnb.recording.marks.source_trees import definition

_NUMBERS = frozenset({"int", "float", "Integral", "Real", "Number"})
_ASKED = frozenset({"isinstance", "type"})
_PLAIN = frozenset({"int", "float", "str", "repr", "isinstance", "type"})  # calls that give no size


def notes_of_types(functions: Iterable[FunctionType], block: FrameType, body: Sequence[ast.stmt]) -> Iterator[Note]:
    """A note for each line of the block, and of functions that it may call, that asks for such a type."""
    if _ASKED.intersection(block.f_code.co_names) or any(isinstance(statement, ast.Match) for statement in body):
        yield from _questions(body, block.f_code.co_filename)
    for function in () if "autograph" in _names(body) else functions:  # one that is staged here calls others
        if _ASKED.intersection(function.__code__.co_names):
            found = definition(function)
            yield from () if found is None else _questions(found.body, function.__code__.co_filename)


def _questions(body: Sequence[ast.stmt], file: str) -> Iterator[Note]:
    nodes = [node for statement in body for node in ast.walk(statement)]
    sizes: set[str] = set()  # names of sizes
    for node in nodes:
        if isinstance(node, ast.Assign) and _is_size(node.value, sizes):
            sizes |= {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    for node in nodes:
        asked = _asked(node, sizes)
        if asked:
            text = linecache.getline(file, node.lineno).strip()  # type: ignore[attr-defined]
            yield Note(SourceLine(file_label(file), node.lineno, text), asked)  # type: ignore[attr-defined]


def _asked(node: ast.AST, sizes: set[str]) -> str:
    """The text of the note for one expression; empty for none."""
    if isinstance(node, ast.Match) and _is_size(node.subject, sizes):
        return _note("match", "a size", "torch.SymInt", "int")
    if isinstance(node, ast.Compare) and _called(node.left) == "type" and "Tensor" in _names(node.comparators):
        return _note("type()", "a tensor", "tfnb.Tensor, a subclass of torch.Tensor", "torch.Tensor")
    called = _called(node)
    if called not in ("isinstance", "type") or not isinstance(node, ast.Call) or not node.args:
        return ""
    kinds = _names(node.args[1:])
    is_number = called == "type" or (not kinds.isdisjoint(_NUMBERS) and "SymInt" not in kinds)
    return _note(f"{called}()", "a size", "torch.SymInt", "int") if is_number and _is_size(node.args[0], sizes) else ""


def _note(how: str, what: str, here: str, plain: str) -> str:
    return (
        f"`{how}` asks for the type of {what}, which is {here} while this block is recorded and {plain} in plain "
        "PyTorch, so Python may go another way: record a %%tfgraph cell or a function marked @tfnb.autograph, whose "
        "code gets the type of plain PyTorch, or do not ask"
    )


def _called(node: ast.AST) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    found = (inner for node in nodes for inner in ast.walk(node))
    return {getattr(node, "attr", getattr(node, "id", "")) for node in found}


def _is_size(node: ast.AST, sizes: set[str]) -> bool:
    """Whether an expression computes a number from sizes: no whole shape, and no text or ``int`` of one."""
    if isinstance(node, ast.Name):
        return node.id in sizes
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return name not in _PLAIN and (
            name in ("numel", "len") or (name == "size" and bool(node.args)) or (name in ("min", "max")
            and any(_is_size(arg, sizes) for arg in node.args))
        )  # fmt: skip
    if isinstance(node, ast.Subscript):
        return getattr(node.value, "attr", "") == "shape"
    if isinstance(node, ast.Attribute):
        return False
    if isinstance(node, ast.BinOp | ast.UnaryOp | ast.IfExp):
        return any(_is_size(child, sizes) for child in ast.iter_child_nodes(node))
    return isinstance(node, ast.Tuple) and any(_is_size(child, sizes) for child in node.elts)
