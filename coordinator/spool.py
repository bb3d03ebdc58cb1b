"""Uploads on disk: where they lie, how much they may take, and how bytes get there.

A spool is one file, `jobs/<job>/spools/<file id of the site>-<epoch>-<clock>-<attempt>.body`. Its
length is what the sender may rely on, so a broken upload resumes, also after a restart.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter
from typing import Final, NamedTuple

from coordinator.disk import DiskWatch, in_thread, is_full
from protocol import limits
from protocol.errors import BusyError, LimitError, MalformedError
from protocol.frames import Scanner
from protocol.names import file_id

_SLOW_WRITE_SECONDS: Final = 0.005
_THREADED_BYTES: Final = 16 * limits.MIB
_RESCAN_BYTES: Final = limits.MIB // 4  # each thread that ever did it keeps as much


class UploadKey(NamedTuple):
    """Identity of one upload, as the coordinator assigned it (design 4.1)."""

    job: str
    site: str
    epoch: int
    clock: int
    attempt: int

    @property
    def spool(self) -> str:
        """File name in the job's spool folder; the same for the same identity, always."""
        return f"{file_id(self.site)}-{self.epoch}-{self.clock}-{self.attempt}.body"


class JobFolders:
    """Where the files of a job lie (see foldapi)."""

    def __init__(self, data_dir: Path) -> None:
        self.root = data_dir / "jobs"
        self.inits = data_dir / "inits"  # safetensors files of people, before their job
        self.exports = data_dir / "exports"

    def job(self, job: str) -> Path:
        """The job's folder. Job ids are made here and hold no separators."""
        if not job or not job.replace("-", "").isalnum() or not job.isascii():
            raise MalformedError(f"{job[:40]!r} is no job id.")
        return self.root / job

    def spool(self, job: str, name: str) -> Path:
        """An upload."""
        return self.job(job) / "spools" / name

    def init_part(self, job: str, site: str) -> Path:
        """Version 0 on its way in from a site."""
        return self.job(job) / "spools" / f"init-{file_id(site)}.body"

    def init(self, job: str) -> Path:
        """Version 0, whole, for the fold process to take."""
        return self.job(job) / "init.body"

    def version(self, job: str, version: int) -> Path:
        """Snapshot body of a version."""
        return self.job(job) / "versions" / f"{version}.body"

    def kept_versions(self, job: str) -> list[int]:
        """Versions of a job that are there as files, oldest first."""
        found = (self.job(job) / "versions").glob("*.body")
        return sorted(int(path.stem) for path in found if path.stem.isdigit())

    def make(self, job: str) -> None:
        """Folders of a new job."""
        for name in ("versions", "spools", "checkpoints"):
            (self.job(job) / name).mkdir(parents=True, exist_ok=True)


class Quota:
    """Room for uploads, over all jobs and for each; claimed whole before any byte is taken."""

    def __init__(self, *, spool_bytes_max: int, upload_bytes_max: int) -> None:
        self._spool_max = spool_bytes_max
        self._upload_max = upload_bytes_max
        self._claims: dict[Path, int] = {}
        self.used = 0

    def scan(self, root: Path) -> None:
        """Count what is stored already."""
        for path in sorted(root.glob("*/spools/*.body")):
            self._set(path, path.stat().st_size)

    def check_size(self, size: int) -> None:
        """Pass when an upload of `size` bytes may ever be taken.

        Raises:
            LimitError: naming limit, size and setting.
        """
        for name, limit in (
            ("upload_bytes_max", self._upload_max),
            ("spool_bytes_max", self._spool_max),
        ):
            if size > limit:
                raise LimitError(
                    f"an upload of {size} bytes is above the coordinator's {name} = {limit} bytes.",
                    f"Raise {name} at the coordinator, or send less (a smaller model, personal "
                    "layers, frozen layers).",
                    details={"limit": limit, "found": size, "setting": name},
                )

    def claim(self, path: Path, size: int) -> None:
        """Set `size` bytes aside for `path` (a claim that it has already counts).

        Raises:
            LimitError: above what may ever be taken.
            BusyError: other uploads fill spool_bytes_max for now.
        """
        self.check_size(size)
        others = self.used - self._claims.get(path, 0)
        if others + size > self._spool_max:
            raise BusyError(
                f"an upload of {size} bytes does not fit for now: {others} of spool_bytes_max = "
                f"{self._spool_max} bytes are in use until the next checkpoint.",
                "It is tried again by itself; raise spool_bytes_max if this is seen often.",
                details={"limit": self._spool_max, "found": others + size},
            )
        self._set(path, size)

    def stored(self, path: Path, size: int) -> None:
        """Only `size` bytes are there in the end."""
        self._set(path, size)

    def release(self, path: Path) -> None:
        """The file is gone."""
        self._set(path, 0)

    def _set(self, path: Path, size: int) -> None:
        self.used += size - self._claims.pop(path, 0)
        if size:
            self._claims[path] = size


class SpoolFile:
    """An open spool, appended to.

    A write of 1 MiB into the page cache takes about 0.3 ms, less than the hop to a thread costs
    under load, so writes are made right here; when the kernel makes one wait (the disk is behind),
    the next ones go through threads.
    """

    def __init__(self, path: Path, length: int, disk: DiskWatch) -> None:
        self.path = path
        self.length = length
        self._disk = disk
        self._threaded = 0  # bytes that still go through threads
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._descriptor, length)
        os.lseek(self._descriptor, length, os.SEEK_SET)

    async def append(self, chunk: bytes | memoryview) -> None:
        """Write all of `chunk` at the end.

        Raises:
            BusyError: the disk is full.
        """
        try:
            if self._threaded > 0:
                await in_thread(self._write, chunk)
                self._threaded -= len(chunk)
            else:
                began = perf_counter()
                self._write(chunk)
                if perf_counter() - began > _SLOW_WRITE_SECONDS:
                    self._threaded = _THREADED_BYTES
        except OSError as error:
            if not is_full(error):
                raise
            self._disk.report(error)
            raise BusyError(
                f"the coordinator cannot store this upload: {self._disk.reason}.",
                "Free space under its data_dir; the upload goes on by itself.",
                details={"disk_full": 1},
            ) from None
        self.length += len(chunk)

    def _write(self, chunk: bytes | memoryview) -> None:
        view = memoryview(chunk)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def truncate(self, length: int) -> None:
        """Keep only the first `length` bytes."""
        os.ftruncate(self._descriptor, length)
        os.lseek(self._descriptor, length, os.SEEK_SET)
        self.length = length

    async def sync(self) -> None:
        """Wait until the bytes would survive a power cut."""
        await in_thread(self._sync)

    def _sync(self) -> None:
        os.fsync(self._descriptor)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)  # the file's name
        finally:
            os.close(folder)

    def close(self) -> None:
        """Close; twice is fine."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def rescan(path: Path, scanner: Scanner) -> int:
    """Feed what is stored to a fresh scanner; -> length of the prefix that is good.

    Blocks for as long as reading takes: call it in a thread.
    """
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(_RESCAN_BYTES):
                scanner.feed(block)
    except FileNotFoundError:
        return 0
    except (MalformedError, LimitError):
        pass  # what follows the good prefix is sent again
    return scanner.good_offset if scanner.done else scanner.rewind()
