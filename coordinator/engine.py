"""The engine: core, database, spools, fold process and sites put together; it decides nothing.

`runner` runs the core, `desk` receives sites, `intake` takes bulk in, `carrier` folds. What takes
long comes back to the core as a stimulus. This is all that the HTTP layer sees of them.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from time import monotonic, time
from typing import Final, Literal

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from coordinator import actions as a
from coordinator import foldclient, queries
from coordinator.actions import AnyAction
from coordinator.beat import next_second
from coordinator.carrier import Carrier
from coordinator.core import Core, CoreConfig
from coordinator.desk import Desk
from coordinator.disk import DiskWatch, FolderLock, in_thread, remove_stale
from coordinator.feed import Feed
from coordinator.foldclient import FoldClient, FoldError, memory_mb
from coordinator.intake import InitFile, Intake
from coordinator.journal import Commanded
from coordinator.ledger import Ledger
from coordinator.mailbox import Mailbox
from coordinator.registry import ApiAccount, ApiRole, Registry, SiteAccount
from coordinator.runner import Runner
from coordinator.spool import JobFolders, Quota, UploadKey
from coordinator.stimuli import CheckpointDone, DiskState, JobCommand, JobSubmission, Stimulus
from coordinator.store import Store, sqlite_url
from coordinator.uploads import SettledUpload, Upload
from protocol import limits
from protocol.errors import (
    InvalidFileError,
    NotFoundError,
    RefusedError,
    SkerryError,
)
from protocol.jobstates import JobStimulus
from protocol.messages import Events, Hello, Join, Joined, Receipt, Welcome
from protocol.version import PROTOCOL, SOFTWARE
from protocol.views import (
    Health,
    Info,
    JobDetail,
    JobList,
    JobRequest,
    JobView,
    JournalPage,
    SiteList,
    SiteView,
    TokenCreated,
    TokenList,
    TokenRequest,
    UpdateList,
    VersionList,
)

log = logging.getLogger("coordinator.engine")

_LEDGER_EVERY: Final = 3  # looks at the disk between two writes of the ledger
_LEDGER_IDLE_EVERY: Final = 30  # the same while no job moves a byte: polls alone are not pressing
_STOP_SHARE: Final = 0.7  # of the deadline, for uploads and checkpoints


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine needs to know; times in seconds, sizes in bytes."""

    data_dir: Path
    database_url: str = ""  # empty: SQLite in data_dir
    name: str = "coordinator"  # what sites and people are told
    agents_url: str = ""
    people_url: str = ""
    ca_fingerprint: str = ""
    lease_seconds: float = limits.LEASE_SECONDS
    grace_seconds: float = limits.CLOSED_CONNECTION_GRACE_SECONDS
    long_poll_seconds: float = limits.LONG_POLL_SECONDS
    site_jobs_max: int = 1
    init_timeout_seconds: float = 3600.0
    evaluation_timeout_seconds: float = 600.0
    upload_bytes_max: int = limits.UPLOAD_BYTES_MAX
    spool_bytes_max: int = limits.SPOOL_BYTES_MAX
    jobs_resident_bytes_max: int = limits.JOBS_RESIDENT_BYTES_MAX
    disk_reserve_bytes: int = 256 * limits.MIB
    downloads_max: int = 4
    database_pool: int = 5
    rebuild_tables: bool = False  # projections anew from the journal, at start
    fold_command: tuple[str, ...] = foldclient.COMMAND

    def core_config(self) -> CoreConfig:
        """What of this the core decides by."""
        return CoreConfig(
            lease_seconds=self.lease_seconds,
            grace_seconds=self.grace_seconds,
            site_jobs_max=self.site_jobs_max,
            init_timeout_seconds=self.init_timeout_seconds,
            evaluation_timeout_seconds=self.evaluation_timeout_seconds,
            upload_bytes_max=self.upload_bytes_max,
            spool_bytes_max=self.spool_bytes_max,
            jobs_resident_bytes_max=self.jobs_resident_bytes_max,
        )


