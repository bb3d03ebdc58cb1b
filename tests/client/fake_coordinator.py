"""A coordinator that does what a test tells it to: real HTTP, no decisions of its own."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import Self

from aiohttp import web

from protocol import messages
from protocol.bodies import SnapshotMeta, decode_meta_json
from protocol.errors import ConflictError, NotFoundError, SkerryError
from protocol.frames import HEADER_BYTES, parse_header
from protocol.jobspec import JobSpec, Period, Stop, TaskRef
from protocol.messages import (
    Event,
    Hello,
    Instruction,
    Instructions,
    Join,
    Joined,
    Receipt,
    VersionRef,
    Welcome,
)
from protocol.version import PROTOCOL

JOB = "j-1"
Key = tuple[str, int, int, int]


def stub_spec(**options: str | int) -> JobSpec:
    return JobSpec(
        name="a job",
        task=TaskRef(name="stub", options=dict(options)),
        period=Period(steps=1),
        stop=Stop(versions=3),
    )


class FakeCoordinator:
    """Everything that came is kept for the test to look at."""

    def __init__(self) -> None:
        self.hellos: list[Hello] = []
        self.joins: list[Join] = []
        self.events: list[Event] = []
        self.left: list[str] = []
        self.uploads: dict[Key, bytearray] = {}
        self.posts: list[tuple[Key, int]] = []  # update, offset of every POST
        self.asked: list[Key] = []
        self.verdicts: dict[Key, Receipt] = {}
        self.init = bytearray()
        self.init_conflicts = 0  # so many uploads of version 0 meet a conflict that passes
        self.versions: dict[int, bytes] = {}
        self.version_requests: list[int] = []  # offset of every download
        self.polls = 0
        # what to answer
        self.on_hello: Callable[[Hello], SkerryError | None] = lambda _: None
        self.on_poll: Callable[[], SkerryError | None] = lambda: None
        self.on_complete: Callable[[Key], Receipt] = lambda key: Receipt(
            offset=len(self.uploads[key]), verdict="queued", reason="in good order"
        )
        self.on_upload: Callable[[Key], SkerryError | None] = lambda _: None
        self.ca_pem = b""
        self.protocol = PROTOCOL
        self.lease_seconds = 15.0
        self.long_poll_seconds = 25.0
        self.port = 0
        self._mail: list[Instruction] = []
        self._acked = 0
        self._sessions = 0
        self._session = ""
        self._change = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self._tls: ssl.SSLContext | None = None
        self._stopping = asyncio.Event()

    # ------------------------------------------------------------ life

    async def start(self, port: int = 0, tls: ssl.SSLContext | None = None) -> Self:
        app = web.Application(client_max_size=1 << 40)
        app.add_routes(
            [
                web.post("/agent/v1/hello", self._hello),
                web.get("/agent/v1/next", self._next),
                web.post("/agent/v1/events", self._events),
                web.post("/agent/v1/leave", self._leave),
                web.post("/agent/v1/join", self._join),
                web.get("/agent/v1/ca", self._ca),
                web.post("/agent/v1/jobs/{job}/updates", self._upload),
                web.get("/agent/v1/jobs/{job}/updates", self._state),
                web.post("/agent/v1/jobs/{job}/init", self._init),
                web.get("/agent/v1/jobs/{job}/versions/{version}", self._version),
            ]
        )
        self._stopping = asyncio.Event()
        self._tls = tls
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=tls)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        """As if killed: connections end without a word. What it has stored stays."""
        self._stopping.set()
        self._session = ""
        self._mail.clear()
        self._acked = 0
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    # ------------------------------------------------------------ what tests do

    async def send(self, *instructions: Instruction) -> None:
        async with self._change:
            self._mail += instructions
            self._change.notify_all()

    async def until(self, true: Callable[[], object], seconds: float = 20.0) -> None:
        """Wait until something that came makes `true` true."""
        async with asyncio.timeout(seconds), self._change:
            await self._change.wait_for(lambda: bool(true()))

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]

    def end_session(self) -> None:
        """Forget the session: the next request is told so."""
        self._session = ""

    def version(self, number: int) -> VersionRef:
        """A reference to a version; the first that has no body of its own is version 0's."""
        body = self.versions.setdefault(number, bytes(self.init))
        return VersionRef(version=number, digest=digest_of(body), bytes=len(body))

    async def prepare(self, spec: JobSpec | None = None) -> None:
        """Bring a site to where it has made version 0."""
        await self.send(messages.Prepare(job=JOB, spec=spec or stub_spec()))
        await self.until(lambda: self.of(messages.Ready))
        await self.send(messages.Initialise(job=JOB))
        await self.until(lambda: 0 in self.versions)

    async def train(self, clock: int = 0, *, epoch: int = 1, attempt: int = 1) -> Key:
        """Ask for a period; the key of its update."""
        await self.send(self.train_of(clock, epoch=epoch, attempt=attempt))
        return (JOB, epoch, clock, attempt)

    def train_of(self, clock: int, *, epoch: int = 1, attempt: int = 1) -> messages.Train:
        return messages.Train(
            job=JOB, epoch=epoch, clock=clock, attempt=attempt, base=self.version(0), steps=1
        )

    async def changed(self) -> None:
        async with self._change:
            self._change.notify_all()

    # ------------------------------------------------------------ handlers

    async def _hello(self, request: web.Request) -> web.Response:
        hello = messages.decode(Hello, await request.read())
        self.hellos.append(hello)
        await self.changed()
        if error := self.on_hello(hello):
            return refusal(error)
        self._sessions += 1
        self._session = f"session-{self._sessions}"
        return answer(
            Welcome(
                session=self._session,
                site="site-a",
                coordinator="fake",
                protocol=self.protocol,
                lease_seconds=self.lease_seconds,
                long_poll_seconds=self.long_poll_seconds,
                cursor=self._acked,
            )
        )

    def _check(self, request: web.Request) -> web.Response | None:
        if request.headers.get("X-Skerry-Session") != self._session or not self._session:
            return refusal(ConflictError("this session is not open."))
        return None

    async def _next(self, request: web.Request) -> web.Response:
        self.polls += 1
        if error := self.on_poll():
            return refusal(error)
        if refused := self._check(request):
            return refused
        cursor, session = int(request.query["cursor"]), self._session
        self._acked = max(self._acked, cursor)
        await self.changed()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.long_poll_seconds), self._change:
                await self._change.wait_for(
                    lambda: len(self._mail) > cursor or self._session != session
                )
        if refused := self._check(request):
            return refused
        items = tuple(self._mail[cursor:])
        return answer(Instructions(cursor=cursor + len(items), items=items))

    async def _events(self, request: web.Request) -> web.Response:
        if refused := self._check(request):
            return refused
        self.events += messages.decode(messages.Events, await request.read()).items
        await self.changed()
        return web.Response(status=204)

    async def _leave(self, request: web.Request) -> web.Response:
        self.left.append(messages.decode(messages.Leave, await request.read()).reason)
        await self.changed()
        return web.Response(status=204)

    async def _join(self, request: web.Request) -> web.Response:
        join = messages.decode(Join, await request.read())
        self.joins.append(join)
        return answer(
            Joined(site=join.name, secret="sks1.x", coordinator="fake", protocol=self.protocol)
        )

    async def _ca(self, request: web.Request) -> web.Response:
        return web.Response(body=self.ca_pem, content_type="application/x-pem-file")

    async def _upload(self, request: web.Request) -> web.Response:
        if refused := self._check(request):
            return refused
        key, offset = key_of(request), int(request.query["offset"])
        self.posts.append((key, offset))
        stored = self.uploads.setdefault(key, bytearray())
        await self.changed()
        if error := self.on_upload(key):
            return refusal(error)
        if offset != len(stored):
            return refusal(ConflictError("another offset.", details={"offset": len(stored)}))
        total = offset + (request.content_length or 0)
        async for chunk in request.content.iter_any():
            stored += chunk
            await self.changed()
        if len(stored) == total and key not in self.verdicts:
            self.verdicts[key] = self.on_complete(key)
        await self.changed()
        return answer(self.verdicts.get(key) or Receipt(offset=len(stored)))

    async def _state(self, request: web.Request) -> web.Response:
        if refused := self._check(request):
            return refused
        key = key_of(request)
        self.asked.append(key)
        await self.changed()
        stored = Receipt(offset=len(self.uploads.get(key, b"")))
        return answer(self.verdicts.get(key) or stored)

    async def _init(self, request: web.Request) -> web.Response:
        if refused := self._check(request):
            return refused
        offset = int(request.query["offset"])
        if self.init_conflicts:
            self.init_conflicts -= 1
            return refusal(ConflictError("this site has no open session."))
        if offset != len(self.init):
            return refusal(ConflictError("another offset.", details={"offset": len(self.init)}))
        total = offset + (request.content_length or 0)
        async for chunk in request.content.iter_any():
            self.init += chunk
        if len(self.init) == total:
            self.versions[0] = bytes(self.init)
        await self.changed()
        return answer(Receipt(offset=len(self.init), verdict="counted"))

    async def _version(self, request: web.Request) -> web.StreamResponse:
        if refused := self._check(request):
            return refused
        offset, body = int(request.query["offset"]), self.versions.get(
            int(request.match_info["version"])
        )  # fmt: skip
        self.version_requests.append(offset)
        await self.changed()
        if body is None:
            return refusal(NotFoundError("this version is not kept."))
        return web.Response(body=body[offset:], content_type="application/octet-stream")


def key_of(request: web.Request) -> Key:
    query = request.query
    return (
        request.match_info["job"],
        int(query["epoch"]),
        int(query["clock"]),
        int(query["attempt"]),
    )


def answer(message: object) -> web.Response:
    return web.Response(body=messages.encode(message), content_type="application/json")


def refusal(error: SkerryError) -> web.Response:
    return web.Response(
        body=messages.encode(error.body()),
        status=error.http_status,
        content_type="application/json",
    )


def digest_of(body: bytes) -> str:
    """The digest in the META frame of a snapshot body; empty when it is none."""
    try:
        header = parse_header(body[:HEADER_BYTES])
        meta = decode_meta_json(body[HEADER_BYTES : HEADER_BYTES + header.length])
    except Exception:
        return ""
    return meta.digest if isinstance(meta, SnapshotMeta) else ""
