"""The kernel's own count of a connection."""

from __future__ import annotations

import asyncio
import sys

import pytest

from coordinator import wire

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="TCP_INFO is Linux's")


async def test_a_connection_is_counted_byte_by_byte():
    arrived = asyncio.Event()
    transports: list[asyncio.BaseTransport] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        transports.append(writer.transport)
        await reader.readexactly(100_000)
        writer.write(bytes(50_000))
        await writer.drain()
        arrived.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    wire.keep_alive(writer.transport)
    writer.write(bytes(100_000))
    await reader.readexactly(50_000)
    await arrived.wait()
    assert wire.count(transports[0]) == (100_000, 50_000)
    assert wire.count(writer.transport) == (50_000, 100_000)
    writer.close()
    await writer.wait_closed()
    assert wire.count(writer.transport) is None
    server.close()


def test_nothing_is_counted_without_a_socket():
    assert wire.count(None) is None
    assert wire.count(asyncio.Transport()) is None


def test_a_transport_that_has_forgotten_its_socket_counts_nothing():
    """As asyncio's TLS transport does once it is closed."""

    class Closed(asyncio.BaseTransport):
        def get_extra_info(self, name: str, default: object = None) -> object:
            raise AttributeError(name)

    assert wire.count(Closed()) is None
