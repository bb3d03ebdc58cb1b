"""Uploads on disk: quota, resume, take-over, a full disk, one settlement."""

from __future__ import annotations

import asyncio
import errno
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator import spool as spool_module
from coordinator.disk import DiskWatch
from coordinator.spool import JobFolders, Quota, SpoolFile, UploadKey
from coordinator.uploads import SettledUpload, Upload, Uploads, check_init, check_update
from protocol.errors import BusyError, ConflictError, LimitError, MalformedError
from protocol.limits import MIB
from protocol.messages import Receipt, Train, VersionRef
from protocol.names import file_id
from tests.coordinator.stubsite import init_body, send, update_body

TRAIN = Train(
    job="j-1", epoch=2, clock=3, attempt=1, base=VersionRef(version=3, digest="d", bytes=1)
)
KEY = UploadKey("j-1", "site", 2, 3, 1)


class Bench:
    """Uploads in a folder, and what was settled."""

    def __init__(self, folder: Path, *, spool: int = 64 * MIB, upload: int = 64 * MIB) -> None:
        self.folders = JobFolders(folder)
        self.folders.make("j-1")
        self.free = 1 << 40
        self.disk = DiskWatch(folder, 0, free=lambda _: self.free)
        self.quota = Quota(spool_bytes_max=spool, upload_bytes_max=upload)
        self.uploads = Uploads(self.quota, self.disk)
        self.settled: list[int] = []
        self.settling = asyncio.Event()
        self.may_settle = asyncio.Event()
        self.may_settle.set()

    async def settle(self, total: int) -> Receipt:
        self.settling.set()
        await self.may_settle.wait()
        self.settled.append(total)
        return Receipt(offset=total, verdict="queued", reason="in the open round")

    def path(self, key: UploadKey = KEY) -> Path:
        return self.folders.spool(key.job, key.spool)

    async def begin(self, length: int, *, offset: int = 0, key: UploadKey = KEY) -> Upload:
        return await self.uploads.begin(
            self.path(key), check_update(key), self.settle, offset=offset, length=length
        )


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def body() -> bytes:
    return update_body("site", TRAIN, [0.5] * 600_000)  # three frames


def test_a_spool_is_named_after_its_identity_in_any_language() -> None:
    name = UploadKey("j-1", "病院-3", 1, 2, 3).spool
    assert name == f"{file_id('病院-3')}-1-2-3.body"
    assert name.isascii()


@pytest.mark.parametrize("job", ["", "..", "a/b", "../x", "j 1", "é"])
def test_a_job_folder_cannot_lie_elsewhere(tmp_path: Path, job: str) -> None:
    with pytest.raises(MalformedError):
        JobFolders(tmp_path).job(job)


async def test_a_whole_body_is_stored_as_sent_and_settled_once(bench: Bench, body: bytes) -> None:
    upload = await bench.begin(len(body))
    receipt = await send(upload, body)
    assert receipt == Receipt(offset=len(body), verdict="queued", reason="in the open round")
    assert bench.path().read_bytes() == body
    assert bench.settled == [len(body)]
    assert bench.quota.used == len(body)


@pytest.mark.parametrize("cut", [5, 20, 300, 500, MIB, MIB + 700, 2 * MIB + 900])
async def test_a_broken_upload_goes_on_at_the_last_whole_frame(
    bench: Bench, body: bytes, cut: int
) -> None:
    upload = await bench.begin(len(body))
    await upload.write(body[:cut])
    await upload.broken()
    good = await bench.uploads.stored(bench.path(), check_update(KEY))
    assert good <= cut
    assert bench.path().stat().st_size == good == bench.quota.used
    with pytest.raises(ConflictError) as caught:
        await bench.begin(len(body) - good - 1, offset=good + 1)
    assert caught.value.details["offset"] == good
    upload = await bench.begin(len(body) - good, offset=good)
    assert (await send(upload, body[good:])).verdict == "queued"
    assert bench.path().read_bytes() == body


async def test_a_restarted_coordinator_finds_the_offset_again(tmp_path: Path, body: bytes) -> None:
    """PC-078: what was stored before a kill is not sent again, even if its tail was torn."""
    first = Bench(tmp_path)
    upload = await first.begin(len(body))
    await upload.write(body[: 2 * MIB + 5])  # and the process is gone: nobody truncates
    second = Bench(tmp_path)
    second.quota.scan(second.folders.root)
    assert second.quota.used == 2 * MIB + 5
    good = await second.uploads.stored(second.path(), check_update(KEY))
    assert MIB < good < 2 * MIB + 5
    upload = await second.begin(len(body) - good, offset=good)
    await send(upload, body[good:])
    assert second.path().read_bytes() == body


async def test_a_body_stored_whole_before_a_restart_needs_no_byte_more(
    tmp_path: Path, body: bytes
) -> None:
    first = Bench(tmp_path)
    await (await first.begin(len(body))).write(body)
    second = Bench(tmp_path)
    assert await second.uploads.stored(second.path(), check_update(KEY)) == len(body)
    upload = await second.begin(0, offset=len(body))
    assert (await upload.finish()).verdict == "queued"


