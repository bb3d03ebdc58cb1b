"""A full disk is seen early, said clearly and got over; our own litter goes; one per folder."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from coordinator import disk as disk_module
from coordinator.disk import (
    DiskWatch,
    FolderLock,
    in_thread,
    is_full,
    remove_stale,
    tree_bytes,
    write_atomically,
)
from protocol.errors import BusyError, ConflictError


class Space:
    def __init__(self, free: int) -> None:
        self.free = free
        self.now = 0.0

    def watch(self, folder: Path, reserve: int) -> DiskWatch:
        return DiskWatch(folder, reserve, free=lambda _: self.free, clock=lambda: self.now)


def test_the_disk_is_full_below_the_reserve_and_again_usable_clearly_above(tmp_path: Path) -> None:
    """PC-082: the state changes once each way and names limit, found and setting."""
    space = Space(2000)
    watch = space.watch(tmp_path, 1000)
    assert (watch.look(), watch.full, watch.reason) == (False, False, "")
    space.free = 999
    assert watch.look()
    assert watch.full
    assert "999 bytes are free" in watch.reason
    assert "disk_reserve_bytes = 1000" in watch.reason
    assert not watch.look()
    space.free = 1100  # above the reserve, but not clearly
    assert not watch.look()
    assert watch.full
    space.free = 1300
    assert watch.look()
    assert (watch.full, watch.reason) == (False, "")


def test_a_failed_write_counts_as_full_for_a_while_whatever_statvfs_says(tmp_path: Path) -> None:
    space = Space(10_000)
    watch = space.watch(tmp_path, 1000)
    assert watch.report(OSError(errno.EDQUOT, "Disk quota exceeded"))
    assert not watch.report(OSError(errno.EDQUOT, "Disk quota exceeded"))
    assert "quota" in watch.reason
    assert not watch.look()
    assert watch.full
    space.now += 3.0
    assert watch.look()
    assert not watch.full


def test_what_does_not_fit_is_refused_before_any_byte(tmp_path: Path) -> None:
    watch = Space(1500).watch(tmp_path, 1000)
    watch.check_room(500, "an upload")
    with pytest.raises(BusyError, match="501 bytes: 1500 are free, 1000 of them") as caught:
        watch.check_room(501, "an upload")
    assert caught.value.details["disk_full"] == 1


def test_full_means_no_space_or_no_quota() -> None:
    assert is_full(OSError(errno.ENOSPC, ""))
    assert is_full(OSError(errno.EDQUOT, ""))
    assert not is_full(OSError(errno.EIO, ""))
    assert not is_full(ValueError())


def test_an_atomic_write_leaves_the_old_file_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk_module.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new", fsync=True)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_write_killed_half_way_leaves_the_old_file_and_one_stale_one(tmp_path: Path) -> None:
    """PC-080, PC-081: SIGKILL between write and rename; the start after it cleans up."""
    path = tmp_path / "jobs" / "file"
    path.parent.mkdir()
    write_atomically(path, b"old")
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from coordinator.disk import write_atomically\n"
        "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_atomically(Path(sys.argv[1]), b'n' * 100_000, fsync=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=False, timeout=30)
    assert done.returncode == -9
    assert path.read_bytes() == b"old"
    assert tree_bytes(tmp_path) == 100_003
    assert remove_stale(tmp_path) == (1, 100_000)
    assert tree_bytes(tmp_path) == 3


def test_stale_folders_go_whole_and_nothing_else(tmp_path: Path) -> None:
    """PC-081: 50 interrupted saves do not leave their bytes."""
    for number in range(50):
        folder = tmp_path / "checkpoints" / f"{number}.tmp"
        folder.mkdir(parents=True)
        (folder / "model").write_bytes(b"x" * 1000)
    kept = tmp_path / "checkpoints" / "7"
    kept.mkdir()
    (kept / "model").write_bytes(b"y")
    assert remove_stale(tmp_path) == (50, 50_000)
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["7"]


def test_a_folder_has_one_coordinator(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.take()
    with pytest.raises(ConflictError, match=f"process {os.getpid()}"):
        second.take()
    first.release()
    second.take()
    second.release()


async def test_a_cancelled_caller_leaves_after_the_thread_has_let_go() -> None:
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        go_on.wait(10.0)
        ended.set()

    task = asyncio.ensure_future(in_thread(work))
    await asyncio.to_thread(began.wait, 10.0)
    task.cancel()
    asyncio.get_running_loop().call_later(0.01, go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
