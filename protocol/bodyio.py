"""A body to and from a binary file, one frame at a time.

Nothing here opens a file: the caller passes the file's own `write` or `readinto`. Both sides of the
torch fence use these two and hold no more than META and one frame besides their own tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from crc32c import crc32c

from protocol import limits
from protocol.bodies import BodyMeta, decode_meta_json
from protocol.errors import MalformedError
from protocol.frames import (
    HEADER_BYTES,
    Buffer,
    FrameType,
    Header,
    Order,
    encode_end,
    encode_meta,
    encode_part,
    parse_header,
)

_CACHED_BYTES: Final = 256 << 10  # what is read next is worked on next: it stays in a core's cache

_CUT_OFF: Final = "the body is cut off: it ends within a frame."


def write_body(write: Callable[[Buffer], object], meta: bytes, parts: Sequence[memoryview]) -> int:
    """Write a whole body and return its length in bytes.

    `parts` come in META's order, contiguous, of any element type; they are written as views,
    without a copy. `write` must take everything it is given (a buffered file does).

    Raises:
        LimitError: META is above META_BYTES_MAX.
    """
    written = 0
    for piece in _pieces(meta, parts):
        write(piece)
        written += len(piece)
    return written


def _pieces(meta: bytes, parts: Sequence[memoryview]) -> Iterator[Buffer]:
    yield encode_meta(meta)
    for index, part in enumerate(parts):
        if part.nbytes:  # a view of nothing cannot be cast, and has no frames
            yield from encode_part(index, part.cast("B"))
    yield encode_end()


class BodyReader:
    """Reads a body by the rules of `frames.Scanner`; META is read and checked at once.

    `readinto` fills the front of a buffer and returns how many bytes it put there, 0 at the end.
    """

    def __init__(self, readinto: Callable[[memoryview], int]) -> None:
        self._readinto = readinto
        header = self._header()
        if header.type is not FrameType.META:
            raise MalformedError("a body must begin with its META frame.")
        raw = bytearray(header.length)
        self._payload(header, memoryview(raw))
        self.meta: BodyMeta = decode_meta_json(bytes(raw))

    def frames(self) -> Iterator[tuple[int, int, memoryview]]:
        """Each DATA frame as (part index, byte offset in the part, payload), in order, once.

        The payload is a view into one buffer that the next step overwrites.

        Raises:
            MalformedError: truncated, damaged, out of order, or bytes after END.
            LimitError: a frame above its limit.
        """
        largest = max((part.bytes for part in self.meta.parts), default=0)
        buffer = memoryview(bytearray(min(largest, limits.FRAME_PAYLOAD_BYTES_MAX)))
        yield from self.pieces(buffer)

    def pieces(
        self, buffer: memoryview, *, checked: bool = True
    ) -> Iterator[tuple[int, int, memoryview]]:
        """As `frames`, in pieces of at most `len(buffer)` bytes that are read into `buffer`.

        A frame's checksum is compared before its last piece is yielded, so a caller commits
        nothing before the end. With `checked` False it is not compared at all: for a body on this
        machine's own disk that was checked whole before.

        Raises:
            MalformedError, LimitError: as `frames`.
        """

        def take(_part: int, _offset: int, left: int) -> memoryview:
            return self._filled(buffer[:left])

        return self._read(take, len(buffer), checked=checked)

    def views(
        self, view: Callable[[int], memoryview], step: int
    ) -> Iterator[tuple[int, int, memoryview]]:
        """As `frames`, in pieces of at most `step` bytes that are not read but looked at.

        `view` gives the next so many bytes of the body, fewer where it ends, and goes on behind
        them: a mapped file can. Checksums are not compared: see `pieces`.

        Raises:
            MalformedError, LimitError: as `frames`.
        """

        def take(_part: int, _offset: int, left: int) -> memoryview:
            wanted = min(left, step)
            found = view(wanted)
            if len(found) != wanted:
                raise MalformedError(_CUT_OFF)
            return found

        return self._read(take, step, checked=False)

    def fill(self, parts: Sequence[memoryview]) -> Iterator[tuple[int, int, memoryview]]:
        """As `frames`, each read where it belongs: one byte view for every part, of its length.

        Checksums are not compared: for whoever compares a digest of the whole.

        Raises:
            MalformedError, LimitError: as `frames`.
        """

        def take(part: int, offset: int, left: int) -> memoryview:
            return self._filled(parts[part][offset : offset + min(left, _CACHED_BYTES)])

        return self._read(take, _CACHED_BYTES, checked=False)

    def _read(
        self, take: Callable[[int, int, int], memoryview], step: int, *, checked: bool
    ) -> Iterator[tuple[int, int, memoryview]]:
        order = Order([part.bytes for part in self.meta.parts])
        while True:
            header = self._header()
            order.check(header)
            if header.type is FrameType.END:
                break
            crc = 0
            for start in range(0, header.length, step):
                view = take(header.part, header.offset + start, header.length - start)
                if checked:
                    crc = crc32c(view, crc)
                    if start + len(view) == header.length:
                        _compare(crc, header)
                yield header.part, header.offset + start, view
            order.took(header)
        self._payload(header, memoryview(b""))
        if self._readinto(memoryview(bytearray(1))):
            raise MalformedError("bytes after the END frame.")

    def _header(self) -> Header:
        raw = bytearray(HEADER_BYTES)
        self._fill(memoryview(raw))
        return parse_header(raw)

    def _payload(self, header: Header, view: memoryview) -> None:
        self._fill(view)
        _compare(crc32c(view), header)

    def _filled(self, view: memoryview) -> memoryview:
        self._fill(view)
        return view

    def _fill(self, view: memoryview) -> None:
        while view and (count := self._readinto(view)) != len(view):
            if not count:
                raise MalformedError(_CUT_OFF)
            view = view[count:]


def _compare(crc: int, header: Header) -> None:
    if crc != header.crc:
        raise MalformedError(
            f"checksum of the {header.type.name} frame of part {header.part} at offset "
            f"{header.offset} is wrong: the bytes were damaged."
        )
