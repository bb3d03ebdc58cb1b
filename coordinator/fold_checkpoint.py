"""Checkpoints: a directory that is whole or not there, checked by digest when it is loaded.

checkpoints/<v>/model.safetensors    tensors by name, float32 and int64 masters, ties once
checkpoints/<v>/server.safetensors   flat vectors: the server optimizer's state, `control`
checkpoints/<v>/meta.json            version, layout, digests, facts of the commit
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Final

import msgspec
import torch

from aggregation.server_optimizers import State
from aggregation.tiles import TILE_BYTES, as_bytes
from coordinator import crashpoints
from coordinator.fold_files import TEMPORARY, replacing_directory, sync_tree
from coordinator.fold_model import Model, digest_of, empty_parts
from coordinator.fold_safetensors import TORCH, Entry, Reader, open_file, write
from coordinator.stimuli import CommitFacts
from protocol.errors import MalformedError
from protocol.layout import DType, Layout, Part

FORMAT: Final = 1
MODEL, SERVER, META = "model.safetensors", "server.safetensors", "meta.json"
_NAMED: Final[tuple[Part, ...]] = ("params", "buffers", "ints")


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """`meta.json`. `key` identifies the commit that made the version, `facts` is its answer."""

    format: int = FORMAT
    job: str
    version: int
    digest: str
    server_digest: str
    control: bool
    slots: tuple[str, ...]
    key: str
    facts: CommitFacts
    layout: Layout


def save(model: Model, key: str, facts: CommitFacts, root: Path, *, fsync: bool = False) -> None:
    """Have checkpoints/<version>/ under `root`. Older ones stay: see `remove_older`."""
    meta = Meta(
        job=model.job,
        version=model.version,
        digest=model.digest,
        server_digest=_state_digest(model.state),
        control=model.control,
        slots=tuple(model.state),
        key=key,
        facts=facts,
        layout=model.layout,
    )
    target = root / str(model.version)
    if _whole(target, meta):
        # Not once more: there must be no instant without it.
        if fsync:
            sync_tree(target)
        return
    with replacing_directory(target, fsync=fsync) as folder:
        _write(folder / MODEL, _model_entries(model), model.version)
        crashpoints.reach("fold_during_checkpoint")
        _write(folder / SERVER, _server_entries(model), model.version)
        crashpoints.reach("fold_during_checkpoint")
        (folder / META).write_bytes(msgspec.json.encode(meta))
        crashpoints.reach("fold_during_checkpoint")
        if fsync:
            sync_tree(folder)
    crashpoints.reach("fold_after_checkpoint")


def _whole(folder: Path, wanted: Meta) -> bool:
    """True when this very checkpoint is there and undamaged."""
    if not folder.exists():
        return False
    try:
        _, found = load(folder)
    except (OSError, MalformedError):
        return False
    return (found.digest, found.server_digest, found.key) == (
        wanted.digest,
        wanted.server_digest,
        wanted.key,
    )


def _write(path: Path, entries: list[Entry], version: int) -> None:
    with path.open("wb") as file:
        write(file, entries, {"skerry_version": str(version)})


def _model_entries(model: Model) -> list[Entry]:
    entries: list[Entry] = []
    for part in _NAMED:
        dtype: DType = "int64" if part == "ints" else "float32"
        for slot in model.layout.slots(part):
            values = model.parts[part][slot.start : slot.start + slot.spec.elements]
            entries.append(Entry(slot.spec.name, dtype, slot.spec.shape, values))
    return entries


def _server_entries(model: Model) -> list[Entry]:
    flats = dict(model.state)
    if model.control:
        flats["control"] = model.parts["control"]
    return [Entry(name, "float32", (flat.numel(),), flat) for name, flat in flats.items()]


def load(folder: Path) -> tuple[Model, Meta]:
    """Read a checkpoint and compare its digests.

    Raises:
        MalformedError: it is damaged.
        OSError: it is not there, or cannot be read.
    """
    try:
        meta = msgspec.json.decode((folder / META).read_bytes(), type=Meta)
    except msgspec.MsgspecError as error:
        raise MalformedError(f"{folder.name}/{META} cannot be read: {error}") from None
    if meta.format != FORMAT:
        raise MalformedError(f"checkpoint {folder.name} has format {meta.format}, not {FORMAT}.")
    layout = meta.layout
    parts = empty_parts(layout, control=meta.control)
    state = {name: torch.empty(layout.elements("params")) for name in meta.slots}
    flats = {name: (flat.shape, flat) for name, flat in state.items()}
    if meta.control:
        flats["control"] = (parts["control"].shape, parts["control"])
    _read(folder / SERVER, {name: (tuple(shape), flat) for name, (shape, flat) in flats.items()})
    named: dict[str, tuple[tuple[int, ...], torch.Tensor]] = {}
    for part in _NAMED:
        for slot in layout.slots(part):
            flat = parts[part][slot.start : slot.start + slot.spec.elements]
            named[slot.spec.name] = (slot.spec.shape, flat)
    _read(folder / MODEL, named)
    if digest_of(parts) != meta.digest or _state_digest(state) != meta.server_digest:
        raise MalformedError(f"checkpoint {folder.name} does not have its own digest: damaged.")
    model = Model(
        job=meta.job,
        layout=layout,
        version=meta.version,
        digest=meta.digest,
        parts=parts,
        state=state,
    )
    return model, meta


def _read(path: Path, wanted: dict[str, tuple[tuple[int, ...], torch.Tensor]]) -> None:
    file, size = open_file(path)
    with file:
        reader = Reader(file, size)
        if {*reader.tensors} != {*wanted}:
            raise MalformedError(f"{path.name} holds other tensors than its checkpoint says.")
        for name, (shape, flat) in wanted.items():
            tensor = reader.tensors[name]
            if (tensor.shape, TORCH[tensor.dtype]) != (shape, flat.dtype):
                raise MalformedError(f"tensor {name!r} in {path.name} has another shape or type.")
            reader.read_into(name, flat)


def _state_digest(state: State) -> str:
    digest = hashlib.sha256()
    for name, flat in state.items():
        digest.update(name.encode())
        view = as_bytes(flat)
        for start in range(0, len(view), TILE_BYTES):
            digest.update(view[start : start + TILE_BYTES])
    return digest.hexdigest()


def versions(root: Path) -> list[int]:
    """The checkpoints that are there, newest first."""
    if not root.is_dir():
        return []
    return sorted((int(p.name) for p in root.iterdir() if p.name.isdecimal()), reverse=True)


def remove_older(root: Path, version: int) -> None:
    """Remove the checkpoints of earlier versions."""
    for old in versions(root):
        if old < version:
            # Under its temporary name first: killed half-way, it is never taken for a checkpoint.
            doomed = root / f"{TEMPORARY}{old}"
            shutil.rmtree(doomed, ignore_errors=True)
            (root / str(old)).rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
