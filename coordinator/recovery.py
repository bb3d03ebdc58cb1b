"""What brings a new fold process to where a request begins: the last checkpoint, and the commits
since (design 4.5). Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.foldapi import Export, Fold, FoldRequest, Recover, Refold, SaveCheckpoint
from coordinator.journal import CheckpointMade, Entry, RoundClosed, VersionMade
from protocol.jobspec import JobSpec

KINDS = ("checkpoint_made", "round_closed", "version_made")  # the entries that matter


def recovery(request: FoldRequest, spec: JobSpec, entries: Iterable[Entry]) -> Recover:
    """The request to be made before `request`; `entries` are the journal of its job, in order."""
    upto = _begins_with(request)
    checkpoint = 0
    closed: dict[int, RoundClosed] = {}
    folds: list[Refold] = []
    for entry in entries:
        match entry.event:
            case CheckpointMade(version=version) if upto is None or version <= upto:
                checkpoint = version
            case RoundClosed(cohort=cohort, version=version) if cohort:
                closed[version] = entry.event
            case VersionMade(version=version, digest=digest) if version in closed:
                by = closed[version]
                folds.append(
                    Refold(
                        version=version,
                        digest=digest,
                        cohort=by.cohort,
                        active_sites=by.active_sites,
                        additive=by.additive,
                    )
                )
            case _:
                pass
    return Recover(
        id=0,
        job=request.job,
        folder=request.folder,
        spec=spec,
        checkpoint=checkpoint,
        folds=tuple(
            fold
            for fold in folds
            if fold.version > checkpoint and (upto is None or fold.version <= upto)
        ),
    )


def _begins_with(request: FoldRequest) -> int | None:
    """The version that a request begins with; None: the newest."""
    match request:
        case Fold(base_version=version) | SaveCheckpoint(version=version) | Export(version=version):
            return version
        case _:
            return None
