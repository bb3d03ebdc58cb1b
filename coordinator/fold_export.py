"""Export: a version as a safetensors file that plain `load_state_dict(strict=True)` accepts."""

from __future__ import annotations

from pathlib import Path

from coordinator.fold_files import replacing
from coordinator.fold_model import Model
from coordinator.fold_safetensors import Entry, write
from protocol.layout import Part


def export(model: Model, target: Path) -> tuple[str, tuple[str, ...]]:
    """Write every tensor under its name in the model's dtype, cast once from the master.

    Tied tensors stand under each of their names. Answers with the file's sha256, and the names of
    the tensors that never left the sites (frozen, local).
    """
    flats: dict[str, Entry] = {}
    parts: tuple[Part, ...] = ("params", "buffers", "ints")
    for part in parts:
        for slot in model.layout.slots(part):
            values = model.parts[part][slot.start : slot.start + slot.spec.elements]
            flats[slot.spec.name] = Entry(slot.spec.name, slot.spec.dtype, slot.spec.shape, values)
    entries = []
    missing = []
    for spec in model.layout.tensors:
        entry = flats.get(spec.tie or spec.name)
        if entry is None:
            missing.append(spec.name)
        else:
            entries.append(Entry(spec.name, spec.dtype, spec.shape, entry.values))
    metadata = {"format": "pt", "skerry_job": model.job, "skerry_version": str(model.version)}
    with replacing(target) as file:
        digest = write(file, entries, metadata)
    return digest, tuple(missing)
