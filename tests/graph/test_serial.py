"""Graph files: round trips, and every kind of bad file ends in a typed error that names the place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given

from tests.graph.build import Builder, dense, evaluate
from tests.graph.strategies import NASTY, graphs
from tfnb.errors import (
    CheckpointWriteError,
    FailedPrecondition,
    GraphCycleError,
    GraphFormatError,
    InvalidArgument,
    TfnbError,
    UnknownOp,
    UntrustedOp,
)
from tfnb.graph import Contents, Dim, Graph, Guard, Node, Owner, Ref, SourceLine, Spec, Value, Variable, strict_json
from tfnb.graph.forms import decode
from tfnb.graph.forms.serial import dumps, graph_hash, loads
from tfnb.graph.forms.text import text
from tfnb.graph.graph import new_id
from tfnb.graph.node import leaves

ROW = Spec(torch.float32, (3,))
FIELDS = ("name", "op", "outputs", "scope", "source", "owner", "device", "tags", "stream")


def same(a: Contents, b: Contents) -> None:
    """Compare all that a file keeps."""
    assert len(a.nodes) == len(b.nodes)
    for x, y in zip(a.nodes, b.nodes, strict=True):
        assert [getattr(x, key) for key in FIELDS] == [getattr(y, key) for key in FIELDS]
        assert [(a.position[i.node], i.index) for i in x.inputs] == [(b.position[i.node], i.index) for i in y.inputs]
        assert [a.position[i] for i in x.control] == [b.position[i] for i in y.control]
        assert (x.forward is None) == (y.forward is None)
        assert x.forward is None or a.position[x.forward] == b.position[y.forward]
        for p, q in zip(leaves(x.attrs), leaves(y.attrs), strict=True):
            same_leaf(p, q)
    assert a.guards == b.guards
    assert {k: [(a.position[v.node], v.index) for v in values] for k, values in a.bindings.items()} == {
        k: [(b.position[v.node], v.index) for v in values] for k, values in b.bindings.items()
    }
    assert list(a.variables) == list(b.variables)


def same_leaf(p: Any, q: Any) -> None:
    assert type(p) is type(q)
    if isinstance(p, torch.Tensor):
        assert p.dtype == q.dtype
        assert torch.equal(p.nan_to_num(7), q.nan_to_num(7)) and torch.equal(p.isnan(), q.isnan())
    elif isinstance(p, Variable):
        assert (p.spec, p.trainable) == (q.spec, q.trainable)
    else:
        assert p == q or (p != p and q != q)


def through_memory(contents: Contents) -> Contents:
    written, tensors = dumps("g", 3, contents)
    name, seed, read = loads(written, tensors, new_id)
    assert (name, seed) == ("g", 3)
    return read


# -- round trips --------------------------------------------------------------------------------------------


@given(graphs())
def test_random_graphs_round_trip(contents: Contents) -> None:
    read = through_memory(contents)
    same(contents, read)
    assert text("g", read) == text("g", contents)
    assert graph_hash(read) == graph_hash(contents)
    assert not {node.id for node in contents.nodes} & {node.id for node in read.nodes}


@given(graphs(size=6, stateful=False))
def test_loaded_graph_computes_the_same(contents: Contents) -> None:
    read = through_memory(contents)
    feeds = {"x": torch.randn(2, 3)}
    pairs = zip(evaluate(contents, feeds).values(), evaluate(read, feeds).values(), strict=True)
    assert all(torch.equal(p.nan_to_num(7), q.nan_to_num(7)) for p, q in pairs)


def test_every_kind_of_leaf_round_trips() -> None:
    attrs = {
        "none": None, "yes": True, "no": False, "int": -(2**70), "float": 0.1, "minus": -0.0, "tiny": 5e-324,
        "inf": float("inf"), "ninf": float("-inf"), "nan": float("nan"), "complex": complex(1, float("nan")),
        "text": "$dim", "list": [1, [2, Dim("4*B")]], "tuple": (1, (2, [3]), ()), "size": torch.Size([1, 2]),
        "dict": {"$ref": 0, 3: (1,)}, "dtype": torch.bfloat16, "device": torch.device("cuda:1"),
        "layout": torch.sparse_csr, "format": torch.channels_last, "bool": torch.tensor([True]),
        "bf16": torch.ones(2, dtype=torch.bfloat16), "scalar": torch.tensor(3), "empty": torch.zeros(0, 4),
        "c128": torch.tensor([1 + 2j], dtype=torch.complex128), "view": torch.arange(12).view(3, 4)[:, 1].expand(2, 3),
        "conj": torch.tensor([1 + 2j]).conj(),
    }  # fmt: skip
    b = Builder()
    x = b.placeholder("x", ("B", 3))
    b.node("n", "aten.relu.default", (b.spec(x),), inputs=(x,), attrs={"self": Ref(0), **attrs})
    read = through_memory(b.contents())
    found = read.nodes[1].attrs
    assert list(found) == ["self", *attrs]
    assert str(found["minus"]) == "-0.0"
    assert found["tuple"] == attrs["tuple"] and type(found["size"]) is tuple
    assert found["dict"] == attrs["dict"]
    for key in set(attrs) - {"size", "dict"}:
        for p, q in zip(leaves(attrs[key]), leaves(found[key]), strict=True):
            same_leaf(p, q)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A small file with constants, guards, owners, aliases and a variable."""
    b = Builder()
    x = b.placeholder("x", ("B", 3))
    k = b.constant(torch.arange(3.0))
    w = b.read(Variable(torch.ones(3), name="w"))
    y = b.op("aten.add.Tensor", b.spec(x), self=x, other=k, alpha=float("inf"))
    z = b.node(
        "z", "aten.mul.Tensor", (b.spec(x),), inputs=(y, w), attrs={"self": Ref(0), "other": Ref(1)},
        source=SourceLine("In[1]", 1, "z"), owner=Owner("cell:1", 0), tags=frozenset({"b", "a"}),
        forward=y.node, stream=4,
        control=(k.node,), scope=("a", "b"),
    )  # fmt: skip
    guards = (
        Guard("B >= 2", SourceLine("In[1]", 1, "z"), Owner("cell:1", 0)),
        Guard("B % 2 == 0"),
        Guard("B > 4", is_local=True),
    )
    Graph("g", b.contents(guards=guards, bindings={"loss": (z,)}), seed=5).save(tmp_path / "g.json")
    return tmp_path / "g.json"


