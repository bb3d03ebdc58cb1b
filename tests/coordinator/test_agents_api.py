"""The agents' side of the API over real sockets, with a fake engine behind it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest

from coordinator import agents_api, server
from coordinator.connection import Connection
from privacy.keys import new_private_key, public_hex, sign_join
from protocol.errors import ErrorBody
from protocol.messages import (
    Abort,
    Bye,
    Events,
    Hello,
    Instructions,
    Join,
    Joined,
    Leave,
    Progress,
    Receipt,
    Welcome,
    decode,
    encode,
)
from protocol.version import PROTOCOL
from tests.coordinator.fakeengine import JOB, SESSION, Served, running

UPDATES = f"/agent/v1/jobs/{JOB}/updates?epoch=1&clock=2&attempt=1"
NEXT = "/agent/v1/next?cursor=0"


def join_body(name: str, **changes: object) -> bytes:
    key = new_private_key()
    proof = sign_join(key, "00" * 8, name)
    join = Join(
        protocol=PROTOCOL,
        token_id="00" * 8,
        token_secret="11" * 32,
        name=name,
        public_key=public_hex(key),
        proof=proof,
    )
    return encode(msgspec.structs.replace(join, **changes))


async def post(
    served: Served, path: str, body: bytes, headers: dict[str, str] | None = None
) -> tuple[int, bytes]:
    async with served.client.post(
        served.agents + path, data=body, headers=served.site() if headers is None else headers
    ) as answer:
        return answer.status, await answer.read()


# ---------------------------------------------------------------- joining and sessions


@pytest.mark.parametrize("name", ["Klinik-Zürich", "病院-3", "lab-🔬", "é" * 255])
async def test_a_site_of_any_language_joins_with_its_proof(served: Served, name: str):
    """PC-085: names with non-Latin letters, an emoji and 255 characters come back as they were."""
    status, raw = await post(
        served, "/agent/v1/join", join_body(name), {"X-Skerry-Protocol": str(PROTOCOL)}
    )
    assert status == 200
    assert decode(Joined, raw).site == name


async def test_a_join_without_the_private_key_is_refused_and_uses_no_token(served: Served):
    body = join_body("edge-9", public_key=public_hex(new_private_key()))
    status, raw = await post(served, "/agent/v1/join", body, {"X-Skerry-Protocol": str(PROTOCOL)})
    assert status == 401
    assert "did not prove" in decode(ErrorBody, raw).message
    assert not served.engine.told


async def test_guessing_join_tokens_is_slowed_down(tmp_path: Path):
    async with running(tmp_path, login_failures_max=3) as served:
        statuses = []
        for _ in range(5):
            body = join_body("edge-9", token_id="22" * 8)
            async with served.client.post(
                served.agents + "/agent/v1/join",
                data=body,
                headers={"X-Skerry-Protocol": str(PROTOCOL)},
            ) as answer:
                statuses.append(answer.status)
        assert statuses == [401, 401, 401, 429, 429]
        assert int(answer.headers["Retry-After"]) >= 1


@pytest.mark.parametrize("spoken", [str(PROTOCOL + 1), str(PROTOCOL - 2), "", "one"])
async def test_another_protocol_is_refused_at_registration_with_both_numbers(
    served: Served, spoken: str
):
    """PC-087: n+1, n-2 and no number at all are refused at once with both numbers and a remedy."""
    headers = {"X-Skerry-Protocol": spoken} if spoken else {}
    async with asyncio.timeout(1):
        status, raw = await post(served, "/agent/v1/join", join_body("edge-9"), headers)
    error = decode(ErrorBody, raw)
    assert status == 426
    assert error.error == "VersionError"
    assert error.details["ours"] == PROTOCOL
    assert f"protocol {PROTOCOL}" in error.message
    assert "pgrade" in error.hint


async def test_every_later_request_is_checked_for_its_protocol(served: Served):
    headers = served.site(**{"X-Skerry-Protocol": str(PROTOCOL + 1)})
    for path in ("/agent/v1/hello", "/agent/v1/events", UPDATES):
        status, _ = await post(served, path, b"{}", headers)
        assert status == 426


async def test_a_session_is_opened_and_asked_for_ever_after(served: Served):
    headers = served.site()
    del headers["X-Skerry-Session"]
    status, raw = await post(
        served, "/agent/v1/hello", encode(Hello(protocol=PROTOCOL, instance="i")), headers
    )
    assert status == 200
    assert decode(Welcome, raw).session == SESSION
    assert (await post(served, "/agent/v1/leave", encode(Leave()), headers))[0] == 403
    old = served.site(**{"X-Skerry-Session": "session-0"})
    assert (await post(served, "/agent/v1/leave", encode(Leave()), old))[0] == 409


async def test_a_removed_site_is_told_that_it_is_gone_for_good(served: Served):
    headers = served.site(Authorization="Bearer sks1.revoked")
    status, raw = await post(served, "/agent/v1/events", b"{}", headers)
    assert status == 410
    assert decode(ErrorBody, raw).error == "RemovedError"


async def test_leaving_is_told_with_its_reason(served: Served):
    assert (await post(served, "/agent/v1/leave", encode(Leave(reason="Ctrl-C"))))[0] == 204
    assert served.engine.told == [("leave", ("edge-1", "Ctrl-C"))]


# ---------------------------------------------------------------- the long poll


async def test_a_poll_delivers_what_comes_while_it_waits(served: Served):
    abort = Abort(job=JOB, epoch=1, clock=1, attempt=1, reason="late")
    async with asyncio.TaskGroup() as group:
        poll = group.create_task(served.client.get(served.agents + NEXT, headers=served.site()))
        await served.engine.hearing.wait()
        served.engine.mailbox("edge-1").put(abort)
    async with poll.result() as answer:
        found = decode(Instructions, await answer.read())
    assert found == Instructions(cursor=1, items=(abort,))


async def test_an_empty_poll_returns_with_its_cursor(tmp_path: Path):
    async with (
        running(tmp_path, long_poll_seconds=0.05) as served,
        served.client.get(served.agents + NEXT, headers=served.site()) as answer,
    ):
        assert decode(Instructions, await answer.read()) == Instructions(cursor=0)


async def test_an_open_poll_keeps_the_lease(served: Served, monkeypatch: pytest.MonkeyPatch):
    async def soon() -> float:
        await asyncio.sleep(0)
        return 0.0

    monkeypatch.setattr(server, "next_second", soon)
    poll = asyncio.create_task(served.client.get(served.agents + NEXT, headers=served.site()))
    async with asyncio.timeout(5):
        while served.engine.heard_of.get("edge-1", 0) < 10:
            served.engine.hearing.clear()
            await served.engine.hearing.wait()
    poll.cancel()


async def test_a_poll_whose_agent_vanishes_closes_the_site(served: Served):
    async with aiohttp.ClientSession() as other:
        poll = asyncio.create_task(other.get(served.agents + NEXT, headers=served.site()))
        await served.engine.hearing.wait()
        poll.cancel()
    await asyncio.wait_for(served.engine.closed.wait(), 5)
    assert ("close", "edge-1") in served.engine.told


async def test_an_idle_connection_that_polled_last_closes_the_site_too(tmp_path: Path):
    async with running(tmp_path, long_poll_seconds=0.01) as served:
        async with (
            aiohttp.ClientSession() as other,
            other.get(served.agents + NEXT, headers=served.site()) as answer,
        ):
            await answer.read()
        await asyncio.wait_for(served.engine.closed.wait(), 5)


async def test_an_agent_that_polls_on_a_new_connection_is_not_closed_by_the_old_one(
    tmp_path: Path,
):
    async with running(tmp_path, long_poll_seconds=0.01) as served:
        async with aiohttp.ClientSession() as old:
            async with old.get(served.agents + NEXT, headers=served.site()) as answer:
                await answer.read()
            async with served.client.get(served.agents + NEXT, headers=served.site()) as answer:
                await answer.read()
        # The old connection is gone; another request proves that the coordinator has seen it.
        async with served.client.get(served.agents + NEXT, headers=served.site()) as answer:
            await answer.read()
        assert not served.engine.closed.is_set()


async def test_a_stopping_coordinator_says_goodbye_to_every_poll_at_once(served: Served):
    poll = asyncio.create_task(served.client.get(served.agents + NEXT, headers=served.site()))
    await served.engine.hearing.wait()
    served.services.stop()
    async with await asyncio.wait_for(poll, 1) as answer:
        found = decode(Instructions, await answer.read())
    assert isinstance(found.items[0], Bye)
    assert found.items[0].retry
    async with served.client.get(served.agents + NEXT, headers=served.site()) as answer:
        assert isinstance(decode(Instructions, await answer.read()).items[0], Bye)


async def test_events_are_handed_on_with_site_and_session(served: Served):
    events = Events(first=0, items=(Progress(job=JOB, epoch=1, clock=1, step=3, of=5),))
    assert (await post(served, "/agent/v1/events", encode(events)))[0] == 204
    assert served.engine.told == [("events", ("edge-1", SESSION, events))]


# ---------------------------------------------------------------- bulk


async def test_an_update_is_streamed_and_answered_with_its_verdict(served: Served):
    body = bytes(range(256)) * 20_000
    status, raw = await post(served, UPDATES + "&offset=7", body)
    assert status == 200
    assert decode(Receipt, raw) == Receipt(offset=len(body), verdict="counted")
    upload = served.engine.uploads[0]
    assert upload.hash.digest() == hashlib.sha256(body).digest()
    assert served.engine.told[0][1] == {
        "job": JOB,
        "site": "edge-1",
        "epoch": 1,
        "clock": 2,
        "attempt": 1,
        "offset": 7,
        "length": len(body),
    }


async def test_an_upload_just_above_the_limit_is_refused_before_a_byte_is_sent(tmp_path: Path):
    """PC-016: 413 names limit, size and setting; nothing of the body was taken by then."""
    sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        piece = bytes(1 << 16)
        for _ in range(8_672_945 // len(piece)):
            sent += len(piece)
            yield piece
        sent += 8_672_945 % len(piece)
        yield bytes(8_672_945 % len(piece))

    async with running(tmp_path, upload_bytes_max=4_194_304) as served:
        async with served.client.post(
            served.agents + UPDATES,
            data=body(),
            headers=served.site(**{"Content-Length": "8672945"}),
            expect100=True,
        ) as answer:
            error = decode(ErrorBody, await answer.read())
        assert answer.status == 413
        assert sent == 0
        for part in ("8672945", "4194304", "upload_bytes_max"):
            assert part in error.message
        assert error.details == {"limit": 4_194_304, "found": 8_672_945}
        assert not served.engine.uploads


async def test_an_upload_at_the_limit_is_taken(tmp_path: Path):
    """PC-016: the limit itself is still allowed."""
    async with running(tmp_path, upload_bytes_max=4_194_304) as served:
        async with served.client.post(
            served.agents + UPDATES, data=bytes(4_194_304), headers=served.site(), expect100=True
        ) as answer:
            assert answer.status == 200
        assert served.engine.uploads[0].bytes == 4_194_304


async def test_an_upload_without_a_length_is_refused(served: Served):
    async def body() -> AsyncIterator[bytes]:
        yield b"x"

    async with served.client.post(
        served.agents + UPDATES, data=body(), headers=served.site()
    ) as answer:
        assert answer.status == 400
        assert "Content-Length" in decode(ErrorBody, await answer.read()).message


async def test_an_upload_that_breaks_off_is_kept_for_resuming(served: Served):
    host, port = served.agents.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = "".join(f"{name}: {value}\r\n" for name, value in served.site().items())
    writer.write(
        f"POST {UPDATES} HTTP/1.1\r\nHost: x\r\n{head}Content-Length: 1000\r\n\r\n".encode()
        + bytes(400)
    )
    await served.engine.stored.wait()
    writer.close()
    await asyncio.wait_for(served.engine.broke.wait(), 5)
    assert served.engine.uploads[0].bytes == 400
    assert served.engine.uploads[0].ended == "broken"


@pytest.mark.parametrize("polls_elsewhere", [False, True])
async def test_the_rest_of_a_dead_sites_upload_does_not_keep_its_name(
    served: Served, polls_elsewhere: bool
):
    """Killed in an upload: its poll closes first, then come bytes that were still under way. They
    are no new life: a restarted agent is let in as soon as that connection has closed too.
    """
    host, port = served.agents.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = "".join(f"{name}: {value}\r\n" for name, value in served.site().items())
    writer.write(
        f"POST {UPDATES} HTTP/1.1\r\nHost: x\r\n{head}Content-Length: 1000\r\n\r\n".encode()
        + bytes(400)
    )
    await served.engine.stored.wait()
    served.engine.hearing.clear()
    async with aiohttp.ClientSession() as other:
        poll = asyncio.create_task(other.get(served.agents + NEXT, headers=served.site()))
        await served.engine.hearing.wait()
        poll.cancel()
    await asyncio.wait_for(served.engine.closed.wait(), 5)
    served.engine.closed.clear()
    served.engine.hearing.clear()
    if polls_elsewhere:
        again = asyncio.create_task(served.client.get(served.agents + NEXT, headers=served.site()))
        await served.engine.hearing.wait()
    writer.close()
    await asyncio.wait_for(served.engine.broke.wait(), 5)
    if polls_elsewhere:
        async with served.client.get(served.agents + "/agent/v1/ca") as answer:
            await answer.read()
        assert not served.engine.closed.is_set()
        again.cancel()
    else:
        await asyncio.wait_for(served.engine.closed.wait(), 5)


async def test_a_silent_upload_is_ended_and_kept_for_resuming(tmp_path: Path):
    async with running(tmp_path, body_idle_seconds=0.05) as served:
        never = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            yield bytes(400)
            await never.wait()

        async with served.client.post(
            served.agents + UPDATES,
            data=body(),
            headers=served.site(**{"Content-Length": "1000"}),
        ) as answer:
            error = decode(ErrorBody, await answer.read())
        assert answer.status == 429
        assert "fell silent" in error.message
        assert served.engine.uploads[0].ended == "broken"


async def test_every_piece_of_a_slow_upload_is_a_sign_of_life(served: Served):
    """PC-025: 16 pieces, each sent only after the one before was heard; no heartbeat is needed."""
    pieces = 16

    async def body() -> AsyncIterator[bytes]:
        for _ in range(pieces):
            served.engine.hearing.clear()
            yield bytes(1024)
            await served.engine.hearing.wait()

    async with served.client.post(
        served.agents + UPDATES,
        data=body(),
        headers=served.site(**{"Content-Length": str(pieces * 1024)}),
    ) as answer:
        assert answer.status == 200
    assert served.engine.heard_of["edge-1"] >= pieces


async def test_posts_on_connections_that_close_under_them_are_counted_once(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    """PC-072: every tenth time the server closes the idle connection just as it is reused; 500
    numbered posts, retried, arrive as 500 events, each of which the engine can tell apart.
    """
    open_ones: list[Connection] = []
    as_before = Connection.connection_made

    def connection_made(self: Connection, transport: asyncio.BaseTransport) -> None:
        open_ones.append(self)
        as_before(self, transport)

    monkeypatch.setattr(Connection, "connection_made", connection_made)
    closed_under_a_post = 0
    for number in range(500):
        event = Events(
            first=number, items=(Progress(job=JOB, epoch=1, clock=1, step=number, of=500),)
        )
        if number % 10 == 9:
            open_ones[-1].transport.close()  # the client does not know it yet
        for _ in range(3):
            try:
                status, _ = await post(served, "/agent/v1/events", encode(event))
            except aiohttp.ClientConnectionError:
                closed_under_a_post += 1
                continue
            assert status == 204
            break
        else:
            pytest.fail("three connections in a row were closed")
    numbers = [events.first for what, (_, _, events) in served.engine.told if what == "events"]
    assert closed_under_a_post > 0
    assert sorted(set(numbers)) == list(range(500))
    assert numbers == sorted(numbers)


async def test_a_version_is_sent_from_any_offset(served: Served, tmp_path: Path):
    body = bytes(range(256)) * 12_000
    (tmp_path / "3.body").write_bytes(body)
    for offset in (0, 1, 1 << 20, len(body) - 1, len(body)):
        async with served.client.get(
            served.agents + f"/agent/v1/jobs/{JOB}/versions/3?offset={offset}",
            headers=served.site(),
        ) as answer:
            assert answer.status == 200
            assert await answer.read() == body[offset:]
    async with served.client.get(
        served.agents + f"/agent/v1/jobs/{JOB}/versions/3?offset={len(body) + 1}",
        headers=served.site(),
    ) as answer:
        assert answer.status == 400


async def test_a_version_that_is_gone_is_not_found(served: Served):
    for path in (f"/agent/v1/jobs/{JOB}/versions/9", "/agent/v1/jobs/j-2/versions/9"):
        async with served.client.get(served.agents + path, headers=served.site()) as answer:
            assert answer.status == 404


async def test_downloads_wait_their_turn_and_say_so_when_it_does_not_come(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(agents_api, "_SLOT_SECONDS", 0.02)
    served.engine.slots = asyncio.Semaphore(0)
    (tmp_path / "3.body").write_bytes(b"x")
    address = served.agents + f"/agent/v1/jobs/{JOB}/versions/3"
    async with served.client.get(address, headers=served.site()) as answer:
        assert answer.status == 429
        assert "downloads_max" in decode(ErrorBody, await answer.read()).message
    served.engine.slots = asyncio.Semaphore(1)
    async with served.client.get(address, headers=served.site()) as answer:
        assert answer.status == 200


async def test_a_job_meant_for_other_sites_gives_and_takes_nothing(served: Served, tmp_path: Path):
    (tmp_path / "3.body").write_bytes(b"x")
    sites = msgspec.structs.replace(served.engine.spec.sites, names=("edge-2",))
    served.engine.spec = msgspec.structs.replace(served.engine.spec, sites=sites)
    for method, path in (("GET", f"/agent/v1/jobs/{JOB}/versions/3"), ("POST", UPDATES)):
        async with served.client.request(
            method, served.agents + path, headers=served.site()
        ) as answer:
            assert answer.status == 403
    assert not served.engine.uploads


async def test_a_model_is_given_only_to_sites_that_take_part(served: Served, tmp_path: Path):
    (tmp_path / "3.body").write_bytes(b"x")
    served.engine.members.clear()
    address = served.agents + f"/agent/v1/jobs/{JOB}/versions/3"
    async with served.client.get(address, headers=served.site()) as answer:
        assert answer.status == 403
        assert "takes no part" in decode(ErrorBody, await answer.read()).message
    served.engine.members.add("edge-1")
    async with served.client.get(address, headers=served.site()) as answer:
        assert answer.status == 200


async def test_bytes_are_charged_to_site_and_job_as_the_socket_counts_them(served: Served):
    body = bytes(1_000_000)
    await post(served, UPDATES, body)
    await post(served, "/agent/v1/events", encode(Events(first=0, items=())))
    async with served.client.get(served.agents + NEXT + "x", headers=served.site()) as answer:
        await answer.read()
    of_job = served.engine.ledger.link("edge-1", JOB)
    besides = served.engine.ledger.link("edge-1", "")
    assert len(body) < of_job.up < len(body) + 1_000
    assert 0 < of_job.down < 1_000
    assert 0 < besides.up < 2_000


async def test_unknown_jobs_get_no_account(served: Served):
    status, _ = await post(served, UPDATES.replace(JOB, "j-none"), b"x")
    assert status == 404
    assert served.engine.ledger.link("edge-1", "j-none").up == 0


@pytest.mark.parametrize("query", ["epoch=-1", "epoch=x", "epoch=1e3", "epoch=" + "9" * 30, ""])
async def test_identities_that_are_no_numbers_are_refused(served: Served, query: str):
    path = f"/agent/v1/jobs/{JOB}/updates?clock=2&attempt=1&{query}"
    status, raw = await post(served, path, b"x")
    assert status == 400
    assert "epoch must be a whole number" in decode(ErrorBody, raw).message


async def test_without_tls_there_is_no_ca_to_show(served: Served):
    async with served.client.get(served.agents + "/agent/v1/ca") as answer:
        assert answer.status == 404
