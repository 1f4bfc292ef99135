"""What a recording changes of the tensors of earlier recordings, so that one that fails leaves them as they were."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from tfnb.recording.tensor import Base, Tensor

_HANDLE = ("_entry", "_family", "_chain", "_seen")
_BASE = tuple(field.name for field in fields(Base))


class Journal:
    """The state of handles and bases before their first change."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[Tensor | Base, tuple[Any, ...]]] = {}

    def note(self, changing: Tensor | Base) -> None:
        """Called before a change; only the first call for an object counts."""
        names = _BASE if isinstance(changing, Base) else _HANDLE
        self._before.setdefault(id(changing), (changing, tuple(getattr(changing, name) for name in names)))

    def undo(self) -> None:
        """Put everything back."""
        for changed, state in self._before.values():
            if isinstance(changed, Base):
                for name, value in zip(_BASE, state, strict=True):
                    setattr(changed, name, value)
        for changed, state in self._before.values():
            if isinstance(changed, Tensor):
                changed.look_as_before(*state)