def test_file_round_trips(saved: Path) -> None:
    loaded = Graph.load(saved)
    assert (loaded.name, loaded.seed) == ("g", 5)
    again = saved.with_name("again.json")
    loaded.save(again)
    assert again.read_text() == saved.read_text()
    assert torch.equal(loaded["constant"].attrs["value"], torch.arange(3.0))
    assert loaded.value("loss") == loaded["z"].value()


def test_file_is_json_with_a_version_and_one_node_per_line(saved: Path) -> None:
    document = json.loads(saved.read_text())
    assert (document["format"], document["version"]) == ("tfnb-graph", 1)
    assert document["variables"] == {"w": {"dtype": "float32", "shape": [3], "trainable": True}}
    assert sum(line.startswith('{"name"') for line in saved.read_text().splitlines()) == 5


def test_shared_constant_is_stored_once_and_shared_again() -> None:
    b = Builder()
    value = torch.ones(3)
    b.constant(value)
    b.constant(value)
    written, tensors = dumps("g", 0, b.contents())
    assert list(tensors) == ["c0"]
    nodes = loads(written, tensors, new_id)[2].nodes
    assert nodes[0].attrs["value"] is nodes[1].attrs["value"]


def test_graph_without_constants_is_one_file(tmp_path: Path) -> None:
    Graph("g", dense()).save(tmp_path / "g.json")
    assert [path.name for path in tmp_path.iterdir()] == ["g.json"]


