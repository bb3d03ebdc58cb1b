"""Listening sockets, and a clear word when a port is taken."""

from __future__ import annotations

import contextlib
import errno
import re
import socket
from pathlib import Path
from typing import Final

from protocol.errors import UsageError

BACKLOG: Final = 512
_LISTENING: Final = "0A"  # state column of /proc/net/tcp


def bind(host: str, port: int, setting: str) -> socket.socket:
    """A listening socket on `host`; port 0 takes a free one.

    Raises:
        UsageError: the port is taken (names it, and the process if it is known), or not allowed.
    """
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except socket.gaierror as error:
        raise UsageError(
            f"{setting}: {host!r} is no address of this machine ({error.strerror}).",
            "Use 127.0.0.1 for this machine only, or 0.0.0.0 for all its addresses.",
        ) from None
    # "localhost" may be both; IPv4 is what everybody tries.
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        # After a restart the port is free although old connections linger; it never lets two
        # processes listen at once.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise UsageError(*_why(error, host, port, setting)) from None
    return sock


def _why(error: OSError, host: str, port: int, setting: str) -> tuple[str, str]:
    if error.errno == errno.EADDRINUSE:
        holder = holder_of(port)
        by = f" by {holder}" if holder else " by another process"
        return (
            f"port {port} on {host} is taken{by}.",
            f"End that process, or choose another port with {setting}.",
        )
    if error.errno == errno.EACCES:
        return (
            f"port {port} on {host} may not be used by this user.",
            f"Choose a port above 1023 with {setting}.",
        )
    return (
        f"{setting}: it is not possible to listen on {host}:{port} ({error.strerror}).",
        "Use 127.0.0.1 for this machine only, or 0.0.0.0 for all its addresses.",
    )


def holder_of(port: int) -> str:
    """`name (pid n)` of the process that listens on `port`; empty when it cannot be known."""
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listening(table, port)}
    if not inodes:
        return ""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*"):
        # Other users' processes cannot be read, and any may end while it is looked at.
        with contextlib.suppress(OSError):
            for entry in (process / "fd").iterdir():
                if str(entry.readlink()) in wanted:
                    name = (process / "comm").read_text(encoding="utf-8", errors="replace")
                    return f"{re.sub(r'[^ -~]', '?', name.strip())} (pid {process.name})"
    return ""


def _listening(table: str, port: int) -> list[str]:
    try:
        text = Path("/proc/net", table).read_text(encoding="ascii")
    except OSError:
        return []
    suffix = f":{port:04X}"
    rows = [line.split() for line in text.splitlines()[1:]]
    return [row[9] for row in rows if row[1].endswith(suffix) and row[3] == _LISTENING]
