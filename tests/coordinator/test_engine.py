"""The engine: batches in order and whole, sessions, disk, jobs from submission to deletion."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sqlite3
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from sqlalchemy.exc import IntegrityError, OperationalError

from coordinator.disk import DiskWatch, write_atomically
from coordinator.engine import Engine
from coordinator.stimuli import JobSubmission, Tick
from protocol.errors import (
    BusyError,
    ConflictError,
    InvalidFileError,
    NotFoundError,
    RefusedError,
    RemovedError,
)
from protocol.messages import Bye, Events, Hello, Prepare, Progress, Train
from protocol.views import JobRequest
from tests.coordinator import fakefold
from tests.coordinator.stubsite import (
    StubSite,
    joined,
    read_params,
    send,
    settings_of,
    spec_of,
    state_of,
    submitted,
    update_body,
)

FAKE = (sys.executable, str(Path(fakefold.__file__)))


@dataclasses.dataclass
class Clock:
    """Turns on demand; `free` bytes are what the disk has."""

    now: float = 50.0
    wall: float = 1_700_000_000.0
    free: int = 1 << 40

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.wall


@contextlib.asynccontextmanager
async def running(
    folder: Path, *, clock: Clock | None = None, real: bool = False, **changes: object
) -> AsyncIterator[Engine]:
    """An engine on `folder`; its fold process is a fake one unless `real`."""
    if not real:
        changes["fold_command"] = FAKE
    settings = settings_of(folder, **changes)
    if clock is None:
        engine = Engine(settings)
    else:
        disk = DiskWatch(folder, settings.disk_reserve_bytes, free=lambda _: clock.free)
        engine = Engine(settings, clock.monotonic, wall=clock.time, disk=disk)
    await engine.start()
    try:
        async with asyncio.timeout(60.0):
            yield engine
    finally:
        await engine.stop()


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    async with running(tmp_path) as made:
        yield made


# ---------------------------------------------------------------- life


async def test_one_coordinator_per_folder(engine: Engine) -> None:
    with pytest.raises(ConflictError, match=f"process {os.getpid()}"):
        await Engine(engine.settings).start()
    assert engine.health().status == "ok"


async def test_health_says_when_it_does_not_run(tmp_path: Path) -> None:
    async with running(tmp_path) as engine:
        pass
    assert engine.health().status == "failing"
    await engine.stop()  # twice is fine


async def test_litter_of_an_interrupted_process_goes_at_the_start(tmp_path: Path) -> None:
    """PC-081: temporary files of killed saves are removed, what belongs to jobs is kept."""
    (tmp_path / "jobs" / "j-1" / "checkpoints" / "3.tmp").mkdir(parents=True)
    (tmp_path / "jobs" / "j-1" / "checkpoints" / "3.tmp" / "model").write_bytes(b"x" * 1000)
    (tmp_path / "exports").mkdir()
    (tmp_path / "exports" / "old.safetensors").write_bytes(b"x")
    write_atomically(tmp_path / "jobs" / "j-1" / "kept", b"y")
    async with running(tmp_path):
        found = {path.name for path in (tmp_path / "jobs").rglob("*") if path.is_file()}
        assert found == {"kept"}
        assert list((tmp_path / "exports").iterdir()) == []


async def test_job_time_goes_on_from_the_journal_whatever_the_wall_clock_does(
    tmp_path: Path,
) -> None:
    clock = Clock()
    async with running(tmp_path, clock=clock) as engine:
        clock.now += 7.0
        await submitted(engine, spec_of())
        last = await engine.subscribe(0).__anext__()  # type: ignore[attr-defined]
        assert last.entries[0].now == clock.wall + 7.0
    clock.wall -= 3600.0
    clock.now = 3.0  # another boot
    async with running(tmp_path, clock=clock) as engine:
        clock.now += 5.0
        job = await submitted(engine, spec_of())
        row = (await engine.journal(job)).entries[0]
        assert row.now == 1_700_000_000.0 + 7.0 + 5.0
        assert (await engine.job(job)).job.created_at == clock.wall  # people get the wall clock


# ---------------------------------------------------------------- batches


async def test_a_cancelled_caller_leaves_no_batch_half_done(engine: Engine) -> None:
    calls = [
        asyncio.ensure_future(
            engine.stimulate(JobSubmission(job=f"j-{number}", spec=spec_of(), by="me"))
        )
        for number in range(10)
    ]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await submitted(engine, spec_of())  # what was before it in the inbox is done now
    listed = {view.id for view in (await engine.jobs()).jobs}
    for number in range(10):
        if f"j-{number}" in listed:
            assert len((await engine.journal(f"j-{number}")).entries) >= 1
    assert {f"j-{number}" for number in range(1, 10, 2)} <= listed


async def test_a_refusal_changes_nothing(engine: Engine) -> None:
    job = await submitted(engine, spec_of())
    before = engine.last_seq()
    with pytest.raises(ConflictError):
        await engine.command(job, "resume", "me")
    with pytest.raises(NotFoundError):
        await engine.command("j-nothing", "stop", "me")
    assert engine.last_seq() == before


async def test_nothing_goes_on_until_the_journal_can_be_written_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PC-082: SQLite says 'disk is full': health fails, the batch waits, nothing is lost."""
    store = engine._store
    append, failures = store.append, 2
    seen: list[str] = []

    async def failing(*args: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            if failures == 0:
                seen.append(engine.health().reasons[0])
            raise OperationalError(
                "INSERT", {}, sqlite3.OperationalError("database or disk is full")
            )
        return await append(*args)

    monkeypatch.setattr(store, "append", failing)
    job = await submitted(engine, spec_of())
    assert seen == ["the journal cannot be written: database or disk is full"]
    assert engine.health().status == "ok"
    assert (await engine.journal(job)).entries[0].seq == 1


async def test_rows_that_no_database_would_take_end_this_process(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refusing(*_args: Any) -> Any:
        raise IntegrityError("INSERT", {}, sqlite3.IntegrityError("NOT NULL constraint failed"))

    monkeypatch.setattr(engine._store, "append", refusing)
    with pytest.raises(IntegrityError):
        await submitted(engine, spec_of())
    assert engine.failed.is_set()
    assert "internal error" in engine.health().reasons[0]


async def test_somebody_else_on_the_journal_ends_this_process(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._store, "last_seq", -1)  # as if it had not seen the first row
    await submitted(engine, spec_of())
    monkeypatch.setattr(engine._store, "last_seq", -1)
    with pytest.raises(ConflictError, match="another coordinator"):
        await submitted(engine, spec_of())
    assert engine.failed.is_set()
    assert engine.health().status == "failing"
    with pytest.raises(ConflictError, match="another coordinator"):
        await submitted(engine, spec_of())


async def test_those_who_follow_get_every_row_and_end_with_the_engine(tmp_path: Path) -> None:
    async with running(tmp_path) as engine:
        rows: list[int] = []
        half = asyncio.Event()

        async def follow(job: str) -> None:
            async for page in engine.subscribe(0, job):
                assert page is not None
                rows.extend(line.seq for line in page.entries)
                half.set()

        first = await submitted(engine, spec_of())
        task = asyncio.ensure_future(follow(first))
        await half.wait()
        await submitted(engine, spec_of())
        await engine.command(first, "stop", "me")
        await state_of(engine, first, "stopped")
    await asyncio.wait_for(task, 5.0)
    assert rows == sorted(set(rows))
    assert len(rows) == 3  # submitted, commanded, moved; none of the other job


# ---------------------------------------------------------------- sites


async def test_a_live_namesake_is_refused_with_the_time_it_was_heard(engine: Engine) -> None:
    """PC-033: the second process under a name learns who holds it."""
    await joined(engine, "a")
    welcome = await engine.open_session("a", Hello(instance="one"))
    with pytest.raises(ConflictError, match="already connected") as caught:
        await engine.open_session("a", Hello(instance="two"))
    assert caught.value.details["last_heard_seconds"] is not None
    engine.check_session("a", welcome.session)  # the first is not disturbed
    again = await engine.open_session("a", Hello(instance="one"))
    engine.check_session("a", again.session)
    with pytest.raises(ConflictError, match="hello again"):
        engine.check_session("a", welcome.session)


async def test_events_are_told_once_however_often_they_are_posted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await joined(engine, "a")
    welcome = await engine.open_session("a", Hello(instance="one"))
    told: list[int] = []
    stimulate = engine._runner.stimulate

    async def listening(stimulus: Any) -> Any:
        told.append(stimulus.event.step)
        return await stimulate(stimulus)

    monkeypatch.setattr(engine._runner, "stimulate", listening)

    def progress(*steps: int) -> tuple[Progress, ...]:
        return tuple(Progress(job="j", epoch=1, clock=1, step=step, of=9) for step in steps)

    for first, steps in ((5, (5, 6)), (5, (5, 6)), (6, (6, 7)), (8, (8,))):
        await engine.site_events("a", welcome.session, Events(first=first, items=progress(*steps)))
    assert told == [5, 6, 7, 8]
    with pytest.raises(ConflictError, match="event 9 was expected"):
        await engine.site_events("a", welcome.session, Events(first=10, items=progress(10)))
    with pytest.raises(ConflictError):
        await engine.site_events("a", "another", Events(first=9, items=progress(9)))


async def test_an_event_that_the_core_refuses_does_not_hold_up_the_next(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await joined(engine, "a")
    welcome = await engine.open_session("a", Hello(instance="one"))
    told: list[int] = []

    async def refusing(stimulus: Any) -> Any:
        told.append(stimulus.event.step)
        raise NotFoundError("no such job")

    monkeypatch.setattr(engine._runner, "stimulate", refusing)
    events = tuple(Progress(job="j", epoch=1, clock=1, step=step, of=9) for step in (1, 2))
    await engine.site_events("a", welcome.session, Events(first=1, items=events))
    assert told == [1, 2]


async def test_a_revoked_site_is_told_and_never_comes_back(engine: Engine) -> None:
    secret = await joined(engine, "a")
    await engine.open_session("a", Hello(instance="one"))
    box = engine.mailbox("a")
    await engine.site_command("a", "revoke", "me", "lost laptop")
    said = [item for item in (await box.wait(0, 1.0)).items if isinstance(item, Bye)]
    assert said
    assert not said[0].retry
    assert "lost laptop" in said[0].reason
    with pytest.raises(RemovedError):
        engine.authenticate_site(secret)
    with pytest.raises(ConflictError):
        engine.mailbox("a")
    assert [(site.name, site.state) for site in (await engine.sites()).sites] == [("a", "revoked")]


async def test_a_drained_site_comes_back_only_as_another_process(engine: Engine) -> None:
    await joined(engine, "a")
    await engine.open_session("a", Hello(instance="one"))
    await engine.site_command("a", "drain", "me")
    assert (await engine.sites()).sites[0].state == "drained"
    with pytest.raises(RefusedError, match="drained"):
        await engine.open_session("a", Hello(instance="one"))
    await engine.open_session("a", Hello(instance="two"))
    assert (await engine.sites()).sites[0].state == "connected"


async def test_silence_counts_only_while_the_coordinator_could_hear(tmp_path: Path) -> None:
    """PC-089: the loop stands still for 15 s with a lease of 10 s; the site is kept. Later, 15 s
    of real silence end it.
    """
    clock = Clock()
    async with running(tmp_path, clock=clock, lease_seconds=10.0) as engine:
        await joined(engine, "a")
        await engine.open_session("a", Hello(instance="one"))
        clock.now += 15.0  # nothing ran meanwhile, neither timers nor sockets
        await submitted(engine, spec_of())
        assert (await engine.sites()).sites[0].state == "connected"
        for _ in range(40):  # the loop runs, nothing is heard
            clock.now += 0.5
            engine._runner._notice_stall()
            await engine.stimulate(Tick())
        assert (await engine.sites()).sites[0].state == "away"


async def test_newcomers_take_turns_to_download(tmp_path: Path) -> None:
    """PC-031: 20 sites want the model at once; at most 4 get it, and the core answers meanwhile."""
    async with running(tmp_path, downloads_max=4) as engine:
        inside = most = 0
        may_end = asyncio.Event()
        full = asyncio.Event()

        async def download() -> None:
            nonlocal inside, most
            async with engine.download_slot():
                inside += 1
                most = max(most, inside)
                if inside == 4:
                    full.set()
                await may_end.wait()
                inside -= 1

        tasks = [asyncio.ensure_future(download()) for _ in range(20)]
        await full.wait()
        await joined(engine, "a")
        began = asyncio.get_running_loop().time()
        await engine.open_session("a", Hello(instance="one"))
        engine.heard("a")
        assert asyncio.get_running_loop().time() - began < 1.0
        may_end.set()
        await asyncio.gather(*tasks)
        assert most == 4


# ---------------------------------------------------------------- the disk


async def test_a_full_disk_is_said_and_got_over(tmp_path: Path) -> None:
    """PC-082: health turns degraded, the job says why it waits, and both recover by themselves."""
    clock = Clock()
    async with running(tmp_path, clock=clock, disk_reserve_bytes=1000) as engine:
        clock.free = 10
        await engine._look_at_disk()
        health = engine.health()
        assert health.status == "degraded"
        assert "disk full: 10 bytes are free" in health.reasons[0]
        with pytest.raises(BusyError, match="disk"):
            await engine.begin_init_file(100)
        waiting = asyncio.ensure_future(engine.room())
        await submitted(engine, spec_of())  # the reserve is what the journal goes on with
        assert not waiting.done()
        clock.free = 1 << 30
        await engine._look_at_disk()
        await waiting
        assert engine.health().status == "ok"


# ---------------------------------------------------------------- the ledger


async def test_the_ledger_survives_a_restart_and_is_shown(tmp_path: Path) -> None:
    async with running(tmp_path) as engine:
        await joined(engine, "a")
        job = await submitted(engine, spec_of())
        engine.ledger.add("a", job, 1000, 200)
        engine.ledger.add("a", "", 30, 4)
    async with running(tmp_path) as engine:
        view = (await engine.job(job)).job
        assert (view.bytes_up, view.bytes_down) == (1000, 200)
        site = (await engine.sites()).sites[0]
        assert (site.bytes_up, site.bytes_down) == (1030, 204)
        engine.ledger.add("a", job, 1, 0)
    async with running(tmp_path) as engine:
        assert (await engine.job(job)).job.bytes_up == 1001


# ---------------------------------------------------------------- jobs


async def test_only_an_ended_job_is_deleted_and_then_all_of_it_goes(tmp_path: Path) -> None:
    async with running(tmp_path) as engine:
        await joined(engine, "a")
        job, other = [await submitted(engine, spec_of()) for _ in range(2)]
        engine.ledger.add("a", job, 7, 0)
        with pytest.raises(ConflictError):
            await engine.delete(job, "me")
        await engine.command(job, "stop", "me")
        folder = tmp_path / "jobs" / job
        assert folder.exists()
        await engine.delete(job, "me")
        assert not folder.exists()
        for call in (engine.job, engine.versions, engine.updates, engine.journal):
            with pytest.raises(NotFoundError, match=job):
                await call(job)
        seq = engine.last_seq()
    async with running(tmp_path) as engine:
        assert engine.last_seq() == seq  # no number is used twice
        assert [view.id for view in (await engine.jobs()).jobs] == [other]
        assert (await engine.sites()).sites[0].bytes_up == 7
        with pytest.raises(NotFoundError):
            await engine.delete(job, "me")


async def test_a_site_that_takes_no_part_uploads_nothing(engine: Engine) -> None:
    await joined(engine, "a")
    job = await submitted(engine, spec_of())
    what = {"job": job, "site": "a", "epoch": 1, "clock": 0, "attempt": 1}
    with pytest.raises(RefusedError, match="no part"):
        await engine.begin_upload(**what, offset=0, length=10)  # type: ignore[arg-type]
    with pytest.raises(NotFoundError):
        await engine.begin_upload(**{**what, "job": "../x"}, offset=0, length=10)  # type: ignore[arg-type]
    with pytest.raises(NotFoundError):
        engine.version_file("../../etc", 0)


async def test_a_file_for_version_0_that_is_not_there_leaves_no_job(
    engine: Engine, tmp_path: Path
) -> None:
    for name in ("0" * 16, "../../../etc/passwd", ""):
        if name:
            with pytest.raises(NotFoundError, match="no uploaded file"):
                await engine.submit(JobRequest(spec=spec_of(), init=name), "me")
    assert (await engine.jobs()).jobs == ()
    assert list((tmp_path / "jobs").iterdir()) == []


async def test_a_file_for_version_0_that_breaks_off_leaves_nothing(
    engine: Engine, tmp_path: Path
) -> None:
    file = await engine.begin_init_file(100)
    await file.write(b"x" * 50)
    await file.broken()
    file = await engine.begin_init_file(100)
    await file.write(b"x" * 50)
    with pytest.raises(ConflictError, match="50 of 100"):
        await file.finish()
    assert list((tmp_path / "inits").iterdir()) == []


# ---------------------------------------------------------------- whole jobs, with a real fold


async def test_a_job_from_submission_to_export(tmp_path: Path) -> None:
    async with running(tmp_path, real=True) as engine:
        for name in ("a", "b"):
            await joined(engine, name)
        spec = spec_of(wanted=2, versions=5, keep=2, checkpoint_every=2, evaluate=True)
        job = await submitted(engine, spec)
        sites = [StubSite(engine, "a", step=1.0), StubSite(engine, "b", step=3.0)]
        await asyncio.gather(*(site.run() for site in sites))
        assert await state_of(engine, job, "finished") == "finished"

        view = (await engine.job(job)).job
        assert view.version == 5
        assert view.created_at <= (view.ended_at or 0.0)
        assert view.dense_bytes == 10 * 2 * 16  # 10 updates, both ways, 4 floats
        versions = (await engine.versions(job)).versions
        assert [version.version for version in versions] == [0, 1, 2, 3, 4, 5]
        assert versions[5].cohort == ("a", "b")
        assert versions[5].metrics["loss"].value == pytest.approx(1 / 6)
        assert set(versions[5].per_site) == {"a", "b"}
        assert [v.version for v in (await engine.versions(job, after=3)).versions] == [4, 5]
        updates = (await engine.updates(job)).updates
        assert len(updates) == 10
        assert {update.verdict for update in updates} == {"counted"}
        assert len((await engine.updates(job, after=7)).updates) == 3

        # Mean of (step + clock) over both sites, summed over the clocks: 2 + 3 + 4 + 5 + 6.
        assert read_params(engine.version_file(job, 5)) == [20.0] * 4
        path, missing = await engine.export(job)
        assert missing == ()
        assert load_file(path)["w"].tolist() == [20.0] * 4
        for version in (0, 1, 2, 3):
            with pytest.raises(NotFoundError):
                engine.version_file(job, version)
        with pytest.raises(NotFoundError, match="not kept"):
            await engine.export(job, 1)

        train = next(item for item in sites[0].log if isinstance(item, Train) and item.clock == 4)
        state = await engine.upload_state(job=job, site="a", epoch=1, clock=4, attempt=1)
        assert state.verdict == "counted"
        body = update_body("a", train, [9.0] * 4)  # sent again: told again, not stored again
        upload = await engine.begin_upload(
            job=job, site="a", epoch=1, clock=4, attempt=1, offset=0, length=len(body)
        )
        assert (await send(upload, body)).verdict == "counted"
    assert list((tmp_path / "jobs" / job / "spools").iterdir()) == []
    assert [path.name for path in (tmp_path / "jobs" / job / "checkpoints").iterdir()] == ["5"]


async def test_a_restart_in_the_middle_goes_on_at_the_same_version(tmp_path: Path) -> None:
    """PC-078: stop in round 3 of 6; the job is listed, finished rounds are not repeated."""
    async with running(tmp_path, real=True) as engine:
        await joined(engine, "a")
        job = await submitted(engine, spec_of(versions=6, durability="power"))
        site = StubSite(engine, "a")
        site.hold_at = 2
        task = asyncio.ensure_future(site.run())
        await site.held.wait()
        assert (await engine.job(job)).job.version == 2
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    async with running(tmp_path, real=True) as engine:
        view = (await engine.job(job)).job
        assert (view.state, view.version) == ("running", 2)
        again = StubSite(engine, "a")
        await again.run("two")
        trained = [item.clock for item in again.log if isinstance(item, Train)]
        assert trained == [2, 3, 4, 5]
        assert (await engine.job(job)).job.version == 6
        assert read_params(engine.version_file(job, 6)) == [21.0] * 4  # 1 + 2 + ... + 6


async def test_a_job_starts_from_a_persons_file(tmp_path: Path) -> None:
    async with running(tmp_path, real=True) as engine:
        import numpy as np

        source = tmp_path / "start.safetensors"
        save_file({"w": np.full(4, 100.0, dtype=np.float32)}, source)
        body = source.read_bytes()
        file = await engine.begin_init_file(len(body))
        await file.write(body)
        stored = await file.finish()
        await joined(engine, "a")
        spec = spec_of(versions=1)
        job = await engine.submit(JobRequest(spec=spec, init=stored.init), "me")
        site = StubSite(engine, "a")
        await site.run()
        assert read_params(engine.version_file(job, 1)) == [101.0] * 4
        assert isinstance(site.log[0], Prepare)
        with pytest.raises(NotFoundError, match="no uploaded file"):  # it is used up
            await engine.submit(JobRequest(spec=spec, init=stored.init), "me")

        file = await engine.begin_init_file(9)
        await file.write(b"no tensor")
        bad = await file.finish()
        with pytest.raises(InvalidFileError, match="version 0"):
            await engine.submit(JobRequest(spec=spec, init=bad.init), "me")
        assert len((await engine.jobs()).jobs) == 1
