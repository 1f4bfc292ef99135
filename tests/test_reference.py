"""`make docs` has every public name and every magic, each with its text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tfnb
from tests.reference import MAGICS, MODULES, build, magic_parsers


@pytest.mark.slow
def test_the_reference_has_every_public_name_and_every_option_of_a_magic(tmp_path: Path) -> None:
    build(tmp_path)
    files = {name: tmp_path / f"{name.replace('.', '/')}.html" for name in (*MODULES, MAGICS)}
    texts = {name: path.read_text() for name, path in files.items()}
    anchors = {name: set(re.findall(r'id="([\w.%-]+)"', text)) for name, text in texts.items()}
    assert set(tfnb.__all__) - {name.removeprefix("tfnb.") for name in MODULES} <= anchors["tfnb"]
    assert {"fit", "Session.run", "Variable.assign"} <= anchors["tfnb"]
    assert set(tfnb.train.__all__) <= anchors["tfnb.train"]
    for name, parser in magic_parsers().items():
        assert f"%{name}</h2>" in texts[MAGICS]
        options = [option for action in parser._actions for option in action.option_strings]
        assert all(option in texts[MAGICS] for option in options)
    for name, text in texts.items():
        links = re.findall(r'href="([^"#:]+\.html)', text)
        assert all((files[name].parent / link).exists() for link in links), name
