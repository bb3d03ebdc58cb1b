"""Fault plans over the real coordinator in virtual time: how many, and how many broke a promise.

python -m benchmarks.chaos SEED      run one plan and tell what it was and what came of it
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Final

import msgspec

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
                print(f"  ./run python -m benchmarks.chaos {found.seed}", file=sys.stderr)
    return {
        "plans": count,
        "events": events,
        "violations": violations,
        "states": dict(sorted(states.items())),
    }


def main(arguments: list[str]) -> int:
    """Run the plan of a seed and tell everything about it."""
    if len(arguments) != 1 or not arguments[0].isdigit():
        print("usage: python -m benchmarks.chaos SEED", file=sys.stderr)
        return 2
    plan = draw(int(arguments[0]))
    print(msgspec.json.format(msgspec.json.encode(plan)).decode())
    found = run_plan(plan)
    print(msgspec.json.encode(found).decode())
    return 1 if found.violation else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
