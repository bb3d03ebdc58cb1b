"""safetensors files, streamed: a model passes through one tile, never through memory whole.

The format: u64 header length, a JSON header {name: {dtype, shape, data_offsets}}, the bytes. The
library of that name maps files into memory or builds them there; here a file is read by its own
parser, with every length checked against the file before anything is allocated.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import msgspec
import torch

from aggregation.tiles import TILE_ELEMENTS, as_bytes, spans
from protocol import limits
from protocol.errors import MalformedError
from protocol.layout import DType

HEADER_BYTES_MAX: Final = 100 << 20  # the format's own bound

CODES: Final[dict[DType, str]] = {
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "bool": "BOOL",
    "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
}  # fmt: skip
DTYPES: Final[dict[str, DType]] = {code: dtype for dtype, code in CODES.items()}
TORCH: Final[dict[DType, torch.dtype]] = {
    "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32,
    "float64": torch.float64, "bool": torch.bool, "uint8": torch.uint8, "int8": torch.int8,
    "int16": torch.int16, "int32": torch.int32, "int64": torch.int64,
}  # fmt: skip


class Entry(NamedTuple):
    """A tensor to write: its values lie flat in `values`, which is cast to `dtype` on the way."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    values: torch.Tensor


class Tensor(NamedTuple):
    """A tensor in a file: where its bytes begin, counted from the start of the file."""

    dtype: DType
    shape: tuple[int, ...]
    start: int


class _Raw(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def write(file: BinaryIO, entries: Sequence[Entry], metadata: Mapping[str, str]) -> str:
    """Write a whole file; answers with the sha256 of its bytes.

    The widest types come first, so that every tensor is aligned however the file is mapped.
    """
    ordered = sorted(entries, key=lambda entry: -TORCH[entry.dtype].itemsize)
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for entry in ordered:
        size = entry.values.numel() * TORCH[entry.dtype].itemsize
        header[entry.name] = {
            "dtype": CODES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": (offset, offset + size),
        }
        offset += size
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    for piece in (struct.pack("<Q", len(text)), text):
        digest.update(piece)
        file.write(piece)
    for entry in ordered:
        for span in spans(entry.values.numel()):
            tile = as_bytes(entry.values[span].to(TORCH[entry.dtype]))
            digest.update(tile)
            file.write(tile)
    return digest.hexdigest()


class Reader:
    """A safetensors file, open for reading; `tensors` lists what is in it, in file order."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(HEADER_BYTES_MAX, size - 8):
            raise MalformedError("this is not a safetensors file: its header cannot be there.")
        self.tensors = _parse(file.read(length), 8 + length, size)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Read a tensor's values into a flat tensor of as many elements, cast tile by tile."""
        tensor = self.tensors[name]
        self._file.seek(tensor.start)
        dtype = TORCH[tensor.dtype]
        buffer = torch.empty(min(TILE_ELEMENTS, out.numel()), dtype=dtype)
        for span in spans(out.numel()):
            tile = buffer[: span.stop - span.start]
            _fill(self._file, as_bytes(tile))
            out[span] = tile


def _fill(file: BinaryIO, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]  # raw and buffered have it
        if not count:
            raise MalformedError("the safetensors file is cut off.")
        done += count


def _parse(text: bytes, base: int, size: int) -> dict[str, Tensor]:
    try:
        raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(item, type=_Raw) for name, item in raw.items()}
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedError(f"the safetensors header cannot be read: {error}") from None
    if len(entries) > limits.TENSORS_MAX:
        raise MalformedError(f"{len(entries)} tensors; at most {limits.TENSORS_MAX} are taken.")
    tensors: dict[str, Tensor] = {}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise MalformedError(f"tensor {name!r} has type {entry.dtype!r}, which is not taken.")
        start, stop = entry.data_offsets
        fits = min(entry.shape, default=0) >= 0 and start == end
        if not fits or stop - start != math.prod(entry.shape) * TORCH[dtype].itemsize:
            raise MalformedError(f"tensor {name!r} does not lie where the header says.")
        tensors[name] = Tensor(dtype, entry.shape, base + start)
        end = stop
    if base + end != size:
        raise MalformedError("the safetensors file is longer or shorter than its header says.")
    return tensors


def open_file(path: Path) -> tuple[BinaryIO, int]:
    """The file, unbuffered, and its size: what `Reader` takes. The caller closes it."""
    return path.open("rb", buffering=0), path.stat().st_size
