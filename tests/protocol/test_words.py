"""Figures for people."""

from __future__ import annotations

import pytest

from protocol.words import size, span


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB"), (4e15, "4000.0 TB")],
)
def test_sizes_are_in_decimal_units(count: float, text: str) -> None:
    assert size(count) == text


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
