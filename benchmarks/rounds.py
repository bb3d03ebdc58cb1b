"""Empty rounds: real processes over loopback sockets, everything but training.

A round is timed from commit to commit at the coordinator: long poll, download of the version,
hand-over to the worker, its digest check and update file, upload, spool, screening, fold, new
version, journal. The stub worker writes real updates and trains nothing. Median of the rounds
after the first two.

Cost model, per round and site with S = 4 bytes x elements. The version is sent by the kernel,
received, written to the site's disk, and read and hashed by the worker; the update is written by
the worker, read and sent by the agent, received and written to the spool, and read twice by the
fold process (screen, add). The version itself is added up, stepped, hashed and written once for
all. So S is hashed once at every site and once in the fold (sha256, 1.1 to 1.8 GB/s), becomes pages
of a new file three times at every site and once in the fold (2.5 GB/s), and is copied to or from a
socket four times (3 GB/s and more). All of it shares the machine's cores: what a round takes is the
CPU time of all processes, and with two cores and two sites most of it runs two at a time, except
the fold. A small round of two sites is some 190 turns of the coordinator's event loop, about 55 of
them hops to SQLite's thread.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any, Final

from benchmarks.places import place

CASES: Final = {
    "2x1e5": (2, 100_000),
    "2x1e6": (2, 1_000_000),
    "2x1e7": (2, 10_000_000),
    "10x1e6": (10, 1_000_000),
}
MEMORY_CASES: Final = {"2x1e7": (2, 10_000_000), "10x1e7": (10, 10_000_000)}
WARM_UP: Final = 2
ROUNDS: Final = 12
QUICK_ROUNDS: Final = 5


def run(*, quick: bool) -> dict[str, Any]:
    """Measure all cases; quick: the two small ones, fewer rounds."""
    cases = dict(list(CASES.items())[:2]) if quick else {**CASES, **MEMORY_CASES}
    rounds = QUICK_ROUNDS if quick else ROUNDS
    seconds: dict[str, float] = {}
    over: dict[str, float] = {}
    coordinator_mb: dict[str, float] = {}
    fold_mb: dict[str, float] = {}
    fold_models: dict[str, float] = {}
    for name, (sites, elements) in cases.items():
        few = name not in CASES  # the memory case is about peaks, not about times
        found = measure(sites, elements, WARM_UP + (3 if few else rounds))
        if not few:
            seconds[name] = round(found["round_seconds"], 4)
            over[name] = round(found["wire_over_ideal"], 5)
        if name in MEMORY_CASES:
            coordinator_mb[name] = round(found["coordinator_mb"], 1)
            fold_mb[name] = round(found["fold_mb"], 1)
            fold_models[name] = round(found["fold_mb"] / (elements * 4e-6), 2)
    return {
        "empty_round_seconds": seconds,
        "wire_over_ideal": over,
        "coordinator_mb": coordinator_mb,
        "fold_mb": fold_mb,
        "fold_models": fold_models,
    }


def measure(sites: int, elements: int, rounds: int) -> dict[str, float]:
    """One case in processes of its own."""
    with place() as here:
        for k in range(sites):
            here.join(f"site-{k:02d}")
            here.agent(f"site-{k:02d}")
        job = here.run_job(sites, elements, rounds, 600.0)
        made = [version.made_at for version in here.api.versions(job)]
        gaps = [after - before for before, after in itertools.pairwise(made)]
        view, info = here.api.job(job).job, here.api.info()
        model = 4 * elements
        outside = model  # version 0 went up once, which belongs to no round
        wire = view.bytes_up + view.bytes_down - outside
        return {
            "round_seconds": statistics.median(gaps[WARM_UP:]),
            "wire_over_ideal": wire / (2 * model * sites * rounds),
            "coordinator_mb": info.process_peak_mb,
            "fold_mb": info.fold_peak_mb - info.fold_idle_mb,
        }


BARS: Final = {
    "empty_round_seconds.2x1e5": "<= 0.05",
    "empty_round_seconds.2x1e6": "<= 0.10",
    "empty_round_seconds.2x1e7": "<= 0.8",
    "empty_round_seconds.10x1e6": "<= 0.3",
    "wire_over_ideal.2x1e7": "<= 1.002",
    "coordinator_mb.10x1e7": "<= 100",
    "fold_models.10x1e7": "<= 4.5",
}
