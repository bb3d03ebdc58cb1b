"""A version of a model as a value: flat parts, the server optimizer's state, and their digest."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import torch

from aggregation import compensation, server_optimizers
from aggregation.server_optimizers import State
from aggregation.tiles import TILE_BYTES, as_bytes, from_bytes, spans, tile_buffer
from coordinator.fold_files import replacing
from protocol.bodies import SnapshotMeta, dense_parts, encode_meta_json
from protocol.bodyio import BodyReader, write_body
from protocol.errors import MalformedError
from protocol.jobspec import JobSpec
from protocol.layout import Layout, Part

DTYPES: dict[Part, torch.dtype] = {
    "params": torch.float32, "buffers": torch.float32,
    "ints": torch.int64, "control": torch.float32,
}  # fmt: skip


class Model(msgspec.Struct, kw_only=True):
    """Version `version` of a job. `parts` are in canonical order; `digest` is the sha256 of their
    bytes, what sites check. `state` is the server
    optimizer's, and what delay compensation keeps.
    """

    job: str
    layout: Layout
    version: int
    digest: str
    parts: dict[Part, torch.Tensor]
    state: State

    @property
    def control(self) -> bool:
        """True when SCAFFOLD's control variate is one of the parts."""
        return "control" in self.parts

    @property
    def bytes(self) -> int:
        """Memory of all tensors."""
        return sum(t.nbytes for t in (*self.parts.values(), *self.state.values()))

    def meta(self) -> SnapshotMeta:
        """What the META frame of this version's body says."""
        return SnapshotMeta(
            job=self.job,
            version=self.version,
            digest=self.digest,
            layout=self.layout,
            parts=dense_parts(self.layout, "snapshot", control=self.control),
        )


def initial_state(spec: JobSpec, elements: int) -> State:
    """What a job keeps beside its model from commit to commit, at the start; empty when a version
    is its own whole state.
    """
    state = server_optimizers.for_job(spec).init(elements)
    how = compensation.for_job(spec)
    return state | {slot: torch.zeros(elements) for slot in (how.slots if how else ())}


def empty_parts(layout: Layout, *, control: bool) -> dict[Part, torch.Tensor]:
    """Flat parts for a layout, not yet filled; the control variate starts as zero."""
    names: list[Part] = ["params", "buffers", "ints"]
    parts = {name: torch.empty(layout.elements(name), dtype=DTYPES[name]) for name in names}
    if control:
        parts["control"] = torch.zeros(layout.elements("control"))
    return parts


def digest_of(parts: dict[Part, torch.Tensor]) -> str:
    """sha256 of the bytes of all parts in order, as hex."""
    digest = hashlib.sha256()
    for flat in parts.values():
        view = as_bytes(flat)
        for start in range(0, len(view), TILE_BYTES):
            digest.update(view[start : start + TILE_BYTES])
    return digest.hexdigest()


def write_version(model: Model, path: Path, *, fsync: bool = False) -> int:
    """Write the body that sites download; answers with its length."""
    with replacing(path, fsync=fsync) as file:
        views = [as_bytes(flat) for flat in model.parts.values()]
        return write_body(file.write, encode_meta_json(model.meta()), views)


def read_version(path: Path) -> Model:
    """Read a snapshot body whole and check it: order, checksums, sizes, digest. State is empty.

    Raises:
        MalformedError: saying what is wrong with it.
        OSError: the file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        reader = BodyReader(file.readinto)
        meta = reader.meta
        if not isinstance(meta, SnapshotMeta):
            raise MalformedError("this body is an update, not a snapshot of a version.")
        control = check_parts(meta)
        if sum(part.bytes for part in meta.parts) > path.stat().st_size:
            raise MalformedError("the body is shorter than its metadata says.")
        parts = empty_parts(meta.layout, control=control)
        names = [part.name for part in meta.parts]
        for index, offset, view in reader.pieces(tile_buffer()):
            flat = parts[names[index]]
            values = from_bytes(view, flat.dtype)
            start = offset // flat.itemsize
            flat[start : start + values.numel()] = values
    found = digest_of(parts)
    if found != meta.digest:
        raise MalformedError(
            f"the digest of version {meta.version} is {found[:12]}, its metadata says "
            f"{meta.digest[:12]}."
        )
    return Model(
        job=meta.job,
        layout=meta.layout,
        version=meta.version,
        digest=found,
        parts=parts,
        state={},
    )


def read_meta(path: Path) -> SnapshotMeta:
    """The metadata of a version's file alone.

    Raises:
        MalformedError, OSError: it is not the file of a version.
    """
    with path.open("rb", buffering=0) as file:
        meta = BodyReader(file.readinto).meta
    if not isinstance(meta, SnapshotMeta):
        raise MalformedError(f"{path.name} is not a version.")
    return meta


def check_parts(meta: SnapshotMeta) -> bool:
    """Check a snapshot's part list against its own layout; True when `control` is among them.

    Raises:
        MalformedError: naming the parts, or the part whose size is wrong.
    """
    found = {part.name: part.bytes for part in meta.parts}
    control = "control" in found
    wanted = {
        part.name: part.bytes for part in dense_parts(meta.layout, "snapshot", control=control)
    }
    if [*found] != [*wanted]:
        raise MalformedError(f"the parts are {[*found]}; a snapshot has {[*wanted]}.")
    for name, size in wanted.items():
        if found[name] != size:
            raise MalformedError(
                f"part {name} has {found[name]} bytes, its layout makes {size} of it."
            )
    return control


def nonfinite_tensors(layout: Layout, parts: dict[Part, torch.Tensor]) -> list[str]:
    """Names of the tensors that hold NaN or infinity, in layout order."""
    return [
        slot.spec.name
        for part in ("params", "buffers", "control")
        if part in parts
        for slot in layout.slots(part)
        if not _finite(parts[part][slot.start : slot.start + slot.spec.elements])
    ]


def _finite(flat: torch.Tensor) -> bool:
    return all(bool(torch.isfinite(flat[span]).all()) for span in spans(flat.numel()))
