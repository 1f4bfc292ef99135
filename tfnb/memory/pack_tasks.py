"""Tasks of a step that is cut into packs of layers, in an order, with the tensors that each reads and makes. Pure.

A pack has a forward, a backward and an update piece (semantics S-191). `tasks_of` puts one task for each piece and
microbatch in order: grouped by pack, so that weights are loaded once for all microbatches (S-194), each update as soon
as its gradients are complete (S-195); or in program order. `tfnb.memory.moves` plans which tensors are where.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple


class Role(StrEnum):
    """The role of a tensor in a step: the counters of a plan are by role."""

    WEIGHT, STATE, GRADIENT, BORDER = "weight", "state", "gradient", "border"


class Phase(StrEnum):
    """The phase of a step that a piece belongs to."""

    FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


class DeviceItem(NamedTuple):
    """A tensor that a plan keeps on the device or on the host. micro: the microbatch of a border value, else -1."""

    role: Role
    key: Hashable
    micro: int = -1


@dataclass(frozen=True, slots=True)
class PackPiece:
    """One phase of one pack, by the keys of its tensors.

    weights, state: Variables that it reads. written: of which it writes. gradients: accumulated over microbatches, made
    by a backward piece and taken by an update. takes, gives: values that cross to other pieces. work: bytes that it
    holds at most beside them.
    """

    phase: Phase
    pack: int
    weights: tuple[Hashable, ...] = ()
    state: tuple[Hashable, ...] = ()
    written: frozenset[Hashable] = frozenset()
    gradients: tuple[Hashable, ...] = ()
    takes: tuple[Hashable, ...] = ()
    gives: tuple[Hashable, ...] = ()
    work: int = 0

    @property
    def variables(self) -> tuple[DeviceItem, ...]:
        """The Variables read by the piece, as items."""
        return (
            *(DeviceItem(Role.WEIGHT, key) for key in self.weights),
            *(DeviceItem(Role.STATE, key) for key in self.state),
        )


@dataclass(frozen=True, slots=True)
class PackTask:
    """A piece for one microbatch, or an update (micro -1).

    reads: on the device before it runs. makes: on the device after it. writes: of both, those that it changes.
    frees: those that no later task takes. work: bytes beside them while it runs.
    """

    piece: PackPiece
    micro: int
    reads: tuple[DeviceItem, ...]
    makes: tuple[DeviceItem, ...] = ()
    writes: tuple[DeviceItem, ...] = ()
    frees: tuple[DeviceItem, ...] = ()

    @property
    def work(self) -> int:
        """Bytes beside its items."""
        return self.piece.work

    def __str__(self) -> str:
        micro = f", microbatch {self.micro}" if self.micro >= 0 else ""
        return f"{self.piece.phase} of pack {self.piece.pack}{micro}"


def tasks_of(
    pieces: Sequence[PackPiece], microbatches: int, *, grouped: bool = True, just_in_time: bool = True
) -> list[PackTask]:
    """The tasks of one step. pieces: forward in order, then backward in order; updates anywhere.

    grouped: all microbatches pass a pack before the next pack begins. just_in_time: an update runs as soon as the last
    backward piece that reads its Variables or makes its gradients is done, else at the end; in program order always so.
    """
    computing = [piece for piece in pieces if piece.phase != Phase.UPDATE]
    updates = [piece for piece in pieces if piece.phase == Phase.UPDATE]
    found: list[PackTask] = []
    if grouped:
        for at, piece in enumerate(computing):
            found += [_computing(piece, micro) for micro in range(microbatches)]
            later = {key for other in computing[at + 1 :] for key in (*other.variables, *other.gradients)}
            for update in [u for u in updates if just_in_time and later.isdisjoint((*u.variables, *u.gradients))]:
                updates.remove(update)
                found.append(_updating(update))
    else:
        found += [_computing(piece, micro) for micro in range(microbatches) for piece in computing]
    found += map(_updating, updates)
    last = {item: at for at, task in enumerate(found) for item in (*task.reads, *task.makes)}
    return [
        replace(task, frees=tuple(
            item for item in dict.fromkeys((*task.reads, *task.makes))
            if last[item] == at and item.role in (Role.BORDER, Role.GRADIENT)
        ))
        for at, task in enumerate(found)
    ]  # fmt: skip


def _computing(piece: PackPiece, micro: int) -> PackTask:
    sums = tuple(DeviceItem(Role.GRADIENT, key) for key in piece.gradients)
    takes = tuple(DeviceItem(Role.BORDER, key, micro) for key in piece.takes)
    gives = tuple(DeviceItem(Role.BORDER, key, micro) for key in piece.gives)
    written = tuple(item for item in piece.variables if item.key in piece.written)
    reads = (*piece.variables, *takes, *(sums if micro else ()))
    return PackTask(piece, micro, reads, (*gives, *(() if micro else sums)), (*written, *sums))


def _updating(piece: PackPiece) -> PackTask:
    sums = tuple(DeviceItem(Role.GRADIENT, key) for key in piece.gradients)
    takes = tuple(DeviceItem(Role.BORDER, key) for key in piece.takes)
    gives = tuple(DeviceItem(Role.BORDER, key) for key in piece.gives)
    written = tuple(item for item in piece.variables if item.key in piece.written)
    return PackTask(piece, -1, (*piece.variables, *sums, *takes), gives, written)
