"""What is computed, written once for all libraries. Imports nothing but the networks.

A program is a function of ``ops`` (a module of the library's own functions with the names used here), a list of weights
and a list of data, and gives the loss. ``FORWARD`` has the programs, ``SHAPES`` the shapes of their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from tests.benchmarks.peers.nets import IMAGES, LAYERS, Layer, Shape, branches, shapes


def mlp(ops: Any, weights: list[Any], data: list[Any], **_: int) -> Any:
    """784-128-10 with ReLU."""
    w1, b1, w2, b2 = weights
    x, labels = data
    return ops.cross_entropy(ops.dense(ops.relu(ops.dense(x, w1, b1)), w2, b2), labels)


def lstm(ops: Any, weights: list[Any], data: list[Any], *, time: int, batch: int, width: int) -> Any:
    """An LSTM cell over ``time`` steps; the loss is of the last state."""
    wx, wh, bias = weights

    def cell(state: tuple[Any, Any], x: Any) -> tuple[Any, Any]:
        hidden, memory = state
        entry, forget, new, out = ops.split4(ops.dense(x, wx, bias) + ops.dense(hidden, wh))
        memory = ops.sigmoid(forget) * memory + ops.sigmoid(entry) * ops.tanh(new)
        return ops.sigmoid(out) * ops.tanh(memory), memory

    xs, start, target = data
    hidden, _ = ops.loop(cell, (start, start), xs, time)
    return ops.mean_square(hidden - target)


def chain(ops: Any, weights: list[Any], data: list[Any], *, nodes: int) -> Any:
    """Scalar additions of a fed value and products with one, in turns."""
    x, factor, term = data
    for place in range(nodes):
        x = x * factor if place % 2 else x + term
    return x


def _layers(ops: Any, layers: tuple[Layer, ...], weights: Iterator[Any], x: Any) -> Any:
    flat = False
    for name, *sizes in layers:
        if name == "conv":
            x = ops.relu(ops.conv(x, next(weights), next(weights), *sizes[2:]))
        elif name == "pool":
            x = ops.pool(x, *sizes)
        elif name == "mix":
            x = ops.concat([_layers(ops, path, weights, x) for path in branches((name, *sizes))])
        elif name == "average":
            x, flat = ops.average(x), True
        else:
            x, flat = (x if flat else ops.flatten(x)), True
            x = ops.relu(ops.dense(x, next(weights), next(weights)))
    return x


def _net(name: str) -> Callable[..., Any]:
    def forward(ops: Any, weights: list[Any], data: list[Any], **_: int) -> Any:
        images, labels = data
        return ops.cross_entropy(_layers(ops, LAYERS[name], iter(weights), ops.images(images)), labels)

    return forward


FORWARD: dict[str, Callable[..., Any]] = {"mlp": mlp, "lstm": lstm, "chain": chain} | {n: _net(n) for n in LAYERS}
SHAPES: dict[str, Callable[..., list[Shape]]] = {
    "mlp": lambda **_: [(128, 784), (128,), (10, 128), (10,)],
    "lstm": lambda width, **_: [(4 * width, width), (4 * width, width), (4 * width,)],
    "chain": lambda **_: [],
} | {name: lambda name=name, **_: [shape for layer in shapes(name) for shape in layer] for name in LAYERS}


def parameters(program: str, **sizes: int) -> int:
    """How many numbers are learned."""
    return sum(map(prod, SHAPES[program](**sizes)))


def image(program: str) -> int:
    """Height and width of the images."""
    return IMAGES[program]
