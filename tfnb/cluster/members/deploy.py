"""Finding or making a Dask cluster, and starting one task on each of its workers. Dask glue; decides only the roles.

A cluster that is made here listens on 127.0.0.1, has a dashboard only where one is asked for, and is closed by us; what
was handed in is left as it was. Some of the workers become parameter servers; one of them holds several shards where
they are too few.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import uuid
import warnings
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from copy import deepcopy
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import dask
from distributed import Client, KilledWorker, LocalCluster, Nanny, Security, default_client
from distributed.utils import get_mp_context, silence_logging_cmgr

from tfnb.cluster.engine.members import Member
from tfnb.cluster.members.adapting import Adapting
from tfnb.cluster.members.connection import (
    AS_EVER,
    STAGES,
    TOO_FEW,
    ConnectProgress,
    DaskCluster,
    LocalWorkers,
    Requirements,
    Servers,
)
from tfnb.cluster.members.registered import Registration
from tfnb.cluster.tasks.task import TaskActor, versions
from tfnb.cluster.wire.messages import Failure, Ok, Outcome, Peer, raised
from tfnb.cluster.wire.transport import (
    ClientLink,
    Handle,
    is_local,
    parse_address,
    scheduler_address,
    scheduler_of,
    wait,
)
from tfnb.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InsecureAddress,
    InvalidArgument,
    TfnbError,
    Unavailable,
    VersionMismatch,
    ensure_type,
)  # fmt: skip
from tfnb.recording.marks.notes import user_level
from tfnb.recording.marks.while_recording import SharedContext, swapped

T = TypeVar("T")

LOOK = 0.5  # seconds between two looks at who is there
HUSH = 2.0  # seconds
AT_ONCE = 32  # workers that are greeted, or told of the servers, at a time
UNLISTED_WITHIN = 1.0  # seconds after a failed call in which Dask takes a dead worker off its list
_BEFORE = "distributed.nanny.pre-spawn-environ.DASK_DISTRIBUTED__COMM__"  # Dask reads these when it is imported
SETTINGS = {
    f"{_BEFORE}OFFLOAD": "False", f"{_BEFORE}SHARD": "512MiB",  # a large message is not put together again
    "distributed.admin.tick.interval": "500ms",  # 20 ms of Dask's own take two percent of a core in the notebook
    "distributed.admin.system-monitor.interval": "2s",  # each look of Dask's own reads files of /proc, for each process
    "distributed.worker.memory.monitor-interval": "500ms",  # 100 ms take a percent of a core for each worker
    "distributed.worker.profile.enabled": False,  # takes two percent of a core in each worker: no Dask task runs a step
    "distributed.scheduler.worker-ttl": "90s", "distributed.comm.timeouts.connect": "30s",
    "distributed.deploy.lost-worker-timeout": "24h",
}  # fmt: skip
_METHOD = "distributed.worker.multiprocessing-method"
PRELOAD = "tfnb.cluster.tasks.task"  # of the processes of workers
_SCHEMES = ("tcp", "tls", "ws", "wss", "inproc", "unix", "ucx", "ucxx")
_LOST = "Worker holding Actor was lost"  # Dask's words
_ENCRYPTED = ("tls", "wss", "inproc", "unix")


def find(
    cluster: object, wanted: Requirements, security: Security | None, insecure: bool, timeout: float,
    started: LocalWorkers = AS_EVER,
) -> DaskCluster:  # fmt: skip
    """Connect to the user's cluster, or start one; raises Unavailable, InsecureAddress, InvalidArgument or
    DeadlineExceeded.
    """
    wanted.check()
    started.check()
    ensure_type(security, (Security, NoneType), "security of connect")
    place = _found(cluster, wanted, security, insecure, timeout, started)
    if started != AS_EVER and not place.is_ours:
        place.close()
        asked = ", ".join(f"{name}={value!r}" for name, value in started._asdict().items() if value)
        raise InvalidArgument(f"{asked}: this cluster runs already; such options are of one that connect starts")
    return place


def _found(
    cluster: object, wanted: Requirements, security: Security | None, insecure: bool, timeout: float,
    started: LocalWorkers,
) -> DaskCluster:  # fmt: skip
    match cluster:
        case bool() | float() | bytes():
            raise InvalidArgument(f"connect({cluster!r}): a number of compute tasks, an address, a Client or a cluster")
        case None:
            return _default(wanted, timeout, started)
        case int():
            return local(cluster, wanted, timeout, started)
        case str() | Path():
            return _address(str(cluster), wanted, security, insecure, timeout)
        case Client():
            return _client(cluster, wanted, insecure)
    address = getattr(cluster, "scheduler_address", None)
    if isinstance(address, str):
        _check_secure(address, insecure)
        place = _dialled(cluster, address, None, timeout)
        place.wanted = wanted
        return place
    raise InvalidArgument(
        f"connect({type(cluster).__name__}): expected a number of compute tasks, an address, a scheduler file, "
        "a Client, or a cluster with a scheduler_address"
    )


def _default(wanted: Requirements, timeout: float, started: LocalWorkers) -> DaskCluster:
    """Dask's default client, else a cluster of two tasks."""
    try:
        client = default_client()
    except ValueError:
        return local(2, wanted, timeout, started)
    return _client(client, wanted, True)


