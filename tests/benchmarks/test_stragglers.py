"""The straggler table: what drives it is the core, and what it says is what the table is about."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.stragglers import RATE, REFERENCE, UNKNOWNS, Problem, World, deviations

PROBLEM = Problem(3)


def seconds(rule: str, scenario: str) -> float:
    return World(rule, scenario, PROBLEM).run()[0]


def test_the_same_seed_takes_the_same_course() -> None:
    first, second = World("ssp3", "transient", PROBLEM), World("ssp3", "transient", Problem(3))
    assert first.run() == second.run()
    assert first.updates == second.updates


@pytest.mark.parametrize("rule", ["bsp", "first7", "ssp1", "async"])
def test_under_every_rule_an_update_moves_the_model_by_its_half(rule: str) -> None:
    world = World(rule, "none", PROBLEM)
    world.run()
    cohort = world.updates / (world.job.number + (world.job.committing is not None))
    assert cohort == {"bsp": 8, "first7": 7}.get(rule, 1)
    assert world.scale / (cohort if cohort > 1 else 8) == RATE


def test_transient_stragglers_are_hidden_and_a_persistent_one_is_not() -> None:
    transient = {r: seconds(r, "transient") for r in ("bsp", "ssp1", "ssp10", "async")}
    assert transient["bsp"] > transient["ssp1"] > transient["ssp10"]
    assert transient["ssp10"] == pytest.approx(transient["async"], rel=0.05)  # hidden
    persistent = {r: seconds(r, "persistent") for r in ("bsp", "first7", "ssp3", "async")}
    assert persistent["ssp3"] > 0.9 * persistent["bsp"]
    assert persistent["first7"] < 0.8 * persistent["bsp"]


def test_workers_wait_for_the_slowest_under_bsp_and_never_under_async() -> None:
    waits = {rule: World(rule, "persistent", PROBLEM).run()[1] for rule in ("bsp", "async")}
    assert 0.3 < waits["bsp"] < 0.45
    assert waits["async"] == pytest.approx(0.0, abs=1e-9)


def test_deviations_are_relative_to_the_ratios_of_the_table() -> None:
    ratios = {
        scenario: {rule: value / known["bsp"] for rule, value in known.items()} | {"first7": 1.0}
        for scenario, known in REFERENCE.items()
    }
    away = deviations(ratios)
    assert away["transient"]["ssp3"] == 0.0
    assert away["none"]["first7"] == pytest.approx(193 / 214 - 1, abs=1e-4)
    assert "ssp3" not in away["none"]  # not in the table


def test_a_gradient_is_that_of_the_loss() -> None:
    rng = np.random.default_rng(0)
    w = np.zeros(UNKNOWNS)
    mean = np.mean([PROBLEM.gradient(w, k % 8, rng) for k in range(16_000)], axis=0)
    step = 1e-3 * mean
    fall = (PROBLEM.excess(w) - PROBLEM.excess(w - step)) / 1e-3
    assert fall == pytest.approx(float(mean @ mean), rel=0.05)
