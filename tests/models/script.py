"""The two forms of a training script: in plain PyTorch, and as a notebook with the fewest changed lines.

Each script has a part that both forms share, the rest in plain PyTorch, and the rest as a notebook whose cells begin
at ``# %%``. Both leave what is compared in ``model`` and ``log``. The data are drawn.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

IMPORTS = """
import copy, io, math, random
from argparse import Namespace
import numpy as np
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(1); random.seed(1); np.random.seed(1)
log = []
"""


@dataclass(frozen=True)
class Script:
    """One script: ``shared`` lines, and the rest of the ``plain`` script and of the ``notebook``."""

    shared: str
    plain: str
    notebook: str

    @property
    def changed(self) -> int:
        """Lines of the notebook that the plain script does not have; lines that only moved do not count."""
        return sum((_lines(self.notebook) - _lines(self.plain)).values())

    @property
    def cells(self) -> list[str]:
        """The cells of the notebook."""
        return [cell.strip("\n") for cell in f"{IMPORTS}{self.shared}\n{self.notebook}".split("# %%\n")]


def _lines(text: str) -> Counter[str]:
    """Lines without their indentation, as often as they occur."""
    return Counter(line.strip() for line in text.splitlines() if line.strip() and line != "# %%")
