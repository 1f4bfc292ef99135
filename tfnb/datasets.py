"""Real data that comes with Python packages: nothing is downloaded, and a split is the same everywhere.

``digits`` needs scikit-learn (the extra ``data``); ``python_docs`` only the standard library. May import errors only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from tfnb.errors import FailedPrecondition, NotFound

try:
    from pydoc_data import topics as python_topics
except ImportError:  # some distributions leave it out
    python_topics = None  # type: ignore[assignment]


class Digits(NamedTuple):
    """Handwritten digits: images float32 [N, 1, 8, 8] in 0..1, labels int64 [N]; no image is in both parts."""

    images: torch.Tensor
    labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def digits(*, test: int = 360, seed: int = 0) -> Digits:
    """The 1797 digits of scikit-learn (the test part of UCI's "Optical Recognition of Handwritten Digits").

    test: how many images are held out, drawn with ``seed``. Raises FailedPrecondition without scikit-learn.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as missing:
        raise FailedPrecondition("digits() needs scikit-learn: pip install 'tfnb[data]'") from missing
    data = load_digits()
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(data.target)))
    images = torch.from_numpy(data.images).to(torch.float32).unsqueeze(1)[order] / 16
    labels = torch.from_numpy(data.target).to(torch.int64)[order]
    return Digits(images[test:], labels[test:], images[:test], labels[:test])


@dataclass(frozen=True, slots=True)
class Text:
    """A text as ``tokens`` int64 [N], indices into the characters of ``vocabulary``.

    >>> text = Text(torch.tensor([1, 0, 1]), "ab")
    >>> text.decode(text.tokens), text.encode("ab").tolist()
    ('bab', [0, 1])
    """

    tokens: torch.Tensor
    vocabulary: str

    def decode(self, tokens: torch.Tensor) -> str:
        """The characters of ``tokens`` [N]."""
        return "".join(self.vocabulary[token] for token in tokens.tolist())

    def encode(self, text: str) -> torch.Tensor:
        """int64 [len(text)]; raises NotFound for a character outside the vocabulary."""
        index = {character: token for token, character in enumerate(self.vocabulary)}
        unknown = sorted(set(text) - index.keys())
        if unknown:
            raise NotFound(f"not among the {len(self.vocabulary)} characters: {' '.join(map(repr, unknown))}")
        return torch.tensor([index[character] for character in text], dtype=torch.int64)

    def __repr__(self) -> str:
        return f"<Text: tokens int64 [{len(self.tokens)}], vocabulary of {len(self.vocabulary)} characters>"


def python_docs() -> Text:
    """The language topics of Python's own ``help()``, about 460 000 characters, one token each.

    The text is that of the running Python, so it differs between versions. Raises NotFound where a distribution
    leaves it out.
    """
    if python_topics is None:
        raise NotFound("this Python has no pydoc_data, the text of help(): install its documentation")
    text = "\n\n".join(topic for _, topic in sorted(python_topics.topics.items()))
    vocabulary = "".join(sorted(set(text)))
    return Text(Text(torch.empty(0), vocabulary).encode(text), vocabulary)
