"""Fault plans over the real coordinator in virtual time: how many, and how many broke a promise."""

from __future__ import annotations

import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Final

from simulation.chaos import Outcome, draw
from simulation.chaos import run as run_plan

BARS: Final = {"violations": "<= 0"}
SEEDS: Final = 20_000
QUICK_SEEDS: Final = 500


def outcome(seed: int) -> Outcome:
    """Run the plan of one seed."""
    return run_plan(draw(seed))


def run(*, quick: bool, seeds: int = 0) -> dict[str, Any]:
    """Run the plans of the first `seeds` seeds; a failing one is named with how to replay it."""
    count = seeds or (QUICK_SEEDS if quick else SEEDS)
    events, violations, states = 0, 0, Counter[str]()
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        for found in pool.map(outcome, range(count), chunksize=50):
            events += found.events
            states[found.state] += 1
            if found.violation:
                violations += 1
                print(f"seed {found.seed}: {found.violation}", file=sys.stderr)
                print(f"  ./run python -m simulation.chaos {found.seed}", file=sys.stderr)
    return {
        "plans": count,
        "events": events,
        "violations": violations,
        "states": dict(sorted(states.items())),
    }
