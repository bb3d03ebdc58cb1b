"""Seeded selection of a round's sites."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from coordinator.selection import over_selected, select

SITES = [f"site-{index}" for index in range(10)]


def test_the_same_seed_and_round_draw_the_same_sites_on_any_machine() -> None:
    assert select(7, 1, SITES, 3) == ("site-2", "site-7", "site-8")
    assert select(7, 1, reversed(SITES), 3) == ("site-2", "site-7", "site-8")


def test_zero_and_more_than_there_are_draw_all_in_canonical_order() -> None:
    assert select(7, 1, reversed(SITES), 0) == tuple(sorted(SITES))
    assert select(7, 1, SITES, 99) == tuple(sorted(SITES))


@given(st.integers(0, 2**63 - 1), st.integers(1, 1000), st.integers(1, 9))
def test_one_more_site_displaces_at_most_one_other(seed: int, round_: int, count: int) -> None:
    before = set(select(seed, round_, SITES, count))
    after = set(select(seed, round_, [*SITES, "new"], count))
    assert len(after) == count
    assert len(before - after) <= 1
    assert not before - after or "new" in after


def test_more_are_drawn_than_wanted_in_whole_sites() -> None:
    assert [over_selected(count, 0.1) for count in (0, 1, 10, 500)] == [0, 2, 11, 550]
    assert over_selected(500, 0.0) == 500
    assert set(select(7, 1, SITES, 3)) < set(select(7, 1, SITES, over_selected(3, 0.5)))


def test_every_site_is_drawn_equally_often() -> None:
    drawn = Counter(site for round_ in range(2000) for site in select(3, round_, SITES, 3))
    assert all(500 < drawn[site] < 700 for site in SITES), drawn
