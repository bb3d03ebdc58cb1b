"""An engine without core, database or disk: it answers from memory and remembers what it was told.

`running` serves it on real sockets through the real listeners.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from coordinator import ports, tls
from coordinator.engine import ApiAccount, SiteAccount
from coordinator.http import Services
from coordinator.ledger import Ledger
from coordinator.mailbox import Mailbox
from coordinator.server import Addresses, listening
from coordinator.settings import CoordinatorSettings
from protocol.errors import (
    ConflictError,
    LimitError,
    NotFoundError,
    RemovedError,
    UnauthenticatedError,
)
from protocol.jobspec import JobSpec
from protocol.messages import Events, Hello, Join, Joined, Receipt, Welcome
from protocol.version import PROTOCOL, SOFTWARE
from protocol.views import (
    Health,
    Info,
    InitStored,
    JobDetail,
    JobList,
    JobRequest,
    JobSiteView,
    JobView,
    JournalLine,
    JournalPage,
    SiteList,
    SiteView,
    TokenCreated,
    TokenList,
    TokenRequest,
    TokenView,
    UpdateList,
    VersionList,
    VersionView,
)

TOKENS = {"viewer": "ska1.viewer", "operator": "ska1.operator", "admin": "ska1.admin"}
SITE_SECRET = "sks1.edge-1"
SESSION = "session-1"
JOB = "j-1"
SPEC = msgspec.convert(
    {"name": "digits", "task": {"name": "digits"}, "period": {"steps": 5}, "stop": {"versions": 3}},
    JobSpec,
)


class FakeUpload:
    """Counts and hashes what it is given."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.bytes = 0
        self.hash = hashlib.sha256()
        self.ended = ""

    async def write(self, chunk: bytes | memoryview) -> None:
        self.bytes += len(chunk)
        self.hash.update(chunk)
        self.engine.stored.set()

    async def finish(self) -> Any:
        self.ended = "finished"
        return Receipt(offset=self.bytes, verdict="counted")

    async def broken(self) -> None:
        self.ended = "broken"
        self.engine.broke.set()


class FakeInit(FakeUpload):
    async def finish(self) -> Any:
        self.ended = "finished"
        return InitStored(init="i-1", bytes=self.bytes)


