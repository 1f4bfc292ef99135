"""The pages beside README: what they quote of magics exists, and their drawings are those that cells make."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tfnb
from tests.pictures import NOTEBOOKS, ROOT
from tests.reference import magic_parsers
from tfnb.magics.options import words

PAGES = ["README.md", *sorted(f"notebooks/{path.name}" for path in NOTEBOOKS.glob("*.md"))]
PARSERS = magic_parsers()
EVERYWHERE = {"--out", "--graph", "--quiet", "--help"}


def commands(page: str) -> list[tuple[str, str]]:
    """The magics that a page shows in back quotes or in blocks: name, and the rest of the line."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"(?:`|^)%%?(tf\w+)([^`\n]*?)(?:`|$)", text, re.MULTILINE)
    return [(name, rest.strip()) for name, rest in found]


@pytest.mark.parametrize("page", PAGES)
def test_the_magics_of_a_page_take_the_options_that_it_gives_them(page: str) -> None:
    for name, rest in commands(page):
        assert name in PARSERS, f"{page}: %{name}"
        if rest != "?":
            rest = rest.partition(" if ")[0] if name == "tfbreak" else rest  # the condition is Python's
            unknown = PARSERS[name].parse_known_args(words(rest))[1]
            assert not unknown, f"{page}: %{name} {rest}"


@pytest.mark.parametrize("page", PAGES)
def test_the_names_of_tfnb_on_a_page_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in set(re.findall(r"(?<![\w.])tfnb((?:\.[A-Za-z_]\w*)+)", text)):
        found = tfnb
        for part in name.split(".")[1:]:
            found = getattr(found, part)


def test_the_page_of_magics_has_every_magic_and_every_option() -> None:
    text = (NOTEBOOKS / "magics.md").read_text(encoding="utf-8")
    shown = {name for name, _ in commands("notebooks/magics.md")}
    assert shown == set(PARSERS)
    quoted = set(re.findall(r"(?<![\w-])--?[\w-]+", " ".join(re.findall(r"`([^`]+)`", text))))
    for name, parser in PARSERS.items():
        for action in parser._actions:
            names = set(action.option_strings)
            assert not names or names & (quoted | EVERYWHERE), f"%{name} {names}"


@pytest.mark.slow
def test_the_drawings_of_the_pages_are_those_of_the_cells_that_they_show(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.pictures", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240, capture_output=True)
    made = {path.name: path.read_text() for path in (tmp_path / "pictures").iterdir()}
    kept = {path.name: path.read_text() for path in (NOTEBOOKS / "pictures").iterdir()}
    assert made.keys() == kept.keys()
    assert [name for name in made if made[name] != kept[name]] == []
