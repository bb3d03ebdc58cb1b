"""Real bodies of models that are one small float32 vector, and the places where bodies are kept."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Protocol

import msgspec

from coordinator.stimuli import InitFacts, UpdateFacts
from protocol.bodies import BodyMeta, SnapshotMeta, UpdateMeta, dense_parts, encode_meta_json
from protocol.bodyio import BodyReader, write_body
from protocol.layout import Layout, TensorSpec


class Thin(msgspec.Struct, frozen=True, kw_only=True):
    """Stands for a body in fleets that are too large for real ones: its length, and what the fold
    process would have found in it.
    """

    bytes: int
    update: UpdateFacts | None = None
    init: InitFacts | None = None

    def __len__(self) -> int:
        return self.bytes


Body = bytes | Thin


class Files(Protocol):
    """A flat store of bodies by relative path."""

    def put(self, path: str, data: Body) -> None:
        """Store."""

    def get(self, path: str) -> Body:
        """Read; KeyError when it is not there."""

    def remove(self, path: str) -> None:
        """Remove, if it is there."""

    def folder(self, job: str) -> str:
        """What a fold request names as the job's folder."""


class MemoryFiles:
    """Files of `FakeFold`; they outlive every simulated crash, as a disk does."""

    def __init__(self) -> None:
        self.data: dict[str, Body] = {}

    def put(self, path: str, data: Body) -> None:
        """Store."""
        self.data[path] = data

    def get(self, path: str) -> Body:
        """Read; KeyError when it is not there."""
        return self.data[path]

    def remove(self, path: str) -> None:
        """Remove, if it is there."""
        self.data.pop(path, None)

    def folder(self, job: str) -> str:
        """The job's prefix."""
        return job


class DiskFiles:
    """Files of the real fold service, under a temporary folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, path: str, data: Body) -> None:
        """Store."""
        assert isinstance(data, bytes), "a thin body is never written to a disk"
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    def get(self, path: str) -> bytes:
        """Read; KeyError when it is not there."""
        try:
            return (self._root / path).read_bytes()
        except FileNotFoundError:
            raise KeyError(path) from None

    def remove(self, path: str) -> None:
        """Remove, if it is there."""
        (self._root / path).unlink(missing_ok=True)

    def folder(self, job: str) -> str:
        """The job's folder, made if needed."""
        path = self._root / job
        path.mkdir(parents=True, exist_ok=True)
        return str(path)


def vector_layout(elements: int, *, fingerprint: str = "", name: str = "w") -> Layout:
    """The layout of a model that is one trainable float32 vector."""
    spec = TensorSpec(name=name, shape=(elements,), dtype="float32", role="train")
    return Layout(tensors=(spec,), frozen_fingerprint=fingerprint)


def encode_snapshot(job: str, version: int, layout: Layout, params: Sequence[float]) -> bytes:
    """A snapshot body."""
    raw = array("f", params)
    meta = SnapshotMeta(
        job=job,
        version=version,
        digest=hashlib.sha256(raw.tobytes()).hexdigest(),
        layout=layout,
        parts=dense_parts(layout, "snapshot", control=False),
    )
    return _encode(meta, raw)


def encode_update(meta: UpdateMeta, delta: Sequence[float]) -> bytes:
    """An update body; `meta.parts` is filled in by `update_meta`."""
    return _encode(meta, array("f", delta))


def _encode(meta: BodyMeta, first: array[float]) -> bytes:
    out = BytesIO()
    empty = [memoryview(b"")] * (len(meta.parts) - 1)
    write_body(out.write, encode_meta_json(meta), [memoryview(first), *empty])
    return out.getvalue()


def decode(body: Body) -> tuple[BodyMeta, list[float]]:
    """META and the first part of a body."""
    assert isinstance(body, bytes), "a thin body has nothing in it"
    source = BytesIO(body)
    reader = BodyReader(source.readinto)
    first = array("f")
    for part, _, payload in reader.frames():
        if part == 0:
            first.frombytes(payload)
    return reader.meta, list(first)
