from __future__ import annotations

from pathlib import Path

import pytest

from client.bodyfiles import digest_of, read_delta, read_snapshot, write_body_file
from protocol.bodies import SnapshotMeta, UpdateMeta, dense_parts
from protocol.errors import ConflictError, MalformedError
from protocol.layout import Layout, Part, TensorSpec

LAYOUT = Layout(
    tensors=(
        TensorSpec(name="w", shape=(3,), dtype="float32", role="train"),
        TensorSpec(name="n", shape=(), dtype="int64", role="int"),
    )
)
RAW: dict[Part, bytes] = {"params": b"aaaabbbbcccc", "buffers": b"", "ints": b"dddddddd"}
DIGEST = digest_of(memoryview(raw) for raw in RAW.values())


def write_snapshot(path: Path, layout: Layout = LAYOUT, *, control: bool = False) -> None:
    parts = [memoryview(raw) for raw in RAW.values()]
    if control:
        parts.append(memoryview(RAW["params"]))
    meta = SnapshotMeta(
        job="j",
        version=3,
        digest=DIGEST,
        layout=layout,
        parts=dense_parts(layout, "snapshot", control=control),
    )
    assert write_body_file(path, meta, parts) == path.stat().st_size


def read(path: Path, digest: str = DIGEST) -> dict[Part, bytes]:
    into: dict[Part, bytearray] = {name: bytearray(len(raw)) for name, raw in RAW.items()}
    views = {name: memoryview(raw) for name, raw in into.items()}
    read_snapshot(path, layout=LAYOUT, digest=digest, control=False, into=views)
    return {name: bytes(raw) for name, raw in into.items()}


def test_a_version_comes_back_byte_for_byte(tmp_path: Path):
    write_snapshot(tmp_path / "v")
    assert read(tmp_path / "v") == RAW


def test_another_digest_than_the_announced_one_is_refused(tmp_path: Path):
    write_snapshot(tmp_path / "v")
    with pytest.raises(MalformedError, match="announced eeeeeeeeeeee"):
        read(tmp_path / "v", "e" * 64)


def test_another_layout_is_refused_with_the_tensors_that_differ(tmp_path: Path):
    other = TensorSpec(name="v", shape=(3,), dtype="float32", role="train")
    write_snapshot(tmp_path / "v", Layout(tensors=(other, LAYOUT.tensors[1])))
    with pytest.raises(ConflictError, match=r"missing tensor 'v'; unknown tensor 'w'"):
        read(tmp_path / "v")


def test_parts_that_the_job_does_not_use_are_refused(tmp_path: Path):
    write_snapshot(tmp_path / "v", control=True)
    with pytest.raises(MalformedError, match="control"):
        read(tmp_path / "v")


def update_meta() -> UpdateMeta:
    return UpdateMeta(
        job="j",
        site="s",
        epoch=1,
        clock=0,
        attempt=1,
        base_version=3,
        base_digest=DIGEST,
        layout_digest=LAYOUT.digest(),
        examples=1.0,
        steps=1,
        effective_steps=1.0,
        parts=dense_parts(LAYOUT, "update", control=False),
    )


def test_only_the_delta_of_an_update_is_read(tmp_path: Path):
    write_body_file(tmp_path / "u", update_meta(), [memoryview(raw) for raw in RAW.values()])
    delta = bytearray(12)
    assert read_delta(tmp_path / "u", memoryview(delta)) == update_meta()
    assert bytes(delta) == RAW["params"]


def test_an_update_is_no_version_and_a_version_no_update(tmp_path: Path):
    write_body_file(tmp_path / "u", update_meta(), [memoryview(raw) for raw in RAW.values()])
    with pytest.raises(MalformedError, match="holds an update where a version"):
        read(tmp_path / "u")
    write_snapshot(tmp_path / "v")
    with pytest.raises(MalformedError, match="holds a version where an update"):
        read_delta(tmp_path / "v", memoryview(bytearray(12)))
