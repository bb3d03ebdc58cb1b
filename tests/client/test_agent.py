from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Self

import msgspec
import psutil
import pytest

from client.agent import Agent
from client.link import DismissedError
from client.sitefiles import SiteFolder, SiteIdentity
from client.transport import Transport
from protocol import messages
from protocol.errors import ConflictError, RemovedError, UnauthenticatedError, VersionError
from protocol.messages import Receipt
from tests.client.agentprocess import settings_for
from tests.client.fake_coordinator import JOB, FakeCoordinator, stub_spec
from tests.faultproxy import FaultProxy

SECRET = "sks1." + "0" * 64


def make_site(path: Path, url: str, name: str = "site-a") -> SiteFolder:
    folder = SiteFolder(path)
    identity = SiteIdentity(name=name, role="site", url=url, coordinator="fake", protocol=1)
    folder.save_identity(identity, secret=SECRET, key_pem=b"key", ca_pem=b"")
    folder.jobs.mkdir(exist_ok=True)
    return folder


class Running:
    """An agent inside the test's own loop."""

    def __init__(self, folder: SiteFolder, url: str) -> None:
        self.folder = folder
        self.url = url
        self.stop_event = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self.task = asyncio.create_task(self._run())
        return self

    async def _run(self) -> None:
        async with Transport(self.url, secret=SECRET) as transport:
            agent = Agent(
                settings_for(self.folder.path),
                self.folder,
                self.folder.identity(),
                transport,
                rng=random.Random(7),
            )
            await agent.run(self.stop_event)

    async def ended(self) -> BaseException | None:
        assert self.task is not None
        async with asyncio.timeout(20):
            await asyncio.wait([self.task])
        return self.task.exception()

    async def __aexit__(self, *_: object) -> None:
        self.stop_event.set()
        assert self.task is not None
        with contextlib.suppress(DismissedError):
            await self.task


@pytest.fixture
async def coordinator() -> AsyncIterator[FakeCoordinator]:
    async with FakeCoordinator() as fake:
        yield fake


