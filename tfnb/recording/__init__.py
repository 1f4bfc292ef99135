"""From ordinary torch calls to nodes: recordings, recorded tensors, placeholders, Variables of parameters.

The way of a call: `cells` opens a recording, whose recorder in `dispatch` sees each op. It looks in `overrides`, asks
`shapes` for the shape, makes a tensor of `values`, and puts the node on the tape of `marks`. `writes` knows calls in
place, `subgraphs` loops and branches. `ops` has facts about operators. `api` is what a user calls;
`print_and_assert` is done in every run. `torch_patches` is what changes in torch meanwhile.
"""

from tfnb.recording.api import (
    constant,
    control_dependencies,
    device,
    effects,
    group,
    name_scope,
    placeholder,
    unordered,
)
from tfnb.recording.cells.block import forget, graph, graph_name, graphs, record, record_cell, reopen
from tfnb.recording.dispatch.recorder import Recorder
from tfnb.recording.marks.python_state import stale_owners, user_code_ran
from tfnb.recording.overrides import (  # noqa: F401  they fill the table of overrides
    as_strided,
    buffer_updates,
    dynamic_indexing,
    kept_forms,
    linear_algebra,
    packed_sequences,
    plain_tensors,
    python_answers,
    recurrent_cells,
    refused_ops,
    shape_rules,
    size_arguments,
    varying_sizes,
)  # fmt: skip
from tfnb.recording.print_and_assert import assert_, print
from tfnb.recording.shapes import vmap_rules  # noqa: F401  it registers with torch
from tfnb.recording.subgraphs.recompute import recompute
from tfnb.recording.values.tensor import Operation, Tensor
from tfnb.recording.values.variables import variable

__all__ = [
    "Operation", "Recorder", "Tensor", "assert_", "constant", "control_dependencies", "device", "effects", "forget",
    "graph", "graph_name", "graphs", "group", "name_scope", "placeholder", "print", "recompute", "record",
    "record_cell", "reopen", "stale_owners", "unordered", "user_code_ran", "variable",
]  # fmt: skip
