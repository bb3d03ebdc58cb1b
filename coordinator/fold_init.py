"""Version 0 on its way in: a snapshot body from a site, or a safetensors file from a person."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from coordinator.fold_model import (
    Model,
    digest_of,
    empty_parts,
    nonfinite_tensors,
    read_version,
)
from coordinator.fold_safetensors import Reader, Tensor, open_file
from protocol.errors import MalformedError
from protocol.layout import FLOAT_DTYPES, Layout, Part, Role, TensorSpec, check_layout

#: Floating buffers of PyTorch's own layers; everything else that floats is taken as trainable.
BUFFER_ENDINGS: Final = ("running_mean", "running_var")
RESERVED: Final = "__metadata__"  # a safetensors file cannot hold a tensor of this name


def read_init(path: Path, job: str, *, control: bool) -> Model:
    """Version 0 from a site's snapshot body. A control variate that the job needs starts as zero.

    Raises:
        MalformedError: saying what is wrong with it.
        OSError: the file cannot be read.
    """
    model = read_version(path)
    parts = model.parts
    if control and "control" not in parts:
        parts |= {"control": empty_parts(model.layout, control=True)["control"]}
    elif not control and "control" in parts:
        raise MalformedError("version 0 has a control variate, but the job does not use SCAFFOLD.")
    return _version_0(job, model.layout, parts)


def read_init_safetensors(path: Path, job: str, layout: Layout | None, *, control: bool) -> Model:
    """Version 0 from a state dict in a safetensors file, cast to float32 and int64 masters.

    Raises:
        MalformedError: naming the tensors that are missing, unknown or of another shape.
        OSError: the file cannot be read.
    """
    file, size = open_file(path)
    with file:
        reader = Reader(file, size)
        if layout is None:
            layout = guess_layout(reader.tensors)
        sources = _sources(layout, reader.tensors)
        parts = empty_parts(layout, control=control)
        names: tuple[Part, ...] = ("params", "buffers", "ints")
        for part in names:
            for slot in layout.slots(part):
                flat = parts[part][slot.start : slot.start + slot.spec.elements]
                reader.read_into(sources[slot.spec.name], flat)
    return _version_0(job, layout, parts)


def guess_layout(tensors: dict[str, Tensor]) -> Layout:
    """Roles from names and types, in file order, when no site has said yet what the roles are."""
    specs: list[TensorSpec] = []
    for name, (dtype, shape, _) in tensors.items():
        floats = dtype in FLOAT_DTYPES
        buffer = floats and name.rpartition(".")[2] in BUFFER_ENDINGS
        role: Role = "buffer" if buffer else "train" if floats else "int"
        specs.append(TensorSpec(name=name, shape=shape, dtype=dtype, role=role))
    layout = Layout(tensors=tuple(specs))
    check_layout(layout)
    return layout


def _sources(layout: Layout, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Tensor of the layout -> tensor of the file. A tied tensor may stand under any of its names;
    frozen and local ones may be there and are left alone.
    """
    aliases: dict[str, list[str]] = {}
    for spec in layout.tensors:
        aliases.setdefault(spec.tie or spec.name, []).append(spec.name)
    known = {spec.name for spec in layout.tensors}
    problems = [f"unknown tensor {name!r}" for name in tensors if name not in known]
    sources: dict[str, str] = {}
    for spec in layout.tensors:
        if spec.tie or spec.role in ("frozen", "local"):
            continue
        source = next((name for name in aliases[spec.name] if name in tensors), "")
        if not source:
            problems.append(f"missing tensor {spec.name!r}")
            continue
        found = tensors[source]
        if found.shape != spec.shape:
            problems.append(f"tensor {source!r} has shape {found.shape}, the job has {spec.shape}")
        if (found.dtype in FLOAT_DTYPES) != (spec.dtype in FLOAT_DTYPES):
            problems.append(f"tensor {source!r} is {found.dtype}, the job has {spec.dtype}")
        sources[spec.name] = source
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise MalformedError(f"the safetensors file does not fit: {'; '.join(problems[:8])}{more}.")
    return sources


def _version_0(job: str, layout: Layout, parts: dict[Part, torch.Tensor]) -> Model:
    if any(spec.name == RESERVED for spec in layout.tensors):
        raise MalformedError(f"a tensor cannot be called {RESERVED!r}.")
    bad = nonfinite_tensors(layout, parts)
    if bad:
        names = ", ".join(repr(name) for name in bad[:3])
        raise MalformedError(f"NaN or infinity in tensor {names} ({len(bad)} in all).")
    return Model(job=job, layout=layout, version=0, digest=digest_of(parts), parts=parts, state={})
