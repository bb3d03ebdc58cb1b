"""Weighted sums of the flat parts of updates, folded one after the other.

Floating-point sums depend on their order: per element, updates are added in the order in which
`add` is called, and nothing else. The caller may interleave tiles of several updates (tile 0 of
all, then tile 1 of all) without changing a bit of the result, and gains from it: the tile of the
sum stays in the cache.

Nothing here is the model: a sum that turns out to be unusable is thrown away.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from aggregation.tiles import from_bytes
from protocol.layout import ELEMENT_BYTES, Part

WIRE_DTYPE: Mapping[Part, torch.dtype] = {
    "delta": torch.float32, "params": torch.float32, "control": torch.float32,
    "buffers": torch.float32, "ints": torch.int64,
}  # fmt: skip
# Values are small and must stay within the range that the sites sent, so they get float64: rounded
# once at the end, a weighted mean lies between the smallest and the largest value, to the bit.
SUM_DTYPE: Mapping[Part, torch.dtype] = {
    "delta": torch.float32, "control": torch.float32,
    "buffers": torch.float64, "ints": torch.float64,
}  # fmt: skip


class Piece:
    """A range of one part's sum. The first update is written, the others are added."""

    __slots__ = ("_even", "_first", "_total")

    def __init__(self, total: torch.Tensor, even: torch.Tensor | None, *, first: bool) -> None:
        self._total = total
        self._even = even
        self._first = first

    def add(self, values: torch.Tensor, weight: float) -> None:
        """Fold in one update's values of this range, in the part's wire type."""
        if values.dtype is not self._total.dtype:
            values = values.to(torch.float64) if self._even is None else self._difference(values)
        if self._first:
            torch.mul(values, weight, out=self._total)
            self._first = False
        else:
            self._total.add_(values, alpha=weight)

    def _difference(self, values: torch.Tensor) -> torch.Tensor:
        """Integers as exact small differences from an even number near the first update's value.

        So equal integers average to themselves beyond 2^53 too; and because the reference is even,
        rounding the difference half to even rounds the mean half to even.
        """
        even = self._even
        assert even is not None
        if self._first:
            torch.bitwise_and(values, -2, out=even)
        difference = (values - even).to(torch.float64)
        rough = values.to(torch.float64) - even.to(torch.float64)
        return torch.where(rough.abs() < 2.0**62, difference, rough)  # int64 would wrap there


class Accumulator:
    """Sums of w_k * part_k for the parts `delta`, `buffers`, `ints`, `control` of a cohort.

    `elements` gives each part's length. Memory is one float32 per element of delta and control,
    eight bytes per element of buffers, sixteen per element of ints, whatever the cohort's size.
    """

    def __init__(self, elements: Mapping[Part, int], device: torch.device | str = "cpu") -> None:
        # Uninitialised on purpose: the first update is written, not added, which spares a pass
        # over memory that has just been mapped. `_filled` says how far that has come.
        self.sums: dict[Part, torch.Tensor] = {
            part: torch.empty(count, dtype=SUM_DTYPE[part], device=device)
            for part, count in elements.items()
        }
        self._filled: dict[Part, int] = dict.fromkeys(elements, 0)
        self._even = torch.empty(elements.get("ints", 0), dtype=torch.int64, device=device)
        self._device = torch.device(device)

    def add(self, part: Part, offset: int, payload: memoryview, weight: float) -> None:
        """Fold in one piece of one update: `payload` bytes of `part` from byte `offset` on."""
        values = from_bytes(payload, WIRE_DTYPE[part])
        self.add_values(part, offset // ELEMENT_BYTES[part], values, weight)

    def add_values(self, part: Part, start: int, values: torch.Tensor, weight: float) -> None:
        """As `add`, for a flat tensor that lies at elements [start, start + len) of the part."""
        self.piece(part, start, values.numel()).add(values.to(self._device), weight)

    def piece(self, part: Part, start: int, elements: int) -> Piece:
        """A range of a part, to which the updates of a cohort are added one after the other.

        Raises:
            ValueError: outside the part, or beyond a range that nobody has written yet.
        """
        stop = start + elements
        total = self.sums[part][start:stop]
        if total.numel() != elements:
            raise ValueError(f"part {part} has no elements {start} to {stop}.")
        first = start == self._filled[part]
        if first:
            self._filled[part] = stop
        elif stop > self._filled[part]:
            raise ValueError(f"elements {start} to {stop} of part {part} leave a gap.")
        even = self._even[start:stop] if part == "ints" else None
        return Piece(total, even, first=first)

    def complete(self) -> bool:
        """True when every element of every part was written."""
        return all(self._filled[part] == total.numel() for part, total in self.sums.items())

    def buffers_mean(self, total: float) -> torch.Tensor:
        """The convex mix of the buffers, float32: a variance never turns negative."""
        return (self.sums["buffers"] / total).to(torch.float32)

    def ints_mean(self, total: float) -> torch.Tensor:
        """The weighted mean of the integers, int64, rounded half to even."""
        mean = (self.sums["ints"] / total).round()
        wide = mean + self._even.to(torch.float64)
        exact = self._even + mean.to(torch.int64)
        # Where int64 cannot hold the difference, the sum wraps to the wrong side of the reference.
        wrapped = (exact >= self._even) != (mean >= 0.0)
        clamped = wide.clamp(-(2.0**63), 2.0**63 - 1024).to(torch.int64)
        return torch.where(wrapped, clamped, exact)
