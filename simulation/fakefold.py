"""The fold process in plain Python: dense vectors, weighted mean, no torch."""

from __future__ import annotations

import math

from coordinator.foldapi import (
    Done,
    Fold,
    FoldAnswer,
    Folded,
    FoldRequest,
    InitTaken,
    Recover,
    SaveCheckpoint,
    Saved,
    Screen,
    Screened,
    TakeInit,
)
from coordinator.journal import CohortMember
from coordinator.stimuli import CommitFacts, InitFacts, UpdateFacts
from protocol.bodies import SnapshotMeta, UpdateMeta
from protocol.errors import MalformedError
from simulation.bodies import Files, decode, encode_snapshot


class FakeFold:
    """Answers fold requests; versions lie in `files`, so nothing is lost when it is made anew.

    `problem` makes every commit fail with this sentence while it is set.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self.problem = ""

    def handle(self, request: FoldRequest) -> FoldAnswer:
        """The answer to a request."""
        match request:
            case TakeInit():
                return InitTaken(id=request.id, facts=self._take_init(request))
            case Screen():
                return Screened(id=request.id, facts=self._screen(request))
            case Fold():
                return Folded(id=request.id, facts=self._fold(request))
            case SaveCheckpoint():
                return Saved(id=request.id, version=request.version)
            case Recover():
                version = request.folds[-1].version if request.folds else request.checkpoint
                return Folded(id=request.id, facts=CommitFacts(version=version))
            case _:
                return Done(id=request.id)

    def _take_init(self, request: TakeInit) -> InitFacts:
        body = self._files.get(f"{request.job}/init.body")
        meta, params = decode(body)
        if not isinstance(meta, SnapshotMeta):
            return InitFacts(problem="not a snapshot")
        if request.layout is not None and request.layout != meta.layout:
            return InitFacts(problem="the file does not fit the layout of the sites")
        return self._store(request.job, 0, meta, params)

    def _store(self, job: str, version: int, meta: SnapshotMeta, params: list[float]) -> InitFacts:
        body = encode_snapshot(job, version, meta.layout, params)
        self._files.put(f"{job}/versions/{version}.body", body)
        made, _ = decode(body)
        assert isinstance(made, SnapshotMeta)
        return InitFacts(digest=made.digest, bytes=len(body), layout=meta.layout)

    def _base(self, job: str, version: int) -> tuple[SnapshotMeta, list[float]]:
        meta, params = decode(self._files.get(f"{job}/versions/{version}.body"))
        assert isinstance(meta, SnapshotMeta)
        return meta, params

    def _update(self, job: str, spool: str) -> tuple[UpdateMeta, list[float]]:
        meta, delta = decode(self._files.get(f"{job}/spools/{spool}"))
        if not isinstance(meta, UpdateMeta):
            raise MalformedError("not an update")
        return meta, delta

    def _screen(self, request: Screen) -> UpdateFacts:
        meta, delta = self._update(request.job, request.spool)
        problem = ""
        if not all(math.isfinite(x) for x in delta):
            problem = "tensor 'w' holds a value that is not finite"
        elif meta.examples <= 0:
            problem = "zero examples: no usable contribution"
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
            norm=meta.norm,
            train_seconds=meta.train_seconds,
            metrics=meta.metrics,
            problem=problem,
        )

    def _fold(self, request: Fold) -> CommitFacts:
        if self.problem:
            return CommitFacts(version=request.version, problem=self.problem)
        meta, params = self._base(request.job, request.base_version)
        assert meta.digest == request.base_digest
        mean = self._mean(request.job, request.cohort, len(params), request.additive)
        made = [x + d for x, d in zip(params, mean, strict=True)]
        facts = self._store(request.job, request.version, meta, made)
        return CommitFacts(
            version=request.version,
            digest=facts.digest,
            bytes=facts.bytes,
            update_norm=math.hypot(*mean),
            model_norm=math.hypot(*made),
        )

    def _mean(
        self, job: str, cohort: tuple[CohortMember, ...], elements: int, additive: bool
    ) -> list[float]:
        total, weights = [0.0] * elements, 0.0
        for member in cohort:
            meta, delta = self._update(job, member.spool)
            weight = member.weight if additive else meta.examples
            total = [t + weight * d for t, d in zip(total, delta, strict=True)]
            weights += weight
        return total if additive else [t / weights for t in total]
