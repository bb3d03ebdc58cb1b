"""The coordinator as a process: two listeners around one engine, started and stopped in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from time import monotonic, time
from typing import Any, Final

import msgspec
from aiohttp import web

from coordinator import agents_api, logs, ports, tls
from coordinator.app import Mount, make_app
from coordinator.beat import next_second
from coordinator.connection import Connection, Limits, Listener
from coordinator.engine import Engine, EngineSettings
from coordinator.http import Services
from coordinator.routes import ListenerName
from coordinator.settings import CoordinatorSettings, is_loopback, split_listen

log = logging.getLogger(__name__)

FAILED: Final = 1
INTERRUPTED: Final = 130
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_RENEW_EVERY_TICKS: Final = 3600
_HANDSHAKE_SECONDS: Final = 10.0
_HANDLERS_SHARE: Final = 0.2  # of stop_seconds: for handlers to end, twice (asked, cancelled)
_FILE: Final = "addresses.json"

Ready = Callable[[str, str], None]


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """What `addresses.json` in the data folder says while the coordinator runs."""

    agents: str
    people: str
    ca_fingerprint: str
    pid: int


async def serve(
    settings: CoordinatorSettings,
    ready: Ready,
    *,
    mount: Mount | None = None,
    stop: asyncio.Event | None = None,
) -> int:
    """Run a coordinator until SIGTERM (0), Ctrl-C (130), `stop` (0), or it cannot go on (1).

    `ready` is called once with the agents' and the people's base URL, when both answer. `mount`
    adds pages to the people's application. Without `stop` this is the process's main work: it
    takes over signals and the log.

    Raises:
        InvalidFileError: settings that make no sense together.
        UsageError: a port is taken, or a certificate does not fit.
        ConflictError: another coordinator works in the same data folder.
    """
    settings.check()
    if stop is None:
        logs.setup(settings.log_level, settings.log_format)
    folder = Path(settings.data_dir)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # models and journal are its own
    with contextlib.ExitStack() as sockets:
        bound = [
            sockets.enter_context(ports.bind(*split_listen(value), name))
            for value, name in (
                (settings.listen_agents, "listen_agents"),
                (settings.listen_people, "listen_people"),
            )
        ]
        secure = tls.prepare(settings, time())
        addresses = _addresses(settings, bound, secure)
        engine = Engine(_engine_settings(settings, addresses))
        ending = _Ending(stop or asyncio.Event())
        with ending.on_signals() if stop is None else contextlib.nullcontext():
            await engine.start()
            try:
                async with listening(settings, engine, bound, secure, addresses, mount=mount):
                    _write_addresses(folder, addresses)
                    ready(addresses.agents, addresses.people)
                    log.info("sites: %s, people: %s", addresses.agents, addresses.people)
                    await ending.wait(engine.failed)
                    log.info("stopping: %s.", ending.reason)
            finally:
                (folder / _FILE).unlink(missing_ok=True)
                await engine.stop(settings.stop_seconds * (1 - 2 * _HANDLERS_SHARE))
        return ending.code


class _Ending:
    """Why and how the process ends. A second Ctrl-C ends it at once."""

    def __init__(self, event: asyncio.Event) -> None:
        self._event = event
        self.code = 0
        self.reason = "asked to"

    async def wait(self, failed: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(event.wait()) for event in (self._event, failed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if failed.is_set() and not self._event.is_set():
            self.code = FAILED
            self.reason = "this process cannot go on and must be started again"
            self._event.set()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._signalled, number)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _signalled(self, number: signal.Signals) -> None:
        if self._event.is_set():
            os._exit(INTERRUPTED)  # files are whole at any instant, and the fold process goes too
        self.code = INTERRUPTED if number == signal.SIGINT else 0
        self.reason = f"got {number.name}"
        self._event.set()


@contextlib.asynccontextmanager
async def listening(
    settings: CoordinatorSettings,
    engine: Engine,
    bound: Sequence[socket.socket],
    secure: tls.Tls | None,
    addresses: Addresses,
    *,
    mount: Mount | None = None,
) -> AsyncIterator[Services]:
    """Both listeners on their sockets (agents, people), answering for `engine` until the end."""
    tasks = _Tasks()
    loop = asyncio.get_running_loop()

    services = Services(
        engine,
        settings,
        clock=monotonic,
        ca_pem=secure.ca_pem if secure is not None else b"",
        ca_fingerprint=addresses.ca_fingerprint,
        join_url=addresses.agents,
        notes=lambda: secure.notes if secure is not None else (),
    )

    def lost(connection: Connection) -> None:
        if connection.polled:
            tasks.start(agents_api.poller_lost(services, connection))

    limits = Limits(settings.connections_max, settings.header_seconds, settings.keep_alive_seconds)
    servers: list[asyncio.Server] = []
    runners: list[web.AppRunner] = []
    try:
        names: tuple[ListenerName, ListenerName] = ("agents", "people")
        values = (settings.listen_agents, settings.listen_people)
        for name, sock, value in zip(names, bound, values, strict=True):
            app = make_app(name, services, mount=mount)
            runner = web.AppRunner(
                app,
                access_log=None,
                handle_signals=False,
                shutdown_timeout=settings.stop_seconds * _HANDLERS_SHARE,
            )
            await runner.setup()
            runners.append(runner)
            listener = Listener(
                runner,
                limits,
                on_life=engine.heard,
                on_bytes=engine.ledger.add,
                on_lost=lost,
            )
            services.listeners.append(listener)
            engine.ledger.sources.append(listener.count)
            servers.append(await _open(loop, listener, sock, _context(secure, value)))
        tasks.start(_tick(services, secure))
        yield services
    finally:
        services.stop()
        for server in servers:
            server.close()
        await asyncio.gather(*(runner.cleanup() for runner in runners))
        await tasks.end()


async def _open(
    loop: asyncio.AbstractEventLoop,
    listener: Listener,
    sock: socket.socket,
    context: ssl.SSLContext | None,
) -> asyncio.Server:
    if context is None:
        return await loop.create_server(listener, sock=sock, backlog=ports.BACKLOG)
    return await loop.create_server(
        listener,
        sock=sock,
        backlog=ports.BACKLOG,
        ssl=context,
        ssl_handshake_timeout=_HANDSHAKE_SECONDS,
    )


def _context(secure: tls.Tls | None, listen: str) -> ssl.SSLContext | None:
    plain = secure is None or is_loopback(split_listen(listen)[0])
    return None if plain or secure is None else secure.context


async def _tick(services: Services, secure: tls.Tls | None) -> None:
    # Measures how late the loop is, keeps the ledger within a second of the sockets, renews the
    # leases of sites whose polls are open (which proves life as far as the kernel's probes do),
    # and looks after the certificate.
    ticks = 0
    while True:
        services.lag.note(await next_second())
        services.engine.ledger.refresh()
        for site in services.open_polls.values():
            services.engine.heard(site)
        ticks += 1
        if secure is not None and ticks % _RENEW_EVERY_TICKS == 0:
            await asyncio.to_thread(secure.refresh, time())


class _Tasks:
    """Background tasks that are known until they end, and never fail in silence."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a background task failed", exc_info=error)

    async def end(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _addresses(
    settings: CoordinatorSettings, bound: Sequence[socket.socket], secure: tls.Tls | None
) -> Addresses:
    urls = []
    for sock, listen in zip(bound, (settings.listen_agents, settings.listen_people), strict=True):
        host = tls.url_host(settings, split_listen(listen)[0])
        scheme = "https" if _context(secure, listen) is not None else "http"
        named = f"[{host}]" if ":" in host else host
        urls.append(f"{scheme}://{named}:{sock.getsockname()[1]}")
    pinned = secure is not None and urls[0].startswith("https")
    return Addresses(
        agents=urls[0],
        people=urls[1],
        ca_fingerprint=secure.fingerprint if pinned and secure is not None else "",
        pid=os.getpid(),
    )


def _engine_settings(settings: CoordinatorSettings, addresses: Addresses) -> EngineSettings:
    return EngineSettings(
        data_dir=Path(settings.data_dir),
        database_url=settings.database_url,
        name=settings.name,
        agents_url=addresses.agents,
        people_url=addresses.people,
        ca_fingerprint=addresses.ca_fingerprint,
        lease_seconds=settings.lease_seconds,
        init_timeout_seconds=settings.init_timeout_seconds,
        evaluation_timeout_seconds=settings.evaluation_timeout_seconds,
        grace_seconds=settings.grace_seconds,
        long_poll_seconds=settings.long_poll_seconds,
        upload_bytes_max=settings.upload_bytes_max,
        spool_bytes_max=settings.spool_bytes_max,
        jobs_resident_bytes_max=settings.jobs_resident_bytes_max,
        disk_reserve_bytes=settings.disk_reserve_bytes,
        downloads_max=settings.downloads_max,
        rebuild_tables=settings.rebuild_tables,
    )


def _write_addresses(folder: Path, addresses: Addresses) -> None:
    part = folder / f"{_FILE}.tmp"
    part.write_bytes(msgspec.json.encode(addresses) + b"\n")
    part.replace(folder / _FILE)
