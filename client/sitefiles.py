"""What a site keeps on disk, and the rules about it.

    site.json        name, role and coordinator; there once the site has joined
    secret           what the agent shows at every request                       0600
    key.pem          the site's Ed25519 key                                      0600
    ca.pem           the coordinator's CA, checked at join; absent under a public one
    lock             held by the running agent
    sent.jsonl       the site's own log of everything that left it
    jobs/<file id>/  job.json (what it is), base-<version>.body, and what `sitestate` keeps

Everything here is small or moved by name; bodies are streamed by `transfers`.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from client.sessionapi import Identity, RememberJob, StoredUpdate
from client.sitestate import BODY, read_record
from protocol.errors import ConflictError, LimitError, NotFoundError, RefusedError, UsageError
from protocol.messages import SiteRole
from protocol.names import file_id

log = logging.getLogger("skerry.agent")

DISK_RESERVE_BYTES: Final = 64 << 20  # left free for the site's state and logs
_SMALL_FILE_BYTES_MAX: Final = 1 << 20
_UPDATE: Final = re.compile(r"update-\d+-\d+-\d+")


class SiteIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Who this site is, and at which coordinator."""

    name: str
    role: SiteRole
    url: str
    coordinator: str
    protocol: int


def job_folder(jobs: Path, job: str) -> Path:
    """The folder of a job; its name holds no character that came from outside."""
    return jobs / file_id(job)


def base_body(folder: Path, version: int) -> Path:
    """A version that was fetched whole."""
    return folder / f"base-{version}.body"


def init_body(folder: Path) -> Path:
    """Version 0, made here."""
    return folder / "init.body"


def text_of(path: Path | str) -> str:
    """A path as the worker reads it: UTF-8, even where this process's locale knows only ASCII.

    Raises:
        UsageError: its bytes are no UTF-8.
    """
    try:
        return str(path).encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"the path {str(path)!r} is not UTF-8: rename it.") from None


