"""The pretended fold process keeps to the protocol of the real one."""

from __future__ import annotations

from coordinator.foldapi import (
    DropJob,
    Fold,
    Folded,
    InitTaken,
    Recover,
    Refold,
    SaveCheckpoint,
    Saved,
    Screen,
    Screened,
    TakeInit,
)
from coordinator.journal import CohortMember
from protocol.bodies import UpdateMeta, dense_parts
from simulation.bodies import MemoryFiles, encode_snapshot, encode_update, vector_layout
from simulation.fakefold import FakeFold
from tests.coordinator.coretools import make_spec

LAYOUT = vector_layout(2)
SPEC = make_spec()


def update(site: str, delta: list[float], examples: float) -> bytes:
    meta = UpdateMeta(
        job="j",
        site=site,
        epoch=1,
        clock=0,
        attempt=1,
        base_version=0,
        base_digest="d",
        layout_digest=LAYOUT.digest(),
        examples=examples,
        steps=1,
        effective_steps=1.0,
        parts=dense_parts(LAYOUT, "update", control=False),
    )
    return encode_update(meta, delta)


def prepared() -> tuple[MemoryFiles, FakeFold, str]:
    files = MemoryFiles()
    fold = FakeFold(files)
    files.put("j/init.body", encode_snapshot("j", 0, LAYOUT, [0.0, 0.0]))
    taken = fold.handle(TakeInit(id=1, job="j", folder="j", spec=SPEC))
    assert isinstance(taken, InitTaken)
    return files, fold, taken.facts.digest


def test_init_is_refused_when_it_does_not_fit_or_is_no_snapshot() -> None:
    files, fold, _ = prepared()
    other = TakeInit(id=1, job="j", folder="j", spec=SPEC, layout=vector_layout(3))
    answer = fold.handle(other)
    assert isinstance(answer, InitTaken)
    assert "does not fit" in answer.facts.problem
    files.put("j/init.body", update("a", [1.0, 2.0], 1.0))
    answer = fold.handle(TakeInit(id=1, job="j", folder="j", spec=SPEC))
    assert isinstance(answer, InitTaken)
    assert answer.facts.problem == "not a snapshot"


def test_screening_names_what_is_wrong() -> None:
    files, fold, _ = prepared()
    problems = []
    for delta, examples in (([1.0, 2.0], 5.0), ([float("inf"), 2.0], 5.0), ([1.0, 2.0], 0.0)):
        files.put("j/spools/s", update("a", delta, examples))
        answer = fold.handle(Screen(id=1, job="j", folder="j", spool="s"))
        assert isinstance(answer, Screened)
        problems.append(answer.facts.problem)
    assert problems[0] == ""
    assert "not finite" in problems[1]
    assert "zero examples" in problems[2]


def test_folding_is_a_weighted_mean_and_may_be_asked_twice() -> None:
    files, fold, digest = prepared()
    files.put("j/spools/a", update("a", [1.0, 0.0], 1.0))
    files.put("j/spools/b", update("b", [5.0, 4.0], 3.0))
    cohort = tuple(CohortMember(site=s, epoch=1, clock=0, spool=s) for s in ("a", "b"))
    request = Fold(
        id=1,
        job="j",
        folder="j",
        spec=SPEC,
        version=1,
        base_version=0,
        base_digest=digest,
        cohort=cohort,
        active_sites=2,
    )
    first, second = fold.handle(request), fold.handle(request)
    assert first == second
    assert isinstance(first, Folded)
    from simulation.bodies import decode

    assert decode(files.get("j/versions/1.body"))[1] == [4.0, 3.0]
    fold.problem = "disk full"
    failed = fold.handle(request)
    assert isinstance(failed, Folded)
    assert failed.facts.problem == "disk full"


def test_the_other_requests_are_answered() -> None:
    _, fold, digest = prepared()
    saved = fold.handle(SaveCheckpoint(id=1, job="j", folder="j", version=0))
    assert isinstance(saved, Saved)
    refold = Refold(version=1, digest=digest, cohort=(), active_sites=1)
    recover = Recover(id=1, job="j", folder="j", spec=SPEC, checkpoint=0, folds=(refold,))
    answer = fold.handle(recover)
    assert isinstance(answer, Folded)
    assert answer.facts.version == 1
    assert fold.handle(DropJob(id=1, job="j", folder="j")).fault == ""
