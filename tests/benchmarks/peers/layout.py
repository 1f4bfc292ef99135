"""Weights between torch's layout and that of TensorFlow and JAX: channels last, products without a transposition."""

from __future__ import annotations

import numpy as np


def loaded(array: np.ndarray) -> np.ndarray:
    """[out, in] -> [in, out]; [out, in, h, w] -> [h, w, in, out]."""
    return np.ascontiguousarray(array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T)


def stored(array: np.ndarray) -> np.ndarray:
    """The way back."""
    return array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T


def images(array: np.ndarray) -> np.ndarray:
    """[N, C, H, W] -> [N, H, W, C]; everything else as it is."""
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1)) if array.ndim == 4 else array
