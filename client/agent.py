"""The long-lived process at a site: it dials out, and carries out what its session decides.

    link          instructions ->|                      |-> reports           -> link
    supervisor    the worker's   ->| inbox -> session  -|-> start, tell, stop -> supervisor
    transfers     answers        ->|                    |-> fetch, ask, upload -> transfers

One queue, one consumer: what happens is handled whole, one after the other. No torch here; bodies
pass through in pieces, unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from client import logs
from client.agentsettings import AgentSettings
from client.allow import AllowList
from client.assignment import Patience
from client.link import DismissedError, Link
from client.session import Session
from client.sessionapi import (
    AnyAction,
    AnyStimulus,
    AskVerdict,
    CallOff,
    Connected,
    Fetch,
    Finish,
    Instructed,
    KeepBases,
    LeaveJob,
    RememberJob,
    Report,
    Say,
    StartWorker,
    StopWorker,
    Tell,
    Tick,
    Upload,
    UploadInit,
)
from client.sitefiles import SentLog, SiteFolder, SiteIdentity, text_of
from client.supervisor import Supervisor
from client.transfers import Transfers
from client.transport import Transport, check_url
from protocol.errors import RemovedError

log = logging.getLogger("skerry.agent")

LEAVE_SECONDS: Final = 0.5
SUMMARY_SECONDS: Final = 60.0


class Agent:
    """Wires link, session, supervisor and transfers of one site."""

    def __init__(
        self,
        settings: AgentSettings,
        folder: SiteFolder,
        identity: SiteIdentity,
        transport: Transport,
        *,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._inbox: asyncio.Queue[AnyStimulus] = asyncio.Queue()
        tell = self._inbox.put_nowait
        sent = SentLog(folder.path)
        allowed = AllowList(settings.tasks, settings.base or Path.cwd())
        self.session = Session(
            jobs=folder.jobs,
            stored=folder.stored_updates(),
            known=folder.known_jobs(),
            rng=rng,
            patience=Patience(
                load=settings.load_timeout_seconds, work=settings.work_timeout_seconds
            ),
        )
        self.link = Link(
            transport,
            sent,
            tasks=allowed.names,
            rng=rng,
            clock=clock,
            on_session=lambda: tell(Connected()),
            on_instruction=lambda instruction: tell(Instructed(instruction=instruction)),
        )
        self._supervisor = Supervisor(settings, allowed, folder, identity, tell)
        self._transfers = Transfers(
            transport, folder, sent, rng=rng, tell=tell, connected=self.link.connected
        )
        self._said: tuple[str, float] = ("", float("-inf"))

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set; then end the worker and say goodbye, within two seconds.

        Raises:
            DismissedError: the coordinator wants no more of this site.
        """
        stopping = asyncio.create_task(stop.wait(), name="stop")
        parts = {
            asyncio.create_task(self.link.run(), name="link"),
            asyncio.create_task(self._supervisor.run(), name="supervisor"),
            asyncio.create_task(self._consume(), name="session"),
        }
        try:
            done, _ = await asyncio.wait({stopping, *parts}, return_when=asyncio.FIRST_COMPLETED)
            if stopping in done:
                log.info("stops")
        finally:
            for task in (stopping, *parts):
                task.cancel()
            ends = [self._transfers.close(), stopping, *parts]
            if stop.is_set():
                ends.append(self.link.leave("the agent was stopped", LEAVE_SECONDS))
            await asyncio.gather(*ends, return_exceptions=True)
        for task in done & parts:
            if error := task.exception():
                raise error

    async def _consume(self) -> None:
        while True:
            wake_at = self.session.wake_at()
            stimulus: AnyStimulus = Tick()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(
                    None if wake_at is None else max(0.0, wake_at - self._clock())
                ):
                    stimulus = await self._inbox.get()
            for action in self.session.handle(stimulus, self._clock()):
                try:
                    self._perform(action)
                except OSError as error:  # a full disk costs what was to be written, no more
                    log.warning("%s: %s", type(action).__name__, error)
            self._tell_what_is_done()

    def _perform(self, action: AnyAction) -> None:
        match action:
            case StartWorker() | StopWorker() | Tell():
                self._supervisor.order(action)
            case Report(event=event):
                self.link.report(event)
            case Fetch(job=job, base=base):
                self._transfers.fetch(job, base)
            case AskVerdict(identity=identity):
                self._transfers.ask(identity)
            case Upload(update=update, offset=offset):
                self._transfers.upload(update, offset)
            case CallOff(identity=identity):
                self._transfers.call_off(identity)
            case UploadInit(job=job, body=body, bytes=size):
                self._transfers.upload_init(job, body, size)
            case RememberJob():
                self._folder.remember(action)
            case KeepBases(job=job, versions=versions):
                self._folder.keep_bases(job, (*versions, *self._transfers.fetching(job)))
            case LeaveJob(job=job, forget=forget):
                self._transfers.leave(job, forget=forget)
                if forget:
                    self._folder.forget(job)
            case Say(job=job, text=text, warning=warning):
                log.log(
                    logging.WARNING if warning else logging.INFO, "%s", text, extra={"job": job}
                )
            case Finish(reason=reason):
                hint = "Ask for a new token and join again, if this site is still wanted."
                raise DismissedError(
                    RemovedError(f"the coordinator sends this site away: {reason}.", hint)
                )

    def _tell_what_is_done(self) -> None:
        """Log what this site does or waits for: each change in detail, once a minute for all."""
        doing, now = self.session.doing(), self._clock()
        if doing == self._said[0]:
            return
        summary = now - self._said[1] >= SUMMARY_SECONDS
        level = logging.INFO if summary else logging.DEBUG
        log.log(level, "this site %s", doing, extra={"job": self.session.job})
        self._said = (doing, now if summary else self._said[1])


async def run_agent(settings: AgentSettings) -> int:
    """Run the agent of a site until a signal; the exit code.

    0 after SIGTERM, 130 after Ctrl-C, 4 when the coordinator refuses this site for good.

    Raises:
        SkerryError: it cannot even start (not joined, folder in use, bad settings).
    """
    logs.setup(settings.log_level, settings.log)
    folder = SiteFolder(settings.folder)
    text_of(folder.path)
    identity = folder.identity()
    logs.name_site(identity.name)
    with folder.locked():
        folder.remove_stale()
        folder.jobs.mkdir(exist_ok=True)
        transport = Transport(
            check_url(settings.url or identity.url, insecure=settings.insecure),
            secret=folder.secret(),
            ca=settings.ca_bundle or folder.ca,
            proxy=settings.proxy,
        )
        stop = asyncio.Event()
        signals: list[signal.Signals] = []
        with _stopped_by_signals(stop, signals):
            async with transport:
                # From the system: sites that start together must not pause in step.
                rng = random.SystemRandom()
                agent = Agent(settings, folder, identity, transport, rng=rng)
                log.info("site %s: connecting to %s", identity.name, transport.url)
                try:
                    await agent.run(stop)
                except DismissedError as dismissed:
                    log.error("%s", dismissed.error)  # noqa: TRY400  it is for people
                    return dismissed.error.exit_code
    return 130 if signals and signals[0] is signal.SIGINT else 0


@contextlib.contextmanager
def _stopped_by_signals(stop: asyncio.Event, seen: list[signal.Signals]) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def caught(which: signal.Signals) -> None:
        seen.append(which)
        stop.set()

    handled = (signal.SIGTERM, signal.SIGINT)
    for which in handled:
        loop.add_signal_handler(which, caught, which)
    try:
        yield
    finally:
        for which in handled:
            loop.remove_signal_handler(which)
