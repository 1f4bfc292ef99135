"""What queues hold, as facts and tensors for a file, and queues that hold it again.

What is held is of one moment, as if all steps under way were stopped then: what they took is in its queue, unless they
put elements, too. Pure, but for the machines of the queues that it asks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch

from tfnb.errors import CheckpointCorrupt, CheckpointIncompatible, NotFound
from tfnb.graph.queue import Queue
from tfnb.graph.spec import dtype_name
from tfnb.state import checkpoint
from tfnb.state.orders import Element
from tfnb.state.queue_machine import QueueMachine, become, copied
from tfnb.state.queue_operations import machine_of, made, ordered

_MARK = "@"  # begins the keys of queues


@dataclass(frozen=True, slots=True)
class Held:
    """What a queue holds: ``found`` as JSON, and tensors."""

    found: Mapping[str, Any]
    tensors: Sequence[torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def copy(self) -> Held:
        """The same in memory of its own."""
        return Held(self.found, [tensor.clone() for tensor in self.tensors])

    @property
    def marks(self) -> Mapping[str, int]:
        """Of the last element of each source, see `tfnb.state.source_puts`."""
        return dict(self.found["marks"])


class Saved(NamedTuple):
    """What a file has of one queue: facts, and tensors by their keys."""

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


def held_by(queues: Mapping[str, Queue]) -> dict[str, Held]:
    """What queues of this process hold, at one moment; those of other processes are left out."""
    machines = {
        label: machine for label, queue in queues.items() if isinstance(machine := machine_of(queue), QueueMachine)
    }
    found = copied({machine: ordered(queues[label]) for label, machine in machines.items()})
    return {label: Held(*one) for label, one in zip(machines, found, strict=True)}


def in_front(queue: Queue, held: Held, elements: Sequence[Element]) -> Held:
    """What a queue would hold if these came next."""
    machine = _filled(queue, held)
    machine.put_front(elements)
    (found,) = copied({machine: ordered(queue)})
    return Held({**found[0], "marks": held.found["marks"]}, found[1])


def ready_to_hold(queues: Mapping[str, Queue], held: Mapping[str, Held]) -> Callable[[], None]:
    """What lets queues of this process hold this instead of what they hold now, all at one moment, and cannot fail."""
    pairs = [(machine_of(queues[label]), _filled(queues[label], one)) for label, one in held.items()]
    return partial(become, {machine: other for machine, other in pairs if isinstance(machine, QueueMachine)})


def written(queues: Mapping[str, Queue], held: Mapping[str, Held]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Facts and tensors for a file. Tensors that are alike become one."""
    facts, tensors = dict[str, Any](), dict[str, torch.Tensor]()
    for label, one in held.items():
        places, stacked = _stacked(one.tensors)
        facts[label] = {**_described(queues[label]), "found": {**one.found, "marks": {}}, "places": places}
        tensors |= {f"{_MARK}{label}/{group}": tensor for group, tensor in enumerate(stacked)}
    return facts, tensors


def split(
    tensors: Mapping[str, torch.Tensor], labels: Iterable[str]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors of a file: those of Variables, and those of its queues, which have these labels."""
    marks = tuple(f"{_MARK}{label}/" for label in labels)
    queued = {key: tensor for key, tensor in tensors.items() if key.startswith(marks)}
    return {key: tensor for key, tensor in tensors.items() if key not in queued}, queued


def match(
    facts: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    queues: Mapping[str, Queue],
    *,
    needed: Container[Queue],
) -> dict[str, Held]:
    """What each queue is to hold, as a file says that has this of queues; nothing is changed.

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
        about = dict(facts[label])
        wanted, saved = _described(queue), {key: about.get(key) for key in _described(queue)}
        if wanted != saved:
            raise CheckpointIncompatible(
                f"queue {label} is {_words(wanted)}, the checkpoint holds {_words(saved)}; nothing was assigned"
            )
        try:
            groups = [tensors[f"{_MARK}{label}/{group}"] for group in range(len({*about["places"]}))]
            found[label] = Held(about["found"], _unstacked(about["places"], groups))
            _filled(queue, found[label])
        except (KeyError, TypeError, ValueError, IndexError, StopIteration, RuntimeError) as error:
            raise CheckpointCorrupt(f"the checkpoint has damaged contents of queue {label}: {error!r}") from error
    return found


def others(
    facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], queues: Mapping[str, Queue]
) -> dict[str, Saved]:
    """What a file that has this of queues has of others than these, by label."""
    found = {label: Saved(about, {}) for label, about in facts.items() if label not in queues}
    for key, tensor in tensors.items():
        if (label := key.removeprefix(_MARK).rpartition("/")[0]) in found:
            found[label].tensors[key] = tensor
    return found


def _filled(queue: Queue, held: Held) -> QueueMachine:
    machine = made(queue)
    machine.fill(held.found, held.tensors)
    return machine


def _described(queue: Queue) -> dict[str, Any]:
    """What decides whether a queue can hold what another one held, as JSON."""
    shapes = [[dtype_name(kind), None if shape is None else list(shape)] for kind, shape in queue.components]
    options = {name: queue.options[name] for name in ("parts", "rows", "per_row") if name in queue.options}
    return {"kind": queue.kind, "components": shapes, "options": options}


def _words(about: Mapping[str, Any]) -> str:
    parts = ", ".join(f"{dtype} {'any' if shape is None else shape}" for dtype, shape in about["components"] or ())
    options = "".join(f", {name} {value}" for name, value in (about["options"] or {}).items())
    return f"of kind {about['kind']} ({parts}{options})"


def _stacked(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[torch.Tensor]]:
    """Tensors of one dtype and shape as one, and in which of them each is, in its order.

    >>> places, groups = _stacked([torch.tensor(1), torch.zeros(2), torch.tensor(3)])
    >>> places, [tuple(group.shape) for group in groups]
    ([0, 1, 0], [(2,), (1, 2)])
    """
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.shape), []).append(tensor.cpu())
    numbers = {key: number for number, key in enumerate(groups)}
    return [numbers[tensor.dtype, tensor.shape] for tensor in tensors], list(map(torch.stack, groups.values()))


def _unstacked(places: Sequence[int], groups: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that were stacked, each in memory of its own."""
    rows = [iter(group.unbind(0)) for group in groups]
    return [next(rows[place]).clone() for place in places]
