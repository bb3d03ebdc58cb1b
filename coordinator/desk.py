"""Where sites are received: sessions, mailboxes, and the events they report."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Literal

from coordinator.actions import AnyAction, CloseSession, Send
from coordinator.mailbox import Mailbox
from coordinator.registry import Registry
from coordinator.runner import Runner
from coordinator.sessions import Refused
from coordinator.stimuli import SiteClosed, SiteConnected, SiteLeft, SiteReported
from protocol.errors import ConflictError, RefusedError, SkerryError
from protocol.messages import Bye, Events, Hello

log = logging.getLogger("coordinator.engine")


class Session:
    """A site's open session: who holds it, its mailbox, and the next event expected of it."""

    def __init__(self, instance: str) -> None:
        self.id = secrets.token_hex(16)
        self.instance = instance
        self.mailbox = Mailbox()
        self.next_event: int | None = None
        self.taking_events = asyncio.Lock()


class Desk:
    """All open sessions, by site."""

    def __init__(self, registry: Registry, runner: Runner) -> None:
        self._registry = registry
        self._runner = runner
        self._sessions: dict[str, Session] = {}
        self._drained: dict[str, str] = {}  # site -> the agent process that was drained

    def __contains__(self, site: str) -> bool:
        return site in self._sessions

    async def open(self, site: str, hello: Hello) -> Session:
        """A new session.

        Raises:
            ConflictError: a live namesake holds the name (details: when to try again).
            RefusedError: the site was drained, and this is still the same agent process.
        """
        account = self._registry.site(site)
        if account.state == "drained" and self._drained.get(site) == hello.instance:
            raise RefusedError(
                f"site {site!r} was drained at the coordinator.", "Restart its agent to take part."
            )
        session = Session(hello.instance)

        def step(now: float) -> list[AnyAction]:
            verdict = self._runner.core.admit(site, hello.instance, now)
            if isinstance(verdict, Refused):
                raise ConflictError(
                    verdict.reason,
                    details={
                        "last_heard_seconds": round(verdict.last_heard_seconds, 3),
                        "retry_after_seconds": round(verdict.retry_after_seconds, 3),
                    },
                )
            held = self._sessions.get(site)
            if held is not None:
                session.mailbox = held.mailbox.successor()
            self._sessions[site] = session
            connected = SiteConnected(
                site=site, role=account.role, instance=hello.instance, tasks=hello.tasks
            )
            return self._runner.core.handle(connected, now)

        await self._runner.step(step)
        if self._registry.site(site).state != "revoked":
            await self._registry.set_site(
                site, software=hello.software, tasks=hello.tasks, state="active"
            )
        return session

    def session(self, site: str) -> Session:
        """The open session of a site; ConflictError without one."""
        session = self._sessions.get(site)
        if session is None:
            raise ConflictError(f"site {site!r} has no open session.", "Say hello first.")
        return session

    def check(self, site: str, session: str) -> None:
        """ConflictError when this session is not the site's open one."""
        if not secrets.compare_digest(self.session(site).id.encode(), session.encode()):
            raise ConflictError(
                f"this is not the open session of site {site!r}.", "Say hello again."
            )

    async def close(self, site: str) -> None:
        """The connection of its long poll closed; a short grace remains."""
        if site in self._sessions:
            await self._runner.stimulate(SiteClosed(site=site))

    async def leave(self, site: str, reason: str) -> None:
        """It said goodbye."""
        await self._runner.stimulate(SiteLeft(site=site, reason=reason))

    async def dismiss(self, site: str, state: Literal["drained", "revoked"], reason: str) -> None:
        """End a site's part in all jobs; NotFoundError."""
        await self._registry.set_site(site, state=state)
        if (session := self._sessions.get(site)) is not None:
            self._drained[site] = session.instance
        await self._runner.stimulate(SiteLeft(site=site, reason=reason, removed=state == "revoked"))

    async def take_events(self, site: str, session: str, events: Events) -> None:
        """Tell the core, each event once, whatever was sent twice.

        Raises:
            ConflictError: another session, or events are missing in between.
        """
        self.check(site, session)
        held = self.session(site)
        async with held.taking_events:
            expected = events.first if held.next_event is None else held.next_event
            if events.first > expected:
                raise ConflictError(
                    f"event {events.first} came, event {expected} was expected.",
                    details={"expected": expected},
                )
            for number, event in enumerate(events.items, start=events.first):
                if number < expected:
                    continue
                try:
                    await self._runner.stimulate(SiteReported(site=site, event=event))
                except SkerryError as error:
                    # Told again it would be refused again, and hold up all that follow.
                    log.warning("site %s: %s is refused: %s", site, type(event).__name__, error)
                held.next_event = number + 1

    # ------------------------------------------------------------ the core's words to sites

    def send(self, action: Send) -> None:
        """Put an instruction into the mailbox of the open session.

        Without a session there is nothing to do: the core sends again what is outstanding when
        the site connects. A site that reads nothing is treated as away.
        """
        session = self._sessions.get(action.site)
        if session is None:
            return
        try:
            session.mailbox.put(action.instruction)
        except SkerryError as error:
            log.warning("site %s: %s", action.site, error)
            self._runner.post(SiteClosed(site=action.site))

    def close_session(self, action: CloseSession) -> None:
        """End the session; its mailbox says goodbye if the core has not."""
        session = self._sessions.pop(action.site, None)
        if session is not None:
            session.mailbox.close(Bye(reason=action.reason, retry=action.retry))

    def stop(self) -> None:
        """Answer every open poll."""
        for session in self._sessions.values():
            session.mailbox.close()
