"""Commits through the fold service: the mathematics of a round, as sites would see it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import fold_commit
from coordinator.fold import FoldService
from coordinator.fold_files import DISK_FULL
from coordinator.foldapi import DropJob, Fold, TakeInit
from protocol.jobspec import Server, Weights
from tests.coordinator.folding import JOB, SCAFFOLD, Bench, layout, spec, tensor

BATCH_NORM = layout(
    tensor("bn.weight", (2,)),
    tensor("bn.bias", (2,)),
    tensor("bn.running_mean", (2,), "buffer"),
    tensor("bn.running_var", (2,), "buffer"),
    tensor("bn.num_batches_tracked", (), "int", "int64"),
)
PAIR = layout(tensor("w", (2,)))


@pytest.mark.parametrize(("counters", "mean"), [((3, 5), 4), ((3, 4), 4), ((0, 0), 0)])
def test_a_zero_dimensional_counter_keeps_shape_and_type(
    tmp_path: Path, counters: tuple[int, ...], mean: int
):
    """PC-001: BatchNorm's int64 counter is averaged, half to even, and stays 0-dimensional."""
    from safetensors.torch import load_file

    from coordinator.foldapi import Export

    bench = Bench(tmp_path, BATCH_NORM, spec())
    bench.init([1, 1, 0, 0], [0, 0, 1, 1], [0])
    cohort = [
        bench.spool(f"s{k}", [0.0] * 4, buffers=[0, 0, 1, 1], ints=[count])
        for k, count in enumerate(counters)
    ]
    bench.fold(1, *cohort)
    bench.service.handle(Export(**bench.where, version=1, target=str(tmp_path / "out")))
    state = load_file(tmp_path / "out")
    counter = state["bn.num_batches_tracked"]
    assert (counter.shape, counter.dtype, int(counter)) == ((), torch.int64, mean)
    model = torch.nn.ModuleDict({"bn": torch.nn.BatchNorm1d(2)})
    model.load_state_dict(state, strict=True)


def test_running_statistics_are_weighted_by_examples(tmp_path: Path):
    """PC-002: running_mean 0.0 (100 examples) and 10.0 (300 examples) -> 7.5."""
    bench = Bench(
        tmp_path, layout(tensor("w", (1,)), tensor("running_mean", (1,), "buffer")), spec()
    )
    bench.init([0.0], [0.0])
    bench.fold(
        1,
        bench.spool("a", [0.0], buffers=[0.0], examples=100.0),
        bench.spool("b", [0.0], buffers=[10.0], examples=300.0),
    )
    assert bench.version(1).parts["buffers"].tolist() == [7.5]


@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "yogi"])
def test_an_adaptive_server_optimizer_never_touches_buffers(tmp_path: Path, optimizer: Any):
    """PC-003: running_var 0.01 changed by -0.002 on average becomes 0.008, never negative."""
    server = Server(optimizer=optimizer, lr=0.1)
    bench = Bench(
        tmp_path,
        layout(tensor("w", (1,)), tensor("running_var", (1,), "buffer")),
        spec(server=server),
    )
    bench.init([1.0], [0.01])
    value = 0.01
    for version in (1, 2, 3):
        value *= 0.8
        bench.fold(version, *(bench.spool(s, [0.5], buffers=[value]) for s in "ab"))
        model = bench.version(version)
        assert float(model.parts["buffers"]) == pytest.approx(value)
        assert bool(torch.isfinite(model.parts["params"]).all())
    assert bench.version(1).parts["params"].tolist() != [1.5]  # stepped, not averaged


def test_frozen_parameters_have_no_place_in_versions_or_sums(tmp_path: Path):
    """PC-004: a million frozen values next to a thousand trainable ones cost nothing here."""
    frozen = layout(tensor("base", (1000, 1000), "frozen"), tensor("head", (1000,)))
    bench = Bench(tmp_path, frozen, spec())
    facts = bench.init(torch.zeros(1000))
    member = bench.spool("a", torch.ones(1000))
    assert (tmp_path / "spools" / member.spool).stat().st_size < 6000
    assert facts.bytes < 6000
    made: list[int] = []
    original = fold_commit.Accumulator

    class Counting(original):
        def __init__(self, elements, device="cpu") -> None:  # noqa: ANN001
            super().__init__(elements, device)
            made.append(sum(total.nbytes for total in self.sums.values()))

    fold_commit.Accumulator = Counting
    try:
        bench.fold(1, member)
    finally:
        fold_commit.Accumulator = original
    assert made == [4000]
    assert bench.params(1) == [1.0] * 1000


