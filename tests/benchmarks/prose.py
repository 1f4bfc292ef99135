"""Names and docstrings, counted: docstrings that lean on pronouns, ambiguous class names, participles, `Any`.

`lines` is the part of `make shape` on prose; `tests/test_house.py` holds the rooms to the counts.
"""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.syntax import parsed

ROOT = Path(__file__).parent.parent.parent
TOPS = ("tfnb", "kernels", "magics", "widgets")

# Words that stand for a noun elsewhere; "that" and "these" only where no noun or clause follows.
PRONOUN = re.compile(
    r"\b(?:what|whatever|which|whichever|those|these(?= (?:are|were|is|of|and|or|in)\b|[.,;:])|it)\b"
    r"|^That\b|\b(?:of|than|for|by|from|with|on|to|as|at|in|and|do|does|about|after|before) that(?=[.,;:)]|$)",
    re.IGNORECASE,
)
# A class with such a name says what happened to something, not what it is. Those ending in "-ed" need no list.
PARTICIPLES = {
    *("Begun", "Bound", "Broken", "Brought", "Built", "Chosen", "Done", "Drawn", "Found", "Given", "Gone", "Heard"),
    *("Held", "Kept", "Known", "Left", "Lent", "Lost", "Made", "Met", "Seen", "Sent", "Shown", "Spent", "Taken"),
    *("Thrown", "Told", "Won", "Written"),
}
NOUNS = {"Feed", "Need", "Seed", "Speed", "Undefined"}  # no participles; malt's name for a name without a value
NAME = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)")
FILE = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|md|js|css|c|ipynb|toml))`")
WORD, QUOTED = re.compile(r"[A-Za-z_]\w*"), re.compile(r"[\"']([A-Za-z_][\w.]*)[\"']")
# Names of other libraries that no code here mentions.
FOREIGN = {"GRUCell", "LSTMCell", "RNNCell", "StepLR", "vmap", "zero_grad"}


def sources(*tops: str) -> list[Path]:
    """Source files below the folders, by default those of the package."""
    return [path for top in tops or TOPS for path in sorted((ROOT / top).rglob("*.py")) if not _is_linked(path)]


def _is_linked(path: Path) -> bool:
    return any(folder.is_symlink() for folder in path.parents)


@dataclass
class Facts:
    """One file: its docstrings by qualified name, class definitions, names in the code, and string constants."""

    docstrings: list[tuple[str, str]] = field(default_factory=list)
    classes: list[ast.ClassDef] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)


@cache
def facts(path: Path) -> Facts:
    """The facts of a file, which is parsed once; expressions are left to a regular expression, which is quicker."""
    text = path.read_text()
    found, rest = Facts(), text.splitlines()
    stack: list[tuple[ast.AST, str]] = [(parsed(path), "")]
    while stack:
        node, scope = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            scope = f"{scope}.{node.name}".lstrip(".") if not isinstance(node, ast.Module) else scope
            if (written := ast.get_docstring(node)) is not None:
                found.docstrings.append((scope, written))
                first = node.body[0]
                rest[first.lineno - 1 : first.end_lineno] = [""] * (first.end_lineno - first.lineno + 1)
            if isinstance(node, ast.ClassDef):
                found.classes.append(node)
        blocks = (getattr(node, block, ()) for block in ("body", "orelse", "handlers", "finalbody", "cases"))
        stack += [(child, scope) for block in blocks if isinstance(block, list) for child in block]
    code = "\n".join(rest)
    found.names |= {*WORD.findall(code), *path.relative_to(ROOT).with_suffix("").parts}
    found.texts |= {*QUOTED.findall(code)}
    return found


def leans(docstring: str) -> bool:
    """Whether the first line of a docstring leans on a pronoun."""
    return PRONOUN.search(re.sub(r"`[^`]*`", "", docstring.strip().partition("\n")[0])) is not None


def shares(*tops: str) -> dict[str, tuple[int, int]]:
    """Docstrings that lean on a pronoun, and all of them, for each folder."""
    counted: dict[str, list[bool]] = defaultdict(list)
    for path in sources(*tops):
        counted[str(path.parent.relative_to(ROOT))] += [leans(text) for _, text in facts(path).docstrings]
    return {folder: (sum(found), len(found)) for folder, found in sorted(counted.items()) if found}


def classes() -> dict[str, list[tuple[str, ast.ClassDef]]]:
    """Definitions of each class name of the package, with their files."""
    found: dict[str, list[tuple[str, ast.ClassDef]]] = defaultdict(list)
    for path in sources():
        for node in facts(path).classes:
            found[node.name].append((str(path.relative_to(ROOT)), node))
    return dict(found)


def ambiguous() -> dict[str, list[str]]:
    """Class names that stand for several classes, with their files."""
    return {name: [file for file, _ in of] for name, of in sorted(classes().items()) if len(of) > 1}


def participles() -> list[str]:
    """Classes named by a single participle; exceptions may be: an error says what happened."""
    known = classes()

    def is_exception(name: str) -> bool:
        bases = [base for _, node in known.get(name, ()) for base in map(ast.unparse, node.bases)]
        return any(base.endswith(("Error", "Exception")) or is_exception(base) for base in bases)

    stems = {name: name.lstrip("_") for name in known}
    named = {name for name, stem in stems.items() if stem in PARTICIPLES or re.fullmatch(r"[A-Z][a-z]+ed", stem)}
    return sorted(name for name in named if stems[name] not in NOUNS and not is_exception(name))


def unknown_names() -> Iterator[str]:
    """Names in single backticks of docstrings that are no name of the code, and files that do not exist."""
    known = {*keyword.kwlist, *dir(builtins), *FOREIGN}.union(*(facts(path).names for path in sources()))
    texts = set[str]().union(*(facts(path).texts for path in sources()))
    for path in sources():
        for name, text in facts(path).docstrings:
            at = f"{path.relative_to(ROOT)} {name}".strip()
            for file in FILE.findall(text):
                if not any((folder / file).exists() for folder in (ROOT, path.parent, *(ROOT / top for top in TOPS))):
                    yield f"{at}: no file {file}"
            for found in NAME.findall(FILE.sub("", text)):
                if found not in texts and not known.issuperset(found.split(".")):
                    yield f"{at}: no name {found}"


def modules_named() -> Iterator[tuple[str, str]]:
    """Dotted names below ``tfnb`` in docstrings, with their place; ops of a graph, such as ``tfnb.read``, left out."""
    texts = set[str]().union(*(facts(path).texts for path in sources()))
    for path in sources():
        for name, text in facts(path).docstrings:
            for found in NAME.findall(text):
                if found.startswith("tfnb.") and found not in texts and not found.endswith(".py"):
                    yield f"{path.relative_to(ROOT)} {name}".strip(), found


def anys() -> int:
    """Annotations ``: Any`` of parameters, fields and variables."""
    return sum(len(re.findall(r": Any\b", path.read_text())) for path in sources())


def lines() -> Iterator[str]:
    """Lines of the report."""
    found = shares()
    yield "docstrings whose first line leans on a pronoun"
    total = tuple(map(sum, zip(*found.values(), strict=True)))
    for folder, (leaning, count) in (*found.items(), ("all", total)):
        yield f"  {folder:34}{leaning:6} of {count:5}  {100 * leaning / count:4.0f} %"
    for title, names in (
        ("class names used more than once", list(ambiguous())),
        ("participles as class names", participles()),
        ("names in docstrings that do not exist", list(unknown_names())),
    ):
        yield f"{title}: {len(names)} {' '.join(names)}".rstrip()
    yield f"`: Any`: {anys()}"
    starts = Counter(text.split(maxsplit=1)[0] for path in sources() for _, text in facts(path).docstrings)
    yield "first words of docstrings: " + ", ".join(f"{word} {count}" for word, count in starts.most_common(8))
