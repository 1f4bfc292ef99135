"""torch's random state while recording: a graph's random nodes have seeded streams of their own.

What seeds or restores torch's generators inside still holds for what modules made there draw; it is noted with its
line, since recorded draws do not see it, and undone at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tfnb.recording.marks.while_recording import Shared, swapped
from tfnb.recording.values.recording import Recording, open_recording

_OWN = torch.random.default_generator
_before = WeakIdKeyDictionary()  # recorder -> the state of torch's generator, once something changed it
_start = WeakIdKeyDictionary()  # recorder -> that state and its seed when the recording began


@contextmanager
def own_streams(recorder: Recording) -> Iterator[None]:
    """For one recording: what it does to torch's random state is undone."""
    _start[recorder] = _OWN.get_state(), _OWN.initial_seed()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    others = [(i, torch.cuda.get_rng_state(i)) for i in devices]
    with _followed():
        try:
            yield
        finally:
            _look_at_seed(recorder)
            if recorder in _before:
                _OWN.set_state(_before.pop(recorder))
                for i, state in others:
                    torch.cuda.set_rng_state(state, i)


def _changing(what: str) -> None:
    """Said before torch's generators change."""
    recorder = open_recording()
    if recorder is not None:
        _look_at_seed(recorder)
        recorder.streams_differ(what)
        _before.setdefault(recorder, _OWN.get_state())


def _look_at_seed(recorder: Recording) -> None:
    """The generator's own methods cannot be followed: what they did is seen afterwards."""
    state, seed = _start[recorder]
    if recorder not in _before and _OWN.initial_seed() != seed:
        recorder.streams_differ("a seed given to torch.default_generator")
        _before[recorder] = state


class _Followed:
    """torch's generator as the functions of torch.random see it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_OWN, name)

    def manual_seed(self, seed: int) -> Any:
        _changing("torch.manual_seed")
        return _OWN.manual_seed(seed)

    def seed(self) -> int:
        _changing("torch.seed")
        return _OWN.seed()

    def set_state(self, state: Any) -> Any:
        _changing("torch.set_rng_state")
        return _OWN.set_state(state)


def _following(original: Callable[..., Any]) -> Callable[..., Any]:
    def seed(*args: Any) -> Any:
        _changing("torch.manual_seed")
        return original(*args)

    return seed


def _patches() -> AbstractContextManager[None]:
    cuda = [(torch.cuda, name, _following(getattr(torch.cuda, name))) for name in ("manual_seed", "manual_seed_all")]
    return swapped((torch.random, "default_generator", _Followed()), *cuda)


_followed = Shared(_patches)

__all__ = ["own_streams"]
