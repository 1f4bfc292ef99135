"""Contents of queues, as facts and tensors for a file, and back.

What is held is of one moment, as if all steps under way were stopped then: what they took is in its queue, unless they
put elements, too. Pure, but for the machines of the queues that it asks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeVar

import torch

from tfnb.errors import CheckpointCorrupt, CheckpointIncompatible, NotFound
from tfnb.graph import Spec, strict_json
from tfnb.graph.queue import Queue
from tfnb.graph.spec import dtype_name
from tfnb.state import checkpoint
from tfnb.state.elements import check_part
from tfnb.state.orders import Element
from tfnb.state.queue_machine import QueueMachine, become, copied
from tfnb.state.queue_operations import machine_of, made, ordered

T = TypeVar("T")

_MARK = "@"  # begins the keys of queues


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """The contents of a queue at one moment: ``found`` as JSON, and tensors."""

    found: Mapping[str, Any]
    tensors: Sequence[torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def copy(self) -> QueueSnapshot:
        """The same in memory of its own."""
        return QueueSnapshot(self.found, [tensor.clone() for tensor in self.tensors])

    @property
    def marks(self) -> Mapping[str, int]:
        """The mark of the last element of each source, see `tfnb.state.source_puts`."""
        return dict(self.found["marks"])


class SavedQueue(NamedTuple):
    """A file's record of one queue: facts, and tensors by their keys."""

    facts: Mapping[str, Any]
    tensors: dict[str, torch.Tensor]


def labelled(queues: Iterable[Queue]) -> dict[str, Queue]:
    """Queues by their names, made unique in their order.

    >>> list(labelled([Queue("q", 1, []), Queue("q", 1, [])]))
    ['q', 'q_1']
    """
    found: dict[str, Queue] = {}
    for queue in dict.fromkeys(queues):
        names = (queue.name if number == 0 else f"{queue.name}_{number}" for number in count())
        found[next(name for name in names if name not in found)] = queue
    return found


def held_by(queues: Mapping[str, Queue]) -> dict[str, QueueSnapshot]:
    """Snapshots of the queues of this process, all at one moment; queues of other processes are left out."""
    machines = {
        label: machine for label, queue in queues.items() if isinstance(machine := machine_of(queue), QueueMachine)
    }
    found = copied({machine: ordered(queues[label]) for label, machine in machines.items()})
    return {label: QueueSnapshot(*one) for label, one in zip(machines, found, strict=True)}


def in_front(queue: Queue, held: QueueSnapshot, elements: Sequence[Element]) -> QueueSnapshot:
    """A snapshot with further elements put in front of the queue."""
    machine = _filled(queue, held)
    machine.put_front(elements)
    (found,) = copied({machine: ordered(queue)})
    return QueueSnapshot({**found[0], "marks": held.found["marks"]}, found[1])


def ready_to_hold(queues: Mapping[str, Queue], held: Mapping[str, QueueSnapshot]) -> Callable[[], None]:
    """Returns a function that replaces the contents of all queues at one moment, and cannot fail."""
    pairs = [(machine_of(queues[label]), _filled(queues[label], one)) for label, one in held.items()]
    return partial(become, {machine: other for machine, other in pairs if isinstance(machine, QueueMachine)})


