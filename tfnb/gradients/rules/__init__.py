"""The rules by family; importing this registers all of them."""

from tfnb.gradients.rules import (
    activation, convolution, index, linalg, loss, normalize, pointwise, random, reduce, shape,
)  # fmt: skip

__all__ = [
    "activation", "convolution", "index", "linalg", "loss", "normalize", "pointwise", "random", "reduce", "shape",
]  # fmt: skip
