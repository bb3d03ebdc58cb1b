from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from crc32c import crc32c

from client import transfers as module
from client.sessionapi import (
    AnyStimulus,
    Fetched,
    FetchFailed,
    Identity,
    InitRefused,
    InitTaken,
    JobUnknown,
    Stands,
    StoredUpdate,
    UploadBroke,
    UploadRefused,
)
from client.sitefiles import SentLog, SiteFolder, base_body, job_folder
from client.transfers import Outgoing, Transfers
from client.transport import Transport
from protocol.errors import LimitError, MalformedError, NotFoundError, SkerryError
from protocol.messages import Receipt, VersionRef
from tests.client.fake_coordinator import JOB, FakeCoordinator
from tests.faultproxy import FaultProxy

ONE = Identity(job=JOB, epoch=1, clock=4, attempt=2)
KEY = (JOB, 1, 4, 2)


class Moving:
    """Transfers of one site, with what they told."""

    def __init__(self, folder: Path, fake: FakeCoordinator, proxy: FaultProxy) -> None:
        self.fake = fake
        self.proxy = proxy
        self.folder = SiteFolder(folder)
        self.jobs = job_folder(self.folder.jobs, JOB)
        self.jobs.mkdir(parents=True)
        self.told: asyncio.Queue[AnyStimulus] = asyncio.Queue()
        self.connected = asyncio.Event()
        self.connected.set()
        self.transport = Transport(proxy.url)
        self.transfers = Transfers(
            self.transport,
            self.folder,
            SentLog(folder),
            rng=random.Random(3),
            tell=self.told.put_nowait,
            connected=self.connected,
        )

    async def answer(self) -> AnyStimulus:
        async with asyncio.timeout(20):
            return await self.told.get()

    def update(self, size: int) -> StoredUpdate:
        body = self.jobs / "body"
        body.write_bytes(random.Random(size).randbytes(size))
        return StoredUpdate(identity=ONE, body=body, bytes=size)

    def sent(self) -> list[dict[str, object]]:
        path = self.folder.path / "sent.jsonl"
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        return [msgspec.json.decode(line) for line in lines]


@pytest.fixture
async def moving(tmp_path: Path) -> AsyncIterator[Moving]:
    async with FakeCoordinator() as fake, FaultProxy("127.0.0.1", fake.port) as proxy:
        made = Moving(tmp_path, fake, proxy)
        async with made.transport:
            # a session, as the link would have opened it
            hello = b'{"instance":"i"}'
            async with made.transport.request("POST", "/agent/v1/hello", data=hello) as opened:
                made.transport.session = msgspec.json.decode(await opened.read())["session"]
            yield made
            await made.transfers.close()


async def test_a_body_is_sent_in_pieces_that_grow_and_is_logged(moving: Moving):
    update = moving.update(3_000_000)
    moving.transfers.upload(update, 0)
    assert await moving.answer() == Stands(
        identity=ONE, receipt=Receipt(offset=3_000_000, verdict="queued", reason="in good order")
    )
    assert bytes(moving.fake.uploads[KEY]) == update.body.read_bytes()
    (line,) = moving.sent()
    line.pop("time")
    assert line == {
        "kind": "update",
        "job": JOB,
        "epoch": 1,
        "clock": 4,
        "attempt": 2,
        "offset": 0,
        "bytes": 3_000_000,
        "crc32c": f"{crc32c(update.body.read_bytes()):08x}",
        "verdict": "queued",
    }


async def test_only_the_rest_is_sent_from_an_offset(moving: Moving):
    update = moving.update(500_000)
    moving.fake.uploads[KEY] = bytearray(update.body.read_bytes()[:400_000])
    moving.transfers.upload(update, 400_000)
    assert isinstance(await moving.answer(), Stands)
    assert bytes(moving.fake.uploads[KEY]) == update.body.read_bytes()
    assert moving.sent()[0]["bytes"] == 100_000


@pytest.mark.parametrize("after", [50, 700, 70_000, 900_000, 1_999_000])
async def test_wherever_the_connection_is_cut_the_upload_breaks_once_and_is_logged(
    moving: Moving, after: int
):
    update = moving.update(2_000_000)
    moving.proxy.cut_after = after
    moving.transfers.upload(update, 0)
    assert isinstance(await moving.answer(), UploadBroke)
    logged = sum(int(str(line["bytes"])) for line in moving.sent())
    stored = len(moving.fake.uploads.get(KEY, b""))
    assert stored <= logged
    moving.transfers.ask(ONE)
    stands = await moving.answer()
    assert isinstance(stands, Stands)
    moving.transfers.upload(update, stands.receipt.offset)
    assert isinstance(await moving.answer(), Stands)
    assert bytes(moving.fake.uploads[KEY]) == update.body.read_bytes()


