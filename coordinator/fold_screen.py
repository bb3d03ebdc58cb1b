"""Screening: read an update whole and say what is in it. Nothing is changed, nothing is kept."""

from __future__ import annotations

import bisect
import math
from pathlib import Path

import msgspec
import torch

from aggregation.fold import WIRE_DTYPE
from aggregation.screen import energy, nonfinite_positions
from aggregation.tiles import from_bytes, tile_buffer
from coordinator.stimuli import UpdateFacts
from protocol.bodies import UpdateMeta, dense_parts
from protocol.bodyio import BodyReader
from protocol.errors import LimitError, MalformedError
from protocol.layout import ELEMENT_BYTES, Layout, Part

_NOTHING = UpdateFacts(
    epoch=0,
    clock=0,
    attempt=0,
    base_version=0,
    base_digest="",
    layout_digest="",
    examples=0.0,
    steps=0,
    effective_steps=0.0,
    norm=0.0,
)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What updates of a job must look like."""

    layout: Layout
    layout_digest: str
    control: bool


def no_facts(problem: str) -> UpdateFacts:
    """Facts about a spool that cannot be read at all."""
    return msgspec.structs.replace(_NOTHING, problem=problem)


def screen_update(path: Path, shape: Shape) -> UpdateFacts:
    """Facts about a spool; `problem` names the first thing that is wrong, and where.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        try:
            reader = BodyReader(file.readinto)
        except (MalformedError, LimitError) as error:
            return no_facts(f"the update cannot be read: {error.message}")
        meta = reader.meta
        if not isinstance(meta, UpdateMeta):
            return no_facts("this body is a snapshot of a version, not an update.")
        facts = _facts(meta)
        problem = _problem_of_meta(meta, shape)
        if problem:
            return msgspec.structs.replace(facts, problem=problem)
        try:
            norm, problem = _read_values(reader, meta, shape.layout)
        except (MalformedError, LimitError) as error:
            return msgspec.structs.replace(
                facts, problem=f"the update cannot be read: {error.message}"
            )
    return msgspec.structs.replace(facts, norm=norm, problem=problem)


def _facts(meta: UpdateMeta) -> UpdateFacts:
    return UpdateFacts(
        epoch=meta.epoch,
        clock=meta.clock,
        attempt=meta.attempt,
        base_version=meta.base_version,
        base_digest=meta.base_digest,
        layout_digest=meta.layout_digest,
        examples=meta.examples,
        steps=meta.steps,
        effective_steps=meta.effective_steps,
        norm=0.0,
        train_seconds=meta.train_seconds,
        metrics=meta.metrics,
    )


def _problem_of_meta(meta: UpdateMeta, shape: Shape) -> str:
    """What is wrong with an update by its metadata alone; empty when nothing is."""
    found = {part.name: part.bytes for part in meta.parts}
    wanted = {
        part.name: part.bytes for part in dense_parts(shape.layout, "update", control=shape.control)
    }
    for name in [*found, *wanted]:
        if name not in wanted:
            return f"the update has a part {name!r}; this job has {', '.join(wanted)}."
        if name not in found:
            return f"the update has no part {name!r}; this job has {', '.join(wanted)}."
    for name, size in wanted.items():
        if found[name] != size:
            return _size_problem(name, found[name], size, shape.layout)
    if [*found] != [*wanted]:
        return f"the parts come in the order {', '.join(found)}; it must be {', '.join(wanted)}."
    if meta.layout_digest != shape.layout_digest:
        return (
            f"the update is of another layout ({meta.layout_digest[:12] or 'none'}); the job's "
            f"is {shape.layout_digest[:12]}: names, shapes, types or roles of tensors differ."
        )
    if meta.examples <= 0.0:
        return "the update declares zero examples: it cannot be weighed."
    return ""


def _size_problem(part: Part, found: int, wanted: int, layout: Layout) -> str:
    """Names the tensors that do not fit into a part that is too short."""
    text = f"part {part} has {found} bytes, the job's layout makes {wanted} of it"
    if found > wanted:
        return f"{text}: {found - wanted} bytes belong to no tensor of the job."
    elements = found // ELEMENT_BYTES[part]
    missing = [
        slot.spec.name for slot in layout.slots(part) if slot.start + slot.spec.elements > elements
    ]
    names = ", ".join(repr(name) for name in missing[:3])
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return f"{text}: there are no values for tensor {names}{more}."


def _read_values(reader: BodyReader, meta: UpdateMeta, layout: Layout) -> tuple[float, str]:
    """Norm of delta, and what is wrong with the values; reads to the END frame."""
    squares: list[float] = []
    suspects = _NonFinite(layout)
    for index, offset, view in reader.pieces(tile_buffer()):
        part = meta.parts[index].name
        if part == "ints":
            continue
        tile = from_bytes(view, WIRE_DTYPE[part])
        square = energy(tile)
        if math.isnan(square):
            suspects.add(part, offset // ELEMENT_BYTES[part], tile)
        elif part == "delta":
            squares.append(square)
    return math.sqrt(math.fsum(squares)), suspects.problem()


class _NonFinite:
    """Counts NaN and infinity per tensor; used only once one was seen."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._counts: dict[tuple[Part, str], int] = {}

    def add(self, part: Part, start: int, tile: torch.Tensor) -> None:
        slots = [slot for slot in self._layout.slots(part) if slot.spec.elements]
        starts = [slot.start for slot in slots]
        for position in nonfinite_positions(tile):
            name = slots[bisect.bisect_right(starts, start + position) - 1].spec.name
            self._counts[part, name] = self._counts.get((part, name), 0) + 1

    def problem(self) -> str:
        if not self._counts:
            return ""
        (part, name), count = next(iter(self._counts.items()))
        values = "1 value that is" if count == 1 else f"{count} values that are"
        more = len(self._counts) - 1
        others = f"; so do {more} more tensors" if more else ""
        return f"tensor {name!r} of part {part} holds {values} NaN or infinite{others}."