def _client(client: Client, wanted: Requirements, insecure: bool) -> DaskCluster:
    if client.asynchronous:
        raise InvalidArgument("connect needs a blocking Client: make it with asynchronous=False")
    if client.status != "running" or client.scheduler is None:
        raise Unavailable(f"the Client is {client.status}; connect with a running one")
    _check_secure(scheduler_address(client), insecure)
    return DaskCluster(client, wanted=wanted)


def _address(text: str, wanted: Requirements, security: Security | None, insecure: bool, timeout: float) -> DaskCluster:
    if text.endswith(".json"):
        if not Path(text).is_file():
            raise InvalidArgument(f"there is no scheduler file {text}")
        place = _dialled(None, f"scheduler file {text}", security, timeout, scheduler_file=text)
        try:
            _check_secure(scheduler_address(place.client), insecure)
        except InsecureAddress:
            place.close()
            raise
    else:
        scheme, rest = parse_address(text)
        port = rest.rpartition(":")[2]
        if scheme not in _SCHEMES or (scheme not in ("inproc", "unix") and not port.isdigit()):
            raise InvalidArgument(f"{text!r} is no scheduler address: expected one like tcp://127.0.0.1:8786")
        _check_secure(text, insecure)
        if scheme in ("tls", "wss") and security is None and not dask.config.get("distributed.comm.tls.ca-file"):
            raise InvalidArgument(f"{text} is encrypted: pass security=distributed.Security(...) with its certificates")
        place = _dialled(text, text, security, timeout)
    place.wanted = wanted
    return place


def _check_secure(address: str, insecure: bool) -> None:
    """Plain text to another machine needs an opt-in, before any byte is sent."""
    if parse_address(address)[0] not in _ENCRYPTED and not insecure and not is_local(address):
        raise InsecureAddress(
            f"{address} is on another machine and not encrypted: whoever reaches it, or listens on the way, can run "
            "code there. Use a tls:// address with security=, or opt in with insecure=True"
        )


def _dialled(target: object, name: str, security: object, timeout: float, **kwargs: object) -> DaskCluster:
    """A client of our own."""

    def make() -> Client:
        client = Client.__new__(Client)  # so that a half-made one can be closed
        try:
            with dask.config.set({"distributed.comm.timeouts.connect": timeout}):
                client.__init__(  # type: ignore[misc]
                    *([target] if target is not None else []),
                    timeout=timeout, security=security, set_as_default=False, **kwargs,
                )  # fmt: skip
        except BaseException:
            _quietly(client)
            raise
        return client

    begin, progress = time.monotonic(), ConnectProgress()
    progress.at(f"nobody answers at {name} yet; it is tried for {timeout:.0f} s, and Ctrl-C gives up")
    try:
        client = _opened(make, timeout + 5, f"connecting to {name}", progress.say)
    except (OSError, TimeoutError) as error:
        spent, why = time.monotonic() - begin, error.__cause__ or error
        raise Unavailable(
            f"no Dask scheduler answered at {name} within {spent:.1f} s (timeout {timeout:g} s): {_last(why)}. "
            "Is it running, and is the port right? The notebook goes on without a cluster"
        ) from None
    return DaskCluster(client, [partial(_closed, client)])