class Gate:
    """Where stubs wait, until the test lets one of them go on."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self._end = os.open(path, os.O_RDWR)

    def release(self) -> None:
        os.write(self._end, b"x")

    def close(self) -> None:
        os.close(self._end)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path / "gate")
    yield made
    made.close()


def sent_lines(folder: SiteFolder) -> list[dict[str, object]]:
    lines = (folder.path / "sent.jsonl").read_text("utf-8").splitlines()
    return [msgspec.json.decode(line) for line in lines]


# ---------------------------------------------------------------- the way of one update


async def test_a_period_is_trained_uploaded_and_settled(
    coordinator: FakeCoordinator, tmp_path: Path
):
    folder = make_site(tmp_path / "site", coordinator.url)
    async with Running(folder, coordinator.url):
        await coordinator.prepare()
        keys = [await coordinator.train(0)]
        await coordinator.until(lambda: keys[0] in coordinator.verdicts)
        keys.append(await coordinator.train(1))
        await coordinator.until(lambda: keys[1] in coordinator.verdicts)
    assert coordinator.posts == [(keys[0], 0), (keys[1], 0)]
    assert coordinator.left == ["the agent was stopped"]
    uploads = [line for line in sent_lines(folder) if line["kind"] == "update"]
    assert [(line["clock"], line["bytes"], line["verdict"]) for line in uploads] == [
        (key[2], len(coordinator.uploads[key]), "queued") for key in keys
    ]
    assert {"ready", "version 0"} <= {line["kind"] for line in sent_lines(folder)}


async def test_a_repeated_train_is_trained_once(coordinator: FakeCoordinator, tmp_path: Path):
    folder = make_site(tmp_path / "site", coordinator.url)
    async with Running(folder, coordinator.url):
        await coordinator.prepare()
        train = coordinator.train_of(0)
        await coordinator.send(train, train)
        key = (JOB, 1, 0, 1)
        await coordinator.until(lambda: key in coordinator.verdicts)
        await coordinator.send(train, coordinator.train_of(1))
        await coordinator.until(lambda: (JOB, 1, 1, 1) in coordinator.verdicts)
    assert coordinator.posts == [(key, 0), ((JOB, 1, 1, 1), 0)]


async def test_an_upload_that_is_cut_goes_on_where_it_broke(
    coordinator: FakeCoordinator, tmp_path: Path
):
    async with FaultProxy("127.0.0.1", coordinator.port) as proxy:
        folder = make_site(tmp_path / "site", proxy.url)
        async with Running(folder, proxy.url):
            await coordinator.prepare(stub_spec(elements=500_000))
            proxy.cut_after = 1_000_000
            key = await coordinator.train(0)
            await coordinator.until(lambda: key in coordinator.verdicts)
            offsets = [offset for _, offset in coordinator.posts]
            assert offsets[0] == 0
            assert offsets[-1] > 0
            assert proxy.bytes_up < 1.9 * len(coordinator.uploads[key]) + len(coordinator.init)
        body = coordinator.uploads[key]
        assert sum(line["bytes"] for line in sent_lines(folder) if line["kind"] == "update") >= len(
            body
        )


async def test_a_killed_agent_delivers_the_same_bytes_and_does_not_train_again(
    coordinator: FakeCoordinator, tmp_path: Path
):
    """PC-027: the site comes back under its own name, and what it had finished is delivered."""
    folder = make_site(tmp_path / "site", coordinator.url)
    coordinator.on_complete = lambda key: Receipt(offset=len(coordinator.uploads[key]))
    async with Process(folder) as first:
        await coordinator.prepare()
        key = await coordinator.train(0)
        await coordinator.until(lambda: coordinator.uploads.get(key))
        first.process.kill()
        await first.process.wait()
    body = next(folder.jobs.glob("*/update-1-0-1/body"))
    whole = body.read_bytes()
    written_at = body.stat().st_mtime_ns
    coordinator.verdicts.clear()
    del coordinator.uploads[key][len(whole) // 2 :]
    half = len(coordinator.uploads[key])
    coordinator.on_complete = lambda key: Receipt(
        offset=len(coordinator.uploads[key]), verdict="queued"
    )
    async with Process(folder) as second:
        await coordinator.until(lambda: key in coordinator.verdicts)
        assert await second.terminate() == 0
    assert coordinator.posts[-1] == (key, half)
    assert bytes(coordinator.uploads[key]) == whole
    assert body.stat().st_mtime_ns == written_at
    assert len({hello.instance for hello in coordinator.hellos}) == 2


async def test_a_verdict_that_was_lost_is_asked_for_and_nothing_is_sent_again(
    coordinator: FakeCoordinator, tmp_path: Path
):
    folder = make_site(tmp_path / "site", coordinator.url)
    async with Running(folder, coordinator.url):
        await coordinator.prepare()
        coordinator.on_upload = lambda _: coordinator.end_session()
        key = await coordinator.train(0)
        await coordinator.until(lambda: key in coordinator.verdicts)
    # Settled, or still to be asked for by the next agent: either way one POST is all there was.
    async with Running(folder, coordinator.url):
        await coordinator.until(lambda: len(coordinator.hellos) >= 2 and coordinator.polls)
        await coordinator.send(coordinator.train_of(1))
        await coordinator.until(lambda: (JOB, 1, 1, 1) in coordinator.verdicts)
    assert [posted for posted, _ in coordinator.posts].count(key) == 1


async def test_a_restarted_coordinator_finds_the_site_and_its_update(tmp_path: Path, gate: Gate):
    fake = await FakeCoordinator().start()
    folder = make_site(tmp_path / "site", fake.url)
    async with Running(folder, fake.url):
        await fake.prepare(stub_spec(wait=gate.path))
        train = fake.train_of(0)
        await fake.send(train)
        await fake.until(lambda: fake.of(messages.Progress))
        port = fake.port
        await fake.stop()
        gate.release()
        await fake.start(port)
        await fake.until(lambda: len(fake.hellos) == 2)
        await fake.send(train)
        await fake.until(lambda: (JOB, 1, 0, 1) in fake.verdicts)
        assert [offset for _, offset in fake.posts] in ([0], [0, 0])
        await fake.stop()


async def test_an_aborted_period_is_stopped_and_the_next_one_trained(
    coordinator: FakeCoordinator, tmp_path: Path, gate: Gate
):
    folder = make_site(tmp_path / "site", coordinator.url)
    async with Running(folder, coordinator.url):
        await coordinator.prepare(stub_spec(wait=gate.path))
        await coordinator.train(0)
        await coordinator.until(lambda: coordinator.of(messages.Progress))
        await coordinator.send(
            messages.Abort(job=JOB, epoch=1, clock=0, attempt=1, reason="late"),
            coordinator.train_of(1),
        )
        await coordinator.until(lambda: len(coordinator.of(messages.Progress)) == 2)
        gate.release()
        await coordinator.until(lambda: (JOB, 1, 1, 1) in coordinator.verdicts)
    assert [key for key, _ in coordinator.posts] == [(JOB, 1, 1, 1)]


async def test_a_dead_worker_is_reported_and_replaced_for_the_next_train(
    coordinator: FakeCoordinator, tmp_path: Path
):
    folder = make_site(tmp_path / "site", coordinator.url)
    async with Running(folder, coordinator.url):
        await coordinator.prepare(stub_spec(die_at=0))
        await coordinator.train(0)
        await coordinator.until(lambda: coordinator.of(messages.Failed))
        failed = coordinator.of(messages.Failed)[0]
        assert "SIGKILL" in failed.reason
        assert (failed.clock, failed.attempt, failed.fatal) == (0, 1, False)
        key = await coordinator.train(1)
        await coordinator.until(lambda: key in coordinator.verdicts)


async def test_a_task_with_another_hash_is_declined_and_both_hashes_are_named(
    coordinator: FakeCoordinator, tmp_path: Path
):
    folder = make_site(tmp_path / "site", coordinator.url)
    spec = stub_spec()
    other = msgspec.structs.replace(spec, task=msgspec.structs.replace(spec.task, sha256="ab" * 32))
    async with Running(folder, coordinator.url):
        await coordinator.send(messages.Prepare(job=JOB, spec=other))
        await coordinator.until(lambda: coordinator.of(messages.Declined))
    reason = coordinator.of(messages.Declined)[0].reason
    hashes = set(re.findall("[0-9a-f]{64}", reason))
    assert "ab" * 32 in hashes
    assert len(hashes) == 2


async def test_the_end_of_a_job_stops_its_worker_and_final_removes_its_files(
    coordinator: FakeCoordinator, tmp_path: Path
):
    folder = make_site(tmp_path / "site", coordinator.url)
    async with Running(folder, coordinator.url):
        await coordinator.prepare()
        await coordinator.send(messages.EndJob(job=JOB, reason="finished", final=True))
        await coordinator.send(messages.Prepare(job="j-2", spec=stub_spec()))
        await coordinator.until(lambda: len(coordinator.of(messages.Ready)) == 2)
        jobs = [child.name for child in folder.jobs.iterdir()]
        assert len(jobs) == 1
        workers = [
            c
            for c in psutil.Process().children(recursive=True)
            if "client.stub" in " ".join(c.cmdline())
        ]
        assert len(workers) == 1


async def test_a_slow_upload_is_no_silence(coordinator: FakeCoordinator, tmp_path: Path):
    """PC-025: a body that takes many heartbeats on a slow link goes through in one piece."""
    coordinator.long_poll_seconds = 0.2  # the heartbeat, far below the 2 s that the body takes
    async with FaultProxy("127.0.0.1", coordinator.port) as proxy:
        folder = make_site(tmp_path / "site", proxy.url)
        async with Running(folder, proxy.url):
            await coordinator.prepare(stub_spec(elements=125_000))
            proxy.rate = 256 * 1024
            begin = time.monotonic()
            key = await coordinator.train(0)
            await coordinator.until(lambda: key in coordinator.verdicts)
            assert time.monotonic() - begin > 1.5
    assert coordinator.posts == [(key, 0)]
    assert len(coordinator.hellos) == 1


async def test_a_download_that_breaks_off_is_resumed(coordinator: FakeCoordinator, tmp_path: Path):
    async with FaultProxy("127.0.0.1", coordinator.port) as proxy:
        folder = make_site(tmp_path / "site", proxy.url)
        async with Running(folder, proxy.url):
            await coordinator.prepare(stub_spec(elements=500_000))
            proxy.truncate_after = 900_000
            key = await coordinator.train(0)
            await coordinator.until(lambda: key in coordinator.verdicts)
    assert coordinator.version_requests[0] == 0
    assert coordinator.version_requests[-1] > 100_000


# ---------------------------------------------------------------- ends


async def test_a_removed_site_stops_retrying(coordinator: FakeCoordinator, tmp_path: Path):
    """PC-026: a clear answer, and the agent does not come back as a ghost."""
    folder = make_site(tmp_path / "site", coordinator.url)
    coordinator.long_poll_seconds = 0.1
    async with Running(folder, coordinator.url) as agent:
        await coordinator.until(lambda: coordinator.polls)
        coordinator.on_poll = lambda: RemovedError("site-a was removed.")
        error = await agent.ended()
    assert isinstance(error, DismissedError)
    assert error.error.exit_code == 4
    assert "join again" in error.error.hint
    assert len(coordinator.hellos) == 1


async def test_a_site_that_is_sent_away_stops(coordinator: FakeCoordinator, tmp_path: Path):
    folder = make_site(tmp_path / "site", coordinator.url)
    async with Running(folder, coordinator.url) as agent:
        await coordinator.until(lambda: coordinator.polls)
        await coordinator.send(messages.Bye(reason="removed by ops", retry=False))
        error = await agent.ended()
    assert isinstance(error, DismissedError)
    assert "removed by ops" in error.error.message


async def test_an_unknown_secret_stops_the_agent(coordinator: FakeCoordinator, tmp_path: Path):
    folder = make_site(tmp_path / "site", coordinator.url)
    coordinator.on_hello = lambda _: UnauthenticatedError("this credential is not known here.")
    async with Running(folder, coordinator.url) as agent:
        error = await agent.ended()
    assert isinstance(error, DismissedError)
    assert error.error.exit_code == 4


async def test_a_name_that_a_live_site_holds_is_given_up_after_one_lease(
    coordinator: FakeCoordinator, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """PC-033: the second of two is refused with the holder's last-seen time, without flapping."""
    caplog.set_level(logging.INFO)
    folder = make_site(tmp_path / "site", coordinator.url)
    coordinator.on_hello = lambda _: ConflictError(
        "site 'site-a' is already connected from another process, last heard 1.2 s ago.",
        details={"retry_after_seconds": 0.5},
    )
    async with Running(folder, coordinator.url) as agent:
        error = await agent.ended()
    assert isinstance(error, DismissedError)
    assert "last heard 1.2 s ago" in error.error.message
    assert 2 <= len(coordinator.hellos) <= 5
    assert len({hello.instance for hello in coordinator.hellos}) == 1
    assert coordinator.polls == 0
    assert len([record for record in caplog.records if "last heard" in record.message]) == 1


