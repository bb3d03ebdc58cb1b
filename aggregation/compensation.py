"""Delay compensation: what an update would have been from where the model is now.

A gradient g was computed at x_base; the model has moved to x_now since. Its first-order change is
the Hessian times the way between the two, and the diagonal of the outer product lambda g g^T stands
in for the Hessian (DC-ASGD: Zheng et al., ICML 2017, arXiv 1609.08326, equation 10):

    g' = g + lambda g*g*(x_now - x_base)
    adaptive: lambda = lambda_0 / sqrt(v + 1e-7), v <- 0.95 v + 0.05 g*g, per element, g's own
              square included

An update of H steps of plain SGD at rate eta is delta = -eta H g for the mean gradient g of its
steps, so compensating it is an operation on delta alone. For momentum or Adam that g would not be a
gradient, and the compensation would mean nothing.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from protocol.jobspec import JobSpec

DECAY: Final = 0.95
EPSILON: Final = 1e-7
SLOT: Final = "mean_square"  # v, one of the tensors of a job's server state


class Compensation(NamedTuple):
    """Lambda, or lambda_0 when `adaptive`; `lr` is the sites' learning rate eta."""

    strength: float
    lr: float
    adaptive: bool

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the vectors, as long as the parameters, that it keeps between commits."""
        return (SLOT,) if self.adaptive else ()


def for_job(spec: JobSpec) -> Compensation | None:
    """The compensation that a job asks for, with its defaults filled in; None: none."""
    pacing = spec.pacing
    if pacing.compensation == "none":
        return None
    return Compensation(
        strength=spec.compensation_lambda,
        lr=spec.optimizer.lr,
        adaptive=pacing.compensation == "adaptive",
    )


def compensated(
    delta: torch.Tensor,
    drift: torch.Tensor | None,
    *,
    travelled: float,
    strength: float,
    mean_square: torch.Tensor | None = None,
) -> torch.Tensor:
    """One update's delta, or a tile of it, as it would be from where the model is now.

    `travelled` is eta H, `drift` is x_now - x_base, None when the update started from the model as
    it is: then delta is what it was, to the bit. With `mean_square` (v, moved in place) lambda is
    adaptive. The drift is used up.
    """
    if travelled <= 0.0:
        return delta  # no step was taken: nothing is known about the gradient
    if mean_square is not None:
        share = (1.0 - DECAY) / (travelled * travelled)
        mean_square.mul_(DECAY).addcmul_(delta, delta, value=share)
    if drift is None:
        return delta
    correction = drift.mul_(delta).mul_(delta)
    if mean_square is not None:
        correction.div_((mean_square + EPSILON).sqrt_())
    return torch.add(delta, correction, alpha=-strength / travelled)
