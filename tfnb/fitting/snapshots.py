"""Snapshots of a training in memory: go back to one of its steps, and on from there in the same or another way."""

from __future__ import annotations

import torch

from tfnb.errors import FailedPrecondition, InvalidArgument, NotFound
from tfnb.session import Moment, default_session
from tfnb.session.structures import Fetches, graph_of
from tfnb.train.callbacks import Progress


class Snapshots:
    """A callback of `fit` that copies the Variables every so many steps, in this process.

    fetch: anything of the graph that is trained. every: steps between two snapshots. keep: how many there are at most;
    the oldest goes first. `restore` puts the Variables, the random streams and the place in the data back, so that
    ``fit(..., resume=True)`` takes the same steps again, and ``fit(...)`` with other options is a branch. What the
    queues of the graph hold is in a snapshot, too, as if the steps under way were stopped then, and so are the numbers
    in the param groups of torch optimizers and the states of schedulers that `Session.reads` was given. Raises
    InvalidArgument for ``every`` or ``keep`` below 1.

    >>> import tfnb
    >>> w = torch.nn.Parameter(torch.zeros(1))
    >>> with tfnb.record():
    ...     x = tfnb.placeholder(torch.ones(2))
    ...     train = tfnb.train.SGD(0.25).minimize((w - x).square().mean())
    >>> snapshots = tfnb.Snapshots(train, every=2)
    >>> _ = tfnb.fit(train, {x: torch.ones(8)}, epochs=2, batch_size=2, callbacks=[snapshots])
    >>> snapshots
    <Snapshots at steps 2, 4, 6, 8: 16 bytes>
    >>> later = w.item()
    >>> snapshots.restore(2)
    >>> round(w.item(), 6), tfnb.fit(train, {x: torch.ones(8)}, epochs=2, batch_size=2, resume=True).steps
    (0.75, 6)
    >>> w.item() == later
    True
    """

    def __init__(self, fetch: Fetches, *, every: int = 100, keep: int = 10) -> None:
        for name, value in (("every", every), ("keep", keep)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidArgument(f"{name} is an int of at least 1, not {value!r}")
        self._session = default_session(graph_of(fetch))
        self._every, self._keep = every, keep
        self._taken: dict[int, Moment] = {}

    @property
    def steps(self) -> list[int]:
        """The steps with snapshots."""
        return sorted(self._taken)

    @property
    def nbytes(self) -> int:
        """Bytes that they take."""
        return sum(moment.nbytes for moment in self._taken.values())

    def on_step(self, progress: Progress) -> None:
        """`fit` tells that a step is done.

        Raises FailedPrecondition as `take` does.
        """
        if progress.step % self._every == 0:
            self.take(progress.step)

    def take(self, step: int) -> None:
        """Copy the Variables of now under this number.

        Raises FailedPrecondition while servers of a cluster hold the Variables.
        """
        session = self._session
        if session.cluster is not None:
            raise FailedPrecondition(
                "snapshots are of trainings in this process, and servers hold the Variables: close the cluster, or use "
                "Session.save"
            )
        self._taken.pop(step, None)  # one that is taken again is the newest
        self._taken[step] = session.state.moment()
        while len(self._taken) > self._keep:
            del self._taken[next(iter(self._taken))]

    def values(self, step: int) -> dict[str, torch.Tensor]:
        """The Variables at a step, by name; the tensors are the snapshot's own.

        Raises NotFound for a step without a snapshot.
        """
        if step not in self._taken:
            there = ", ".join(map(str, self.steps)) or "none"
            raise NotFound(f"there is no snapshot of step {step}; there are: {there}")
        return dict(self._taken[step].values)

    def restore(self, step: int) -> None:
        """Restore the state after this step. Variables and queues made since stay unchanged.

        Steps under way that used one of the queues raise Aborted: run them again. Raises NotFound for a step without a
        snapshot.
        """
        self.values(step)  # there is one
        self._session.state.go_back(self._taken[step].copy())

    def __repr__(self) -> str:
        return f"<Snapshots at steps {', '.join(map(str, self.steps)) or 'none'}: {self.nbytes:,} bytes>"
