"""How many local steps each site takes, from how fast it was so far: H of the next period.

`equal` gives everybody `period.steps`. `esync` gives the faster sites more, so that all arrive
together (ESync, Li et al., 2020): with step_k and comm_k the measured seconds of a step and of
what a period takes beside its steps,

    T   = max_k (H x step_k + comm_k)          when the slowest is in with H = period.steps
    H_k = floor((T - comm_k) / step_k)         what the others can do until then

`dylu` gives the slower ones fewer (dynamic local updates, Liu et al., arXiv 2401.09135):
H_k = floor(H x v_k / v_max) with the speed v_k = 1 / step_k. A site that was not measured yet takes
`period.steps`; every period has at least one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import Final

from coordinator.job import Job, Member

STRETCH: Final = 4  # steps_max = 0: a sized period has at most so many times `period.steps`

Sizes = dict[str, int]


def sizes(job: Job) -> Sizes:
    """Steps by site for everybody whose period is sized; empty where all are alike."""
    rule = _RULES.get(job.spec.pacing.periods)
    measured = {m.site: _Pace(m) for m in job.active("site") if m.trains and m.step_seconds}
    return rule(job, measured) if rule is not None and measured else {}


def steps_max(job: Job) -> int:
    """Most steps of a sized period."""
    return job.spec.pacing.steps_max or STRETCH * (job.spec.period.steps or 0)


class _Pace:
    """Seconds of one step, and of a period beside its steps, as this site's newest periods were.

    The median, because one period that straggled says nothing about the next.
    """

    def __init__(self, member: Member) -> None:
        self.step = median(member.step_seconds)
        self.comm = member.comm_seconds or 0.0


def _esync(job: Job, measured: dict[str, _Pace]) -> Sizes:
    least = job.spec.period.steps or 0
    arrive = max(least * pace.step + pace.comm for pace in measured.values())
    return {
        site: min(max(_floor((arrive - pace.comm) / pace.step), 1), steps_max(job))
        for site, pace in measured.items()
    }


def _dylu(job: Job, measured: dict[str, _Pace]) -> Sizes:
    most = job.spec.period.steps or 0
    fastest = min(pace.step for pace in measured.values())
    return {site: max(_floor(most * fastest / pace.step), 1) for site, pace in measured.items()}


def _floor(steps: float) -> int:
    """Whole steps; what only rounding keeps below a whole number counts as that number."""
    return math.floor(steps + 1e-9)


_RULES: Final[dict[str, Callable[[Job, dict[str, _Pace]], Sizes]]] = {
    "esync": _esync,
    "dylu": _dylu,
}