class FakeEngine:
    def __init__(self, folder: Path, *, upload_bytes_max: int = 1 << 40) -> None:
        self.folder = folder
        self.upload_bytes_max = upload_bytes_max
        self.ledger = Ledger()
        self.told: list[tuple[str, Any]] = []
        self.heard_of: dict[str, int] = {}
        self.boxes: dict[str, Mailbox] = {}
        self.uploads: list[FakeUpload] = []
        self.stored = asyncio.Event()
        self.broke = asyncio.Event()
        self.closed = asyncio.Event()
        self.hearing = asyncio.Event()
        self.pages: asyncio.Queue[JournalPage | None] = asyncio.Queue()
        self.spec = SPEC
        self.names: dict[str, str] = {SITE_SECRET: "edge-1"}
        self.members = {"edge-1"}
        self.health_now = Health(status="ok")
        self.slots = asyncio.Semaphore(4)
        self.missing: tuple[str, ...] = ()
        self.failure: Exception | None = None

    # -------------------------------------------------- who is who
    def authenticate_site(self, secret: str) -> SiteAccount:
        if secret == "sks1.revoked":
            raise RemovedError("this site was removed.")
        if secret not in self.names:
            raise UnauthenticatedError("this secret is not known here.")
        return SiteAccount(
            name=self.names[secret], role="site", state="active", public_key="00" * 32
        )

    def authenticate_person(self, token: str) -> ApiAccount:
        for role, known in TOKENS.items():
            if token == known:
                return ApiAccount(name=f"a-{role}", role=role)  # type: ignore[arg-type]
        raise UnauthenticatedError("this token is not known here.")

    async def redeem(self, join: Join) -> Joined:
        self.told.append(("redeem", join))
        if join.token_id != "00" * 8:
            raise UnauthenticatedError("this token is not known here.")
        return Joined(site=join.name, secret="sks1.new", coordinator="skerry", protocol=PROTOCOL)

    async def create_token(self, request: TokenRequest, *, by: str) -> TokenCreated:
        view = TokenView(
            id="ab" * 8, site=request.site, role=request.role, created_at=1.0, expires_at=2.0
        )
        return TokenCreated(token=f"{'ab' * 8}.{'cd' * 32}", view=view)

    async def tokens(self) -> TokenList:
        return TokenList(tokens=())

    async def revoke_token(self, token_id: str, *, by: str) -> None:
        if token_id != "ab" * 8:
            raise NotFoundError(f"there is no token {token_id}.")
        self.told.append(("revoke_token", by))

    # -------------------------------------------------- sessions
    async def open_session(self, site: str, hello: Hello) -> Welcome:
        self.boxes.setdefault(site, Mailbox())
        return Welcome(
            session=SESSION,
            site=site,
            coordinator="skerry",
            protocol=PROTOCOL,
            lease_seconds=15.0,
            long_poll_seconds=25.0,
            cursor=0,
        )

    def check_session(self, site: str, session: str) -> None:
        if session != SESSION:
            raise ConflictError("this session is over.")

    def heard(self, site: str) -> None:
        self.heard_of[site] = self.heard_of.get(site, 0) + 1
        self.hearing.set()

    async def close(self, site: str) -> None:
        self.told.append(("close", site))
        self.closed.set()

    async def leave(self, site: str, reason: str) -> None:
        self.told.append(("leave", (site, reason)))

    def mailbox(self, site: str) -> Mailbox:
        return self.boxes.setdefault(site, Mailbox())

    async def site_events(self, site: str, session: str, events: Events) -> None:
        self.told.append(("events", (site, session, events)))

    # -------------------------------------------------- bulk
    def _begin(self, job: str, upload: FakeUpload, length: int) -> FakeUpload:
        self._known(job)
        if length > self.upload_bytes_max:
            raise LimitError(
                f"an upload of {length} bytes is above upload_bytes_max = {self.upload_bytes_max}.",
                "Raise upload_bytes_max at the coordinator.",
                details={"limit": self.upload_bytes_max, "found": length},
            )
        self.uploads.append(upload)
        return upload

    async def begin_upload(self, **identity: Any) -> FakeUpload:
        self.told.append(("upload", identity))
        return self._begin(identity["job"], FakeUpload(self), identity["length"])

    async def upload_state(self, **identity: Any) -> Receipt:
        self._known(identity["job"])
        return Receipt(offset=7)

    async def begin_init(self, *, job: str, site: str, offset: int, length: int) -> FakeUpload:
        return self._begin(job, FakeUpload(self), length)

    async def begin_init_file(self, length: int) -> FakeInit:
        upload = FakeInit(self)
        self._begin(JOB, upload, length)
        return upload

    def version_file(self, job: str, version: int) -> Path:
        return self.folder / f"{version}.body"

    @contextlib.asynccontextmanager
    async def download_slot(self) -> AsyncIterator[None]:
        async with self.slots:
            yield

    async def export(self, job: str, version: int | None = None) -> tuple[Path, tuple[str, ...]]:
        path = self.folder / "export.safetensors"
        path.write_bytes(b"model")
        return path, self.missing

    # -------------------------------------------------- people
    def _known(self, job: str) -> None:
        if self.failure is not None:
            raise self.failure
        if job != JOB:
            raise NotFoundError(f"there is no job {job!r}.")

    def _view(self) -> JobView:
        return JobView(
            id=JOB,
            name=self.spec.name,
            task=self.spec.task.name,
            state="running",
            reason="",
            waiting="",
            version=2,
            round=3,
            created_at=1.0,
            bytes_up=10,
            bytes_down=20,
            model_bytes=40,
            dense_bytes=80,
            sites=tuple(
                JobSiteView(
                    site=site,
                    role="site",
                    active=True,
                    epoch=1,
                    clock=0,
                    train_examples=1,
                    eval_examples=1,
                    doing="",
                    joined_at_version=0,
                )
                for site in self.members
            ),
        )

    async def submit(self, request: JobRequest, by: str) -> str:
        self.told.append(("submit", (request.spec.name, by)))
        return JOB

    async def command(self, job: str, stimulus: str, by: str, reason: str = "") -> None:
        self._known(job)
        self.told.append((stimulus, (by, reason)))

    async def delete(self, job: str, by: str) -> None:
        self._known(job)
        self.told.append(("delete", by))

    async def site_command(self, site: str, what: str, by: str, reason: str = "") -> None:
        self.told.append((what, (site, by, reason)))

    async def jobs(self) -> JobList:
        return JobList(jobs=(self._view(),))

    async def job(self, job: str) -> JobDetail:
        self._known(job)
        return JobDetail(job=self._view(), spec=self.spec)

    async def versions(self, job: str, after: int = -1) -> VersionList:
        self._known(job)
        made = VersionView(
            version=2,
            digest="d",
            bytes=40,
            made_at=1.0,
            cohort=("edge-1",),
            missing={},
            update_norm=float("nan"),
            model_norm=1.0,
            fold_seconds=0.25,
        )
        return VersionList(versions=(made,) if after < 2 else ())

    async def updates(self, job: str, after: int = 0) -> UpdateList:
        self._known(job)
        return UpdateList(updates=())

    async def journal(self, job: str, after: int = 0) -> JournalPage:
        self._known(job)
        return page(after + 1)

    async def sites(self) -> SiteList:
        return SiteList(
            sites=tuple(
                SiteView(
                    name=name,
                    role="site",
                    state="connected",
                    last_heard_seconds=0.5,
                    joined_at=1.0,
                    software=SOFTWARE,
                    tasks=(),
                )
                for name in self.names.values()
            )
        )

    async def subscribe(self, after: int = 0, job: str = "") -> AsyncIterator[JournalPage | None]:
        self.told.append(("subscribe", (after, job)))
        while True:
            yield await self.pages.get()

    def last_seq(self) -> int:
        return 41

    def health(self) -> Health:
        return self.health_now

    def info(self) -> Info:
        return Info(
            coordinator="skerry",
            software=SOFTWARE,
            protocol=PROTOCOL,
            agents_url="",
            people_url="",
            process_mb=50.0,
        )


