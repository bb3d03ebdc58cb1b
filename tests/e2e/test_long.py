"""Long periods: behind proxies that cut quiet lines, beside short leases, against a deadline."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from time import monotonic

import pytest

from coordinator import journal as j
from tests.e2e.harness import Place
from tests.e2e.test_pacing import told
from tests.faultproxy import FaultProxy

pytestmark = pytest.mark.e2e


def settled(place: Place, job: str) -> list[j.UpdateSettled]:
    return [event for event in told(place, job) if isinstance(event, j.UpdateSettled)]


def appeared(folder: Path, pattern: str) -> None:
    end = monotonic() + 20
    while not list(folder.glob(pattern)):
        assert monotonic() < end, pattern


async def test_a_long_training_behind_a_proxy_that_cuts_quiet_lines_is_delivered_once(place: Place):
    """PC-039: training of 6 s, idle limit 1.2 s (15 min and 60 s, scaled); no second training."""
    await asyncio.to_thread(place.start)
    assert place.addresses
    host, _, port = place.addresses.agents.removeprefix("http://").rpartition(":")
    async with FaultProxy(host, int(port)) as proxy:
        proxy.idle_limit = 1.2
        await asyncio.to_thread(place.join, "a", step_seconds=0.3)
        place.configure("a", url=proxy.url, step_seconds=0.3)
        place.agent("a")
        job = await asyncio.to_thread(place.submit, 1, 1, period={"steps": 20})
        view = await asyncio.to_thread(place.finished, job)
        assert proxy.connections >= 5, "the line was cut again and again"
    assert [(site.site, site.epoch) for site in view.sites] == [("a", 1)]
    (only,) = await asyncio.to_thread(settled, place, job)
    assert (only.attempt, only.verdict) == (1, "queued")
    assert only.train_seconds >= 6.0


async def test_an_update_that_was_finished_while_the_line_was_down_is_delivered_later(place: Place):
    """PC-039: on reconnect the finished update is delivered, training is not repeated."""
    await asyncio.to_thread(place.start)
    assert place.addresses
    host, _, port = place.addresses.agents.removeprefix("http://").rpartition(":")
    fifo = place.folder / "fifo"
    os.mkfifo(fifo)
    writer = os.open(fifo, os.O_RDWR)
    async with FaultProxy(host, int(port)) as proxy:
        await asyncio.to_thread(place.join, "a")
        place.configure("a", url=proxy.url, wait=fifo)
        place.agent("a")
        job = await asyncio.to_thread(place.submit, 1, 1)
        await asyncio.to_thread(
            place.wait, job, lambda view: any("step 0" in site.doing for site in view.sites)
        )
        proxy.refuse = True
        proxy.cut()
        os.write(writer, b"x")
        await asyncio.to_thread(appeared, place.site_folder("a"), "jobs/*/update-1-0-1")
        proxy.refuse = False
        await asyncio.to_thread(place.finished, job)
    os.close(writer)
    (only,) = await asyncio.to_thread(settled, place, job)
    assert (only.epoch, only.attempt, only.verdict) == (1, 1, "queued")
    lines = (place.site_folder("a") / "sent.jsonl").read_bytes().splitlines()
    answers = [line.get("verdict") for line in map(json.loads, lines) if line["kind"] == "update"]
    assert answers[-1] == "queued"
    assert not any(answers[:-1]), "tries into the broken line, if any, were not answered"


def test_six_busy_sites_whose_training_outlasts_their_lease_are_all_counted(place: Place):
    """PC-038: training 3 s, lease 1.5 s (30 s and 20 s, scaled), more agents than cores."""
    place.start(flags={"lease-seconds": "1.5", "grace-seconds": "1", "long-poll-seconds": "0.5"})
    place.sites(*"abcdef", step_seconds=0.3)
    job = place.submit(wanted=6, versions=2, period={"steps": 10})
    view = place.finished(job, 60)
    assert {(site.site, site.epoch, site.counted) for site in view.sites} == {
        (name, 1, 2) for name in "abcdef"
    }
    assert {update.attempt for update in settled(place, job)} == {1}


def test_a_site_that_runs_out_of_time_delivers_what_it_has_done(place: Place):
    """With `partial` a period of 10 s counts in rounds of 2 s, with the steps that were taken."""
    place.start()
    place.sites("a", "b")
    place.join("slow", step_seconds=0.1)
    place.agent("slow")
    job = place.submit(
        wanted=3,
        versions=3,
        period={"steps": 100},
        pacing={"partial": True, "deadline_seconds": 2.0, "quorum": 2},
    )
    place.finished(job)
    steps = {(u.site, u.clock): u.steps for u in settled(place, job) if u.verdict == "queued"}
    slow = [count for (site, _), count in steps.items() if site == "slow"]
    assert slow
    assert all(1 <= count < 100 for count in slow)
    assert {count for (site, _), count in steps.items() if site != "slow"} == {100}
    assert f"was cut at step {slow[0]} of 100 by its time box of" in place.log("slow")


def test_at_the_end_agents_are_told_and_idle_without_a_word(place: Place):
    """PC-043: three agents, two rounds; then they hear nothing of the job and log nothing."""
    place.start(flags={"long-poll-seconds": "0.2"})
    place.sites("b", "c")
    place.sites("a", step_seconds=0.1)
    place.finished(place.submit(wanted=3, versions=2))
    before = {name: place.log(name) for name in "bc"}
    # Meanwhile a works on, through more than a dozen polls of the others.
    second = place.submit(wanted=1, versions=30, sites={"names": ["a"]}, period={"steps": 1})
    place.finished(second, 60)
    for name in "bc":
        assert "leaves job 'stub': the job is finished" in before[name] + place.log(name)
        added = place.log(name).removeprefix(before[name]).splitlines()
        assert len([line for line in added if "leaves job" not in line]) <= 1, added
        assert place.agents[name].process.poll() is None