def test_loaded_variables_are_uninitialised_and_take_no_memory() -> None:
    b = Builder()
    b.read(Variable.declared(Spec(torch.float32, (2**40, 2**10)), name="huge", trainable=True))
    (huge,) = through_memory(b.contents()).variables.values()
    assert not huge.initialized
    with pytest.raises(FailedPrecondition, match="Attempting to use uninitialized value huge"):
        huge.value()


def test_given_variables_are_used() -> None:
    contents = dense()
    written, tensors = dumps("g", 0, contents)
    read = loads(written, tensors, new_id, contents.variables)[2]
    assert list(read.variables.values()) == list(contents.variables.values())


def test_given_variable_of_another_shape_is_refused() -> None:
    written, tensors = dumps("g", 0, dense())
    other = {"fc.bias": Variable(torch.zeros(4), name="fc.bias")}
    with pytest.raises(InvalidArgument, match=r"fc.bias is float32\[4\], but the graph needs float32\[3\]"):
        loads(written, tensors, new_id, other)


@pytest.mark.parametrize("hostile", [*NASTY, "</script>", "\ud800", '"constants":null', "$ref"])
def test_hostile_text_round_trips(hostile: str) -> None:
    b = Builder()
    x = b.placeholder("x", (3,))
    b.read(Variable(torch.ones(1), name=hostile))
    source = SourceLine(hostile, 1, hostile)
    b.node(
        "n", "aten.relu.default", (ROW,), inputs=(x,), attrs={"self": Ref(0), hostile: hostile}, source=source,
        scope=(hostile,), tags=frozenset({hostile}), device=hostile, owner=Owner(hostile, 0),
    )  # fmt: skip
    contents = b.contents(bindings={hostile: (x,)})
    written, tensors = dumps(hostile, 0, contents)
    assert written.isascii()
    name, _, read = loads(written, tensors, new_id)
    assert name == hostile
    same(contents, read)


@pytest.mark.slow
def test_file_loads_in_a_fresh_process_and_never_unpickles(saved: Path) -> None:
    program = (
        "import sys, pickle\n"
        "def no(*a, **k): raise AssertionError('unpickled')\n"
        "pickle.load = pickle.loads = pickle.Unpickler = no\n"
        "from tfnb.graph import Graph\n"
        "print(Graph.load(sys.argv[1]).text())"
    )
    done = subprocess.run([sys.executable, "-c", program, str(saved)], capture_output=True, text=True)
    assert done.stdout.rstrip("\n") == Graph.load(saved).text(), done.stderr


# -- hash ---------------------------------------------------------------------------------------------------


def test_hash_ignores_names_scopes_and_sources_but_not_structure() -> None:
    def graph(name: str, op: str, value: float) -> str:
        b = Builder()
        x = b.placeholder(name, ("B", 3))
        k = b.constant(torch.tensor([value]), name=name + "k")
        b.node(name + "y", op, (b.spec(x),), inputs=(x, k), attrs={"self": Ref(0), "other": Ref(1)}, scope=(name,))
        return graph_hash(b.contents())

    assert graph("a", "aten.add.Tensor", 1.0) == graph("b", "aten.add.Tensor", 1.0)
    assert graph("a", "aten.add.Tensor", 1.0) != graph("a", "aten.mul.Tensor", 1.0)
    assert graph("a", "aten.add.Tensor", 1.0) != graph("a", "aten.add.Tensor", 2.0)


# -- bad files ----------------------------------------------------------------------------------------------


def test_truncation_at_every_byte_never_loads_wrong(saved: Path) -> None:
    data = saved.read_bytes()
    for end in range(len(data) - 1):  # the last byte is a newline
        saved.write_bytes(data[:end])
        with pytest.raises(GraphFormatError):
            Graph.load(saved)


