"""Names and docstrings, counted: docstrings that lean on pronouns, class names used twice, participles, `Any`."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TOPS = ("tfnb", "kernels", "magics", "widgets")

# Words that stand for a noun the reader must find elsewhere. "that" counts only where no noun or clause follows.
PRONOUN = re.compile(
    r"\b(?:what|whatever|which|whichever|those|these(?= (?:are|were|is|of|and|or|in)\b|[.,;:])|it)\b"
    r"|^That\b|\b(?:of|than|for|by|from|with|on|to|as|at|in|and|do|does|about|after|before) that(?=[.,;:)]|$)",
    re.IGNORECASE,
)
# Participles of verbs that have no "-ed": a class with such a name says what happened to something, not what it is.
IRREGULAR = {
    *("Given", "Told", "Held", "Brought", "Heard", "Begun", "Made", "Done", "Kept", "Left", "Sent", "Taken", "Seen"),
    *(
        "Drawn",
        "Found",
        "Put",
        "Written",
        "Read",
        "Known",
        "Cut",
        "Built",
        "Bound",
        "Spent",
        "Lent",
        "Met",
        "Won",
        "Lost",
    ),
    *("Thrown", "Grown", "Shown", "Chosen", "Broken", "Spoken", "Run", "Gone", "Come", "Become", "Meant", "Sought"),
}
NOUNS = {"Cut", "Run", "Put", "Read", "Feed", "Need", "Speed", "Seed", "Embed"}  # nouns, too


def sources(*tops: str) -> list[Path]:
    """Source files below the folders, by default those of the package."""
    return [path for top in tops or TOPS for path in sorted((ROOT / top).rglob("*.py")) if not path.is_symlink()]


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Qualified name and docstring of each function and class of a file, and of the file itself."""

    def walk(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{name}.{node.name}" if hasattr(node, "name") else name
            if text := ast.get_docstring(node):
                yield name.lstrip("."), text
        for child in ast.iter_child_nodes(node):
            yield from walk(child, name)

    yield from walk(ast.parse(path.read_text()), "")


def leans(docstring: str) -> bool:
    """Whether the first line of a docstring leans on a pronoun."""
    return PRONOUN.search(re.sub(r"`[^`]*`", "", docstring.strip().partition("\n")[0])) is not None


def shares(*tops: str) -> dict[str, tuple[int, int]]:
    """Docstrings that lean on a pronoun, and all of them, for each folder."""
    counted: dict[str, list[bool]] = defaultdict(list)
    for path in sources(*tops):
        counted[str(path.parent.relative_to(ROOT))] += [leans(text) for _, text in docstrings(path)]
    return {folder: (sum(found), len(found)) for folder, found in sorted(counted.items()) if found}


def classes() -> dict[str, list[str]]:
    """Files that define each class name of the package."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(ROOT)))
    return dict(found)


def ambiguous() -> dict[str, list[str]]:
    """Class names that stand for several classes, with their files."""
    return {name: files for name, files in sorted(classes().items()) if len(files) > 1}


def participles() -> list[str]:
    """Class names that are a single participle."""
    stems = {name: name.lstrip("_") for name in classes()}
    return sorted(
        name
        for name, stem in stems.items()
        if stem not in NOUNS and (stem in IRREGULAR or re.fullmatch(r"[A-Z][a-z]+ed", stem))
    )


def anys() -> int:
    """Annotations ``: Any`` of parameters, fields and variables."""
    return sum(len(re.findall(r": Any\b", path.read_text())) for path in sources())


def lines() -> Iterator[str]:
    """Lines of the report."""
    found = shares()
    yield "docstrings whose first line leans on a pronoun"
    for folder, (leaning, total) in found.items():
        yield f"  {folder:34}{leaning:6} of {total:5}  {100 * leaning / total:4.0f} %"
    leaning, total = (sum(column) for column in zip(*found.values(), strict=True))
    yield f"  {'all':34}{leaning:6} of {total:5}  {100 * leaning / total:4.0f} %"
    twice = ambiguous()
    yield f"class names used more than once: {len(twice)} {' '.join(twice)}".rstrip()
    yield f"participles as class names: {len(participles())} {' '.join(participles())}".rstrip()
    yield f"`: Any`: {anys()}"
    starts = Counter(text.split(maxsplit=1)[0] for path in sources() for _, text in docstrings(path))
    yield "first words of docstrings: " + ", ".join(f"{word} {count}" for word, count in starts.most_common(8))
