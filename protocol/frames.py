"""Frames: bulk on the wire and at rest.

A *body* is META, then DATA frames, then END. The file that a worker writes, the bytes that an
agent sends, the spool at the coordinator and a stored snapshot are one and the same byte string,
so nobody between two torch processes copies or re-encodes anything, and an upload resumes at a
byte offset of that string.

    header, 20 bytes, little endian
    u8  type      1 META, 2 DATA, 3 END
    u8  flags     0; anything else is refused (room for later codecs)
    u16 part      index of the part in META's list; 0 for META and END
    u32 length    of the payload, at most FRAME_PAYLOAD_BYTES_MAX (META: META_BYTES_MAX)
    u64 offset    of the payload's first byte within its part
    u32 crc32c    of the payload

Each part starts in a new frame; frames of a part are contiguous and in order. Overhead is 20 bytes
per MiB plus META.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from crc32c import crc32c

from protocol import limits
from protocol.errors import LimitError, MalformedError

HEADER: Final = struct.Struct("<BBHIQI")
HEADER_BYTES: Final = HEADER.size

Buffer = bytes | bytearray | memoryview


class FrameType(enum.IntEnum):
    """What a frame holds."""

    META = 1
    DATA = 2
    END = 3


_LENGTH_MAX: Final = {
    FrameType.META: limits.META_BYTES_MAX,
    FrameType.DATA: limits.FRAME_PAYLOAD_BYTES_MAX,
    FrameType.END: 0,
}


class Header(NamedTuple):
    """A parsed frame header."""

    type: FrameType
    part: int
    length: int
    offset: int
    crc: int


def pack_header(kind: FrameType, part: int, offset: int, payload: Buffer) -> bytes:
    """The 20 bytes that go before `payload`."""
    return HEADER.pack(kind, 0, part, len(payload), offset, crc32c(payload))


def parse_header(raw: Buffer) -> Header:
    """Parse and bound-check a header.

    Raises:
        MalformedError: unknown type or flags, or a part where none belongs.
        LimitError: a length above the limit for its type.
    """
    kind, flags, part, length, offset, crc = HEADER.unpack(raw)
    try:
        type_ = FrameType(kind)
    except ValueError:
        raise MalformedError(f"frame type {kind} is unknown: this is not a Skerry body.") from None
    if flags:
        raise MalformedError(f"frame flags {flags} are unknown to this protocol.")
    if type_ is not FrameType.DATA and (part or offset):
        raise MalformedError(f"a {type_.name} frame belongs to no part, yet it names one.")
    bound = _LENGTH_MAX[type_]
    if length > bound:
        raise LimitError(
            f"a {type_.name} frame of {length} bytes is above the limit of {bound} bytes.",
            details={"limit": bound, "found": length},
        )
    return Header(type_, part, length, offset, crc)


def encode_meta(meta: bytes) -> bytes:
    """META frame, whole. Oversize is refused here, when packing, by the reader's own constant."""
    if len(meta) > limits.META_BYTES_MAX:
        raise LimitError(
            f"metadata of {len(meta)} bytes is above META_BYTES_MAX = {limits.META_BYTES_MAX}.",
            "A layout this large has very many or very long tensor names; shorten them.",
            details={"limit": limits.META_BYTES_MAX, "found": len(meta)},
        )
    return pack_header(FrameType.META, 0, 0, meta) + meta


def encode_end() -> bytes:
    """END frame, whole."""
    return pack_header(FrameType.END, 0, 0, b"")


def encode_part(part: int, payload: memoryview) -> Iterator[bytes | memoryview]:
    """DATA frames of one part: header and payload alternate, payloads are views, not copies."""
    step = limits.FRAME_PAYLOAD_BYTES_MAX
    for offset in range(0, len(payload), step):
        piece = payload[offset : offset + step]
        yield pack_header(FrameType.DATA, part, offset, piece)
        yield piece


