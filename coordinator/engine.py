"""The engine: runs the core and carries out its actions; decides nothing itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from time import monotonic
from typing import Literal, Protocol

import msgspec

from coordinator.actions import AnyAction
from coordinator.stimuli import Stimulus
from protocol import limits
from protocol.jobstates import JobStimulus
from protocol.messages import Events, Hello, Instructions, Join, Joined, Receipt, SiteRole, Welcome
from protocol.views import (
    Health,
    Info,
    InitStored,
    JobDetail,
    JobList,
    JobRequest,
    JournalLine,
    JournalPage,
    SiteList,
    TokenCreated,
    TokenList,
    TokenRequest,
    UpdateList,
    VersionList,
)

ApiRole = Literal["viewer", "operator", "admin"]


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
    evaluation_timeout_seconds: float = 600.0
    upload_bytes_max: int = limits.UPLOAD_BYTES_MAX
    spool_bytes_max: int = limits.SPOOL_BYTES_MAX
    jobs_resident_bytes_max: int = limits.JOBS_RESIDENT_BYTES_MAX
    disk_reserve_bytes: int = 256 * limits.MIB
    downloads_max: int = 4
    database_pool: int = 5


class SiteAccount(msgspec.Struct, frozen=True, kw_only=True):
    """A site as the registry knows it."""

    name: str
    role: SiteRole
    state: Literal["active", "drained", "revoked"]
    public_key: str


class ApiAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Who a person's token stands for."""

    name: str
    role: ApiRole


class Upload(Protocol):
    """A body on its way in. Use: write every chunk, then exactly one of finish and broken."""

    async def write(self, chunk: bytes | memoryview) -> None:
        """Append a chunk; raises MalformedError, LimitError, BusyError (disk full)."""

    async def finish(self) -> Receipt:
        """The request's body has ended: screen and settle it when whole; else the offset so far."""

    async def broken(self) -> None:
        """The connection broke: keep the prefix of whole frames, so that it can be resumed."""


class InitFile(Protocol):
    """A person's safetensors file on its way in; used like an Upload."""

    async def write(self, chunk: bytes | memoryview) -> None:
        """Append a chunk; raises LimitError, BusyError."""

    async def finish(self) -> InitStored:
        """The id to submit the job with."""

    async def broken(self) -> None:
        """Remove what was stored."""


class Mailbox(Protocol):
    """Instructions for one site."""

    async def wait(self, cursor: int, timeout: float) -> Instructions:
        """What lies beyond `cursor`, at once if there is any; empty after `timeout` seconds."""


class Ledger(Protocol):
    """The account of socket bytes."""

    def add(self, site: str, job: str, up: int, down: int) -> None:
        """Count bytes; memory only. `job` may be empty (polls and events)."""