def written(
    queues: Mapping[str, Queue], held: Mapping[str, QueueSnapshot]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Facts and tensors for a file. Data that grows with the elements is a tensor: a file's header has a limit."""
    facts, tensors = dict[str, Any](), dict[str, torch.Tensor]()
    for label, one in held.items():
        found = {**one.found, "marks": {}}
        order = found.pop("facts")
        groups, shapes, places = _packed(one.tensors)
        facts[label] = {**_described(queues[label]), "found": found, "groups": len(groups)}
        text = bytearray(json.dumps({"facts": order, "shapes": shapes}).encode())
        numbered = {str(number): group for number, group in enumerate(groups)}
        named = {**numbered, "places": places, "facts": torch.frombuffer(text, dtype=torch.uint8)}
        tensors |= {f"{_MARK}{label}/{name}": tensor for name, tensor in named.items()}
    return facts, tensors


def split(
    tensors: Mapping[str, T], labels: Iterable[str]
) -> tuple[dict[str, T], dict[str, T]]:  # fmt: skip
    """The tensors of a file: tensors of Variables, and tensors of the queues with these labels."""
    marks = tuple(f"{_MARK}{label}/" for label in labels)
    queued = {key: tensor for key, tensor in tensors.items() if key.startswith(marks)}
    return {key: tensor for key, tensor in tensors.items() if key not in queued}, queued


def match(
    facts: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    queues: Mapping[str, Queue],
    *,
    needed: Container[Queue],
) -> dict[str, QueueSnapshot]:
    """The snapshot that each queue is to restore, by a file's facts and tensors; nothing is changed.

    Raises NotFound for a needed queue that the file lacks, CheckpointIncompatible for a queue of another kind, and
    CheckpointCorrupt for contents that are none.
    """
    missing = [label for label, queue in queues.items() if label not in facts and queue in needed]
    if missing:
        shown = "\n".join(f"  {label}{checkpoint.near(label, facts)}" for label in missing)
        raise NotFound(f"the checkpoint lacks what {len(missing)} of {len(queues)} queues hold:\n{shown}")
    found = {}
    for label, queue in queues.items():
        if label not in facts:
            continue
        try:
            wanted, saved = _described(queue), {key: facts[label].get(key) for key in _described(queue)}
            if wanted != saved:
                raise CheckpointIncompatible(
                    f"queue {label} is {_words(wanted)}, the checkpoint holds {_words(saved)}; nothing was assigned"
                )
            found[label] = _read(facts[label], tensors, f"{_MARK}{label}/")
            _ensure_fits(queue, found[label])
        except CheckpointIncompatible:
            raise
        except _DAMAGES as error:
            raise CheckpointCorrupt(f"the checkpoint has damaged contents of queue {label}: {error!r}") from error
    return found


_DAMAGES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What code raises that is given other facts or tensors than it wrote."""


def _read(about: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], begin: str) -> QueueSnapshot:
    """Decode the snapshot of one queue from tensors whose keys begin with ``begin``; raises one of `_DAMAGES`."""
    told = strict_json.read(tensors[begin + "facts"].numpy().tobytes().decode(), finite=False)
    groups = [tensors[f"{begin}{number}"] for number in range(about["groups"])]
    found = {**about["found"], "facts": told["facts"]}
    return QueueSnapshot(found, _unpacked(groups, told["shapes"], tensors[begin + "places"]))


def _ensure_fits(queue: Queue, held: QueueSnapshot) -> None:
    """Raise one of `_DAMAGES` for contents that a queue cannot have."""
    machine = _filled(queue, held)
    order, parts = machine.elements, queue.gives
    if len(order) != held.found["size"] or len(order.contents()[1]) != len(held.tensors):
        raise ValueError(f"{held.found['size']} elements of {len(held.tensors)} tensors are told, others are there")
    seen = {(place, part.dtype, part.shape) for element in order for place, part in enumerate(element)}
    seen |= {(place, part.dtype, part.shape) for place, part in order.begun()}
    if any(len(element) != len(parts) for element in order):
        raise ValueError(f"an element has other than {len(parts)} tensors")
    for place, dtype, shape in seen:
        kind, sizes = parts[place]
        check_part(queue, place, sizes, Spec(dtype, tuple(shape)))
        if dtype != kind:
            raise TypeError(f"component {place} is {dtype_name(kind)}, not {dtype_name(dtype)}")


def others(
    facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], queues: Mapping[str, Queue]
) -> dict[str, SavedQueue]:
    """The file's records of queues that are not among ``queues``, by label."""
    found = {label: SavedQueue(about, {}) for label, about in facts.items() if label not in queues}
    for key, tensor in tensors.items():
        if (label := key.removeprefix(_MARK).rpartition("/")[0]) in found:
            found[label].tensors[key] = tensor
    return found


def _filled(queue: Queue, held: QueueSnapshot) -> QueueMachine:
    machine = made(queue)
    machine.fill(held.found, held.tensors)
    return machine


def _described(queue: Queue) -> dict[str, Any]:
    """The kind, components and options, as JSON: equal for queues that can restore each other's contents."""
    shapes = [[dtype_name(kind), None if shape is None else list(shape)] for kind, shape in queue.components]
    options = {name: queue.options[name] for name in ("parts", "rows", "per_row") if name in queue.options}
    return {"kind": queue.kind, "components": shapes, "options": options}


def _words(about: Mapping[str, Any]) -> str:
    parts = ", ".join(f"{dtype} {'any' if shape is None else shape}" for dtype, shape in about["components"] or ())
    options = "".join(f", {name} {value}" for name, value in (about["options"] or {}).items())
    return f"of kind {about['kind']} ({parts}{options})"


def _packed(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[Any], torch.Tensor]:
    """Concatenate tensors into one per dtype, grouped by shape.

    Also the number of that dtype, the shape and the count of these, and for each tensor which of them it is one of.

    >>> groups, shapes, places = _packed([torch.tensor(1), torch.zeros(2), torch.tensor(3)])
    >>> [group.tolist() for group in groups], shapes, places.tolist()
    ([[1, 3], [0.0, 0.0]], [[0, [], 2], [1, [2], 1]], [0, 1, 0])
    """
    alike: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.shape), []).append(tensor)
    of: dict[torch.dtype, list[torch.Tensor]] = {}
    for (dtype, _), some in alike.items():
        of.setdefault(dtype, []).append(torch.stack([tensor.cpu() for tensor in some]).reshape(-1))
    dtypes = list(of)
    shapes = [[dtypes.index(dtype), list(shape), len(some)] for (dtype, shape), some in alike.items()]
    numbers = {key: number for number, key in enumerate(alike)}
    places = torch.tensor([numbers[tensor.dtype, tensor.shape] for tensor in tensors], dtype=torch.int32)
    return [torch.cat(parts) for parts in of.values()], shapes, places


def _unpacked(groups: Sequence[torch.Tensor], shapes: Sequence[Any], places: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that were packed, each in memory of its own."""
    if sum(many for _, _, many in shapes) != len(places):  # before they are made: those of no size need no bytes
        raise ValueError("there are other tensors than those that are told of")
    starts, rows = [0] * len(groups), []
    for number, shape, many in shapes:
        start, length = starts[number], many * math.prod(shape)
        starts[number] = start + length
        rows.append(iter(groups[number].narrow(0, start, length).reshape(many, *shape).unbind(0)))
    found = [next(rows[place], None) for place in places.tolist()]
    if any(tensor is None for tensor in found) or any(next(left, None) is not None for left in rows):
        raise ValueError("there are other tensors than those that are told of")
    return [tensor.clone() for tensor in found if tensor is not None]