async def test_a_name_that_falls_free_is_taken(coordinator: FakeCoordinator, tmp_path: Path):
    """PC-033: a restarted agent gets its name back as soon as the dead one's lease ends."""
    folder = make_site(tmp_path / "site", coordinator.url)

    def held_twice(hello: messages.Hello) -> ConflictError | None:
        return ConflictError("held.") if len(coordinator.hellos) <= 2 else None

    coordinator.on_hello = held_twice
    async with Running(folder, coordinator.url):
        await coordinator.until(lambda: coordinator.polls)
    assert len(coordinator.hellos) == 3


@pytest.mark.parametrize("theirs", [2, 99])
async def test_another_protocol_is_told_with_both_numbers_at_once(
    coordinator: FakeCoordinator, tmp_path: Path, theirs: int
):
    """PC-087: a coordinator that is too new is refused with both versions and what to upgrade."""
    folder = make_site(tmp_path / "site", coordinator.url)
    coordinator.protocol = theirs
    begin = time.monotonic()
    async with Running(folder, coordinator.url) as agent:
        error = await agent.ended()
    assert time.monotonic() - begin < 2
    assert isinstance(error, DismissedError)
    assert f"protocol {theirs}" in error.error.message
    assert "protocol 1" in error.error.message
    assert "pgrade" in error.error.hint


