"""Containers: namespaces of resources (Variables and queues) that outlive graphs and sessions. Semantics S-42, S-43.

A resource lives in one container. Under a shared name every graph and session meets the same one; without it a resource
is its Python object, and its container decides only when it is dropped.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from tfnb.errors import FailedPrecondition, InvalidArgument, NotFound


class Resource(Protocol):
    """A Variable or queue that lives in a container."""

    name: str
    container: str
    shared_name: str | None

    @property
    def definition(self) -> str:
        """A description of the resource in words, equal for two resources that may share a name."""

    @property
    def nbytes(self) -> int:
        """Bytes held here."""

    @property
    def used(self) -> float | None:
        """Time of the last use, as `time.time`; None if unknown."""

    def drop(self, why: str) -> None:
        """Drop the contents; later users get an error with the reason ``why``."""


class ContainerEntry(NamedTuple):
    """One resource in the list of `containers`. owner: the process and thread that made the resource.

    used: when it was last used, by a step too, as `time.time` says; None where it was not.
    """

    container: str
    name: str
    shared_name: str | None
    kind: str
    owner: str
    nbytes: int
    used: float | None


@dataclass(slots=True)
class _Registry:
    lock: threading.RLock
    named: dict[tuple[str, str], Resource]
    owners: weakref.WeakKeyDictionary[Resource, str]  # of all resources


_ALL = _Registry(threading.RLock(), {}, weakref.WeakKeyDictionary())
_CURRENT: ContextVar[str] = ContextVar("container", default="")


@contextmanager
def container(name: str) -> Iterator[str]:
    """Variables and queues made inside the block live in the container ``name``, unless they name another container.

    Raises InvalidArgument for a name that is no string.

    >>> import tfnb, torch
    >>> with tfnb.container("experiment"):
    ...     steps = tfnb.Variable(0, shared_name="steps")
    >>> tfnb.Variable(0, container="experiment", shared_name="steps") is steps
    True
    >>> [entry.name for entry in tfnb.containers("experiment")], tfnb.reset("experiment")
    (['steps'], 1)
    """
    if not isinstance(name, str):
        raise InvalidArgument(f"a container has a name, not {name!r}")
    token = _CURRENT.set(name)
    try:
        yield name
    finally:
        _CURRENT.reset(token)


def containers(name: str | None = None) -> list[ContainerEntry]:
    """The resources of a container, or of all: owner, kind, bytes, and when each was last used.

    >>> import tfnb
    >>> with tfnb.container("listed"):
    ...     rate = tfnb.Variable(0.5, name="rate")
    >>> [(entry.kind, entry.name, entry.nbytes) for entry in containers("listed")]
    [('Variable', 'rate', 4)]
    """
    with _ALL.lock:
        found = [(one, owner) for one, owner in _ALL.owners.items() if name is None or one.container == name]
    return sorted(
        (
            ContainerEntry(one.container, one.name, one.shared_name, type(one).__name__, owner, one.nbytes, one.used)
            for one, owner in found
        ),
        key=lambda entry: entry[:2],
    )


def all_of(kind: type[Any]) -> list[Any]:
    """The resources of a class that live now.

    >>> all_of(str)
    []
    """
    with _ALL.lock:
        return [one for one in _ALL.owners if isinstance(one, kind)]


def reset(*names: str | Iterable[str]) -> int:
    """Drop all that lives in these containers, for all graphs and sessions; the number of resources.

    Whoever uses one of them later gets NotFound, which says who dropped it and when. A Variable has a value again when
    one is assigned or restored. A shared name that is used again makes a new resource. Steps that compute with one of
    them, or wait for it, end with StepAborted and write nothing; a native call, or a commit, ends first. Raises
    NotFound for a container that has nothing, FailedPrecondition where a cluster holds one of them.

    >>> import tfnb
    >>> rate = tfnb.Variable(0.5, name="rate", container="short")
    >>> reset("short"), rate.initialized
    (1, False)
    """
    wanted = [one for name in names for one in ([name] if isinstance(name, str) else name)]
    with _ALL.lock:
        found = {name: [one for one in _ALL.owners if one.container == name] for name in wanted}
        for name, members in found.items():
            if not members:
                known = sorted({one.container for one in _ALL.owners})
                raise NotFound(f"container {name!r} has nothing; there are {', '.join(map(repr, known)) or 'none'}")
        gone = [one for members in found.values() for one in members]
        away = next((one for one in gone if getattr(one, "home", None) is not None), None)
        if away is not None:
            raise FailedPrecondition(f"{away.name} of container {away.container!r} is on a cluster: close that first")
        for one in gone:
            del _ALL.owners[one]
        for key in [key for key, one in _ALL.named.items() if one.container in found]:
            del _ALL.named[key]
    when = time.strftime("%H:%M:%S")
    for one in gone:
        one.drop(f"container {one.container!r} was reset at {when} by {_client()}")
    return len(gone)


def placed(where: str) -> str:
    """The container for a resource: ``where``, or the current container if ``where`` is empty."""
    return where or _CURRENT.get()


def shared(where: str, shared_name: str | None) -> Any:
    """The resource of this shared name, if one exists; raises InvalidArgument for names that are not strings."""
    if not isinstance(where, str) or not isinstance(shared_name, str | None):
        raise InvalidArgument(f"container and shared_name are strings, not {where!r} and {shared_name!r}")
    with _ALL.lock:
        return None if shared_name is None else _ALL.named.get((placed(where), shared_name))


def enter(resource: Any) -> None:
    """A new resource lives in its container."""
    with _ALL.lock:
        _ALL.owners[resource] = _client()
        if resource.shared_name is not None:
            _ALL.named[resource.container, resource.shared_name] = resource


def ensure_same(resource: Resource, definition: str) -> None:
    """Raise InvalidArgument where a shared name is opened as something else."""
    if resource.definition != definition:
        raise InvalidArgument(
            f"{resource.shared_name!r} of container {resource.container!r} is {resource.definition}, not {definition}"
        )


def _client() -> str:
    return f"process {os.getpid()}, thread {threading.current_thread().name}"
