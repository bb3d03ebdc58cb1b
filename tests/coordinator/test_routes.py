"""Every route with every role, and with bytes that are not what they should be."""

from __future__ import annotations

import asyncio
import hashlib
import pickle
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.auth import RANK
from coordinator.routes import STRANGER, STREAM, TABLE, Route
from protocol.errors import ErrorBody
from protocol.limits import JSON_BODY_BYTES_MAX, SMALL_BODY_BYTES_MAX
from protocol.messages import decode
from tests.coordinator.fakeengine import JOB, SESSION, SITE_SECRET, TOKENS, Served, page

CREDENTIALS = {"nobody": "", "wrong": "sks1.wrong", "site": SITE_SECRET, **TOKENS}
PARTS = {"job": JOB, "version": "1", "site": "edge-1", "token": "ab" * 8}
IDS = [f"{route.method} {route.path}" for route in TABLE]


def url(served: Served, route: Route) -> str:
    base = served.agents if route.listener == "agents" else served.people
    path = re.sub(r"\{(\w+)\}", lambda found: PARTS[found[1]], route.path)
    query = "?" + "&".join(f"{name}=0" for name in route.query) if route.query else ""
    return base + path + query


def headers(route: Route, credential: str) -> dict[str, str]:
    found = {"Authorization": f"Bearer {credential}"} if credential else {}
    if route.listener == "agents":
        found |= {"X-Skerry-Protocol": "1", "X-Skerry-Session": SESSION}
    return found


def allowed(route: Route, who: str) -> bool:
    if route.role == "none":
        return True
    if route.role == "site":
        return who == "site"
    return who in RANK and RANK[who] >= RANK[route.role]  # type: ignore[index]


def expected_refusal(route: Route, who: str) -> int:
    return 403 if who in RANK and route.listener == "people" else 401


def prepare(served: Served) -> None:
    # So that no allowed call waits for something to happen.
    served.services.stop()
    served.engine.pages.put_nowait(page(1))
    (served.engine.folder / "1.body").write_bytes(b"snapshot")
    (served.engine.folder / "0.body").write_bytes(b"snapshot")


@pytest.mark.parametrize("who", CREDENTIALS)
@pytest.mark.parametrize("route", TABLE, ids=IDS)
async def test_a_route_answers_its_roles_and_refuses_all_others(
    served: Served, route: Route, who: str
):
    prepare(served)
    async with served.client.request(
        route.method, url(served, route), headers=headers(route, CREDENTIALS[who])
    ) as answer:
        await answer.read()
    if allowed(route, who):
        assert answer.status not in (401, 403)
        assert answer.status < 500 or (route.path == "/readyz" and answer.status == 503)
    else:
        assert answer.status == expected_refusal(route, who)
        assert not served.engine.told


async def test_a_role_of_the_people_is_nothing_to_the_agents_listener(served: Served):
    async with served.client.get(
        served.agents + "/agent/v1/next",
        headers={**served.site(), "Authorization": f"Bearer {TOKENS['admin']}"},
    ) as answer:
        assert answer.status == 401


@pytest.mark.parametrize("listener", ["agents", "people"])
async def test_routes_of_one_listener_do_not_exist_on_the_other(served: Served, listener: str):
    other = served.people if listener == "agents" else served.agents
    for route in TABLE:
        if route.listener == listener:
            path = url(served, route).partition("127.0.0.1:")[2].partition("/")[2]
            async with served.client.request(route.method, f"{other}/{path}") as answer:
                assert answer.status == 404
                assert decode(ErrorBody, await answer.read()).error == "NotFoundError"


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("route", TABLE, ids=IDS)
async def test_a_pickle_is_never_run_by_any_endpoint(served: Served, route: Route, tmp_path: Path):
    """PC-109: an endpoint that is sent a pickle refuses it, or stores it as the bytes it is."""
    prepare(served)
    marker = tmp_path / "marker"
    evil = pickle.dumps(Payload(marker))
    pickle.loads(evil)  # the payload works: it is the endpoint that does not run it
    assert marker.exists()
    marker.unlink()
    credential = SITE_SECRET if route.listener == "agents" else TOKENS["admin"]
    async with served.client.request(
        route.method,
        url(served, route),
        data=evil,
        headers={**headers(route, credential), "Content-Type": "application/python-pickle"},
    ) as answer:
        await answer.read()
    if route.cap == STREAM:
        assert served.engine.uploads[0].hash.digest() == hashlib.sha256(evil).digest()
    else:
        assert answer.status == 400
    assert not marker.exists()


