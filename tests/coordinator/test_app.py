"""Applications made from a table of routes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from coordinator import app as application
from coordinator import ports
from coordinator.http import Call
from coordinator.routes import TABLE, Route
from coordinator.server import Addresses, listening
from coordinator.settings import CoordinatorSettings
from protocol.errors import ConflictError
from tests.coordinator.fakeengine import FakeEngine


async def half(call: Call) -> web.StreamResponse:
    """Half an answer, then a failure."""
    response = web.StreamResponse()
    response.content_length = 100
    await response.prepare(call.request)
    await response.write(b"half")
    raise ConflictError("it broke.")


@contextlib.asynccontextmanager
async def serving(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *more: Route,
    mount: application.Mount | None = None,
) -> AsyncIterator[str]:
    table = (*TABLE, *more)
    made = application.make_app
    monkeypatch.setattr(
        "coordinator.server.make_app",
        lambda name, services, mount: made(name, services, mount=mount, table=table),
    )
    engine = FakeEngine(tmp_path)
    settings = CoordinatorSettings(stop_seconds=0.5)
    addresses = Addresses(agents="", people="", ca_fingerprint="", pid=1)
    with ports.bind("127.0.0.1", 0, "a") as agents, ports.bind("127.0.0.1", 0, "p") as people:
        async with listening(settings, engine, (agents, people), None, addresses, mount=mount):  # type: ignore[arg-type]
            yield f"http://127.0.0.1:{people.getsockname()[1]}"


async def test_an_answer_that_fails_half_way_is_broken_off_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    route = Route("people", "GET", "/half", "none", half, "Half an answer.")
    async with (
        serving(tmp_path, monkeypatch, route) as base,
        aiohttp.ClientSession() as client,
        client.get(base + "/half") as answer,
    ):
        with pytest.raises(aiohttp.ClientError):
            async with asyncio.timeout(5):
                await answer.read()


async def test_pages_are_mounted_beside_the_api_and_keep_their_own_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def page(_: web.Request) -> web.Response:
        return web.Response(text="hello", headers={"Content-Security-Policy": "default-src 'self'"})

    def mount(app: web.Application) -> None:
        app.router.add_get("/", page)

    async with (
        serving(tmp_path, monkeypatch, mount=mount) as base,
        aiohttp.ClientSession() as client,
    ):
        async with client.get(base + "/") as answer:
            assert await answer.text() == "hello"
            assert answer.headers["Content-Security-Policy"] == "default-src 'self'"
            assert answer.headers["X-Frame-Options"] == "DENY"
        async with client.get(base + "/healthz") as answer:
            assert answer.status == 200
