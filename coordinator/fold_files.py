"""Files that appear whole or not at all, and the removal of what a killed process left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

TEMPORARY: Final = ".tmp-"
DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextlib.contextmanager
def replacing(path: Path, *, fsync: bool = False) -> Iterator[BinaryIO]:
    """A new file beside `path` that takes its name when the block ends well, else goes."""
    temporary = path.with_name(TEMPORARY + path.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            if fsync:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if fsync:
        sync_directory(path.parent)


@contextlib.contextmanager
def replacing_directory(path: Path, *, fsync: bool = False) -> Iterator[Path]:
    """A new directory that takes the place of `path` when the block ends well, else goes."""
    temporary = path.with_name(TEMPORARY + path.name)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if path.exists():  # damaged, or of no use: the caller never replaces a good one
            shutil.rmtree(path)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if fsync:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make names in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make a directory and the files in it survive a power cut."""
    for path in sorted(folder.iterdir()):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    sync_directory(folder)
    sync_directory(folder.parent)


def remove_stale(folder: Path) -> int:
    """Remove what unfinished writes of an earlier process left in a job's folder; their count."""
    stale = [
        path
        for place in (folder, folder / "versions", folder / "checkpoints")
        for path in sorted(place.glob(TEMPORARY + "*"))
    ]
    for path in stale:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return len(stale)
