"""The protocol of an open recording for the marks; `tfnb.recording.values.recording` extends the protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tfnb.graph import Graph, Node, Owner, SourceLine, Variable, current

if TYPE_CHECKING:
    from tfnb.recording.marks.scopes import Scopes


class OpenBlock(current.OpenRecording, Protocol):
    """One open recording of one owner into one graph, with its scopes and source lines."""

    graph: Graph
    owner: Owner
    scopes: Scopes
    where: Callable[[], SourceLine | None]
    is_cell: bool  # a cell, or another block
    inside: list[Any]  # of the loops, branches and functions that are being recorded: what was before

    @property
    def new(self) -> list[Node]:
        """The nodes of this recording."""

    def variable_of(self, tensor: torch.Tensor) -> Variable | None:
        """The Variable of a Parameter, buffer or leaf; None for other tensors."""

    def note(self, text: str) -> None:
        """Something to be said once about this line."""

    def warn(self, text: str) -> None:
        """A note that runs differ from plain PyTorch by this line: a warning where no notebook shows notes."""