@pytest.mark.parametrize(
    "route", [one for one in TABLE if one.takes is not None], ids=lambda one: one.path
)
@pytest.mark.parametrize("size", [1_048_576, 1_049_648])
async def test_weight_endpoints_stream_and_all_others_keep_a_small_cap(
    served: Served, route: Route, size: int
):
    """PC-020: bodies above 1 MiB pass where weights go, and are a clear 413 elsewhere."""
    credential = SITE_SECRET if route.listener == "agents" else TOKENS["admin"]
    async with served.client.post(
        url(served, route), data=b"[" * size, headers=headers(route, credential)
    ) as answer:
        body = await answer.read()
    if route.cap == STREAM:
        assert answer.status in (200, 201)
        assert served.engine.uploads[0].bytes == size
    elif size > route.cap:
        assert answer.status == 413
        error = decode(ErrorBody, body)
        assert error.details == {"limit": route.cap, "found": size}
        assert str(size) in error.message
        assert str(route.cap) in error.message
    else:
        assert answer.status == 400
    assert route.cap in (STREAM, STRANGER, SMALL_BODY_BYTES_MAX, JSON_BODY_BYTES_MAX)


async def test_a_large_upload_passes_whole(served: Served):
    """PC-020: 120 MiB to an endpoint that takes weights."""
    piece, pieces = bytes(1 << 20), 120

    async def body() -> AsyncIterator[bytes]:
        for _ in range(pieces):
            yield piece

    async with served.client.post(
        served.agents + f"/agent/v1/jobs/{JOB}/updates?epoch=1&clock=0&attempt=1",
        data=body(),
        headers=served.site(**{"Content-Length": str(pieces << 20)}),
    ) as answer:
        assert answer.status == 200
    assert served.engine.uploads[0].bytes == pieces << 20
    assert served.engine.uploads[0].ended == "finished"


async def test_answers_carry_security_headers_and_no_cookie_nor_cors(served: Served):
    for address in (served.people + "/api/v1/jobs", served.people + "/nowhere"):
        async with served.client.get(
            address, headers=served.person(Origin="https://elsewhere.example")
        ) as answer:
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["X-Frame-Options"] == "DENY"
            assert answer.headers["Server"] == "skerry"
            assert "Access-Control-Allow-Origin" not in answer.headers
            assert "Set-Cookie" not in answer.headers


async def test_a_wrong_method_names_the_right_ones(served: Served):
    async with served.client.put(served.people + "/api/v1/jobs") as answer:
        assert answer.status == 405
        assert (
            answer.headers["Allow"] == "GET, HEAD, POST" or answer.headers["Allow"] == "GET, POST"
        )
        assert "takes GET" in decode(ErrorBody, await answer.read()).message


async def test_an_unexpected_failure_is_a_number_in_the_answer_and_a_traceback_in_the_log(
    served: Served, caplog: pytest.LogCaptureFixture
):
    served.engine.failure = ZeroDivisionError("secret detail")
    async with served.client.get(
        served.people + f"/api/v1/jobs/{JOB}", headers=served.person()
    ) as answer:
        error = decode(ErrorBody, await answer.read())
    assert answer.status == 500
    assert "secret detail" not in error.message
    assert "Traceback" not in error.message
    record = next(one for one in caplog.records if str(error.details["id"]) in one.getMessage())
    assert record.exc_info is not None


async def test_what_is_no_http_is_refused_in_the_form_of_all_errors(served: Served):
    host, port = served.people.removeprefix("http://").split(":")

    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"\x16\x03\x01\x02\x00nonsense\r\n\r\n")
    raw = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert raw.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    assert decode(ErrorBody, raw.partition(b"\r\n\r\n")[2]).error == "MalformedError"


async def test_compressed_bodies_are_refused(served: Served):
    async with served.client.post(
        served.people + "/api/v1/jobs",
        data=b"x",
        headers=served.person(**{"Content-Encoding": "gzip"}),
    ) as answer:
        assert answer.status == 400


def test_whoever_has_no_credential_can_send_little():
    assert all(route.cap <= STRANGER for route in TABLE if route.role == "none")


def test_the_table_names_each_route_once():
    assert len({(route.method, route.path) for route in TABLE}) == len(TABLE)


def test_only_what_is_needed_before_a_credential_is_open_to_anybody():
    open_to_all = {route.path for route in TABLE if route.role == "none"}
    assert open_to_all == {
        "/agent/v1/ca",
        "/agent/v1/join",
        "/api/v1/openapi.json",
        "/healthz",
        "/readyz",
    }