def _last(error: BaseException) -> str:
    """The end of a chain of errors in Dask's words: ``ConnectionRefusedError: [Errno 111] Connection refused``."""
    return str(error).removeprefix("in ").rpartition(">: ")[2] or type(error).__name__


def _closed(ours: Client | LocalCluster) -> None:
    """Close a client or cluster opened here, silencing Dask's traceback of a search for a vanished scheduler.

    Warns of processes that do not end within Dask's deadline: the values are home by then.
    """
    try:
        with silence_logging_cmgr(logging.CRITICAL):
            ours.close()
    except TimeoutError:
        text = "a process of the cluster did not end within Dask's deadline, and ends with this one"
        warnings.warn(text, stacklevel=user_level(None))


def _hushed(client: Client) -> None:
    """Let workers that we close log no errors: Dask logs a heartbeat that fails while they close as an error of 40
    lines.
    """
    if client.status != "running":
        return
    level = logging.getLogger("distributed").setLevel
    try:
        client.sync(client._run, level, logging.CRITICAL, on_error="ignore", callback_timeout=HUSH)
    except Exception:  # a worker that does not answer is closed all the same
        logging.getLogger(__name__).debug("workers were not told that they close", exc_info=True)


def _opened(make: Callable[[], T], timeout: float, what: str, every: Callable[[], None] | None = None) -> T:
    """The result of ``make``, called in another thread: Ctrl-C is noticed at once, and a late result is closed."""
    handle: Handle[T] = Handle()
    unwanted = threading.Event()

    def work() -> None:
        future: Future[T] = Future()
        try:
            future.set_result(make())
        except BaseException as error:  # raised by who waits
            future.set_exception(error)
        handle.finish(future)
        if unwanted.is_set() and future.exception() is None:
            _quietly(future.result(timeout=0))

    threading.Thread(target=work, name="tfnb-connect", daemon=True).start()
    try:
        return wait(handle, timeout, what, every)
    except BaseException:
        unwanted.set()
        if handle.task and handle.task[0].exception() is None:  # made between the interrupt and here
            _quietly(handle.task[0].result())
        raise


def _quietly(thing: Any) -> None:
    """Close a half-made client or cluster; errors are only logged."""
    try:
        thing.close(timeout=10)
    except Exception:  # the error that led here is the one to show
        logging.getLogger(__name__).debug("closing %r failed", type(thing), exc_info=True)


def local(tasks: int, wanted: Requirements, timeout: float, started: LocalWorkers = AS_EVER) -> DaskCluster:
    """A cluster of processes on this machine: ``tasks`` compute tasks and ``wanted.ps`` servers, default one.

    With ``ps="stages"`` the tasks are the servers.
    """
    if tasks < 1:
        raise InvalidArgument(f"connect({tasks}): at least one compute task is needed")
    if wanted.workers is not None:
        raise InvalidArgument(f"workers={wanted.workers}: connect({tasks}) starts its own; others are waited for")
    if wanted.is_staged and tasks < 2:
        raise InvalidArgument(f"connect({tasks}): {TOO_FEW}")
    ps: Servers = 1 if wanted.ps is None else wanted.ps
    wanted = wanted._replace(ps=ps, workers=tasks if isinstance(ps, str) else tasks + ps)
    begin = time.monotonic()
    cluster = _Local.__new__(_Local)  # so that its scheduler is seen while workers start
    progress = ConnectProgress()

    def make() -> LocalCluster:
        with dask.config.set(SETTINGS):
            cluster.__init__(  # type: ignore[misc]
                n_workers=wanted.least, threads_per_worker=started.threads or 1, processes=True, host="127.0.0.1",
                memory_limit=started.memory or "auto", dashboard_address="127.0.0.1:0",
                scheduler_kwargs={"dashboard": started.dashboard},
                silence_logs=logging.ERROR, resources=dict(wanted.resources) or None,
                preload=[PRELOAD], worker_class=_Starter,
            )  # fmt: skip
        return cluster

    def look() -> None:
        workers = getattr(getattr(cluster, "scheduler", None), "workers", {})
        progress.found("workers", sorted(str(worker.name) for worker in list(workers.values())), wanted.least)
        progress.say()

    try:
        _opened(make, timeout, f"starting {wanted.least} worker processes", look)
    except DeadlineExceeded as late:
        raise DeadlineExceeded(f"{late}; a busy machine takes longer: connect(timeout={2 * timeout:g})") from None
    try:
        place = _dialled(cluster, str(cluster.scheduler_address), None, max(1.0, timeout - time.monotonic() + begin))
    except BaseException:
        _quietly(cluster)
        raise
    place.closers = [partial(_closed, cluster), *place.closers, partial(_hushed, place.client)]
    place.wanted, place.dashboard, place.progress = wanted, started.dashboard, progress
    place.is_ours = True
    return place


