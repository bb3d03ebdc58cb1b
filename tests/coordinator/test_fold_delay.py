"""Delay compensation in the fold process: against a reference, through kills, and what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from aggregation.tiles import TILE_ELEMENTS
from coordinator.fold_checkpoint import load
from coordinator.journal import CohortMember
from protocol.jobspec import Optimizer, Pacing, Server
from protocol.layout import Layout
from tests.coordinator.folding import Bench, layout, spec, tensor

ELEMENTS = TILE_ELEMENTS + 5  # more than a tile
LR, STEPS = 0.1, 3
MODEL = layout(tensor("w", (ELEMENTS,)), tensor("running_var", (2,), "buffer"),
               tensor("seen", (), "int", "int64"))  # fmt: skip
DELAYS = (0, 1, 3, 2, 4, 0)  # versions between an update's base and the one it was applied to


def started(path: Path, kind: str, *, of: Layout = MODEL, **over: Any) -> Bench:
    rule = Pacing(rule="async", compensation=kind, compensation_lambda=0.2)  # type: ignore[arg-type]
    made = Bench(path, of, spec(pacing=rule, optimizer=Optimizer(lr=LR), **over))
    values: tuple[Any, Any] = ([1.0, 4.0], [10]) if of is MODEL else ((), ())
    made.init(torch.linspace(-1, 1, of.elements("params")), *values)
    return made


def update(here: Bench, version: int, base: int, site: str = "a") -> CohortMember:
    """What `site` sent that started from `base` and goes into `version`, with weight 1/2."""
    rng = torch.Generator().manual_seed(version + ord(site))
    delta = 0.3 * torch.randn(here.layout.elements("params"), generator=rng)
    values: dict[str, Any] = {}
    if here.layout is MODEL:
        values = {"buffers": [1.0, 2.0], "ints": [version]}
    made = here.spool(site, delta, clock=version, steps=STEPS, base_version=base, **values)
    return msgspec.structs.replace(made, weight=0.5, version=base)


def advance(here: Bench, *versions: int) -> None:
    """One update a version, each older or younger, some of two sites."""
    for version in versions:
        base = max(version - 1 - DELAYS[version % len(DELAYS)], 0)
        cohort = [update(here, version, base)]
        if version % 3 == 0:
            cohort.append(update(here, version, version - 1, "b"))
        here.fold(version, *cohort, additive=True)


def reference(kind: str, versions: int) -> list[torch.Tensor]:
    """The same job in plain torch, float64, by the formulas of the paper."""
    made = [torch.linspace(-1, 1, ELEMENTS).double()]
    square = torch.zeros(ELEMENTS).double()
    for version in range(1, versions + 1):
        now = made[-1]
        moved = now.clone()
        base = max(version - 1 - DELAYS[version % len(DELAYS)], 0)
        for site, start in (("a", base), ("b", version - 1)):
            if site == "b" and version % 3:
                continue
            rng = torch.Generator().manual_seed(version + ord(site))
            g = -(0.3 * torch.randn(ELEMENTS, generator=rng)).double() / (LR * STEPS)
            lam: Any = 0.2
            if kind == "adaptive":
                square = 0.95 * square + 0.05 * g**2
                lam = 0.2 / torch.sqrt(square + 1e-7)
            moved -= 0.5 * LR * STEPS * (g + lam * g * g * (now - made[start]))
        made.append(moved)
    return made


@pytest.mark.parametrize("kind", ["constant", "adaptive"])
def test_commits_are_those_of_a_plain_reference(tmp_path: Path, kind: str) -> None:
    here = started(tmp_path, kind)
    advance(here, *range(1, 8))
    wanted = reference(kind, 7)
    for version in range(8):
        found = here.version(version).parts["params"].double()
        assert torch.allclose(found, wanted[version], atol=2e-6, rtol=1e-5)
    assert not torch.allclose(wanted[7], reference("none", 0)[0], atol=0.1)


@pytest.mark.parametrize("kind", ["constant", "adaptive"])
def test_updates_of_the_newest_version_are_applied_as_without_compensation(
    tmp_path: Path, kind: str
) -> None:
    here, plain = started(tmp_path / "dc", kind), started(tmp_path / "plain", "none")
    for bench in (here, plain):
        for version in (1, 2, 3):
            bench.fold(version, update(bench, version, version - 1), additive=True)
    assert here.digests == plain.digests


def test_more_updates_than_are_read_side_by_side_are_each_compensated(tmp_path: Path) -> None:
    small = layout(tensor("w", (6,)))
    here = started(tmp_path, "constant", of=small)
    here.fold(1, update(here, 1, 0), additive=True)
    here.fold(2, update(here, 2, 1), additive=True)
    cohort = [update(here, 3, 0, chr(ord("a") + k)) for k in range(20)]
    many = here.fold(3, *cohort, additive=True)
    drift = (here.version(2).parts["params"] - here.version(0).parts["params"]).double()
    wanted = here.version(2).parts["params"].double()
    for k in range(20):
        rng = torch.Generator().manual_seed(3 + ord("a") + k)
        delta = (0.3 * torch.randn(6, generator=rng)).double()
        wanted = wanted + 0.5 * (delta - 0.2 / (LR * STEPS) * delta * delta * drift)
    assert torch.allclose(here.version(3).parts["params"].double(), wanted, atol=1e-5)
    assert not many.problem


@pytest.mark.parametrize("optimizer", ["average", "delayed_nesterov"])
@pytest.mark.parametrize("kind", ["none", "constant", "adaptive"])
@pytest.mark.parametrize("saved", [0, 3, 5])
def test_recovery_makes_the_same_bits_with_compensation_and_delayed_momentum(
    tmp_path: Path, kind: str, optimizer: Any, saved: int
) -> None:
    server = Server(optimizer=optimizer, delay=2)
    straight = started(tmp_path / "one", kind, server=server)
    broken = started(tmp_path / "two", kind, server=server)
    advance(straight, *range(1, 9))
    advance(broken, *range(1, saved + 1))
    if saved:
        assert broken.save(saved).version == saved
    advance(broken, *range(saved + 1, 7))
    broken.restart()
    answer = broken.recover(saved)
    assert not answer.fault, answer.fault
    assert answer.facts.digest == straight.digests[6]
    advance(broken, 7, 8)  # the momentum and the mean of squares go on where they were
    assert broken.digests == straight.digests


def test_a_checkpoint_holds_the_mean_of_squares_and_what_waits_for_the_momentum(
    tmp_path: Path,
) -> None:
    here = started(tmp_path, "adaptive", server=Server(optimizer="delayed_nesterov", delay=3))
    advance(here, 1, 2, 3, 4)
    here.save(4)
    model, _ = load(tmp_path / "checkpoints" / "4")
    assert [*model.state] == ["momentum", "buffered", "mean_square"]
    assert all(float(flat.abs().sum()) > 0.0 for flat in model.state.values())


def test_versions_that_are_gone_are_made_again_on_the_way(tmp_path: Path) -> None:
    """Only bases before the checkpoint have to be kept: the others follow from it."""
    here = started(tmp_path, "adaptive")
    advance(here, *range(1, 8))
    for version in range(8):
        (tmp_path / "versions" / f"{version}.body").unlink()
    here.restart()
    answer = here.recover(0)
    assert not answer.fault, answer.fault
    assert answer.facts.digest == here.digests[7]
    assert not here.fold(8, update(here, 8, 7), additive=True).problem


def test_a_base_that_is_gone_is_named_and_nothing_moves(tmp_path: Path) -> None:
    here = started(tmp_path, "constant")
    advance(here, 1, 2)
    (tmp_path / "versions" / "0.body").unlink()
    late = update(here, 3, 0, "x")
    answer = here.fold_answer(3, late, additive=True)
    assert answer.fault.startswith("delay compensation needs version 0")
    assert "site 'x' (clock 3)" in answer.fault
    fresh = update(here, 3, 2)
    assert not here.fold(3, fresh, additive=True).problem


def test_recovery_names_everything_that_is_missing(tmp_path: Path) -> None:
    here = started(tmp_path, "constant")
    advance(here, 1, 2, 3, 4)
    here.save(4)
    for version in (5, 6):  # both older than the checkpoint
        here.fold(version, update(here, version, version - 4), additive=True)
    for version in (1, 2):
        (tmp_path / "versions" / f"{version}.body").unlink()
    here.restart()
    fault = here.recover(4).fault
    assert fault.startswith("version 6 cannot be made again: delay compensation needs versions")
    assert "1, 2, where updates of site 'a' (clock 5), site 'a' (clock 6) started" in fault


def test_another_file_in_the_place_of_a_base_is_refused(tmp_path: Path) -> None:
    here = started(tmp_path, "constant")
    advance(here, 1, 2)
    versions = tmp_path / "versions"
    (versions / "0.body").write_bytes((versions / "1.body").read_bytes())
    answer = here.fold_answer(3, update(here, 3, 0), additive=True)
    assert "0.body is not version 0 of this model" in answer.fault


def test_a_compensation_that_overflows_makes_no_version(tmp_path: Path) -> None:
    small = layout(tensor("w", (2,)))
    here = started(tmp_path, "constant", of=small)
    here.fold(1, update(here, 1, 0), additive=True)
    huge = here.spool("a", [1e30, 0.0], clock=2, steps=STEPS)
    late = msgspec.structs.replace(huge, weight=0.5, version=0)
    facts = here.fold(2, late, additive=True)
    assert facts.problem == "the mean update is not finite in tensor 'w': no version was made."
    fresh = update(here, 2, 1)
    assert not here.fold(2, fresh, additive=True).problem
    fine = started(tmp_path / "fine", "constant", of=small)
    advance(fine, 1)
    fine.fold(2, update(fine, 2, 1), additive=True)
    assert fine.digests[2] == here.digests[2]  # the failed commit left no trace


def test_squares_that_overflow_make_no_version_either(tmp_path: Path) -> None:
    small = layout(tensor("w", (2,)))
    here = started(tmp_path, "adaptive", of=small)
    huge = here.spool("a", [1e20, 0.0], steps=STEPS)
    facts = here.fold(1, msgspec.structs.replace(huge, weight=0.5, version=0), additive=True)
    assert facts.problem.startswith("the mean of squared gradients is not finite in tensor 'w'")