def test_truncation_of_the_constants_at_every_byte_is_found(saved: Path) -> None:
    beside = saved.with_name("g.json.safetensors")
    data = beside.read_bytes()
    for end in range(len(data)):
        beside.write_bytes(data[:end])
        with pytest.raises(GraphFormatError, match="constants: "):
            Graph.load(saved)


def test_missing_and_foreign_constants_are_named(saved: Path) -> None:
    beside = saved.with_name("g.json.safetensors")
    b = Builder()
    b.constant(torch.zeros(3))
    Graph("other", b.contents()).save(saved.with_name("other.json"))
    saved.with_name("other.json.safetensors").replace(beside)
    with pytest.raises(GraphFormatError, match=r"g\.json\.safetensors has digest .* of another graph"):
        Graph.load(saved)
    beside.unlink()
    with pytest.raises(GraphFormatError, match=r"g\.json\.safetensors is missing"):
        Graph.load(saved)


def test_missing_file_is_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Graph.load(tmp_path / "nothing.json")


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xfe", b"\x80PK", b"[]", b"1", b'"x"', b"null", b"{}", b'{"format":"onnx"}']
)
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "g.json"
    path.write_bytes(data)
    with pytest.raises(GraphFormatError, match=r"not (a graph file|JSON)"):
        Graph.load(path)


@pytest.mark.parametrize("version", [0, 2, "1", None, True, [1]])
def test_unknown_version_is_refused(version: Any) -> None:
    with pytest.raises(GraphFormatError, match=r"version: .* is unknown; this tfnb reads version 1"):
        edited(lambda document: document.update(version=version))


def edited(edit: Callable[[dict[str, Any]], Any], *, trusted: bool = False) -> Contents:
    """Load `dense`, and a constant, after an edit of the JSON."""
    b = Builder()
    b.nodes = list(dense().nodes)
    b.constant(torch.ones(2))
    written, tensors = dumps("g", 0, b.contents())
    document = json.loads(written)
    edit(document)
    return loads(json.dumps(document), tensors, new_id, trusted=trusted)[2]


def test_unedited_document_loads() -> None:
    assert len(edited(lambda document: None).nodes) == 6


def node(place: int, **fields: Any) -> Callable[[dict[str, Any]], None]:
    """An edit that sets fields of one node: 0 x, 1 w, 2 b, 3 addmm, 4 relu, 5 constant."""
    return lambda document: document["nodes"][place].update(fields)


def top(**fields: Any) -> Callable[[dict[str, Any]], None]:
    """An edit that sets fields of the document."""
    return lambda document: document.update(fields)