def page(*numbers: int, filler: str = "x") -> JournalPage:
    return JournalPage(
        entries=tuple(
            JournalLine(seq=n, now=1.0, event=msgspec.Raw(msgspec.json.encode({"note": filler})))
            for n in numbers
        )
    )


class Served(msgspec.Struct):
    """A running pair of listeners and a client for them."""

    engine: FakeEngine
    services: Services
    client: aiohttp.ClientSession
    agents: str
    people: str

    def site(self, **more: str) -> dict[str, str]:
        """Headers of a site with an open session."""
        return {
            "Authorization": f"Bearer {SITE_SECRET}",
            "X-Skerry-Protocol": str(PROTOCOL),
            "X-Skerry-Session": SESSION,
            **more,
        }

    def person(self, role: str = "admin", **more: str) -> dict[str, str]:
        """Headers of a person with this role."""
        return {"Authorization": f"Bearer {TOKENS[role]}", **more}


@contextlib.asynccontextmanager
async def running(
    folder: Path, *, secure: tls.Tls | None = None, upload_bytes_max: int = 1 << 40, **values: Any
) -> AsyncIterator[Served]:
    """Serve a fake engine on two free loopback ports."""
    settings = CoordinatorSettings(
        data_dir=str(folder),
        **{
            "listen_agents": "127.0.0.1:0",
            "listen_people": "127.0.0.1:0",
            "stop_seconds": 1.0,
            **values,
        },
    )
    engine = FakeEngine(folder, upload_bytes_max=upload_bytes_max)
    with ports.bind("127.0.0.1", 0, "a") as agents, ports.bind("127.0.0.1", 0, "p") as people:
        urls = [f"http://127.0.0.1:{sock.getsockname()[1]}" for sock in (agents, people)]
        addresses = Addresses(agents=urls[0], people=urls[1], ca_fingerprint="", pid=1)
        async with (
            listening(settings, engine, (agents, people), secure, addresses) as services,  # type: ignore[arg-type]
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as client,
        ):
            yield Served(engine, services, client, *urls)
