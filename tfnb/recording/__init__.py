"""From ordinary torch calls to nodes: recordings, recorded tensors, placeholders, Variables of parameters.

The way of a call: `block` opens a recording, whose `recorder` sees each op; `call` makes one node of it, with its shape
(`shapes`, `shape_rules`, `symbols`, `fakes`, `examples`) and its sample (`samples`, `interpret`), on the `tape`, which
`commit` makes new contents of. `tensor` is what the user holds, `api` what the user calls, `workspace` what a graph
keeps. Writes: `writes`, `views`, `aliases`, `strided`, `journal`, `past`. Values of outside: `outside`, `variables`,
`modules`. What torch code does beside ops: `answers`, `checks`, `layout`, `picked`, `packed`, `batched`, `cells`,
`replaced`, `sizing`, `custom_ops`, `effects`, `higher_order`, `constructing`, `surroundings`, `shared`, `streams`,
`interrupted`.
Autograd: `habits`, `functions`, `own_gradient`, `recompute`. Subgraphs: `regions`, `loop`, `calls`. Facts and words:
`ops`, `scopes`, `report`.
"""

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
