"""Commits that are sums with the journal's coefficients: SSP, async, buffered (design 4.8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from coordinator.journal import CohortMember
from tests.coordinator.folding import Bench, layout, spec, tensor

MODEL = layout(tensor("w", (4,)), tensor("running_var", (2,), "buffer"),
               tensor("seen", (), "int", "int64"))  # fmt: skip


def bench(path: Path, **over: Any) -> Bench:
    made = Bench(path, MODEL, spec(**over))
    made.init([1.0, 2.0, 3.0, 4.0], [1.0, 4.0], [10])
    return made


def weighing(member: CohortMember, weight: float, version: int = 0) -> CohortMember:
    return msgspec.structs.replace(member, weight=weight, version=version)


def params(here: Bench, version: int) -> list[float]:
    return here.version(version).parts["params"].tolist()


def test_the_model_moves_by_the_sum_of_the_weighted_updates(tmp_path: Path) -> None:
    here = bench(tmp_path)
    one = here.spool("a", [1.0, 1.0, 1.0, 1.0], buffers=[2.0, 2.0], ints=[20])
    two = here.spool("b", [0.0, 4.0, 0.0, 4.0], buffers=[2.0, 2.0], ints=[20])
    facts = here.fold(1, weighing(one, 0.25), weighing(two, 0.5), additive=True)
    assert params(here, 1) == [1.25, 4.25, 3.25, 6.25]
    assert facts.update_norm == pytest.approx(torch.tensor([0.25, 2.25, 0.25, 2.25]).norm().item())


def test_buffers_and_integers_move_by_the_cohorts_part_and_stay_convex(tmp_path: Path) -> None:
    here = bench(tmp_path)
    one = here.spool("a", [0.0] * 4, buffers=[3.0, 0.0], ints=[30])
    here.fold(1, weighing(one, 0.25), additive=True)
    made = here.version(1).parts
    assert made["buffers"].tolist() == [1.5, 3.0]  # 3/4 of what was, 1/4 of what came
    assert made["ints"].tolist() == [15]


def test_a_full_cohort_with_its_shares_is_the_weighted_mean(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(1)
    deltas = {name: torch.randn(4, generator=rng) for name in "abc"}
    counts = {"a": 100.0, "b": 300.0, "c": 400.0}
    mean, total = bench(tmp_path / "mean"), bench(tmp_path / "sum")

    def cohort(here: Bench) -> list[CohortMember]:
        values = {"buffers": [2.0, 2.0], "ints": [12]}
        return [here.spool(n, deltas[n], examples=counts[n], **values) for n in "abc"]

    mean.fold(1, *cohort(mean))
    shared = [weighing(member, counts[member.site] / 800.0) for member in cohort(total)]
    total.fold(1, *shared, additive=True)
    for part in ("params", "buffers"):
        expected = mean.version(1).parts[part]
        assert torch.allclose(total.version(1).parts[part], expected, atol=1e-6, rtol=0)
    assert total.version(1).parts["ints"].tolist() == mean.version(1).parts["ints"].tolist()


def test_a_cohort_without_weight_makes_no_version(tmp_path: Path) -> None:
    here = bench(tmp_path)
    one = here.spool("a", [1.0] * 4, buffers=[1.0, 1.0], ints=[1])
    facts = here.fold(1, weighing(one, 0.0), additive=True)
    assert "no usable contribution" in facts.problem


def test_recovery_makes_the_same_bits_of_additive_commits(tmp_path: Path) -> None:
    here = bench(tmp_path)
    rng = torch.Generator().manual_seed(2)
    for version in range(1, 6):
        part = here.spool(
            "a", torch.randn(4, generator=rng), buffers=[1.0, 2.0], ints=[version], clock=version
        )
        here.fold(version, weighing(part, 0.3, version - 1), additive=True)
    here.restart()
    answer = here.recover(0)
    assert not answer.fault
    assert answer.facts.digest == here.digests[5]
