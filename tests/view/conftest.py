"""Recorded graphs, made once."""

from __future__ import annotations

import pytest

from tests.view import models
from tfnb.graph import Graph


@pytest.fixture(scope="session")
def digits() -> Graph:
    """The convolution net with its gradients and updates."""
    return models.digits()


@pytest.fixture(scope="session")
def resnet() -> Graph:
    """A ResNet-50 of narrow layers."""
    return models.resnet()


@pytest.fixture(scope="session")
def gpt() -> Graph:
    """A trained GPT of twelve layers."""
    return models.gpt(train=True)
