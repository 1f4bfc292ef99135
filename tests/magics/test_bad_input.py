"""Mistakes of control flow in a cell: a typed error that names the cell's line, and the graph as it was."""

from __future__ import annotations

from typing import Any

import pytest

import tfnb
from tests.control_flow.bad_input import FED, Bad, programs


@pytest.mark.filterwarnings("ignore:.*Python took the True branch")
@pytest.mark.parametrize(  # a few quickly: all are, of scripts
    "bad",
    [pytest.param(bad, id=bad.name, marks=[pytest.mark.slow] * (n % 5 > 0)) for n, bad in enumerate(programs())],
)
def test_a_mistake_in_a_cell_names_its_line(notebook: Any, bad: Bad) -> None:
    notebook.names["sample"] = bad.sample
    ran = notebook.run(f"%%tfgraph g --no-show\nx = tfnb.placeholder(sample, name='x')\n{bad.source}")
    error: Any = ran.error
    if bad.at == "run":
        assert error is None
        with pytest.raises(bad.error) as raised:
            tfnb.run(notebook.names["out"], {"x": FED}, timeout=0.3)
        error = raised.value
    else:
        assert "g" not in tfnb.graphs()
    assert isinstance(error, bad.error)
    assert bad.words in str(error)
    assert any(f"line {line + 2}" in str(error) for line in bad.lines), str(error)
