"""How the tasks of a cluster work together, for options that a word does not say. Imports optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tfnb.errors import InvalidArgument
from tfnb.train.optimizer import Optimizer
from tfnb.train.sandblaster import Sandblaster

LONGEST_WARM_START = 1000  # steps, of ``Downpour(warm_start="auto")``


@dataclass(frozen=True, slots=True)
class SyncReplicas:
    """A synchronous step of ``m`` gradients, each of its part of the batch; ``n`` tasks compute them.

    n: how many compute tasks the cluster has to have; None: as many as there are. ``n - m`` of them are spare: they
    compute copies of parts, the first of each part counts, and the others are dropped; the status of the cluster shows
    how many of each task. So each row of a batch counts once, and the numbers are those of m tasks without spare ones.
    atomic: as in TensorFlow, whether all variables average gradients of the same tasks. Copies of a part are equal, so
    both say the same here.
    distinct: each task gives one gradient to a step. With ``distinct=False`` there may be fewer than m tasks, and with
    ``elastic=True`` a step may be made of fewer gradients. In both cases the tasks that are there divide the rows of
    the batch. Else training waits for a task that its nanny starts again, and then raises StepAborted.

    >>> SyncReplicas(2, 3).backup
    1
    """

    m: int
    n: int | None = None
    atomic: bool = True
    distinct: bool = True
    elastic: bool = False

    def __post_init__(self) -> None:
        for name, count in (("m", self.m), ("n", 1 if self.n is None else self.n)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise InvalidArgument(f"SyncReplicas: {name} is a number of tasks, an int of at least 1, not {count!r}")
        if self.n is not None and self.m > self.n and self.distinct:
            raise InvalidArgument(
                f"SyncReplicas: a step of m={self.m} gradients of different tasks needs as many tasks, not n={self.n}: "
                "give distinct=False, and a task may compute more than one"
            )

    @property
    def backup(self) -> int:
        """Spare tasks; 0 where nobody said how many tasks there are."""
        return max(0, (self.n or self.m) - self.m)


@dataclass(frozen=True, slots=True)
class LocalSGD:
    """Tasks that train on copies of their own, and average these after ``every`` steps.

    A step is a batch of ``fit``, as in mode ``"sync"``: the tasks divide its rows, but each applies the gradient of its
    own rows to its own copy of the Variables and optimizer slots. After ``every`` steps, at the end of the data, and
    where a training stands still between two passes (for validation data), the tasks meet: each Variable that the step
    writes becomes the mean over the tasks, weighted by the rows that each has computed since the last meeting; of a
    Variable of whole numbers all get that of the first task. So a step sends a fraction of the bytes of
    ``"allreduce"``, and no step waits for the slowest task. ``every=1`` with plain SGD and a loss that is a mean over
    rows is ``"sync"``.

    outer: an optimizer that makes the step from one meeting to the next, as DiLoCo does (Douillard et al., 2023, with
    ``tfnb.train.Nesterov(0.7, 0.9)``). Its gradient of a trainable Variable is the value of the last meeting minus the
    mean of this one; all else that tasks have is averaged. Its slots are Variables of the graph: `Session.save` and
    checkpoints hold them, and the same object goes on with them in the next training. Without ``outer``, all take the
    mean; ``SGD(1.0)`` does so up to rounding, 1e-15 of the values in float64.

    A task that is lost costs the steps since the last meeting: they are dropped, and taken again by the tasks that are
    left, so that each row counts once. Checkpoints, callbacks and other readers see the values of meetings.

    The method is local SGD (Stich, 2019); tasks of `Downpour` meet at servers instead, each at a time of its own.

    >>> from tfnb.train import Nesterov
    >>> LocalSGD(50, outer=Nesterov(0.7, 0.9)).every
    50
    """

    every: int = 50
    outer: Optimizer | None = None

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise InvalidArgument(
                f"LocalSGD: every is the number of steps between two meetings, an int of at least 1, not {self.every!r}"
            )
        if self.outer is not None and not isinstance(self.outer, Optimizer):
            raise InvalidArgument(
                "LocalSGD: outer is an optimizer of tfnb.train, such as tfnb.train.Nesterov(0.7, 0.9), or None, not "
                f"{self.outer!r}"
            )


@dataclass(frozen=True, slots=True)
class Downpour:
    """Asynchronous tasks that train on copies of their own, and meet the parameter servers now and then.

    Each step is a whole batch of one task. A task adds up the gradients of its steps and pushes the sum after every
    ``n_push`` of them; the servers take it as one step of the recorded optimizer. After every ``n_fetch`` steps it
    fetches the Parameters, and all else that gradients read. In between, a local step applies the gradient of each
    step to the task's copy, by the same optimizer and its rate; the next fetch replaces the copy.
    ``Downpour(1, 1)`` applies what ``mode="async"`` applies, bit for bit.

    The servers' optimizer slots count: Adagrad divides by the gradients that all tasks have pushed. For its local steps
    a task has slots of its own, which begin with the servers' values and are neither fetched nor pushed. Schedules and
    step counters on the servers count pushes. Of what a step writes along no gradient, such as running statistics of
    batch norm, servers take that of the last step of a push.

    A push counts once. The last one of a pass, or of batches that are drawn here, may have fewer steps. A task that is
    lost costs the steps that it has not pushed: the other tasks take them again. Tasks stand still where nothing is
    unpushed, so that a checkpoint or another reader sees whole pushes. They go on from their copies, or, if others have
    written meanwhile, from the values of then. ``resume=`` goes on as after ``"async"``.

    warm_start: the first steps of a training, taken by one task before the others begin, in whole pushes. ``"auto"``:
    as many as the gradients ask for. At each fetch that follows a push the task computes the gradient of an earlier
    batch again, of the values of now: the change is what one round of pushes does to a gradient, and the gradients of
    T tasks are as many rounds old as there are other tasks. They begin once ``T - 1`` times the change is at most half
    of the gradient, at the latest after 1,000 steps. Measured at the begin of each training, also a resumed one.

    The method is Downpour SGD of DistBelief (Dean et al., 2012), where the first push is made after the first step.

    >>> Downpour(n_fetch=5, n_push=5, warm_start=100).n_push
    5
    >>> Downpour(5, 5, warm_start="auto").most_alone
    1000
    """

    n_fetch: int = 1
    n_push: int = 1
    warm_start: int | Literal["auto"] = 0

    @property
    def most_alone(self) -> int:
        """The most steps that one task takes before the others begin."""
        return LONGEST_WARM_START if isinstance(self.warm_start, str) else self.warm_start

    def __post_init__(self) -> None:
        for name, least, text in (
            ("n_fetch", 1, "the number of steps between two fetches of the Parameters"),
            ("n_push", 1, "the number of steps whose gradients are pushed together"),
            ("warm_start", 0, "'auto', or the number of steps that one task takes before the others begin"),
        ):
            count = getattr(self, name)
            if name == "warm_start" and count == "auto":
                continue
            if isinstance(count, bool) or not isinstance(count, int) or count < least:
                raise InvalidArgument(f"Downpour: {name} is {text}, an int of at least {least}, not {count!r}")


TaskMode = str | SyncReplicas | LocalSGD | Downpour | Sandblaster  # the ``mode`` of `tfnb.fit`
