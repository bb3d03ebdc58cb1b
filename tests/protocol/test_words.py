"""Figures for people."""

from __future__ import annotations

import pytest

from protocol.words import NAMED_MAX, size, some, span


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB"), (4e15, "4000.0 TB")],
)
def test_sizes_are_in_decimal_units(count: float, text: str) -> None:
    assert size(count) == text


def test_a_sentence_names_the_first_and_counts_the_others() -> None:
    names = [f"site-{index:02d}" for index in range(NAMED_MAX + 5)]
    assert some([]) == ""
    assert some(dict.fromkeys(names[:3]), "; ") == "site-00; site-01; site-02"
    assert some(names[:NAMED_MAX]).endswith(", site-11")
    assert some(names).endswith(", site-11, and 5 more")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 s"),
        (4, "4 s"),
        (59.6, "1 min"),
        (200, "3 min 20 s"),
        (3600, "1 h"),
        (7500, "2 h 5 min"),
        (86_400, "1 d"),
        (273_600, "3 d 4 h"),
    ],
)
def test_spans_have_at_most_two_units_and_no_empty_one(seconds: float, text: str) -> None:
    assert span(seconds) == text
