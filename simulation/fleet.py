"""A coordinator, its fold service and its sites in one process, in virtual time.

Carries out the core's actions as the engine does: in order, journal first. A crash throws away
everything but the journal and the files; the next process is restored from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from coordinator import actions as a
from coordinator import stimuli as s
from coordinator.core import Core, CoreConfig
from coordinator.foldapi import (
    DropJob,
    Fold,
    FoldAnswer,
    Folded,
    FoldRequest,
    InitTaken,
    Recover,
    Refold,
    SaveCheckpoint,
    Screen,
    Screened,
    TakeInit,
)
from coordinator.journal import CheckpointMade, Entry, RoundClosed, VersionMade
from coordinator.sessions import Refused
from protocol.jobspec import JobSpec
from protocol.jobstates import JobStimulus
from protocol.layout import Layout
from protocol.messages import Event, Instruction
from simulation.bodies import Body, Files, encode_snapshot
from simulation.checkers import Checkers
from simulation.clock import VirtualClock
from simulation.faults import Faults
from simulation.site import Identity, SimSite

HEARTBEAT_SECONDS = 5.0
FOLD_SECONDS = 0.05


class FoldBackend(Protocol):
    """`coordinator.fold.FoldService`, or `FakeFold`."""

    def handle(self, request: FoldRequest) -> FoldAnswer:
        """The answer to a request."""


class _CrashError(Exception):
    """The coordinator's process dies here."""