BAD = {
    "unknown field": (top(extra=1), "file: unknown field 'extra'"),
    "nodes missing": (lambda d: d.pop("nodes"), "file: the field 'nodes' is missing"),
    "nodes no list": (top(nodes={}), r"file.nodes: found \{\}, expected list"),
    "name no string": (top(name=1), "file.name: found 1, expected str"),
    "seed a bool": (top(seed=True), "file.seed: found True, expected int"),
    "seed a float": (top(seed=0.5), "file.seed: found 0.5, expected int"),
    "node no object": (lambda d: d["nodes"].insert(0, 3), r"nodes\[0\]: found 3, expected an object"),
    "node field": (node(3, colour="red"), r"nodes\[3\]: unknown field 'colour'"),
    "node name": (node(3, name=None), r"nodes\[3\].name: found None, expected str"),
    "bad name": (node(3, name="<script>"), r"nodes\[3\]: .*names match"),
    "name twice": (node(3, name="x"), r"nodes\[0\]: .*has the name of node number 0"),
    "op": (node(3, op=7), r"nodes\[3\].op: found 7"),
    "input no pair": (node(4, **{"in": [3]}), r"nodes\[4\].in\[0\]: expected a list of ints"),
    "input of three": (node(4, **{"in": [[3, 0, 0]]}), r"nodes\[4\].in\[0\]: expected 2 ints, found 3"),
    "input a bool": (node(4, **{"in": [[True, 0]]}), r"nodes\[4\].in\[0\]: expected a list of ints"),
    "input nowhere": (node(4, **{"in": [[99, 0]]}), r"nodes\[4\].in\[0\]: 99 is no position"),
    "input negative": (node(4, **{"in": [[-1, 0]]}), r"nodes\[4\].in\[0\]: -1 is no position"),
    "output nowhere": (node(4, **{"in": [[3, 1]]}), r"nodes\[4\]: .*takes output 1 of node fc/addmm"),
    "control nowhere": (node(4, control=[6]), r"nodes\[4\].control: 6 is no position"),
    "forward nowhere": (node(4, forward=6), r"nodes\[4\].forward: 6 is no position"),
    "scope": (node(4, scope=[1]), r"nodes\[4\].scope: expected a list of strings"),
    "tags": (node(4, tags="ab"), r"nodes\[4\].tags: found 'ab', expected list"),
    "source": (node(4, source=9), r"nodes\[4\].source: 9 is outside of the table of 1"),
    "owner": (node(4, owner=-1), r"nodes\[4\].owner: -1 is outside of the table of 0"),
    "stream": (node(4, stream=1.5), r"nodes\[4\].stream: found 1.5, expected int"),
    "device": (node(4, device=0), r"nodes\[4\].device: found 0, expected str"),
    "device of a value": (
        node(4, out=[{"dtype": "int8", "shape": [], "device": "toaster"}]),
        r"nodes\[4\].out\[0\].device: 'toaster' is no device",
    ),
    "dtype": (node(4, out=[{"dtype": "float99", "shape": []}]), r"nodes\[4\].out\[0\].dtype: 'float99' is no torch"),
    "dtype a module": (node(4, out=[{"dtype": "nn", "shape": []}]), r"'nn' is no torch.dtype"),
    "dtype dotted": (node(4, out=[{"dtype": "nn.init", "shape": []}]), r"'nn.init' is no torch.dtype"),
    "shape": (node(4, out=[{"dtype": "int8", "shape": [-1]}]), r"out\[0\].shape\[0\]: expected a size, found -1"),
    "size expression": (node(4, out=[{"dtype": "int8", "shape": ["f()"]}]), r"out\[0\].shape\[0\]: not allowed"),
    "size code": (
        node(4, attrs={"self": {"$ref": 0}, "n": {"$dim": "__import__('os')"}}),
        r"attrs.n.\$dim: not allowed",
    ),
    "size syntax": (node(4, attrs={"self": {"$ref": 0}, "n": {"$dim": "B +"}}), r"\$dim: not a size expression"),
    "size power": (node(4, out=[{"dtype": "int8", "shape": ["B**"]}]), "not a size expression"),
    "unbound": (node(4, out=[{"dtype": "int8", "shape": ["2*T"]}]), r"nodes\[4\]: .*no value has an axis T"),
    "attr": (node(4, attrs={"self": {"ref": 0}}), r"nodes\[4\].attrs.self: .* is no value"),
    "attr two tags": (node(4, attrs={"self": {"$ref": 0, "$dim": "B"}}), r"attrs.self: .* is no value"),
    "attr no tag": (node(4, attrs={"self": {}}), r"attrs.self: \{\} is no value"),
    "ref a bool": (node(4, attrs={"self": {"$ref": False}}), r"attrs.self: .* is no value"),
    "ref outside": (node(4, attrs={"self": {"$ref": 1}}), r"nodes\[4\]: .*refers to input 1"),
    "ref deep": (node(4, attrs={"self": [[{"$ref": "0"}]]}), r"attrs.self\[0\]\[0\]: .* is no value"),
    "float": (node(4, attrs={"a": {"$float": "1e5"}}), r"attrs.a.\$float: '1e5' is not inf"),
    "complex": (node(4, attrs={"a": {"$complex": [1]}}), r"attrs.a.\$complex: expected two numbers"),
    "layout": (node(4, attrs={"a": {"$layout": "float32"}}), r"attrs.a.\$layout: 'float32' is no torch.layout"),
    "format": (node(4, attrs={"a": {"$memory_format": "x"}}), r"attrs.a.\$memory_format: 'x' is no"),
    "device attr": (node(4, attrs={"a": {"$device": "toaster"}}), r"attrs.a.\$device: 'toaster' is no device"),
    "map": (node(4, attrs={"a": {"$map": [[1]]}}), r"attrs.a.\$map: expected a list of \[key, value\]"),
    "map of lists": (node(4, attrs={"a": {"$map": [[[1], 2]]}}), r"attrs.a.\$map: expected a list of \[key, value\]"),
    "map inside": (node(4, attrs={"a": {"$map": [[1, {"x": 1}]]}}), r"attrs.a.\$map\[0\]\[1\]: .* is no value"),
    "variable": (
        node(1, attrs={"variable": {"$variable": "q"}}),
        r"attrs.variable.\$variable: 'q' is not in the table",
    ),
    "tensor": (node(5, attrs={"value": {"$tensor": "c9"}}), r"nodes\[5\].attrs.value.\$tensor: 'c9' is not among"),
    "variables": (top(variables=[]), "file.variables: found .*expected dict"),
    "variable spec": (
        lambda d: d["variables"]["fc.bias"].update(shape=["B"]),
        "variables.fc.bias.shape: .*fixed sizes",
    ),
    "variable field": (lambda d: d["variables"]["fc.bias"].update(value=1), "variables.fc.bias: unknown field 'value'"),
    "trainable": (lambda d: d["variables"]["fc.bias"].update(trainable=1), "variables.fc.bias.trainable: found 1"),
    "sources": (top(sources=[["a", True, ""]]), r"sources\[0\]: expected \[label, line, text\]"),
    "owners": (top(owners=[["a"]]), r"owners\[0\]: expected \[key, index\]"),
    "guard": (top(guards=[{"expr": "B >"}]), r"guards\[0\].expr: not a size expression"),
    "guard field": (top(guards=[{"expr": "B > 1", "why": ""}]), r"guards\[0\]: unknown field 'why'"),
    "guard unbound": (top(guards=[{"expr": "T > 1"}]), r"file: guard T > 1 uses T"),
    "alias": (top(aliases={"loss": [9, 0]}), r"aliases.loss: 9 is no position"),
    "alias output": (top(aliases={"loss": [4, 1]}), r"file: the name 'loss'"),
    "later input": (
        lambda d: d["nodes"].insert(0, d["nodes"].pop(4)),
        "later in program order|no position|takes output",
    ),
}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_malformed_document_names_the_path(case: str) -> None:
    edit, message = BAD[case]
    with pytest.raises(GraphFormatError, match=message):
        edited(edit)


