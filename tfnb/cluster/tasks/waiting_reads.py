"""Connections between tasks that a step reads itself while it waits for values of other parts.

Otherwise the thread of `tfnb.cluster.server.serving` reads all connections, and wakes the thread of the step that wants
a value: two turns of threads for each message. A `WaitingReader` takes connections over from that thread, polls them in
the step's thread, and gives them back.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Collection
from contextlib import suppress

from tfnb.cluster.wire.posting import HostedConnection, Receiver
from tfnb.execution.running import unstoppable
from tfnb.state.waits import Inbox


class WaitingReader:
    """The connections read by the thread of one waiting step; only that thread calls it, but for `wake`.

    look: asks the hosting thread to look at a connection that was taken over or given back; drop: to close one.
    """

    def __init__(
        self, look: Callable[[HostedConnection], None], drop: Callable[[HostedConnection, Exception], None]
    ) -> None:
        self._look, self._drop = look, drop
        self._bell, self._ear = socket.socketpair()
        self._bell.setblocking(False)
        self._ear.setblocking(False)
        self._taken: dict[Receiver, int] = {}  # with their descriptors
        self._by_descriptor: dict[int, Receiver] = {}
        self._poll = select.poll()

    def take(self, receivers: Collection[Receiver]) -> None:
        """Read these connections from now on, and give others back."""
        if self._taken.keys() == set(receivers):
            return
        wanted = {one: one.sock.fileno() for one in receivers}
        for one in self._taken.keys() - wanted.keys():
            self._hand_over(one, is_taken=False)
        for one in wanted.keys() - self._taken.keys():
            self._hand_over(one, is_taken=True)
        self._taken = wanted
        self._by_descriptor = {number: one for one, number in wanted.items() if number >= 0}
        self._poll = select.poll()
        for number in (self._ear.fileno(), *self._by_descriptor):
            self._poll.register(number, select.POLLIN)

    def read(self, inbox: Inbox, seconds: float) -> None:
        """Read once a connection has bytes; return without where something else comes into the ``inbox``, or after
        ``seconds``.
        """
        with unstoppable():  # posts that were read in part would be lost to other rounds
            inbox.wake = self.wake
            try:
                found = self._poll.poll(seconds * 1000) if inbox.empty() else ()
            finally:
                inbox.wake = None
            for number, _ in found:
                if (one := self._by_descriptor.get(number)) is not None:
                    self._read(number, one)
                else:
                    self._ear.recv(4096)

    def _read(self, number: int, one: Receiver) -> None:
        try:
            one.read()
        except Exception as error:
            self._poll.unregister(number)
            del self._by_descriptor[number]
            self._drop(one, error)

    def wake(self) -> None:
        """End a `read` that waits. From any thread."""
        with suppress(OSError):  # full: it will be heard; closed: nobody waits
            self._bell.send(b"\0")

    def close(self) -> None:
        """Give all connections back."""
        self.take(())
        self._bell.close()
        self._ear.close()

    def _hand_over(self, one: Receiver, *, is_taken: bool) -> None:
        one.is_taken = is_taken
        self._look(one)
