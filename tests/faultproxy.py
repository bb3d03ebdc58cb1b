"""A TCP proxy that misbehaves on demand, for tests of everything that crosses a network."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self

CHUNK_BYTES = 64 << 10


async def elapse(seconds: float) -> None:
    """Let time pass: a fault of the network, never a way to wait for something in a test."""
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, over.set)
    await over.wait()


class FaultProxy:
    """Forwards connections to a target. Faults are attributes; they apply to what comes next.

    rate          bytes per second towards the target, per connection; 0: as fast as it goes
    delay         seconds that every chunk is held back, both ways
    cut_after     bytes towards the target after which all connections are cut, once
    stall_after   bytes towards the target after which nothing goes through until `flow`, once
    truncate_after  bytes back to the client after which the connection ends politely, once
    idle_limit    seconds without a byte either way after which a connection is cut; 0: never
    quiet         seconds of silence before what came is passed on, whole, as a buffering proxy does
    refuse        new connections are closed at once
    """

    def __init__(self, host: str, port: int) -> None:
        self.rate = 0.0
        self.delay = 0.0
        self.cut_after: int | None = None
        self.stall_after: int | None = None
        self.stalled = asyncio.Event()  # it has come to `stall_after`
        self.truncate_after: int | None = None
        self.idle_limit = 0.0
        self.quiet = 0.0
        self.refuse = False
        self.port = 0
        self.connections = 0
        self.bytes_up = 0
        self.bytes_down = 0
        self._target = (host, port)
        self._arrival = asyncio.Condition()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def retarget(self, port: int) -> None:
        """Send new connections to another port of the same host."""
        self._target = (self._target[0], port)

    async def until_connections(self, count: int, seconds: float = 20.0) -> None:
        """Wait until so many connections were made in all."""
        async with asyncio.timeout(seconds), self._arrival:
            await self._arrival.wait_for(lambda: self.connections >= count)

    def cut(self) -> None:
        """Reset every open connection."""
        for writer in list(self._open):
            writer.transport.abort()

    def stall(self) -> None:
        """Keep connections open and let nothing through, until `flow`."""
        self._flowing.clear()

    def flow(self) -> None:
        """Let bytes through again."""
        self._flowing.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        async with self._arrival:
            self.connections += 1
            self._arrival.notify_all()
        other: asyncio.StreamWriter | None = None
        with contextlib.suppress(OSError, asyncio.CancelledError):
            if not self.refuse:
                far_reader, other = await asyncio.open_connection(*self._target)
                self._open.add(other)
                await asyncio.gather(
                    self._pump(reader, other, up=True), self._pump(far_reader, writer, up=False)
                )
        for side in (writer, other):
            if side is not None:
                side.transport.abort()
                self._open.discard(side)
        self._tasks.discard(task)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool
    ) -> None:
        while chunk := await self._next(reader):
            await self._flowing.wait()
            if self.delay:
                await elapse(self.delay)
            if up and self.rate:
                await elapse(len(chunk) / self.rate)
            chunk, ends = self._count(chunk, up=up)
            writer.write(chunk)
            await writer.drain()
            if ends:
                break
        if up and self.cut_after is None:
            with contextlib.suppress(OSError):
                writer.write_eof()
            return
        writer.close()

    async def _next(self, reader: asyncio.StreamReader) -> bytes:
        limit = self.idle_limit or None
        size = CHUNK_BYTES if not self.rate else max(1, min(CHUNK_BYTES, int(self.rate / 20)))
        try:
            async with asyncio.timeout(limit):
                chunk = await reader.read(size)
        except TimeoutError:
            self.cut()
            raise ConnectionResetError from None
        while self.quiet and chunk:
            try:
                async with asyncio.timeout(self.quiet):
                    more = await reader.read(CHUNK_BYTES)
            except TimeoutError:
                break
            if not more:
                break
            chunk += more
        return chunk

    def _count(self, chunk: bytes, *, up: bool) -> tuple[bytes, bool]:
        if up:
            self.bytes_up += len(chunk)
            if self.stall_after is not None:
                self.stall_after -= len(chunk)
                if self.stall_after <= 0:
                    self.stall_after = None
                    self.stall()
                    self.stalled.set()
            if self.cut_after is not None:
                self.cut_after -= len(chunk)
                if self.cut_after <= 0:
                    self.cut_after = None
                    self.cut()
                    raise ConnectionResetError
            return chunk, False
        self.bytes_down += len(chunk)
        if self.truncate_after is not None:
            self.truncate_after -= len(chunk)
            if self.truncate_after <= 0:
                kept = len(chunk) + self.truncate_after
                self.truncate_after = None
                return chunk[:kept], True
        return chunk, False
