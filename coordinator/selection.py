"""Which sites take part in a round: seeded, replayable, the same on every machine and Python."""

from __future__ import annotations

from collections.abc import Iterable

from protocol.names import derive_seed


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
