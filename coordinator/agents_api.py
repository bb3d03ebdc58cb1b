"""What sites ask for, as `protocol.messages` lists it. A site acts for itself only.

The name of the site never comes from a request: it is the holder of the credential, so there is no
path to another site's updates. Models are given only to sites that take part in the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
from aiohttp import web

from coordinator import transfer
from coordinator.beat import on_the_second
from coordinator.connection import Connection, Owner
from coordinator.http import Call, Services
from privacy.keys import check_join_proof
from protocol.errors import BusyError, NotFoundError, RefusedError, UnauthenticatedError
from protocol.messages import (
    Bye,
    Events,
    Hello,
    Instructions,
    Join,
    Joined,
    Leave,
    Receipt,
    Welcome,
)
from protocol.names import clean_name
from protocol.version import check_protocol

log = logging.getLogger(__name__)

_SLOT_SECONDS: Final = 30.0
_MEMBERS_MAX: Final = 100_000
_STOPPING: Final = "the coordinator is stopping."


async def ca(call: Call) -> web.Response:
    """The CA's certificate; whoever holds a join token compares it with the fingerprint there."""
    if not call.services.ca_pem:
        raise NotFoundError("this coordinator has no CA of its own to show.")
    return web.Response(body=call.services.ca_pem, content_type="application/x-pem-file")


async def join(call: Call) -> Joined:
    """Enrol a site: its one-time token is used up, its key registered."""
    address = call.request.remote or ""
    call.services.brake.check(address)
    request = await call.json(Join)
    check_protocol(request.protocol, who="the agent")
    request = msgspec.structs.replace(request, name=clean_name(request.name, "site name"))
    try:
        check_join_proof(request.public_key, request.proof, request.token_id, request.name)
        return await call.engine.redeem(request)
    except UnauthenticatedError:
        call.services.brake.failed(address)
        raise


async def hello(call: Call) -> Welcome:
    """Open a session."""
    request = await call.json(Hello)
    check_protocol(request.protocol, who="the agent")
    return await call.engine.open_session(call.caller.name, request)


async def poll(call: Call) -> Instructions:
    """Wait for instructions; ends early when the peer is gone or the coordinator stops."""
    site, services, connection = call.caller.name, call.services, call.connection
    cursor = call.whole("cursor", 0)
    if services.stopping:
        return _bye(cursor)
    services.polls[site] = connection
    connection.polled.add(site)
    wait = asyncio.ensure_future(
        call.engine.mailbox(site).wait(cursor, on_the_second(call.settings.long_poll_seconds))
    )
    watched: set[asyncio.Future[Any]] = {wait, connection.over}
    # While it is open the server's tick renews the lease: one timer, not one for each poll.
    services.open_polls[wait] = site
    try:
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        return wait.result() if wait.done() else _bye(cursor)
    finally:
        del services.open_polls[wait]
        wait.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await wait


def _bye(cursor: int) -> Instructions:
    return Instructions(cursor=cursor, items=(Bye(reason=_STOPPING, retry=True),))


async def poller_lost(services: Services, connection: Connection) -> None:
    """A connection closed: the site that polled on it last is away, unless it polls elsewhere."""
    for site in [one for one in connection.polled if services.polls.get(one) is connection]:
        del services.polls[site]
        if not services.stopping:
            await services.engine.close(site)


async def events(call: Call) -> None:
    """Take what happened at the site."""
    request = await call.json(Events)
    session = call.request.headers.get("X-Skerry-Session", "")
    await call.engine.site_events(call.caller.name, session, request)


@contextlib.asynccontextmanager
async def _moving(call: Call) -> AsyncIterator[None]:
    """A transfer. What was under way when its site died must not make up for the lost poll."""
    site, services = call.caller.name, call.services
    try:
        yield
    finally:
        lost = call.request.transport is None
        if lost and site not in services.polls and not services.stopping:
            await services.engine.close(site)


async def upload(call: Call) -> Receipt:
    """Take an update, or the rest of one, and settle it when it is whole."""
    job = await _enter(call)
    async with _moving(call):
        with call.services.uploads:
            sink = await call.engine.begin_upload(
                job=job,
                site=call.caller.name,
                epoch=call.whole("epoch"),
                clock=call.whole("clock"),
                attempt=call.whole("attempt"),
                offset=call.whole("offset", 0),
                length=transfer.length_of(call),
            )
            return await transfer.receive(call, sink)


async def upload_state(call: Call) -> Receipt:
    """Where an update stands: its verdict, or how much of it is stored."""
    job = await _enter(call)
    return await call.engine.upload_state(
        job=job,
        site=call.caller.name,
        epoch=call.whole("epoch"),
        clock=call.whole("clock"),
        attempt=call.whole("attempt"),
    )


async def init(call: Call) -> Receipt:
    """Take version 0 from the site that was asked for it."""
    job = await _enter(call)
    async with _moving(call):
        with call.services.uploads:
            sink = await call.engine.begin_init(
                job=job,
                site=call.caller.name,
                offset=call.whole("offset", 0),
                length=transfer.length_of(call),
            )
            return await transfer.receive(call, sink)


async def version(call: Call) -> web.StreamResponse:
    """Give a version's snapshot body, from an offset on; waits for a download slot."""
    job, site = await _enter(call, active=True), call.caller.name
    path = call.engine.version_file(job, call.whole("version"))
    async with _moving(call), contextlib.AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(_SLOT_SECONDS):
                await stack.enter_async_context(call.engine.download_slot())
        except TimeoutError:
            raise BusyError(
                f"no download slot came free within {_SLOT_SECONDS:g} s (downloads_max).",
                "It is tried again by itself; raise downloads_max if this is seen often.",
            ) from None
        return await transfer.send_file(
            call,
            path,
            offset=call.whole("offset", 0),
            on_piece=lambda: call.engine.heard(site),
        )


async def leave(call: Call) -> None:
    """The agent stops on purpose."""
    request = await call.json(Leave)
    call.services.polls.pop(call.caller.name, None)
    await call.engine.leave(call.caller.name, request.reason or "the agent stopped.")


async def _enter(call: Call, *, active: bool = False) -> str:
    # The job of the path, once it is known to exist and to be meant for this site: only then do
    # bytes go to its account, so that no site can fill the ledger with jobs that are none.
    job, site, seen = call.path("job"), call.caller.name, call.services.members
    if (job, site) not in seen:
        detail = await call.engine.job(job)
        names = detail.spec.sites.names
        if names and site not in names and not call.caller.evaluator:
            raise RefusedError(f"job {job} is not meant for site {site!r}.")
        if any(view.site == site and view.active for view in detail.job.sites):
            if len(seen) >= _MEMBERS_MAX:
                seen.clear()
            seen.add((job, site))
        elif active:
            raise RefusedError(f"site {site!r} takes no part in job {job}.")
    call.connection.charge(Owner(site, job))
    return job
