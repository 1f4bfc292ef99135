"""Our own ops: torch.library custom ops with fake implementations. Imports torch only, knows no graph."""

from tfnb.kernels import arrays, attention, borrowed, recurrent, slices, spans, strided
from tfnb.kernels.optim import FUSED

__all__ = ["FUSED", "arrays", "attention", "borrowed", "recurrent", "slices", "spans", "strided"]