@contextmanager
def _lightly() -> Iterator[None]:
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)  # %reset of IPython takes it
    parent = f"{spec.parent}." if spec is not None and spec.parent else ""
    method = {_METHOD: "forkserver"} if sys.platform == "linux" else {}
    with swapped((main, "__spec__", ModuleSpec(f"{parent}__main__", None))), dask.config.set(method):
        if method:
            get_mp_context().set_forkserver_preload(["distributed", PRELOAD])
        yield


_light_start = SharedContext(_lightly)
"""Processes that start inside import PyTorch once for all of them, and nothing of the user's script.

They are forked from a process that has imported it, which has one thread and ends with the notebook: the second one,
and the successor of a lost one, is there in a second. Elsewhere than on Linux libraries of the system do not outlive a
fork. The script would run again in each process; they need nothing of it, and one that a notebook was made into has no
``if __name__ == "__main__"``. ``multiprocessing`` leaves out a main module whose spec has this name.
"""


class _Local(LocalCluster):
    """Keeps the place of a lost worker: Dask, 15 s after a loss, would close for good a worker that is just starting.

    That may be a busy machine's first successor, or the next one, of a worker that was lost again meanwhile.
    """

    def _update_worker_status(self, op: str, msg: object) -> None:
        with dask.config.set(SETTINGS):
            super()._update_worker_status(op, msg)


class _Starter(Nanny):
    """Starts a worker's process, and later another one in the place of one that was lost; all have our settings."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["env"] = {**os.environ, **(kwargs.get("env") or {})}  # the fork server has that of its start
        with dask.config.set(SETTINGS):  # also for one that Dask's `scale` starts
            super().__init__(*args, **kwargs)
            self.config = deepcopy(self.config)  # parts of it were those of the notebook, which change back

    async def instantiate(self) -> Any:
        with _light_start():
            return await super().instantiate()


# -- tasks on workers -------------------------------------------------------------------------------------------


class Roles(NamedTuple):
    """The numbers of compute tasks, of servers, and of the servers' shards."""

    tasks: int
    servers: int
    shards: int

    def held(self, server: int) -> tuple[int, ...]:
        """The shards of a server: they go round.

        >>> [Roles(2, 2, 5).held(server) for server in range(2)]
        [(0, 2, 4), (1, 3)]
        """
        return tuple(range(server, self.shards, self.servers))