def test_float32_stays_float32(tmp_path: Path):
    """PC-007: deltas [1, 2] x 3 examples and [3, 6] x 1 give exactly [1.5, 3.0] in float32."""
    bench = Bench(tmp_path, PAIR, spec())
    bench.init([0.0, 0.0])
    facts = bench.fold(
        1, bench.spool("a", [1, 2], examples=3.0), bench.spool("b", [3, 6], examples=1.0)
    )
    assert bench.version(1).parts["params"].dtype == torch.float32
    assert bench.params(1) == [1.5, 3.0]
    assert facts.update_norm == pytest.approx(math.hypot(1.5, 3.0))
    assert facts.bytes == (tmp_path / "versions" / "1.body").stat().st_size


def test_nobody_with_examples_keeps_the_model(tmp_path: Path):
    """PC-013: counts 0 and 0: no version is made, the model is the previous one, never NaN."""
    bench = Bench(tmp_path, PAIR, spec())
    bench.init([7.0, 8.0])
    cohort = [bench.spool("a", [1, 2], examples=0.0), bench.spool("b", [3, 4], examples=0.0)]
    assert [bool(bench.screen(member).problem) for member in cohort] == [True, True]
    facts = bench.fold(1, *cohort)
    assert "no usable contribution" in facts.problem
    assert not (tmp_path / "versions" / "1.body").exists()
    good = bench.fold(1, bench.spool("c", [1, 1]))
    assert not good.problem
    assert bench.params(1) == [8.0, 9.0]


