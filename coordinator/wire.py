"""What a socket itself has counted: the bytes that really crossed it, TLS and headers included."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from typing import Final, NamedTuple

# struct tcp_info of linux/tcp.h, in bytes from its start
_ACKED: Final = struct.Struct("=120xQQ")  # tcpi_bytes_acked, tcpi_bytes_received
_SENT: Final = struct.Struct("=200xQQ")  # tcpi_bytes_sent, tcpi_bytes_retrans (Linux 4.19)
_INFO_BYTES: Final = 256

# A peer that vanished without a word is noticed after 5 + 3 * 3 seconds (its lease: 15).
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3))
_UNANSWERED_MS: Final = 15_000


class Count(NamedTuple):
    """Payload bytes of a connection so far, retransmissions apart."""

    received: int
    sent: int


def count(transport: asyncio.BaseTransport | None) -> Count | None:
    """What the kernel counted on this connection; None where it does not tell."""
    try:
        sock = transport.get_extra_info("socket") if transport is not None else None
    except AttributeError:  # asyncio's TLS transport forgets its protocol when it is closed
        return None
    if sock is None or not sys.platform.startswith("linux"):
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:
        return None
    if len(info) < _ACKED.size:
        return None
    acked, received = _ACKED.unpack_from(info)
    if len(info) >= _SENT.size:
        sent, again = _SENT.unpack_from(info)
        return Count(received, sent - again)
    return Count(received, acked)


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Let the kernel probe an idle peer, so that a dead one closes the connection in time."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
