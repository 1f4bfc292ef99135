"""Graphs as JSON, with constants in a safetensors file beside the JSON. No pickle, no code: loading is safe.

Nodes are named by their position. Leaves that JSON lacks are objects with one ``$`` key: ``{"$dim": "4*B"}``,
``{"$ref": 0}``, ``{"$tuple": [..]}``. Reading is strict: unknown fields, duplicate keys, NaN literals and sizes over
the caps are errors that name the path inside the file. ``dumps``/``loads`` are the same without files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tfnb.errors import CheckpointCorrupt, GraphCycleError, GraphFormatError, UnknownOp, UntrustedOp
from tfnb.graph.contents import Contents
from tfnb.graph.files import opened, replace_file, sha256
from tfnb.graph.forms.decode import FILE_CAP, FORMAT, VERSION, build, field, parse
from tfnb.graph.forms.encode import GraphWriter, variable_json
from tfnb.graph.tensor_files import read_tensors, write_tensors
from tfnb.graph.variable import Variable

# -- files --------------------------------------------------------------------------------------------------


def write_graph(name: str, seed: int, contents: Contents, path: Path) -> None:
    """Write the JSON to ``path`` and constants, if any, to ``path + .safetensors``; each file whole or unchanged."""
    writer = GraphWriter(contents)
    fields = _fields(name, seed, contents, writer)
    if writer.tensors:
        about = {"format": "tfnb-constants", "version": VERSION}
        fields["constants"] = write_tensors(_constants_path(path), writer.tensors, about)
    data = _text(fields).encode()
    replace_file(path, lambda draft: draft.write_bytes(data))


def read_graph(path: Path, new_id: Callable[[], int], *, trusted: bool = False) -> tuple[str, int, Contents]:
    """Name, seed and contents of a graph file; nodes get ids from ``new_id``.

    Raises GraphFormatError (with the path inside the file), GraphCycleError, UnknownOp, UntrustedOp.
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(min(size, FILE_CAP) + 1)
    if max(size, len(data)) > FILE_CAP:
        raise GraphFormatError(f"{path} has {size} bytes; a graph file has at most {FILE_CAP}")
    try:
        text = data.decode()
        document = parse(text)
        tensors = _read_constants(path, field(document, "constants", (str, type(None)), ""))
        return build(document, tensors, new_id, {}, trusted)
    except UnicodeDecodeError as error:
        raise GraphFormatError(f"{path} is not a graph file: {error}") from error
    except (GraphFormatError, GraphCycleError, UnknownOp, UntrustedOp) as error:
        error.message = f"{path}: {error.message}"
        raise


def _constants_path(path: Path) -> Path:
    return path.with_name(path.name + ".safetensors")


def _read_constants(path: Path, digest: str | None) -> dict[str, torch.Tensor]:
    if digest is None:
        return {}
    beside = _constants_path(path)
    try:
        tensors, _, found = read_tensors(beside)
    except FileNotFoundError as error:
        raise GraphFormatError(f"constants: {beside} is missing; it belongs to the graph file") from error
    except CheckpointCorrupt as error:
        raise GraphFormatError(f"constants: {error}") from error
    if found != digest:
        raise GraphFormatError(f"constants: {beside} has digest {found}, expected {digest}; it is of another graph")
    return tensors


# -- in memory ----------------------------------------------------------------------------------------------


def dumps(name: str, seed: int, contents: Contents) -> tuple[str, dict[str, torch.Tensor]]:
    """The JSON text, one node per line, and the constants by the keys used in the text."""
    writer = GraphWriter(contents)
    return _text(_fields(name, seed, contents, writer)), writer.tensors


def _fields(name: str, seed: int, contents: Contents, writer: GraphWriter) -> dict[str, Any]:
    nodes = [writer.node(node) for node in contents.nodes]  # fills the writer's tables
    guards = [writer.guard(guard) for guard in contents.guards]
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "seed": seed,
        "constants": None,  # digest of the file beside this one
        "variables": {label: variable_json(variable) for label, variable in contents.variables.items()},
        "sources": list(writer.sources),
        "owners": list(writer.owners),
        "guards": guards,
        "aliases": {name: [writer.value(value) for value in values] for name, values in contents.bindings.items()},
        "nodes": nodes,
    }


def _text(fields: dict[str, Any]) -> str:
    """One field per line, and one node per line."""
    nodes = ",\n".join(map(_json, fields["nodes"]))
    lines = [f'"{key}":{_json(value)}' for key, value in fields.items() if key != "nodes"]
    return "{" + ",\n".join([*lines, f'"nodes":[\n{nodes}\n]']) + "}\n"


def loads(
    text: str,
    tensors: Mapping[str, torch.Tensor],
    new_id: Callable[[], int],
    variables: Mapping[str, Variable] | None = None,
    *,
    trusted: bool = False,
) -> tuple[str, int, Contents]:
    """Load a text of `dumps`. ``variables`` by label are reused; missing ones are made uninitialised."""
    return build(parse(text), tensors, new_id, variables or {}, trusted)


def graph_hash(contents: Contents) -> str:
    """A sha256 of the structure: ops, edges, attrs, specs, constants; not of ids, names, scopes and sources."""
    writer = GraphWriter(contents, only=("op", "in", "out", "attrs", "control"))
    digest = hashlib.sha256()
    for node in contents.nodes:
        digest.update(_json(writer.node(node)).encode())
    for key, tensor in writer.tensors.items():
        digest.update(f"{key} {tensor.dtype} {list(tensor.shape)} {sha256(tensor)}".encode())
    return digest.hexdigest()


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))
