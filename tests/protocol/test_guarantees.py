"""What is promised is said for every rule, with the job's own numbers."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.guarantees import guarantees
from protocol.jobspec import JobSpec, Pacing, Sites, TaskRef


def said(sites: Sites | None = None, **pacing: Any) -> str:
    spec = JobSpec(
        name="n", task=TaskRef(name="t"), pacing=Pacing(**pacing), sites=sites or Sites(wanted=3)
    )
    return "; ".join(guarantees(spec))


@pytest.mark.parametrize(
    ("pacing", "says", "silent"),
    [
        ({}, "is lost", "first"),
        ({"partial": True}, "do not repeat bit for bit", "the same bits"),
        ({"first": 2}, "closes with the first 2 updates", "nobody ever waits"),
        ({"late": "return"}, "stays in its site's residual", "is lost"),
        ({"late": "fold"}, "its staleness is in the journal", "is lost"),
        ({"rule": "ssp", "staleness": 3}, "clocks up to c - 4, and its own latest", "pinned"),
        ({"rule": "ssp", "reads": "pinned"}, "pinned to the oldest version", "may see newer"),
        ({"rule": "ssp", "unseen_mass": 0.2}, "0.2 of the model's norm", "clocks up to"),
        ({"rule": "async", "staleness": 7}, "at most 7 before", "waits for it"),
        ({"rule": "async"}, "nobody ever waits", "estimate"),
        ({"rule": "async", "compensation": "constant"}, "changed by an estimate", "waits for it"),
        ({"rule": "buffered", "buffer": 5}, "divided by 5", "at most one update"),
        ({"rule": "buffered", "buffer": 5, "one_per_site": True}, "at most one update", "several"),
    ],
)
def test_every_rule_says_what_it_promises(pacing: dict[str, Any], says: str, silent: str) -> None:
    text = said(**pacing)
    assert says in text
    assert silent not in text


def test_over_selection_names_how_many_close_a_round() -> None:
    assert "the first 4 updates" in said(Sites(wanted=8, select=4, over_select=0.5))
