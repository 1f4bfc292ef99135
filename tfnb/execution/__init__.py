"""Running: a graph lowered to one generated function, computed and then committed."""

from tfnb.execution.commit import Pending, no_interrupt
from tfnb.execution.lower import Program, lower

__all__ = ["Pending", "Program", "lower", "no_interrupt"]