def test_an_update_in_which_nothing_moved_takes_part_and_changes_nothing(tmp_path: Path):
    """PC-024: nothing passed, nothing moved: it is usable, it counts, and the model is the same."""
    bench = Bench(tmp_path, PAIR, spec())
    bench.init([7.0, 8.0])
    still = bench.spool("a", [0.0, 0.0])
    assert bench.screen(still).problem == ""
    facts = bench.fold(1, still)
    assert (facts.problem, facts.update_norm, facts.version) == ("", 0.0, 1)
    assert bench.params(1) == [7.0, 8.0]
    bench.fold(2, bench.spool("a", [0.0, 0.0], clock=1), bench.spool("b", [2.0, 4.0], clock=1))
    assert bench.params(2) == [8.0, 10.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_site_is_named_and_the_others_are_averaged(tmp_path: Path, bad: float):
    """PC-014: [1, NaN] is refused by name, [3, 3] and [5, 5] give [4, 4]."""
    bench = Bench(tmp_path, PAIR, spec())
    bench.init([0.0, 0.0])
    cohort = [bench.spool("a", [1.0, bad]), bench.spool("b", [3, 3]), bench.spool("c", [5, 5])]
    problems = [bench.screen(member).problem for member in cohort]
    assert "'w'" in problems[0]
    assert problems[1:] == ["", ""]
    bench.fold(1, *(m for m, problem in zip(cohort, problems, strict=True) if not problem))
    assert bench.params(1) == [4.0, 4.0]
    assert not bench.screen(bench.spool("a", [1.0, 1.0], clock=1)).problem


@pytest.mark.parametrize("optimizer", ["average", "nesterov", "adam"])
def test_a_sum_that_is_not_finite_makes_no_version_and_leaves_no_trace(
    tmp_path: Path, optimizer: Any
):
    bench = Bench(
        tmp_path,
        layout(tensor("a", (1,)), tensor("b", (1,))),
        spec(server=Server(optimizer=optimizer)),
    )
    bench.init([1.0, 2.0])
    facts = bench.fold(1, bench.spool("x", [0.0, 3e38]), bench.spool("y", [0.0, math.inf]))
    assert "'b'" in facts.problem
    twin = Bench(tmp_path / "twin", bench.layout, bench.spec)
    twin.init([1.0, 2.0])
    for one in (bench, twin):
        one.fold(1, one.spool("z", [0.5, 0.5]))
    assert bench.digests[1] == twin.digests[1]


def test_a_step_that_overflows_is_rehearsed_before_it_is_taken(tmp_path: Path):
    bench = Bench(tmp_path, PAIR, spec(server=Server(optimizer="momentum", lr=1.0, momentum=0.9)))
    bench.init([3e38, 0.0])
    facts = bench.fold(1, bench.spool("a", [3e38, 0.0]))
    assert "would be not finite in tensor 'w'" in facts.problem
    calm = bench.fold(1, bench.spool("b", [0.0, 1.0]))
    assert not calm.problem
    assert bench.params(1)[1] == 1.0  # no momentum was left behind by the refused step


def test_large_counts_do_not_overflow_the_sum(tmp_path: Path):
    bench = Bench(tmp_path, layout(tensor("w", (1,))), spec())
    bench.init([0.0])
    bench.fold(1, *(bench.spool(s, [1e30], examples=1e12) for s in "abc"))
    assert bench.params(1)[0] == pytest.approx(1e30)


def test_fednova_normalises_by_effective_steps(tmp_path: Path):
    bench = Bench(tmp_path, layout(tensor("w", (1,))), spec(weights=Weights(by="steps")))
    bench.init([0.0])
    bench.fold(
        1,
        bench.spool("a", [1.0], examples=1.0, steps=1, effective_steps=1.0),
        bench.spool("b", [30.0], examples=3.0, steps=10, effective_steps=10.0),
    )
    # p = (1/4, 3/4), d/a = (1, 3), tau_eff = 1/4 + 30/4
    assert bench.params(1)[0] == pytest.approx((0.25 + 2.25) * 7.75, rel=1e-6)


def test_scaffold_adds_the_changes_over_all_active_sites(tmp_path: Path):
    bench = Bench(tmp_path, PAIR, spec(local=SCAFFOLD))
    bench.init([0.0, 0.0])
    assert bench.version(0).parts["control"].tolist() == [0.0, 0.0]
    cohort = [
        bench.spool("a", [1, 1], control=[4.0, 0.0], examples=5.0),
        bench.spool("b", [1, 1], control=[0.0, 8.0], examples=1.0),
    ]
    assert [bench.screen(member).problem for member in cohort] == ["", ""]
    bench.fold(1, *cohort, active_sites=4)
    assert bench.version(1).parts["control"].tolist() == [1.0, 2.0]


def test_the_same_cohort_in_canonical_order_gives_the_same_bits_in_another_process(tmp_path: Path):
    rng = torch.Generator().manual_seed(0)
    deltas = [torch.randn(5000, generator=rng) for _ in range(20)]  # more than read side by side
    digests = []
    for name in ("one", "two"):
        bench = Bench(tmp_path / name, layout(tensor("w", (5000,))), spec())
        bench.init(torch.ones(5000))
        cohort = [
            bench.spool(f"s{k:02}", delta, examples=k + 1.0) for k, delta in enumerate(deltas)
        ]
        digests.append(bench.fold(1, *cohort).digest)
    assert digests[0] == digests[1]
    expected = 1.0 + sum((k + 1) * d.double() for k, d in enumerate(deltas)) / 210
    assert torch.allclose(bench.version(1).parts["params"].double(), expected, atol=1e-5)


def test_the_same_request_twice_gives_the_same_answer_and_moves_once(tmp_path: Path):
    bench = Bench(tmp_path, PAIR, spec(server=Server(optimizer="nesterov")))
    bench.init([0.0, 0.0])
    member = bench.spool("a", [1, 2])
    first = bench.fold(1, member)
    again = bench.fold(1, member)
    assert first == again


def test_a_base_with_another_digest_is_not_built_upon(tmp_path: Path):
    bench = Bench(tmp_path, PAIR, spec())
    bench.init([0.0, 0.0])
    bench.digests[0] = "0" * 64
    answer = bench.fold_answer(1, bench.spool("a", [1, 2]))
    assert answer.unknown_state
    assert "digest" in answer.fault


def test_a_spool_of_another_site_is_not_folded(tmp_path: Path):
    bench = Bench(tmp_path, PAIR, spec())
    bench.init([0.0, 0.0])
    bench.spool("a", [1, 2])
    stranger = bench.spool("b", [1, 2])
    (tmp_path / "spools" / stranger.spool).rename(tmp_path / "spools" / "a-0.body")
    member = type(stranger)(site="a", epoch=1, clock=0, spool="a-0.body")
    assert "site 'b'" in bench.fold_answer(1, member).fault


def test_a_missing_spool_is_a_fault_that_changes_nothing(tmp_path: Path):
    bench = Bench(tmp_path, PAIR, spec())
    bench.init([0.0, 0.0])
    member = bench.spool("a", [1, 2])
    (tmp_path / "spools" / member.spool).unlink()
    answer = bench.fold_answer(1, member)
    assert "is gone" in answer.fault
    bench.spool("a", [1, 2])
    assert bench.fold(1, member).digest


def test_a_full_disk_is_said_and_the_same_request_succeeds_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from coordinator import fold

    bench = Bench(tmp_path, PAIR, spec(server=Server(optimizer="momentum")))
    bench.init([0.0, 0.0])
    member = bench.spool("a", [1, 2])
    real = fold.write_version

    def full(*_: object, **__: object) -> int:
        raise OSError(min(DISK_FULL), "No space left on device")

    monkeypatch.setattr(fold, "write_version", full)
    answer = bench.fold_answer(1, member)
    assert answer.disk_full
    assert "disk is full" in answer.fault
    monkeypatch.setattr(fold, "write_version", real)
    facts = bench.fold(1, member)
    assert bench.params(1) == [1.0, 2.0]
    assert facts.bytes == (tmp_path / "versions" / "1.body").stat().st_size


def test_over_the_cap_the_least_recently_used_job_is_freed_and_comes_back(tmp_path: Path):
    service = FoldService(resident_bytes_max=100)
    benches = []
    for name in ("one", "two"):
        bench = Bench(
            tmp_path / name, layout(tensor("w", (8,))), spec(server=Server(optimizer="adam"))
        )
        bench.service = service
        benches.append(bench)

    def ask(bench: Bench, version: int) -> None:
        job = bench.path.name
        member = bench.spool("a", torch.full((8,), 0.5), clock=version)
        answer = service.handle(
            Fold(
                id=1, job=job, folder=str(bench.path), spec=bench.spec, version=version,
                base_version=version - 1, base_digest=bench.digests[version - 1],
                cohort=(member,), active_sites=1,
            )
        )  # fmt: skip
        assert not answer.fault
        bench.digests[version] = answer.facts.digest

    for bench in benches:
        (bench.path / "init.body").unlink(missing_ok=True)
        from tests.coordinator.folding import write_init

        write_init(bench.path / "init.body", bench.layout, torch.zeros(8))
        taken = service.handle(
            TakeInit(id=1, job=bench.path.name, folder=str(bench.path), spec=bench.spec)
        )
        bench.digests[0] = taken.facts.digest
    for version in (1, 2, 3):
        for bench in benches:
            ask(bench, version)
    assert benches[0].digests == benches[1].digests
    alone = Bench(tmp_path / "alone", benches[0].layout, benches[0].spec)
    alone.init(torch.zeros(8))
    for version in (1, 2, 3):
        alone.fold(version, alone.spool("a", torch.full((8,), 0.5), clock=version))
    assert alone.digests == benches[0].digests


def test_a_dropped_job_goes_on_where_it_was(tmp_path: Path) -> None:
    bench = Bench(tmp_path, PAIR, spec(server=Server(optimizer="momentum")))
    bench.init([0.0, 0.0])
    bench.fold(1, bench.spool("a", [1, 2]))
    bench.service.handle(DropJob(**bench.where))
    bench.restart()
    facts = bench.fold(2, bench.spool("a", [1, 2], clock=1))
    straight = Bench(tmp_path / "straight", PAIR, bench.spec)
    straight.init([0.0, 0.0])
    for version in (1, 2):
        straight.fold(version, straight.spool("a", [1, 2], clock=version - 1))
    assert facts.digest == straight.digests[2]


def test_a_new_process_says_that_it_does_not_know_the_base(tmp_path: Path) -> None:
    bench = Bench(tmp_path, PAIR, spec(server=Server(optimizer="momentum")))
    bench.init([0.0, 0.0])
    bench.fold(1, bench.spool("a", [1, 2]))
    bench.restart()
    late = bench.spool("a", [1, 2], clock=1)
    assert bench.fold_answer(2, late).unknown_state
    assert not bench.recover(0).fault
    assert bench.fold(2, late).digest
    assert bench.version(2).job == JOB
