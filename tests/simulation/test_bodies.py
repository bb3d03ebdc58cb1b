"""Bodies of simulated models are real bodies."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.bodies import SnapshotMeta, decode_meta_json
from protocol.frames import Scanner
from simulation.bodies import DiskFiles, Files, MemoryFiles, decode, encode_snapshot, vector_layout


def test_a_snapshot_survives_the_trip_and_the_scanner() -> None:
    layout = vector_layout(3)
    body = encode_snapshot("j", 4, layout, [1.0, -2.5, 3.25])
    meta, params = decode(body)
    assert isinstance(meta, SnapshotMeta)
    assert (meta.version, meta.layout, params) == (4, layout, [1.0, -2.5, 3.25])
    scanner = Scanner(lambda raw: [part.bytes for part in decode_meta_json(raw).parts])
    scanner.feed(body)
    assert scanner.good_offset == len(body)
    assert scanner.done


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_both_stores_keep_the_same_promises(kind: str, tmp_path: Path) -> None:
    files: Files = MemoryFiles() if kind == "memory" else DiskFiles(tmp_path)
    files.put("j/spools/a.body", b"abc")
    assert files.get("j/spools/a.body") == b"abc"
    files.remove("j/spools/a.body")
    files.remove("j/spools/a.body")
    with pytest.raises(KeyError):
        files.get("j/spools/a.body")
    assert files.folder("j").endswith("j")
