"""Encrypted sockets with the interface of plain ones, using the TLS settings of Dask's connections."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterable
from typing import Any

from distributed import Security
from distributed.comm.addressing import parse_address

from tfnb.cluster.wire.envelope import Buffer

RECORD = 16 << 10  # bytes that are encrypted together


class _EncryptedSocket(ssl.SSLSocket):
    """An encrypted socket with the interface of a plain one."""

    def sendmsg(self, buffers: Iterable[Buffer], *_: object) -> int:  # type: ignore[override]
        """Send the first of the buffers, or as many small ones as make one record."""
        together: list[Buffer] = []
        size = 0
        for buffer in buffers:
            together.append(buffer)
            size += memoryview(buffer).nbytes
            if size >= RECORD:
                break
        return self.send(together[0] if len(together) == 1 else b"".join(together))

    def send(self, data: Any, flags: int = 0) -> int:
        """Like `send` of a plain non-blocking socket."""
        try:
            return super().send(data, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:  # type: ignore[override]
        """Like `recv_into` of a plain non-blocking socket."""
        try:
            return super().recv_into(buffer, nbytes, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error


def encryption(address: str, security: Security, *, listens: bool) -> ssl.SSLContext | None:
    """The TLS context of a stream of a worker at this address, as of Dask's connections; None if not encrypted."""
    if parse_address(address)[0] != "tls":
        return None
    args = security.get_listen_args("worker") if listens else security.get_connection_args("worker")
    context: ssl.SSLContext = args["ssl_context"]
    context.sslsocket_class = _EncryptedSocket
    if listens:
        context.num_tickets = 0  # what a server sends unasked would look like an answer
    return context


def encrypted(sock: socket.socket, context: ssl.SSLContext | None, *, listens: bool) -> socket.socket:
    """The socket for the protocol; a client's has completed its handshake. Raises OSError."""
    if context is None:
        return sock
    return context.wrap_socket(sock, server_side=listens, do_handshake_on_connect=not listens)
