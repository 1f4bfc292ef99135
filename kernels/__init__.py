"""Our own ops: torch.library custom ops with fake implementations. Imports torch only, knows no graph.

`define` registers an op. One file a family: `arrays`, `attention`, `borrowed`, `control`, `formulas`, `nets`, `optim`,
`random`, `recurrent`, `rows`, `spans`, `sparse_rows`, `strided`, `tables`, `row_writes`. What carries out a plan of
memory: `memory_budget` counts the bytes of one run, `offload` keeps a loop's rows within them, `spill_blocks` move to a
`spill_file` and back.
"""

from tfnb.kernels import arrays, attention, borrowed, control, recurrent, spans, sparse_rows, strided, tables
from tfnb.kernels.optim import FUSED

__all__ = [
    "FUSED", "arrays", "attention", "borrowed", "control", "recurrent", "spans", "sparse_rows", "strided", "tables",
]  # fmt: skip
