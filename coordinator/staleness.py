"""How much an update counts that started from an old version.

tau is the number of versions made since the one it started from. Source: FedAsync (Xie et al.,
arXiv 1903.03934, section 5.2), whose polynomial with a = 1/2 is also FedBuff's (arXiv 2106.06639).
"""

from __future__ import annotations

from protocol.jobspec import Pacing


def staleness_weight(pacing: Pacing, tau: int) -> float:
    """s(tau) in (0, 1]; s(0) = 1."""
    a, b = pacing.staleness_a, pacing.staleness_b
    if pacing.staleness_weight == "polynomial":
        return float((1.0 + tau) ** -a)
    if pacing.staleness_weight == "hinge":
        return 1.0 if tau <= b else 1.0 / (a * (tau - b) + 1.0)
    return 1.0
