"""Sites that die, return, come first, come twice, or come late."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal

import pytest

from tests.e2e.harness import Place
from tests.faultproxy import FaultProxy

pytestmark = pytest.mark.e2e


def test_two_sites_train_and_every_update_is_counted_once(place: Place):
    place.start()
    place.sites("a", "b", buffers=1)
    job = place.submit(versions=3)
    view = place.finished(job)
    assert view.version == 3
    counted = [u for u in place.api.updates(job) if u.verdict == "counted"]
    assert sorted((u.site, u.clock) for u in counted) == [
        (site, clock) for site in "ab" for clock in range(3)
    ]
    assert len(set(place.digests(job))) == 4


def test_agents_that_start_before_the_coordinator_wait_and_connect(place: Place):
    """PC-075: an agent without a coordinator waits with growing pauses and few lines, then works."""
    place.start()
    place.join("a")
    place.join("b")
    place.kill()
    place.agent("a")
    place.agent("b")
    place.start()
    job = place.submit(versions=2)
    assert place.finished(job).version == 2
    assert place.log("a").count("\n") <= 12


def test_an_agent_killed_in_the_middle_of_training_comes_back_and_no_clock_is_lost(place: Place):
    place.start()
    place.sites("a")
    fifo = place.folder / "fifo"
    os.mkfifo(fifo)
    place.join("b", wait=fifo)
    agent = place.agent("b")
    job = place.submit(versions=2)
    writer = os.open(fifo, os.O_RDWR)  # training of b goes on only with a byte from here
    place.wait(job, lambda v: any(s.site == "a" and s.clock == 1 for s in v.sites))
    agent.process.send_signal(signal.SIGKILL)
    agent.process.wait(10)
    place.agent("b")
    os.write(writer, b"xxxx")
    view = place.finished(job)
    os.close(writer)
    assert view.version == 2
    assert {s.site: s.epoch for s in view.sites} == {"a": 1, "b": 1}, "it was back within its lease"


def test_a_site_that_dies_for_good_does_not_stop_the_others(place: Place):
    """PC-028: a dead process does not count toward the quorum after its lease."""
    place.start(flags={"lease-seconds": "2", "grace-seconds": "0.5"})
    place.sites("a", "b")
    fifo = place.folder / "fifo"
    os.mkfifo(fifo)
    place.join("c", wait=fifo)
    agent = place.agent("c")
    job = place.submit(wanted=3, versions=3)
    place.wait(job, lambda v: any(s.site == "a" and s.clock == 1 for s in v.sites))
    agent.process.send_signal(signal.SIGKILL)
    view = place.finished(job)
    assert view.version == 3
    first = place.versions(job)[1]
    assert first.cohort == ("a", "b")
    assert "c" in first.missing


def test_a_second_agent_with_the_same_name_is_refused_and_the_first_goes_on(place: Place):
    """PC-033: one session, one refusal that tells when the holder was last heard."""
    place.start()
    place.sites("a")
    job = place.submit(wanted=1, versions=1)
    place.finished(job)
    twin = place.folder / "sites" / "twin"
    twin.mkdir()
    for name in ("site.json", "secret", "key.pem", "agent.toml"):
        source = place.site_folder("a") / name
        (twin / name).write_bytes(source.read_bytes())
        (twin / name).chmod(0o600)
    refused = place.agent("twin").process
    second = place.submit(wanted=1, versions=3)
    assert place.finished(second).version == 3
    assert len(place.api.sites().sites) == 1
    assert refused.wait(40) == 4
    assert "last heard" in place.log("twin")


def test_a_late_joiner_contributes_from_the_next_round(place: Place):
    """PC-030: a third site takes part from the next round, and the view says since when."""
    place.start()
    fifo = place.folder / "fifo"
    os.mkfifo(fifo)
    writer = os.open(fifo, os.O_RDWR)
    place.join("a", wait=fifo)
    place.agent("a")
    place.sites("b")
    job = place.submit(versions=6)
    os.write(writer, b"xx")
    place.wait(job, lambda v: v.version >= 2)
    place.sites("c")
    place.wait(job, lambda v: any(s.site == "c" and s.active for s in v.sites))
    os.write(writer, b"xxxxxxxxx")
    view = place.finished(job)
    os.close(writer)
    joined = {s.site: s.joined_at_version for s in view.sites}
    assert joined["a"] == 0
    assert 2 <= joined["c"] <= 4
    counted = [u.site for u in place.api.updates(job) if u.verdict == "counted"]
    assert counted.count("a") == counted.count("b") == 6
    assert counted.count("c") in {6 - joined["c"], 5 - joined["c"]}


def test_a_removed_site_that_was_asleep_does_not_come_back_as_a_ghost(place: Place):
    """PC-026: stopped, removed, continued: a clear answer ends it; only a new token brings it in."""
    place.start()
    place.sites("a", "site-3")
    agent = place.agents["site-3"].process
    agent.send_signal(signal.SIGSTOP)
    place.api.site_command("site-3", "revoke", "")
    agent.send_signal(signal.SIGCONT)
    assert agent.wait(20) == 4
    assert "revoked" in place.log("site-3")
    ghost = place.agent("site-3").process
    assert ghost.wait(20) == 4
    seen = {site.name: site.state for site in place.api.sites().sites}
    assert (seen["a"], seen["site-3"]) == ("connected", "revoked")
    job = place.submit(wanted=2, versions=2)
    shutil.rmtree(place.site_folder("site-3"))
    place.sites("site-3")
    assert sorted(site.site for site in place.finished(job).sites) == ["a", "site-3"]


async def test_an_agent_killed_in_the_middle_of_an_upload_goes_on_where_it_was(place: Place):
    patient = {"lease-seconds": "60", "grace-seconds": "60"}  # it is back in time on any machine
    await asyncio.to_thread(place.start, "", patient)
    assert place.addresses
    host, _, port = place.addresses.agents.removeprefix("http://").rpartition(":")
    async with FaultProxy(host, int(port)) as proxy:
        proxy.stall_after = 2_500_000
        await asyncio.to_thread(place.sites, "a")
        await asyncio.to_thread(place.join, "b")
        place.configure("b", url=proxy.url)
        agent = place.agent("b").process
        job = await asyncio.to_thread(
            place.submit, versions=2, task={"options": {"elements": 1_000_000}}
        )
        async with asyncio.timeout(40):
            await proxy.stalled.wait()
        agent.kill()
        await asyncio.to_thread(agent.wait, 10)
        proxy.cut()
        proxy.flow()
        place.agent("b")
        view = await asyncio.to_thread(place.finished, job, 60)
    assert view.version == 2
    assert {site.site: site.epoch for site in view.sites} == {"a": 1, "b": 1}
    updates = await asyncio.to_thread(place.api.updates, job)
    assert sorted((u.site, u.clock, u.attempt) for u in updates if u.verdict == "counted") == [
        (site, clock, 1) for site in "ab" for clock in range(2)
    ]
    sent = (place.site_folder("b") / "sent.jsonl").read_bytes().splitlines()
    offsets = [line["offset"] for line in map(json.loads, sent) if line["kind"] == "update"]
    assert max(offsets) > 1_000_000, "what was stored is not sent again"


@pytest.mark.parametrize("fault", ["cut", "buffer"])
async def test_an_upload_through_a_bad_proxy_is_counted_once(place: Place, fault: str):
    """An upload that is cut in the middle, and one through a proxy that holds whole bodies back."""
    await asyncio.to_thread(place.start)
    assert place.addresses
    host, _, port = place.addresses.agents.removeprefix("http://").rpartition(":")
    async with FaultProxy(host, int(port)) as proxy:
        if fault == "cut":
            proxy.cut_after = 3_000_000
        else:
            proxy.quiet = 0.2
        await asyncio.to_thread(place.sites, "a")
        await asyncio.to_thread(place.join, "b")
        place.configure("b", url=proxy.url)
        place.agent("b")
        job = await asyncio.to_thread(
            place.submit, versions=3, task={"options": {"elements": 1_000_000}}
        )
        view = await asyncio.to_thread(place.finished, job, 60)
    assert view.version == 3
    updates = await asyncio.to_thread(place.api.updates, job)
    assert sorted((u.site, u.clock) for u in updates if u.verdict == "counted") == [
        (site, clock) for site in "ab" for clock in range(3)
    ]
    if fault == "cut":
        assert proxy.cut_after is None, "the cut happened"


async def test_version_0_is_made_once_even_when_its_upload_is_cut_and_the_coordinator_restarts(
    place: Place,
):
    """The only site builds version 0: its upload breaks, and the coordinator is killed meanwhile."""
    await asyncio.to_thread(place.start, "upload_half_stored:1")
    assert place.addresses
    host, _, port = place.addresses.agents.removeprefix("http://").rpartition(":")
    async with FaultProxy(host, int(port)) as proxy:
        proxy.cut_after = 1_000_000
        await asyncio.to_thread(place.join, "a")
        place.configure("a", url=proxy.url)
        place.agent("a")
        job = await asyncio.to_thread(
            place.submit, wanted=1, versions=2, task={"options": {"elements": 1_000_000}}
        )
        await asyncio.to_thread(place.crashed)
        assert proxy.cut_after is None, "the cut happened before"
        await asyncio.to_thread(place.start)
        view = await asyncio.to_thread(place.finished, job, 60)
    assert view.version == 2
    assert [version.version for version in await asyncio.to_thread(place.versions, job)] == [
        0,
        1,
        2,
    ]