def test_error_names_the_file_too(saved: Path) -> None:
    saved.write_text(saved.read_text().replace('"stream":4', '"stream":"4"'))
    with pytest.raises(GraphFormatError, match=r"g\.json: nodes\[4\]\.stream: found '4', expected int"):
        Graph.load(saved)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ('{"format":"tfnb-graph","format":"tfnb-graph"}', "the key 'format' occurs twice"),
        ('{"format":"tfnb-graph","version":NaN}', "NaN is not JSON"),
        ('{"format":"tfnb-graph","version":-Infinity}', "-Infinity is not JSON"),
        ('{"format":"tfnb-graph","version":1e999}', "1e999 is too large for a float"),
        ('{"format":"tfnb-graph","version":' + "9" * 5000 + "}", "the number 9{65}... has more than 64 digits"),
        ('{"format":"tfnb-graph",\n"version":}', "not JSON at line 2 column 11"),
        ('{"format":"tfnb-graph"} {}', "not JSON at line 1"),
        ("[" * 65, "nested deeper than 64"),
        ("[" * 1_000_000, "nested deeper than 64"),
        ('{"a":' * 100_000, "nested deeper than 64"),
    ],
)
def test_bad_json_is_refused(written: str, message: str) -> None:
    start = time.perf_counter()
    with pytest.raises(GraphFormatError, match=message):
        loads(written, {}, new_id)
    assert time.perf_counter() - start < 10


