"""A disk that fills up during a run: said loudly, nothing damaged, and on it goes with room."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from tests.e2e.harness import Place

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("mount") is None,
        reason="a small tmpfs can only be mounted by root",
    ),
]


@contextlib.contextmanager
def tmpfs(at: Path, mebibytes: int) -> Iterator[Path]:
    at.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(at)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"this machine does not let root mount a tmpfs: {mounted.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def test_a_full_disk_shows_on_health_and_the_run_goes_on_when_there_is_room(tmp_path: Path):
    """PC-082: 64 MiB, filled during a run: health says so, no version is damaged, it finishes."""
    with tmpfs(tmp_path / "small", 64) as small, Place(tmp_path) as place:
        place.data = small / "coordinator"
        place.start(flags={"disk-reserve-bytes": str(4 << 20)})
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        writer = os.open(fifo, os.O_RDWR)
        place.join("a", wait=fifo)
        place.agent("a")
        place.sites("b")
        job = place.submit(versions=5, task={"options": {"elements": 1_000_000}})
        os.write(writer, b"x")
        place.wait(job, lambda v: v.version >= 1)
        filler = small / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"\0" * (1 << 20))
        os.write(writer, b"xxxxxxxxxx")
        end = monotonic() + 30
        while place.api.ready().status == "ok":
            next(iter(place.api.changes(job)))
            assert monotonic() < end
        reasons = " ".join(place.api.ready().reasons)
        assert "disk" in reasons.lower() or "space" in reasons.lower()
        filler.unlink()
        view = place.finished(job, 60)
        os.close(writer)
        assert view.version == 5
        assert place.api.ready().status == "ok"
    assert not (tmp_path / "small" / "coordinator").exists()
