"""The coordinator is killed at every named instant, and goes on bit for bit."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest

from coordinator import crashpoints
from tests.e2e.harness import Place

pytestmark = pytest.mark.e2e
VERSIONS = 4


@pytest.fixture(scope="module")
def fault_free(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    with Place(tmp_path_factory.mktemp("calm")) as place:
        place.start()
        place.sites("a", "b", buffers=1)
        job = place.submit(versions=VERSIONS, server={"optimizer": "nesterov"})
        place.finished(job)
        return place.digests(job)


@pytest.mark.parametrize("name", crashpoints.NAMES)
def test_a_coordinator_killed_at_any_instant_goes_on_bit_equal(
    name: str, place: Place, fault_free: list[str]
):
    """PC-078: the job is listed after the restart, and goes on at the version where it stood."""
    place.start(crash_at=f"{name}:2")
    place.sites("a", "b", buffers=1)
    job = place.submit(versions=VERSIONS, server={"optimizer": "nesterov"})
    if not name.startswith("fold_"):  # those kill the fold process; the coordinator lives on
        place.crashed()
        place.start()
    view = place.finished(job)
    assert view.version == VERSIONS
    assert place.digests(job) == fault_free
    settled = place.api.updates(job)
    assert len({(u.site, u.epoch, u.clock) for u in settled if u.verdict == "counted"}) == 8


def test_ten_restarts_during_a_job_lose_nothing(place: Place):
    """PC-079: the coordinator comes up each time, ten versions are made, every exit has a reason."""
    place.start()
    place.sites("a", "b")
    job = place.submit(versions=12)
    for round_ in range(1, 11):
        place.wait(job, lambda v, least=round_: v.version >= least)
        if round_ % 2:
            place.kill()
        else:
            assert place.coordinator
            place.coordinator.process.send_signal(signal.SIGTERM)
            assert place.coordinator.process.wait(10) in {0, -signal.SIGTERM, 128 + signal.SIGTERM}
        place.start()
    assert place.finished(job).version == 12
    assert len(place.versions(job)) == 13


def test_a_killed_coordinator_leaves_no_fold_process_behind(place: Place):
    place.start()
    place.sites("a")
    job = place.submit(wanted=1, versions=1)
    place.finished(job)
    assert place.coordinator
    children = children_of(place.coordinator.process.pid)
    assert children
    place.kill()
    for pid in children:
        assert ended(pid), pid


def children_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in children.split()]


def ended(pid: int, seconds: float = 5.0) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    readable, _, _ = select.select([descriptor], [], [], seconds)
    os.close(descriptor)
    return bool(readable)
