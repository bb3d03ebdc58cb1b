"""How much each update counts in the mean.

The mean of a cohort is sum_k w_k d_k / total. Weights are first scaled by one power of two, which
is exact and keeps a sum of large counts far from overflow, and rounded to float32, as the fold uses
them; `total` is the sum of the rounded ones, so the mean of equal vectors is that vector (under
FedNova, whose total is a formula of its own, up to float32 rounding).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

By = Literal["examples", "steps", "equal"]


class Share(NamedTuple):
    """What a site declares: examples n_k, and effective steps a_k (tau_k for plain SGD)."""

    examples: float
    effective_steps: float


class Weights(NamedTuple):
    """One weight per update for `delta`, and one for values (buffers, ints), with their divisors.

    A total of zero means that nobody contributed: the model must not move. `part` in (0, 1] is how
    far values move towards their mean: all the way for a cohort that stands for everybody.
    """

    delta: tuple[float, ...]
    delta_total: float
    values: tuple[float, ...]
    values_total: float
    part: float = 1.0

    @property
    def usable(self) -> bool:
        """False when no update counts."""
        return self.delta_total > 0.0 and self.values_total > 0.0


def weigh(by: By, shares: Sequence[Share], *, examples_max: float | None = None) -> Weights:
    """Weights of a cohort in the order given.

    `examples`: w_k = n_k. `equal`: 1 for every site that has examples. `steps`: FedNova,
    mean = tau_eff * sum_k p_k d_k / a_k with p_k = n_k / n and tau_eff = sum_k p_k a_k, so that it
    equals the mean by examples when all sites take the same steps (Wang et al., "Tackling the
    Objective Inconsistency Problem", arXiv 2007.07481, eq. 8). Buffers are values, not sums of
    steps: under FedNova too they are weighed by examples.
    """
    counts = [max(0.0, share.examples) for share in shares]
    if examples_max is not None:
        counts = [min(count, examples_max) for count in counts]
    if by == "equal":
        counts = [1.0 if count else 0.0 for count in counts]
    values, scale = _rounded(counts)
    values_total = math.fsum(values)
    if by != "steps":
        return Weights(values, values_total, values, values_total)
    steps = [share.effective_steps for share in shares]
    delta, delta_scale = _rounded(
        [n / a if a > 0 else 0.0 for n, a in zip(counts, steps, strict=True)]
    )
    if not any(delta):
        return Weights(delta, 0.0, values, values_total)
    progress = math.fsum(n * a for n, a in zip(values, steps, strict=True))
    total = values_total * values_total / progress * (delta_scale / scale)
    return Weights(delta, total, values, values_total)


def coefficients(given: Sequence[float]) -> Weights:
    """Weights of a sum: sum_k c_k d_k, divided by nothing (design 4.8, SSP, async, buffered).

    Values mix convexly all the same, b <- (1 - P) b + sum_k c_k b_k with P = sum_k c_k and at most
    1, so that a variance never turns negative.
    """
    exact = tuple(torch.tensor(list(given), dtype=torch.float64).to(torch.float32).tolist())
    total = math.fsum(exact)
    if not (total > 0.0 and all(c >= 0.0 for c in exact)):
        return Weights(exact, 0.0, exact, 0.0)
    return Weights(exact, 1.0, exact, total, min(total, 1.0))


def _rounded(raw: Sequence[float]) -> tuple[tuple[float, ...], float]:
    """Scaled by a power of two into [0, 1) and rounded to float32; and the scale."""
    largest = max(raw, default=0.0)
    scale = math.ldexp(1.0, -math.frexp(largest)[1]) if largest else 1.0
    scaled = torch.tensor([weight * scale for weight in raw], dtype=torch.float64)
    return tuple(scaled.to(torch.float32).tolist()), scale


def effective_steps(
    steps: int, *, momentum: float = 0.0, lr: float = 0.0, mu: float = 0.0
) -> float:
    """The L1 norm of a_k in FedNova: how far `steps` local SGD steps go, in plain steps.

    Momentum rho: (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho). Proximal term mu at learning
    rate eta: (1 - (1 - eta mu)^tau) / (eta mu). Plain SGD: tau.
    Source: arXiv 2007.07481, section 4.
    """
    if momentum > 0.0:
        return (steps - momentum * (1.0 - momentum**steps) / (1.0 - momentum)) / (1.0 - momentum)
    shrink = lr * mu
    if shrink > 0.0:
        return (1.0 - (1.0 - shrink) ** steps) / shrink
    return float(steps)