async def test_a_stalled_upload_is_broken_off(moving: Moving, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "STALL_SECONDS", 0.3)
    moving.proxy.stall()
    moving.transfers.upload(moving.update(20_000_000), 0)
    broke = await moving.answer()
    assert isinstance(broke, UploadBroke)
    assert "stalled" in broke.reason


async def test_a_slow_upload_is_not_broken_off(moving: Moving, monkeypatch: pytest.MonkeyPatch):
    """PC-025: what counts is that bytes move, not how long the whole takes."""
    monkeypatch.setattr(module, "STALL_SECONDS", 0.8)
    moving.proxy.rate = 400_000
    moving.transfers.upload(moving.update(800_000), 0)  # two seconds
    assert isinstance(await moving.answer(), Stands)


async def test_a_proxy_that_passes_bodies_on_whole_only_costs_time(moving: Moving):
    moving.proxy.quiet = 0.1
    moving.transfers.upload(moving.update(3_000_000), 0)
    assert isinstance(await moving.answer(), Stands)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (LimitError("above upload_bytes_max."), UploadRefused),
        (NotFoundError("no such job."), JobUnknown),
        (MalformedError("checksum is wrong."), UploadBroke),
    ],
)
async def test_refusals_are_told_as_what_they_mean(
    moving: Moving, error: SkerryError, kind: type[AnyStimulus]
):
    moving.fake.on_upload = lambda _: error
    moving.transfers.upload(moving.update(10), 0)
    told = await moving.answer()
    assert isinstance(told, kind)
    if isinstance(told, UploadBroke):
        assert told.damaged


async def test_asking_goes_on_until_there_is_an_answer(moving: Moving):
    moving.fake.verdicts[KEY] = Receipt(offset=1, verdict="counted")
    moving.connected.clear()
    moving.proxy.refuse = True
    moving.proxy.cut()
    moving.transfers.ask(ONE)
    await moving.proxy.until_connections(2)
    moving.proxy.refuse = False
    moving.connected.set()
    told = await moving.answer()
    assert isinstance(told, Stands)
    assert told.receipt.verdict == "counted"


async def test_what_is_called_off_answers_no_more(moving: Moving):
    moving.proxy.stall()
    moving.transfers.upload(moving.update(9_000_000), 0)
    moving.transfers.call_off(ONE)
    moving.proxy.flow()
    moving.transfers.ask(ONE)
    assert isinstance(await moving.answer(), Stands)
    assert moving.told.empty()


# ---------------------------------------------------------------- downloads


def version(moving: Moving, size: int, number: int = 7) -> VersionRef:
    body = random.Random(number).randbytes(size)
    moving.fake.versions[number] = body
    return VersionRef(version=number, digest="", bytes=size)


@pytest.mark.parametrize("after", [10, 400, 100_000, 1_500_000])
async def test_a_download_is_resumed_wherever_it_was_cut(moving: Moving, after: int):
    base = version(moving, 2_000_000)
    moving.proxy.truncate_after = after
    moving.transfers.fetch(JOB, base)
    assert await moving.answer() == Fetched(job=JOB, version=7)
    assert base_body(moving.jobs, 7).read_bytes() == moving.fake.versions[7]
    assert [path.name for path in moving.jobs.iterdir()] == ["base-7.body"]
    if after > 50_000:
        assert moving.fake.version_requests[-1] > 0


async def test_a_half_download_of_a_killed_agent_is_gone_on_with(moving: Moving):
    base = version(moving, 1_000)
    part = moving.jobs / "base-7.body.part"
    part.write_bytes(moving.fake.versions[7][:600])
    moving.transfers.fetch(JOB, base)
    assert isinstance(await moving.answer(), Fetched)
    assert moving.fake.version_requests == [600]
    assert base_body(moving.jobs, 7).read_bytes() == moving.fake.versions[7]


