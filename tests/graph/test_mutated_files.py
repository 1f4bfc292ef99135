"""Files that were changed at random load and are drawn, or are typed errors, within seconds and bounded memory.

TFNB_FUZZ says how many are tried; `make fuzz` tries thousands.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tfnb
from tests.graph.costly_files import memory
from tests.graph.test_costly_files import MULTIPLE, ROOM, SECONDS
from tests.mutations import changed, torn, tries, written
from tfnb.errors import TfnbError
from tfnb.graph import Graph
from tfnb.graph.tensor_files import read_tensors, write_tensors

PEAK = Path("/proc/self/clear_refs")  # where Linux forgets the most memory that this process took
FILES = tries(60)


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


def load(path: Path) -> None:
    """Load a graph and show it in all ways."""
    graph = Graph.load(path)
    graph.text(), graph._repr_mimebundle_(), repr(graph), graph.to_networkx()


def check(what: Callable[[], Any], size: int, told: str) -> None:
    """A call about a file of ``size`` bytes ends well, or in a typed error, in time and in bounded memory."""
    if PEAK.exists():
        PEAK.write_text("5")
    before, begin = memory("VmRSS") if PEAK.exists() else 0, time.process_time()
    try:
        what()
    except TfnbError:
        pass
    except Exception as error:
        raise AssertionError(f"{told}: {type(error).__name__}: {error}") from error
    took = time.process_time() - begin
    assert took < SECONDS, f"{told}: {took} s"
    more = memory("VmHWM") - before if PEAK.exists() else 0
    assert more < MULTIPLE * size + ROOM, f"{told}: {more} bytes for a file of {size}"


def test_a_seed_gives_the_same_change_whatever_was_changed_before() -> None:
    first = [written(changed({"a": [{}, []]}, random.Random(seed))) for seed in range(200)]
    assert first == [written(changed({"a": [{}, []]}, random.Random(seed))) for seed in range(200)]


@pytest.mark.parametrize("kind", ["document", "bytes"])
def test_a_changed_graph_file(saved: tuple[Path, tfnb.Session], kind: str) -> None:
    path = saved[0] / "g.json"
    data = path.read_bytes()
    document = json.loads(data)
    for seed in range(FILES):
        chance = random.Random(seed)
        path.write_bytes(written(changed(document, chance)) if kind == "document" else torn(data, chance))
        check(lambda: load(path), path.stat().st_size, f"{kind} of seed {seed}")
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
        check(lambda: session.restore(path), path.stat().st_size, f"{kind} of seed {seed}")
        check(lambda: session.save(folder / "again"), path.stat().st_size, f"the save after {kind} of seed {seed}")
        path.write_bytes(data)
        session.restore(path)
