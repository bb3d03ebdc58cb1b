"""Put tensors of one safetensors file into another, without torch and without holding either.

The format: u64 little-endian header length, JSON header {name: {dtype, shape, data_offsets}}, data.
Bytes are copied as they are, so every dtype works.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from protocol.errors import InvalidFileError, NotFoundError

_HEADER_BYTES_MAX: Final = 100 << 20  # the format's own limit
_CHUNK_BYTES: Final = 1 << 20


class _File(NamedTuple):
    path: Path
    tensors: dict[str, Any]
    metadata: dict[str, str]
    start: int  # of the data


def merge(target: Path, base: Path, names: Sequence[str] | None = None) -> None:
    """Add tensors of `base` to the file `target`, which is replaced whole or not at all.

    Args:
        names: which tensors; None: all that `target` lacks.

    Raises:
        NotFoundError: `base` lacks some of them, all are named.
        InvalidFileError: one of the files is not safetensors.
    """
    into, source = _open(target), _open(base)
    if names is None:
        names = [name for name in source.tensors if name not in into.tensors]
    lacking = [name for name in names if name not in source.tensors]
    if lacking:
        raise NotFoundError(
            f"{base} lacks {len(lacking)} of the tensors: {', '.join(lacking[:5])}.",
            "Give the model that the sites started from.",
        )
    chosen = [(into, name) for name in into.tensors]
    chosen += [(source, name) for name in names if name not in into.tensors]
    header: dict[str, Any] = {"__metadata__": into.metadata} if into.metadata else {}
    offset = 0
    for file, name in chosen:
        info = file.tensors[name]
        begin, end = info["data_offsets"]
        header[name] = {**info, "data_offsets": [offset, offset + end - begin]}
        offset += end - begin
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    part = target.with_name(target.name + ".merged")
    try:
        with part.open("wb") as out, target.open("rb") as old, base.open("rb") as new:
            out.write(len(raw).to_bytes(8, "little") + raw)
            for file, name in chosen:
                begin, end = file.tensors[name]["data_offsets"]
                _copy(old if file is into else new, out, file.start + begin, end - begin)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _open(path: Path) -> _File:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_HEADER_BYTES_MAX, size - 8):
            raise InvalidFileError(f"{path} is not a safetensors file.")
        try:
            header = json.loads(file.read(length).decode("utf-8"))
            metadata = header.pop("__metadata__", {})
            spans = [tensor["data_offsets"] for tensor in header.values()]
            good = all(0 <= begin <= end <= size - 8 - length for begin, end in spans)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            good, header, metadata = False, {}, {}
    if not good:
        raise InvalidFileError(f"the header of {path} does not fit its data.")
    return _File(path, header, metadata, 8 + length)


def _copy(source: IO[bytes], out: IO[bytes], start: int, count: int) -> None:
    source.seek(start, os.SEEK_SET)
    while count:
        piece = source.read(min(_CHUNK_BYTES, count))
        if not piece:
            raise InvalidFileError("a safetensors file became shorter while it was read.")
        out.write(piece)
        count -= len(piece)
