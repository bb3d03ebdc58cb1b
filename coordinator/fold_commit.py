"""One commit: fold a cohort's spools in the order given, judge the sum, then move the model.

Everything that can go wrong goes wrong before the model is touched: the sums are made beside it,
the server optimizer's step is rehearsed on copies of each tile, and only when every number came out
finite is it done in place. Peak memory beside the model and its server state is one sum, and with
adaptive delay compensation one vector more.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch

from aggregation import compensation, server_optimizers
from aggregation.fold import WIRE_DTYPE, Accumulator, Piece
from aggregation.scaffold import server_change_
from aggregation.screen import energy, energy_of, nonfinite_positions
from aggregation.server_optimizers import ServerOptimizer, tile_of
from aggregation.tiles import TILE_BYTES, from_bytes, spans
from aggregation.weights import Share, Weights, coefficients, weigh
from coordinator.fold_delay import Delayed, Delays
from coordinator.fold_mapped import MappedBody
from coordinator.fold_model import Model
from coordinator.journal import CohortMember
from protocol.bodies import UpdateMeta, dense_parts
from protocol.bodyio import BodyReader
from protocol.errors import MalformedError
from protocol.jobspec import JobSpec
from protocol.layout import Part

#: Spools that are read side by side: the more, the less often a tile of the sum leaves the cache.
ABREAST: Final = 16

_NOTHING: Final = (-1, 0, memoryview(b""))


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """What a commit did to the parameters. With a `problem` it did nothing."""

    update_norm: float = 0.0
    model_norm: float = 0.0
    problem: str = ""


def commit(
    model: Model,
    spools: Sequence[Path],
    cohort: Sequence[CohortMember],
    spec: JobSpec,
    *,
    version: int,
    active_sites: int,
    versions: Path,
    additive: bool = False,
) -> Moved:
    """Move `model` in place to `version` by the updates of a cohort; its number and digest are the
    caller's to set.

    `spools` are the files of the cohort's updates, in its order, `versions` the folder of those
    that they started from. With `additive` the coefficients are the journal's, and the mean is
    their sum: see `journal.RoundClosed`.

    Raises:
        MalformedError, OSError: a spool that was screened cannot be read any more, or a base that
            delay compensation needs. Nothing moved.
    """
    metas = [_meta(p, m, model) for p, m in zip(spools, cohort, strict=True)]
    shares = [Share(meta.examples, meta.effective_steps) for meta in metas]
    if additive:
        weights = coefficients([member.weight for member in cohort])
    else:
        weights = weigh(spec.weights.by, shares, examples_max=spec.weights.examples_max)
    if not weights.usable:
        return Moved(problem="no usable contribution: nobody in the cohort has examples.")
    parts = dense_parts(model.layout, "update", control=model.control)
    sums = Accumulator({part.name: model.layout.elements(part.name) for part in parts})
    how = compensation.for_job(spec)
    delays = None
    if how is not None:
        updates = [_delayed(*pair, model, versions) for pair in zip(metas, cohort, strict=True)]
        delays = Delays(model, updates, how)
    fold_spools(spools, weights, sums, delays)
    square = None if delays is None else delays.mean_square
    optimizer = server_optimizers.for_job(spec, version)
    return _move(model, sums, weights, optimizer, active_sites=active_sites, mean_square=square)


def _delayed(meta: UpdateMeta, member: CohortMember, model: Model, versions: Path) -> Delayed:
    fresh = member.version in (-1, model.version)
    base = None if fresh else versions / f"{member.version}.body"
    return Delayed(member, base, meta.steps)


def fold_spools(
    paths: Sequence[Path], weights: Weights, sums: Accumulator, delays: Delays | None = None
) -> None:
    """Add the updates in these files to `sums`, in order.

    `delays` compensates each update first. Per element the order of the additions is that of
    `paths`; the files are read side by side only so that a tile of the sum is added to while it is
    in the cache. Checksums are not compared again: every frame was checked when it arrived and when
    it was screened, and what a damaged disk does after that shows in the digests of recovery.

    Raises:
        MalformedError, OSError: a file cannot be read; `sums` is then worth nothing.
    """
    for first in range(0, len(paths), ABREAST):
        with contextlib.ExitStack() as files:
            group = range(first, min(first + ABREAST, len(paths)))
            bodies = [files.enter_context(MappedBody(paths[k])) for k in group]
            readers = [BodyReader(body.readinto) for body in bodies]
            names = [part.name for part in readers[0].meta.parts]
            streams = [
                reader.views(body.view, TILE_BYTES)
                for reader, body in zip(readers, bodies, strict=True)
            ]
            others = [*zip(group[1:], streams[1:], strict=True)]
            for index, offset, view in streams[0]:
                part, size = names[index], len(view)
                values = from_bytes(view, WIRE_DTYPE[part])
                piece = sums.piece(part, offset // values.itemsize, values.numel())
                factors = _factors(weights, part)
                late = delays if part == "delta" else None
                _add(piece, values, factors[first], late, first, offset)
                for k, stream in others:
                    at, start, found = next(stream, _NOTHING)
                    if at != index or start != offset or len(found) != size:
                        raise MalformedError(f"spool {paths[k].name} has other parts.")
                    values = from_bytes(found, WIRE_DTYPE[part])
                    _add(piece, values, factors[k], late, k, offset)
            for k, stream in others:
                if next(stream, None) is not None:
                    raise MalformedError(f"spool {paths[k].name} has other parts.")


def _add(
    piece: Piece, values: torch.Tensor, weight: float, delays: Delays | None, k: int, offset: int
) -> None:
    if delays is not None:
        values = delays.compensated(k, offset // values.itemsize, values)
    piece.add(values, weight)


def _factors(weights: Weights, part: Part) -> Sequence[float]:
    if part == "delta":
        return weights.delta
    return (1.0,) * len(weights.values) if part == "control" else weights.values


def _meta(path: Path, member: CohortMember, model: Model) -> UpdateMeta:
    """What the update declares, after a check that it is the one that was screened."""
    with path.open("rb", buffering=0) as file:
        meta = BodyReader(file.readinto).meta
    if not isinstance(meta, UpdateMeta):
        raise MalformedError(f"spool {member.spool} of site {member.site!r} is not an update.")
    if (meta.site, meta.epoch, meta.clock) != (member.site, member.epoch, member.clock):
        raise MalformedError(
            f"spool {member.spool} holds clock {meta.clock} of site {meta.site!r}, not clock "
            f"{member.clock} of site {member.site!r}."
        )
    if meta.parts != dense_parts(model.layout, "update", control=model.control):
        raise MalformedError(f"spool {member.spool} of site {member.site!r} has other parts.")
    return meta


def _move(
    model: Model,
    sums: Accumulator,
    weights: Weights,
    optimizer: ServerOptimizer,
    *,
    active_sites: int,
    mean_square: torch.Tensor | None = None,
) -> Moved:
    params, gradient = model.parts["params"], sums.sums["delta"]
    own = {name: model.state[name] for name in optimizer.slots}
    lengths: list[float] = []
    heights: list[float] = []
    for span in spans(params.numel()):
        tile = gradient[span].div_(-weights.delta_total)
        lengths.append(energy(tile))
        if math.isnan(lengths[-1]):
            return _not_finite(model, span, tile, "the mean update is")
        trial = params[span].clone()
        state = {name: flat.clone() for name, flat in tile_of(own, span).items()}
        optimizer.step(state, trial, tile.clone() if state else tile)
        heights.append(energy(trial))
        for moved, square in ((trial, heights[-1]), *((t, energy(t)) for t in state.values())):
            if math.isnan(square):
                return _not_finite(model, span, moved, "the server optimizer's step would be")
        if mean_square is not None and math.isnan(energy(mean_square[span])):
            return _not_finite(model, span, mean_square[span], "the mean of squared gradients is")
        if not own:
            tile.copy_(trial)  # without server state the rehearsal is the performance
    buffers = sums.buffers_mean(weights.values_total)
    if weights.part < 1.0:  # a cohort that is a part of all moves values by its part
        buffers.lerp_(model.parts["buffers"], 1.0 - weights.part)
    if math.isnan(energy_of(buffers)):
        return Moved(problem="the mean of the buffers is not finite: no version was made.")
    if model.control:
        for span in spans(params.numel()):
            trial = model.parts["control"][span].clone()
            server_change_(trial, sums.sums["control"][span], sites=active_sites)
            if math.isnan(energy(trial)):
                return _not_finite(model, span, trial, "the control variate would be")
    if mean_square is not None:
        model.state[compensation.SLOT] = mean_square
    if own:
        for span in spans(params.numel()):
            optimizer.step(tile_of(own, span), params[span], gradient[span])
    else:
        model.parts["params"] = gradient
    model.parts["buffers"].copy_(buffers)
    ints = sums.ints_mean(weights.values_total)
    if weights.part < 1.0:
        before = model.parts["ints"]
        ints = before + ((ints - before).to(torch.float64) * weights.part).round().to(torch.int64)
    model.parts["ints"].copy_(ints)
    if model.control:
        server_change_(model.parts["control"], sums.sums["control"], sites=active_sites)
    return Moved(
        update_norm=math.sqrt(math.fsum(lengths)), model_norm=math.sqrt(math.fsum(heights))
    )


def _not_finite(model: Model, span: slice, tile: torch.Tensor, what: str) -> Moved:
    position = span.start + nonfinite_positions(tile)[0]
    slots = [slot for slot in model.layout.slots("params") if slot.start <= position]
    name = next(slot.spec.name for slot in reversed(slots) if slot.spec.elements)
    return Moved(problem=f"{what} not finite in tensor {name!r}: no version was made.")
