from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from client.transport import NotACoordinatorError, Transport, check_url
from protocol.errors import (
    BusyError,
    LimitError,
    NotFoundError,
    SkerryError,
    UnreachableError,
    UsageError,
)
from protocol.messages import Hello, Welcome
from tests.client.certs import new_ca, server_tls
from tests.client.fake_coordinator import FakeCoordinator, answer, refusal
from tests.faultproxy import FaultProxy

HELLO = Hello(instance="i")


async def hello(transport: Transport, seconds: float = 10.0) -> Welcome:
    return await transport.call(Welcome, "POST", "/agent/v1/hello", HELLO, seconds=seconds)


async def failure(transport: Transport, seconds: float = 10.0) -> SkerryError:
    async with transport:
        with pytest.raises(SkerryError) as caught:
            await hello(transport, seconds)
    return caught.value


@contextlib.asynccontextmanager
async def serving(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("url", "canonical"),
    [
        ("http://127.0.0.1:8470", "http://127.0.0.1:8470"),
        ("http://localhost:1/", "http://localhost:1"),
        ("http://[::1]:8470", "http://[::1]:8470"),
        ("https://c.test/skerry/", "https://c.test/skerry"),
    ],
)
def test_good_addresses(url: str, canonical: str):
    assert check_url(url, insecure=False) == canonical


@pytest.mark.parametrize("url", ["", "c.test:8470", "ftp://c.test", "https://", "http://a:b:c"])
def test_what_is_no_address_is_said_to_be_none(url: str):
    with pytest.raises(UsageError, match="not the address"):
        check_url(url, insecure=True)


def test_plain_http_beyond_this_machine_needs_a_flag():
    with pytest.raises(UsageError, match="--insecure"):
        check_url("http://10.0.0.1:8470", insecure=False)
    assert check_url("http://10.0.0.1:8470", insecure=True)


# ---------------------------------------------------------------- TLS


async def test_a_pinned_ca_is_trusted_and_no_other(tmp_path: Path):
    ca, other = new_ca(), new_ca("other")
    fake = await FakeCoordinator().start(tls=server_tls(tmp_path, ca, "127.0.0.1"))
    async with Transport(fake.url, ca=ca.certificate.decode()) as transport:
        assert (await hello(transport)).coordinator == "fake"
    error = await failure(Transport(fake.url, ca=other.certificate.decode()))
    assert "not signed by the CA that this site trusts" in error.message
    assert "join again" in error.hint
    error = await failure(Transport(fake.url))
    assert "not signed by the CA" in error.message
    await fake.stop()


async def test_a_certificate_for_other_names_is_told_with_both(tmp_path: Path):
    ca = new_ca()
    tls = server_tls(tmp_path, ca, "coord.test", "10.1.2.3")
    fake = await FakeCoordinator().start(tls=tls)
    error = await failure(Transport(fake.url, ca=ca.certificate.decode()))
    assert "coord.test" in error.message
    assert "10.1.2.3" in error.message
    assert "not for 127.0.0.1" in error.message
    assert "advertise" in error.hint
    await fake.stop()


async def test_an_expired_certificate_is_said_to_be_one(tmp_path: Path):
    ca = new_ca()
    fake = await FakeCoordinator().start(tls=server_tls(tmp_path, ca, "127.0.0.1", days=-1))
    error = await failure(Transport(fake.url, ca=ca.certificate.decode()))
    assert "not valid now" in error.message
    await fake.stop()


async def test_tls_to_a_plain_port_is_no_coordinator():
    async with FakeCoordinator() as fake:
        error = await failure(Transport(fake.url.replace("http:", "https:")))
    assert isinstance(error, UnreachableError)
    assert "TLS" in error.message


def test_a_bundle_that_cannot_be_loaded_is_named(tmp_path: Path):
    with pytest.raises(UsageError, match=r"no\.pem"):
        Transport("https://c.test", ca=tmp_path / "no.pem")


# ---------------------------------------------------------------- who answers, and how


