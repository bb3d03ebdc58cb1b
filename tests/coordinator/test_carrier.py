"""What the fold process is asked, and which files go when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coordinator import actions as a
from coordinator import journal as j
from coordinator.carrier import Carrier
from coordinator.foldapi import Fold, Folded, Recover, SaveCheckpoint, Saved, Screen
from coordinator.foldclient import FoldError
from coordinator.spool import JobFolders, Quota
from coordinator.stimuli import CheckpointDone, CommitDone, CommitFacts, Stimulus
from coordinator.store import Store, sqlite_url
from tests.coordinator.stubsite import spec_of

JOB = "j-1"


class Bench:
    """A carrier whose fold process answers from a list, and what the core was told."""

    def __init__(self, folder: Path) -> None:
        self.folders = JobFolders(folder)
        self.folders.make(JOB)
        self.store = Store(sqlite_url(folder / "db"))
        self.quota = Quota(spool_bytes_max=1000, upload_bytes_max=1000)
        self.told: list[Stimulus] = []
        self.asked: list[Any] = []
        self.answers: list[Any] = []
        self.kept: frozenset[str] | None = frozenset()
        self.busy: set[Path] = set()
        self.rooms = 0
        self.carrier = Carrier(
            folders=self.folders,
            quota=self.quota,
            store=self.store,
            fold=self,  # type: ignore[arg-type]
            stimulate=self.stimulate,
            room=self.room,
            kept=lambda _: self.kept,
            busy=lambda path: path in self.busy,
        )

    async def stimulate(self, stimulus: Stimulus) -> list[a.AnyAction]:
        self.told.append(stimulus)
        return []

    async def ask(self, request: Any, _kind: type, *, size: int = 0) -> Any:
        self.asked.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def room(self, _error: FoldError) -> None:
        self.rooms += 1

    def spool(self, name: str) -> Path:
        path = self.folders.spool(JOB, name)
        path.write_bytes(b"x" * 10)
        self.quota.claim(path, 10)
        return path


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    await made.store.open()
    yield made
    await made.store.close()


def member(version: int) -> j.CohortMember:
    return j.CohortMember(site="a", epoch=1, clock=version - 1, spool=f"s{version}.body")


def closed(version: int, *members: j.CohortMember) -> j.RoundClosed:
    return j.RoundClosed(
        job=JOB, round=version, version=version, cohort=members, active_sites=2, reason=""
    )


def made(version: int) -> j.VersionMade:
    return j.VersionMade(job=JOB, version=version, digest=f"d{version}", bytes=1)


async def history(bench: Bench) -> None:
    events: list[j.Event] = [
        j.JobSubmitted(job=JOB, spec=spec_of(), by="me"),
        made(0),
        closed(1, member(1)),
        made(1),
        j.CheckpointMade(job=JOB, version=1),
        closed(2),  # void
        closed(2, j.CohortMember(site="b", epoch=1, clock=1, spool="failed.body")),  # not made
        closed(2, member(2)),
        made(2),
        closed(3, member(3)),
        made(3),
        closed(4, member(4)),
    ]
    await bench.store.append(1.0, 1.0, events)


COMMIT = a.Commit(
    job=JOB,
    spec=spec_of(),
    version=4,
    base_version=3,
    base_digest="d3",
    cohort=(member(4),),
    active_sites=2,
)


def fold_request(base: int) -> Fold:
    return Fold(
        id=0,
        job=JOB,
        folder="/f",
        spec=spec_of(),
        version=base + 1,
        base_version=base,
        base_digest=f"d{base}",
        cohort=(),
        active_sites=2,
    )


async def test_recovery_is_the_last_checkpoint_and_the_commits_after_it(bench: Bench) -> None:
    """PC-078: voided and failed rounds are no commits; each commit is refolded to its digest."""
    await history(bench)
    recover, _size = await bench.carrier.recover(fold_request(3))
    assert isinstance(recover, Recover)
    assert recover.checkpoint == 1
    found = [(f.version, f.digest, [m.spool for m in f.cohort]) for f in recover.folds]
    assert found == [(2, "d2", ["s2.body"]), (3, "d3", ["s3.body"])]
    assert {fold.active_sites for fold in recover.folds} == {2}


@pytest.mark.parametrize(("upto", "folds"), [(1, []), (2, [2])])
async def test_recovery_goes_no_further_than_the_request_begins(
    bench: Bench, upto: int, folds: list[int]
) -> None:
    await history(bench)
    request = SaveCheckpoint(id=0, job=JOB, folder="/f", version=upto)
    recover, _ = await bench.carrier.recover(request)
    assert [fold.version for fold in recover.folds] == folds
    newest, _ = await bench.carrier.recover(Screen(id=0, job=JOB, folder="/f", spool="x"))
    assert [fold.version for fold in newest.folds] == [2, 3]


async def test_a_commit_is_asked_as_the_core_said_and_reported(bench: Bench) -> None:
    bench.answers = [Folded(id=1, facts=CommitFacts(version=4, digest="d4"))]
    await bench.carrier.commit(COMMIT)
    request = bench.asked[0]
    assert (request.version, request.base_digest, request.cohort) == (4, "d3", (member(4),))
    assert bench.told == [CommitDone(job=JOB, facts=CommitFacts(version=4, digest="d4"))]


async def test_a_commit_that_finds_no_room_is_asked_again_when_there_is(bench: Bench) -> None:
    """PC-082: a full disk during a fold costs time, not the round."""
    full = FoldError("no space left", disk_full=True)
    bench.answers = [full, full, Folded(id=1, facts=CommitFacts(version=4, digest="d4"))]
    await bench.carrier.commit(COMMIT)
    assert (len(bench.asked), bench.rooms) == (3, 2)
    assert bench.told == [CommitDone(job=JOB, facts=CommitFacts(version=4, digest="d4"))]


async def test_a_commit_that_cannot_be_done_is_a_problem_for_the_core(bench: Bench) -> None:
    bench.answers = [FoldError("it died")]
    await bench.carrier.commit(COMMIT)
    assert bench.told == [CommitDone(job=JOB, facts=CommitFacts(version=4, problem="it died"))]


async def test_a_checkpoint_is_reported_with_its_problem_or_none(bench: Bench) -> None:
    bench.answers = [Saved(id=1, version=2), FoldError("no")]
    bench.store.power = True
    for _ in range(2):
        await bench.carrier.checkpoint(a.WriteCheckpoint(job=JOB, version=2))
    assert bench.asked[0].fsync
    assert bench.told == [
        CheckpointDone(job=JOB, version=2),
        CheckpointDone(job=JOB, version=2, problem="no"),
    ]


async def test_spools_go_when_told_or_when_nobody_needs_them(bench: Bench) -> None:
    told, needed, sending, left = (bench.spool(f"{name}.body") for name in "abcd")
    await bench.carrier.discard(a.Discard(job=JOB, spools=("a.body", "never-there.body")))
    assert not told.exists()
    bench.kept, bench.busy = frozenset({"b.body"}), {sending}
    await bench.carrier.prune(JOB)
    assert (needed.exists(), sending.exists(), left.exists()) == (True, True, False)
    assert bench.quota.used == 20


async def test_spools_of_a_job_that_keeps_its_updates_stay_until_told(bench: Bench) -> None:
    told, counted = (bench.spool(f"{name}.body") for name in "ab")
    bench.kept = None
    await bench.carrier.prune(JOB)
    await bench.carrier.discard(a.Discard(job=JOB, spools=("a.body",)))
    assert (told.exists(), counted.exists()) == (False, True)


async def test_old_version_files_go(bench: Bench) -> None:
    for version in range(5):
        bench.folders.version(JOB, version).write_bytes(b"x")
    await bench.carrier.keep_versions(a.KeepVersions(job=JOB, oldest=3))
    found = sorted(path.name for path in (bench.folders.job(JOB) / "versions").iterdir())
    assert found == ["3.body", "4.body"]


async def test_a_deleted_job_leaves_nothing_and_what_a_crash_leaves_is_stale(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.spool("a.body")
    with monkeypatch.context() as patch:
        patch.setattr("coordinator.carrier.shutil.rmtree", lambda *_args, **_kw: None)
        await bench.carrier.remove_job(JOB)
    assert bench.quota.used == 0
    assert [path.name for path in bench.folders.root.iterdir()] == [f"{JOB}.tmp"]
    await asyncio.gather(bench.carrier.remove_job(JOB))  # twice is fine
