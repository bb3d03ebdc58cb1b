"""The profiles hold the figures that they were made from."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import pytest

from simulation.profiles import between, known_from, regions
from simulation.wan import LinkSpec


def link(profile: str, one: str, other: str) -> LinkSpec:
    found = between(profile, one, other)  # type: ignore[arg-type]
    assert found is not None
    assert found == between(profile, other, one)  # type: ignore[arg-type]
    return found


def test_a_has_ten_regions_with_all_their_pairs() -> None:
    links = [link("A", one, other) for one, other in combinations(regions("A"), 2)]
    assert len(links) == 45
    assert min(each.up_mbps for each in links) == 326
    assert fmean(each.up_mbps for each in links) == pytest.approx(658, abs=1)
    assert fmean(each.rtt_ms for each in links) == pytest.approx(137, abs=1)
    assert link("A", "sydney", "london").rtt_ms == 262


def test_b_has_round_trips_and_no_limits() -> None:
    far = link("B", "singapore", "saopaulo")
    assert (far.rtt_ms, far.up_mbps) == (328, 0)
    assert between("B", "california", "tokyo") is None
    assert known_from("B", "california") == ("virginia", "california")


def test_c_is_scarce_sixty_times_at_the_far_end_and_knows_mumbai() -> None:
    far, near = link("C", "singapore", "saopaulo"), link("C", "tokyo", "seoul")
    local = link("C", "tokyo", "tokyo")
    assert local.up_mbps / far.up_mbps == pytest.approx(60, rel=0.05)
    assert near.up_mbps / far.up_mbps > 12
    assert link("C", "mumbai", "frankfurt").rtt_ms == 115
    assert between("C", "mumbai", "tokyo") is None


def test_d_is_for_edge_boxes_anywhere() -> None:
    assert regions("D") == ()
    assert between("D", "", "") == LinkSpec(
        up_mbps=5, down_mbps=20, rtt_ms=60, rtt_spread_ms=20, loss=0.005
    )


def test_without_a_profile_links_are_short_and_wide() -> None:
    assert between("", "", "") == LinkSpec()
