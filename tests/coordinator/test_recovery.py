"""A new fold process begins at the last checkpoint and folds what was committed since."""

from __future__ import annotations

from coordinator import journal as j
from coordinator.foldapi import DropJob, Fold, FoldRequest
from coordinator.recovery import recovery
from protocol.jobspec import JobSpec, TaskRef

SPEC = JobSpec(name="n", task=TaskRef(name="t"))


def journal(versions: int, *, checkpoints: tuple[int, ...]) -> list[j.Entry]:
    events: list[j.Event] = [j.VersionMade(job="j", version=0, digest="d0", bytes=1)]
    for version in range(1, versions + 1):
        part = j.CohortMember(site="a", epoch=1, clock=version, spool=f"s{version}")
        void = j.RoundClosed(
            job="j", round=version, version=version - 1, cohort=(), active_sites=1, reason="void"
        )
        closed = j.RoundClosed(
            job="j", round=version, version=version, cohort=(part,), active_sites=1, reason=""
        )
        events += [
            void,
            closed,
            j.VersionMade(job="j", version=version, digest=f"d{version}", bytes=1),
        ]
        if version in checkpoints:
            events.append(j.CheckpointMade(job="j", version=version))
    return [j.Entry(seq=n, now=0.0, event=event) for n, event in enumerate(events, 1)]


def fold(base: int) -> FoldRequest:
    return Fold(
        id=0, job="j", folder="f", spec=SPEC, version=base + 1, base_version=base,
        base_digest="", cohort=(), active_sites=1,
    )  # fmt: skip


def test_what_no_checkpoint_covers_is_folded_again_in_order() -> None:
    found = recovery(fold(5), SPEC, journal(5, checkpoints=(2,)))
    assert found.checkpoint == 2
    assert [(one.version, one.digest) for one in found.folds] == [(3, "d3"), (4, "d4"), (5, "d5")]
    assert [one.cohort[0].spool for one in found.folds] == ["s3", "s4", "s5"]


def test_a_request_about_an_older_version_looks_no_further() -> None:
    found = recovery(fold(3), SPEC, journal(5, checkpoints=(2, 4)))
    assert (found.checkpoint, [one.version for one in found.folds]) == (2, [3])


def test_a_request_without_a_version_means_the_newest() -> None:
    found = recovery(DropJob(id=0, job="j", folder="f"), SPEC, journal(3, checkpoints=(1, 2)))
    assert (found.checkpoint, [one.version for one in found.folds]) == (2, [3])