async def test_a_version_that_is_there_is_not_fetched_again(moving: Moving):
    base = version(moving, 1_000)
    base_body(moving.jobs, 7).write_bytes(moving.fake.versions[7])
    moving.transfers.fetch(JOB, base)
    assert isinstance(await moving.answer(), Fetched)
    assert moving.fake.version_requests == []


async def test_a_longer_body_than_announced_is_refused(moving: Moving):
    version(moving, 1_000)
    moving.transfers.fetch(JOB, VersionRef(version=7, digest="", bytes=900))
    failed = await moving.answer()
    assert isinstance(failed, FetchFailed)
    assert "900 bytes" in failed.reason
    assert (moving.jobs / "base-7.body.part").stat().st_size <= 900


async def test_a_version_that_is_not_kept_or_does_not_fit_fails_with_the_reason(moving: Moving):
    moving.transfers.fetch(JOB, VersionRef(version=9, digest="", bytes=10))
    failed = await moving.answer()
    assert isinstance(failed, FetchFailed)
    assert "not kept" in failed.reason
    moving.transfers.fetch(JOB, VersionRef(version=9, digest="", bytes=1 << 60))
    failed = await moving.answer()
    assert isinstance(failed, FetchFailed)
    assert "MB free" in failed.reason


async def test_a_full_disk_is_a_reason_not_a_broken_connection(
    moving: Moving, monkeypatch: pytest.MonkeyPatch
):
    class Full:
        def write(self, piece: bytes) -> int:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            pass

    monkeypatch.setattr(module, "_open", lambda _: Full())
    moving.transfers.fetch(JOB, version(moving, 1_000))
    failed = await moving.answer()
    assert isinstance(failed, FetchFailed)
    assert "No space left" in failed.reason


async def test_a_newer_fetch_takes_the_place_of_the_older(moving: Moving):
    older, newer = version(moving, 5_000_000, 1), version(moving, 1_000, 2)
    moving.proxy.stall()
    moving.transfers.fetch(JOB, older)
    await moving.proxy.until_connections(1)
    moving.transfers.fetch(JOB, newer)
    assert moving.transfers.fetching(JOB) == (2,)
    moving.proxy.flow()
    assert await moving.answer() == Fetched(job=JOB, version=2)
    assert moving.transfers.fetching(JOB) == ()
    assert moving.told.empty()


# ---------------------------------------------------------------- version 0


async def test_version_zero_goes_on_from_what_the_coordinator_has(moving: Moving):
    path = moving.jobs / "init.body"
    path.write_bytes(random.Random(1).randbytes(5_000))
    whole = path.read_bytes()
    moving.fake.init += whole[:3_000]
    moving.transfers.upload_init(JOB, path, 5_000)
    assert await moving.answer() == InitTaken(job=JOB)
    assert bytes(moving.fake.init) == whole
    assert not path.exists()


async def test_version_zero_is_sent_again_after_a_conflict_that_passes(moving: Moving):
    """As after a restart of the coordinator, when the upload is faster than the next hello."""
    path = moving.jobs / "init.body"
    path.write_bytes(b"version 0")
    moving.fake.init_conflicts = 2
    moving.transfers.upload_init(JOB, path, 9)
    assert await moving.answer() == InitTaken(job=JOB)
    assert bytes(moving.fake.init) == b"version 0"


async def test_version_zero_that_is_refused_says_why(moving: Moving):
    path = moving.jobs / "init.body"
    path.write_bytes(b"x")
    moving.fake.init += b"longer than ours"
    moving.transfers.upload_init(JOB, path, 1)
    refused = await moving.answer()
    assert isinstance(refused, InitRefused)
    assert refused.reason


# ---------------------------------------------------------------- pieces


async def test_a_file_that_became_shorter_is_noticed(tmp_path: Path):
    (tmp_path / "b").write_bytes(b"x" * 100)
    outgoing = Outgoing(tmp_path / "b", 0, 200, lambda _: None)
    with pytest.raises(MalformedError, match="shorter"):
        [piece async for piece in outgoing]


async def test_every_piece_has_a_deadline_and_so_has_the_answer(tmp_path: Path):
    (tmp_path / "b").write_bytes(bytes(300_000))
    watched: list[float] = []
    outgoing = Outgoing(tmp_path / "b", 100_000, 300_000, watched.append)
    pieces = [len(piece) async for piece in outgoing]
    assert pieces == [65_536, 131_072, 3_392]
    assert watched[:3] == [module.STALL_SECONDS] * 3
    assert watched[3] > module.SCREEN_SECONDS
