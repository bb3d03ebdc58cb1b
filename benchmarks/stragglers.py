"""What each pacing rule loses to stragglers: the coordinator's own decisions, in virtual time.

8 workers, least squares with 200 unknowns and 4,000 rows, batches of 20. A step takes
LogNormal(0, 0.1) seconds, pull and push 0.2 each. `transient`: 5 % of the steps take 5 times as
long; `persistent`: one worker always takes twice as long. A worker computes one gradient at the
version that the core tells it to start from; each moves the model by half of it, and the time until
1 % of the initial excess loss is left is what counts. Read every 40 updates; means over seeds.

`virtual_seconds`  scenario -> rule -> virtual seconds
`waits`    scenario -> rule -> share of the workers' time in which they had nothing to do
`ratios`   scenario -> rule -> seconds over those of `bsp`
`worst_deviation`  of these ratios from the reference's, relative

The core is real, from joining to the weights of every commit; only the model's arithmetic and the
passing of time are played here. A fold takes no time.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coordinator import actions as a
from coordinator import stimuli as s
from coordinator.core import Core, CoreConfig
from coordinator.job import Job
from protocol import messages as m
from protocol.jobspec import (
    Checkpoint,
    Evaluation,
    JobSpec,
    Pacing,
    Period,
    Sites,
    Stop,
    TaskRef,
    Weights,
)
from simulation.bodies import vector_layout
from simulation.clock import VirtualClock

BARS: Final = {"worst_deviation": "<= 0.10"}

WORKERS: Final = 8
UNKNOWNS: Final = 200
ROWS: Final = 4000
BATCH: Final = 20
NOISE: Final = 0.1
RATE: Final = 0.5
LINK_SECONDS: Final = 0.2
READ_EVERY: Final = 40  # updates
TARGET: Final = 0.01  # of the initial excess loss
LAYOUT: Final = vector_layout(UNKNOWNS)
FOREVER: Final = 1e8

Vector = NDArray[np.float64]

RULES: Final = {
    "bsp": Pacing(deadline_seconds=FOREVER),
    "first7": Pacing(first=7, deadline_seconds=FOREVER),
    **{
        f"ssp{bound}": Pacing(rule="ssp", staleness=bound, deadline_seconds=FOREVER)
        for bound in (1, 3, 10)
    },
    "async": Pacing(
        rule="async", staleness=10**6, staleness_weight="constant", deadline_seconds=FOREVER
    ),
}
SCENARIOS: Final = ("none", "transient", "persistent")

#: Seconds of two independent event simulators over the same problem, 5 seeds each.
REFERENCE: Final = {
    "none": {"bsp": 195, "ssp1": 175, "async": 177},
    "transient": {"bsp": 356, "ssp1": 279, "ssp3": 229, "ssp10": 204, "async": 197},
    "persistent": {"bsp": 305, "ssp3": 296, "ssp10": 279, "async": 186},
}
#: Of the second one: the fastest 7 of 8, and all 8.
REFERENCE_FIRST: Final = {"none": (214, 193), "transient": (242, 359), "persistent": (222, 302)}


def run(*, quick: bool) -> dict[str, Any]:
    """Measure all rules in all scenarios; quick: one seed."""
    problems = [Problem(seed) for seed in range(1 if quick else 5)]
    seconds: dict[str, dict[str, float]] = {}
    waits: dict[str, dict[str, float]] = {}
    for scenario in SCENARIOS:
        for rule in RULES:
            found = [World(rule, scenario, problem).run() for problem in problems]
            took, waited = (float(np.mean(column)) for column in zip(*found, strict=True))
            seconds.setdefault(scenario, {})[rule] = round(took, 1)
            waits.setdefault(scenario, {})[rule] = round(waited, 3)
        print(f"{scenario}: {seconds[scenario]}", file=sys.stderr)
    ratios = {
        scenario: {rule: round(took[rule] / took["bsp"], 4) for rule in took if rule != "bsp"}
        for scenario, took in seconds.items()
    }
    away = deviations(ratios)
    return {
        "virtual_seconds": seconds,
        "waits": waits,
        "ratios": ratios,
        "deviations": away,
        "worst_deviation": max(abs(x) for of in away.values() for x in of.values()),
    }


def deviations(ratios: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """How far each ratio is from the reference's, relative; what that has not measured is left
    out.
    """
    found: dict[str, dict[str, float]] = {}
    for scenario, took in ratios.items():
        known = REFERENCE[scenario]
        wanted = {rule: value / known["bsp"] for rule, value in known.items() if rule != "bsp"}
        wanted["first7"] = REFERENCE_FIRST[scenario][0] / REFERENCE_FIRST[scenario][1]
        found[scenario] = {rule: round(took[rule] / wanted[rule] - 1.0, 4) for rule in wanted}
    return found


class Problem:
    """Least squares over rows that belong to workers, an equal share to each."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        rng = np.random.default_rng([seed, 1])
        self.x = rng.normal(0.0, UNKNOWNS**-0.5, (ROWS, UNKNOWNS))
        self.y = self.x @ rng.normal(size=UNKNOWNS) + rng.normal(0.0, NOISE, ROWS)
        best = np.asarray(np.linalg.solve(self.x.T @ self.x, self.x.T @ self.y), np.float64)
        self._least = self._loss(best)

    def _loss(self, w: Vector) -> float:
        return float(np.mean((self.x @ w - self.y) ** 2)) / 2

    def excess(self, w: Vector) -> float:
        """Loss above that of the best fit."""
        return self._loss(w) - self._least

    def gradient(self, w: Vector, worker: int, rng: np.random.Generator) -> Vector:
        """Mean gradient of a batch from the worker's own rows."""
        share = ROWS // WORKERS
        rows = worker * share + rng.integers(share, size=BATCH)
        x, y = self.x[rows], self.y[rows]
        return x.T @ (x @ w - y) / BATCH


