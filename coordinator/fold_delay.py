"""Delay compensation of a cohort: the versions its updates started from, read beside the updates.

A base is looked at tile by tile, in step with the update, in the file that sites downloaded: it
takes no memory. What changes besides the sum, the running mean of squared gradients, is made beside
the old one and takes its place only when the commit was judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from aggregation.compensation import SLOT, Compensation, compensated
from aggregation.tiles import TILE_BYTES, from_bytes
from coordinator.fold_mapped import MappedBody
from coordinator.fold_model import Model
from coordinator.foldapi import Refold
from coordinator.journal import CohortMember
from protocol.bodies import SnapshotMeta, dense_parts
from protocol.bodyio import BodyReader
from protocol.errors import MalformedError
from protocol.words import some


class Delayed(NamedTuple):
    """Where one update started, and how far it went: its base, None when that is the model as it
    is, and the steps it took.
    """

    member: CohortMember
    base: Path | None
    steps: int


class Delays:
    """Compensates the updates of one commit; `mean_square` is v after it, when it is adaptive."""

    def __init__(self, model: Model, updates: Sequence[Delayed], how: Compensation) -> None:
        self._model = model
        self._updates = updates
        self._how = how
        self._before = model.state.get(SLOT)
        self._streams: dict[int, Iterator[tuple[int, int, memoryview]]] = {}
        self.mean_square = None if self._before is None else torch.empty_like(self._before)

    def compensated(self, k: int, start: int, values: torch.Tensor) -> torch.Tensor:
        """Elements [start, start + len) of update k's delta, compensated.

        To be called for every range in order, and for each range in the order of the cohort.

        Raises:
            MalformedError: the update's base is gone, or is not what it should be.
        """
        span = slice(start, start + values.numel())
        square = self.mean_square
        if square is not None and k == 0:
            assert self._before is not None
            square[span].copy_(self._before[span])
        return compensated(
            values,
            self._drift(k, span),
            travelled=self._how.lr * self._updates[k].steps,
            strength=self._how.strength,
            mean_square=None if square is None else square[span],
        )

    def _drift(self, k: int, span: slice) -> torch.Tensor | None:
        update = self._updates[k]
        if update.base is None:
            return None
        if span.start == 0:
            self._streams[k] = _base_tiles(self._model, update.member, update.base)
        part, offset, view = next(self._streams[k], (-1, 0, memoryview(b"")))
        if (part, offset, len(view)) != (0, 4 * span.start, 4 * (span.stop - span.start)):
            raise MalformedError(f"{update.base.name} is cut into other tiles than the update.")
        now = self._model.parts["params"][span]
        if span.stop == self._model.parts["params"].numel():
            del self._streams[k]
        return now - from_bytes(view, torch.float32)


def _base_tiles(
    model: Model, member: CohortMember, path: Path
) -> Iterator[tuple[int, int, memoryview]]:
    try:
        body = MappedBody(path)
    except FileNotFoundError:
        raise MalformedError(_gone([member.version], [member])) from None
    reader = BodyReader(body.readinto)
    meta = reader.meta
    parts = dense_parts(model.layout, "snapshot", control=model.control)
    if not isinstance(meta, SnapshotMeta) or meta.version != member.version or meta.parts != parts:
        raise MalformedError(f"{path.name} is not version {member.version} of this model.")
    return reader.views(body.view, TILE_BYTES)


def bases(folds: Sequence[Refold]) -> set[int]:
    """Versions whose files are needed to make these commits again: all that updates started from,
    but for those that started from the version before their own.
    """
    return {m.version for fold in folds for m in fold.cohort if 0 <= m.version < fold.version - 1}


def missing_bases(folds: Sequence[Refold], start: int, file: Callable[[int], Path]) -> str:
    """Why commits of the past cannot be made again from version `start` on: bases before it that
    are gone. Later ones are made on the way. Empty: nothing is missing.
    """
    gone = sorted(v for v in bases(folds) if v < start and not file(v).exists())
    needing = [m for fold in folds for m in fold.cohort if m.version in gone]
    return _gone(gone, needing) if gone else ""


def _gone(versions: Sequence[int], members: Sequence[CohortMember]) -> str:
    who = some([f"site {m.site!r} (clock {m.clock})" for m in members])
    what = "version" if len(versions) == 1 else "versions"
    names = ", ".join(map(str, versions))
    return (
        f"delay compensation needs {what} {names}, where updates of {who} started, and the file is "
        f"gone: put versions/{versions[0]}.body back"
    )
