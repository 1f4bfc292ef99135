"""torch's random state while recording: a graph's random nodes have seeded streams of their own.

What seeds or restores torch's generators inside still holds for what modules made there draw; it is noted with its
line, since recorded draws do not see it, and undone at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tfnb.kernels.random import mix
from tfnb.recording.values.recording import Recording, open_recording

_OWN = torch.random.default_generator
_before = WeakIdKeyDictionary()  # recorder -> the states of torch's generators, once something changed them
_start = WeakIdKeyDictionary()  # recorder -> those states and their seeds when the recording began


def _generators() -> list[torch.Generator]:
    """The processor's first."""
    return [_OWN, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]


@contextmanager
def own_streams(recorder: Recording) -> Iterator[None]:
    """Restore torch's random state after one recording."""
    _start[recorder] = [(each.get_state(), each.initial_seed()) for each in _generators()]
    try:
        yield
    finally:
        _look_at_seeds(recorder)
        for generator, state in zip(_generators(), _before.pop(recorder, ()), strict=False):
            generator.set_state(state)


@contextmanager
def drawn_apart(recorder: Recording) -> Iterator[None]:
    """Inside, torch draws from the recording's next stream; its own random state is restored afterwards."""
    stream, recorder.tape.streams = recorder.tape.streams, recorder.tape.streams + 1
    before = _OWN.get_state()
    _OWN.manual_seed(mix(recorder.graph.seed, recorder.owner.index, stream))
    try:
        yield
    finally:
        _OWN.set_state(before)


def _changing(what: str) -> None:
    """Said before torch's generators change."""
    recorder = open_recording()
    if recorder is not None:
        _look_at_seeds(recorder)
        recorder.streams_differ(what)
        _before.setdefault(recorder, [each.get_state() for each in _generators()])


def _look_at_seeds(recorder: Recording) -> None:
    """Detect seeds changed by a generator's methods, which no hook can observe."""
    start = _start[recorder]
    differ = any(each.initial_seed() != seed for each, (_, seed) in zip(_generators(), start, strict=False))
    if recorder not in _before and differ:
        recorder.streams_differ("a seed given to a generator of torch")
        _before[recorder] = [state for state, _ in start]


class FollowedGenerator:
    """torch's generator as seen by the functions of torch.random during a recording."""

    def __init__(self, original: torch.Generator) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def manual_seed(self, seed: int) -> Any:
        _changing("torch.manual_seed")
        return self._original.manual_seed(seed)

    def seed(self) -> int:
        _changing("torch.seed")
        return self._original.seed()

    def set_state(self, state: Any) -> Any:
        _changing("torch.set_rng_state")
        return self._original.set_state(state)