async def test_a_damaged_frame_is_refused_and_what_was_good_before_is_kept(
    bench: Bench, body: bytes
) -> None:
    bad = bytearray(body)
    bad[MIB + 2000] ^= 1
    upload = await bench.begin(len(body))
    with pytest.raises(MalformedError, match="checksum"):
        await send(upload, bytes(bad))
    await upload.broken()
    good = bench.path().stat().st_size
    assert MIB < good < MIB + 2000
    upload = await bench.begin(len(body) - good, offset=good)
    assert (await send(upload, body[good:])).verdict == "queued"


@pytest.mark.parametrize(
    "key",
    [
        UploadKey("j-1", "other", 2, 3, 1),
        UploadKey("j-1", "site", 1, 3, 1),
        UploadKey("j-1", "site", 2, 4, 1),
        UploadKey("j-1", "site", 2, 3, 2),
    ],
)
async def test_metadata_must_be_what_the_request_says(
    bench: Bench, body: bytes, key: UploadKey
) -> None:
    upload = await bench.begin(len(body), key=key)
    with pytest.raises(MalformedError, match="metadata is of"):
        await send(upload, body)
    await upload.broken()
    assert bench.quota.used == 0


async def test_a_length_that_metadata_contradicts_is_refused_before_any_data(
    bench: Bench, body: bytes
) -> None:
    upload = await bench.begin(len(body) + 1)
    with pytest.raises(MalformedError, match="announces a body of"):
        await upload.write(body[: MIB // 2])
    await upload.broken()


async def test_more_bytes_than_announced_are_refused(bench: Bench, body: bytes) -> None:
    upload = await bench.begin(100)
    with pytest.raises(LimitError, match="100"):
        await upload.write(body[:101])


async def test_a_snapshot_is_no_update_and_the_other_way_round(bench: Bench, body: bytes) -> None:
    init = init_body("j-1", 4)
    upload = await bench.begin(len(init))
    with pytest.raises(MalformedError, match="snapshot"):
        await upload.write(init)
    await upload.broken()
    upload = await bench.uploads.begin(
        bench.path(), check_init("j-1"), bench.settle, offset=0, length=len(body)
    )
    with pytest.raises(MalformedError, match="update"):
        await send(upload, body)


async def test_the_limit_is_per_upload_however_many_sites_there_are(
    tmp_path: Path, body: bytes
) -> None:
    """PC-018: 10 sites x 3 MiB pass with a limit of 20 MiB (all scaled: 2.4 MB, limit 16 MB)."""
    bench = Bench(tmp_path, spool=11 * len(body), upload=16_000_000)
    for number in range(10):
        site = f"site-{number}"
        one = update_body(site, TRAIN, [0.5] * 600_000)
        upload = await bench.begin(len(one), key=KEY._replace(site=site))
        assert (await send(upload, one)).verdict == "queued"
    assert bench.quota.used > 16_000_000


async def test_memory_does_not_grow_with_the_number_of_sites(tmp_path: Path) -> None:
    """PC-019: 16 sites, 8 MiB each, one after another and at once; the coordinator's process holds
    pieces, never a model (scaled from 64 MiB; what the fold process holds is measured there).
    """
    bench = Bench(tmp_path, spool=1 << 30)
    bodies = [
        (KEY._replace(site=f"s{n}"), update_body(f"s{n}", TRAIN, [0.0] * 2 * MIB))
        for n in range(16)
    ]
    tracemalloc.start()
    try:
        uploads = [await bench.begin(len(body), key=key) for key, body in bodies]
        for at in range(0, len(bodies[0][1]), MIB):
            for upload, (_, body) in zip(uploads, bodies, strict=True):
                if at < len(body):
                    await upload.write(memoryview(body)[at : at + MIB])
        for upload in uploads:
            assert (await upload.finish()).verdict == "queued"
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(bench.settled) == 16
    assert peak < 2 * MIB


async def test_too_large_is_refused_with_limit_size_and_setting_before_any_byte(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, spool=1000, upload=500)
    with pytest.raises(LimitError, match="upload_bytes_max = 500") as caught:
        await bench.begin(501)
    assert caught.value.details == {"limit": 500, "found": 501, "setting": "upload_bytes_max"}
    assert not bench.path().exists()
    bench = Bench(tmp_path, spool=400, upload=500)
    with pytest.raises(LimitError, match="spool_bytes_max = 400"):
        await bench.begin(401)


async def test_a_full_spool_means_later_not_never(tmp_path: Path, body: bytes) -> None:
    bench = Bench(tmp_path, spool=len(body) + 100)
    await send(await bench.begin(len(body)), body)
    other = KEY._replace(site="b")
    two = update_body("b", TRAIN, [0.5] * 600_000)
    with pytest.raises(BusyError, match="spool_bytes_max"):
        await bench.begin(len(two), key=other)
    bench.path().unlink()
    bench.quota.release(bench.path())
    assert bench.quota.used == 0
    await send(await bench.begin(len(two), key=other), two)


async def test_a_second_connection_takes_a_dead_one_over(bench: Bench, body: bytes) -> None:
    first = await bench.begin(len(body))
    await first.write(body[: MIB + 700])
    with pytest.raises(ConflictError) as caught:
        await bench.begin(len(body))  # starts at 0, but there is more
    good = int(caught.value.details["offset"] or 0)
    second = await bench.begin(len(body) - good, offset=good)
    with pytest.raises(ConflictError, match="taken this upload over"):
        await first.write(body[MIB + 700 : MIB + 800])
    await first.broken()
    assert (await send(second, body[good:])).verdict == "queued"
    assert bench.path().read_bytes() == body


async def test_settling_goes_on_when_the_connection_is_lost(bench: Bench, body: bytes) -> None:
    bench.may_settle.clear()
    upload = await bench.begin(len(body))
    await upload.write(body)
    finishing = asyncio.ensure_future(upload.finish())
    await bench.settling.wait()
    finishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await finishing
    assert bench.uploads.busy(bench.path())
    with pytest.raises(ConflictError, match="being settled"):
        await bench.begin(0, offset=len(body))
    task = bench.uploads.settling(bench.path())
    assert task is not None
    bench.may_settle.set()
    assert (await task).verdict == "queued"
    assert bench.settled == [len(body)]
    assert not bench.uploads.busy(bench.path())


async def test_what_was_settled_before_is_let_through_and_answered_again() -> None:
    known = Receipt(offset=9, verdict="counted", reason="in version 4")
    upload = SettledUpload(known)
    await upload.write(b"x" * 100)
    await upload.broken()
    assert await upload.finish() == known


async def test_a_full_disk_damages_nothing_and_the_upload_goes_on_later(
    bench: Bench, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PC-082: ENOSPC in the middle of an upload; what is stored stays good."""
    write = os.write
    room = MIB + 5000

    def short(descriptor: int, data: memoryview) -> int:
        nonlocal room
        if room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(descriptor, data[:room])
        room -= done
        return done

    monkeypatch.setattr(spool_module.os, "write", short)
    upload = await bench.begin(len(body))
    with pytest.raises(BusyError, match="disk full") as caught:
        await send(upload, body)
    assert caught.value.details["disk_full"] == 1
    await upload.broken()
    assert bench.disk.full
    assert "No space left" in bench.disk.reason
    good = await bench.uploads.stored(bench.path(), check_update(KEY))
    assert good > MIB
    with pytest.raises(BusyError):
        await bench.begin(len(body) - good, offset=good)
    monkeypatch.undo()
    bench.disk.full = False
    upload = await bench.begin(len(body) - good, offset=good)
    assert (await send(upload, body[good:])).verdict == "queued"
    assert bench.path().read_bytes() == body


async def test_a_slow_disk_is_written_from_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hops: list[int] = []

    async def hop(function: Callable[..., Any], *args: Any) -> Any:
        hops.append(len(args[0]))
        return function(*args)

    monkeypatch.setattr(spool_module, "in_thread", hop)
    monkeypatch.setattr(spool_module, "_SLOW_WRITE_SECONDS", 60.0)
    file = SpoolFile(tmp_path / "s", 0, DiskWatch(tmp_path, 0))
    await file.append(b"a" * 10)
    assert hops == []
    monkeypatch.setattr(spool_module, "_SLOW_WRITE_SECONDS", -1.0)
    await file.append(b"b" * 20)
    monkeypatch.setattr(spool_module, "_SLOW_WRITE_SECONDS", 60.0)
    await file.append(b"c" * 30)
    file._threaded = 1  # nearly over
    await file.append(b"d" * 40)
    await file.append(b"e" * 50)  # and the quick way again
    file.close()
    assert hops == [30, 40]
    wanted = b"a" * 10 + b"b" * 20 + b"c" * 30 + b"d" * 40 + b"e" * 50
    assert (tmp_path / "s").read_bytes() == wanted


async def test_power_durability_syncs_before_settling(
    bench: Bench, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(spool_module.os, "fsync", lambda _: synced.append(len(bench.settled)))
    await send(await bench.begin(len(body)), body)
    assert synced == []
    bench.uploads.power = True
    key = KEY._replace(clock=4)
    body = update_body("site", Train(**{**_fields(TRAIN), "clock": 4}), [0.5] * 10)
    await send(await bench.begin(len(body), key=key), body)
    assert synced == [1, 1]  # the file and its name, before the second settlement


def _fields(train: Train) -> dict[str, Any]:
    return {name: getattr(train, name) for name in train.__struct_fields__}


async def test_stopping_keeps_open_uploads_resumable(bench: Bench, body: bytes) -> None:
    upload = await bench.begin(len(body))
    await upload.write(body[: MIB + 900])
    await bench.uploads.stop()
    assert not bench.uploads.busy(bench.path())
    assert bench.path().stat().st_size == upload.good_offset > MIB
