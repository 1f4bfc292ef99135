"""Mistakes of control flow in a script: a typed error that names the line. In cells: the test of the magics."""

from __future__ import annotations

import linecache
import re
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest

import tfnb
from tests.control_flow.bad_input import FED, Bad, programs

IN_BLOCK = "import tfnb, torch\nwith tfnb.record():\n    x = tfnb.placeholder(sample, name='x')\n{}"
IN_FUNCTION = (
    "import tfnb, torch\n@tfnb.autograph\ndef f(x):\n{}    return out\n"
    "with tfnb.record():\n    x = tfnb.placeholder(sample, name='x')\n    out = f(x)\n"
)


@pytest.mark.parametrize("bad", programs(), ids=[bad.name for bad in programs()])
def test_a_mistake_in_a_script_names_the_line(bad: Bad, tmp_path: Path) -> None:
    is_staged = re.search(r"^(if|while) | if ", bad.source, re.MULTILINE)
    text = (IN_FUNCTION if is_staged else IN_BLOCK).format(textwrap.indent(bad.source, "    "))
    script = tmp_path / "script.py"
    script.write_text(text)
    names: dict[str, Any] = {"sample": bad.sample}
    at = "record"
    with warnings.catch_warnings(), pytest.raises(bad.error) as raised:
        warnings.filterwarnings("ignore", ".*Python took the True branch")
        exec(compile(text, str(script), "exec"), names)
        at = "run"
        tfnb.run(names["out"], {names["x"]: FED}, timeout=0.3)
    linecache.clearcache()
    assert at == bad.at
    assert bad.words in str(raised.value)
    lines = {line + 3 for line in bad.lines} | ({text.count("\n")} if is_staged else set())
    assert any(f"line {line}" in str(raised.value) for line in lines), (lines, str(raised.value))
