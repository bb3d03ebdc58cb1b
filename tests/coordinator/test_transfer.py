"""Bodies in pieces."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from pathlib import Path

import pytest

from coordinator import transfer
from tests.coordinator.fakeengine import JOB, Served, running

VERSION = f"/agent/v1/jobs/{JOB}/versions/3"


async def ask(served: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = served.agents.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 16)
    head = "".join(f"{name}: {value}\r\n" for name, value in served.site().items())
    writer.write(f"GET {VERSION} HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode())
    return reader, writer


async def test_a_large_file_is_sent_whole_in_little_memory(served: Served, tmp_path: Path):
    size = 64 << 20
    with (tmp_path / "3.body").open("wb") as file:
        file.truncate(size)
    tracemalloc.start()
    reader, writer = await ask(served)
    await reader.readuntil(b"\r\n\r\n")
    received = 0
    async with asyncio.timeout(30):
        while received < size:
            received += len(await reader.read(1 << 20))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    writer.close()
    assert received == size
    assert peak < 16 << 20


async def test_a_reader_that_stands_still_is_dropped_and_gives_its_slot_back(tmp_path: Path):
    async with running(tmp_path, body_idle_seconds=0.1) as served:
        served.engine.slots = asyncio.Semaphore(1)
        with (tmp_path / "3.body").open("wb") as file:
            file.truncate(256 << 20)
        _, writer = await ask(served)
        async with asyncio.timeout(20):
            while served.engine.slots._value == 1:
                served.engine.hearing.clear()
                await served.engine.hearing.wait()
            async with served.engine.slots:
                pass
        writer.close()


async def test_a_reader_that_vanishes_gives_its_slot_back(served: Served, tmp_path: Path):
    served.engine.slots = asyncio.Semaphore(1)
    with (tmp_path / "3.body").open("wb") as file:
        file.truncate(256 << 20)
    reader, writer = await ask(served)
    await reader.readuntil(b"\r\n\r\n")
    writer.transport.abort()
    async with asyncio.timeout(20), served.engine.slots:
        pass


async def test_a_file_that_shrinks_ends_the_answer_short(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(transfer, "PIECE_BYTES", 1 << 16)
    path = tmp_path / "3.body"
    path.write_bytes(bytes(8 << 20))
    reader, writer = await ask(served)
    await reader.readuntil(b"\r\n\r\n")
    os.truncate(path, 0)
    async with asyncio.timeout(20):
        rest = await reader.read()
        while piece := await reader.read():
            rest += piece
    assert len(rest) < 8 << 20
    writer.close()


async def test_twenty_newcomers_take_turns_while_control_stays_responsive(
    served: Served, tmp_path: Path
):
    """PC-031: 20 sites fetch 2 MiB at once (50 MiB scaled down): never more than 4 at a time, each
    whole, and a heartbeat in between is answered within a second.
    """
    size, newcomers = 2 << 20, 20
    with (tmp_path / "3.body").open("wb") as file:
        file.truncate(size)
    at_once = most = 0
    slots = served.engine.slots

    class Counted:
        async def __aenter__(self) -> None:
            nonlocal at_once, most
            await slots.acquire()
            at_once += 1
            most = max(most, at_once)

        async def __aexit__(self, *_: object) -> None:
            nonlocal at_once
            at_once -= 1
            slots.release()

    served.engine.slots = Counted()  # type: ignore[assignment]
    loop = asyncio.get_running_loop()
    latencies: list[float] = []

    async def fetch() -> int:
        async with served.client.get(served.agents + VERSION, headers=served.site()) as answer:
            return len(await answer.read())

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        fetches = [group.create_task(fetch()) for _ in range(newcomers)]
        while not all(task.done() for task in fetches):
            began = loop.time()
            async with served.client.post(
                served.agents + "/agent/v1/events",
                data=b'{"first":0,"items":[]}',
                headers=served.site(),
            ) as answer:
                assert answer.status == 204
            latencies.append(loop.time() - began)
    assert [task.result() for task in fetches] == [size] * newcomers
    assert most == 4
    assert max(latencies) < 1
