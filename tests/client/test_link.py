from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from client import link as link_module
from client.link import DismissedError, Link
from client.sitefiles import SentLog
from client.transport import Transport
from protocol import messages
from protocol.errors import BusyError, ConflictError, LimitError, RefusedError, UnauthenticatedError
from protocol.messages import Declined, Evaluated, Instruction, Progress
from tests.client.fake_coordinator import JOB, FakeCoordinator, refusal
from tests.faultproxy import FaultProxy


class Linked:
    """A link alone, with what it handed out."""

    def __init__(self, fake: FakeCoordinator, folder: Path, url: str = "") -> None:
        self.instructions: list[Instruction] = []
        self.sessions = 0
        self.transport = Transport(url or fake.url)
        self.link = Link(
            self.transport,
            SentLog(folder),
            tasks=("digits",),
            rng=random.Random(1),
            clock=time.monotonic,
            on_session=self._on_session,
            on_instruction=self.instructions.append,
        )

    def _on_session(self) -> None:
        self.sessions += 1


@pytest.fixture
async def fake() -> AsyncIterator[FakeCoordinator]:
    async with FakeCoordinator() as made:
        yield made


@pytest.fixture
async def linked(fake: FakeCoordinator, tmp_path: Path) -> AsyncIterator[Linked]:
    made = Linked(fake, tmp_path)
    async with made.transport:
        task = asyncio.create_task(made.link.run())
        yield made
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def evaluated(version: int) -> Evaluated:
    return Evaluated(job=JOB, version=version, examples=1, metrics={})


async def test_instructions_come_in_order_and_once(fake: FakeCoordinator, linked: Linked):
    sent = [messages.EndJob(job=f"j{n}", reason="", final=False) for n in range(5)]
    await fake.send(*sent[:2])
    await fake.until(lambda: len(linked.instructions) == 2)
    fake.end_session()
    await fake.send(*sent[2:])
    await fake.until(lambda: linked.sessions == 2)
    await fake.send()
    await fake.until(lambda: fake._acked == 5)
    assert linked.instructions == sent
    assert [hello.tasks for hello in fake.hellos] == [("digits",)] * 2


async def test_events_are_numbered_within_a_session(
    fake: FakeCoordinator, linked: Linked, monkeypatch: pytest.MonkeyPatch
):
    firsts: list[tuple[int, int]] = []
    original = messages.decode

    def spy(kind: type, raw: bytes) -> object:
        decoded = original(kind, raw)
        if isinstance(decoded, messages.Events):
            firsts.append((decoded.first, len(decoded.items)))
        return decoded

    monkeypatch.setattr(messages, "decode", spy)
    await fake.until(lambda: linked.sessions)
    linked.link.report(evaluated(0))
    linked.link.report(evaluated(1))
    await fake.until(lambda: len(fake.events) == 2)
    linked.link.report(evaluated(2))
    await fake.until(lambda: len(fake.events) == 3)
    fake.end_session()
    await fake.send()
    await fake.until(lambda: linked.sessions == 2)
    linked.link.report(evaluated(3))
    await fake.until(lambda: len(fake.events) == 4)
    assert fake.events == [evaluated(n) for n in range(4)]
    assert firsts[-2:] == [(2, 1), (0, 1)]


