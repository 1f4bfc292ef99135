"""Dask's adaptive scaling closes workers that compute no Dask tasks, and with them compute tasks and servers of ours.

Where the notebook has the cluster object, as in ``Client(cluster)``, its minimum is held up while it is connected.
Where it has only an address, the scheduler's registry knows whether somebody asks it how many workers it needs.
"""

from __future__ import annotations

from distributed import Client
from distributed.deploy.adaptive_core import AdaptiveCore


class Adapting:
    """The adaptive scaling of a client's cluster, if the notebook has the cluster object."""

    def __init__(self, client: Client) -> None:
        self._cluster: object = client.cluster
        self._held: AdaptiveCore | None = None
        self._was = self._to = 0

    @property
    def is_known(self) -> bool:
        """Whether the notebook has the cluster object."""
        return self._cluster is not None

    @property
    def is_starting(self) -> bool:
        """Whether the cluster wants workers that are not there, or may yet; True where that is not known."""
        plan = getattr(self._cluster, "plan", None)
        return not plan or self._adaptive() is not None or len(plan) > len(getattr(self._cluster, "observed", ()))

    def hold(self, workers: int) -> bool:
        """Raise the minimum of workers, up to the maximum; returns whether the minimum was lower before."""
        found = self._adaptive()
        if found is None:
            return False
        workers = int(min(workers, found.maximum))
        if found.minimum >= workers:
            return False
        if found is not self._held:
            self._held, self._was = found, found.minimum
        found.minimum = self._to = workers
        return True

    def release(self) -> None:
        """Restore the former minimum, unless changed by somebody else; harmless if repeated."""
        if self._held is not None and self._held.minimum == self._to:
            self._held.minimum = self._was
        self._held = None

    def _adaptive(self) -> AdaptiveCore | None:
        found = getattr(self._cluster, "_adaptive", None)  # Dask has no public name for it
        is_on = isinstance(found, AdaptiveCore) and getattr(found, "state", "running") in ("starting", "running")
        return found if is_on else None
