"""The engine as a whole: start and stop, the disk, jobs from submission to deletion."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from coordinator import queries
from coordinator.disk import write_atomically
from coordinator.engine import Engine
from coordinator.ledger import LedgerRow
from protocol.errors import (
    BusyError,
    ConflictError,
    NotFoundError,
)
from protocol.messages import Hello, Train
from tests.coordinator.engines import Clock, running
from tests.coordinator.stubsite import (
    StubSite,
    joined,
    read_params,
    send,
    spec_of,
    state_of,
    submitted,
    update_body,
)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    async with running(tmp_path) as made:
        yield made


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


async def test_models_and_journal_are_for_the_coordinators_user_alone(tmp_path: Path) -> None:
    async with running(tmp_path / "new"):
        assert (tmp_path / "new").stat().st_mode & 0o077 == 0


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


async def test_tables_that_were_lost_are_made_anew_from_the_journal(tmp_path: Path) -> None:
    async with running(tmp_path) as engine:
        job = await submitted(engine, spec_of())
        await engine.command(job, "pause", "me")
        before = await engine.job(job)
    with sqlite3.connect(tmp_path / "skerry.db") as database:
        database.execute("DELETE FROM jobs")
    async with running(tmp_path, rebuild_tables=True) as engine:
        assert await engine.job(job) == before


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
        with pytest.raises(NotFoundError, match="not kept; kept are 4, 5"):
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


async def test_what_a_job_cost_is_exact_when_seen_and_stored_when_it_ends(tmp_path: Path) -> None:
    async with running(tmp_path) as engine:
        await joined(engine, "a")
        job = await submitted(engine, spec_of())
        engine.ledger.sources.append(lambda: engine.ledger.add("a", job, 10, 1))
        site = (await engine.sites()).sites[0]
        assert (site.bytes_up, site.bytes_down) == (10, 1)
        view = (await engine.job(job)).job
        assert (view.bytes_up, view.bytes_down) == (20, 2)
        assert (await engine.jobs()).jobs[0].bytes_up == 30
        assert await queries.load_ledger(engine._store) == []
        await engine.command(job, "stop", "me")
        stored: list[LedgerRow] = []
        while not stored:
            stored = await queries.load_ledger(engine._store)
        assert stored == [LedgerRow("a", job, 40, 4)]


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