async def test_events_of_an_outage_arrive_after_it_and_progress_only_as_it_is(
    fake: FakeCoordinator, tmp_path: Path
):
    offline = Linked(fake, tmp_path)
    for step in range(50):
        offline.link.report(Progress(job=JOB, epoch=1, clock=1, step=step, of=50))
    offline.link.report(evaluated(1))
    async with offline.transport:
        task = asyncio.create_task(offline.link.run())
        await fake.until(lambda: len(fake.events) == 2)
        fake.end_session()
        await fake.changed()
        await fake.until(lambda: offline.sessions == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert fake.events == [Progress(job=JOB, epoch=1, clock=1, step=49, of=50), evaluated(1)]
    lines = (tmp_path / "sent.jsonl").read_text("utf-8").splitlines()
    assert [msgspec.json.decode(line)["kind"] for line in lines] == [
        "hello", "progress", "evaluated", "hello",
    ]  # fmt: skip


async def test_an_event_that_is_never_taken_does_not_hold_up_the_others(
    fake: FakeCoordinator, linked: Linked, monkeypatch: pytest.MonkeyPatch
):
    original = FakeCoordinator._events

    async def refuse_declined(self: FakeCoordinator, request: object) -> object:
        raw = await request.read()  # type: ignore[attr-defined]
        if b"declined" in raw:
            return refusal(LimitError("this event is too large."))
        return await original(self, request)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeCoordinator, "_events", refuse_declined)
    await fake.stop()
    await fake.start(fake.port)
    await fake.until(lambda: linked.sessions)
    linked.link.report(Declined(job=JOB, reason="x" * 100))
    linked.link.report(evaluated(1))
    linked.link.report(evaluated(2))
    await fake.until(lambda: len(fake.events) == 2)
    assert fake.events == [evaluated(1), evaluated(2)]


async def test_a_coordinator_that_stops_is_come_back_to(fake: FakeCoordinator, linked: Linked):
    await fake.until(lambda: linked.sessions)
    await fake.send(messages.Bye(reason="restarts", retry=True))
    await fake.until(lambda: linked.sessions == 2)
    assert linked.instructions == []  # goodbye for now concerns only the line


async def test_a_proxy_that_cuts_quiet_connections_is_no_outage(
    fake: FakeCoordinator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """PC-039: the long poll is cut again and again; the session, and so the training, lives on."""
    monkeypatch.setattr(link_module, "LIVED_SECONDS", 0.2)
    async with FaultProxy("127.0.0.1", fake.port) as proxy:
        proxy.idle_limit = 0.3
        made = Linked(fake, tmp_path, proxy.url)
        async with made.transport:
            task = asyncio.create_task(made.link.run())
            await fake.until(lambda: fake.polls >= 5)
            await fake.send(messages.EndJob(job="j", reason="", final=False))
            await fake.until(lambda: fake._acked == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert len(made.instructions) == 1
    assert len(fake.hellos) == 1
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


async def test_a_session_that_never_lasts_is_tried_with_growing_pauses(
    fake: FakeCoordinator, tmp_path: Path
):
    fake.on_poll = lambda: ConflictError("this session is not open.")
    made = Linked(fake, tmp_path)
    async with made.transport:
        begin = time.monotonic()
        task = asyncio.create_task(made.link.run())
        await fake.until(lambda: len(fake.hellos) == 4)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert time.monotonic() - begin > 0.6


async def test_a_busy_coordinator_is_tried_again(fake: FakeCoordinator, tmp_path: Path):
    fake.on_hello = lambda _: BusyError("too many") if len(fake.hellos) < 3 else None
    made = Linked(fake, tmp_path)
    async with made.transport:
        task = asyncio.create_task(made.link.run())
        await fake.until(lambda: fake.polls)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert len(fake.hellos) == 3


@pytest.mark.parametrize("error", [RefusedError("drained"), UnauthenticatedError("unknown")])
async def test_what_cannot_get_better_ends_the_link(
    fake: FakeCoordinator, tmp_path: Path, error: RefusedError
):
    fake.on_hello = lambda _: error
    made = Linked(fake, tmp_path)
    async with made.transport, asyncio.timeout(10):
        with pytest.raises(DismissedError) as caught:
            await made.link.run()
    assert caught.value.error.message == error.message
    assert len(fake.hellos) == 1


async def test_goodbye_does_not_wait_for_a_dead_coordinator(fake: FakeCoordinator, linked: Linked):
    await fake.until(lambda: linked.sessions)
    await linked.link.leave("stop", 0.5)
    assert fake.left == ["stop"]
    await fake.stop()
    begin = time.monotonic()
    await linked.link.leave("stop", 0.5)
    assert time.monotonic() - begin < 1.0
