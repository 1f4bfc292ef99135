"""TensorFlow's tf.function around the whole step."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tests.benchmarks.peers import tf_ops
from tests.benchmarks.peers.layout import images, loaded, stored
from tests.benchmarks.peers.programs import FORWARD
from tests.benchmarks.peers.serve import Step


def version() -> str:
    return f"TensorFlow {tf.__version__}"


def build(task: dict[str, Any], weights: list[np.ndarray], data: list[np.ndarray]) -> Step:
    tf.config.threading.set_intra_op_parallelism_threads(task["threads"])
    tf.config.threading.set_inter_op_parallelism_threads(task["threads"])
    variables = [tf.Variable(loaded(array)) for array in weights]
    batch = [tf.constant(images(array)) for array in data]
    rate = task["rate"]

    @tf.function
    def step(*fed: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = FORWARD[task["program"]](tf_ops, variables, fed, **task["sizes"])
        if task["mode"] == "forward":
            return [loss]
        grads = tape.gradient(loss, variables)
        if task["mode"] == "gradients":
            return [loss, *grads]
        for variable, grad in zip(variables, grads, strict=True):
            variable.assign_sub(rate * grad)
        return [loss]

    last: list[Any] = []

    def run() -> Any:
        last.clear()  # gradients of the step before
        last.extend(step(*batch))
        return last[0]

    def state() -> list[np.ndarray]:
        return [stored(a.numpy()) for a in (variables if task["mode"] == "step" else last[1:])]

    return Step(run, float, state)