class Fleet:
    """One simulated deployment."""

    def __init__(
        self,
        files: Files,
        fold: Callable[[], FoldBackend],
        *,
        config: CoreConfig | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.files = files
        self.config = config or CoreConfig()
        self.faults = faults or Faults()
        self.journal: list[Entry] = []
        self.sites: dict[str, SimSite] = {}
        self.specs: dict[str, JobSpec] = {}
        self.sent: list[tuple[str, Instruction]] = []
        self.crashes = 0
        self.up = True
        self.checkers = Checkers(self.config)
        self.core = Core(self.config)
        self._make_fold = fold
        self.fold = fold()
        self._process = 1
        self._actions = 0
        self._started_at = 0.0  # on the clock, at job time `_resumed_at`
        self._resumed_at = 0.0
        self._sessions: dict[str, int] = {}
        self._mail: dict[str, list[tuple[float, int, Instruction]]] = {}
        self._ticket = 0

    @property
    def now(self) -> float:
        """Job time: it stands still while the coordinator is down (design 4.9)."""
        return self._resumed_at + self.clock.now - self._started_at

    # ------------------------------------------------------------ what a test does

    def add(self, site: SimSite) -> SimSite:
        """Let a site dial in."""
        self.sites[site.name] = site
        self.hello(site)
        return site

    def submit(
        self, job: str, spec: JobSpec, init: tuple[Layout, list[float]] | None = None
    ) -> None:
        """Submit a job, with a file for version 0 or without."""
        self.specs[job] = spec
        facts = None
        if init is not None:
            self.files.put(f"{job}/init.body", encode_snapshot(job, 0, *init))
            facts = s.InitFacts()
        self.stimulate(s.JobSubmission(job=job, spec=spec, by="ann", init=facts))

    def command(self, job: str, what: JobStimulus) -> None:
        """Pause, resume, drain or stop."""
        self.stimulate(s.JobCommand(job=job, stimulus=what, by="ann"))

    def run(self, until: Callable[[], bool], seconds: float = 10_000.0) -> None:
        """Let things happen until the condition holds; AssertionError when it never does."""
        end = self.clock.now + seconds
        while not until():
            assert self.clock.step(), f"nothing is left to happen: {self.waiting()}"
            assert self.clock.now <= end, f"not in {seconds} s: {self.waiting()}"

    def run_for(self, seconds: float) -> None:
        """Let so much virtual time pass."""
        end = self.clock.now + seconds
        passed: list[bool] = []
        self.clock.at(end, lambda: passed.append(True))
        while not passed:
            self.clock.step()

    def waiting(self) -> dict[str, str]:
        """What each job waits for, for messages."""
        views = [self.core.view(job, self.now) for job in self.core.jobs()]
        return {view.id: f"{view.state}: {view.waiting or view.reason}" for view in views}

    def ended(self, job: str) -> bool:
        """Whether a job is over and everything of it is written."""
        return self.core.job(job).terminal and self.core.job(job).committing is None

    # ------------------------------------------------------------ the engine's part

    def stimulate(self, stimulus: s.Stimulus) -> bool:
        """Tell the core and do what it asks; False when the coordinator is, or goes, down."""
        if not self.up:
            return False
        try:
            for action in self.core.handle(stimulus, self.now):
                self._carry_out(action)
        except _CrashError:
            self.crash(self.faults.down_seconds)
            return False
        if not isinstance(stimulus, s.SiteHeard):  # that one settles nothing
            self.checkers.after(self.core, self.now)
        self._schedule_tick()
        return True

    def _schedule_tick(self) -> None:
        due = self.core.wake_at()
        if due is None:
            return
        self._ticket += 1
        ticket, process = self._ticket, self._process
        at = self.clock.now + max(due - self.now, 0.0) + 1e-6  # never early by rounding

        def tick() -> None:
            if ticket == self._ticket and process == self._process:
                self.stimulate(s.Tick())

        self.clock.at(at, tick)

    def _carry_out(self, action: a.AnyAction) -> None:
        self._actions += 1
        if self._actions in self.faults.crash_at:
            raise _CrashError
        match action:
            case a.Persist():
                for event in action.events:
                    entry = Entry(seq=len(self.journal) + 1, now=action.now, event=event)
                    self.journal.append(entry)
                    self.checkers.entry(entry)
            case a.Send():
                self._send(action)
            case a.Verdict():
                self._answer(action)
            case a.CloseSession():
                self._close(action)
            case a.Commit():
                self._later(lambda: self._commit(action))
            case a.TakeInit():
                self._later(lambda: self._take_init(action.job, "", action.spec, action.layout))
            case a.WriteCheckpoint():
                self._later(lambda: self._checkpoint(action))
            case a.Discard():
                for spool in action.spools:
                    self.files.remove(f"{action.job}/spools/{spool}")
            case a.KeepVersions():
                for version in sorted(set(range(action.oldest)) - set(action.besides)):
                    self.files.remove(f"{action.job}/versions/{version}.body")
            case a.Release():
                self._ask(DropJob(id=0, job=action.job, folder=self.files.folder(action.job)))

    def _later(self, call: Callable[[], None], seconds: float = FOLD_SECONDS) -> None:
        process = self._process
        self.clock.after(seconds, lambda: call() if process == self._process else None)

    def _ask(self, request: FoldRequest) -> FoldAnswer:
        answer = self.fold.handle(request)
        if answer.unknown_state:
            self._recover(request)
            answer = self.fold.handle(request)
        return answer

    def _recover(self, request: FoldRequest) -> None:
        job, checkpoint = request.job, 0
        cohorts: dict[int, RoundClosed] = {}
        folds: list[Refold] = []
        for event in (entry.event for entry in self.journal if entry.event.job == job):
            if isinstance(event, RoundClosed) and event.cohort:
                cohorts[event.version] = event
            elif isinstance(event, VersionMade) and event.version > 0:
                closed = cohorts[event.version]
                folds.append(
                    Refold(
                        version=event.version,
                        digest=event.digest,
                        cohort=closed.cohort,
                        active_sites=closed.active_sites,
                        additive=closed.additive,
                    )
                )
            elif isinstance(event, CheckpointMade):
                checkpoint = event.version
        answer = self.fold.handle(
            Recover(
                id=0,
                job=job,
                folder=request.folder,
                spec=self.specs[job],
                checkpoint=checkpoint,
                folds=tuple(fold for fold in folds if fold.version > checkpoint),
            )
        )
        assert not answer.fault, answer.fault

    def _commit(self, action: a.Commit) -> None:
        answer = self._ask(
            Fold(
                id=0,
                job=action.job,
                folder=self.files.folder(action.job),
                spec=action.spec,
                version=action.version,
                base_version=action.base_version,
                base_digest=action.base_digest,
                cohort=action.cohort,
                active_sites=action.active_sites,
                additive=action.additive,
            )
        )
        failed = s.CommitFacts(version=action.version, problem=answer.fault)
        facts = answer.facts if isinstance(answer, Folded) and not answer.fault else failed
        self.stimulate(s.CommitDone(job=action.job, facts=facts))

    def _take_init(self, job: str, site: str, spec: JobSpec, layout: Layout | None) -> None:
        request = TakeInit(id=0, job=job, folder=self.files.folder(job), spec=spec, layout=layout)
        answer = self._ask(request)
        failed = s.InitFacts(problem=answer.fault)
        facts = answer.facts if isinstance(answer, InitTaken) and not answer.fault else failed
        self.stimulate(s.InitComplete(job=job, site=site, facts=facts))

    def _checkpoint(self, action: a.WriteCheckpoint) -> None:
        answer = self._ask(
            SaveCheckpoint(
                id=0,
                job=action.job,
                folder=self.files.folder(action.job),
                version=action.version,
            )
        )
        self.stimulate(
            s.CheckpointDone(job=action.job, version=action.version, problem=answer.fault)
        )

    # ------------------------------------------------------------ the network

    def _send(self, action: a.Send) -> None:
        site = self.sites.get(action.site)
        session = self._sessions.get(action.site)
        self.sent.append((action.site, action.instruction))
        if site is None or session is None:
            return

        box = self._mail.setdefault(site.name, [])

        def deliver() -> None:
            if site.frozen:  # it stays in the mailbox
                self.clock.after(0.5, deliver)
                return
            while box and box[0][0] <= self.clock.now:
                _, of, instruction = box.pop(0)
                if self._sessions.get(site.name) == of and site.running:
                    site.receive(instruction)

        for delay in self.faults.delays():
            at = max(self.clock.now + delay, box[-1][0] if box else 0.0)
            box.append((at, session, action.instruction))
            self.clock.at(at, deliver)

    def _answer(self, action: a.Verdict) -> None:
        site, process = self.sites.get(action.site), self._process
        if site is None or action.attempt == 0:  # version 0 needs no bookkeeping at the site
            return
        identity = Identity(action.job, action.epoch, action.clock)
        delay = self.faults.delays()[0]

        def arrive() -> None:
            if process == self._process and site.running and not site.frozen:
                site.verdict(identity, action.verdict)

        self.clock.after(delay, arrive)

    def _close(self, action: a.CloseSession) -> None:
        self._sessions.pop(action.site, None)
        if action.site in self.sites:
            self._disconnect(self.sites[action.site], action.retry, action.reason)

    def _disconnect(self, site: SimSite, retry: bool, reason: str) -> None:
        """Its session is over: it learns that with its next request, once it can make one."""
        instance = site.instance

        def learn() -> None:
            if site.instance != instance or not site.connected:
                return
            if site.frozen:
                self.clock.after(0.5, learn)
                return
            site.disconnected(retry, reason)

        self.clock.after(0.01, learn)

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Make a call later."""
        self.clock.after(seconds, call)

    def hello(self, site: SimSite) -> None:
        """Open a session, now or as soon as somebody answers."""
        instance = f"{site.name}#{site.instance}"

        def dial() -> None:
            if not site.running or site.connected or instance != f"{site.name}#{site.instance}":
                return
            if site.frozen or not self.up:
                self.clock.after(0.5, dial)
                return
            found = self.core.admit(site.name, instance, self.now)
            if isinstance(found, Refused):
                site.refusals.append(found.reason)
                self.clock.after(1.0, dial)
                return
            self._ticket += 1  # a number that no other session has had
            self._sessions[site.name] = self._ticket
            stimulus = s.SiteConnected(site=site.name, role=site.role, instance=instance)
            if self.stimulate(stimulus):
                site.welcomed()
                self._beat(site, self._sessions[site.name])
            else:
                self.clock.after(0.5, dial)

        self.clock.after(0.01, dial)

    def _beat(self, site: SimSite, session: int) -> None:
        instance = site.instance

        def beat() -> None:
            same = self._sessions.get(site.name) == session and site.instance == instance
            if not (same and site.running):
                return
            if not site.frozen and self.up:
                self.stimulate(s.SiteHeard(site=site.name))
            self.clock.after(HEARTBEAT_SECONDS, beat)

        self.clock.after(HEARTBEAT_SECONDS, beat)

    def cut(self, site: SimSite) -> None:
        """Its connection closes, as when its process dies."""
        site.connected = False
        self._sessions.pop(site.name, None)
        self.stimulate(s.SiteClosed(site=site.name))

    def _reach(self, site: SimSite, call: Callable[[], None]) -> None:
        """A message of the site arrives once or twice, if its session still stands."""
        session, process = self._sessions.get(site.name), self._process

        def arrive() -> None:
            if process == self._process and self._sessions.get(site.name) == session:
                call()

        for delay in self.faults.delays():
            self.clock.after(delay, arrive)

    def report(self, site: SimSite, event: Event) -> None:
        """Post an event; it stays in the outbox until the coordinator took it."""

        def arrive() -> None:
            if self.stimulate(s.SiteReported(site=site.name, event=event)):
                site.outbox[:] = [kept for kept in site.outbox if kept is not event]

        self._reach(site, arrive)

    def upload(self, site: SimSite, identity: Identity, attempt: int, body: bytes) -> None:
        """Store an update, screen it, and let the core judge."""
        job = identity.job
        spool = f"{site.name}-{identity.epoch}-{identity.clock}-{attempt}.body"

        def arrive() -> None:
            if not self.up:
                return
            self.files.put(f"{job}/spools/{spool}", body)
            request = Screen(id=0, job=job, folder=self.files.folder(job), spool=spool)
            answer = self._ask(request)
            assert isinstance(answer, Screened), answer
            self.stimulate(
                s.UploadComplete(
                    job=job, site=site.name, spool=spool, wire_bytes=len(body), facts=answer.facts
                )
            )

        self._reach(site, arrive)

    def upload_init(self, site: SimSite, job: str, body: bytes) -> None:
        """Store version 0 and have it read, unless it is there already."""

        def arrive() -> None:
            if self.up and self.core.job(job).version is None:
                self.files.put(f"{job}/init.body", body)
                self._take_init(job, site.name, self.specs[job], None)

        self._reach(site, arrive)

    def fetch(self, job: str, version: int) -> Body:
        """A snapshot body; KeyError when it is gone."""
        return self.files.get(f"{job}/versions/{version}.body")

    # ------------------------------------------------------------ death and return

    def crash(self, down_seconds: float) -> None:
        """Kill the coordinator's process; another one starts after a while."""
        self.up = False
        self.crashes += 1
        self._process += 1
        self._sessions.clear()
        self.clock.after(down_seconds, self._restart)
        for site in self.sites.values():
            self._disconnect(site, True, "the coordinator is away")

    def _restart(self) -> None:
        self._resumed_at = self.journal[-1].now if self.journal else 0.0
        self._started_at = self.clock.now
        self.core = Core(self.config)
        self.core.restore(self.journal)
        self.checkers.restored(self.core)
        self.fold = self._make_fold()
        self.up = True
        try:
            for action in self.core.resume(self.now):
                self._carry_out(action)
        except _CrashError:
            self.crash(self.faults.down_seconds)
            return
        self._schedule_tick()
