"""DC-ASGD against a plain reference, where it must do nothing, and where it is worth having."""

from __future__ import annotations

import pytest
import torch

from aggregation.compensation import Compensation, compensated, for_job
from protocol.jobspec import JobSpec, Optimizer, Pacing, TaskRef

LR, STEPS = 0.05, 4


def vectors(count: int, n: int = 257) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(5)
    return [torch.randn(n, generator=rng) for _ in range(count)]


def by_hand(
    delta: torch.Tensor, drift: torch.Tensor, strength: float, square: torch.Tensor | None
) -> torch.Tensor:
    """The paper's formulas on gradients, in float64."""
    g = -delta.double() / (LR * STEPS)
    lam = torch.tensor(strength)
    if square is not None:
        square.mul_(0.95).add_(0.05 * g**2)
        lam = strength / torch.sqrt(square + 1e-7)
    return -LR * STEPS * (g + lam * g * g * drift.double())


@pytest.mark.parametrize("adaptive", [False, True])
def test_updates_are_compensated_as_in_the_paper(adaptive: bool) -> None:
    square = torch.zeros(257) if adaptive else None
    reference = torch.zeros(257, dtype=torch.float64) if adaptive else None
    deltas, drifts = vectors(6), vectors(12)[6:]
    for delta, drift in zip(deltas, drifts, strict=True):
        found = compensated(
            delta * 0.1, drift.clone(), travelled=LR * STEPS, strength=0.3, mean_square=square
        )
        wanted = by_hand(delta * 0.1, drift, 0.3, reference)
        assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-6)
        if square is not None and reference is not None:
            assert torch.allclose(square.double(), reference, rtol=1e-5)


@pytest.mark.parametrize("adaptive", [False, True])
def test_from_the_same_base_an_update_stays_what_it_is_to_the_bit(adaptive: bool) -> None:
    (delta,) = vectors(1)
    square = torch.zeros(257) if adaptive else None
    found = compensated(delta, None, travelled=0.2, strength=9.0, mean_square=square)
    assert torch.equal(found, delta)
    still = compensated(delta, torch.zeros(257), travelled=0.2, strength=9.0)
    assert torch.equal(still, delta)


def test_an_update_of_no_steps_stays_what_it_is_and_teaches_nothing() -> None:
    delta, drift = vectors(2)
    square = torch.ones(257)
    found = compensated(delta, drift, travelled=0.0, strength=1.0, mean_square=square)
    assert torch.equal(found, delta)
    assert torch.equal(square, torch.ones(257))


def test_a_vanishing_lambda_is_plain_asynchronous_sgd() -> None:
    delta, drift = vectors(2)
    found = compensated(delta, drift, travelled=0.2, strength=1e-30)
    assert torch.equal(found, delta)


def test_any_tiling_gives_the_same_bits() -> None:
    delta, drift = vectors(2)
    whole, cut = torch.zeros(257), torch.zeros(257)
    one = compensated(delta, drift.clone(), travelled=0.2, strength=2.0, mean_square=whole)
    pieces = [
        compensated(
            delta[a : a + 50],
            drift[a : a + 50].clone(),
            travelled=0.2,
            strength=2.0,
            mean_square=cut[a : a + 50],
        )
        for a in range(0, 257, 50)
    ]
    assert torch.equal(torch.cat(pieces), one)
    assert torch.equal(whole, cut)


def delayed(*, lr: float, delay: int, strength: float, adaptive: bool = False) -> float:
    """How far from the optimum 100 steps of SGD on |x - noise|^2 / 2 end, squared, per element,
    when each was computed `delay` versions ago. The curvature is 1, and so is the mean of g*g at
    the optimum: what the compensation stands on.
    """
    rng = torch.Generator().manual_seed(1)
    versions = [torch.full((1000,), 0.5)]
    square = torch.zeros(1000) if adaptive else None
    for _ in range(100):
        base = versions[max(len(versions) - 1 - delay, 0)]
        delta = -lr * (base - torch.randn(1000, generator=rng))
        if strength:
            delta = compensated(
                delta, versions[-1] - base, travelled=lr, strength=strength, mean_square=square
            )
        versions.append(versions[-1] + delta)
    return float(versions[-1].square().mean())


def test_where_delayed_sgd_diverges_compensated_sgd_does_not() -> None:
    plain = delayed(lr=0.5, delay=3, strength=0.0)
    better = delayed(lr=0.5, delay=3, strength=0.3, adaptive=True)
    without = delayed(lr=0.5, delay=0, strength=0.0)
    assert plain > 100.0
    assert better < 3.0 * without


@pytest.mark.parametrize("adaptive", [False, True])
def test_where_delayed_sgd_is_noisy_compensated_sgd_is_half_as_much(adaptive: bool) -> None:
    plain = delayed(lr=0.3, delay=3, strength=0.0)
    assert delayed(lr=0.3, delay=3, strength=0.3, adaptive=adaptive) < 0.6 * plain


def test_a_job_gets_the_papers_strengths_by_default() -> None:
    def of(**pacing: object) -> Compensation | None:
        job = JobSpec(
            name="j",
            task=TaskRef(name="t"),
            optimizer=Optimizer(lr=0.2),
            pacing=Pacing(rule="async", **pacing),  # type: ignore[arg-type]
        )
        return for_job(job)

    assert of() is None
    assert of(compensation="constant") == Compensation(0.04, 0.2, adaptive=False)
    assert of(compensation="adaptive") == Compensation(2.0, 0.2, adaptive=True)
    assert of(compensation="adaptive", compensation_lambda=0.5) == Compensation(0.5, 0.2, True)