async def test_an_agent_that_is_too_old_is_told_so_and_stops(
    coordinator: FakeCoordinator, tmp_path: Path
):
    """PC-087: the coordinator's refusal ends the agent with code 4, both numbers in the text."""
    folder = make_site(tmp_path / "site", coordinator.url)
    coordinator.on_hello = lambda _: VersionError("the agent speaks protocol 1, this side 3.")
    async with Running(folder, coordinator.url) as agent:
        error = await agent.ended()
    assert isinstance(error, DismissedError)
    assert error.error.exit_code == 4
    assert len(coordinator.hellos) == 1


async def test_an_agent_that_starts_first_waits_and_connects(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    fake = await FakeCoordinator().start()
    port = fake.port
    await fake.stop()
    folder = make_site(tmp_path / "site", fake.url)
    async with FaultProxy("127.0.0.1", port) as proxy, Running(folder, proxy.url):
        await proxy.until_connections(4)
        await fake.start(port)
        await fake.until(lambda: fake.polls)
        await fake.stop()
    about = [r.message for r in caplog.records if r.name == "skerry.agent"]
    assert len(about) <= 6
    assert any("connected" in text for text in about)


async def test_a_stranger_at_the_address_is_called_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async def page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1000)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        await writer.drain()
        asked.append(1)
        enough.set() if len(asked) > 3 else None
        writer.close()

    asked: list[int] = []
    enough = asyncio.Event()
    server = await asyncio.start_server(page, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with Running(make_site(tmp_path / "site", url), url), asyncio.timeout(20):
        await enough.wait()
    server.close()
    said = [r.message for r in caplog.records if "is not a Skerry coordinator" in r.message]
    assert len(said) == 1


# ---------------------------------------------------------------- the process


class Process:
    """An agent in a process of its own."""

    def __init__(self, folder: SiteFolder) -> None:
        self.folder = folder

    async def __aenter__(self) -> Self:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.client.agentprocess",
            str(self.folder.path),
            stderr=(self.folder.path / "agent.log").open("ab"),
            cwd=Path(__file__).parents[2],
        )
        return self

    async def terminate(self, signum: int = signal.SIGTERM) -> int:
        self.process.send_signal(signum)
        async with asyncio.timeout(10):
            return await self.process.wait()

    def log(self) -> str:
        return (self.folder.path / "agent.log").read_text("utf-8")

    async def __aexit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
