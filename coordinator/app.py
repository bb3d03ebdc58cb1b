"""Applications made from the table of routes: form, protocol, credential, session, handler."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from aiohttp import web

from coordinator import http, openapi
from coordinator.auth import Caller, authenticate
from coordinator.connection import Connection, Owner
from coordinator.http import Call, Services
from coordinator.routes import STREAM, TABLE, ListenerName, Route
from protocol.errors import RefusedError, SkerryError, VersionError
from protocol.version import check_protocol

log = logging.getLogger(__name__)

Mount = Callable[[web.Application], None]
_Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]

# The page is served from the same listener; it loads nothing from elsewhere and cannot be framed.
SECURITY_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_API_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}


def make_app(
    listener: ListenerName,
    services: Services,
    *,
    mount: Mount | None = None,
    table: Sequence[Route] = TABLE,
) -> web.Application:
    """The application of one listener; `mount` adds pages to the people's one."""
    app = web.Application(middlewares=[_guard])
    for route in table:
        if route.listener == listener:
            app.router.add_route(
                route.method,
                route.path,
                _handler(route, services),
                expect_handler=_expect_later if route.cap == STREAM else _expect_now,
            )
    if listener == "people":
        services.openapi = openapi.document(table)
        if mount is not None:
            mount(app)
    app.on_response_prepare.append(_headers)
    return app


@web.middleware
async def _guard(request: web.Request, handler: _Answer) -> web.StreamResponse:
    # Whatever goes wrong below ends as JSON with a reason; nothing else leaves this function.
    connection = request.protocol
    if not isinstance(connection, Connection):
        raise TypeError("this application is served by coordinator.connection only")
    connection.request_began()
    try:
        http.check_form(request)
        return await handler(request)
    except Exception as error:
        if isinstance(error, ConnectionError) and _is_gone(connection):
            return web.Response()  # which nobody will read
        answer = _explain(error, request)
    if connection.answering:
        # Half an answer is out; only its breaking off tells the peer that it is not whole.
        connection.abort()
    return answer


def _explain(error: Exception, request: web.Request) -> web.StreamResponse:
    if isinstance(error, SkerryError):
        if isinstance(error, VersionError):
            log.warning("%s refused: %s", request.remote, error.message)
        return http.refusal(error)
    if isinstance(error, web.HTTPException):
        return http.from_http(error, request)
    return http.unexpected(error, request)


def _is_gone(connection: Connection) -> bool:
    transport = connection.transport
    return transport is None or transport.is_closing()


def _handler(route: Route, services: Services) -> _Answer:
    async def handle(request: web.Request) -> web.StreamResponse:
        if route.listener == "agents" and route.path != "/agent/v1/ca":
            check_protocol(_protocol(request), who="the agent")
        caller = authenticate(
            route.role,
            request.headers.get("Authorization"),
            request.remote or "",
            services.engine,
            services.brake,
        )
        call = Call(request, services, caller, route.cap)
        if caller.role == "site":
            _greet(route, call, caller)
        result = await route.handler(call)
        return result if isinstance(result, web.StreamResponse) else http.answer(result)

    return handle


def _greet(route: Route, call: Call, caller: Caller) -> None:
    # Routes of a job charge their bytes themselves, once they know the job.
    if "{job}" not in route.path:
        call.connection.charge(Owner(caller.name, ""))
    if route.session:
        session = call.request.headers.get("X-Skerry-Session", "")
        if not session:
            raise RefusedError(
                "this needs an open session.", "Say hello first and send X-Skerry-Session."
            )
        call.engine.check_session(caller.name, session)
        call.connection.speaks_for = caller.name
        call.engine.heard(caller.name)


def _protocol(request: web.Request) -> int | None:
    text = request.headers.get("X-Skerry-Protocol", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


async def _headers(request: web.Request, response: web.StreamResponse) -> None:
    if isinstance(request.protocol, Connection):
        request.protocol.answering = True
    for name, value in SECURITY_HEADERS.items():
        response.headers.setdefault(name, value)
    if request.path.startswith(("/api/", "/agent/", "/metrics")):
        for name, value in _API_HEADERS.items():
            response.headers.setdefault(name, value)
    response.headers["Server"] = "skerry"


async def _expect_now(request: web.Request) -> None:
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0


async def _expect_later(request: web.Request) -> None:
    """Nothing yet: the handler says when the peer may send (see `transfer.receive`)."""
    del request
