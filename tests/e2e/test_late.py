"""What slow sites do is not lost, under every rule, whoever is killed: each entry adds up."""

from __future__ import annotations

from collections import defaultdict
from time import monotonic
from typing import Any

import numpy as np
import pytest

from client import sitestate
from client.statefile import StateReader
from client.stub import Floats, pretend_delta
from coordinator import journal as j
from protocol.names import file_id
from tests.client.localjobs import read_parts
from tests.e2e.harness import Place
from tests.e2e.test_pacing import told

pytestmark = pytest.mark.e2e
ELEMENTS = 1000
SITES = ("a", "b", "slow")


def residual(place: Place, job: str, site: str) -> Floats:
    """What the site owes, as it lies on its disk."""
    found = np.zeros(ELEMENTS, np.float32)
    current = sitestate.current_state(place.site_folder(site) / "jobs" / file_id(job))
    if not current.exists():
        return found  # nothing of it was taken or given back so far
    with current.open("rb") as file:
        reader = StateReader(file)
        if "residual" in reader.entries:
            reader.read_into("residual", found.data)
    return found


def balance(place: Place, job: str) -> dict[str, float]:
    """By site, how far what it produced is from what was taken, owed and thrown away."""
    taken: dict[tuple[str, int, int], str] = {}
    produced: dict[str, Floats] = defaultdict(lambda: np.zeros(ELEMENTS, np.float32))
    for event in told(place, job):
        if not isinstance(event, j.UpdateSettled):
            continue
        name = (event.site, event.epoch, event.clock)
        if event.verdict == "refused_return" and name in taken:
            del taken[name]  # a later word about one that was queued
        elif event.verdict != "refused_drop":
            produced[event.site] += pretend_delta(7, event.site, event.clock, ELEMENTS)
            if event.verdict == "queued":
                taken[name] = event.spool
    found = {}
    for site in SITES:
        rest = produced[site] - residual(place, job, site)
        for (owner, _, _), spool in taken.items():
            if owner == site:
                _, parts = read_parts(place.data / "jobs" / job / "spools" / spool)
                rest -= parts["delta"].numpy()
        found[site] = float(np.abs(rest).max())
    return found


@pytest.mark.parametrize(
    ("pacing", "expected"),
    [
        ({"rule": "bsp", "first": 2, "late": "drop"}, "refused_drop"),
        ({"rule": "bsp", "first": 2, "late": "return"}, "refused_return"),
        ({"rule": "bsp", "first": 2, "late": "fold"}, "queued"),
        ({"rule": "ssp", "staleness": 2}, "queued"),
        ({"rule": "async", "staleness": 2}, "refused_drop"),
        ({"rule": "buffered", "buffer": 3}, "queued"),
        (
            {"rule": "buffered", "buffer": 4, "quorum": 4, "concurrency": 1, "deadline_seconds": 0.6},
            "refused_return",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_slow_site_produced_is_taken_or_owed_through_kills_of_everybody(
    place: Place, pacing: dict[str, Any], expected: str
):
    """Per site and entry: produced = applied + residual + discards, as the site's disk and the
    kept updates say; the slow site's agent is killed in training, then the coordinator.
    """
    place.start()
    place.sites("a", "b", step_seconds=0.3 if "concurrency" in pacing else 0.04)
    place.join("slow", step_seconds=0.3)
    place.agent("slow")
    job = place.submit(
        wanted=3,
        versions=10_000,
        pacing=pacing | {"failed_rounds_max": 1000},
        keep={"updates": True},
        task={"options": {"elements": ELEMENTS}},
    )

    def settled(site: str, verdict: str) -> int:
        return sum((u.site, u.verdict) == (site, verdict) for u in place.api.updates(job))

    place.wait(job, lambda _: len(place.api.updates(job)) >= 3)
    agent = place.agents["slow"].process
    agent.kill()
    agent.wait(10)
    place.agent("slow")
    place.wait(job, lambda _: settled("slow", _known(expected)) >= 2)
    place.kill()
    place.start()
    before = len(place.api.updates(job))
    place.wait(job, lambda _: len(place.api.updates(job)) >= before + 4)
    place.api.command(job, "pause", "")
    place.wait(job, lambda v: v.state == "paused" and "is in" not in v.waiting)
    end = monotonic() + 20
    while max((found := balance(place, job)).values()) > 1e-4:
        assert monotonic() < end, found
    told_of = [e for e in told(place, job) if isinstance(e, j.UpdateSettled)]
    assert expected in {e.verdict for e in told_of if e.site == "slow"}
    one = np.abs(pretend_delta(7, "slow", told_of[-1].clock, ELEMENTS)).max()
    assert one > 0.1, "leaving one out would be seen"


def _known(verdict: str) -> str:
    """Queued updates are listed as counted once their version is made."""
    return "counted" if verdict == "queued" else verdict
