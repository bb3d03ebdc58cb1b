"""Bodies of any size, in and out, in pieces: never more than a few MiB of one in memory."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final, Protocol, TypeVar

from aiohttp import web

from coordinator.http import Call
from protocol.errors import NotFoundError, UsageError

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 1 << 20
# What this process itself reads at once: more is slower, and stays with it as memory.
_READ_BYTES: Final = 256 << 10
Answer_co = TypeVar("Answer_co", covariant=True)


class Sink(Protocol[Answer_co]):
    """Where a body goes: an upload of a site, or a file of a person."""

    async def write(self, chunk: bytes | memoryview) -> None:
        """Take the next bytes."""

    async def finish(self) -> Answer_co:
        """The body has ended."""

    async def broken(self) -> None:
        """The body broke off, or was refused."""


def length_of(call: Call) -> int:
    """The announced length of the body.

    Raises:
        UsageError: none was announced.
    """
    length = call.request.content_length
    if length is None:
        raise UsageError(
            "an upload needs a Content-Length.",
            "Send the length in the header; a proxy on the way must not remove it.",
        )
    return length


async def receive(call: Call, sink: Sink[Answer_co]) -> Answer_co:
    """Move the whole body into `sink`.

    Raises:
        Whatever the sink refuses with; the sink is told `broken` then, and when the peer vanishes.
    """
    try:
        if call.request.headers.get("Expect", "").lower() == "100-continue":
            # Only now, when the sink has agreed to the length, does the peer send anything.
            await call.request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            call.request.writer.output_size = 0
        while piece := await call.piece():
            await sink.write(piece)
    except BaseException:
        # Shielded: a handler that is cancelled at the coordinator's stop must still leave a
        # spool that can be resumed.
        await asyncio.shield(sink.broken())
        raise
    return await sink.finish()


async def send_file(
    call: Call,
    path: Path,
    *,
    offset: int = 0,
    headers: Mapping[str, str] | None = None,
    on_piece: Callable[[], None] = lambda: None,
) -> web.StreamResponse:
    """Answer with a file from `offset` on.

    Raises:
        NotFoundError: the file is gone.
        UsageError: an offset beyond its end.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context(await asyncio.to_thread(path.open, "rb"))
        except FileNotFoundError:
            raise NotFoundError("this file is not kept any more.") from None
        size = os.fstat(file.fileno()).st_size
        if offset > size:
            raise UsageError(f"offset {offset} lies beyond the {size} bytes that there are.")
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.headers.update(headers or {})
        response.content_length = size - offset
        await response.prepare(call.request)
        try:
            await _pump(call, response, file, offset, size, on_piece)
        except TimeoutError:
            log.info(
                "a download of %s fell silent for %g s and was ended.",
                call.request.path,
                call.settings.body_idle_seconds,
                extra={"site": call.caller.name},
            )
            call.connection.abort()
        return response


async def _pump(
    call: Call,
    response: web.StreamResponse,
    file: BinaryIO,
    offset: int,
    size: int,
    on_piece: Callable[[], None],
) -> None:
    # On a plain socket the kernel moves the file itself; TLS has to see the bytes. Both are done
    # right here: what is sent was written a moment ago, and threads would each keep a buffer.
    loop = asyncio.get_running_loop()
    transport = call.request.transport
    plain = transport is not None and transport.get_extra_info("sslcontext") is None
    at = offset
    while at < size:
        async with asyncio.timeout(call.settings.body_idle_seconds):
            # The first piece takes the header with it.
            if plain and at > offset and transport is not None:
                if transport.is_closing():
                    raise ConnectionResetError("the peer closed the connection")
                moved = await loop.sendfile(transport, file, at, min(PIECE_BYTES, size - at))
            else:
                piece = os.pread(file.fileno(), min(_READ_BYTES, size - at), at)
                moved = len(piece)
                await response.write(piece)
        if moved == 0:
            raise OSError(f"the file for {call.request.path} became shorter while it was sent")
        at += moved
        on_piece()
        await asyncio.sleep(0)  # a peer that takes everything at once must not keep out the others
    await response.write_eof()
