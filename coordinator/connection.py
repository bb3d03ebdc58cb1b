"""One connection of a listener: its caps, its clock on silence, and the account of its bytes.

aiohttp parses HTTP; this class watches what it does not: how long a header takes, how many
connections are open, when any byte comes in (a sign of life of the site), when the peer is gone,
and for whom the socket's bytes are counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from aiohttp import web

from coordinator import wire
from protocol.errors import MalformedError
from protocol.messages import encode

log = logging.getLogger(__name__)

# aiohttp holds up to twice as much of a body before it stops reading, for anybody who connects:
# with connections_max that bounds what strangers can make this process hold.
READ_BUFFER_BYTES: Final = 64 << 10
HEADER_LINE_BYTES_MAX: Final = 8190
HEADERS_MAX: Final = 64
LINGER_SECONDS: Final = 2.0  # how long the rest of a refused body is read and thrown away


class Owner(NamedTuple):
    """For whom bytes are counted. `job` is empty for polls and events."""

    site: str
    job: str


NOBODY: Final = Owner("", "")


class Limits(NamedTuple):
    """Bounds of one listener."""

    connections_max: int
    header_seconds: float
    keep_alive_seconds: float


class Listener:
    """All connections of one listening address."""

    def __init__(
        self,
        runner: web.AppRunner,
        limits: Limits,
        *,
        on_life: Callable[[str], None],
        on_bytes: Callable[[str, str, int, int], None],
        on_lost: Callable[[Connection], None],
    ) -> None:
        self.runner = runner
        self.limits = limits
        self.on_life = on_life
        self.on_bytes = on_bytes
        self.on_lost = on_lost
        self.open: set[Connection] = set()
        self.refused = 0

    def __call__(self) -> Connection:
        """A protocol for a connection that is about to be made."""
        server = self.runner.server
        if server is None:
            raise RuntimeError("the application runner was not set up")
        return Connection(self, server)

    def count(self) -> None:
        """Bring the account of all open connections up to date."""
        for connection in self.open:
            connection.count()

    def end_waits(self) -> None:
        """Let every long poll and event stream end now."""
        for connection in self.open:
            connection.end_waits()

    def drop(self, site: str) -> None:
        """Cut every connection that belongs to this site."""
        for connection in [one for one in self.open if one.owner.site == site]:
            connection.abort()


class Connection(web.RequestHandler):
    """An HTTP connection."""

    def __init__(self, listener: Listener, server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=listener.limits.keep_alive_seconds,
            tcp_keepalive=False,  # with shorter times, below
            logger=log,
            access_log=None,  # type: ignore[arg-type]  # its way of saying off
            max_line_size=HEADER_LINE_BYTES_MAX,
            max_field_size=HEADER_LINE_BYTES_MAX,
            max_headers=HEADERS_MAX,
            lingering_time=LINGER_SECONDS,
            read_bufsize=READ_BUFFER_BYTES,
            auto_decompress=False,  # no body grows on its way in
        )
        self.listener = listener
        self.owner = NOBODY
        # The site in whose open session this connection was used: a hello is not a sign of life of
        # the holder of the name, it may come from somebody else.
        self.speaks_for = ""
        # Done when nobody should wait on behalf of this peer: it is gone, or we stop.
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.polled: set[str] = set()  # sites whose long polls came in here
        self.counted = wire.Count(0, 0)
        self.answering = False  # an answer's header was sent: nothing else can be said any more
        self._busy = False
        self._charged = False  # the owner of what comes in now is known
        self._header_timer: asyncio.TimerHandle | None = None
        self._wire: asyncio.Transport | None = None

    # ------------------------------------------------------------ what asyncio tells
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, or close it at once when there are too many."""
        listener = self.listener
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("a stream transport is needed")
        if len(listener.open) >= listener.limits.connections_max:
            # Said once per crowd: whoever floods must not fill the log as well.
            if listener.refused == 0:
                log.warning(
                    "more than %d connections (connections_max): new ones are closed.",
                    listener.limits.connections_max,
                )
            listener.refused += 1
            self._force_close = True
            transport.abort()
            return
        listener.refused = 0
        listener.open.add(self)
        self._wire = transport
        wire.keep_alive(transport)
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Any byte is a sign of life; the first one of a request starts its header's clock."""
        if self.speaks_for:
            self.listener.on_life(self.speaks_for)
        if not self._busy and self._header_timer is None:
            self._arm()
        super().data_received(data)

    def eof_received(self) -> None:
        """The peer closes: the last moment at which a TLS connection's socket can be asked."""
        self._charged = True
        self.count()
        super().eof_received()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Settle the account and tell whoever waits for this peer."""
        self._disarm()
        self._charged = True
        self.count()
        self.listener.open.discard(self)
        self.end_waits()
        self.listener.on_lost(self)
        super().connection_lost(exc)

    # ------------------------------------------------------------ what requests tell
    def request_began(self) -> None:
        """A whole header is here."""
        self._busy = True
        self.answering = False
        self._disarm()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the answer, then count what it took."""
        done = await super().finish_response(request, resp, start_time)
        self._charged = True  # a request that was refused before anybody was charged for it, too
        self.count()
        self._busy = self._charged = False
        self._disarm()
        return done

    def charge(self, owner: Owner) -> None:
        """From the request that just came in on, bytes are this owner's."""
        self._charged = True
        if owner == self.owner:
            return
        # What was sent until now belongs to the last answer, what was received to this request;
        # a handshake belongs to the first owner.
        now = wire.count(self._wire)
        if now is not None:
            before, self.counted = self.counted, now
            self._report(self.owner if self.owner.site else owner, 0, now.sent - before.sent)
            self._report(owner, now.received - before.received, 0)
        self.owner = owner

    def count(self) -> None:
        """Charge the bytes since the last count to the present owner, once there is one.

        What came in between two requests, or with a header that nobody has looked at yet, belongs
        to a request that has not said whose it is: it waits for `charge`.
        """
        now = wire.count(self._wire) if self.owner.site else None
        if now is not None:
            before = self.counted
            if not self._charged:
                now = now._replace(received=before.received)
            self.counted = now
            self._report(self.owner, now.received - before.received, now.sent - before.sent)

    def end_waits(self) -> None:
        """Let whatever waits on behalf of this peer end now."""
        if not self.over.done():
            self.over.set_result(None)

    def abort(self) -> None:
        """Cut the connection without waiting for anything unsent."""
        if self._wire is not None:
            self._wire.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to something that is not HTTP, in the form of all other errors."""
        del request, message
        if exc is not None and status >= 500:
            log.error("a request failed outside its handler", exc_info=exc)
        body = MalformedError("this is not an HTTP request that can be understood.").body()
        answer = web.Response(status=status, body=encode(body), content_type="application/json")
        answer.force_close()
        return answer

    # ------------------------------------------------------------ within
    def _report(self, owner: Owner, up: int, down: int) -> None:
        if owner.site and (up > 0 or down > 0):
            self.listener.on_bytes(owner.site, owner.job, max(up, 0), max(down, 0))

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._header_timer = loop.call_later(self.listener.limits.header_seconds, self._too_slow)

    def _disarm(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _too_slow(self) -> None:
        self._header_timer = None
        if not self._busy:
            self.abort()
