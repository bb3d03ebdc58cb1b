"""The people's side of the API over real sockets, with a fake engine behind it."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from urllib.parse import quote

import aiohttp
import msgspec
import pytest
import yarl

from coordinator import http
from coordinator.people_api import events_of
from privacy.tokens import parse_join_token
from protocol.errors import ErrorBody
from protocol.messages import decode, encode
from protocol.views import (
    CommandRequest,
    Health,
    Info,
    InitStored,
    JobDetail,
    JobRequest,
    JournalPage,
    SiteView,
    TokenCreated,
    TokenRequest,
    Validation,
)
from tests.coordinator.fakeengine import JOB, SPEC, Served, page, running

NAMES = ["Klinik-Zürich", "病院-3", "lab-🔬", "a/b ?#%", "é" * 255]


async def call(
    served: Served, method: str, path: str, body: object = None, role: str = "admin"
) -> tuple[int, bytes]:
    raw = encode(body) if body is not None else None
    async with served.client.request(
        method, served.people + path, data=raw, headers=served.person(role)
    ) as answer:
        return answer.status, await answer.read()


# ---------------------------------------------------------------- jobs


async def test_a_job_is_submitted_in_the_name_of_the_token(served: Served):
    status, raw = await call(served, "POST", "/api/v1/jobs", JobRequest(spec=SPEC), "operator")
    assert status == 201
    assert decode(JobDetail, raw).job.id == JOB
    assert served.engine.told == [("submit", ("digits", "a-operator"))]


async def test_a_job_with_problems_is_refused_with_all_of_them(served: Served):
    period = msgspec.structs.replace(SPEC.period, epochs=2)
    target = msgspec.structs.replace(SPEC.stop, versions=None)
    spec = msgspec.structs.replace(SPEC, period=period, stop=target)
    status, raw = await call(served, "POST", "/api/v1/jobs", JobRequest(spec=spec))
    assert status == 422
    problems = decode(ErrorBody, raw).problems
    assert len(problems) >= 2
    assert not served.engine.told
    status, raw = await call(served, "POST", "/api/v1/jobs/validate", JobRequest(spec=spec))
    assert status == 200
    assert decode(Validation, raw).problems == problems


@pytest.mark.parametrize("what", ["pause", "resume", "drain", "stop"])
async def test_commands_carry_who_and_why(served: Served, what: str):
    request = CommandRequest(reason="the power goes off")
    status, raw = await call(served, "POST", f"/api/v1/jobs/{JOB}/{what}", request)
    assert status == 200
    assert decode(JobDetail, raw).job.id == JOB
    assert served.engine.told == [(what, ("a-admin", "the power goes off"))]


async def test_a_command_needs_no_body(served: Served):
    assert (await call(served, "POST", f"/api/v1/jobs/{JOB}/pause"))[0] == 200


async def test_a_job_is_deleted(served: Served):
    assert (await call(served, "DELETE", f"/api/v1/jobs/{JOB}"))[0] == 204
    assert served.engine.told == [("delete", "a-admin")]
    assert (await call(served, "DELETE", "/api/v1/jobs/none"))[0] == 404


async def test_numbers_that_json_lacks_are_null(served: Served):
    _, raw = await call(served, "GET", f"/api/v1/jobs/{JOB}/versions")
    assert json.loads(raw, parse_constant=pytest.fail)["versions"][0]["update_norm"] is None


async def test_lists_begin_where_they_are_asked_to(served: Served):
    _, raw = await call(served, "GET", f"/api/v1/jobs/{JOB}/journal?after=6")
    assert decode(JournalPage, raw).entries[0].seq == 7
    _, raw = await call(served, "GET", f"/api/v1/jobs/{JOB}/versions?after=2")
    assert json.loads(raw) == {"versions": []}
    status, _ = await call(served, "GET", f"/api/v1/jobs/{JOB}/updates?after=-1")
    assert status == 400


async def test_an_export_is_sent_with_what_it_lacks_and_then_removed(
    served: Served, tmp_path: Path
):
    served.engine.missing = ("schicht.é", "head.bias")
    async with served.client.get(
        served.people + f"/api/v1/jobs/{JOB}/export?version=2", headers=served.person()
    ) as answer:
        assert await answer.read() == b"model"
    assert json.loads(answer.headers["X-Skerry-Missing"]) == ["schicht.é", "head.bias"]
    assert answer.headers["X-Skerry-Missing-Count"] == "2"
    # The next request on the same connection begins when the one before has ended, tidying included.
    async with served.client.get(served.people + "/healthz"):
        pass
    assert not (tmp_path / "export.safetensors").exists()


async def test_a_list_too_long_for_a_header_is_cut_and_counted(served: Served):
    served.engine.missing = tuple(f"encoder.layers.{n}.weight" for n in range(5_000))
    async with served.client.get(
        served.people + f"/api/v1/jobs/{JOB}/export", headers=served.person()
    ) as answer:
        named = json.loads(answer.headers["X-Skerry-Missing"])
    assert 0 < len(named) < 5_000
    assert answer.headers["X-Skerry-Missing-Count"] == "5000"


async def test_a_model_to_begin_with_is_stored(served: Served):
    async with served.client.post(
        served.people + "/api/v1/inits", data=bytes(2 << 20), headers=served.person()
    ) as answer:
        assert answer.status == 201
        assert decode(InitStored, await answer.read()) == InitStored(init="i-1", bytes=2 << 20)


# ---------------------------------------------------------------- events


async def read_event(answer: aiohttp.ClientResponse) -> list[bytes]:
    async with asyncio.timeout(5):
        return (await answer.content.readuntil(b"\n\n")).splitlines()[:-1]


async def test_rows_are_streamed_as_they_come(served: Served):
    async with served.client.get(
        served.people + f"/api/v1/jobs/{JOB}/events?after=3", headers=served.person("viewer")
    ) as answer:
        assert answer.content_type == "text/event-stream"
        assert await read_event(answer) == [b"retry: 1000"]
        served.engine.pages.put_nowait(page(4, 5))
        number, kind, data = await read_event(answer)
        assert (number, kind) == (b"id: 5", b"event: journal")
        assert decode(JournalPage, data.removeprefix(b"data: ")) == page(4, 5)
        served.engine.pages.put_nowait(None)
        assert await read_event(answer) == [b": still here"]
    assert served.engine.told == [("subscribe", (3, JOB))]


@pytest.mark.parametrize(
    ("query", "headers", "after"),
    [("", {}, 41), ("?after=7", {}, 7), ("?after=7", {"Last-Event-ID": "9"}, 9)],
)
async def test_a_stream_goes_on_where_its_reader_was(
    served: Served, query: str, headers: dict[str, str], after: int
):
    async with served.client.get(
        served.people + "/api/v1/events" + query, headers=served.person(**headers)
    ) as answer:
        await read_event(answer)
        served.engine.pages.put_nowait(page(50))
        await read_event(answer)
    assert served.engine.told == [("subscribe", (after, ""))]


async def test_events_of_an_unknown_job_are_not_found(served: Served):
    assert (await call(served, "GET", "/api/v1/jobs/none/events"))[0] == 404


async def test_a_row_too_large_for_the_stream_is_announced_and_the_stream_goes_on(
    served: Served, caplog: pytest.LogCaptureFixture
):
    """PC-021: a 5 MiB event is held back with a log line, and the reader hears of it and of all
    that follows.
    """
    caplog.set_level(logging.WARNING)
    async with served.client.get(
        served.people + "/api/v1/events", headers=served.person()
    ) as answer:
        await read_event(answer)
        served.engine.pages.put_nowait(page(60, filler="x" * (5 << 20)))
        served.engine.pages.put_nowait(page(61))
        number, kind, data = await read_event(answer)
        assert (number, kind) == (b"id: 60", b"event: large")
        assert json.loads(data.removeprefix(b"data: "))["seq"] == 60
        assert (await read_event(answer))[:2] == [b"id: 61", b"event: journal"]
    assert "journal row 60" in caplog.text
    assert "stream_event_bytes_max" in caplog.text


@pytest.mark.parametrize("above", [0, 1])
def test_events_are_whole_up_to_the_limit_and_announced_above_it(above: int):
    """PC-021: 4,194,304 bytes pass, 4,194,305 are announced; no event is above the limit."""
    limit = 4_194_304
    filler = "x" * (limit + above - len(encode(page(1, filler=""))))
    [event] = events_of(page(1, filler=filler), limit)
    assert (b"event: large" in event) == bool(above)
    assert len(event) <= limit + 64


def test_a_page_above_the_limit_is_sent_row_by_row():
    events = events_of(page(1, 2, 3), 80)
    assert [event.split(b"\n")[0] for event in events] == [b"id: 1", b"id: 2", b"id: 3"]


async def test_streams_end_at_once_when_the_coordinator_stops(served: Served):
    async with served.client.get(
        served.people + "/api/v1/events", headers=served.person()
    ) as answer:
        await read_event(answer)
        served.services.stop()
        async with asyncio.timeout(1):
            assert await answer.content.read() == b""


async def test_too_many_streams_are_refused_and_a_closed_one_makes_room(tmp_path: Path):
    async with running(tmp_path, streams_max=1) as served:
        address = served.people + "/api/v1/events"
        async with served.client.get(address, headers=served.person()) as answer:
            await read_event(answer)
            async with served.client.get(address, headers=served.person()) as second:
                assert second.status == 429
                assert "streams_max" in decode(ErrorBody, await second.read()).message
        async with asyncio.timeout(5):
            while True:
                async with served.client.get(address, headers=served.person()) as third:
                    if third.status == 200:
                        break


# ---------------------------------------------------------------- sites and tokens


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("what", ["drain", "revoke"])
async def test_a_site_of_any_name_is_commanded_by_it(served: Served, what: str, name: str):
    """PC-085: names in any language, and with every reserved character, work in URLs."""
    served.engine.names["sks1.other"] = name
    address = f"{served.people}/api/v1/sites/{quote(name, safe='')}/{what}"
    async with served.client.post(
        yarl.URL(address, encoded=True), headers=served.person()
    ) as answer:
        assert answer.status == 200
        assert answer.charset in (None, "utf-8")
        assert decode(SiteView, await answer.read()).name == name
    assert served.engine.told == [(what, (name, "a-admin", ""))]


async def test_a_revoked_site_loses_its_connections(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http, "_BYE_SECONDS", 0.0)
    poll = asyncio.create_task(
        served.client.get(served.agents + "/agent/v1/next", headers=served.site())
    )
    await served.engine.hearing.wait()
    [connection] = served.services.listeners[0].open
    assert (await call(served, "POST", "/api/v1/sites/edge-1/revoke"))[0] == 200
    await asyncio.wait_for(connection.over, 5)
    poll.cancel()


async def test_names_in_lists_are_utf_8(served: Served):
    """PC-085: what the API shows are the names themselves, in UTF-8."""
    served.engine.names["sks1.other"] = "病院-3"
    _, raw = await call(served, "GET", "/api/v1/sites")
    assert "病院-3".encode() in raw


async def test_a_join_token_names_this_coordinator(served: Served):
    status, raw = await call(served, "POST", "/api/v1/tokens", TokenRequest(site="edge-2"))
    assert status == 201
    token = parse_join_token(decode(TokenCreated, raw).token)
    assert token.url == served.agents
    assert (token.id, token.secret) == ("ab" * 8, "cd" * 32)


async def test_a_token_is_revoked(served: Served):
    assert (await call(served, "DELETE", f"/api/v1/tokens/{'ab' * 8}"))[0] == 204
    assert (await call(served, "DELETE", "/api/v1/tokens/none"))[0] == 404


# ---------------------------------------------------------------- the coordinator itself


@pytest.mark.parametrize(
    ("status", "healthz", "readyz"),
    [("ok", 200, 200), ("degraded", 200, 503), ("failing", 503, 503)],
)
async def test_health_says_whether_it_lives_and_whether_it_takes_work(
    served: Served, status: str, healthz: int, readyz: int
):
    served.engine.health_now = Health(status=status, reasons=("the disk is full.",))  # type: ignore[arg-type]
    for path, expected in (("/healthz", healthz), ("/readyz", readyz)):
        async with served.client.get(served.people + path) as answer:
            assert answer.status == expected
            assert decode(Health, await answer.read()).reasons == ("the disk is full.",)


async def test_what_goes_wrong_soon_is_said_while_all_is_well(served: Served):
    """PC-071: readiness stands, with a reason to act."""
    served.services.notes = lambda: ("the certificate c.pem expires on 2027-01-01.",)
    async with served.client.get(served.people + "/readyz") as answer:
        health = decode(Health, await answer.read())
        assert (answer.status, health.status) == (200, "ok")
        assert health.reasons == ("the certificate c.pem expires on 2027-01-01.",)


async def test_a_stopping_coordinator_is_not_ready(served: Served):
    served.services.stop()
    async with served.client.get(served.people + "/readyz") as answer:
        assert answer.status == 503


async def test_info_names_the_software(served: Served):
    _, raw = await call(served, "GET", "/api/v1/info", role="viewer")
    assert decode(Info, raw).coordinator == "skerry"
