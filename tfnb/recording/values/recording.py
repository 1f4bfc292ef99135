"""The protocol of an open recording for the folders below the recorder; implemented by `dispatch.recorder`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch._ops import OpOverload
from torch.utils.weak import WeakIdKeyDictionary

from tfnb.graph import Node, Value, Variable, current
from tfnb.recording.marks.open_block import OpenBlock

if TYPE_CHECKING:
    from tfnb.recording.marks.carried_gradients import CarriedGradients
    from tfnb.recording.marks.lasting_state import LastingChanges
    from tfnb.recording.marks.python_state import PythonReads
    from tfnb.recording.shapes.symbols import Symbols
    from tfnb.recording.values.outside_tensors import Outside
    from tfnb.recording.values.tape import Tape
    from tfnb.recording.values.tensor import Base, Entry, Operation, Tensor
    from tfnb.recording.values.views import View
    from tfnb.recording.values.workspace import Workspace


class Recording(OpenBlock, Protocol):
    """One open recording of one owner into one graph."""

    lazy: bool  # shapes only
    space: Workspace
    symbols: Symbols
    tape: Tape
    outside: Outside
    buffers: Any  # `Buffers` of `writes.buffer_assignments`
    python: PythonReads
    carried: CarriedGradients
    lasting: LastingChanges
    stop: FrameType | None  # the frame of a block; the frames of a cell end below it
    born: WeakIdKeyDictionary
    live: WeakIdKeyDictionary
    packings: WeakIdKeyDictionary
    calls: dict[Any, Any]
    failed: tuple[Exception, Node] | None
    entered: bool
    refuse: Callable[[str], None] | None
    overrides: Mapping[str, Callable[..., Any]]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes so far, earlier owners' first."""

    @property
    def samples_wait(self) -> bool:
        """Whether samples of new nodes are computed lazily, on first access."""

    # -- tensors ------------------------------------------------------------------------------------------------

    def handle(self, tensor: torch.Tensor) -> Tensor:
        """The recorded tensor that stands for any tensor met while recording."""

    def home(self, tensor: torch.Tensor) -> Base:
        """The base that the aliases of a tensor share."""

    def fresh(self, tensor: torch.Tensor) -> Tensor:
        """The value of ``tensor`` in memory of its own."""

    def tensor(self, value: Value) -> Tensor:
        """A recorded tensor of an existing value."""

    def read(self, variable: Variable) -> Tensor:
        """The variable's value at this place of the program."""

    def is_unused(self, tensor: torch.Tensor) -> bool:
        """Whether this is a parameter or buffer made in this recording that nothing recorded has used yet."""

    def operation(self, value: Value) -> Operation:
        """The handle of a node without outputs."""

    def constant(self, tensor: torch.Tensor, name: str | None = None) -> Entry:
        """A node that holds ``tensor``."""

    def look(self, tensor: Tensor) -> Entry:
        """The entry of a recorded tensor at this place of the program."""

    def _entry(self, tensor: torch.Tensor) -> Entry: ...

    def _entry_of_value(self, value: Value) -> Entry: ...

    def _wrap(self, entry: Entry, base: Base | None = None, chain: tuple[View, ...] = ()) -> Tensor: ...

    def _read_base(self, var: Variable) -> Base: ...

    def stand(self, base: Base, var: Variable) -> None:
        """Let the memory of a family of tensors be the Variable's."""

    def _as_tensor(self, value: object) -> torch.Tensor: ...

    # -- what nodes recorded inside carry -----------------------------------------------------------------------

    def on(self) -> AbstractContextManager[None]:
        """Record the calls inside."""

    def scope(self, name: str | None) -> AbstractContextManager[str]:
        """A name scope."""

    def tagged(self, tags: frozenset[str], forward: int | None = None) -> AbstractContextManager[None]:
        """Nodes recorded inside carry the tags and the forward node's id."""

    def placed(self, device: str | None) -> AbstractContextManager[None]:
        """Nodes recorded inside request this device."""

    # -- what leaves the graph ----------------------------------------------------------------------------------

    def streams_differ(self, what: str) -> None:
        """Note that recorded draws do not come from torch's generators."""

    def guard(
        self, tensor: torch.Tensor, outcome: bool, raises: str | None = None, lacks: str | None = None
    ) -> None:  # fmt: skip
        """Every later node runs only where ``tensor`` has this truth."""

    def branch(
        self, tensor: torch.Tensor, outcome: bool, *, is_check: bool = False, raises: str | None = None,
        is_state: bool = False,
    ) -> None:  # fmt: skip
        """Python took a branch on a recorded value."""

    def record_view(self, view: OpOverload, op: OpOverload, x: torch.Tensor) -> Any:
        """Record ``op``; the result looks at the memory of ``x`` as that of ``view`` would."""

    def override(self, func: OpOverload) -> Callable[..., Any] | None:
        """The gradient that the user gave this op here."""


def open_recording() -> Recording | None:
    """The innermost open recording of this thread, as this protocol."""
    return cast("Recording | None", current.recording())
