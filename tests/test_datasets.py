"""Bundled data: shapes, ranges, one split everywhere, and what is said where a package is missing."""

from __future__ import annotations

import sys

import pytest
import torch

from tfnb import datasets
from tfnb.errors import FailedPrecondition, NotFound


def test_digits_are_scaled_images_and_labels():
    data = datasets.digits()
    assert data.images.shape == (1437, 1, 8, 8) and data.test_images.shape == (360, 1, 8, 8)
    assert data.images.dtype == torch.float32 and data.labels.dtype == torch.int64
    assert (data.images.min(), data.images.max()) == (0, 1)
    assert data.labels.unique().tolist() == data.test_labels.unique().tolist() == list(range(10))


def test_digits_are_split_once_and_for_all():
    first, second = datasets.digits(), datasets.digits()
    assert all(map(torch.equal, first, second))
    assert first.test_labels[:8].tolist() == [6, 6, 6, 2, 5, 6, 6, 2]


def test_missing_package_is_named_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(FailedPrecondition, match=r"pip install 'tfnb\[data\]'"):
        datasets.digits()


def test_python_docs_are_tokens_of_their_vocabulary():
    text = datasets.python_docs()
    assert text.tokens.dtype == torch.int64 and len(text.tokens) > 100_000
    assert text.tokens.max() == len(text.vocabulary) - 1
    start = text.decode(text.tokens[:500])
    assert "assert" in start and torch.equal(text.encode(start), text.tokens[:500])


def test_unknown_characters_are_named():
    with pytest.raises(NotFound, match="'x' 'y'"):
        datasets.Text(torch.zeros(1, dtype=torch.int64), "ab").encode("yaxa")
