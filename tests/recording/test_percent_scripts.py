"""Scripts with cells marked by ``# %%``: drawings and errors name the line of the file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """# ---
# jupyter: {jupytext: {text_representation: {format_name: percent}}}
# ---
# %% [markdown]
# # Training

# %%
# %load_ext tfnb
import torch, tfnb
model = torch.nn.Linear(3, 1)

# %% the step
with tfnb.record("step") as graph:
    x = tfnb.placeholder(torch.ones(4, 3))
    loss = model(x).mean()
    train = tfnb.train.SGD(0.1).minimize(loss)
print(tfnb.view.text_tree(graph))

# %%
@tfnb.autograph
def halved(v):
    while v.sum() > 1:
        v = v / 2
    return v

with tfnb.record(graph):
    end = halved(x.exp())
print(end.node.source)

# %% an error
with tfnb.record(graph):
    fine = x + 1
    bad = x @ torch.ones(4, 2)
"""


def test_lines_and_names_are_those_of_the_file(tmp_path: Path) -> None:
    script = tmp_path / "train_step.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    lines = {line: number for number, line in enumerate(SCRIPT.splitlines(), 1)}
    at = {name: next(number for line, number in lines.items() if line.strip().startswith(name)) for name in
          ("loss =", "train =", "end =", "bad =")}  # fmt: skip
    for name in ("loss", "train"):
        (drawn,) = [line for line in done.stdout.splitlines() if line.startswith(f"  {name} =")]
        assert drawn.endswith(f"# train_step.py:{at[f'{name} =']}")
    assert f"train_step.py line {at['end =']}:  end = halved(x.exp())\n" in done.stdout
    assert f"at train_step.py line {at['bad =']}:  bad = x @ torch.ones(4, 2)" in done.stderr
