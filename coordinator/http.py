"""What all handlers share: the services of the process, one call, answers and refusals in JSON."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
from aiohttp import web

from coordinator.auth import Brake, Caller
from coordinator.connection import Connection, Listener
from coordinator.engine import Engine
from coordinator.settings import CoordinatorSettings
from protocol import limits, messages
from protocol.errors import (
    BusyError,
    ErrorBody,
    LimitError,
    MalformedError,
    NotFoundError,
    SkerryError,
    UnauthenticatedError,
    UsageError,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

_BYE_SECONDS: Final = 1.0
# Small enough to decode within a few milliseconds; larger ones are decoded off the event loop.
_DECODE_HERE_BYTES: Final = 256 << 10
_TEXT: Final = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NOT_BRACKETS: Final = bytes(code for code in range(256) if code not in b"[]{}")
_ONE_KIND: Final = bytes.maketrans(b"{}", b"[]")
_NO_BODY: Final = frozenset({"GET", "HEAD", "DELETE"})


class Gauge:
    """How many of something are open, with a cap that names its setting."""

    def __init__(self, most: int, what: str, setting: str) -> None:
        self.most = most
        self.now = 0
        self._what = what
        self._setting = setting

    def __enter__(self) -> None:
        if self.now >= self.most:
            raise BusyError(
                f"{self.now} {self._what} are open; {self._setting} allows {self.most}.",
                f"Try again later, or raise {self._setting} at the coordinator.",
                details={"limit": self.most, "found": self.now},
            )
        self.now += 1

    def __exit__(self, *_: object) -> None:
        self.now -= 1


class Lag:
    """How late the event loop comes to what is due, in seconds."""

    def __init__(self) -> None:
        self.last = 0.0
        self.most = 0.0

    def note(self, seconds: float) -> None:
        """A timer came this late."""
        self.last = max(seconds, 0.0)
        self.most = max(self.most, self.last)


class Services:
    """What the handlers of one coordinator work with."""

    def __init__(
        self,
        engine: Engine,
        settings: CoordinatorSettings,
        *,
        clock: Callable[[], float],
        ca_pem: bytes = b"",
        join_url: str = "",
        ca_fingerprint: str = "",
        notes: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.clock = clock
        self.ca_pem = ca_pem
        self.join_url = join_url
        self.ca_fingerprint = ca_fingerprint
        self.notes = notes  # what will go wrong soon, for people
        self.brake = Brake(settings.login_failures_max, clock)
        self.uploads = Gauge(settings.uploads_max, "uploads", "uploads_max")
        self.streams = Gauge(settings.streams_max, "event streams", "streams_max")
        self.stopping = False
        self.listeners: list[Listener] = []
        self.polls: dict[str, Connection] = {}  # site -> the connection of its latest poll
        self.open_polls: dict[
            asyncio.Future[messages.Instructions], str
        ] = {}  # what is waited for -> site
        self.members: set[tuple[str, str]] = set()  # (job, site) seen to belong together
        self.openapi = b""  # made from the table of routes when the application is
        self.lag = Lag()

    def drop_site(self, site: str) -> None:
        """Cut a revoked site's connections, after a moment in which it may fetch its goodbye."""
        loop = asyncio.get_running_loop()
        for listener in self.listeners:
            loop.call_later(_BYE_SECONDS, listener.drop, site)

    def stop(self) -> None:
        """Let every long poll and event stream end now."""
        self.stopping = True
        for listener in self.listeners:
            listener.end_waits()


