"""The line to the coordinator: one session after the other, instructions in, events out.

Hello is repeated for ever with growing pauses; the long poll is open all the time, during training
too. Only answers after which trying again cannot help end it (`Dismissed`): the identity was
removed or is not known, the protocols differ, a namesake holds the name.

A name that is held may be held by a process that died a moment ago. So a refused hello is repeated
for one lease, in which a dead holder's name falls free; a live one keeps it, and this agent gives
up.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from typing import Final

from client.backoff import Backoff
from client.outage import Outage
from client.sitefiles import SentLog
from client.transport import NotACoordinatorError, SilentError, Transport
from protocol import limits
from protocol.errors import (
    BusyError,
    ConflictError,
    LimitError,
    MalformedError,
    RefusedError,
    RemovedError,
    SkerryError,
    UnauthenticatedError,
    UnreachableError,
    VersionError,
)
from protocol.messages import (
    Bye,
    Event,
    Events,
    Hello,
    Instruction,
    Instructions,
    Leave,
    Progress,
    Welcome,
    encode,
)
from protocol.version import PROTOCOL, SOFTWARE, check_protocol

log = logging.getLogger("skerry.agent")

HELLO_SECONDS: Final = 10.0
EVENTS_SECONDS: Final = 30.0
POLL_SLACK_SECONDS: Final = 10.0
EVENTS_AT_ONCE: Final = 64
DUPLICATE_PAUSE_SECONDS: Final = 1.0
LIVED_SECONDS: Final = 1.0  # a poll that was open for so long had reached the coordinator


class DismissedError(Exception):
    """Trying again cannot help; `error` says why and what to do."""

    def __init__(self, error: SkerryError) -> None:
        super().__init__(error.message)
        self.error = error


class Link:
    """Sessions with the coordinator, as long as `run` runs."""

    def __init__(
        self,
        transport: Transport,
        sent: SentLog,
        *,
        tasks: tuple[str, ...],
        rng: random.Random,
        clock: Callable[[], float],
        on_session: Callable[[], None],
        on_instruction: Callable[[Instruction], None],
    ) -> None:
        self.connected = asyncio.Event()
        self._transport = transport
        self._sent = sent
        self._rng = rng
        self._clock = clock
        self._on_session = on_session
        self._on_instruction = on_instruction
        self._hello = Hello(
            protocol=PROTOCOL,
            software=SOFTWARE,
            instance=f"{rng.getrandbits(128):032x}",
            tasks=tasks,
        )
        self._outage = Outage()
        self._welcomed = False
        self._outbox: list[Event] = []
        self._posting = 0  # so many of the first events are on their way
        self._has_events = asyncio.Event()
        self._numbered: tuple[str, int] = ("", 0)  # session, number of its next event

    async def run(self) -> None:
        """Keep a session open and post events.

        Raises:
            DismissedError: when nothing is gained by going on.
        """
        poster = asyncio.create_task(self._post(), name="events")
        try:
            backoff = Backoff(self._rng)
            while True:
                welcome = await self._open()
                began = self._clock()
                await self._poll(welcome)
                self.connected.clear()
                if self._clock() - began > limits.BACKOFF_LAST_SECONDS:
                    backoff.reset()
                await asyncio.sleep(backoff.pause())
        finally:
            poster.cancel()
            await asyncio.gather(poster, return_exceptions=True)

    def report(self, event: Event) -> None:
        """Post an event, after those before it. A Progress that waits gives way to the next."""
        waiting = self._outbox[self._posting :]
        if isinstance(event, Progress) and waiting and isinstance(waiting[-1], Progress):
            self._outbox[-1] = event
        else:
            self._outbox.append(event)
        self._has_events.set()

    async def leave(self, reason: str, seconds: float) -> None:
        """Say goodbye, if there is somebody to hear it; gives up after `seconds`."""
        if not self.connected.is_set():
            return
        try:
            await self._transport.call(
                type(None), "POST", "/agent/v1/leave", Leave(reason=reason), seconds=seconds
            )
        except SkerryError as error:
            log.debug("goodbye was not heard: %s", error.message)

    # ------------------------------------------------------------ hello

    async def _open(self) -> Welcome:
        backoff = Backoff(self._rng)
        given_up_at: float | None = None
        self._transport.session = ""
        while True:
            try:
                welcome = await self._transport.call(
                    Welcome, "POST", "/agent/v1/hello", self._hello, seconds=HELLO_SECONDS
                )
                check_protocol(welcome.protocol, who="the coordinator")
            except ConflictError as error:
                now = self._clock()
                if given_up_at is None:
                    rest = error.details.get("retry_after_seconds")
                    lease = rest if isinstance(rest, int | float) else limits.LEASE_SECONDS
                    given_up_at = now + lease + DUPLICATE_PAUSE_SECONDS
                    text = "%s If that process is gone, its name falls free within %.0f s: waiting."
                    log.warning(text, error.message, lease)
                if now > given_up_at:
                    raise DismissedError(error) from None
                pause = DUPLICATE_PAUSE_SECONDS * self._rng.uniform(0.5, 1.0)
            except RefusedError as error:
                if not isinstance(error, BusyError):
                    raise DismissedError(_with_hint(error)) from None
                pause = self._failed(error, backoff)
            except SkerryError as error:
                pause = self._failed(error, backoff)
            else:
                self._welcome(welcome)
                return welcome
            await asyncio.sleep(pause)

    def _failed(self, error: SkerryError, backoff: Backoff) -> float:
        kind = "stranger" if isinstance(error, NotACoordinatorError) else "away"
        if not isinstance(error, UnreachableError):
            kind = type(error).__name__
        if line := self._outage.failed(kind, error.message, self._clock()):
            log.warning("%s", line)
        return backoff.pause()

    def _welcome(self, welcome: Welcome) -> None:
        self._transport.session = welcome.session
        if line := self._outage.over(self._clock()):
            log.info("%s", line)
        if not self._welcomed:
            log.info("connected to %s as %s", welcome.coordinator, welcome.site)
        self._welcomed = True
        self._sent.add(time.time(), "hello", {"bytes": len(encode(self._hello))})
        self.connected.set()
        self._on_session()

    # ------------------------------------------------------------ the long poll

    async def _poll(self, welcome: Welcome) -> None:
        """Hand out instructions until this session is over."""
        backoff = Backoff(self._rng)
        cursor = welcome.cursor
        while True:
            began = self._clock()
            try:
                answer = await self._transport.call(
                    Instructions,
                    "GET",
                    "/agent/v1/next",
                    params={"cursor": cursor},
                    seconds=welcome.long_poll_seconds + POLL_SLACK_SECONDS,
                )
            except (RemovedError, VersionError) as error:
                raise DismissedError(_with_hint(error)) from None
            except (ConflictError, UnauthenticatedError) as error:
                # Hello will tell whether it was only the session, or the name or the secret.
                log.debug("the session is over: %s", error.message)
                return
            except SkerryError as error:
                lived = self._clock() - began >= LIVED_SECONDS
                if lived and not isinstance(error, SilentError):
                    # It was open and was cut, as proxies do with quiet connections: the line is
                    # good, and the coordinator must hear of us before its grace ends.
                    backoff.reset()
                    await asyncio.sleep(backoff.pause())
                else:
                    await asyncio.sleep(self._failed(error, backoff))
                continue
            if line := self._outage.over(self._clock()):
                log.info("%s", line)
            backoff.reset()
            cursor = answer.cursor
            for instruction in answer.items:
                if isinstance(instruction, Bye) and instruction.retry:
                    log.info("the coordinator ends the session: %s", instruction.reason)
                    return
                self._on_instruction(instruction)

    # ------------------------------------------------------------ events

    async def _post(self) -> None:
        backoff = Backoff(self._rng)
        at_once = EVENTS_AT_ONCE
        while True:
            await self._has_events.wait()
            await self.connected.wait()
            session = self._transport.session
            first = self._numbered[1] if self._numbered[0] == session else 0
            items = tuple(self._outbox[: self._posting or at_once])
            self._posting = len(items)
            body = Events(first=first, items=items)
            try:
                await self._transport.call(
                    type(None), "POST", "/agent/v1/events", body, seconds=EVENTS_SECONDS
                )
            except (MalformedError, LimitError) as error:
                if len(items) > 1:  # one of them spoils it for the others
                    self._posting = at_once = 1
                    continue
                log.warning("%s is not taken: %s", type(items[0]).__name__, error.message)
            except SkerryError as error:
                log.debug("events wait: %s", error.message)
                await asyncio.sleep(backoff.pause())
                continue
            else:
                self._note(items)
            backoff.reset()
            del self._outbox[: len(items)]
            self._posting = 0
            at_once = min(2 * at_once, EVENTS_AT_ONCE)
            self._numbered = (session, first + len(items))
            if not self._outbox:
                self._has_events.clear()

    def _note(self, items: tuple[Event, ...]) -> None:
        now = time.time()
        for item in items:
            name = type(item).__name__.lower()
            self._sent.add(now, name, {"job": item.job, "bytes": len(encode(item))})


def _with_hint(error: RefusedError) -> RefusedError:
    """The error with what to do about it, where the coordinator's own words do not say."""
    if error.hint:
        return error
    hints: dict[type[RefusedError], str] = {
        RemovedError: "This site was removed: ask for a new token and join again.",
        UnauthenticatedError: "The coordinator does not know this site's secret: join again.",
    }
    error.hint = hints.get(type(error), "")
    return error