def path_of(text: str) -> Path:
    """A path written in settings, as this process opens it; undoes text_of."""
    return Path(os.fsdecode(text.encode("utf-8", "surrogateescape")))


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a small file so that after a crash there is the old one or the new one, whole."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(os.open(temporary, flags, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class SiteFolder:
    """The folder of one site."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.jobs = self.path / "jobs"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder, so that a second agent cannot send in this site's name.

        Raises:
            ConflictError: another process holds it; names its pid.
        """
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.path / "lock").open("a+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                pid = file.read(20).decode("ascii", "replace").strip() or "unknown"
                raise ConflictError(
                    f"another agent (process {pid}) already runs in {self.path}.",
                    "Stop it first, or give this one a folder of its own (and its own name).",
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()).encode())
            file.flush()
            yield

    # ------------------------------------------------------------ identity

    @property
    def joined(self) -> bool:
        """True when this folder holds an identity."""
        return (self.path / "site.json").exists()

    def identity(self) -> SiteIdentity:
        """Who this site is.

        Raises:
            NotFoundError: it has not joined.
            RefusedError: the file is damaged.
        """
        try:
            raw = (self.path / "site.json").read_bytes()
        except FileNotFoundError:
            raise NotFoundError(
                f"{self.path} holds no site: it has not joined a coordinator yet.",
                "Ask for a token (`skerry token create`) and run `skerry join TOKEN`.",
            ) from None
        try:
            return msgspec.json.decode(raw, type=SiteIdentity)
        except msgspec.MsgspecError as error:
            raise RefusedError(f"{self.path / 'site.json'} is damaged: {error}") from None

    def secret(self) -> str:
        """The site's secret; as private_file."""
        return self.private_file("secret").decode("ascii", "replace").strip()

    def private_file(self, name: str) -> bytes:
        """A file that is for this user's eyes only.

        Raises:
            NotFoundError: it is not there.
            RefusedError: others can read it.
        """
        path = self.path / name
        try:
            with path.open("rb") as file:
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
                if mode & 0o077:
                    raise RefusedError(
                        f"{path} can be read by others (mode {mode:04o}).",
                        f"Run `chmod 600 {path}`; if others may have read it, join again.",
                    )
                return file.read(_SMALL_FILE_BYTES_MAX)
        except FileNotFoundError:
            raise NotFoundError(
                f"{path} is missing.", "Restore it from a backup, or join again with a new token."
            ) from None

    @property
    def ca(self) -> Path | None:
        """The pinned CA, if the coordinator has one of its own."""
        path = self.path / "ca.pem"
        return path if path.exists() else None

    def save_identity(
        self, identity: SiteIdentity, *, secret: str, key_pem: bytes, ca_pem: bytes
    ) -> None:
        """Store what a join gave; site.json comes last, so that it vouches for the rest."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(self.path / "key.pem", key_pem, 0o600)
        write_atomic(self.path / "secret", secret.encode(), 0o600)
        if ca_pem:
            write_atomic(self.path / "ca.pem", ca_pem)
        else:
            (self.path / "ca.pem").unlink(missing_ok=True)
        write_atomic(self.path / "site.json", msgspec.json.encode(identity))

    # ------------------------------------------------------------ jobs

    def remember(self, job: RememberJob) -> None:
        """Keep what a worker of this job is started with."""
        folder = job_folder(self.jobs, job.job)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "job.json", msgspec.json.encode(job))

    def known_jobs(self) -> dict[str, RememberJob]:
        """The jobs of earlier processes."""
        known: dict[str, RememberJob] = {}
        for path in self.jobs.glob("*/job.json"):
            try:
                job = msgspec.json.decode(path.read_bytes(), type=RememberJob)
            except (msgspec.MsgspecError, OSError) as error:
                log.warning("%s cannot be read and is left alone: %s", path, error)
                continue
            known[job.job] = job
        return known

    def stored_updates(self) -> list[StoredUpdate]:
        """Finished updates that have no final verdict here yet."""
        found: list[StoredUpdate] = []
        for path in self.jobs.glob("*/update-*"):
            if not _UPDATE.fullmatch(path.name):
                continue
            try:
                record = read_record(path)
                size = (path / BODY).stat().st_size
            except (msgspec.MsgspecError, OSError) as error:
                log.warning("%s cannot be read and is left alone: %s", path, error)
                continue
            identity = Identity(
                job=record.job, epoch=record.epoch, clock=record.clock, attempt=record.attempt
            )
            found.append(StoredUpdate(identity=identity, body=path / BODY, bytes=size))
        return sorted(found, key=lambda update: update.identity)

    def keep_bases(self, job: str, versions: tuple[int, ...]) -> None:
        """Remove the snapshots of other versions, whole ones and halves."""
        folder = job_folder(self.jobs, job)
        kept = {base_body(folder, version).name for version in versions}
        for path in folder.glob("base-*"):
            if path.name.removesuffix(".part") not in kept:
                path.unlink(missing_ok=True)

    def forget(self, job: str) -> None:
        """Remove everything of a job."""
        shutil.rmtree(job_folder(self.jobs, job), ignore_errors=True)

    def remove_stale(self) -> None:
        """Remove what a killed agent left half written (a half download is kept: it resumes)."""
        for pattern in ("*.tmp", "jobs/*/job.json.tmp", "jobs/*/init.body*"):
            for path in self.path.glob(pattern):
                path.unlink(missing_ok=True)

    def check_space(self, needed: int) -> None:
        """Refuse a download that would fill the disk.

        Raises:
            LimitError: with what is free and what is needed.
        """
        free = shutil.disk_usage(self.path).free
        if free < needed + DISK_RESERVE_BYTES:
            raise LimitError(
                f"the disk of {self.path} has {free / 1e6:.0f} MB free; {needed / 1e6:.0f} MB and "
                f"{DISK_RESERVE_BYTES / 1e6:.0f} MB of reserve are needed.",
                "Free some space: the site goes on by itself with the next round.",
                details={"free": free, "needed": needed},
            )


class SentLog:
    """What left this site, one JSON object a line: `time`, `kind`, `bytes` and what they were.

    Kept for the site's owner, whatever the coordinator says. When the file reaches `bytes_max` it
    becomes sent.1.jsonl, and the one before that goes.
    """

    def __init__(self, folder: Path, bytes_max: int = 16 << 20) -> None:
        self.path = folder / "sent.jsonl"
        self._bytes_max = bytes_max

    def add(self, now: float, kind: str, fields: Mapping[str, str | int | float]) -> None:
        """Append a line; `now` is Unix time in seconds. A full disk only costs the line."""
        line = msgspec.json.encode({"time": round(now, 3), "kind": kind, **fields}) + b"\n"
        try:
            with self.path.open("ab") as file:
                file.write(line)
                full = file.tell() >= self._bytes_max
            if full:
                self.path.replace(self.path.with_name("sent.1.jsonl"))
        except OSError as error:
            log.warning("%s cannot be written: %s", self.path, error.strerror)
