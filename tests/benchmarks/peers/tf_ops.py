"""The programs' functions in TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

relu, sigmoid, tanh = tf.nn.relu, tf.sigmoid, tf.tanh


def images(x: Any) -> Any:
    return x  # fed channels last


def dense(x: Any, w: Any, b: Any = None) -> Any:
    y = tf.matmul(x, w)
    return y if b is None else tf.nn.bias_add(y, b)


def _padded(size: int) -> list[list[int]]:
    return [[0, 0], [size, size], [size, size], [0, 0]]


def conv(x: Any, w: Any, b: Any, stride: int, padding: int) -> Any:
    return tf.nn.bias_add(tf.nn.conv2d(x, w, stride, _padded(padding) if padding else "VALID"), b)


def pool(x: Any, kernel: int, stride: int, padding: int) -> Any:
    return tf.nn.max_pool2d(x, kernel, stride, _padded(padding) if padding else "VALID")


def average(x: Any) -> Any:
    return tf.reduce_mean(x, [1, 2])


def flatten(x: Any) -> Any:
    """In torch's order, which the weights of the next layer have."""
    x = tf.transpose(x, [0, 3, 1, 2])
    return tf.reshape(x, [x.shape[0], -1])


def concat(parts: list[Any]) -> Any:
    return tf.concat(parts, 3)


def split4(x: Any) -> Any:
    return tf.split(x, 4, 1)


def cross_entropy(logits: Any, labels: Any) -> Any:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))


def mean_square(x: Any) -> Any:
    return tf.reduce_mean(tf.square(x))


def loop(cell: Callable[..., Any], state: Any, xs: Any, time: int) -> Any:
    for x in tf.unstack(xs, time):
        state = cell(state, x)
    return state
