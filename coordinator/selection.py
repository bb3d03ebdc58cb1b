"""Which sites take part in a round: seeded, replayable, the same on every machine and Python."""

from __future__ import annotations

import math
from collections.abc import Iterable

from protocol.names import derive_seed


def over_selected(count: int, more: float) -> int:
    """How many to draw when `count` are wanted and some, the fraction `more`, may be too slow."""
    return math.ceil(round(count * (1.0 + more), 6))  # 550, not 551, for 500 and a tenth more


def select(seed: int, round_: int, sites: Iterable[str], count: int) -> tuple[str, ...]:
    """Draw `count` sites uniformly (0, or more than there are: all), in canonical order.

    Each site's rank is a hash of the job's seed, the round and its name, so the draw depends
    neither on the order in which sites came nor on any generator's state, and one more site
    displaces at most one other.
    """
    names = sorted(set(sites))
    if 0 < count < len(names):
        ranked = sorted(names, key=lambda s: (derive_seed(seed, "select", str(round_), s), s))
        names = sorted(ranked[:count])
    return tuple(names)
