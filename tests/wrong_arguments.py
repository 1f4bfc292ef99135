"""Calls of the public names with right arguments, so that each argument can be replaced by a wrong one."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

import tfnb
from tfnb.doctor import findings
from tfnb.errors import TfnbError, Unavailable
from tfnb.graph import Contents
from tfnb.state import checkpoint


class Call(NamedTuple):
    """A function and right arguments by name."""

    function: Callable[..., Any]
    right: Mapping[str, Any]

    @property
    def whole(self) -> Call:
        """A call with explicit defaults for all other arguments, so that these can be wrong, too."""
        parameters = inspect.signature(self.function).parameters.values()
        defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
        return Call(self.function, {**defaults, **self.right})


def entered(manager: Callable[..., Any]) -> Callable[..., None]:
    """A call that opens a block, and ends it."""

    @wraps(manager)
    def call(*args: Any, **given: Any) -> None:
        with manager(*args, **given):
            pass

    return call


def taken(queue: Any, element: Any, **given: Any) -> Any:
    """Enqueue an element, and dequeue one, so that none is left in the queue."""
    queue.enqueue(element)
    try:
        return queue.dequeue(**given)
    except BaseException:
        queue.dequeue(timeout=1.0)
        raise


def first_finding(address: Any, seconds: Any) -> None:
    """Let the doctor begin, and end before it loads or starts anything."""
    next(findings(address, seconds=seconds))


def recorded(function: Callable[..., Any]) -> Callable[..., None]:
    """A call inside of a recording that comes to nothing."""

    @wraps(function)
    def call(*args: Any, **given: Any) -> None:
        with tfnb.record("scratch"):
            function(*args, **given)

    return call


def ended(function: Callable[..., Any], end: Callable[[Any], object]) -> Callable[..., None]:
    """A call whose result is ended."""

    @wraps(function)
    def call(*args: Any, **given: Any) -> None:
        end(function(*args, **given))

    return call


def awaited(handle: tfnb.RunHandle) -> None:
    """The result or error of a training in the background."""
    try:
        handle.result(timeout=5.0)
    finally:
        handle.stop()
        handle.wait(5.0)


def of(make: Callable[[], Any], name: str) -> Callable[..., Any]:
    """A method of something that is made for each call."""

    @wraps(getattr(make(), name))
    def call(*args: Any, **given: Any) -> Any:
        return getattr(make(), name)(*args, **given)

    return call


@wraps(tfnb.connect)
def connected_to_nobody(**given: Any) -> None:
    """A connection to an address without a listener: `tests/cluster` has successful connections."""
    cluster, timeout = given["cluster"], given["timeout"]
    if cluster is None or type(cluster) is int:  # Dask's default, or processes of this machine
        return
    if type(timeout) in (int, float) and timeout > 0.1:
        given["timeout"] = 0.1
    with suppress(Unavailable):
        tfnb.connect(**given).close()


@wraps(tfnb.break_at)
def broken(**given: Any) -> None:
    """A breakpoint that is removed again."""
    try:
        tfnb.break_at(**given)
    finally:
        tfnb.break_at(graph=tfnb.graph("world"), off=True)


@wraps(tfnb.variable)
def held(source: Any, **given: Any) -> None:
    """A Variable of a tensor that others hold, too."""
    tfnb.variable(source.clone() if isinstance(source, torch.Tensor) else source, **given)


def read(reader: Callable[..., Any]) -> Callable[..., Any]:
    """A reader, and its first element."""
    return ended(reader, lambda made: made.read())


def finished() -> tfnb.RunHandle:
    """A training in the background that is over."""
    made = tfnb.RunHandle("over")
    made._future.set_result(tfnb.RunResult(1, [], 1.0))
    return made


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
            self.still = tfnb.group(self.y)
        self.graph, self.session = graph, tfnb.Session(graph)
        self.queue = tfnb.FIFOQueue(8, [torch.float32], shapes=[[2]], name="q")
        self.table = tfnb.MutableHashTable(8, 0.0)
        self.session.save(folder / "saved")
        graph.save(folder / "graph.json")

    def state(self) -> Any:
        """The state that a failing call must leave unchanged."""
        try:
            held = self.weight.value().tolist(), int(self.queue.size())
        except TfnbError as error:  # it was reset
            held = str(error), 0
        return self.graph.seed, len(self.graph.nodes), self.graph.finalized, *held

    def calls(self) -> dict[str, Call]:
        """Calls by name; each may be made again and again."""
        return {name: call.whole for name, call in {
            **self._core(), **self._state(), **self._train(), **self._nn()}.items()}  # fmt: skip

    def _core(self) -> dict[str, Call]:
        """Graphs, Variables, runs and control flow."""
        g, s, w, x = self.graph, self.session, self.weight, self.x
        ones, feeds = torch.ones(2, 3), {"x": torch.ones(2, 3)}
        hundred = tfnb.IndexedSlices(torch.ones(1, 3), torch.tensor([0]), (4, 3))

        def array() -> tfnb.TensorArray:
            return tfnb.TensorArray(2, shape=(3,), dtype=torch.float32)

        return {
            "Graph": Call(tfnb.Graph, {"name": "n", "contents": Contents(), "seed": 1}),
            "Graph.value": Call(g.value, {"name": "x"}),
            "Graph.__getitem__": Call(g.__getitem__, {"name": "x"}),
            "Graph.__contains__": Call(g.__contains__, {"name": "x"}),
            "Graph.select": Call(g.select, {"op": "*", "scope": "*", "tag": "a", "cell": "*"}),
            "Graph.why": Call(g.why, {"node": self.y}),
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
                "partitions": 2, "container": "", "shared_name": None}),
            "Variable.set": Call(w.set, {"value": torch.ones(3)}),
            "Variable.value": Call(w.value, {"timeout": 1.0}),
            "Variable.assign": Call(w.assign, {"value": torch.ones(3)}),
            "Variable.assign_add": Call(w.assign_add, {"value": torch.zeros(3)}),
            "Variable.assign_sub": Call(w.assign_sub, {"value": torch.zeros(3)}),
            **{f"Variable.scatter_{how}": Call(getattr(w, f"scatter_{how}"), {
                "indices": torch.tensor([0]), "rows": torch.zeros(1) if how in ("add", "sub") else torch.ones(1),
            }) for how in ("add", "sub", "mul", "div", "update")},
            "Variable.divide": Call(w.divide, {"partitions": 2, "partition_bytes": None}),
            "initialize": Call(tfnb.initialize, {"*what": g}),
            "mapped_memory": Call(tfnb.mapped_memory, {"folder": self.folder}),
            "Session": Call(tfnb.Session, {"graph": g, "cluster": None, "compile": "auto", "executor": "auto",
                                           "layout": "torch", "memory_budget": 10**9}),
            "Session.run": Call(s.run, {"fetches": self.y, "feed_dict": feeds, "timeout": 9.0,
                                        "trace": False, "check": None}),
            "Session.make_callable": Call(s.make_callable, {"fetches": self.y, "feeds": [x], "microbatches": 1}),
            "Session.without_writes": Call(s.without_writes, {"fetches": self.y, "feed_dict": feeds}),
            "Session.passes": Call(s.passes, {"fetches": self.y, "feeds": [x], "sizes": {"B": 2}}),
            "Session.step": Call(s.step, {"fetches": [self.y], "feeds": [x]}),
            "Session.save": Call(s.save, {"path": self.folder / "saved"}),
            "Session.restore": Call(s.restore, {"path": self.folder / "saved", "strict": True, "mapping": {}}),
            "Session.reads": Call(s.reads, {"source": self.queue}),
            "Session.written": Call(s.written, {"fetches": self.train, "feeds": [x]}),
            "Session.code": Call(s.code, {"fetches": self.y, "feeds": [x], "microbatches": 1}),
            "Session.reset": Call(tfnb.Session.reset, {"containers": ()}),
            "place": Call(tfnb.place, {"fetches": self.y, "how": "auto", "feeds": [x], "stages": None, "tasks": 2,
                                       "soft": False}),
            "run": Call(tfnb.run, {"fetches": self.y, "feed_dict": feeds, "isolation": None}),
            "Tensor.eval": Call(self.y.eval, {"feed_dict": feeds}),
            "Operation.run": Call(self.still.run, {"feed_dict": feeds}),
            "checkpoint.load": Call(checkpoint.load, {"path": self.folder / "saved"}),
            "fit": Call(tfnb.fit, {"fetch": self.train, "data": [ones], "feeds": [x], "epochs": 1, "steps": 1,
                                   "batch_size": None,
                                   "shuffle": False, "seed": 0, "callbacks": (), "mode": "sync", "resume": False,
                                   "memory_budget": "1GB", "microbatches": None, "schedule": None,
                                   "replicas": 1,
                                   "allow_plain_collectives": False}),
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
            "variable": Call(held, {"source": torch.ones(3)}),
            "device": Call(recorded(entered(tfnb.device)), {"spec": "cpu"}),
            "colocate_with": Call(recorded(entered(tfnb.colocate_with)), {"target": None}),
            "control_dependencies": Call(recorded(entered(tfnb.control_dependencies)), {"nodes": []}),
            "unordered": Call(recorded(entered(tfnb.unordered)), {}),
            "gradient_override": Call(recorded(entered(tfnb.gradient_override)), {"rules": {}}),
            "register_gradient": Call(tfnb.register_gradient, {"op": torch.ops.aten.relu.default}),
            "assert_": Call(recorded(tfnb.assert_), {"cond": torch.tensor(True), "message": "m"}),
            "print": Call(recorded(tfnb.print), {"*xs": "x"}),
            "effects": Call(recorded(tfnb.effects), {}),
            "autograph": Call(tfnb.autograph, {"function": len}),
            "break_at": Call(broken, {"node": self.y, "condition": "nan"}),
            "watch": Call(ended(tfnb.watch, tfnb.Watch.stop), {"*what": self.loss, "every": 1, "show": False}),
            "containers": Call(tfnb.containers, {}),
            "IndexedSlices": Call(tfnb.IndexedSlices, {
                "values": torch.ones(1, 3), "indices": torch.tensor([0]), "dense_shape": (4, 3)}),
            "IndexedSlices.to_dense": Call(hundred.to_dense, {}),
            "IndexedSlices.map": Call(hundred.map, {"function": torch.neg}),
            "IndexedSlices.like": Call(hundred.like, {"values": torch.ones(1, 3)}),
            "TensorArray": Call(tfnb.TensorArray, {"size": 2, "shape": (3,), "dtype": torch.float32}),
            "TensorArray.write": Call(of(array, "write"), {"index": 0, "value": torch.ones(3)}),
            "TensorArray.scatter": Call(of(array, "scatter"), {"indices": [0, 1], "values": ones}),
            "TensorArray.unstack": Call(of(array, "unstack"), {"values": ones}),
            "TensorArray.split": Call(of(array, "split"), {"values": torch.ones(2, 3), "length": 1}),
            "TensorArray.read": Call(of(lambda: array().unstack(ones), "read"), {"index": 0}),
            "TensorArray.gather": Call(of(lambda: array().unstack(ones), "gather"), {"indices": [0, 1]}),
            "Spec": Call(tfnb.Spec, {"dtype": torch.float32, "shape": (2,)}),
            "Spec.of": Call(tfnb.Spec.of, {"tensor": ones}),
            "Spec.sizes": Call(tfnb.Spec(torch.float32, (2,)).sizes, {"symbols": {}}),
            "Node.value": Call(g.nodes[0].value, {"index": 0}),
            "connect": Call(connected_to_nobody, {"cluster": "tcp://127.0.0.1:1", "timeout": 0.1}),
            "doctor": Call(first_finding, {"address": "tcp://127.0.0.1:1", "seconds": 1.0}),
            "name_scope": Call(recorded(entered(tfnb.name_scope)), {"name": "s"}),
            "container": Call(entered(tfnb.container), {"name": "s"}),
            "reset": Call(tfnb.reset, {"*names": ()}),
            "group": Call(recorded(tfnb.group), {"*fetches": ones}),
            "record": Call(entered(tfnb.record), {"graph": "another"}),
            "recompute": Call(tfnb.recompute, {"fn": lambda v: v}),
            "custom_gradient": Call(tfnb.custom_gradient, {"fn": lambda v: (v, lambda g: g)}),
        }  # fmt: skip

    def _state(self) -> dict[str, Call]:
        """Queues, tables and data."""
        q, folder, where = self.queue, self.folder, {"container": "", "shared_name": None}
        (folder / "lines.txt").write_text("one\ntwo\n")
        urls, floats = str(folder / "lines.txt"), [torch.float32]
        rows, coordinator = torch.ones(2), tfnb.Coordinator

        def barrier() -> tfnb.Barrier:
            made = tfnb.Barrier(floats, [()])
            made.insert_many(0, [7], [0.5])
            return made

        def mean() -> tfnb.ConditionalAccumulator:
            made = tfnb.ConditionalAccumulator(torch.float32, (2,))
            made.apply_grad(rows)
            return made

        def sparse() -> tfnb.SparseConditionalAccumulator:
            made = tfnb.SparseConditionalAccumulator(torch.float32, (4, 3))
            made.apply_grad(entries)
            return made

        def tokens() -> tfnb.TokenQueue:
            made = tfnb.TokenQueue()
            made.give(1, 2)
            return made

        def taken_token(method: str) -> Callable[..., Any]:
            def call(token: Any) -> Any:
                made = tokens()
                return getattr(made, method)(made.take()[0] if token is None else token)

            return call

        def source() -> tfnb.Source:
            return tfnb.Source([torch.ones(2), torch.ones(2)])

        def full() -> tfnb.FIFOQueue:
            made = tfnb.FIFOQueue(8, floats, shapes=[[2]])
            made.enqueue_many(torch.ones(4, 2))
            return made

        entries = tfnb.IndexedSlices(torch.ones(1, 3), torch.tensor([0]), (4, 3))
        one, keys, values = {"capacity": 2, "dtypes": floats, "shapes": [[2]]}, torch.tensor([1]), torch.ones(1)
        return {
            "FIFOQueue": Call(tfnb.FIFOQueue, {**one, **where}),
            "PriorityQueue": Call(tfnb.PriorityQueue, {**one, **where}),
            "PaddingFIFOQueue": Call(tfnb.PaddingFIFOQueue, {**one, **where}),
            "RandomShuffleQueue": Call(tfnb.RandomShuffleQueue, {**one, **where, "min_after_dequeue": 1, "seed": 1}),
            "TensorQueue.enqueue": Call(lambda **a: (q.enqueue(**a), q.dequeue()), {"element": rows, "timeout": 1.0}),
            "TensorQueue.enqueue_many": Call(
                lambda **a: (q.enqueue_many(**a), q.dequeue()), {"batch": torch.ones(1, 2), "timeout": 1.0}),
            "TensorQueue.dequeue": Call(partial(taken, q, rows), {"sample": None, "timeout": 1.0}),
            "TensorQueue.dequeue_many": Call(of(full, "dequeue_many"), {"n": 2, "timeout": 0.1}),
            "TensorQueue.dequeue_up_to": Call(of(full, "dequeue_up_to"), {"n": 2, "timeout": 0.1}),
            "QueueHandle.close": Call(of(full, "close"), {"timeout": 0.1}),
            "Barrier": Call(tfnb.Barrier, {"dtypes": floats, "shapes": [()]}),
            "Barrier.insert_many": Call(of(barrier, "insert_many"), {"part": 0, "keys": [8], "values": [0.5]}),
            "Barrier.take_many": Call(of(barrier, "take_many"), {"n": 1, "timeout": 0.1}),
            "ConditionalAccumulator": Call(tfnb.ConditionalAccumulator, {"dtype": torch.float32, "shape": (2,)}),
            "ConditionalAccumulator.apply_grad": Call(of(mean, "apply_grad"), {"grad": rows}),
            "ConditionalAccumulator.take_grad": Call(of(mean, "take_grad"), {"n": 1, "timeout": 0.1}),
            "_Conditional.set_global_step": Call(of(mean, "set_global_step"), {"step": 1}),
            "SparseConditionalAccumulator": Call(
                tfnb.SparseConditionalAccumulator, {"dtype": torch.float32, "shape": (4, 3)}),
            "SparseConditionalAccumulator.apply_grad": Call(of(sparse, "apply_grad"), {"grad": entries}),
            "SparseConditionalAccumulator.take_grad": Call(of(sparse, "take_grad"), {"n": 1, "timeout": 0.1}),
            "TokenQueue": Call(tfnb.TokenQueue, {}),
            "TokenQueue.give": Call(of(tokens, "give"), {"step": 1}),
            "TokenQueue.take": Call(of(tokens, "take"), {"timeout": 0.1}),
            "TokenQueue.renew": Call(taken_token("renew"), {"token": None}),
            "TokenQueue.finish": Call(taken_token("finish"), {"token": None}),
            "HashTable": Call(tfnb.HashTable, {"keys": [1], "values": [2.0], "default": 0.0}),
            "HashTable.from_file": Call(tfnb.HashTable.from_file, {"url": urls}),
            "_Table.lookup": Call(self.table.lookup, {"keys": keys}),
            "MutableHashTable": Call(tfnb.MutableHashTable, {"capacity": 2, "default": 0.0}),
            "MutableHashTable.insert": Call(self.table.insert, {"keys": keys, "values": values}),
            "MutableHashTable.remove": Call(self.table.remove, {"keys": keys}),
            "MutableHashTable.load": Call(self.table.load, {"keys": keys, "values": values}),
            "string_keys": Call(tfnb.string_keys, {"strings": ["a"]}),
            "Source": Call(tfnb.Source, {"data": [1, 2]}),
            "Source.batch": Call(of(source, "batch"), {"size": 2}),
            "Source.map": Call(of(source, "map"), {"function": torch.neg}),
            "Source.seek": Call(of(source, "seek"), {"position": {"epoch": 0, "count": 1}}),
            "TextLineReader": Call(read(tfnb.TextLineReader), {"urls": urls}),
            "WholeFileReader": Call(read(tfnb.WholeFileReader), {"urls": urls}),
            "FixedLengthRecordReader": Call(read(tfnb.FixedLengthRecordReader), {"urls": urls, "record_bytes": 4}),
            "QueueRunner": Call(tfnb.QueueRunner, {"queue": q, "enqueue_ops": source()}),
            "Coordinator.request_stop": Call(of(coordinator, "request_stop"), {}),
            "Coordinator.wait_for_stop": Call(of(coordinator, "wait_for_stop"), {"timeout": 0.01}),
            "Coordinator.register": Call(of(coordinator, "register"), {"thread": threading.Thread()}),
            "Coordinator.join": Call(of(coordinator, "join"), {"stop_grace_period_secs": 0.1}),
        }  # fmt: skip

    def _train(self) -> dict[str, Call]:
        """Optimizers, schedules and trainings."""
        train, ones, sgd = tfnb.train, torch.ones(2, 3), tfnb.train.SGD(0.1)
        some = {"data": [ones], "feeds": [self.x], "steps": 1, "shuffle": False}
        module = torch.nn.Linear(1, 1)
        momentum, average = train.Momentum(0.1), train.ExponentialMovingAverage(0.5)
        with tfnb.record("more"):
            step = momentum.minimize((self.weight * ones).sum())
            averaged = average.apply([self.weight])
        shots = tfnb.Snapshots(self.train)
        shots.take(0)
        decays = {"lr": 0.1, "decay_steps": 2.0, "decay_rate": 0.5}
        rules = "Adadelta Adagrad Adam AdamW Ftrl LBFGS LazyAdam Momentum Nesterov Optimizer RMSProp SGD"
        return {
            **{name: Call(getattr(train, name), {"lr": 0.1}) for name in rules.split()},
            "Optimizer.minimize": Call(recorded(sgd.minimize), {"loss": self.loss}),
            "Optimizer.compute_gradients": Call(recorded(sgd.compute_gradients), {"loss": self.loss}),
            "Optimizer.apply_gradients": Call(recorded(sgd.apply_gradients), {"pairs": [(ones.sum(0), self.weight)]}),
            "Optimizer.slots": Call(momentum.slots, {"target": self.weight}),
            "ExponentialMovingAverage": Call(train.ExponentialMovingAverage, {"decay": 0.5}),
            "ExponentialMovingAverage.apply": Call(recorded(train.ExponentialMovingAverage(0.5).apply), {
                "variables": [self.weight]}),
            "ExponentialMovingAverage.average": Call(average.average, {"target": self.weight}),
            "EarlyStopping": Call(train.EarlyStopping, {"monitor": "loss"}),
            "SyncReplicas": Call(train.SyncReplicas, {"m": 1}),
            "LocalSGD": Call(train.LocalSGD, {"every": 2}),
            "Downpour": Call(train.Downpour, {"n_fetch": 2, "n_push": 2}),
            "Sandblaster": Call(train.Sandblaster, {"history": 3}),
            "Saver": Call(train.Saver, {"path": self.folder / "run", "keep": 2, "keep_every_hours": 1.5, "best": "loss",
                                        "best_mode": "min", "session": self.session}),
            "Saver.save": Call(train.Saver(self.folder / "run", session=self.session).save, {"step": 3}),
            "Progress.change": Call(train.Progress(1, 1, {}).change, {"mode": "sync"}),
            "Progress.stop": Call(train.Progress(1, 1, {}).stop, {}),
            "from_torch": Call(train.from_torch, {"optimizer": torch.optim.SGD(module.parameters(), lr=0.1)}),
            "cosine_decay": Call(train.cosine_decay, {"lr": 0.1, "decay_steps": 2.0}),
            "polynomial_decay": Call(train.polynomial_decay, {"lr": 0.1, "decay_steps": 2.0}),
            **{f"{name}_decay": Call(getattr(train, f"{name}_decay"), decays)
               for name in ("exponential", "inverse_time", "natural_exp")},
            "piecewise_constant": Call(train.piecewise_constant, {"boundaries": [1.0], "values": [0.1, 0.2]}),
            "warmup": Call(train.warmup, {"steps": 2.0, "then": 0.1}),
            "launch": Call(ended(tfnb.launch, awaited), {"fetch": self.train, "callbacks": (), **some}),
            "RunHandle.wait": Call(finished().wait, {}),
            "RunHandle.result": Call(finished().result, {}),
            "Snapshots": Call(tfnb.Snapshots, {"fetch": self.train}),
            "Snapshots.take": Call(shots.take, {"step": 0}),
            "Snapshots.values": Call(shots.values, {"step": 0}),
            "Snapshots.restore": Call(shots.restore, {"step": 0}),
        }  # fmt: skip

    def _nn(self) -> dict[str, Call]:
        """Sharded tables and losses over many classes."""
        labels, ones, drawn = (
            torch.tensor([[0], [1]]),
            torch.ones(2, 3),
            (torch.tensor([3, 4]), torch.ones(2, 1), torch.ones(2)),
        )
        some = {"weights": torch.ones(9, 3), "biases": torch.ones(9), "labels": labels, "inputs": ones,
                "num_sampled": 2, "num_classes": 9, "sampled_values": drawn}  # fmt: skip
        return {
            "embedding_lookup": Call(tfnb.nn.embedding_lookup, {
                "params": [torch.ones(2, 3), torch.ones(1, 3)], "ids": labels, "max_norm": 1.0}),
            "log_uniform_sampler": Call(tfnb.nn.log_uniform_sampler, {
                "true_classes": labels, "num_true": 1, "num_sampled": 2, "unique": True, "range_max": 9}),
            "sampled_softmax_loss": Call(tfnb.nn.sampled_softmax_loss, some),
            "nce_loss": Call(tfnb.nn.nce_loss, some),
            "sharded_softmax_loss": Call(tfnb.nn.sharded_softmax_loss, {
                "weights": torch.ones(9, 3), "biases": None, "labels": torch.tensor([0, 8]), "inputs": ones}),
            "SampledClasses": Call(tfnb.nn.SampledClasses, tfnb.nn.SampledClasses(*drawn)._asdict()),
        }  # fmt: skip


ABSENT = {
    "tfnb makes them": "Cluster Node Operation Progress Recovery RunHandle RunResult Tensor Watch",
    "they need a cluster, and are tried in tests/cluster": "Cluster.close Cluster.follow",
    "fit calls them": """
        EarlyStopping.on_epoch RunHandle.on_step Saver.begin Saver.on_epoch Saver.opens Snapshots.on_step""",
    "minimize calls them": """
        Ftrl.initial Ftrl.update LBFGS.initial LBFGS.update_all Optimizer.initial Optimizer.update Optimizer.update_all
        Optimizer.update_rows UpdateRule.initial UpdateRule.names UpdateRule.update UpdateRule.update_rows""",
    "torch's own arguments": "Tensor.dim_order Tensor.is_contiguous Tensor.numpy",
    "other rooms of tfnb call them": """
        Cluster.ahead Cluster.cut Cluster.heads Cluster.in_chunks Cluster.news Cluster.recover Cluster.restoring
        Cluster.run Cluster.show
        Cluster.train IndexedSlices.called IndexedSlices.eval Queue.puts QueueHandle.drop Session.ensure_limited
        Session.expected Session.limited Session.looked_at Session.microbatches_of Session.step_of Session.train
        Source.back_to Source.ensure_position Spec.fits Spec.is_on Tensor.apply_ Tensor.as_subclass
        Tensor.look_as
        Tensor.map_ Tensor.renew Tensor.taken_outside Variable.declared Variable.drop Variable.ensure_fits
        Variable.looked_up Variable.of Variable.store Watch.followed Watch.step batches""",
}  # why public names are not in the table


def public() -> Iterator[str]:
    """Names of public functions, classes and their methods that take arguments."""
    for item in (getattr(module, name) for module in (tfnb, tfnb.train, tfnb.nn) for name in module.__all__):
        if not isinstance(item, ModuleType) and inspect.signature(item).parameters:
            yield item.__name__
        for name, method in inspect.getmembers(item, inspect.isroutine) if isinstance(item, type) else ():
            is_ours = str(getattr(method, "__module__", "")).startswith("tfnb.") and not name.startswith("_")
            if is_ours and inspect.signature(method).parameters.keys() - {"self"}:
                yield method.__qualname__


WRONG: list[Any] = [
    None, True, -1, 0, 7, 10**400, 1.5, float("nan"), "", "x", "no such name", "\ud800", b"bytes", (), (1, 2), [],
    [None], [1], {}, {"x": 1}, {1: 2}, {None: None}, {"x"}, object(), object, len, lambda: 1, range(3), Ellipsis,
    torch.ones(5), torch.tensor(1), torch.float32, iter([1]), Path("no/such/file"),
]  # fmt: skip


def made(call: Call, **replaced: Any) -> Any:
    """Make a call with some arguments replaced."""
    given = {**call.right, **replaced}
    stars = [given.pop(key) for key in list(given) if key.startswith("*")]
    return call.function(*stars, **given)
