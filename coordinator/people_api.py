"""What people ask for, as `protocol.views` shows it: jobs, sites, tokens, events, health."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, Final, Literal

import msgspec
from aiohttp import web

from coordinator import metrics, transfer
from coordinator.http import Call, answer, decode
from privacy.tokens import JoinToken, format_join_token
from protocol import jobfile
from protocol.errors import InvalidFileError, NotFoundError
from protocol.guarantees import guarantees
from protocol.jobstates import JobStimulus
from protocol.messages import encode
from protocol.views import (
    CommandRequest,
    Health,
    Info,
    InitStored,
    JobDetail,
    JobList,
    JobRequest,
    JournalPage,
    SiteList,
    SiteView,
    TokenCreated,
    TokenList,
    TokenRequest,
    UpdateList,
    Validation,
    VersionList,
)

log = logging.getLogger(__name__)

_HEADER_CHARS_MAX: Final = 6_000  # a header line has to pass every client and proxy


# ---------------------------------------------------------------- jobs


async def jobs(call: Call) -> JobList:
    """All jobs, newest first."""
    return await call.engine.jobs()


async def job(call: Call) -> JobDetail:
    """One job with its sites and its specification."""
    return await call.engine.job(call.path("job"))


async def submit(call: Call) -> web.Response:
    """A new job; refused with every problem of its specification at once."""
    request = await call.json(JobRequest)
    problems, warnings = jobfile.validate(request.spec)
    if problems:
        raise InvalidFileError("this job cannot run as it is.", problems=problems)
    made = await call.engine.submit(request, call.caller.name)
    for warning in warnings:
        log.warning("%s", warning, extra={"job": made})
    return answer(await call.engine.job(made), status=201)


async def validate(call: Call) -> Validation:
    """What is wrong with a job, without submitting it."""
    request = await call.json(JobRequest)
    problems, warnings = jobfile.validate(request.spec)
    promised = () if problems else guarantees(request.spec)
    return Validation(problems=problems, warnings=warnings, guarantees=promised)


def command(what: JobStimulus) -> Callable[[Call], Awaitable[JobDetail]]:
    """Pause, resume, drain or stop a job; answers with the job as it is then."""

    async def run(call: Call) -> JobDetail:
        request = await _reason(call)
        name = call.path("job")
        await call.engine.command(name, what, call.caller.name, request.reason)
        return await call.engine.job(name)

    return run


async def delete(call: Call) -> None:
    """Remove an ended job with all its files."""
    await call.engine.delete(call.path("job"), call.caller.name)


async def versions(call: Call) -> VersionList:
    """Versions after `after`."""
    return await call.engine.versions(call.path("job"), call.whole("after", -1))


async def updates(call: Call) -> UpdateList:
    """Settled updates after the first `after`."""
    return await call.engine.updates(call.path("job"), call.whole("after", 0))


async def journal(call: Call) -> JournalPage:
    """Journal rows after sequence number `after`."""
    return await call.engine.journal(call.path("job"), call.whole("after", 0))


async def store_init(call: Call) -> web.Response:
    """Store a safetensors file; its id names it in a JobRequest."""
    with call.services.uploads:
        sink = await call.engine.begin_init_file(transfer.length_of(call))
        stored: InitStored = await transfer.receive(call, sink)
    return answer(stored, status=201)


async def export(call: Call) -> web.StreamResponse:
    """A version as a safetensors file; `X-Skerry-Missing` lists tensors that never left the sites.

    A list too long for a header is cut; `X-Skerry-Missing-Count` is always whole, and the layout
    in the journal row of version 0 names every tensor with its role.
    """
    wanted = call.request.query.get("version")
    version = None if wanted in (None, "") else call.whole("version")
    path, missing = await call.engine.export(call.path("job"), version)
    try:
        return await transfer.send_file(call, path, headers=_missing_headers(missing))
    finally:
        await asyncio.to_thread(path.unlink, missing_ok=True)


def _missing_headers(missing: tuple[str, ...]) -> dict[str, str]:
    named = list(missing)
    while len(text := json.dumps(named)) > _HEADER_CHARS_MAX:
        named = named[: len(named) // 2]
    return {"X-Skerry-Missing": text, "X-Skerry-Missing-Count": str(len(missing))}


async def _reason(call: Call) -> CommandRequest:
    # Commands may come without a body: a reason is welcome, not needed.
    raw = await call.body()
    return decode(CommandRequest, raw) if raw else CommandRequest()


# ---------------------------------------------------------------- events


async def job_events(call: Call) -> web.StreamResponse:
    """Journal rows of one job as server-sent events."""
    name = call.path("job")
    await call.engine.job(name)
    return await _stream(call, name)


async def all_events(call: Call) -> web.StreamResponse:
    """Journal rows of all jobs as server-sent events."""
    return await _stream(call, "")


async def _stream(call: Call, name: str) -> web.StreamResponse:
    with call.services.streams:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        )
        rows = call.engine.subscribe(_after(call), name)
        await response.prepare(call.request)
        try:
            await _write(call, response, b"retry: 1000\n\n")
            while (events := await _next_events(call, rows)) is not None:
                for event in events:
                    await _write(call, response, event)
        except TimeoutError:
            log.info("an event stream whose reader stands still was closed.")
            call.connection.abort()
        finally:
            await _close(rows)
        return response


def _after(call: Call) -> int:
    # A page that lost its stream says where it was; without either, only new rows are sent.
    last = call.request.headers.get("Last-Event-ID", "")
    if last.isascii() and last.isdigit() and len(last) < 17:
        return int(last)
    return call.whole("after", call.engine.last_seq())


async def _next_events(call: Call, rows: AsyncIterator[JournalPage | None]) -> list[bytes] | None:
    # None: the reader is gone, the coordinator stops, or there will be no more rows.
    if call.services.stopping:
        return None
    following = asyncio.ensure_future(_following(rows))
    watched: set[asyncio.Future[Any]] = {following, call.connection.over}
    try:
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    if call.connection.over.done() or following.cancelled():
        return None
    more, page = following.result()
    return events_of(page, call.settings.stream_event_bytes_max) if more else None


async def _following(rows: AsyncIterator[JournalPage | None]) -> tuple[bool, JournalPage | None]:
    try:
        return True, await anext(rows)
    except StopAsyncIteration:
        return False, None


async def _close(rows: AsyncIterator[JournalPage | None]) -> None:
    if isinstance(rows, AsyncGenerator):
        await rows.aclose()


async def _write(call: Call, response: web.StreamResponse, raw: bytes) -> None:
    async with asyncio.timeout(call.settings.body_idle_seconds):
        await response.write(raw)


def events_of(page: JournalPage | None, bytes_max: int) -> list[bytes]:
    """Server-sent events for a page; none is larger than `bytes_max`, whatever a row holds.

    A row too large for the stream is announced by an event `large` with its sequence number and
    size: the reader fetches it from the journal.
    """
    if page is None:
        return [b": still here\n\n"]
    if not page.entries:
        return []
    raw = encode(page)
    last = page.entries[-1].seq
    if len(raw) <= bytes_max:
        return [b"id: %d\nevent: journal\ndata: %s\n\n" % (last, raw)]
    if len(page.entries) > 1:
        return [
            event
            for entry in page.entries
            for event in events_of(JournalPage(entries=(entry,)), bytes_max)
        ]
    log.warning(
        "journal row %d has %d bytes, above stream_event_bytes_max (%d): announced only.",
        last,
        len(raw),
        bytes_max,
    )
    notice = msgspec.json.encode({"seq": last, "bytes": len(raw)})
    return [b"id: %d\nevent: large\ndata: %s\n\n" % (last, notice)]


# ---------------------------------------------------------------- sites and tokens


async def sites(call: Call) -> SiteList:
    """All sites."""
    return await call.engine.sites()


def site_command(what: Literal["drain", "revoke"]) -> Callable[[Call], Awaitable[SiteView]]:
    """Drain a site, or revoke it: its part in all jobs ends; a revoked one never comes back."""

    async def run(call: Call) -> SiteView:
        request = await _reason(call)
        name = call.path("site")
        await call.engine.site_command(name, what, call.caller.name, request.reason)
        if what == "revoke":
            call.services.drop_site(name)
        for view in (await call.engine.sites()).sites:
            if view.name == name:
                return view
        raise NotFoundError(f"there is no site {name!r}.")

    return run


async def tokens(call: Call) -> TokenList:
    """All join tokens, without their secrets."""
    return await call.engine.tokens()


async def create_token(call: Call) -> web.Response:
    """A join token; the only time that it is shown."""
    request = await call.json(TokenRequest)
    made = await call.engine.create_token(request, by=call.caller.name)
    token_id, _, secret = made.token.partition(".")
    services = call.services
    line = format_join_token(
        JoinToken(id=token_id, secret=secret, ca=services.ca_fingerprint, url=services.join_url)
    )
    return answer(TokenCreated(token=line, view=made.view), status=201)


async def revoke_token(call: Call) -> None:
    """A token that was not used yet is not good any more."""
    await call.engine.revoke_token(call.path("token"), by=call.caller.name)


# ---------------------------------------------------------------- the coordinator itself


async def info(call: Call) -> Info:
    """Name, versions, addresses, memory."""
    return call.engine.info()


async def healthz(call: Call) -> web.Response:
    """Whether the process works: 503 when it does not, with the reasons."""
    health = call.engine.health()
    return answer(health, status=503 if health.status == "failing" else 200)


async def readyz(call: Call) -> web.Response:
    """Whether it can take work now: 503 when not (disk full, no fold process), with the reasons.

    What will go wrong soon stands among the reasons, too.
    """
    health = call.engine.health()
    health = msgspec.structs.replace(health, reasons=(*health.reasons, *call.services.notes()))
    if call.services.stopping:
        health = Health(status="failing", reasons=("the coordinator is stopping.",))
    return answer(health, status=200 if health.status == "ok" else 503)


async def prometheus(call: Call) -> web.Response:
    """Figures for Prometheus."""
    return web.Response(
        body=await metrics.collect(call.services), headers={"Content-Type": metrics.CONTENT_TYPE}
    )


async def openapi(call: Call) -> web.Response:
    """This API as an OpenAPI document."""
    return web.Response(body=call.services.openapi, content_type="application/json")
