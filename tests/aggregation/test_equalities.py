"""Published and textbook equalities, through the functions that fold real updates."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from aggregation.fold import Accumulator
from aggregation.prox import add_pull_
from aggregation.scaffold import control_change, correct_, server_change_
from aggregation.server_optimizers import average
from aggregation.weights import By, Share, coefficients, effective_steps, weigh


def server_step(
    x: torch.Tensor, deltas: list[torch.Tensor], shares: list[Share], by: By = "examples"
) -> torch.Tensor:
    weights = weigh(by, shares)
    sums = Accumulator({"delta": x.numel()})
    for delta, weight in zip(deltas, weights.delta, strict=True):
        sums.add_values("delta", 0, delta, weight)
    moved = x.clone()
    average().step({}, moved, sums.sums["delta"].div_(-weights.delta_total))
    return moved


def test_averaging_after_one_step_is_large_batch_sgd():
    rng = torch.Generator().manual_seed(3)
    w = torch.randn(5 * 3, generator=rng)
    sizes = [8, 24, 32]
    batches = [
        (torch.randn(n, 5, generator=rng), torch.randint(0, 3, (n,), generator=rng)) for n in sizes
    ]

    def sgd(start: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weight = start.clone().requires_grad_()
        functional.cross_entropy(x @ weight.view(5, 3), y).backward()
        return (start - 0.1 * weight.grad).detach()

    for _ in range(5):
        deltas = [sgd(w, x, y) - w for x, y in batches]
        federated = server_step(w, deltas, [Share(float(n), 1.0) for n in sizes])
        central = sgd(w, torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))
        assert torch.allclose(federated, central, atol=1e-6)
        w = central


def test_a_mean_of_regional_means_is_the_flat_weighted_mean():
    rng = torch.Generator().manual_seed(4)
    deltas = [torch.randn(64, generator=rng) for _ in range(6)]
    counts = [1.0, 5.0, 2.0, 8.0, 3.0, 1.0]
    zero = torch.zeros(64)
    flat = server_step(zero, deltas, [Share(n, 1.0) for n in counts])
    regions = [(0, 2), (2, 5), (5, 6)]
    means = [
        server_step(zero, deltas[a:b], [Share(n, 1.0) for n in counts[a:b]]) for a, b in regions
    ]
    totals = [Share(sum(counts[a:b]), 1.0) for a, b in regions]
    assert torch.allclose(server_step(zero, means, totals), flat, atol=1e-6)


def quadratic(by: By, eta: float) -> tuple[float, float, float]:
    """(distance to the closed form, distance to the optimum, largest target) after convergence."""
    rng = torch.Generator().manual_seed(5)
    targets = 0.1 * torch.randn(30, 20, generator=rng)
    taus = torch.randint(1, 97, (30,), generator=rng).tolist()
    counts = torch.randint(1, 50, (30,), generator=rng).to(torch.float64)
    p = counts / counts.sum()
    travelled = torch.tensor([1 - (1 - eta) ** tau for tau in taus], dtype=torch.float64)
    pull = p * travelled
    if by == "steps":
        pull = pull / torch.tensor(taus, dtype=torch.float64)
    closed = (pull[:, None] * targets).sum(0) / pull.sum()
    x = torch.zeros(20)
    shares = [Share(float(n), float(tau)) for n, tau in zip(counts.tolist(), taus, strict=True)]
    for _ in range(400 if by == "steps" else 150):
        # tau steps of gradient descent on 1/2 |x - e|^2 go the share A of the way to e
        deltas = [(e - x) * float(a) for e, a in zip(targets, travelled, strict=True)]
        x = server_step(x, deltas, shares, by)
    optimum = (p[:, None] * targets).sum(0)
    return float((x - closed).norm()), float((x - optimum).norm()), float(targets.norm(dim=1).max())


@pytest.mark.parametrize("eta", [0.01, 0.1])
@pytest.mark.parametrize("by", ["examples", "steps"])
def test_unequal_steps_end_at_the_closed_form(by: By, eta: float):
    from_closed_form, _, _ = quadratic(by, eta)
    assert from_closed_form < 1e-6


def test_fednova_counts_the_steps_that_a_time_boxed_period_did():
    """Sites that ran out of time deliver fewer steps than the job asked for; what they did is what
    normalises, so the closed form holds for the steps done and misses for the steps asked.
    """
    eta, asked = 0.01, 40
    rng = torch.Generator().manual_seed(8)
    targets = 0.1 * torch.randn(6, 20, generator=rng)
    done = [40, 40, 3, 17, 40, 1]
    counts = torch.tensor([10.0, 20.0, 40.0, 5.0, 30.0, 25.0], dtype=torch.float64)
    p = counts / counts.sum()
    travelled = [1 - (1 - eta) ** tau for tau in done]

    def settled(steps: list[int]) -> torch.Tensor:
        """Where rounds come to rest when these many steps are declared."""
        x = torch.zeros(20)
        shares = [
            Share(n, effective_steps(tau)) for n, tau in zip(counts.tolist(), steps, strict=True)
        ]
        for _ in range(2000):
            deltas = [(e - x) * a for e, a in zip(targets, travelled, strict=True)]
            x = server_step(x, deltas, shares, "steps")
        return x

    pull = p * torch.tensor(travelled, dtype=torch.float64) / torch.tensor(done)
    closed = (pull[:, None] * targets).sum(0) / pull.sum()
    assert float((settled(done) - closed).norm()) < 1e-6
    assert float((settled([asked] * 6) - closed).norm()) > 1e-2
    optimum = (p[:, None] * targets).sum(0)
    assert float((closed - optimum).norm()) < 0.2 * float((settled([asked] * 6) - optimum).norm())


def test_fednova_removes_the_bias_at_small_rates_only():
    assert quadratic("steps", 0.01)[1] < 0.5 * quadratic("examples", 0.01)[1]
    assert quadratic("steps", 0.1)[1] > 2 * quadratic("examples", 0.1)[1]


def two_clients(g: float, k: int, rounds: int, *, scaffold: bool, eta: float = 0.1) -> float:
    """The loss after `rounds` on f1 = x^2 + Gx and f2 = -Gx, whose mean is x^2 / 2."""
    x = torch.ones(1, dtype=torch.float64)
    c = torch.zeros_like(x)
    own = [torch.zeros_like(x), torch.zeros_like(x)]
    for _ in range(rounds):
        deltas, changes = [], []
        for site in range(2):
            y = x.clone()
            for _ in range(k):
                gradient = 2 * y + g if site == 0 else torch.full_like(y, -g)
                if scaffold:
                    correct_(gradient, c, own[site])
                y -= eta * gradient
            deltas.append(y - x)
            changes.append(control_change(deltas[-1], c, steps=k, lr=eta))
        x += (deltas[0] + deltas[1]) / 2
        for site in range(2):
            own[site] += changes[site]
        server_change_(c, changes[0] + changes[1], sites=2)
    return float(x**2 / 2)


@pytest.mark.parametrize(("g", "at_ten"), [(1.0, 2.5e-6), (10.0, 2.0e-5), (100.0, 1.1e-3)])
def test_scaffold_reaches_the_optimum_whatever_the_drift(g: float, at_ten: float):
    assert two_clients(g, 10, 200, scaffold=True) < 1e-29 * max(1.0, g * g)
    assert two_clients(g, 10, 10, scaffold=True) == pytest.approx(at_ten, rel=0.05)


@pytest.mark.parametrize(
    ("k", "g", "f"), [(2, 1.0, 0.00154), (2, 10.0, 0.154), (10, 1.0, 0.192), (10, 100.0, 1924.0)]
)
def test_plain_averaging_ends_beside_the_optimum(k: int, g: float, f: float):
    assert two_clients(g, k, 200, scaffold=False) == pytest.approx(f, rel=0.01)
    assert two_clients(g, 1, 200, scaffold=False) < 1e-15


def test_the_proximal_pull_points_to_the_start_and_survives_rounding():
    start = torch.full((3,), 1000.0)
    weights = start + torch.tensor([0.0, 2.0**-10, -1.0])
    gradient = torch.zeros(3)
    add_pull_(gradient, weights, start, 0.5)
    assert gradient.tolist() == [0.0, 2.0**-11, -0.5]


def test_scaffold_without_a_step_is_refused():
    with pytest.raises(ValueError, match="at least one step"):
        control_change(torch.ones(1), torch.zeros(1), steps=0, lr=0.1)


def additive_step(
    x: torch.Tensor, deltas: list[torch.Tensor], weights: list[float]
) -> torch.Tensor:
    """A commit with coefficients, through the functions that the fold process uses."""
    given = coefficients(weights)
    sums = Accumulator({"delta": x.numel()})
    for delta, weight in zip(deltas, given.delta, strict=True):
        sums.add_values("delta", 0, delta, weight)
    moved = x.clone()
    average().step({}, moved, sums.sums["delta"].div_(-given.delta_total))
    return moved


def test_a_full_cohort_with_its_shares_as_coefficients_is_the_weighted_mean():
    rng = torch.Generator().manual_seed(9)
    x, deltas = torch.randn(500, generator=rng), list(torch.randn(5, 500, generator=rng))
    counts = [3.0, 10.0, 1.0, 7.0, 20.0]
    together = server_step(x, deltas, [Share(n, 1.0) for n in counts])
    shares = [n / sum(counts) for n in counts]
    assert torch.allclose(additive_step(x, deltas, shares), together, atol=1e-6, rtol=0)
    one_by_one = x
    for delta, share in zip(deltas, shares, strict=True):
        one_by_one = additive_step(one_by_one, [delta], [share])
    assert torch.allclose(one_by_one, together, atol=1e-6, rtol=0)


def test_a_buffer_of_all_sites_with_equal_weights_is_a_round():
    rng = torch.Generator().manual_seed(10)
    x = torch.randn(500, generator=rng)
    for n, exact in ((4, True), (5, False)):  # a power of two divides without rounding
        deltas = list(torch.randn(n, 500, generator=rng))
        together = server_step(x, deltas, [Share(1.0, 1.0)] * n, "equal")
        buffered = additive_step(x, deltas, [1.0 / n] * n)
        assert torch.allclose(buffered, together, atol=1e-6, rtol=0)
        assert torch.equal(buffered, together) or not exact
