"""Bodies on disk <-> flat buffers of memory. No torch: a part is a writable byte view."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from protocol.bodies import BodyMeta, SnapshotMeta, UpdateMeta, dense_parts, encode_meta_json
from protocol.bodyio import BodyReader, write_body
from protocol.errors import ConflictError, MalformedError
from protocol.layout import Layout, Part, differences


def digest_of(parts: Iterable[memoryview]) -> str:
    """sha256 of all part bytes in order: the digest of a version."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def write_body_file(path: Path, meta: BodyMeta, parts: Iterable[memoryview]) -> int:
    """Write a body, whole; its length in bytes."""
    with path.open("wb") as file:
        return write_body(file.write, encode_meta_json(meta), list(parts))


def read_snapshot(
    path: Path,
    *,
    layout: Layout,
    digest: str,
    control: bool,
    into: Mapping[Part, memoryview],
) -> SnapshotMeta:
    """Read a version into `into`, one byte view per part, each as long as the layout says.

    Raises:
        MalformedError: damaged, or no snapshot, or its bytes do not have the digest.
        ConflictError: its layout is not this model's; names the tensors.
    """
    with path.open("rb") as file:
        reader = BodyReader(file.readinto)
        meta = reader.meta
        if not isinstance(meta, SnapshotMeta):
            raise MalformedError(f"{path.name} holds an update where a version was expected.")
        _check_parts(meta, layout, control=control)
        found = hashlib.sha256()
        nothing = memoryview(b"")
        for _, _, payload in reader.fill([into.get(p.name, nothing) for p in meta.parts]):
            found.update(payload)
    if not found.hexdigest() == meta.digest == digest:
        raise MalformedError(
            f"version {meta.version} in {path.name} has the digest {found.hexdigest()[:12]}; the "
            f"coordinator announced {digest[:12]}."
        )
    return meta


def _check_parts(meta: SnapshotMeta, layout: Layout, *, control: bool) -> None:
    if meta.layout.digest() != layout.digest():
        raise ConflictError(
            "the job's model is not this task's model: "
            + "; ".join(differences(meta.layout, layout))
            + ".",
            "All sites must run the same task code, with the same options and base model.",
        )
    expected = dense_parts(layout, "snapshot", control=control)
    if meta.parts != expected:
        raise MalformedError(
            f"version {meta.version} has the parts {[(p.name, p.bytes) for p in meta.parts]}; "
            f"expected {[(p.name, p.bytes) for p in expected]}."
        )


def read_delta(path: Path, into: memoryview) -> UpdateMeta:
    """Read only the `delta` part of an update's body into `into`, a byte view of its length."""
    with path.open("rb") as file:
        reader = BodyReader(file.readinto)
        meta = reader.meta
        if not isinstance(meta, UpdateMeta):
            raise MalformedError(f"{path} holds a version where an update was expected.")
        for index, offset, payload in reader.frames():
            if meta.parts[index].name == "delta":
                into[offset : offset + len(payload)] = payload
    return meta
