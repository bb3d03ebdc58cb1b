"""Fault plans: a thousand of them, and proof that a broken promise would be noticed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from coordinator import round as rounds
from coordinator import streaming
from simulation.chaos import Outcome, draw, run


@pytest.mark.parametrize("block", range(10))
def test_a_thousand_plans_break_no_promise(block: int) -> None:
    broken = [
        found
        for seed in range(100 * block, 100 * block + 100)
        if (found := run(draw(seed))).violation
    ]
    assert not broken, "\n".join(
        f"./run python -m benchmarks.chaos {found.seed}: {found.violation}" for found in broken
    )


@pytest.mark.parametrize("seed", [12101, 13110, 14240])
def test_plans_that_once_broke_a_promise_do_no_more(seed: int) -> None:
    assert run(draw(seed)).violation == ""


def test_a_seed_is_a_run() -> None:
    """PC-107: the same seed gives the same plan and the same run; another one, another."""
    assert draw(5) == draw(5)
    assert run(draw(5)) == run(draw(5))
    assert draw(5) != draw(6)


def test_every_rule_and_every_trouble_is_drawn() -> None:
    plans = [draw(seed) for seed in range(300)]
    assert {plan.spec.pacing.rule for plan in plans} == {"bsp", "ssp", "async", "buffered"}
    assert {trouble.what for plan in plans for trouble in plan.troubles} == {
        "die", "freeze", "crash", "pause", "fold", "disk"
    }  # fmt: skip


def violations(count: int = 60) -> list[Outcome]:
    return [found for seed in range(count) if (found := run(draw(seed))).violation]


def test_a_rule_that_lets_everybody_go_on_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_ahead", lambda *_: "")
    assert any("goes on" in found.violation for found in violations())


def test_an_update_that_counts_twice_as_much_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from simulation.fakefold import FakeFold

    honest = FakeFold._mean

    def doubled(self: FakeFold, *given: Any) -> list[float]:
        return [2.0 * x for x in honest(self, *given)]

    monkeypatch.setattr(FakeFold, "_mean", doubled)
    assert any("off its updates" in found.violation for found in violations(10))


def test_an_update_that_is_too_old_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds.streaming, "stale", lambda *_: "")
    assert any("versions old" in found.violation for found in violations())


def test_the_command_tells_the_plan_and_what_came_of_it() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", "3"], capture_output=True, text=True, check=True
    )
    assert '"troubles"' in told.stdout
    assert '"violation":""' in told.stdout.splitlines()[-1]
    command = [sys.executable, "-m", "benchmarks.chaos", "x"]
    wrong = subprocess.run(command, capture_output=True, check=False)
    assert wrong.returncode == 2
