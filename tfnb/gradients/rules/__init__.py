"""The rules by family; importing this registers all of them."""

from tfnb.gradients.rules import (
    activation, attention, convolution, index, linalg, loss, normalize, pointwise, random, recurrent, reduce, shape,
)  # fmt: skip

__all__ = [
    "activation", "attention", "convolution", "index", "linalg", "loss", "normalize", "pointwise", "random", "recurrent",
    "reduce", "shape",
]  # fmt: skip