def test_brackets_in_strings_do_not_count_as_depth() -> None:
    hostile = '\\"' + "[" * 100 + '"\\\\'
    b = Builder()
    b.read(Variable(torch.ones(1), name=hostile))
    assert list(through_memory(b.contents()).variables) == [hostile]


def test_cycle_in_a_file_is_named() -> None:
    with pytest.raises(GraphCycleError, match="fc/addmm -> y -> fc/addmm"):
        edited(node(3, **{"in": [[2, 0], [4, 0], [1, 0]]}))


@pytest.mark.slow
def test_cycle_of_ten_thousand_nodes_takes_less_than_a_second() -> None:
    count = 10_000
    nodes = [
        {
            "name": f"n{i}", "op": "aten.relu.default", "in": [[(i - 1) % count, 0]], "attrs": {"self": {"$ref": 0}},
            "out": [{"dtype": "float32", "shape": [3]}],
        }
        for i in range(count)
    ]  # fmt: skip
    written = json.dumps({"format": "tfnb-graph", "version": 1, "name": "g", "seed": 0, "nodes": nodes})
    start = time.perf_counter()
    with pytest.raises(GraphCycleError):
        loads(written, {}, new_id)
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize(
    "op", ["aten.nonsense.default", "aten.mm.nonsense", "nowhere.op.default", "tfnb.nonsense.default"]
)
def test_unknown_op_names_op_and_namespace(op: str) -> None:
    with pytest.raises(UnknownOp, match=rf"nodes\[4\]: unknown op {op} of namespace {op.split('.')[0]}"):
        edited(node(4, op=op))


@pytest.mark.parametrize(
    "op", ["", "relu", "aten.relu", "tfnb.nonsense", "aten..default", "a.b.c.d", "aten.relu.default\n"]
)
def test_op_of_another_form_is_unknown(op: str) -> None:
    with pytest.raises(UnknownOp, match=r"not of the form namespace.name.overload"):
        edited(node(4, op=op))


@pytest.mark.parametrize(
    "op", ["aten.__class__.default", "aten.save.default", "__class__.mm.default", "aten.mm.__init__"]
)
def test_python_attributes_and_script_functions_are_no_ops(op: str) -> None:
    with pytest.raises(UnknownOp):
        edited(node(4, op=op), trusted=True)


@pytest.mark.parametrize("op", ["aten.from_file.default", "quantized.add.default", "inductor.accumulate_grad_.default"])
def test_op_that_may_do_more_than_compute_needs_trust(op: str) -> None:
    with pytest.raises((UntrustedOp, UnknownOp), match=r"trusted=True|unknown op"):
        edited(node(4, op=op))


def test_trusted_file_may_name_any_registered_op() -> None:
    assert edited(node(4, op="aten.from_file.default"), trusted=True).nodes[4].op == "aten.from_file.default"


def test_custom_op_of_another_library_needs_trust() -> None:
    library = torch.library.Library("tfnb_test_library", "DEF")
    library.define("double(Tensor self) -> Tensor")
    with pytest.raises(UntrustedOp, match=r"op tfnb_test_library.double.default of namespace tfnb_test_library"):
        edited(node(4, op="tfnb_test_library.double.default"))
    assert edited(node(4, op="tfnb_test_library.double.default"), trusted=True)
    library._destroy()


