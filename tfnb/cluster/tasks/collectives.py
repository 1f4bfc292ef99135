"""Sums among the ranks of an all-reduce: process groups of gloo inside of Dask's workers, and the buckets they sum.

One group for each generation: its store listens on the first rank, at a port of its own. Groups are no default group of
torch, so the user's own use of `torch.distributed` goes on beside them. A call of gloo cannot be cancelled: a waiting
rank that is stopped abandons the call and the group, whose destructor waits for the call. Imports no Dask.
"""

from __future__ import annotations

import threading
import time
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tfnb.cluster.wire.messages import Failure, NotDone
from tfnb.errors import Cancelled, FailedPrecondition, NonFiniteGradient, Unimplemented
from tfnb.execution.tracing.health import is_finite
from tfnb.graph import Spec
from tfnb.passes.flow.merges import ROWS, Weight, number_of

FORMS = 15.0  # seconds in which all ranks of a generation meet
LOOK = 0.25  # seconds between looks whether a call is wanted still
WAITS = 600.0  # seconds that a call waits for the other ranks at most; the notebook finds a lost one long before
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.bool: torch.uint8}  # dtypes summed as others
AVERAGED, ADDED = ("grad", "mean"), ("sum", "weight", "any")  # kinds of values
SUMMED = (torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64)


def is_summed(dtype: torch.dtype) -> bool:
    """Whether ranks can sum values of a dtype, as they are or as a wider one.

    >>> is_summed(torch.bfloat16), is_summed(torch.int16)
    (True, False)
    """
    return WIDE.get(dtype, dtype) in SUMMED


class Rendezvous(NamedTuple):
    """Meeting point of a generation's ranks, with the number of one rank and of all."""

    name: str
    host: str
    port: int
    rank: int
    size: int