class Call:
    """One request that has passed authorisation."""

    def __init__(self, request: web.Request, services: Services, caller: Caller, cap: int) -> None:
        self.request = request
        self.services = services
        self.engine = services.engine
        self.settings = services.settings
        self.caller = caller
        self._cap = cap

    @property
    def connection(self) -> Connection:
        """The connection that the request came in on."""
        protocol = self.request.protocol
        if not isinstance(protocol, Connection):
            raise TypeError("this application is served by coordinator.connection only")
        return protocol

    def path(self, name: str) -> str:
        """A part of the path, decoded."""
        return self.request.match_info[name]

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number of the query, or of the path.

        Raises:
            UsageError: missing without a default, or not a number from 0 to 2^53.
        """
        text = self.request.match_info.get(name, self.request.query.get(name))
        if text is None and default is not None:
            return default
        if text is None or not (text.isascii() and text.isdigit()) or int(text[:17]) > 2**53:
            found = "nothing" if text is None else repr(text[:40])
            raise UsageError(f"{name} must be a whole number of 0 or more; found {found}.")
        return int(text)

    async def json(self, kind: type[T]) -> T:
        """The body as a message.

        Raises:
            LimitError: a body above this route's cap, or nested too deeply.
            MalformedError: not what `kind` asks for.
        """
        raw = await self.body()
        if len(raw) <= _DECODE_HERE_BYTES:
            return decode(kind, raw)
        return await asyncio.to_thread(decode, kind, raw)

    async def body(self) -> bytes:
        """The whole body, at most this route's cap."""
        length = self.request.content_length
        self._within_cap(length or 0)
        parts: list[bytes] = []
        size = 0
        while piece := await self.piece():
            size += len(piece)
            self._within_cap(size)
            parts.append(piece)
        return b"".join(parts)

    async def piece(self) -> bytes:
        """What has come in of the body; empty at its end.

        Raises:
            BusyError: silence for longer than body_idle_seconds.
        """
        try:
            async with asyncio.timeout(self.settings.body_idle_seconds):
                return await self.request.content.readany()
        except TimeoutError:
            raise BusyError(
                f"the body fell silent for {self.settings.body_idle_seconds:g} s.",
                "Send it again, from the last stored offset where there is one.",
            ) from None

    def _within_cap(self, size: int) -> None:
        if size > self._cap:
            raise LimitError(
                f"a body of {size} bytes is above the limit of {self._cap} bytes for "
                f"{self.request.method} {self.request.path}.",
                details={"limit": self._cap, "found": size},
            )


def decode(kind: type[T], raw: bytes) -> T:
    """A message from JSON that is not nested too deeply."""
    if raw.count(b"[") + raw.count(b"{") > limits.JSON_DEPTH_MAX:
        _check_depth(raw)
    return messages.decode(kind, raw)


def _check_depth(raw: bytes) -> None:
    # Taking away innermost pairs, JSON_DEPTH_MAX times, at C speed: what is left is deeper, or is
    # no JSON at all.
    brackets = _TEXT.sub(b"", raw).translate(_ONE_KIND, _NOT_BRACKETS)
    for _ in range(limits.JSON_DEPTH_MAX):
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise MalformedError(
            f"this JSON is broken, or nested deeper than {limits.JSON_DEPTH_MAX} levels.",
            details={"limit": limits.JSON_DEPTH_MAX},
        )


def answer(value: msgspec.Struct | None, status: int = 200) -> web.Response:
    """A value as JSON; nothing is 204. Numbers that JSON lacks become null."""
    if value is None:
        return web.Response(status=204)
    return web.Response(status=status, body=messages.encode(value), content_type="application/json")


def refusal(error: SkerryError) -> web.Response:
    """An error as JSON, with its status."""
    response = web.Response(
        status=error.http_status,
        body=messages.encode(error.body()),
        content_type="application/json",
    )
    if isinstance(error, UnauthenticatedError):
        response.headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, BusyError):
        wait = error.details.get("retry_after_seconds")
        response.headers["Retry-After"] = str(max(1, round(wait)) if wait else 1)  # type: ignore[arg-type]
    return response


def unexpected(error: Exception, request: web.Request) -> web.Response:
    """An accident: the caller gets a number, the log gets the rest."""
    number = secrets.token_hex(4)
    log.error(
        "%s %s failed unexpectedly (%s).", request.method, request.path, number, exc_info=error
    )
    body = ErrorBody(
        error="SkerryError",
        message=f"the coordinator failed at this request; its log says more under {number}.",
        hint="This is a fault of the coordinator, not of the request.",
        details={"id": number},
    )
    return web.Response(status=500, body=messages.encode(body), content_type="application/json")


def from_http(error: web.HTTPException, request: web.Request) -> web.Response:
    """The HTTP layer's own refusals, in the form of all others."""
    if error.status == 404:
        return refusal(
            NotFoundError(
                f"there is no {request.path[:200]} here.",
                "Sites and people have listeners of their own: is this the right port?",
            )
        )
    if error.status == 405 and isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        body = UsageError(f"{request.path[:200]} takes {allowed}, not {error.method[:20]}.").body()
    else:
        body = UsageError(f"{error.status}: {error.reason}").body()
    response = web.Response(
        status=error.status, body=messages.encode(body), content_type="application/json"
    )
    if isinstance(error, web.HTTPMethodNotAllowed):
        response.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
    return response


def check_form(request: web.Request) -> None:
    """Refuse bodies in a form that is never taken, before anything is read.

    Raises:
        UsageError: a compressed body, or a body where none belongs.
    """
    coding = request.headers.get("Content-Encoding", "identity").lower()
    if coding != "identity":
        raise UsageError(f"bodies are taken as they are, not compressed with {coding[:40]!r}.")
    if request.method in _NO_BODY and request.can_read_body:
        raise UsageError(f"{request.method} takes no body.")
