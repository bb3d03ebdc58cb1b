"""Spools as memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.fold_mapped import LET_GO_BYTES, MappedBody
from protocol.errors import MalformedError


def resident_bytes(pid: str = "self") -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssFile:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssFile")


def test_a_mapped_body_gives_every_byte_once_and_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.body"
    raw = bytes(range(256)) * 5
    path.write_bytes(raw)
    with MappedBody(path) as body:
        head = bytearray(7)
        assert body.readinto(memoryview(head)) == 7
        rest = b"".join(bytes(body.view(100)) for _ in range(20))
        assert bytes(head) + rest == raw
        assert len(body.view(1)) == 0
        assert body.readinto(memoryview(head)) == 0


def test_pages_that_were_looked_at_are_let_go(tmp_path: Path) -> None:
    path = tmp_path / "large.body"
    path.write_bytes(bytes(64 * LET_GO_BYTES))
    with MappedBody(path) as body:
        before, peak = resident_bytes(), 0
        while view := body.view(LET_GO_BYTES):
            assert not any(view[::4096])  # touches every page
            peak = max(peak, resident_bytes() - before)
    assert peak <= 4 << 20, peak  # of 16 MiB; the system maps some pages around each that is read


def test_an_empty_spool_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "none.body"
    path.touch()
    with pytest.raises(MalformedError, match=r"none\.body is empty"):
        MappedBody(path)
