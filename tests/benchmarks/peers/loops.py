"""Iterations per second of a counting loop in TensorFlow and JAX, as JSON: run by the interpreter that has them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def tensorflow_function() -> Callable[[int], Any]:
    """`tf.while_loop` in a `tf.function`."""
    import tensorflow as tf

    @tf.function
    def count(n: Any) -> Any:
        return tf.while_loop(lambda i: i < n, lambda i: (i + 1,), (tf.constant(0),))

    return lambda n: count(tf.constant(n))[0].numpy()


def tensorflow_frames() -> Callable[[int], Any]:
    """The same in a graph of the first TensorFlow: Switch, Merge, Enter, Exit, NextIteration in C++."""
    import tensorflow.compat.v1 as tf

    graph = tf.Graph()
    with graph.as_default():
        tf.disable_control_flow_v2()
        n = tf.placeholder(tf.int32, ())
        out = tf.while_loop(lambda i: i < n, lambda i: (i + 1,), (tf.constant(0),))
        session = tf.Session()
    return lambda number: session.run(out, {n: number})


def jax_loop() -> Callable[[int], Any]:
    """`jax.lax.while_loop`, compiled; with a second variable, or the compiler finds that the result is n."""
    import jax

    def count(n: Any) -> Any:
        return jax.lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] * 0.5 + 1.0), (0, 0.0))

    compiled = jax.jit(count)
    return lambda n: float(compiled(n)[1])


LOOPS = {
    "tf.while_loop in a tf.function": (tensorflow_function, 20_000),
    "tf.while_loop in a v1 session": (tensorflow_frames, 20_000),
    "jax.lax.while_loop": (jax_loop, 20_000_000),
}


def main() -> None:
    """Print iterations per second by name; the best of several rounds."""
    found: dict[str, float | str] = {}
    for name, (make, iterations) in LOOPS.items():
        try:
            loop = make()
            loop(10)
            seconds = []
            for _ in range(int(sys.argv[1])):
                start = time.perf_counter()
                loop(iterations)
                seconds.append(time.perf_counter() - start)
            found[name] = iterations / min(seconds)
        except ImportError as error:
            found[name] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
