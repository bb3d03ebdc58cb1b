"""Flat tensors as bytes and back, and the tile in which all work on flat parts is done.

A tile of an update and the same tile of the sum fit together into a core's second-level cache, so
one pass over main memory serves several operations. Tiles start at multiples of TILE_ELEMENTS from
the start of the part, always: where a tile ends never depends on how the bytes arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

TILE_ELEMENTS: Final = 1 << 16  # 256 KiB of float32, a quarter of a frame
TILE_BYTES: Final = 4 * TILE_ELEMENTS


def spans(elements: int) -> Iterator[slice]:
    """The tiles of a part of this length, as slices in order; none for an empty part."""
    for start in range(0, elements, TILE_ELEMENTS):
        yield slice(start, min(start + TILE_ELEMENTS, elements))


def as_bytes(flat: torch.Tensor) -> memoryview:
    """The bytes of a contiguous 1-dimensional CPU tensor, as a view."""
    return flat.view(torch.uint8).numpy().data


def from_bytes(payload: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A writable buffer as a flat tensor, as a view."""
    return torch.frombuffer(payload, dtype=dtype)


def tile_buffer() -> memoryview:
    """One reusable tile; from torch, so that it is aligned for vector instructions."""
    return as_bytes(torch.empty(TILE_BYTES, dtype=torch.uint8))
