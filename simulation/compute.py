"""How long a simulated site takes: step times, stragglers, changes of regime, times offline.

Draws depend on the seed, the site and the clock only: not on what other sites do, nor on how often
a period is tried. So two runs under different rules meet the same weather.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from protocol.names import derive_seed
from simulation.trainer import Plan

DRAWN_STEPS_MAX: Final = 32  # a period of more steps draws their sum, which is as good as normal
_LEAST: Final = 0.5  # of the mean, for such a sum

Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Positive = Annotated[float, Meta(gt=0.0)]
NotNegative = Annotated[float, Meta(ge=0.0)]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """From `at` on, in virtual seconds, steps take `factor` times as long, and another share of
    periods straggles (left out: the same as before).
    """

    at: NotNegative = 0.0
    factor: Positive = 1.0
    straggle_share: Share | None = None


class ComputeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A site's speed: step times are log-normal around `step_seconds`, which is their median."""

    step_seconds: Annotated[Positive, Meta(description="Median of a step.")] = 0.1
    spread: Annotated[NotNegative, Meta(description="Sigma of the log-normal step times.")] = 0.1
    slow: Annotated[
        Positive, Meta(description="A persistent straggler: all its steps take so many times.")
    ] = 1.0
    straggle_share: Annotated[
        Share, Meta(description="Transient stragglers: this share of periods is slow.")
    ] = 0.0
    straggle_factor: Annotated[
        Positive, Meta(description="So many times as long a straggling period takes.")
    ] = 5.0
    changes: Annotated[tuple[Change, ...], Meta(description="Changes of regime, by time.")] = ()
    trace: Annotated[
        tuple[Positive, ...],
        Meta(description="Recorded step times of clock 0, 1, ..., taken as they are; over again."),
    ] = ()
    load_seconds: Annotated[NotNegative, Meta(description="To start and load a task.")] = 1.0
    evaluate_seconds: Annotated[NotNegative, Meta(description="To evaluate a version.")] = 0.1


class Compute:
    """One site's machine."""

    def __init__(self, spec: ComputeSpec, *, seed: int, site: str) -> None:
        self.spec = spec
        self._seed = derive_seed(seed, "compute", site)
        self._changes = sorted(spec.changes, key=lambda change: change.at)

    def plan(self, clock: int, steps: int, *, at: float, budget: float = 0.0) -> Plan:
        """How long `steps` steps take from `at` on; with a budget in seconds, how many of them are
        done when it is over, one at least.
        """
        spec = self.spec
        random = Random(self._seed + clock)  # noqa: S311  no secrets
        slow, share = self._regime(at)
        if random.random() < share:
            slow *= spec.straggle_factor
        if spec.trace:
            recorded = spec.trace[clock % len(spec.trace)]
            return self._evenly(steps, recorded * slow, budget)
        median = spec.step_seconds * slow
        if steps <= DRAWN_STEPS_MAX:
            return self._drawn(random, steps, median, budget)
        mean = math.exp(spec.spread**2 / 2)
        deviation = mean * math.sqrt(math.expm1(spec.spread**2) / steps)
        each = median * max(random.gauss(mean, deviation), _LEAST * mean)
        return self._evenly(steps, each, budget)

    def _regime(self, at: float) -> tuple[float, float]:
        slow, share = self.spec.slow, self.spec.straggle_share
        for change in self._changes:
            if change.at > at:
                break
            slow = self.spec.slow * change.factor
            share = share if change.straggle_share is None else change.straggle_share
        return slow, share

    def _drawn(self, random: Random, steps: int, median: float, budget: float) -> Plan:
        seconds = 0.0
        for step in range(1, steps + 1):
            seconds += median * math.exp(random.gauss(0.0, self.spec.spread))
            if budget and seconds >= budget:
                return Plan(seconds=seconds, steps=step)
        return Plan(seconds=seconds, steps=steps)

    @staticmethod
    def _evenly(steps: int, each: float, budget: float) -> Plan:
        done = min(steps, max(1, math.ceil(budget / each))) if budget else steps
        return Plan(seconds=done * each, steps=done)


class Availability(msgspec.Struct, frozen=True, kw_only=True):
    """When a site is away: given windows, and others by chance with exponential lengths."""

    offline: Annotated[
        tuple[tuple[float, float], ...],
        Meta(description="Windows in virtual seconds: [from, until]."),
    ] = ()
    offline_share: Annotated[
        float, Meta(ge=0.0, lt=1.0, description="Share of the time that it is away by chance.")
    ] = 0.0
    offline_seconds: Annotated[Positive, Meta(description="Mean length of such an absence.")] = (
        360.0
    )

    def windows(self, *, seed: int, site: str) -> Iterator[tuple[float, float]]:
        """(from, until), one after the other, for ever when they come by chance."""
        yield from sorted(self.offline)
        if not self.offline_share:
            return
        random = Random(derive_seed(seed, "availability", site))  # noqa: S311  no secrets
        between = self.offline_seconds * (1.0 - self.offline_share) / self.offline_share
        at = 0.0
        while True:
            at += random.expovariate(1.0 / between)
            until = at + random.expovariate(1.0 / self.offline_seconds)
            yield at, until
            at = until
