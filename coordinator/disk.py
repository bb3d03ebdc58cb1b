"""Files with care: atomic writes, stale files, the lock of a data folder, and a full disk."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Final, ParamSpec, TypeVar

from protocol.errors import BusyError, ConflictError

P = ParamSpec("P")
T = TypeVar("T")

FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
TEMPORARY: Final = ".tmp"  # whatever carries this in its name is ours and may go at start
_AGAIN_FACTOR: Final = 1.25  # room again only clearly above the reserve: no flapping
_HOLD_SECONDS: Final = 2.0  # after a write that failed, whatever statvfs says (quotas)


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run in a thread; a cancelled caller leaves only after the thread has let go of the file."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def is_full(error: BaseException) -> bool:
    """Whether this error means a full disk or an exhausted quota."""
    return isinstance(error, OSError) and error.errno in FULL_ERRNOS


def free_bytes(folder: Path) -> int:
    """Bytes that this process may still write to the file system of `folder`."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


class DiskWatch:
    """Knows whether there is room, before and after the kernel says so.

    The disk counts as full while less than `reserve_bytes` are free: the reserve is what the
    database needs to go on and say so. `look()` tells changes of state.
    """

    def __init__(
        self,
        folder: Path,
        reserve_bytes: int,
        *,
        free: Callable[[Path], int] = free_bytes,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._folder = folder
        self._reserve = reserve_bytes
        self._free = free
        self._clock = clock
        self._held_until = float("-inf")
        self.full = False
        self.reason = ""

    def look(self) -> bool:
        """Look at the file system; True when `full` has changed."""
        free = self._free(self._folder)
        was = self.full
        if free < self._reserve:
            self.full = True
            self.reason = (
                f"disk full: {free} bytes are free under {self._folder}, less than "
                f"disk_reserve_bytes = {self._reserve}; free some space, work goes on by itself"
            )
        elif self.full and free >= self._reserve * _AGAIN_FACTOR:
            self.full = self._clock() < self._held_until
        if not self.full:
            self.reason = ""
        return self.full != was

    def report(self, error: OSError) -> bool:
        """A write failed for want of space; True when `full` has changed."""
        was = self.full
        self.full = True
        self._held_until = self._clock() + _HOLD_SECONDS
        self.reason = (
            f"disk full: {error.strerror or error} under {self._folder}; free some space, work "
            "goes on by itself"
        )
        return not was

    def check_room(self, size: int, what: str) -> None:
        """Pass when `size` more bytes leave the reserve untouched.

        Raises:
            BusyError: naming what does not fit; it may fit later.
        """
        if not self.full and self._free(self._folder) - size >= self._reserve:
            return
        free = self._free(self._folder)
        raise BusyError(
            f"the coordinator's disk has no room for {what} of {size} bytes: {free} are free, "
            f"{self._reserve} of them are kept back (disk_reserve_bytes).",
            "Free space under its data_dir; the transfer is tried again by itself.",
            details={"limit": max(0, free - self._reserve), "found": size, "disk_full": 1},
        )


def write_atomically(path: Path, data: bytes, *, mode: int = 0o600, fsync: bool = False) -> None:
    """Replace `path` by `data`: readers see the old file or the new one, never half of one."""
    temporary = path.with_name(f"{path.name}{TEMPORARY}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            if fsync:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def remove_stale(folder: Path) -> tuple[int, int]:
    """Remove what an interrupted write left under `folder`; -> (entries, bytes) removed."""
    entries = size = 0
    for root, folders, files in os.walk(folder, topdown=True):
        at = Path(root)
        for name in [name for name in folders if TEMPORARY in name]:
            folders.remove(name)
            size += tree_bytes(at / name)
            shutil.rmtree(at / name, ignore_errors=True)
            entries += 1
        for name in files:
            if TEMPORARY in name:
                size += (at / name).lstat().st_size
                (at / name).unlink(missing_ok=True)
                entries += 1
    return entries, size


def tree_bytes(folder: Path) -> int:
    """Bytes of all files under `folder`."""
    return sum(
        (Path(root) / name).lstat().st_size
        for root, _, files in os.walk(folder)
        for name in files
        if (Path(root) / name).exists()
    )


class FolderLock:
    """One coordinator per data folder: the kernel lets go of it however the process ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._descriptor = -1

    def take(self) -> None:
        """Hold the folder.

        Raises:
            ConflictError: another process holds it; names its process id.
        """
        path = self._folder / "lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise ConflictError(
                f"another coordinator (process {holder}) works in {self._folder}.",
                "Stop it first, or give this one a data_dir of its own.",
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Let go."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
