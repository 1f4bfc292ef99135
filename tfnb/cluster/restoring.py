"""Variables and queues of a cluster become what a file holds: all of them, or none.

First everything that may fail goes to the servers, where it lies beside what is there. Then, with no step in between,
all servers change. A server that is lost before ends the cluster as it was; of one that is lost while they change, the
rest is done here, where everything is then.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tfnb.cluster import connected
from tfnb.cluster.contents_there import Brought, Copies
from tfnb.cluster.queues_there import CONFIRM, RemoteQueue
from tfnb.errors import TfnbError, Unavailable
from tfnb.graph import Variable
from tfnb.graph.queue import Queue
from tfnb.recording.marks.notes import user_level
from tfnb.state.queue_contents import Held, labelled, ready_to_hold
from tfnb.state.queue_machine import QueueMachine

if TYPE_CHECKING:
    from tfnb.cluster.driver import Cluster

HOME = 2 * CONFIRM  # seconds that queues have to come home from a cluster that is lost

Values = Mapping[Variable, torch.Tensor]


@contextmanager
def brought(cluster: Cluster, values: Values, held: Mapping[Queue, Held]) -> Iterator[Callable[[], None]]:
    """A block in which a call lets Variables and queues be this; until then nothing is changed.

    Steps that used one of the queues raise Aborted. Raises what a server says that has no room, or is lost.
    """
    at, own = cluster._sorted(held)
    there = {variable: value for variable, value in values.items() if variable in cluster._variables.held}
    copies: dict[int, Copies] = {}
    for queue, (shard, key) in at.items():
        copies.setdefault(shard, {})[key] = held[queue].found, held[queue].tensors
    pieces: dict[int, dict[str, torch.Tensor]] = {}
    for variable, value in there.items():
        for piece in cluster._variables.held.homes[variable.key]:
            pieces.setdefault(piece.shard, {})[piece.key] = piece.of(value.cpu())
    with _saying_so():
        lies: Brought = cluster._do("bringing what is restored", None, cluster._engine.contents.bring, copies, pieces)
    try:
        yield partial(_become, cluster, lies, values, there, held, {queue: queue.machine for queue in at}, own)
    finally:
        if not lies.is_decided and cluster._engine.lost is None:
            cluster._do("dropping what was not restored", None, cluster._engine.contents.drop, lies)


def _become(
    cluster: Cluster, lies: Brought, values: Values, there: Values, held: Mapping[Queue, Held],
    homes: Mapping[Queue, Any], own: Mapping[str, Queue],
) -> None:  # fmt: skip
    here = {variable: value for variable, value in values.items() if variable not in there}
    empty = list(own.values())
    try:
        cluster._do("restoring", None, cluster._engine.refill, lies, [variable.key for variable in there])
    except TfnbError as error:
        if not lies.is_decided or cluster._engine.lost is None:
            with _saying_so():
                raise
        _wait_for(homes)
        here, empty = dict(values), [*empty, *(queue for queue, home in homes.items() if home.is_lost)]
        connected.notices.clear()
        text = f"a server was lost during the restore; all that was restored is here now: {error}"
        warnings.warn(text, stacklevel=user_level(None))
    else:
        for variable in there:
            cluster._variables.held.superseded(variable)
        for queue in homes:
            if isinstance(queue.machine, RemoteQueue):
                queue.machine.holds(held[queue].found)
    for variable, value in here.items():
        variable.set(value)
    again = labelled(empty)
    ready_to_hold(again, {label: held[queue] for label, queue in again.items()})()


@contextmanager
def _saying_so() -> Iterator[None]:
    try:
        yield
    except TfnbError as error:
        error.message = f"{error.message}\n  Nothing was restored: no Variable or queue was changed by it."
        raise


def _wait_for(queues: Mapping[Queue, Any]) -> None:
    """Until queues of a cluster that is lost are here."""
    end = time.monotonic() + HOME
    while away := [queue.name for queue in queues if not isinstance(queue.machine, QueueMachine)]:
        if time.monotonic() > end:
            raise Unavailable(f"queues {', '.join(away)} did not come home within {HOME:g} s from a lost cluster")
        time.sleep(0.01)