class World:
    """Workers, clock and model around one core."""

    def __init__(self, rule: str, scenario: str, problem: Problem) -> None:
        self.problem = problem
        self.scenario = scenario
        self.clock = VirtualClock()
        self.core = Core(CoreConfig(lease_seconds=FOREVER))
        self.names = [f"w{k}" for k in range(WORKERS)]
        # A worker's n-th period takes the same time and the same batch under every rule.
        self.random = {
            k: np.random.default_rng([problem.seed, 2, i]) for i, k in enumerate(self.names)
        }
        self.spec = JobSpec(
            name="stragglers",
            task=TaskRef(name="least-squares"),
            period=Period(steps=1),
            sites=Sites(wanted=WORKERS),
            stop=Stop(versions=10**9),
            pacing=RULES[rule],
            weights=Weights(by="equal"),
            evaluation=Evaluation(every=0, sites=False),
            checkpoint=Checkpoint(every=100, seconds=FOREVER),
        )
        self.versions: dict[int, Vector] = {0: np.zeros(UNKNOWNS)}
        self.deltas: dict[str, Vector] = {}  # by spool
        self.started: dict[str, tuple[int, float]] = {}  # worker -> its period's ticket, since when
        self.ticket = self.updates = 0
        self.busy = 0.0
        self.due: float | None = None
        # In a mean every update counts by 1/n of those in it; each is to move the model by RATE.
        self.scale = RATE * (RULES[rule].first or WORKERS)

    @property
    def job(self) -> Job:
        """The one job."""
        return self.core.job("j")

    def run(self) -> tuple[float, float]:
        """Until the target: virtual seconds, and the share of the workers' time spent waiting."""
        self.tell(s.JobSubmission(job="j", spec=self.spec, by="bench"))
        for name in self.names:
            self.tell(s.SiteConnected(site=name, role="site", instance=name))
        goal = TARGET * self.problem.excess(self.versions[0])
        read = 0
        while True:
            assert self.clock.step(), self.job.reason
            if self.updates // READ_EVERY > read:
                read = self.updates // READ_EVERY
                if self.problem.excess(self.versions[self.job.number]) < goal:
                    break
        end = self.clock.now
        busy = self.busy + sum(end - since for _, since in self.started.values())
        return end, max(1.0 - busy / (WORKERS * end), 0.0)

    def tell(self, stimulus: s.Stimulus) -> None:
        """Tell the core, and do what it asks."""
        for action in self.core.handle(stimulus, self.clock.now):
            self.carry_out(action)
        due = self.core.wake_at()
        if due is not None and due != self.due:
            self.clock.at(due, partial(self.tick, due))
        self.due = due

    def tick(self, due: float) -> None:
        """Something is due, unless what was has gone."""
        if due == self.due:
            self.due = None
            self.tell(s.Tick())

    def soon(self, stimulus: s.Stimulus) -> None:
        """Tell the core at this same instant, after what it is being told now."""
        self.clock.after(0.0, partial(self.tell, stimulus))

    def carry_out(self, action: a.AnyAction) -> None:
        """What workers and fold process do."""
        match action:
            case a.Send(site=site, instruction=m.Train() as train):
                self.begin(site, train)
            case a.Send(site=site, instruction=m.Abort()):
                self.end(site)
            case a.Send(site=site, instruction=m.Prepare()):
                ready = m.Ready(
                    job="j",
                    layout=LAYOUT,
                    layout_digest=LAYOUT.digest(),
                    train_examples=ROWS // WORKERS,
                    eval_examples=0,
                )
                self.soon(s.SiteReported(site=site, event=ready))
            case a.Send(site=site, instruction=m.Initialise()):
                init = s.InitFacts(digest="0", bytes=1, layout=LAYOUT)
                self.soon(s.InitComplete(job="j", site=site, facts=init))
            case a.Commit():
                self.commit(action)
            case a.WriteCheckpoint(version=version):
                self.soon(s.CheckpointDone(job="j", version=version))
            case a.KeepVersions(oldest=oldest, besides=besides):
                for version in [v for v in self.versions if v < oldest and v not in besides]:
                    del self.versions[version]
            case _:
                pass

    def begin(self, site: str, train: m.Train) -> None:
        """Pull the version, compute, and push; what is pushed stems from that version."""
        rng, worker = self.random[site], self.names.index(site)
        step = float(rng.lognormal(0.0, 0.1))
        slow = rng.random() < 0.05
        if self.scenario == "transient" and slow:
            step *= 5.0
        if self.scenario == "persistent" and worker == WORKERS - 1:
            step *= 2.0
        delta = -self.scale * self.problem.gradient(self.versions[train.base.version], worker, rng)
        self.ticket += 1
        self.started[site] = (self.ticket, self.clock.now)
        self.clock.after(
            step + 2 * LINK_SECONDS, partial(self.deliver, site, train, delta, self.ticket)
        )

    def end(self, site: str) -> None:
        """The worker stops: its period is over, or called back."""
        if site in self.started:
            self.busy += self.clock.now - self.started.pop(site)[1]

    def deliver(self, site: str, train: m.Train, delta: Vector, ticket: int) -> None:
        """The last byte of an update is in, unless its period was called back."""
        if self.started.get(site, (0, 0.0))[0] != ticket:
            return
        self.end(site)
        spool = f"{site}-{train.epoch}-{train.clock}-{train.attempt}.body"
        self.deltas[spool] = delta
        facts = s.UpdateFacts(
            epoch=train.epoch,
            clock=train.clock,
            attempt=train.attempt,
            base_version=train.base.version,
            base_digest=train.base.digest,
            layout_digest=self.job.layout_digest,
            examples=float(ROWS // WORKERS),
            steps=1,
            effective_steps=1.0,
            norm=float(np.linalg.norm(delta)),
        )
        self.tell(s.UploadComplete(job="j", site=site, spool=spool, wire_bytes=1, facts=facts))

    def commit(self, action: a.Commit) -> None:
        """Make the version, with the weights that the core gives."""
        even = 1.0 / len(action.cohort)
        made = self.versions[action.base_version].copy()
        for part in action.cohort:
            made += (part.weight if action.additive else even) * self.deltas.pop(part.spool)
        self.versions[action.version] = made
        self.updates += len(action.cohort)
        facts = s.CommitFacts(version=action.version, digest=str(action.version), bytes=1)
        self.soon(s.CommitDone(job="j", facts=facts))
