"""JAX: the whole step under one jit, its weights donated; the loop is lax.scan."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.benchmarks.peers.layout import images as channels_last
from tests.benchmarks.peers.layout import loaded, stored
from tests.benchmarks.peers.programs import FORWARD
from tests.benchmarks.peers.serve import Step

relu, sigmoid, tanh = jax.nn.relu, jax.nn.sigmoid, jnp.tanh
NHWC = ("NHWC", "HWIO", "NHWC")


def images(x: Any) -> Any:
    return x  # fed channels last


def dense(x: Any, w: Any, b: Any = None) -> Any:
    return x @ w if b is None else x @ w + b


def conv(x: Any, w: Any, b: Any, stride: int, padding: int) -> Any:
    return lax.conv_general_dilated(x, w, (stride, stride), [(padding, padding)] * 2, dimension_numbers=NHWC) + b


def pool(x: Any, kernel: int, stride: int, padding: int) -> Any:
    padded = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, kernel, kernel, 1), (1, stride, stride, 1), padded)


def average(x: Any) -> Any:
    return x.mean((1, 2))


def flatten(x: Any) -> Any:
    """In torch's order, which the weights of the next layer have."""
    return x.transpose(0, 3, 1, 2).reshape(len(x), -1)


def concat(parts: list[Any]) -> Any:
    return jnp.concatenate(parts, 3)


def split4(x: Any) -> Any:
    return jnp.split(x, 4, 1)


def cross_entropy(logits: Any, labels: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


def mean_square(x: Any) -> Any:
    return jnp.square(x).mean()


def loop(cell: Callable[..., Any], state: Any, xs: Any, time: int) -> Any:
    return lax.scan(lambda carried, x: (cell(carried, x), None), state, xs)[0]


def version() -> str:
    return f"jax {jax.__version__}"


def build(task: dict[str, Any], weights: list[np.ndarray], data: list[np.ndarray]) -> Step:
    """Threads are those of the process: XLA counts the processors that it may use."""
    batch = [jnp.asarray(channels_last(array)) for array in data]
    now = [jnp.asarray(loaded(array)) for array in weights]
    rate = task["rate"]

    def loss_of(params: list[Any], fed: list[Any]) -> Any:
        return FORWARD[task["program"]](sys.modules[__name__], params, fed, **task["sizes"])

    def step(params: list[Any], fed: list[Any]) -> tuple[Any, list[Any]]:
        if task["mode"] == "forward":
            return loss_of(params, fed), []
        loss, grads = jax.value_and_grad(loss_of)(params, fed)
        if task["mode"] == "gradients":
            return loss, grads
        return loss, [p - rate * g for p, g in zip(params, grads, strict=True)]

    training = task["mode"] == "step"
    call, last = jax.jit(step, donate_argnums=(0,) if training else ()), [now]

    def run() -> Any:
        given = last.pop() if training else now
        last.clear()  # gradients of the step before
        loss, after = call(given, batch)
        last.append(after)
        return loss

    def wait(loss: Any) -> float:
        jax.block_until_ready(last[0])
        return float(loss)

    return Step(run, wait, lambda: [stored(np.asarray(a)) for a in last[0]])
