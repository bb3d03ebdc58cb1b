"""How many sites the coordinator's decisions can carry: its pure core, driven in virtual time.

Sites connect, get ready, train what they are told to, report, and beat every 5 s; their updates are
made-up facts without bodies, and nothing is folded, stored or sent. Timed is the core alone:
`handle` and `wake_at` for every stimulus, the way an engine calls them.

`core_events_per_second`: stimuli of a job with 1,000 sites that all take part in every version.
`batched_over_loop_32`, `_8`: see `simulator_training`.
`core_fleet_seconds`: 10,000 sites registered, 500 drawn for a version, 100 versions.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from benchmarks import simulator_training
from coordinator import actions as a
from coordinator import stimuli as s
from coordinator.core import Core, CoreConfig
from coordinator.job import Job
from protocol import messages as m
from protocol.jobspec import JobSpec, Pacing, Period, Sites, Stop, TaskRef
from protocol.metrics import metric
from simulation.bodies import vector_layout

BEAT_SECONDS: Final = 5.0
PERIOD_SECONDS: Final = (5.0, 15.0)  # a site's period takes something between
FOLD_SECONDS: Final = 0.05
ANSWER_SECONDS: Final = 0.02
LAYOUT: Final = vector_layout(4)

BARS: Final = {
    "core_events_per_second": ">= 50000",
    "core_fleet_seconds": "<= 30",
    **simulator_training.BARS,
}


def run(*, quick: bool) -> dict[str, Any]:
    """Measure both; quick: a tenth of the versions and of the fleet."""
    steady = drive(sites=1000, select=0, versions=2 if quick else 20)
    fleet = drive(sites=1000, select=50, versions=10) if quick else drive(10_000, 500, 100)
    return {
        "core_events_per_second": round(steady.events / steady.seconds),
        "core_fleet_seconds": round(fleet.seconds, 3),
        "core_fleet_events": fleet.events,
        "core_fleet_periods": fleet.periods,
        "core_fleet_virtual_seconds": round(fleet.virtual_seconds, 1),
        **simulator_training.measure(quick=quick),
    }


@dataclass(slots=True)
class Driven:
    """What a job took: stimuli, seconds in the core, settled periods, and job time."""

    events: int
    seconds: float
    periods: int
    virtual_seconds: float


def drive(sites: int, select: int, versions: int) -> Driven:
    """Run one bulk-synchronous job over so many sites to its end."""
    return _World(sites, select, versions).run()


class _World:
    """Sites, fold process and clock around one core."""

    def __init__(self, sites: int, select: int, versions: int) -> None:
        self.core = Core(CoreConfig())
        self.now = 0.0
        self.names = [f"site-{index:05d}" for index in range(sites)]
        self.spec = JobSpec(
            name="fleet",
            task=TaskRef(name="none"),
            period=Period(steps=10),
            sites=Sites(wanted=sites, select=select),
            stop=Stop(versions=versions),
            pacing=Pacing(quorum=1, deadline_seconds=600.0),
            seed=1,
        )
        self.random = random.Random(1)
        self.queue: list[tuple[float, int, s.Stimulus]] = []
        self.beats = deque(
            (index * BEAT_SECONDS / sites, name) for index, name in enumerate(self.names)
        )
        self.ticket = self.events = self.periods = 0
        self.seconds = 0.0
        self.due: float | None = None

    @property
    def job(self) -> Job:
        return self.core.job("j")

    def run(self) -> Driven:
        """Until the job has ended and its checkpoint is written."""
        self.take(s.JobSubmission(job="j", spec=self.spec, by="ann"))
        for name in self.names:
            self.later(0.0, s.SiteConnected(site=name, role="site", instance=name))
        while not (self.job.terminal and self.job.checkpoint == self.job.number):
            self.step()
        assert self.job.state == "finished", self.job.reason
        return Driven(self.events, self.seconds, self.periods, self.now)

    def step(self) -> None:
        """Whatever comes next: a message, a sign of life, or that something is due."""
        at = self.queue[0][0] if self.queue else float("inf")
        beat = self.beats[0][0]
        if self.due is not None and self.due < min(at, beat):
            self.now = self.due
            self.take(s.Tick())
        elif beat < at:
            self.now, name = self.beats.popleft()
            self.beats.append((beat + BEAT_SECONDS, name))
            self.take(s.SiteHeard(site=name))
        else:
            self.now, _, stimulus = heapq.heappop(self.queue)
            self.take(stimulus)

    def later(self, seconds: float, stimulus: s.Stimulus) -> None:
        """Let something happen after a while."""
        self.ticket += 1
        heapq.heappush(self.queue, (self.now + seconds, self.ticket, stimulus))

    def take(self, stimulus: s.Stimulus) -> None:
        """Tell the core, and time it."""
        started = time.perf_counter()
        actions = self.core.handle(stimulus, self.now)
        self.due = self.core.wake_at()
        self.seconds += time.perf_counter() - started
        self.events += 1
        for action in actions:
            self.carry_out(action)

    def carry_out(self, action: a.AnyAction) -> None:
        """What sites and fold process answer."""
        match action:
            case a.Send():
                self.instruct(action.site, action.instruction)
            case a.Commit():
                digest = f"d{action.version}"
                facts = s.CommitFacts(version=action.version, digest=digest, bytes=1000)
                self.later(FOLD_SECONDS, s.CommitDone(job="j", facts=facts))
            case a.WriteCheckpoint():
                self.later(FOLD_SECONDS, s.CheckpointDone(job="j", version=action.version))
            case _:
                pass

    def instruct(self, site: str, instruction: m.Instruction) -> None:
        """A site does what it is told."""
        match instruction:
            case m.Prepare():
                ready = m.Ready(
                    job="j",
                    layout=LAYOUT,
                    layout_digest=LAYOUT.digest(),
                    train_examples=100,
                    eval_examples=50,
                )
                self.later(ANSWER_SECONDS, s.SiteReported(site=site, event=ready))
            case m.Initialise():
                init = s.InitFacts(digest="d0", bytes=1000, layout=LAYOUT)
                self.later(ANSWER_SECONDS, s.InitComplete(job="j", site=site, facts=init))
            case m.Train():
                if instruction.evaluate:
                    self.evaluate(site, instruction.base)
                self.train(site, instruction)
            case m.Evaluate():
                self.evaluate(site, instruction.base)
            case _:
                pass

    def evaluate(self, site: str, base: m.VersionRef) -> None:
        """Report made-up metrics."""
        found = {"accuracy": metric(0.5, 50)}
        report = m.Evaluated(job="j", version=base.version, examples=50, metrics=found)
        self.later(1.0, s.SiteReported(site=site, event=report))

    def train(self, site: str, task: m.Train) -> None:
        """Send a made-up update after a while."""
        self.periods += 1
        facts = s.UpdateFacts(
            epoch=task.epoch,
            clock=task.clock,
            attempt=task.attempt,
            base_version=task.base.version,
            base_digest=task.base.digest,
            layout_digest=self.job.layout_digest,
            examples=100.0,
            steps=task.steps,
            effective_steps=float(task.steps),
            norm=1.0,
        )
        spool = f"{site}-{task.epoch}-{task.clock}-{task.attempt}.body"
        upload = s.UploadComplete(job="j", site=site, spool=spool, wire_bytes=500, facts=facts)
        self.later(self.random.uniform(*PERIOD_SECONDS), upload)
