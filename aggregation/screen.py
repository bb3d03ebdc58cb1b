"""Is every number finite, and how long is the vector: one pass, one reduction per tile."""

from __future__ import annotations

import math

import torch

from aggregation.tiles import spans


def energy(tile: torch.Tensor) -> float:
    """Sum of squares of a flat float32 tile; NaN exactly when the tile holds NaN or infinity.

    The dot product serves as the finite check: a NaN or an infinity cannot hide in it. Only when
    it overflows is the tile looked at again, in float64, where squares of float32 always fit.
    """
    quick = float(torch.dot(tile, tile))
    if math.isfinite(quick):
        return quick
    if not bool(torch.isfinite(tile).all()):
        return math.nan
    wide = tile.to(torch.float64)
    return float(torch.dot(wide, wide))


def energy_of(flat: torch.Tensor) -> float:
    """`energy` of a whole flat part, tile by tile; NaN when any tile is."""
    return math.fsum(energy(flat[span]) for span in spans(flat.numel()))


def nonfinite_positions(tile: torch.Tensor) -> list[int]:
    """Indices of NaN and infinity in a flat tile."""
    found: list[int] = torch.nonzero(~torch.isfinite(tile)).flatten().tolist()
    return found