def body_bytes(meta_bytes: int, part_bytes: Sequence[int]) -> int:
    """Exact length of a body on the wire."""
    step = limits.FRAME_PAYLOAD_BYTES_MAX
    frames = sum(-(-size // step) for size in part_bytes)
    return meta_bytes + sum(part_bytes) + HEADER_BYTES * (frames + 2)


class Order:
    """The order that frames must come in, once META has named the sizes of the parts.

    One set of rules for whoever reads a body: `Scanner` here, `bodyio.BodyReader` from a file.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._part = 0
        self._offset = 0

    def check(self, header: Header) -> None:
        """Pass when this frame may come now.

        Raises:
            MalformedError: naming what was expected and what was found.
        """
        sizes = self._sizes
        if header.type is FrameType.META:
            raise MalformedError("a second META frame.")
        while self._part < len(sizes) and self._offset == sizes[self._part]:
            self._part, self._offset = self._part + 1, 0
        if header.type is FrameType.END:
            if self._part < len(sizes):
                raise MalformedError(
                    f"the body ends after {self._offset} of {sizes[self._part]} bytes of part "
                    f"{self._part}."
                )
            return
        if self._part == len(sizes):
            raise MalformedError("more data than META declared.")
        expected = min(limits.FRAME_PAYLOAD_BYTES_MAX, sizes[self._part] - self._offset)
        if (header.part, header.offset, header.length) != (self._part, self._offset, expected):
            raise MalformedError(
                f"expected part {self._part} offset {self._offset} length {expected}, found part "
                f"{header.part} offset {header.offset} length {header.length}."
            )

    def took(self, header: Header) -> None:
        """This DATA frame came in whole, and its checksum was right."""
        self._offset += header.length


class Scanner:
    """Checks a body as its bytes arrive, whatever the chunking; keeps no payload but META's.

    The shell appends each chunk to its spool and feeds it here. `good_offset` is the length of
    the prefix that consists of whole, valid frames: after a broken connection the shell truncates
    the spool to it and the sender goes on from there; the same scanner goes on after `rewind()`,
    and after a restart of the process a new one is fed the stored prefix first.

    `on_meta(meta)` is called once with META's payload and answers with the byte sizes of the
    parts that must follow; it may raise to refuse the body before any data is taken.
    """

    def __init__(self, on_meta: Callable[[bytes], Sequence[int]]) -> None:
        self._on_meta = on_meta
        self._order: Order | None = None
        self._head = bytearray()
        self._meta = bytearray()
        self._header: Header | None = None
        self._left = 0
        self._crc = 0
        self._seen = 0
        self.good_offset = 0
        self.done = False

    def feed(self, chunk: Buffer) -> None:
        """Take the next bytes.

        Raises:
            MalformedError: bad checksum, order, size, or bytes after END; names the offset.
            LimitError: a frame above its limit.
        """
        view = memoryview(chunk)
        while view:
            if self.done:
                raise MalformedError(f"bytes after the END frame at offset {self._seen}.")
            if self._header is None:
                view = self._take_header(view)
            else:
                view = self._take_payload(self._header, view)
            if self._header is not None and self._left == 0:
                self._finish(self._header)

    def rewind(self) -> int:
        """Forget the unfinished frame; the next bytes are those at the returned `good_offset`."""
        self._head.clear()
        self._meta.clear()
        self._header, self._left, self._crc = None, 0, 0
        self._seen = self.good_offset
        return self.good_offset

    def _take_header(self, view: memoryview) -> memoryview:
        need = HEADER_BYTES - len(self._head)
        self._head += view[:need]
        self._seen += min(need, len(view))
        if len(self._head) == HEADER_BYTES:
            header = parse_header(self._head)
            self._check_order(header)
            self._header, self._left, self._crc = header, header.length, 0
            self._head.clear()
        return view[need:]

    def _take_payload(self, header: Header, view: memoryview) -> memoryview:
        piece = view[: self._left]
        self._crc = crc32c(piece, self._crc)
        if header.type is FrameType.META:
            self._meta += piece
        self._left -= len(piece)
        self._seen += len(piece)
        return view[len(piece) :]

    def _check_order(self, header: Header) -> None:
        if self._order is not None:
            self._order.check(header)
        elif header.type is not FrameType.META:
            raise MalformedError("a body must begin with its META frame.")

    def _finish(self, header: Header) -> None:
        if self._crc != header.crc:
            raise MalformedError(
                f"checksum of the {header.type.name} frame that ends at offset {self._seen} is "
                "wrong: the bytes were damaged on the way."
            )
        if header.type is FrameType.META:
            self._order = Order(self._on_meta(bytes(self._meta)))
            self._meta.clear()
        elif self._order is not None and header.type is FrameType.DATA:
            self._order.took(header)
        else:
            self.done = True
        self.good_offset = self._seen
        self._header = None