def store(host: str) -> dist.TCPStore:
    """The store of the first rank, where the other ranks meet."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=FORMS))


class Group:
    """The process group of one generation, on one rank.

    is_wanted: asked while a call waits. A call raises Cancelled when unwanted, and NotDone if another rank is gone.
    """

    def __init__(
        self, meeting: Rendezvous, here: str, held: dist.TCPStore | None, is_wanted: Callable[[], bool]
    ) -> None:
        self.rank, self.size, self._is_wanted = meeting.rank, meeting.size, is_wanted
        self._store = held or dist.TCPStore(
            meeting.host, meeting.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=FORMS)
        )
        gloo: Any = dist.ProcessGroupGloo  # its methods are not in torch's stubs
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=here)]
        options._timeout = timedelta(seconds=WAITS)
        self._held = [gloo(dist.PrefixStore(meeting.name, self._store), meeting.rank, meeting.size, options)]
        weakref.finalize(self, _destroy, self._held).atexit = False

    @property
    def _group(self) -> Any:
        return self._held[0]

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        """All-reduce each tensor by sum, in place, with the same bits on all ranks."""
        self._all([self._group.allreduce([tensor], dist.AllreduceOptions()) for tensor in tensors])

    def most(self, tensor: torch.Tensor) -> None:
        """All-reduce a tensor by element-wise maximum, in place."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._all([self._group.allreduce([tensor], options)])

    def from_first(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast tensors from the first rank, in place."""
        self._all([self._group.broadcast(tensor, 0) for tensor in tensors])

    def _all(self, works: Sequence[dist.Work]) -> None:
        until = time.monotonic() + WAITS
        for work in works:
            while not self._is_over(work):
                if not self._is_wanted():
                    raise Cancelled("stopped while it waited for other ranks")
                if time.monotonic() > until:
                    raise NotDone(_missed(f"no answer within {WAITS:g} s"))

    def _is_over(self, work: dist.Work) -> bool:
        try:
            work.wait(timedelta(seconds=LOOK))
        except RuntimeError as error:
            if not work.is_completed():
                return False
            if not work.is_success():
                raise NotDone(_missed(str(error))) from error
        return True


def _destroy(held: list[Any]) -> None:
    """Drop the only reference to a process group, in a thread of its own.

    The destructor joins the threads of an abandoned call, up to WAITS. In the thread that happens to collect the group,
    often the event loop of a worker of Dask, it would stop everything else.
    """
    threading.Thread(target=held.clear, name="tfnb-ranks-end", daemon=True).start()


def _missed(why: str) -> Failure:
    """The failure to reach another rank: the notebook finds out whether that rank is lost."""
    text = f"a sum over ranks ended: {why.partition('. This is')[0]}"
    return Failure("Unavailable", text, {"missed": True, "peer": "another rank"})


def formed(meeting: Rendezvous, here: str, held: dist.TCPStore | None, is_wanted: Callable[[], bool]) -> Future[Group]:
    """A group, formed in a thread of its own: the call cannot be ended before all ranks are there, or time is up."""
    future: Future[Group] = Future()

    def form() -> None:
        try:
            future.set_result(Group(meeting, here, held, is_wanted))
        except BaseException as error:
            future.set_exception(NotDone(_missed(f"ranks did not meet: {error}")))

    threading.Thread(target=form, name="tfnb-ranks", daemon=True).start()
    return future


class Bucket:
    """The contributions of a rank to a step's sum, in one flat tensor for each dtype, each followed by a word "ready".

    Gradients and means are weighted by rows, or by a number of each rank that is summed along, in the precision of the
    gradients. Whether there is a gradient is the number of ranks that have one. Other values but sums are the first
    rank's: the other ranks contribute zeros.

    >>> bucket = Bucket(["grad", "value"], [Spec(torch.float32, (2,)), Spec(torch.float32, ())])
    >>> bucket.fill([torch.tensor([2.0, 4.0]), torch.tensor(7.0)], 0.5, is_first=True)
    >>> bucket.flats[torch.float32]
    tensor([1., 2., 7., 1.])
    >>> bucket.values()
    [tensor([1., 2.]), tensor(7.)]
    """

    def __init__(self, kinds: Sequence[str], specs: Sequence[Spec], weights: Sequence[Weight] = ()) -> None:
        self._kinds, self._specs, self._weights = kinds, specs, weights or [ROWS] * len(kinds)
        at: dict[torch.dtype, int] = {}
        wide = [WIDE.get(spec.dtype, spec.dtype) for kind, spec in zip(kinds, specs, strict=True) if kind in AVERAGED]

        def place(dtype: torch.dtype, count: int) -> tuple[torch.dtype, int, int]:
            start = at.get(dtype, 0)
            at[dtype] = start + count
            return dtype, start, count

        places = []
        for kind, spec in zip(kinds, specs, strict=True):
            dtype = wide[0] if kind in ("weight", "any") else WIDE.get(spec.dtype, spec.dtype)
            if kind not in (*AVERAGED, *ADDED, "value") or spec.symbols or not is_summed(dtype):
                raise Unimplemented(
                    f"tasks that hold all Variables sum values of a known size, of dtypes that gloo sums; this is "
                    f"{spec}, of kind {kind}: use mode='sync'"
                )
            places.append(place(dtype, torch.Size(spec.sizes({})).numel()))
        marks = {weight: place(wide[0], 2) for weight in self._weights if weight.total is not None}
        self.flats = {dtype: torch.zeros(count + 1, dtype=dtype) for dtype, count in at.items()}
        self._views = [
            self.flats[dtype][start : start + count].view(spec.sizes({}))
            for (dtype, start, count), spec in zip(places, specs, strict=True)
        ]
        self._marks = {  # of each weight the sum of sizes, and the ranks without weight whose gradients are not finite
            weight: self.flats[dtype][start : start + count] for weight, (dtype, start, count) in marks.items()
        }

    def fill(self, tensors: Sequence[torch.Tensor], share: float, *, is_first: bool) -> None:
        """Fill in this rank's contribution. share: of the rows."""
        own = {weight: weight.of(number_of(weight, tensors, share)) for weight in set(self._weights)}
        for weight, mark in self._marks.items():
            mark[0], mark[1] = abs(own[weight]), 0
        for kind, weight, view, tensor in zip(self._kinds, self._weights, self._views, tensors, strict=True):
            by = own[weight]
            if kind in AVERAGED and not by:
                view.zero_()
                self._marks[weight][1] += not is_finite(tensor)
            elif kind in AVERAGED and by != 1.0:
                torch.mul(tensor.to(view.dtype), by, out=view)
            elif kind in (*AVERAGED, *ADDED) or is_first:
                view.copy_(tensor)
            else:
                view.zero_()
        self._say(1)

    def clear(self, ready: int) -> None:
        """Contribute zeros; ``ready`` is 1, or 0 from a rank that cannot take the step."""
        for flat in self.flats.values():
            flat.zero_()
        self._say(ready)

    def _say(self, ready: int) -> None:
        for flat in self.flats.values():
            flat[-1] = ready

    def is_ready(self, size: int) -> bool:
        """Whether every rank was ready, after the sum."""
        return all(int(flat[-1]) == size for flat in self.flats.values())

    def values(self) -> list[torch.Tensor]:
        """The averages, in the dtypes of the specs. Raises NonFiniteGradient if no rank has any weight, and a gradient
        is not finite.
        """
        for size, lost in self._marks.values():
            if not size and lost:
                raise NonFiniteGradient(
                    "nothing counts in the loss of any rank: its divisor is 0, and gradients are NaN; the step was "
                    "dropped"
                )
        return [
            (view / self._whole(weight) if kind in AVERAGED and weight in self._marks else view).to(spec.dtype)
            for kind, weight, view, spec in zip(self._kinds, self._weights, self._views, self._specs, strict=True)
        ]

    def _whole(self, weight: Weight) -> float:
        """The weight of the batch, after the sum; 1 if nothing has any."""
        return weight.of(number_of(weight, self._views, 1.0)) if self._marks[weight][0] else 1.0


def ensure_equal(group: Group, values: Mapping[str, torch.Tensor], step: str) -> None:
    """Raise FailedPrecondition on all ranks unless they have the same bits."""
    check = 0
    for key in sorted(values):
        raw = values[key].detach().contiguous().reshape(-1).view(torch.uint8)
        check = zlib.crc32(raw.numpy().data, check)
    bounds = torch.tensor([check, -check])
    group.most(bounds)
    if int(bounds[0]) != -int(bounds[1]):
        raise FailedPrecondition(
            f"after {step} the ranks hold different values: an update is not deterministic, or memory is faulty. The "
            "values that are kept are those of one rank; mode='sync' updates them in one place"
        )