class Engine:
    """One coordinator.

    `failed` is set when this process cannot go on (somebody else writes its journal, an internal
    error): it must be restarted; `health()` says why.
    """

    def __init__(
        self,
        settings: EngineSettings,
        clock: Callable[[], float] = monotonic,
        *,
        wall: Callable[[], float] = time,
        disk: DiskWatch | None = None,
    ) -> None:
        self.settings = settings
        self.ledger = Ledger()
        self._lock = FolderLock(settings.data_dir)
        self._folders = JobFolders(settings.data_dir)
        self._disk = disk or DiskWatch(settings.data_dir, settings.disk_reserve_bytes)
        self._quota = Quota(
            spool_bytes_max=settings.spool_bytes_max, upload_bytes_max=settings.upload_bytes_max
        )
        url = settings.database_url or sqlite_url(settings.data_dir / "skerry.db")
        self._store = Store(url, pool=settings.database_pool)
        self._registry = Registry(self._store, wall)
        self._feed = Feed(self._store)
        self._core = Core(settings.core_config())
        self._runner = Runner(
            self._core,
            self._store,
            self._feed,
            clock=clock,
            wall=wall,
            carry_out=self._carry_out,
            on_power=self._set_power,
        )
        self._desk = Desk(self._registry, self._runner)
        self._fold = FoldClient(
            command=settings.fold_command,
            environment=os.environ
            | {"SKERRY_JOBS_RESIDENT_BYTES_MAX": str(settings.jobs_resident_bytes_max)},
        )
        self._intake = Intake(
            folders=self._folders,
            quota=self._quota,
            disk=self._disk,
            store=self._store,
            fold=self._fold,
            stimulate=self.stimulate,
            is_open=self._is_open,
        )
        self._carrier = Carrier(
            folders=self._folders,
            quota=self._quota,
            store=self._store,
            fold=self._fold,
            stimulate=self.stimulate,
            room=self._wait_for_room,
            kept=self._spools_kept,
            busy=self._intake.uploads.busy,
        )
        self._fold.recover = self._carrier.recover
        self._downloads = asyncio.Semaphore(settings.downloads_max)
        self._housekeeping: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._running = False

    @property
    def failed(self) -> asyncio.Event:
        """Set when this process cannot go on."""
        return self._runner.failed

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Open the database (migrated), restore the core, remove stale files.

        Raises:
            ConflictError: another coordinator works here, or a newer release did.
        """
        self.settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock.take()
        try:
            await self._open()
        except BaseException:
            await self._store.close()
            self._lock.release()
            raise

    async def _open(self) -> None:
        for path in (self._folders.root, self._folders.inits, self._folders.exports):
            path.mkdir(exist_ok=True)
        entries, size = await in_thread(self._tidy)
        if entries:
            log.info("removed %d interrupted writes (%d bytes).", entries, size)
        await self._store.open()
        if self.settings.rebuild_tables:
            log.info("made all tables anew from %d journal rows.", await self._store.rebuild())
        await self._registry.open(self.settings.data_dir / "admin-token")
        self.ledger.load(await queries.load_ledger(self._store))
        await self._runner.restore()
        for job in self._core.jobs():
            await self._carrier.prune(job)
        await in_thread(self._quota.scan, self._folders.root)
        self._running = True
        await self._runner.start()
        await self._look_at_disk()
        self._housekeeping = asyncio.create_task(self._keep_house())
        self._runner.spawn(self._fold.start())

    def _tidy(self) -> tuple[int, int]:
        for path in self._folders.exports.glob("*.safetensors"):
            path.unlink(missing_ok=True)  # whoever waited for it is gone
        self._intake.remove_old_inits()
        return remove_stale(self.settings.data_dir)

    async def stop(self, deadline: float = 4.0) -> None:
        """Break uploads off, write checkpoints, end the fold process; within `deadline` seconds.

        What cannot be finished in time is given up: nothing needs an orderly stop.
        """
        if not self._running:
            return
        self._running = False
        try:
            async with asyncio.timeout(deadline * _STOP_SHARE):
                await self._intake.uploads.stop()
                await self._checkpoint_all()
        except TimeoutError:
            log.info("stopping without the last checkpoints: out of time.")
        except SkerryError as error:
            log.info("stopping without the last checkpoints: %s", error.message)
        self._feed.close()
        self._desk.stop()
        await self._fold.stop()
        await self._runner.stop()
        if self._housekeeping is not None:
            self._housekeeping.cancel()
            await asyncio.gather(self._housekeeping, return_exceptions=True)
        await self._flush_ledger()
        await self._store.close()
        self._lock.release()

    async def _checkpoint_all(self) -> None:
        for name in self._core.jobs():
            job = self._core.job(name)
            version = job.number
            if not job.terminal and version > max(job.checkpoint, 0):
                await self._carrier.save(name, version)
                await self.stimulate(CheckpointDone(job=name, version=version))

    def _is_open(self, key: UploadKey) -> bool:
        """Whether the core waits for this very update."""
        task = self._core.job(key.job).task(key.site)
        wanted = (key.epoch, key.clock, key.attempt, "training")
        return task is not None and (task.epoch, task.clock, task.attempt, task.state) == wanted

    def _spools_kept(self, name: str) -> frozenset[str] | None:
        """What the core counts on, and what its sites may send or go on to send; None: all."""
        if name not in self._core.jobs():
            return frozenset()
        job = self._core.job(name)
        if job.spec.keep.updates:
            return None  # those in versions are for replays; the core discards all others itself
        tasks = [*job.carried.items(), *(job.round.tasks.items() if job.round is not None else ())]
        coming = {UploadKey(name, site, t.epoch, t.clock, t.attempt).spool for site, t in tasks}
        if job.init_site and job.number < 0:
            coming.add(self._folders.init_part(name, job.init_site).name)
        return self._core.spools(name) | coming

    # ------------------------------------------------------------ the core

    async def stimulate(self, stimulus: Stimulus) -> list[AnyAction]:
        """Run the core; returns after every action of the batch was begun, Persist durable.

        Raises:
            SkerryError: the core refuses; nothing has changed.
        """
        return await self._runner.stimulate(stimulus)

    def _carry_out(self, action: AnyAction) -> None:
        match action:
            case a.Send():
                self._desk.send(action)
            case a.CloseSession():
                self._desk.close_session(action)
            case a.Commit():
                self._runner.spawn(self._carrier.commit(action))
            case a.TakeInit():
                self._runner.spawn(self._carrier.take_init(action))
            case a.WriteCheckpoint():
                self._runner.spawn(self._carrier.checkpoint(action))
            case a.Discard():
                self._runner.spawn(self._carrier.discard(action))
            case a.KeepVersions():
                self._runner.spawn(self._carrier.keep_versions(action))
            case a.Release():
                self._runner.spawn(self._release(action))
            case a.Verdict() | a.Persist():
                pass  # uploads read their verdict from the batch; the runner has persisted

    async def _release(self, action: a.Release) -> None:
        await self._flush_ledger()  # what the job cost stands for good, whatever happens to us
        await self._carrier.release(action)

    def _set_power(self, power: bool) -> None:
        self._store.power = self._intake.uploads.power = power

    # ------------------------------------------------------------ housekeeping

    async def _keep_house(self) -> None:
        looks = 0
        while True:
            await next_second()
            await self._look_at_disk()
            looks += 1
            every = _LEDGER_EVERY if self.ledger.pressing else _LEDGER_IDLE_EVERY
            if looks % every == 0:
                await self._flush_ledger()

    async def _look_at_disk(self) -> None:
        self._disk.look()
        if self._disk.full == self._room.is_set():
            await self._tell_disk_state()

    async def _tell_disk_state(self) -> None:
        if self._disk.full:
            self._room.clear()
            log.warning("%s.", self._disk.reason)
        else:
            self._room.set()
            log.info("there is room on the disk again.")
        self._runner.post(DiskState(full=self._disk.full, reason=self._disk.reason))

    async def _wait_for_room(self, error: FoldError) -> None:
        self._disk.report(OSError(errno.ENOSPC, error.message))
        if self._room.is_set():
            await self._tell_disk_state()
        await self.room()

    async def room(self) -> None:
        """Wait until the disk has room."""
        await self._room.wait()

    async def _flush_ledger(self) -> None:
        rows = self.ledger.take_dirty()
        if not rows:
            return
        try:
            await queries.save_ledger(self._store, rows)
        except (SQLAlchemyError, OSError):
            self.ledger.put_back(rows)  # the journal has the same trouble, and says so
        except BaseException:
            self.ledger.put_back(rows)
            raise

    # ------------------------------------------------------------ who is who

    def authenticate_site(self, secret: str) -> SiteAccount:
        """The site of a bearer secret; UnauthenticatedError, or RemovedError when revoked."""
        return self._registry.authenticate_site(secret)

    def authenticate_person(self, token: str) -> ApiAccount:
        """The holder of an API token; UnauthenticatedError."""
        return self._registry.authenticate_person(token)

    async def redeem(self, join: Join) -> Joined:
        """Use up a join token, once, and register the site (its proof was verified before)."""
        site, secret = await self._registry.redeem(join)
        log.info("site %s has joined.", site)
        return Joined(site=site, secret=secret, coordinator=self.settings.name, protocol=PROTOCOL)

    async def create_token(self, request: TokenRequest, *, by: str) -> TokenCreated:
        """A new join token; its text is `ID.SECRET`, the caller adds address and CA."""
        secret, view = await self._registry.create_token(request, by=by)
        return TokenCreated(token=f"{view.id}.{secret}", view=view)

    async def tokens(self) -> TokenList:
        """All join tokens."""
        return await self._registry.tokens()

    async def revoke_token(self, token_id: str, *, by: str) -> None:
        """NotFoundError when there is none."""
        await self._registry.revoke_token(token_id)
        log.info("join token %s was revoked by %s.", token_id, by)

    async def add_person(self, name: str, role: ApiRole) -> str:
        """A further API token, shown once; the first (admin) lies in data_dir/admin-token."""
        return await self._registry.add_person(name, role)

    async def remove_person(self, name: str) -> None:
        """Take an API token back; NotFoundError."""
        await self._registry.remove_person(name)

    # ------------------------------------------------------------ sites

    async def open_session(self, site: str, hello: Hello) -> Welcome:
        """A new session; ConflictError while a live namesake holds the name."""
        session = await self._desk.open(site, hello)
        return Welcome(
            session=session.id,
            site=site,
            coordinator=self.settings.name,
            protocol=PROTOCOL,
            lease_seconds=self.settings.lease_seconds,
            long_poll_seconds=self.settings.long_poll_seconds,
            cursor=0,
        )

    def check_session(self, site: str, session: str) -> None:
        """ConflictError when this session is not the site's open one."""
        self._desk.check(site, session)

    def heard(self, site: str) -> None:
        """A byte came from the site; memory only, cheap enough for every chunk."""
        self._core.heard(site, self._runner.now())

    async def close(self, site: str) -> None:
        """Its long poll's connection closed; a short grace remains."""
        await self._desk.close(site)

    async def leave(self, site: str, reason: str) -> None:
        """It said goodbye."""
        await self._desk.leave(site, reason)

    def mailbox(self, site: str) -> Mailbox:
        """The mailbox of the site's open session; ConflictError without one."""
        return self._desk.session(site).mailbox

    async def site_events(self, site: str, session: str, events: Events) -> None:
        """Tell the core, each event once, whatever was sent twice."""
        await self._desk.take_events(site, session, events)

    async def site_command(
        self, site: str, what: Literal["drain", "revoke"], by: str, reason: str = ""
    ) -> None:
        """End a site's part in all jobs; a revoked one never comes back."""
        state: Literal["drained", "revoked"] = "revoked" if what == "revoke" else "drained"
        await self._desk.dismiss(site, state, f"{state} by {by}" + (f": {reason}" * bool(reason)))

    async def sites(self) -> SiteList:
        """All sites ever joined."""
        self.ledger.refresh()
        return SiteList(sites=tuple(self._site_view(site) for site in self._registry.sites()))

    def _site_view(self, site: SiteAccount) -> SiteView:
        up, down = self.ledger.site(site.name)
        state: Literal["connected", "away", "drained", "revoked"]
        if site.state == "active":
            state = "connected" if site.name in self._desk else "away"
        else:
            state = site.state
        return SiteView(
            name=site.name,
            role=site.role,
            state=state,
            last_heard_seconds=self._core.last_heard_seconds(site.name, self._runner.now()),
            joined_at=site.joined_at,
            software=site.software,
            tasks=site.tasks,
            job=self._core.job_of(site.name),
            bytes_up=up,
            bytes_down=down,
        )

    # ------------------------------------------------------------ bulk

    async def begin_upload(
        self,
        *,
        job: str,
        site: str,
        epoch: int,
        clock: int,
        attempt: int,
        offset: int,
        length: int,
    ) -> Upload | SettledUpload:
        """An update of `length` more bytes from `offset` on.

        Raises:
            ConflictError: `offset` is not where the stored part ends (details: offset), or the
                body is whole and being settled.
            LimitError: larger than may ever be taken. BusyError: no room for now.
            NotFoundError: no such job. RefusedError: the site is no member of it.
        """
        self._check_member(job, site)
        key = UploadKey(job, site, epoch, clock, attempt)
        return await self._intake.begin_upload(key, offset=offset, length=length)

    async def upload_state(
        self, *, job: str, site: str, epoch: int, clock: int, attempt: int
    ) -> Receipt:
        """Where an upload stands: the verdict if there is one, else the stored offset."""
        self._check_job(job)
        return await self._intake.upload_state(UploadKey(job, site, epoch, clock, attempt))

    async def begin_init(self, *, job: str, site: str, offset: int, length: int) -> Upload:
        """Version 0 from the site that was asked for it; as begin_upload."""
        self._check_member(job, site)
        spec = await queries.job_spec(self._store, job)
        return await self._intake.begin_init(job, site, spec, offset=offset, length=length)

    async def begin_init_file(self, length: int) -> InitFile:
        """A safetensors file from a person, to be named in a JobRequest."""
        return await self._intake.begin_init_file(length)

    def version_file(self, job: str, version: int) -> Path:
        """The snapshot body of a version; NotFoundError."""
        self._check_job(job)
        path = self._folders.version(job, version)
        if not path.exists():
            raise NotFoundError(f"version {version} of job {job} is not kept here.")
        return path

    def download_slot(self) -> AbstractAsyncContextManager[None]:
        """One of `downloads_max`, so that many newcomers do not choke each other (PC-031)."""
        return self._downloads

    async def export(self, job: str, version: int | None = None) -> tuple[Path, tuple[str, ...]]:
        """A safetensors file (the caller removes it after sending) and the tensors it lacks."""
        view = self._view(job)
        version = view.version if version is None else version
        target = self._folders.exports / f"{job}-{version}-{secrets.token_hex(4)}.safetensors"
        self._disk.check_room(view.model_bytes, "an export")
        return target, await self._carrier.export(job, version, target)

    # ------------------------------------------------------------ jobs

    async def submit(self, request: JobRequest, by: str) -> str:
        """The id of the new job.

        Raises:
            InvalidFileError: its file for version 0 cannot be used.
        """
        job = f"j-{secrets.token_hex(4)}"
        self._folders.make(job)
        try:
            facts = None
            if request.init:
                facts = await self._intake.claim_init_file(request.init, job, request.spec)
                if facts.problem:
                    raise InvalidFileError(f"the file for version 0 is refused: {facts.problem}")
            await self.stimulate(JobSubmission(job=job, spec=request.spec, by=by, init=facts))
        except SkerryError:
            await self._carrier.remove_job(job)
            raise
        return job

    async def command(self, job: str, stimulus: JobStimulus, by: str, reason: str = "") -> None:
        """pause, resume, drain, stop; ConflictError when its state does not allow it."""
        await self.stimulate(JobCommand(job=job, stimulus=stimulus, by=by, reason=reason))

    async def delete(self, job: str, by: str) -> None:
        """Remove an ended job, its files and rows; ConflictError while it is not ended."""
        self._check_job(job)

        def step(now: float) -> list[AnyAction]:
            self._core.forget(job)
            # A row of no job keeps the journal's numbers growing when the job's own rows are gone.
            return [a.Persist(now=now, events=(Commanded(by=by, what=f"delete {job}"),))]

        await self._runner.step(step)
        await self._carrier.remove_job(job)
        await self._store.delete_job(job)
        self.ledger.forget_job(job)
        self._feed.forget_job(job)

    def _check_job(self, job: str) -> None:
        if job not in self._core.jobs():
            raise queries.no_such_job(job)

    def _check_member(self, job: str, site: str) -> None:
        if not any(member.site == site for member in self._view(job).sites):
            raise RefusedError(f"site {site!r} takes no part in job {job}.")

    def _view(self, job: str) -> JobView:
        self._check_job(job)
        return self._core.view(job, self._runner.now())

    async def jobs(self) -> JobList:
        """All jobs, newest first."""
        extras = await queries.job_extras(self._store)
        self.ledger.refresh()
        views = [self._view(job) for job in reversed(self._core.jobs())]
        return JobList(
            jobs=tuple(queries.complete(view, extras.get(view.id), self.ledger) for view in views)
        )

    async def job(self, job: str) -> JobDetail:
        """One job; NotFoundError."""
        self._check_job(job)
        spec = await queries.job_spec(self._store, job)
        extras = await queries.job_extras(self._store, [job])
        self.ledger.refresh()
        return JobDetail(
            job=queries.complete(self._view(job), extras.get(job), self.ledger), spec=spec
        )

    async def versions(self, job: str, after: int = -1) -> VersionList:
        """Versions above `after`, at most 500."""
        self._check_job(job)
        return VersionList(versions=await queries.versions(self._store, job, after))

    async def updates(self, job: str, after: int = 0) -> UpdateList:
        """Settled updates beyond the first `after`, at most 500."""
        self._check_job(job)
        return UpdateList(updates=await queries.updates(self._store, job, after))

    async def journal(self, job: str, after: int = 0) -> JournalPage:
        """Journal rows with a sequence number above `after`, at most 500."""
        self._check_job(job)
        return JournalPage(entries=tuple(await self._store.lines(after, job=job)))

    def subscribe(self, after: int = 0, job: str = "") -> AsyncIterator[JournalPage | None]:
        """Journal rows as they come, from `after` on; None every 15 s so that a dead peer shows."""
        return self._feed.follow(after, job)

    def last_seq(self) -> int:
        """Sequence number of the newest journal row."""
        return self._store.last_seq

    # ------------------------------------------------------------ itself

    def health(self) -> Health:
        """ok, degraded (disk full, fold process in trouble) or failing (no journal, or wrong)."""
        stopped = "" if self._running else "the coordinator is not running."
        if reason := stopped or self._runner.fatal or self._runner.trouble:
            return Health(status="failing", reasons=(reason,))
        reasons = tuple(reason for reason in (self._disk.reason, self._fold.trouble) if reason)
        return Health(status="degraded" if reasons else "ok", reasons=reasons)

    def info(self) -> Info:
        """Name, versions, memory of both processes."""
        own, own_peak = memory_mb("self") or (0.0, 0.0)
        fold, fold_peak, fold_idle = self._fold.memory()
        return Info(
            coordinator=self.settings.name,
            software=SOFTWARE,
            protocol=PROTOCOL,
            agents_url=self.settings.agents_url,
            people_url=self.settings.people_url,
            ca_fingerprint=self.settings.ca_fingerprint,
            process_mb=own,
            process_peak_mb=own_peak,
            fold_mb=fold,
            fold_peak_mb=fold_peak,
            fold_idle_mb=fold_idle,
        )


__all__ = [
    "ApiAccount",
    "ApiRole",
    "Engine",
    "EngineSettings",
    "InitFile",
    "SettledUpload",
    "SiteAccount",
    "Upload",
]
