"""From ordinary torch calls to nodes: recordings, recorded tensors, placeholders, Variables of parameters."""

from tfnb.recording.api import constant, control_dependencies, device, group, name_scope, placeholder
from tfnb.recording.block import forget, graph, graphs, record, record_cell, reopen
from tfnb.recording.recompute import recompute
from tfnb.recording.recorder import Recorder
from tfnb.recording.tensor import Operation, Tensor
from tfnb.recording.variables import variable

__all__ = [
    "Operation", "Recorder", "Tensor", "constant", "control_dependencies", "device", "forget", "graph", "graphs",
    "group", "name_scope", "placeholder", "recompute", "record", "record_cell", "reopen", "variable",
]  # fmt: skip
