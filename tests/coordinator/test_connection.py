"""Caps and clocks of connections, and the account of their bytes."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from time import time

import aiohttp
import pytest

from coordinator import tls
from coordinator.connection import Connection
from coordinator.settings import CoordinatorSettings
from protocol.messages import Events, encode
from tests.coordinator.fakeengine import JOB, Served, running


async def connect(served: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = served.agents.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def ended(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(5):
        try:
            return await reader.read() == b""
        except ConnectionResetError:
            return True


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Slow: "])
async def test_a_header_that_takes_too_long_ends_the_connection(tmp_path: Path, sent: bytes):
    async with running(tmp_path, header_seconds=0.05) as served:
        reader, writer = await connect(served)
        writer.write(sent)
        assert await ended(reader)
        writer.close()


async def test_an_answered_connection_is_not_cut_by_the_clock_of_headers(tmp_path: Path):
    async with running(tmp_path, header_seconds=0.05, long_poll_seconds=0.2) as served:
        for _ in range(2):
            async with served.client.get(
                served.agents + "/agent/v1/next", headers=served.site()
            ) as answer:
                assert answer.status == 200


async def test_connections_above_the_cap_are_closed_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async with running(tmp_path, connections_max=2) as served:
        kept = [await connect(served) for _ in range(2)]
        for _ in range(3):
            reader, writer = await connect(served)
            assert await ended(reader)
            writer.close()
        assert caplog.text.count("connections_max") == 1
        for _, writer in kept:
            writer.close()
            await writer.wait_closed()


@pytest.mark.parametrize(
    "header", ["X-Long: " + "a" * 9_000, "\r\n".join(f"X-{n}: a" for n in range(80))]
)
async def test_headers_above_their_caps_are_refused(served: Served, header: str):
    reader, writer = await connect(served)
    writer.write(f"GET /healthz HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode())
    async with asyncio.timeout(5):
        assert (await reader.readline()).split()[1] == b"400"
    writer.close()


async def test_the_account_equals_the_bytes_that_crossed_the_socket(served: Served):
    reader, writer = await connect(served)
    head = "".join(f"{name}: {value}\r\n" for name, value in served.site().items())
    sent = received = 0
    for path, body in (
        (f"/agent/v1/jobs/{JOB}/updates?epoch=1&clock=1&attempt=1", bytes(300_000)),
        ("/agent/v1/events", encode(Events(first=0, items=()))),
    ):
        raw = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\n{head}Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        writer.write(raw)
        sent += len(raw)
        async with asyncio.timeout(5):
            answer = await reader.readuntil(b"\r\n\r\n")
            length = [line for line in answer.split(b"\r\n") if line.startswith(b"Content-Length")]
            if length:
                answer += await reader.readexactly(int(length[0].split()[1]))
        received += len(answer)
    writer.close()
    await writer.wait_closed()
    async with asyncio.timeout(5):
        while served.engine.ledger.total().down < received:
            await asyncio.wait_for(served.client.get(served.people + "/healthz"), 5)
    assert served.engine.ledger.total() == (sent, received)
    assert served.engine.ledger.job(JOB).up > 300_000


async def test_the_account_of_a_tls_connection_holds_its_records_too(tmp_path: Path):
    size = 8 << 20
    values = {"listen_agents": "0.0.0.0:0", "advertise": ("localhost",)}
    secure = tls.prepare(CoordinatorSettings(data_dir=str(tmp_path), **values), time())  # type: ignore[arg-type]
    assert secure is not None
    (tmp_path / "3.body").write_bytes(bytes(size))
    trust = ssl.create_default_context(cadata=secure.ca_pem.decode())
    async with running(tmp_path, secure=secure, **values) as served:
        async with aiohttp.ClientSession() as client:
            address = served.agents.replace("http:", "https:") + f"/agent/v1/jobs/{JOB}/versions/3"
            async with client.get(address, headers=served.site(), ssl=trust) as answer:
                assert len(await answer.read()) == size
        async with asyncio.timeout(5):
            while served.engine.ledger.job(JOB).down < size:
                await served.client.get(served.people + "/healthz")
    assert size < served.engine.ledger.job(JOB).down < size * 1.01


async def test_a_dropped_site_loses_its_connections(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    found: list[Connection] = []
    as_before = Connection.request_began

    def request_began(self: Connection) -> None:
        found.append(self)
        as_before(self)

    monkeypatch.setattr(Connection, "request_began", request_began)
    poll = asyncio.create_task(
        served.client.get(served.agents + "/agent/v1/next", headers=served.site())
    )
    await served.engine.hearing.wait()
    found[0].listener.drop("edge-1")
    await asyncio.wait_for(found[0].over, 5)
    poll.cancel()
