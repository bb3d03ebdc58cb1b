"""Tensors and a JSON value in one safetensors file, written tensor by tensor.

One file, so that replacing it is atomic; streamed, because the library's own writer first copies
every tensor into memory. Any safetensors reader can open the result. No torch here: a tensor is
(dtype name of the format, shape, bytes).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from protocol.errors import MalformedError

DTYPE_BYTES: Final = {
    "BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8,
    "F16": 2, "BF16": 2, "F32": 4, "F64": 8,
}  # fmt: skip
_HEADER_BYTES_MAX: Final = 64 << 20


class Stored(msgspec.Struct, frozen=True):
    """One tensor to write: `data` is contiguous, in logical order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


class Entry(msgspec.Struct, frozen=True):
    """One tensor of a file: its bytes lie at [start, stop) after the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def write_state(path: Path, value: Mapping[str, Any], tensors: Iterable[Stored]) -> None:
    """Write `value` (JSON) and the tensors; a file of that name is replaced in one step."""
    items = list(tensors)
    header: dict[str, Any] = {"__metadata__": {"value": msgspec.json.encode(value).decode()}}
    end = 0
    for item in items:
        start, end = end, end + item.data.nbytes
        header[item.name] = Entry(item.dtype, item.shape, (start, end))
    raw = msgspec.json.encode(header)
    raw += b" " * (-len(raw) % 8)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little"))
        file.write(raw)
        for item in items:
            if item.data.nbytes:
                file.write(item.data.cast("B"))
    os.replace(temporary, path)  # noqa: PTH105  the name says that it replaces


class StateReader:
    """An open state file: `value`, `entries`, and the bytes of each on demand.

    Raises:
        MalformedError: the file is damaged, or is something else.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        try:
            size = int.from_bytes(file.read(8), "little")
            if size > _HEADER_BYTES_MAX:
                raise MalformedError(f"a state file with a header of {size} bytes.")
            header = msgspec.json.decode(file.read(size), type=dict[str, msgspec.Raw])
            metadata = msgspec.json.decode(header.pop("__metadata__"), type=dict[str, str])
            self.value: dict[str, Any] = msgspec.json.decode(metadata["value"])
            self.entries = {
                name: msgspec.json.decode(raw, type=Entry) for name, raw in header.items()
            }
        except (msgspec.MsgspecError, KeyError) as error:
            raise MalformedError(f"this state file cannot be read: {error}") from None
        self._base = 8 + size

    def read_into(self, name: str, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of a tensor."""
        entry = self.entries[name]
        start, stop = entry.data_offsets
        expected = math.prod(entry.shape) * DTYPE_BYTES.get(entry.dtype, 0)
        if not stop - start == expected == buffer.nbytes:
            raise MalformedError(f"tensor {name!r} of this state file has an impossible size.")
        self._file.seek(self._base + start)
        view = buffer.cast("B") if buffer.nbytes else buffer
        done = 0
        while done < len(view):
            count = self._file.readinto(view[done:])  # type: ignore[attr-defined]
            if not count:
                raise MalformedError("this state file is cut off.")
            done += count


def read_value(path: Path) -> dict[str, Any]:
    """Only the JSON value of a state file; empty when there is no such file."""
    try:
        with path.open("rb") as file:
            return StateReader(file).value
    except FileNotFoundError:
        return {}
