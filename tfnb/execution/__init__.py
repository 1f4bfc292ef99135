"""Running: a graph lowered to one generated function, computed and then committed."""

from tfnb.execution.commit import Pending
from tfnb.execution.kernels import profiling
from tfnb.execution.lower import Program, lower
from tfnb.execution.parts import Clocked, Run
from tfnb.execution.planned import Budget
from tfnb.execution.trace import Trace
from tfnb.execution.tracer import Tracer

__all__ = ["Budget", "Clocked", "Pending", "Program", "Run", "Trace", "Tracer", "lower", "profiling"]