async def test_a_signal_ends_agent_and_training_within_two_seconds(
    coordinator: FakeCoordinator, tmp_path: Path, gate: Gate, signum: int, code: int
):
    """PC-083: with an open long poll and a worker in the middle of a period."""
    folder = make_site(tmp_path / "site", coordinator.url)
    async with Process(folder) as agent:
        await coordinator.prepare(stub_spec(wait=gate.path))
        await coordinator.train(0)
        await coordinator.until(lambda: coordinator.of(messages.Progress))
        workers = psutil.Process(agent.process.pid).children(recursive=True)
        assert workers
        begin = time.monotonic()
        assert await agent.terminate(signum) == code
        assert time.monotonic() - begin < 2
        assert not psutil.wait_procs(workers, timeout=1)[1]
    assert coordinator.left


async def test_a_killed_agent_leaves_no_worker_behind(coordinator: FakeCoordinator, tmp_path: Path):
    folder = make_site(tmp_path / "site", coordinator.url)
    async with Process(folder) as agent:
        await coordinator.prepare()
        workers = psutil.Process(agent.process.pid).children(recursive=True)
        assert workers
        agent.process.kill()
        gone, alive = await asyncio.to_thread(psutil.wait_procs, workers, 5)
        assert gone
        assert not alive


async def test_two_agents_cannot_share_a_folder(coordinator: FakeCoordinator, tmp_path: Path):
    folder = make_site(tmp_path / "site", coordinator.url)
    async with Process(folder) as first:
        await coordinator.until(lambda: coordinator.polls)
        async with Process(folder) as second, asyncio.timeout(10):
            assert await second.process.wait() == 4
        assert f"process {first.process.pid}" in first.log()


async def test_an_agent_stays_small_and_idle(coordinator: FakeCoordinator, tmp_path: Path):
    folder = make_site(tmp_path / "site", coordinator.url)
    async with Process(folder) as agent:
        await coordinator.prepare(stub_spec(elements=1_000_000))
        key = await coordinator.train(0)
        await coordinator.until(lambda: key in coordinator.verdicts)
        status = Path(f"/proc/{agent.process.pid}/status").read_text("ascii")
        peak = int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) * 1024 / 1e6
        maps = Path(f"/proc/{agent.process.pid}/maps").read_text("utf-8")
    assert peak <= 60, f"{peak:.1f} MB"
    assert "torch" not in maps
    assert "numpy" not in maps


async def test_names_of_any_language_go_through(coordinator: FakeCoordinator, tmp_path: Path):
    """PC-085: site and job names, data paths and logs, under the C locale."""
    folder = make_site(tmp_path / "Klinik-Zürich 病院-3 🏥", coordinator.url, name="病院-3 🏥")
    spec = msgspec.structs.replace(stub_spec(), name="Übung 病院")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG"))}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.client.agentprocess",
        str(folder.path),
        stderr=asyncio.subprocess.PIPE,
        env={**environment, "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    await coordinator.prepare(spec)
    key = await coordinator.train(0)
    await coordinator.until(lambda: key in coordinator.verdicts)
    process.terminate()
    _, errors = await process.communicate()
    assert process.returncode == 0
    assert "病院-3 🏥" in errors.decode("utf-8")
    assert "Übung 病院" in errors.decode("utf-8")
    body = bytes(coordinator.uploads[key])
    assert "病院-3 🏥".encode() in body[:4096]