@pytest.mark.parametrize(
    ("cap", "value", "message"),
    [
        ("FILE_CAP", 100, "characters; at most 100"),
        ("NODE_CAP", 5, "nodes: 6 nodes; at most 5"),
        ("ATTR_CAP", 2, r"nodes\[3\].attrs: 3 attrs; at most 2"),
        ("STRING_CAP", 5, "at most 5 are allowed"),
        ("DEPTH_CAP", 3, "nested deeper than 3"),
        ("VALUE_CAP", 9, "values; at most 9 are allowed"),
    ],
)
def test_sizes_over_the_caps_are_refused(monkeypatch: pytest.MonkeyPatch, cap: str, value: int, message: str) -> None:
    monkeypatch.setattr(decode if hasattr(decode, cap) else strict_json, cap, value)
    with pytest.raises(GraphFormatError, match=message):
        edited(lambda document: None)


def test_file_over_the_cap_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "g.json"
    with path.open("wb") as file:
        os.truncate(file.fileno(), decode.FILE_CAP + 1)
    with pytest.raises(GraphFormatError, match="a graph file has at most 67108864"):
        Graph.load(path)


def test_attr_that_files_do_not_hold_is_named() -> None:
    b = Builder()
    b.node("n", "aten.relu.default", (ROW,), attrs={"odd": [object()]})
    with pytest.raises(InvalidArgument, match=r"attr odd of node n \(aten.relu.default\) is a object"):
        dumps("g", 0, b.contents())


def test_any_single_byte_change_loads_or_is_a_typed_error(saved: Path) -> None:
    data = saved.read_bytes()
    for place in range(0, len(data), 3):
        for other in b'"0}x\xff':
            saved.write_bytes(data[:place] + bytes([other]) + data[place + 1 :])
            try:
                Graph.load(saved)
            except TfnbError:
                continue


# -- writing ------------------------------------------------------------------------------------------------


def test_failing_save_leaves_the_old_file_and_no_draft(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in saved.parent.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    b = Builder()
    b.constant(torch.zeros(3))
    with pytest.raises(CheckpointWriteError, match=r"No space left on device.*bytes free") as caught:
        Graph("g", b.contents()).save(saved)
    assert isinstance(caught.value, OSError) and caught.value.errno == 28
    assert {path.name: path.read_bytes() for path in saved.parent.iterdir()} == before


def test_save_into_a_missing_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointWriteError, match=r"cannot write .*No such file or directory"):
        Graph("g", dense()).save(tmp_path / "nowhere" / "g.json")


def test_graph_of_many_nodes_round_trips_in_a_second() -> None:
    spec = Spec(torch.float32, (Dim("B"), 3))
    nodes = [Node(id=new_id(), name="x", op="tfnb.placeholder", outputs=(spec,))]
    for i in range(3000):
        inputs = (nodes[-1].value(), Value(nodes[0].id))
        attrs = {"self": Ref(0), "other": Ref(1)}
        nodes.append(Node(id=new_id(), name=f"n{i}", op="aten.add.Tensor", inputs=inputs, outputs=(spec,), attrs=attrs))
    start = time.perf_counter()
    through_memory(Contents(tuple(nodes)))
    assert time.perf_counter() - start < 15


def test_devices_keep_their_number_and_older_files_get_one() -> None:
    b = Builder()
    b.node("n", "aten.zeros.default", (Spec(torch.float32, (2,), "cuda:1"),),
           attrs={"size": [2], "device": torch.device("cuda:1")})  # fmt: skip
    written, tensors = dumps("g", 0, b.contents())
    assert '"device": "cuda:1"' in json.dumps(json.loads(written))
    for file, wanted in ((written, "cuda:1"), (written.replace("cuda:1", "cuda"), "cuda:0")):
        node = loads(file, tensors, new_id)[2].nodes[0]
        if wanted == "cuda:1" or not torch.cuda.is_available():
            assert (node.outputs[0].device, str(node.attrs["device"])) == (wanted, wanted)
