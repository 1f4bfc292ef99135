"""TensorFlow's v1 graph and Session, without control flow v2 and resource variables."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.benchmarks.peers import tf_ops
from tests.benchmarks.peers.layout import images, loaded, stored
from tests.benchmarks.peers.programs import FORWARD
from tests.benchmarks.peers.serve import Step

v1 = tf.compat.v1
v1.disable_eager_execution()
v1.disable_control_flow_v2()
v1.disable_resource_variables()


def version() -> str:
    return f"TensorFlow {tf.__version__}, v1 graph"


def session(threads: int, *, rewrite: bool = True) -> Any:
    """A session with so many threads; without rewriting, nodes that compute nothing stay."""
    config = v1.ConfigProto(intra_op_parallelism_threads=threads, inter_op_parallelism_threads=threads)
    config.graph_options.rewrite_options.disable_meta_optimizer = not rewrite
    if not rewrite:
        config.graph_options.optimizer_options.opt_level = v1.OptimizerOptions.L0
    return v1.Session(config=config)


def build(task: dict[str, Any], weights: list[np.ndarray], data: list[np.ndarray]) -> Step:
    if task["program"].startswith("null"):
        return null(task["program"] == "null-chain", task["sizes"]["nodes"], task["threads"])
    data = [images(array) for array in data]
    fed = [v1.placeholder(array.dtype, array.shape) for array in data]
    starts = [loaded(array) for array in weights]
    holders = [v1.placeholder(array.dtype, array.shape) for array in starts]  # as constants they could pass 2 GB
    variables = [v1.Variable(holder) for holder in holders]
    loss = FORWARD[task["program"]](tf_ops, variables, fed, **task["sizes"])
    extra: list[Any] = []
    if task["mode"] == "gradients":
        extra = list(tf.gradients(loss, variables))
    elif task["mode"] == "step":  # minimize: bare tf.gradients would race with the writes
        extra = [v1.train.GradientDescentOptimizer(task["rate"]).minimize(loss)]
    sess = session(task["threads"])
    sess.run(v1.global_variables_initializer(), dict(zip(holders, starts, strict=True)))
    if task["entry"] == "run":
        feeds = dict(zip(fed, data, strict=True))
        return Step(lambda: sess.run(loss, feeds), float)
    call = sess.make_callable([loss, *extra], fed)
    last: list[Any] = []

    def run() -> Any:
        last.clear()  # gradients of the step before
        last.extend(call(*data))
        return last[0]

    def state() -> list[np.ndarray]:
        return [stored(a) for a in (sess.run(variables) if task["mode"] == "step" else last[1:])]

    return Step(run, float, state, len(v1.get_default_graph().get_operations()))


def null(chain: bool, count: int, threads: int) -> Step:
    """Identity nodes with the graph's rewriting off, which would remove them."""
    x = v1.placeholder(tf.float32, [])
    ends = [x]
    for _ in range(count):
        ends.append(tf.identity(ends[-1] if chain else x))
    target = ends[-1] if chain else tf.group(*ends[1:])
    call = session(threads, rewrite=False).make_callable([target], [x])
    return Step(lambda: call(np.float32(1)), lambda out: float(out[0] if chain else 1), nodes=count)
