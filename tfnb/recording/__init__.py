"""From ordinary torch calls to nodes: recordings, recorded tensors, placeholders, Variables of parameters.

The path of a call: `cells` opens a recording, whose recorder in `dispatch` sees each op. The recorder looks up
`overrides`, asks `shapes` for the output shapes, makes recorded tensors, and appends the node to the tape; both the
tensors and the tape are in `values`. `writes` records in-place calls, `subgraphs` loops and branches. `marks` has the
scopes of nodes, notes for the user, and guards of Python state. `api` has the functions that users call, `colocation`
the one that joins nodes into groups of one place, `print_and_assert` the nodes for printing and asserting in every run,
`torch_patches` the table of patches of torch.

Words. A block: the body of a cell or of `record`, recorded as a whole or not at all. A statement: a node that writes,
prints or asserts, and that no fetch needs; a step: the statement, usually an optimizer's update, that takes the others
of its block along. A handle: the recorded tensor, Operation or Variable that Python holds. A letter: the name of a size
that varies, such as ``"B"``. An owner: the module or object outside whose Python state the recording read. A note: what
a recording tells of a line, shown under the cell. A home: the server, or this process, that holds the value of a
Variable.
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
from tfnb.recording.colocation import colocate_with
from tfnb.recording.dispatch.recorder import Recorder
from tfnb.recording.marks.python_guards import stale_owners, user_code_ran
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
    "Operation", "Recorder", "Tensor", "assert_", "colocate_with", "constant", "control_dependencies", "device",
    "effects", "forget", "graph", "graph_name", "graphs", "group", "name_scope", "placeholder", "print", "recompute",
    "record", "record_cell", "reopen", "stale_owners", "unordered", "user_code_ran", "variable",
]  # fmt: skip
