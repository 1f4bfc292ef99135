"""Mechanisms of the house, counted: what `make shape` prints below the shape of the folders.

Each number is one that grows when an idea gets a second mechanism. Nothing fails by them.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tfnb.recording.overrides.override_table import OVERRIDES
from tfnb.recording.torch_patches import PATCHES

ROOT = Path(__file__).parent.parent.parent
RULES = (
    "tfnb/gradients/rules",
    "tfnb/gradients/rule_table.py",
    "tfnb/recording/overrides",
)  # said once by op, by design
MODULES = 20  # a folder that has more wants floors


def sources(*tops: str) -> list[Path]:
    """The Python files below these folders."""
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py"))


def named(path: Path) -> str:
    """A path as it is shown."""
    return str(path.relative_to(ROOT))


# -- tables of ops -------------------------------------------------------------------------------------------------


def op_tables(least: int = 3) -> Iterator[str]:
    """Each table of a module that has so many ATen ops, but those of rules and overrides."""
    for path in sources("tfnb", "kernels"):
        file = named(path)
        if file.startswith(RULES) or path.stem.startswith("__"):
            continue
        module = file.removesuffix(".py").replace("/", ".")
        tables = vars(importlib.import_module(module if module.startswith("tfnb") else f"tfnb.{module}"))
        for name in _assigned(ast.parse(path.read_text())):
            ops = _ops(tables.get(name))
            is_stage = any(tables[name] is rows for rows in OVERRIDES.values())  # another name of the overrides
            if ops >= least and not is_stage:
                yield f"{file} {name}: {ops}"


def _assigned(tree: ast.Module) -> list[str]:
    """The names that a module's own statements assign to."""
    targets = [t for n in tree.body if isinstance(n, ast.Assign | ast.AnnAssign) for t in getattr(n, "targets", ())]
    targets += [node.target for node in tree.body if isinstance(node, ast.AnnAssign)]
    return list(dict.fromkeys(inner.id for t in targets for inner in ast.walk(t) if isinstance(inner, ast.Name)))


def _ops(table: Any) -> int:
    """How many ATen ops are members of a table: as overloads, packets or qualified names, also in its values."""
    if isinstance(table, str):
        return table.startswith("aten.")
    if isinstance(table, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(table).startswith("aten.")
    if isinstance(table, Mapping):
        return max(sum(map(_ops, table)), sum(map(_ops, table.values())))
    return sum(map(_ops, table)) if isinstance(table, tuple | list | set | frozenset) else 0


# -- the rest --------------------------------------------------------------------------------------------------------


def patches() -> Iterator[str]:
    """What is patched in torch while something is recorded."""
    for patch in PATCHES:
        yield f"{', '.join(patch.names)}: {patch.why}"


def exceptions() -> Iterator[str]:
    """Exceptions by which recording and control flow talk to themselves: those that are none of `tfnb.errors`."""
    known = {"Exception", "BaseException"}
    for path in sources("tfnb/recording", "tfnb/control_flow"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and known & {
                base.id for base in node.bases if isinstance(base, ast.Name)
            }:
                known.add(node.name)
                yield f"{named(path)} {node.name}"


def untyped_recorders() -> Iterator[str]:
    """Parameters that are a recorder and do not say so."""
    for path in sources("tfnb"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(r"\b_?rec(order|ording)?: Any\b", line):
                yield f"{named(path)}:{number}"


def repeated_names() -> Iterator[str]:
    """Names of modules that occur more than once."""
    where = defaultdict(list)
    for path in sources("tfnb", "kernels"):
        if not path.stem.startswith("__"):
            where[path.stem].append(named(path))
    for stem, files in where.items():
        if len(files) > 1:
            yield f"{stem}: {', '.join(files)}"


def large_folders() -> Iterator[str]:
    """Folders with so many modules that a reader has to search."""
    where = defaultdict(int)
    for path in sources("tfnb", "kernels"):
        where[path.parent] += not path.stem.startswith("__")
    for folder, count in where.items():
        if count > MODULES:
            yield f"{named(folder)}: {count}"


COUNTS = {
    "tables of ops outside of rules and overrides": op_tables,
    "patches of torch": patches,
    "exceptions of attempts in recording and control flow": exceptions,
    "recorders typed Any": untyped_recorders,
    "module names that occur more than once": repeated_names,
    f"folders with more than {MODULES} modules": large_folders,
}


def report() -> Iterator[str]:
    """The lines that `make shape` prints."""
    for title, tops in (("tfnb and kernels", ("tfnb", "kernels")), ("tests", ("tests",))):
        yield f"lines of {title}: {sum(path.read_text().count(chr(10)) for path in sources(*tops))}"
    for title, count in COUNTS.items():
        found = list(count())
        yield f"{title}: {len(found)}"
        yield from (f"  {line}" for line in found)
