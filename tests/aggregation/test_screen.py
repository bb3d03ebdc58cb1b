from __future__ import annotations

import math

import pytest
import torch

from aggregation.screen import energy, energy_of, nonfinite_positions
from aggregation.tiles import TILE_ELEMENTS, as_bytes, from_bytes, spans, tile_buffer


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 17, 99])
def test_a_single_bad_number_is_seen_wherever_it_stands(bad: float, position: int):
    tile = torch.ones(100)
    tile[position] = bad
    assert math.isnan(energy(tile))
    assert nonfinite_positions(tile) == [position]


def test_infinities_of_both_signs_do_not_cancel():
    assert math.isnan(energy(torch.tensor([math.inf, -math.inf])))


def test_large_finite_numbers_are_not_taken_for_infinite():
    assert energy(torch.tensor([3e38, -3e38])) == pytest.approx(1.8e77, rel=1e-6)


def test_energy_is_the_square_of_the_norm_over_tile_borders():
    flat = torch.full((TILE_ELEMENTS + 5,), 2.0)
    assert energy_of(flat) == 4.0 * (TILE_ELEMENTS + 5)
    assert energy_of(torch.empty(0)) == 0.0


def test_tiles_start_at_fixed_places_and_cover_everything():
    assert list(spans(0)) == []
    assert [(s.start, s.stop) for s in spans(TILE_ELEMENTS + 1)] == [
        (0, TILE_ELEMENTS),
        (TILE_ELEMENTS, TILE_ELEMENTS + 1),
    ]


def test_bytes_are_views_both_ways():
    flat = torch.tensor([1, 2, 3], dtype=torch.int64)
    view = as_bytes(flat)
    from_bytes(view, torch.int64)[1] = 7
    assert flat.tolist() == [1, 7, 3]
    assert len(as_bytes(torch.empty(0))) == 0
    assert len(tile_buffer()) == 4 * TILE_ELEMENTS