class Engine:
    """One coordinator: its core, database, spools and fold process.

    Everything is async and single-threaded for its callers; a cancelled call never leaves a batch
    of actions half done.
    """

    ledger: Ledger

    def __init__(self, settings: EngineSettings, clock: Callable[[], float] = monotonic) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------ life
    async def start(self) -> None:
        """Open the database (migrated), restore the core, remove stale files."""
        raise NotImplementedError

    async def stop(self, deadline: float = 4.0) -> None:
        """Tell the sites, write checkpoints, end the fold process; within `deadline` seconds."""
        raise NotImplementedError

    async def stimulate(self, stimulus: Stimulus) -> list[AnyAction]:
        """Run the core; returns after every action of the batch was begun, Persist durable."""
        raise NotImplementedError

    # ------------------------------------------------------------ who is who
    def authenticate_site(self, secret: str) -> SiteAccount:
        """The site of a bearer secret; UnauthenticatedError, or RemovedError when revoked."""
        raise NotImplementedError

    def authenticate_person(self, token: str) -> ApiAccount:
        """The holder of an API token; UnauthenticatedError."""
        raise NotImplementedError

    async def redeem(self, join: Join) -> Joined:
        """Use up a join token, once, and register the site (its proof was verified before)."""
        raise NotImplementedError

    async def create_token(self, request: TokenRequest, *, by: str) -> TokenCreated:
        """A new join token; its text is `ID.SECRET`, the caller adds address and CA."""
        raise NotImplementedError

    async def tokens(self) -> TokenList:
        """All join tokens."""
        raise NotImplementedError

    async def revoke_token(self, token_id: str, *, by: str) -> None:
        """NotFoundError when there is none."""
        raise NotImplementedError

    async def add_person(self, name: str, role: ApiRole) -> str:
        """A further API token, shown once; the first (admin) lies in data_dir/admin-token."""
        raise NotImplementedError

    # ------------------------------------------------------------ sessions
    async def open_session(self, site: str, hello: Hello) -> Welcome:
        """ConflictError while a live namesake holds the name."""
        raise NotImplementedError

    def check_session(self, site: str, session: str) -> None:
        """ConflictError when this session is not the site's open one."""
        raise NotImplementedError

    def heard(self, site: str) -> None:
        """A byte came from the site; memory only, cheap enough for every chunk."""
        raise NotImplementedError

    async def close(self, site: str) -> None:
        """Its long poll's connection closed; a short grace remains."""
        raise NotImplementedError

    async def leave(self, site: str, reason: str) -> None:
        """It said goodbye."""
        raise NotImplementedError

    def mailbox(self, site: str) -> Mailbox:
        """The mailbox of the site's open session; ConflictError without one."""
        raise NotImplementedError

    async def site_events(self, site: str, session: str, events: Events) -> None:
        """Tell the core, each event once, whatever was sent twice."""
        raise NotImplementedError

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
    ) -> Upload:
        """An update of `length` more bytes from `offset` on.

        ConflictError when `offset` is not where the spool ends (details: offset), or when another
        upload of it is open; LimitError before any data is taken.
        """
        raise NotImplementedError

    async def upload_state(
        self, *, job: str, site: str, epoch: int, clock: int, attempt: int
    ) -> Receipt:
        """Where an upload stands: the verdict if there is one, else the stored offset."""
        raise NotImplementedError

    async def begin_init(self, *, job: str, site: str, offset: int, length: int) -> Upload:
        """Version 0 from the site that was asked for it; as begin_upload."""
        raise NotImplementedError

    async def begin_init_file(self, length: int) -> InitFile:
        """A safetensors file from a person, to be named in a JobRequest."""
        raise NotImplementedError

    def version_file(self, job: str, version: int) -> Path:
        """The snapshot body of a version; NotFoundError."""
        raise NotImplementedError

    def download_slot(self) -> AbstractAsyncContextManager[None]:
        """One of `downloads_max`; waits for its turn (PC-031)."""
        raise NotImplementedError

    async def export(self, job: str, version: int | None = None) -> tuple[Path, tuple[str, ...]]:
        """A safetensors file (the caller deletes it after sending) and the tensors it lacks."""
        raise NotImplementedError

    # ------------------------------------------------------------ people
    async def submit(self, request: JobRequest, by: str) -> str:
        """The id of the new job."""
        raise NotImplementedError

    async def command(self, job: str, stimulus: JobStimulus, by: str, reason: str = "") -> None:
        """pause, resume, drain, stop; ConflictError when its state does not allow it."""
        raise NotImplementedError

    async def delete(self, job: str, by: str) -> None:
        """Remove an ended job, its files and rows; ConflictError while it is not ended."""
        raise NotImplementedError

    async def site_command(
        self, site: str, what: Literal["drain", "revoke"], by: str, reason: str = ""
    ) -> None:
        """End a site's part in all jobs; a revoked one never comes back."""
        raise NotImplementedError

    async def jobs(self) -> JobList:
        """All jobs, newest first."""
        raise NotImplementedError

    async def job(self, job: str) -> JobDetail:
        """One job; NotFoundError."""
        raise NotImplementedError

    async def versions(self, job: str, after: int = -1) -> VersionList:
        """Versions above `after`, at most 500."""
        raise NotImplementedError

    async def updates(self, job: str, after: int = 0) -> UpdateList:
        """Settled updates beyond the first `after`, at most 500."""
        raise NotImplementedError

    async def journal(self, job: str, after: int = 0) -> JournalPage:
        """Journal rows with a sequence number above `after`, at most 500."""
        raise NotImplementedError

    async def sites(self) -> SiteList:
        """All sites ever joined."""
        raise NotImplementedError

    def subscribe(self, after: int = 0, job: str = "") -> AsyncIterator[JournalPage | None]:
        """Journal rows as they come, from `after` on; None every 15 s so that a dead peer shows."""
        raise NotImplementedError

    def last_seq(self) -> int:
        """Sequence number of the newest journal row."""
        raise NotImplementedError

    def health(self) -> Health:
        """ok, degraded (disk full, fold process down) or failing (database)."""
        raise NotImplementedError

    def info(self) -> Info:
        """Name, versions, memory of both processes."""
        raise NotImplementedError


__all__ = ["ApiAccount", "ApiRole", "Engine", "EngineSettings", "JournalLine", "SiteAccount"]
