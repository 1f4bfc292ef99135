"""Small files of strangers that cost much where nothing bounds them, and what it costs to load and to draw them.

``python -m tests.graph.costly_files FOLDER`` writes a line of JSON for each: how it ended, the seconds of the processor
and the bytes of memory that it took at most.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import tfnb
from tests.graph.build import Builder
from tfnb.errors import TfnbError
from tfnb.graph import Graph
from tfnb.graph.forms.serial import dumps
from tfnb.graph.spec import Spec
from tfnb.graph.tensor_files import write_tensors
from tfnb.state import checkpoint

LONGEST = 10  # seconds, after which a load is given up
MEGABYTE = "x" * 2**20
WORDS = {"a lone surrogate": "\ud800", "a name of a megabyte": MEGABYTE, "text turned around": "\u202egnp.exe"}


def document() -> dict[str, Any]:
    """The JSON of a graph with every kind of fact."""
    b = Builder()
    x = b.placeholder("x", ("B", 3))
    y = b.op("aten.relu.default", b.spec(x), self=x)
    text, _ = dumps("g", 0, b.contents(bindings={"loss": (y,)}))
    return dict(json.loads(text))


def graphs() -> Iterator[tuple[str, str]]:
    """Names and texts of graph files."""
    yield "an object of 40,000 keys and one twice", "{" + ",".join(f'"{i}":0' for i in range(40_000)) + ',"39999":0}'
    yield "63 MB of lists", '{"nodes":[' + "[]," * (21 * 2**20) + "0]}"
    yield "60 MB of floats", '{"nodes":[' + "1.5," * (15 * 2**20) + "0]}"
    for name, size in {
        "nested powers": "((((((2**64)**64)**64)**64)**64)**64)",
        "nested products": "*".join(["(B**64)"] * 500),
        "powers of a letter": "((((B**64)**64)**64)**64)",
        "a power of a float": "int(float(10)**64**64)",
        "a root of a large number": "int(_sym_sqrt((10**60)**60))",
    }.items():
        found = document()
        found["nodes"][0]["out"][0]["shape"] = ["B", 3]
        found["nodes"][1]["out"][0]["shape"] = [size, size]
        yield f"sizes that are {name}", json.dumps(found)
        found["nodes"][1]["out"][0]["shape"] = ["B", 3]
        found["guards"] = [{"expr": f"{size} == 1"}]
        yield f"a guard of {name}", json.dumps(found)
    for name, number in {"400 digits": 10**400, "60 digits": 10**60, "less than nothing": -1}.items():
        for place in ("seed", "size", "stream", "attr", "line"):
            found = document()
            if place == "seed":
                found["seed"] = number
            elif place == "size":
                found["nodes"][0]["out"][0]["shape"] = [number, 3]
            elif place == "stream":
                found["nodes"][1]["stream"] = number
            elif place == "attr":
                found["nodes"][1]["attrs"]["more"] = number
            else:
                found["sources"] = [{"file": "a.py", "line": number, "text": "x"}]
                found["nodes"][1]["source"] = 0
            yield f"a {place} of {name}", json.dumps(found)
    for name, word in WORDS.items():
        found = document()
        found["name"] = word
        found["aliases"] = {word: [[1, 0]]}
        for number, node in enumerate(found["nodes"]):
            node |= {"scope": [word] * 5, "tags": [word], "source": 0}
            node.setdefault("attrs", {})["text"] = word
            node["attrs"][f"more{number}"] = word
        found["sources"] = [{"file": word, "line": 1, "text": word}]
        yield f"{name} in every place", json.dumps(found)
    found = document()
    found["nodes"][1]["scope"] = ["s"] * 3000
    yield "a scope of 3,000 parts", json.dumps(found)
    found["nodes"][1]["scope"] = []
    found["nodes"][1]["attrs"]["deep"] = json.loads("[" * 55 + "]" * 55)
    yield "a deep attr", json.dumps(found)
    found["nodes"][1]["attrs"] = {"self": {"$ref": 0}}
    found["nodes"][1]["out"] = [found["nodes"][0]["out"][0]] * 100_000
    yield "100,000 outputs of a node", json.dumps(found)
    found["nodes"][1]["out"] = [{**found["nodes"][0]["out"][0], "shape": ["B"] * 100_000}]
    yield "100,000 axes", json.dumps(found)


def queued(folder: Path, facts: dict[str, Any], **tensors: torch.Tensor) -> None:
    """A checkpoint of a queue that holds this, as a stranger writes it."""
    text = torch.frombuffer(bytearray(json.dumps(facts).encode()), dtype=torch.uint8)
    about = {
        "kind": "fifo", "components": [["float32", [0]]], "options": {}, "groups": 1,
        "found": {"closed": False, "size": len(facts["facts"]["lengths"]), "marks": {}},
    }  # fmt: skip
    held = {f"@q/{name}": tensor for name, tensor in {"0": torch.zeros(0), "facts": text, **tensors}.items()}
    checkpoint.save(folder / "v", {}, {"graph": "g", "queues": {"q": about}}, held)


def checkpoints(folder: Path) -> Iterator[str]:
    """Names of variable files, each of which is written first."""
    none = torch.zeros(0, dtype=torch.int32)
    many = 4_000_000
    queued(folder, {"facts": {"lengths": []}, "shapes": [[0, [0], many]]}, places=none)
    yield "four million elements of no size"
    queued(folder, {"facts": {"lengths": [many]}, "shapes": []}, places=none)
    yield "an element of four million tensors"
    queued(folder, {"facts": {"lengths": [0] * 300_000}, "shapes": []}, places=none)
    yield "300,000 elements of nothing"
    queued(folder, {"facts": {"lengths": [10**30]}, "shapes": [[0, [10**30, 0], 10**30]]}, places=none)
    yield "sizes of 30 digits"
    whole = {"format": checkpoint.FORMAT, "version": checkpoint.VERSION}
    good: dict[str, Any] = {
        "graph": "g", "graph_hash": "", "streams": {"seed": 0, "runs": 0}, "sources": {}, "training": {"steps": 0},
        "queues": {}, "optimizers": {}, "schedulers": {},
    }  # fmt: skip
    write_tensors(folder / "v", {}, whole)
    yield "no facts"
    for wrong in ([], "x", 1, None):
        write_tensors(folder / "v", {}, {**whole, "meta": wrong})
        yield f"{wrong!r} for facts"
        for key in good:
            write_tensors(folder / "v", {}, {**whole, "meta": {**good, key: wrong}})
            yield f"{wrong!r} for {key}"
    for key, facts in {
        "streams": {"seed": 10**60, "runs": 10**60}, "training": {"steps": -1}, "sources": {"a": {"count": 1e300}},
        "queues": {"q": {}}, "optimizers": {"SGD": [[]]}, "schedulers": {"StepLR": {"state": {"tensor": [["x"], 1]}}},
    }.items():  # fmt: skip
        write_tensors(folder / "v", {}, {**whole, "meta": {**good, key: facts}})
        yield f"wrong {key}"


def load_graph(path: Path) -> None:
    """Load a graph file and show it in all ways."""
    graph = Graph.load(path)
    repr(graph), graph.text(), graph._repr_mimebundle_(), graph.summary() if hasattr(graph, "summary") else None
    for node in graph.nodes:
        repr(node), node.outputs[0].readable()


def load_checkpoint(path: Path) -> None:
    """Restore a variable file into a session of a graph with a queue."""
    with tfnb.record("g") as g:
        queue = tfnb.FIFOQueue(4, [torch.float32], shapes=[[0]], name="q")
        queue.size()
    session = tfnb.Session(g)
    session.restore(path)
    session.save(path)


def measured(name: str, load: Callable[[Path], None], path: Path) -> dict[str, Any]:
    """How a load ended and what it cost."""
    Path("/proc/self/clear_refs").write_text("5")
    before, begin = memory("VmRSS"), time.process_time()
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(LONGEST)
    try:
        load(path)
        end = "ok"
    except TfnbError as error:
        end = f"{type(error).__name__}: {str(error)[:300]}"
    except Exception as error:
        end = f"raw {type(error).__name__}: {str(error)[:300]}"
    signal.alarm(0)
    took = {"seconds": time.process_time() - begin, "bytes": memory("VmHWM") - before}
    return {"name": name, "end": end, "size": path.stat().st_size, **took}


def _stop(number: int, frame: object) -> None:
    raise InterruptedError(f"it took longer than {LONGEST} s")


def memory(field: str) -> int:
    """Bytes that this process takes, as Linux says."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) << 10


def told(found: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()


def main(folder: Path) -> None:
    """Write what each file costs; the first is not counted, as it loads modules."""
    b = Builder()
    b.op("aten.relu.default", Spec(torch.float32, (3,)), self=b.placeholder("x", (3,)))
    Graph("g", b.contents()).save(folder / "g.json")
    load_graph(folder / "g.json")
    for name, text in graphs():
        (folder / "g.json").write_text(text)
        told(measured(name, load_graph, folder / "g.json"))
    queued(folder, {"facts": {"lengths": []}, "shapes": []}, places=torch.zeros(0, dtype=torch.int32))
    load_checkpoint(folder / "v")
    for name in checkpoints(folder):
        told(measured(name, load_checkpoint, folder / "v"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
