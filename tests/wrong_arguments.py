"""Calls of the public names with right arguments, so that each argument can be replaced by a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tfnb
from tfnb.errors import TfnbError
from tfnb.graph import Contents
from tfnb.state import checkpoint


class Call(NamedTuple):
    """A function and right arguments by name; ``holder`` is what a call that fails may not change."""

    function: Callable[..., Any]
    right: Mapping[str, Any]


def entered(manager: Callable[..., Any]) -> Callable[..., None]:
    """A call that opens a block, and ends it."""

    def call(*args: Any, **given: Any) -> None:
        with manager(*args, **given):
            pass

    return call


def taken(queue: Any, element: Any, **given: Any) -> Any:
    """What a queue gives of one element, which is not left there."""
    queue.enqueue(element)
    try:
        return queue.dequeue(**given)
    except BaseException:
        queue.dequeue(timeout=1.0)
        raise


def recorded(function: Callable[..., Any]) -> Callable[..., None]:
    """A call inside of a recording that comes to nothing."""

    def call(*args: Any, **given: Any) -> None:
        with tfnb.record("scratch"):
            function(*args, **given)

    return call


class World:
    """A graph with a Variable, a queue and a session, all that the calls of `calls` are about."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weight = tfnb.Variable(torch.ones(3), name="w")
        with tfnb.record("world") as graph:
            self.x = tfnb.placeholder(torch.ones(2, 3), name="x")
            self.y = (self.x * self.weight).sum(1)
            self.loss = self.y.mean()
            self.train = tfnb.train.SGD(0.1).minimize(self.loss)
        self.graph, self.session = graph, tfnb.Session(graph)
        self.queue = tfnb.FIFOQueue(8, [torch.float32], shapes=[[2]], name="q")
        self.table = tfnb.MutableHashTable(8, 0.0)
        self.session.save(folder / "saved")
        graph.save(folder / "graph.json")

    def state(self) -> Any:
        """What a failing call leaves as it is."""
        try:
            held = self.weight.value().tolist(), int(self.queue.size())
        except TfnbError as error:  # it was reset
            held = str(error), 0
        return self.graph.seed, len(self.graph.nodes), self.graph.finalized, *held

    def calls(self) -> dict[str, Call]:
        """Calls by name; each may be made again and again."""
        g, s, w, q, x = self.graph, self.session, self.weight, self.queue, self.x
        ones, feeds = torch.ones(2, 3), {"x": torch.ones(2, 3)}
        rows = torch.ones(2)
        return {
            "Graph": Call(tfnb.Graph, {"name": "n", "contents": Contents(), "seed": 1}),
            "Graph.value": Call(g.value, {"name": "x"}),
            "Graph[]": Call(g.__getitem__, {"name": "x"}),
            "Graph in": Call(g.__contains__, {"name": "x"}),
            "Graph.select": Call(g.select, {"op": "*", "scope": "*", "tag": "a", "cell": "*"}),
            "Graph.diff": Call(g.diff, {"other": g}),
            "Graph.since": Call(g.since, {"before": g.contents}),
            "Graph.to_module": Call(g.to_module, {"fetches": self.y, "feeds": [x]}),
            "Graph.save": Call(g.save, {"path": self.folder / "again.json"}),
            "Graph.load": Call(tfnb.Graph.load, {"path": self.folder / "graph.json", "trusted": False}),
            "Graph.commit": Call(g.commit, {"contents": g.contents, "removed": ()}),
            "Graph.derive": Call(g.derive, {"contents": g.contents}),
            "graph": Call(tfnb.graph, {"name": "world"}),
            "Variable": Call(lambda value, **a: tfnb.Variable(value, **a), {
                "value": 1.0, "shape": (2,), "dtype": torch.float32, "name": "v", "trainable": True, "lazy_init": False,
                "partitions": 2}),
            "Variable.set": Call(w.set, {"value": torch.ones(3)}),
            "Variable.value": Call(w.value, {"timeout": 1.0}),
            "Variable.assign": Call(w.assign, {"value": torch.ones(3)}),
            "Variable.assign_add": Call(w.assign_add, {"value": torch.zeros(3)}),
            "Variable.scatter_add": Call(w.scatter_add, {"indices": torch.tensor([0]), "rows": torch.zeros(1)}),
            "Variable.scatter_update": Call(w.scatter_update, {"indices": torch.tensor([0]), "rows": torch.ones(1)}),
            "Variable.divide": Call(w.divide, {"partitions": 2, "partition_bytes": None}),
            "initialize": Call(tfnb.initialize, {"*what": g}),
            "Session": Call(tfnb.Session, {"graph": g, "cluster": None, "compile": "auto", "executor": "auto",
                                           "layout": "torch", "memory_budget": 10**9}),
            "Session.run": Call(s.run, {"fetches": self.y, "feed_dict": feeds, "timeout": 9.0,
                                        "trace": False, "check": None}),
            "Session.make_callable": Call(s.make_callable, {"fetches": self.y, "feeds": [x]}),
            "Session.passes": Call(s.passes, {"fetches": self.y, "feeds": [x], "sizes": {"B": 2}}),
            "Session.step": Call(s.step, {"fetches": [self.y], "feeds": [x]}),
            "Session.save": Call(s.save, {"path": self.folder / "saved"}),
            "Session.restore": Call(s.restore, {"path": self.folder / "saved", "strict": True, "mapping": {}}),
            "Session.reads": Call(s.reads, {"source": q}),
            "Session.written": Call(s.written, {"fetches": self.train, "feeds": [x]}),
            "Session.code": Call(s.code, {"fetches": self.y, "feeds": [x]}),
            "Session.reset": Call(tfnb.Session.reset, {"containers": ()}),
            "run": Call(tfnb.run, {"fetches": self.y, "feed_dict": feeds, "isolation": None}),
            "eval": Call(self.y.eval, {"feed_dict": feeds}),
            "checkpoint.load": Call(checkpoint.load, {"path": self.folder / "saved"}),
            "fit": Call(tfnb.fit, {"fetch": self.train, "data": [ones], "feeds": [x], "epochs": 1, "steps": 1,
                                   "batch_size": None,
                                   "shuffle": False, "seed": 0, "callbacks": (), "mode": "sync", "resume": False}),
            "compare": Call(tfnb.compare, {"fetch": self.train, "data": [ones], "modes": {"a": {}},
                                           "watch": self.loss, "seeds": 1, "feeds": [x]}),
            "races": Call(tfnb.races, {"*steps": self.train}),
            "reuse_values": Call(tfnb.reuse_values, {"on": False}),
            "gradients": Call(tfnb.gradients, {"ys": self.loss, "xs": w}),
            "jvp": Call(tfnb.jvp, {"ys": self.loss, "xs": x, "tangents": ones}),
            "stop_gradient": Call(tfnb.stop_gradient, {"x": ones}),
            "clip_by_value": Call(tfnb.clip_by_value, {"x": ones, "low": 0.0, "high": 1.0}),
            "clip_by_norm": Call(tfnb.clip_by_norm, {"x": ones, "norm": 1.0}),
            "clip_by_global_norm": Call(tfnb.clip_by_global_norm, {"xs": [ones], "norm": 1.0}),
            "map_fn": Call(tfnb.map_fn, {"fn": lambda v: v + 1, "xs": ones}),
            "fold": Call(tfnb.fold, {"fn": lambda a, v: a + v, "init": torch.zeros(3), "xs": ones}),
            "scan": Call(tfnb.scan, {"fn": lambda a, v: (a + v, v), "init": torch.zeros(3), "xs": ones}),
            "cond": Call(tfnb.cond, {"pred": torch.tensor(True), "true_fn": lambda: ones, "false_fn": lambda: ones}),
            "while_loop": Call(tfnb.while_loop, {"cond": lambda v: v.sum() < 9, "body": lambda v: v + 1, "init": ones}),
            "function": Call(tfnb.function, {"fn": lambda v: v}),
            "placeholder": Call(recorded(tfnb.placeholder), {"sample": ones, "name": "p"}),
            "constant": Call(recorded(tfnb.constant), {"value": 1.0, "name": "k"}),
            "device": Call(recorded(entered(tfnb.device)), {"spec": "cpu"}),
            "name_scope": Call(recorded(entered(tfnb.name_scope)), {"name": "s"}),
            "container": Call(entered(tfnb.container), {"name": "s"}),
            "reset": Call(tfnb.reset, {"*names": ()}),
            "group": Call(recorded(tfnb.group), {"*fetches": ones}),
            "record": Call(entered(tfnb.record), {"graph": "another"}),
            "recompute": Call(tfnb.recompute, {"fn": lambda v: v}),
            "FIFOQueue": Call(tfnb.FIFOQueue, {"capacity": 2, "dtypes": [torch.float32], "shapes": [[2]], "name": "f"}),
            "PriorityQueue": Call(tfnb.PriorityQueue, {"capacity": 2, "dtypes": [torch.float32], "shapes": [[2]]}),
            "RandomShuffleQueue": Call(tfnb.RandomShuffleQueue, {
                "capacity": 2, "min_after_dequeue": 1, "dtypes": [torch.float32], "shapes": [[2]], "seed": 1}),
            "queue.enqueue": Call(lambda **a: (q.enqueue(**a), q.dequeue()), {"element": rows, "timeout": 1.0}),
            "queue.enqueue_many": Call(lambda **a: (q.enqueue_many(**a), q.dequeue()), {"batch": torch.ones(1, 2),
                                                                                     "timeout": 1.0}),
            "queue.dequeue": Call(partial(taken, q, rows), {"sample": None, "timeout": 1.0}),
            "table.lookup": Call(self.table.lookup, {"keys": torch.tensor([1])}),
            "table.insert": Call(self.table.insert, {"keys": torch.tensor([1]), "values": torch.ones(1)}),
            "string_keys": Call(tfnb.string_keys, {"strings": ["a"]}),
            "SGD": Call(tfnb.train.SGD, {"lr": 0.1}),
            "Adam": Call(tfnb.train.Adam, {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}),
            "minimize": Call(tfnb.train.SGD(0.1).minimize, {"loss": self.loss}),
            "Spec.of": Call(tfnb.Spec.of, {"tensor": ones}),
            "custom_gradient": Call(tfnb.custom_gradient, {"fn": lambda v: (v, lambda g: g)}),
        }  # fmt: skip


WRONG: list[Any] = [
    None, True, -1, 0, 7, 10**400, 1.5, float("nan"), "", "x", "no such name", "\ud800", b"bytes", (), (1, 2), [],
    [None], [1], {}, {"x": 1}, {1: 2}, {None: None}, {"x"}, object(), object, len, lambda: 1, range(3), Ellipsis,
    torch.ones(5), torch.tensor(1), torch.float32, iter([1]), Path("no/such/file"),
]  # fmt: skip


def cases(world: World) -> Iterator[tuple[str, str]]:
    """The name of every call, and of one of its arguments."""
    for name, call in world.calls().items():
        for argument in call.right:
            yield name, argument


def made(call: Call, argument: str, wrong: Any) -> Any:
    """Make a call with one argument replaced."""
    given = {**call.right, argument: wrong}
    stars = [given.pop(key) for key in list(given) if key.startswith("*")]
    return call.function(*stars, **given)
