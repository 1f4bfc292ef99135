"""Files that were changed at random load and are drawn, or are typed errors, within seconds.

TFNB_FUZZ says how many are tried; `make fuzz` tries thousands.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tfnb
from tfnb.errors import TfnbError
from tfnb.graph import Graph
from tfnb.graph.tensor_files import read_tensors, write_tensors

FILES = int(os.environ.get("TFNB_FUZZ", "60"))
SECONDS = 2.0  # of the processor
ODD: list[Any] = [
    None, True, -1, 0, 2, 2**31, 2**63, 10**30, 10**400, 1e308, "", "x", "B", "B**64", "-B", "1/0", "B//0", "\ud800",
    "\u202e", "x" * 5000, [], [[]], [0, 0], [None], {}, {"$ref": 0}, {"$dim": "B**B"}, {"$tuple": []}, {"$tensor": "0"},
    {"$float": "nan"}, {"$variable": "w"}, {"a": {}},
]  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tfnb.Session]:
    """A graph with constants, a loop, a branch, a training step and a queue, and a checkpoint of it."""
    folder = tmp_path_factory.mktemp("mutated")
    weight = tfnb.Variable(torch.ones(3), name="w")
    with tfnb.record("mutated") as graph:
        x = tfnb.placeholder(torch.ones(2, 3), name="x")
        queue = tfnb.FIFOQueue(4, [torch.float32], shapes=[[2]], name="q")
        put = queue.enqueue(torch.ones(2))
        y = tfnb.while_loop(lambda v: v.sum() < 9, lambda v: v + torch.arange(3.0), x * weight)
        loss = tfnb.cond(y.sum() > 0, lambda: y.mean(), lambda: y.sum())
        step = tfnb.train.Adam(0.1).minimize(loss)
    assert step is not None
    session = tfnb.Session(graph)
    session.run(put)
    session.save(folder / "v")
    graph.save(folder / "g.json")
    return folder, session


def places(value: Any) -> list[tuple[Any, Any]]:
    """Each place of a JSON value, as what it is in and the key there."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [pair for key in keys for pair in ((value, key), *places(value[key]))]


def changed(value: Any, chance: random.Random) -> Any:
    """A JSON value with some places replaced, removed or repeated."""
    made = json.loads(json.dumps(value))
    for _ in range(chance.choice((1, 1, 2, 4))):
        found = places(made)
        if not found:
            break
        inside, key = chance.choice(found)
        match chance.randrange(4):
            case 0 if isinstance(inside, list):
                inside.insert(key, inside[key])
            case 1:
                del inside[key]
            case 2:
                inside[key] = chance.choice(found)[0]
                try:
                    json.dumps(made)
                except (ValueError, RecursionError):  # in itself
                    inside[key] = None
            case _:
                inside[key] = chance.choice(ODD)
    return made


def torn(data: bytes, chance: random.Random) -> bytes:
    """Bytes of which some are changed, cut out or repeated."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 2, 8))):
        at = chance.randrange(len(found))
        length = chance.choice((1, 8, 100))
        match chance.randrange(4):
            case 0:
                found[at] ^= 1 << chance.randrange(8)
            case 1:
                del found[at : at + length]
            case 2:
                found[at:at] = found[at : at + length]
            case _:
                found[at : at + length] = chance.randbytes(length)
        found = found or bytearray(b"x")
    return bytes(found)


def load(path: Path) -> None:
    """Load a graph and show it in all ways."""
    graph = Graph.load(path)
    graph.text(), graph._repr_mimebundle_(), repr(graph), graph.to_networkx()


def check(what: Callable[[], Any], told: str) -> None:
    """A call ends well, or in a typed error, in time."""
    begin = time.process_time()
    try:
        what()
    except TfnbError:
        pass
    except Exception as error:
        raise AssertionError(f"{told}: {type(error).__name__}: {error}") from error
    took = time.process_time() - begin
    assert took < SECONDS, f"{told}: {took} s"


@pytest.mark.parametrize("kind", ["document", "bytes"])
def test_a_changed_graph_file(saved: tuple[Path, tfnb.Session], kind: str) -> None:
    path = saved[0] / "g.json"
    data = path.read_bytes()
    document = json.loads(data)
    for seed in range(FILES):
        chance = random.Random(seed)
        path.write_bytes(json.dumps(changed(document, chance)).encode() if kind == "document" else torn(data, chance))
        check(lambda: load(path), f"{kind} of seed {seed}")
    path.write_bytes(data)
    load(path)


@pytest.mark.parametrize("kind", ["facts", "bytes"])
def test_a_changed_variable_file_assigns_nothing_or_all(saved: tuple[Path, tfnb.Session], kind: str) -> None:
    folder, session = saved
    path = folder / "v"
    data = path.read_bytes()
    tensors, about, _ = read_tensors(path)
    about = {key: about[key] for key in ("format", "version", "meta")}
    for seed in range(FILES):
        chance = random.Random(seed)
        if kind == "bytes":
            path.write_bytes(torn(data, chance))
        else:
            held = {key: t for key, t in tensors.items() if chance.random() > 0.02}
            write_tensors(path, held, changed(about, chance) if chance.random() < 0.9 else about)
        check(lambda: session.restore(path), f"{kind} of seed {seed}")
        check(lambda: session.save(folder / "again"), f"the save after {kind} of seed {seed}")
        path.write_bytes(data)
        session.restore(path)