def roles(workers: int, ps: Servers | None) -> Roles:
    """Assign roles to workers. If the requested servers would leave no compute task, half of the workers hold all
    shards.

    A single worker is a task and a server at once; so is each one with ``ps="stages"``. Raises InvalidArgument if that
    makes a single stage.

    >>> [roles(n, None).servers for n in (1, 2, 3, 4, 8, 12)], roles(3, 2)
    ([1, 1, 1, 1, 2, 3], Roles(tasks=1, servers=2, shards=2))
    >>> roles(4, 16), roles(1, 4)
    (Roles(tasks=2, servers=2, shards=16), Roles(tasks=1, servers=1, shards=4))
    >>> roles(4, "stages")
    Roles(tasks=4, servers=4, shards=4)
    """
    if ps == STAGES:
        if workers < 2:
            raise InvalidArgument(f"the Dask cluster has one worker: {TOO_FEW}. Start another one")
        return Roles(workers, workers, workers)
    assert not isinstance(ps, str)
    ps = max(1, workers // 4) if ps is None else ps
    servers = ps if ps < workers else max(1, workers // 2)
    return Roles(max(1, workers - servers), servers, ps)


def _by_name(worker: tuple[str, dict[str, Any]]) -> tuple[int, str, str]:
    """Key that puts worker 2 before worker 10."""
    addr, facts = worker
    name = str(facts.get("name"))
    return len(name), name, addr


async def workers_of(
    client: Client, wanted: Requirements, adapting: Adapting, timeout: float, progress: ConnectProgress
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Address -> facts of every worker that is taken, as soon as there are enough.

    Where nobody said how many, and all are there that the cluster was made with, these are enough.
    """
    end = time.monotonic() + timeout
    while True:
        there = await identities(client)
        found = {addr: facts for addr, facts in there.items() if wanted.takes(facts)}
        progress.found("workers", sorted(str(facts.get("name", addr)) for addr, facts in found.items()), wanted.least)
        is_all = found and wanted.workers is None and not adapting.is_starting
        if len(found) >= wanted.least or is_all:
            return dict(sorted(found.items(), key=_by_name))
        if time.monotonic() > end:
            address = scheduler_address(client)
            fitting = f" with {wanted} (of {len(there)})" if wanted.resources else ""
            fewer = f", or connect(workers={len(found)}) does with these" if found else ""
            raise DeadlineExceeded(
                f"the Dask cluster at {address} has {len(found)} of {wanted.least} workers{fitting} after "
                f"{timeout:g} s; start some with `dask worker {address}`{fewer}"
            )
        await asyncio.sleep(0.05)


async def identities(client: Client) -> dict[str, dict[str, Any]]:
    """Address -> facts of every worker that runs."""
    try:
        found = await scheduler_of(client).identity(n_workers=-1)
    except TypeError:  # before distributed 2025: all workers, always
        found = await scheduler_of(client).identity()
    return {addr: facts for addr, facts in found["workers"].items() if facts.get("status", "running") == "running"}


def submit(client: Client, name: str, addr: str, owner: str, resources: Mapping[str, float]) -> Any:
    """Start the task actor on a worker; its future."""
    return client.submit(
        TaskActor, name, actor=True, workers=[addr], allow_other_workers=False, pure=False, key=f"tfnb-{owner}-{name}",
        resources=dict(resources) or None,
    )  # fmt: skip


async def started(
    client: Client, futures: Mapping[str, Any], addrs: Mapping[str, str], end: float, progress: ConnectProgress
) -> None:  # fmt: skip
    """Wait until every actor stands, each at its address; raises WorkerGone, DeadlineExceeded, or FailedPrecondition
    from its worker's error.
    """
    looked = time.monotonic()
    while True:
        states = {name: future.status for name, future in futures.items()}
        for name, state in states.items():
            cause = await futures[name]._exception() if state == "error" else None
            if state in ("cancelled", "lost") or isinstance(cause, KilledWorker) or _LOST in str(cause):
                raise WorkerGone(f"the worker of task {name} was lost while it started")
            if cause is not None:
                raise FailedPrecondition(
                    f"the task {name} did not start: {type(cause).__name__}: {cause}. Every worker needs the same "
                    "tfnb and torch as the notebook"
                ) from cause
        progress.found("tasks", [name for name, state in states.items() if state == "finished"], len(states))
        if all(state == "finished" for state in states.values()):
            return
        if time.monotonic() > end:
            waiting = ", ".join(name for name, state in states.items() if state == "pending")
            raise DeadlineExceeded(f"the tasks {waiting} did not start in time")
        if time.monotonic() - looked > LOOK:  # Dask lets an actor wait for ever for a worker that has left
            there, looked = await identities(client), time.monotonic()
            for name, addr in addrs.items():
                if states[name] == "pending" and addr not in there:
                    raise WorkerGone(f"the worker of task {name} left while it started")
        await asyncio.sleep(0.01)


async def greet(link: ClientLink, addr: str, key: str, end: float) -> tuple[Peer, dict[str, Any]]:
    """The identity of a task, and its greeting's facts; raises VersionMismatch with a table."""
    link.confirm(addr)  # Dask says that the actor stands there, whoever was there before
    answer = await link.persist(Peer(addr, key, 0), "hello", epoch=0, deadline=end)
    meta = _ok(answer, f"the task at {addr}").meta
    _check_versions(addr, meta["versions"])
    return Peer(addr, key, int(meta["incarnation"])), dict(meta)


def _check_versions(addr: str, found: Mapping[str, str]) -> None:
    """Raise VersionMismatch, with a table, if a worker's versions are others than those of this process."""
    ours, theirs = versions(), dict(found)
    if ours != theirs:
        rows = [
            f"  {name:10} here {ours.get(name)!s:10} there {theirs.get(name)!s}" for name in sorted({*ours, *theirs})
        ]
        differs = ", ".join(
            f"{name} is {theirs.get(name)} there and {ours.get(name)} here"
            for name in sorted({*ours, *theirs})
            if ours.get(name) != theirs.get(name)
        )
        text = f"the worker at {addr} has other versions than this notebook:"
        raise VersionMismatch("\n".join([text, *rows]), details={"differs": differs})


def check_workers(client: Client, timeout: float) -> int:
    """The number of running workers, whose versions agree with those of this process. Starts no task on them.

    Raises VersionMismatch, FailedPrecondition for a worker without tfnb or torch, or DeadlineExceeded.
    """
    try:
        found = client.sync(client._run, versions, on_error="return", callback_timeout=timeout)
    except TimeoutError:
        raise DeadlineExceeded(f"workers of {scheduler_address(client)} did not tell their versions") from None
    for addr, theirs in found.items():
        if isinstance(theirs, BaseException):
            raise FailedPrecondition(f"the worker at {addr}: {theirs}; it needs the tfnb and torch of this process")
        _check_versions(addr, theirs)
    return len(found)


async def configure(
    link: ClientLink, members: Sequence[Member], servers: Sequence[Member], epoch: int, end: float
) -> None:  # fmt: skip
    """Send every task the epoch, and the holders of all shards."""
    peers = {shard: list(server.peer) for server in servers for shard in server.shards}
    shards = [peers[shard] for shard in sorted(peers)]

    async def told(member: Member) -> None:
        meta = {"epoch": epoch, "shards": shards, "holds": list(member.shards)}
        _ok(await link.persist(member.peer, "configure", meta, epoch=epoch, deadline=end), member.name)

    await overlapping(map(told, members))


async def overlapping(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of calls to many workers, `AT_ONCE` of them at a time; the first error ends the others."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(call: Coroutine[Any, Any, T]) -> T:
        async with gate:
            return await call

    works = [asyncio.create_task(one(call)) for call in calls]
    try:
        return await asyncio.gather(*works)
    finally:
        for work in works:
            work.cancel()


def _ok(answer: Outcome, who: str) -> Ok:
    if isinstance(answer, Ok):
        return answer
    if isinstance(answer, Failure):
        raise raised(answer)
    raise Unavailable(f"{who} did not answer: {answer.message}")


class WorkerGone(Unavailable):
    """A worker died while its task was started; the list of workers was a moment too old."""


async def start(
    client: Client, link: ClientLink, registered: Registration, wanted: Requirements, adapting: Adapting,
    timeout: float,
    progress: ConnectProgress,
) -> tuple[list[Member], list[Member], str]:  # fmt: skip
    """Start tasks and servers on the workers of a cluster, and register all; returns them and the route to them."""
    end = time.monotonic() + timeout
    adapting.hold(wanted.least)
    try:
        await registered.open()
        while True:
            addrs = list(await workers_of(client, wanted, adapting, end - time.monotonic(), progress))
            try:
                found = await _start_on(client, link, addrs, wanted, registered.epoch, end, progress)
                break
            except WorkerGone:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(0.1)
        await registered.publish(lambda: (*found[0], *found[1]))
    except BaseException as error:
        adapting.release()
        await registered.close()
        if isinstance(error, OSError) and not isinstance(error, TfnbError):  # of Dask, or a deadline of the registry
            address = scheduler_address(client)
            why = f"{type(error).__name__}: {error}"
            raise Unavailable(f"the Dask scheduler at {address} did not answer: {why}") from error
        raise
    return found


async def joined(
    client: Client, link: ClientLink, name: str, addr: str, wanted: Requirements, servers: Sequence[Member], epoch: int,
    end: float,
) -> Member:  # fmt: skip
    """A task on a worker that came later; raises WorkerGone, or another TfnbError where the worker cannot be used."""
    await _ensure_tfnb(client, addr, end)
    future = submit(client, name, addr, uuid.uuid4().hex[:8], wanted.resources)
    try:
        await started(client, {name: future}, {name: addr}, end, ConnectProgress())
        peer, info = await greet(link, addr, str(future.key), end)
        member = Member(name, peer, future, info)
        await configure(link, [member], servers, epoch, end)
    except BaseException:
        future.release()
        raise
    return member


async def _ensure_tfnb(client: Client, addr: str, end: float) -> None:
    """Raise FailedPrecondition if a worker cannot import tfnb and torch: Dask would not report that of an actor."""
    found = await asyncio.wait_for(
        asyncio.to_thread(client.run, versions, workers=[addr], on_error="return"), max(0.1, end - time.monotonic())
    )
    error = found.get(addr) if found else OSError("it is gone")
    if isinstance(error, OSError):
        raise WorkerGone(f"the worker at {addr} was lost: {error}")
    if isinstance(error, BaseException):
        raise FailedPrecondition(f"{error}; it needs the tfnb and torch of this notebook")


async def _start_on(
    client: Client, link: ClientLink, addrs: Sequence[str], wanted: Requirements, epoch: int, end: float,
    progress: ConnectProgress,
) -> tuple[list[Member], list[Member], str]:  # fmt: skip
    who = roles(len(addrs), wanted.ps)
    first = len(addrs) - who.tasks  # servers are the oldest workers: Dask's `scale` ends the youngest
    names = {a: f"ps:{i}" if i < first else f"task:{i - first}" for i, a in enumerate(addrs)}
    owner = uuid.uuid4().hex[:8]
    futures = {name: submit(client, name, addr, owner, wanted.resources) for addr, name in names.items()}
    await started(client, futures, {name: addr for addr, name in names.items()}, end, progress)
    route = "direct"
    async with _noticing_the_gone(client, addrs):
        for addr, name in names.items():
            if route == "direct" and (route := await link.route(Peer(addr, str(futures[name].key), 0))) != "direct":
                await _ensure_there(client, [addr])
        greetings = (greet(link, addr, str(futures[name].key), end) for addr, name in names.items())
        found = zip(names.values(), await overlapping(greetings), strict=True)
        members = [Member(name, peer, futures[name], info) for name, (peer, info) in found]
        servers = [m for m in members if m.name.startswith("ps:")] or members
        for place, server in enumerate(servers):
            server.shards = who.held(place)
        tasks = [m for m in members if m.name.startswith("task:")]
        await configure(link, members, servers, epoch, end)
    return tasks, servers, route


@asynccontextmanager
async def _noticing_the_gone(client: Client, addrs: Collection[str]) -> AsyncIterator[None]:
    """A block of calls to workers; one that fails because a worker has died raises WorkerGone."""
    try:
        yield
    except Unavailable as error:
        if not isinstance(error, WorkerGone):
            await _ensure_there(client, addrs)
        raise


async def _ensure_there(client: Client, addrs: Collection[str]) -> None:
    """Raise WorkerGone if Dask takes one of these workers off its list, which is a moment after its death."""
    end = time.monotonic() + UNLISTED_WITHIN
    while time.monotonic() < end:
        there = await identities(client)
        if gone := [addr for addr in addrs if addr not in there]:
            raise WorkerGone(f"the worker at {' and '.join(gone)} was lost while its task was started")
        await asyncio.sleep(0.05)
