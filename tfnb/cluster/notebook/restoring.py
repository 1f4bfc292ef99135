"""Restore Variables and queues of a cluster from a file's contents: all of them, or none.

First everything that may fail goes to the servers, where it lies beside what is there. Then, with no step in between,
all servers change. A server that is lost before ends the cluster as it was; of one that is lost while they change, the
rest is done here, where everything is then.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tfnb.cluster import connected
from tfnb.cluster.notebook.variables_there import VariablesThere
from tfnb.cluster.queues.contents_there import Copies, ShardContents
from tfnb.cluster.queues.queues_there import CONFIRM, RemoteQueue
from tfnb.errors import TfnbError, Unavailable
from tfnb.graph import Variable
from tfnb.graph.queue import Queue
from tfnb.recording.marks.notes import user_level
from tfnb.state.queue_contents import QueueSnapshot, labelled, ready_to_hold
from tfnb.state.queue_machine import QueueMachine

HOME = 2 * CONFIRM  # seconds that queues have to come home from a cluster that is lost

Values = Mapping[Variable, torch.Tensor]


@contextmanager
def brought(
    cluster: VariablesThere, values: Values, held: Mapping[Queue, QueueSnapshot], at: Mapping[Queue, tuple[int, str]],
    own: Mapping[str, Queue],
) -> Iterator[Callable[[], None]]:  # fmt: skip
    """A block with a function that restores Variables and queues; until its call nothing is changed.

    ``at``: shard and key of the queues on servers; ``own``: the others, by label.

    Steps that used one of the queues raise Aborted. Raises what a server says that has no room, or is lost.
    """
    there = {variable: value for variable, value in values.items() if variable in cluster.held}
    copies: dict[int, Copies] = {}
    for queue, (shard, key) in at.items():
        copies.setdefault(shard, {})[key] = held[queue].found, held[queue].tensors
    pieces: dict[int, dict[str, torch.Tensor]] = {}
    for variable, value in there.items():
        for piece in cluster.held.homes[variable.key]:
            pieces.setdefault(piece.shard, {})[piece.key] = piece.of(value.cpu())
    with _saying_so():
        lies: ShardContents = cluster.do(
            "bringing what is restored", None, cluster.engine.contents.bring, copies, pieces
        )
    end: list[Exception] = []  # what the user is told when all is done
    try:
        yield partial(_become, cluster, lies, values, there, held, {queue: queue.machine for queue in at}, own, end)
        for one in end:
            if not isinstance(one, Warning):
                raise one
            warnings.warn(one, stacklevel=user_level(None))
    finally:
        if not lies.is_decided and cluster.engine.lost is None:
            cluster.do("dropping what was not restored", None, cluster.engine.contents.drop, lies)


def _become(
    cluster: VariablesThere, lies: ShardContents, values: Values, there: Values, held: Mapping[Queue, QueueSnapshot],
    homes: Mapping[Queue, Any], own: Mapping[str, Queue], end: list[Exception],
) -> None:  # fmt: skip
    here = {variable: value for variable, value in values.items() if variable not in there}
    lost: TfnbError | None = None
    try:
        cluster.do("restoring", None, cluster.engine.refill, lies, [variable.key for variable in there])
    except TfnbError as error:
        if not lies.is_decided:
            with _saying_so():
                raise
        if cluster.engine.lost is None:
            raise
        here, lost = dict(values), error
        connected.notices.clear()
    else:
        for variable in there:
            cluster.held.superseded(variable)
        for queue in homes:
            if isinstance(queue.machine, RemoteQueue):
                queue.machine.holds(held[queue].found)
    for variable, value in here.items():
        variable.set(value)
    _hold(own.values(), held)
    if lost is not None:
        late = _late(homes)
        _hold([queue for queue, home in homes.items() if home.is_lost], held)
        text = f"a server was lost during the restore; all that was restored is here now: {lost}"
        end.append(late or UserWarning(text))


def _hold(queues: Iterable[Queue], held: Mapping[Queue, QueueSnapshot]) -> None:
    """Let queues that are here be this."""
    again = labelled(queues)
    ready_to_hold(again, {label: held[queue] for label, queue in again.items()})()


@contextmanager
def _saying_so() -> Iterator[None]:
    try:
        yield
    except TfnbError as error:
        error.message = f"{error.message}\n  Nothing was restored: no Variable or queue was changed by it."
        raise


def _late(queues: Mapping[Queue, Any]) -> Unavailable | None:
    """Wait until queues of a cluster that is lost are here; the error where they do not come."""
    end = time.monotonic() + HOME
    while away := [queue.name for queue in queues if not isinstance(queue.machine, QueueMachine)]:
        if time.monotonic() > end:
            names = ", ".join(away)
            return Unavailable(
                f"a server was lost during the restore, and queues {names} did not come home within {HOME:g} s from "
                "the others; all else that was restored is here now: restore again"
            )
        time.sleep(0.01)
    return None