async def test_nobody_there_is_unreachable_with_the_reason():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    error = await failure(Transport(f"http://127.0.0.1:{port}"))
    assert type(error) is UnreachableError
    assert "refused" in error.message.lower()


@pytest.mark.parametrize(
    "reply",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nnot found",
        b"HTTP/1.1 302 Found\r\nLocation: https://login.test/\r\nContent-Length: 0\r\n\r\n",
        b'HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\n{"status":"ok',
    ],
)
async def test_a_stranger_is_called_one(reply: bytes):
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(reply)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    error = await failure(Transport(f"http://127.0.0.1:{port}"))
    server.close()
    assert isinstance(error, NotACoordinatorError), error
    assert "not a Skerry coordinator" in error.message


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_proxy_in_front_is_told_apart_from_a_stranger(status: int):
    async def down(request: web.Request) -> web.Response:
        return web.Response(status=status, text="<html>Bad Gateway</html>")

    async with serving(down) as url:
        error = await failure(Transport(url))
    assert type(error) is UnreachableError
    assert f"HTTP {status}" in error.message


async def test_a_proxy_that_limits_bodies_is_a_limit():
    async def full(request: web.Request) -> web.Response:
        return web.Response(status=413, text="<html>too large</html>")

    async with serving(full) as url:
        error = await failure(Transport(url))
    assert isinstance(error, LimitError)
    assert "client_max_body_size" in error.hint


async def test_the_coordinators_own_errors_come_back_as_what_they_are():
    async def missing(request: web.Request) -> web.Response:
        return refusal(NotFoundError("no such job.", "look again", details={"job": "j"}))

    async with serving(missing) as url:
        error = await failure(Transport(url))
    assert type(error) is NotFoundError
    assert (error.message, error.hint, error.details) == (
        "no such job.",
        "look again",
        {"job": "j"},
    )


async def test_a_silent_peer_is_given_up_in_time():
    async with FakeCoordinator() as fake, FaultProxy("127.0.0.1", fake.port) as proxy:
        proxy.stall()
        error = await failure(Transport(proxy.url), seconds=0.2)
    assert isinstance(error, UnreachableError)
    assert "did not answer" in error.message


async def test_an_endless_answer_is_broken_off():
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b"x" * (1 << 20))
        return response

    async with serving(endless) as url:
        error = await failure(Transport(url))
    assert isinstance(error, LimitError)


async def test_every_request_carries_protocol_secret_and_session():
    seen: list[dict[str, str]] = []

    async def look(request: web.Request) -> web.Response:
        seen.append(dict(request.headers))
        return refusal(BusyError("later"))

    async with serving(look) as url:
        transport = Transport(url, secret="sks1.x")
        transport.session = "s-1"
        await failure(transport)
    assert seen[0]["Authorization"] == "Bearer sks1.x"
    assert seen[0]["X-Skerry-Protocol"] == "1"
    assert seen[0]["X-Skerry-Session"] == "s-1"


async def test_the_environments_proxy_is_used_and_its_exceptions_are_kept(
    monkeypatch: pytest.MonkeyPatch,
):
    asked: list[str] = []

    async def forward(request: web.Request) -> web.Response:
        asked.append(request.raw_path)
        return answer(
            Welcome(
                session="s", site="a", coordinator="behind the proxy", protocol=1,
                lease_seconds=1, long_poll_seconds=1, cursor=0,
            )
        )  # fmt: skip

    async with serving(forward) as proxy, FakeCoordinator() as fake:
        monkeypatch.setenv("HTTP_PROXY", proxy)
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        async with Transport("http://coord.test:8470") as transport:
            assert (await hello(transport)).coordinator == "behind the proxy"
        assert asked == ["http://coord.test:8470/agent/v1/hello"]
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        async with Transport(fake.url) as transport:
            assert (await hello(transport)).coordinator == "fake"
        monkeypatch.delenv("http_proxy")
        monkeypatch.delenv("HTTP_PROXY")
        async with Transport("http://coord.test:8470", proxy=proxy) as transport:
            assert (await hello(transport)).coordinator == "behind the proxy"
