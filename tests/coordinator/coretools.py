"""A core with a hand-driven world around it: no fleet, every message is written out by the test."""

from __future__ import annotations

from typing import Any

from coordinator import actions as a
from coordinator import stimuli as s
from coordinator.core import Core, CoreConfig
from coordinator.job import Job
from coordinator.journal import Entry
from protocol import messages as m
from protocol.jobspec import JobSpec, Pacing, Period, Sites, Stop, TaskRef
from protocol.jobstates import JobStimulus
from protocol.layout import Layout
from protocol.metrics import Metric, metric
from simulation.bodies import vector_layout

LAYOUT = vector_layout(4)


def make_spec(**changes: Any) -> JobSpec:
    """A small job: any site, ten versions."""
    base: dict[str, Any] = {
        "name": "digits",
        "task": TaskRef(name="digits"),
        "period": Period(steps=10),
        "sites": Sites(wanted=2),
        "stop": Stop(versions=10),
        "pacing": Pacing(deadline_seconds=60.0),
        "seed": 7,
    }
    return JobSpec(**{**base, **changes})


class World:
    """Drives one core; `step` checks after every stimulus that the journal tells the same state."""

    def __init__(self, **config: Any) -> None:
        self.config = CoreConfig(**config)
        self.core = Core(self.config)
        self.now = 0.0
        self.journal: list[Entry] = []
        self.last: list[a.AnyAction] = []

    def take(self, actions: list[a.AnyAction]) -> list[a.AnyAction]:
        for index, action in enumerate(actions):
            if isinstance(action, a.Persist):
                assert index == 0, "the journal comes first"
                for event in action.events:
                    self.journal.append(
                        Entry(seq=len(self.journal) + 1, now=action.now, event=event)
                    )
        told = Core(self.config)
        told.restore(self.journal)
        assert told.jobs() == self.core.jobs()
        for job in told.jobs():
            assert told.job(job) == self.core.job(job)
        self.last = actions
        return actions

    def step(self, stimulus: s.Stimulus, wait: float = 0.0) -> list[a.AnyAction]:
        self.now += wait
        return self.take(self.core.handle(stimulus, self.now))

    def restart(self) -> list[a.AnyAction]:
        """Another process, from the journal."""
        self.core = Core(self.config)
        self.core.restore(self.journal)
        return self.take(self.core.resume(self.now))

    # ------------------------------------------------------------ stimuli

    def tick(self, wait: float = 0.0) -> list[a.AnyAction]:
        return self.step(s.Tick(), wait)

    def connect(
        self, site: str, role: m.SiteRole = "site", instance: str = "1", tasks: tuple[str, ...] = ()
    ) -> list[a.AnyAction]:
        return self.step(
            s.SiteConnected(site=site, role=role, instance=f"{site}#{instance}", tasks=tasks)
        )

    def close(self, site: str) -> list[a.AnyAction]:
        return self.step(s.SiteClosed(site=site))

    def report(self, site: str, event: m.Event) -> list[a.AnyAction]:
        return self.step(s.SiteReported(site=site, event=event))

    def ready(
        self,
        site: str,
        job: str = "j",
        *,
        train: int = 100,
        test: int = 50,
        layout: Layout = LAYOUT,
    ) -> list[a.AnyAction]:
        return self.report(
            site,
            m.Ready(
                job=job,
                layout=layout,
                layout_digest=layout.digest(),
                train_examples=train,
                eval_examples=test,
            ),
        )

    def join(self, site: str, job: str = "j", role: m.SiteRole = "site", **kwargs: Any) -> None:
        self.connect(site, role)
        self.ready(site, job, **kwargs)

    def submit(self, job: str = "j", spec: JobSpec | None = None, *, init: bool = False) -> None:
        facts = s.InitFacts() if init else None
        self.step(s.JobSubmission(job=job, spec=spec or make_spec(), by="ann", init=facts))

    def init(self, site: str, job: str = "j", layout: Layout = LAYOUT) -> list[a.AnyAction]:
        facts = s.InitFacts(digest="d0", bytes=1000, layout=layout)
        return self.step(s.InitComplete(job=job, site=site, facts=facts))

    def command(self, what: JobStimulus, job: str = "j") -> list[a.AnyAction]:
        return self.step(s.JobCommand(job=job, stimulus=what, by="ann"))

    def facts(self, site: str, job: str = "j", **changes: Any) -> s.UpdateFacts:
        """Good facts for the site's open task."""
        state = self.core.job(job)
        member = state.members[site]
        task = state.round.tasks[site] if state.round and site in state.round.tasks else None
        base: dict[str, Any] = {
            "epoch": task.epoch if task else member.epoch,
            "clock": task.clock if task else member.clock,
            "attempt": task.attempt if task else 1,
            "base_version": state.number,
            "base_digest": state.version.digest if state.version else "",
            "layout_digest": state.layout_digest,
            "examples": 100.0,
            "steps": 10,
            "effective_steps": 10.0,
            "norm": 1.0,
        }
        return s.UpdateFacts(**{**base, **changes})

    def upload(self, site: str, job: str = "j", facts: s.UpdateFacts | None = None) -> a.Verdict:
        found = facts or self.facts(site, job)
        spool = f"{site}-{found.epoch}-{found.clock}-{found.attempt}.body"
        self.step(s.UploadComplete(job=job, site=site, spool=spool, wire_bytes=500, facts=found))
        return self.one(a.Verdict)

    def committed(self, job: str = "j", problem: str = "") -> list[a.AnyAction]:
        closed = self.core.job(job).committing
        assert closed is not None
        facts = s.CommitFacts(
            version=closed.version, digest=f"d{closed.version}", bytes=1000, problem=problem
        )
        return self.step(s.CommitDone(job=job, facts=facts))

    def saved(self, version: int, job: str = "j", problem: str = "") -> list[a.AnyAction]:
        return self.step(s.CheckpointDone(job=job, version=version, problem=problem))

    def evaluated(
        self, site: str, version: int, job: str = "j", **values: float
    ) -> list[a.AnyAction]:
        found: dict[str, Metric] = {name: metric(value, 50) for name, value in values.items()}
        return self.report(site, m.Evaluated(job=job, version=version, examples=50, metrics=found))

    def failed(self, site: str, reason: str, job: str = "j", *, fatal: bool = False) -> None:
        facts = self.facts(site, job)
        self.report(
            site,
            m.Failed(
                job=job,
                epoch=facts.epoch,
                clock=facts.clock,
                attempt=facts.attempt,
                reason=reason,
                fatal=fatal,
            ),
        )

    # ------------------------------------------------------------ shortcuts

    def running(self, *sites: str, spec: JobSpec | None = None) -> World:
        """Submit, join the sites, make version 0: the first round is open."""
        self.submit(spec=spec or make_spec(sites=Sites(wanted=len(sites))))
        for site in sites:
            self.join(site)
        self.init(self.job.init_site)
        return self

    def round(self) -> list[a.AnyAction]:
        """All open tasks are delivered and the version is made."""
        assert self.job.round is not None
        for site in self.job.round.sites("training"):
            assert self.upload(site).verdict == "queued"
        return self.committed()

    @property
    def job(self) -> Job:
        return self.core.job("j")

    def waiting(self, job: str = "j") -> str:
        return self.core.view(job, self.now).waiting

    def all(self, kind: type[Any]) -> list[Any]:
        """Actions of a kind, or instructions of a kind, in the last batch."""
        found: list[Any] = [action for action in self.last if isinstance(action, kind)]
        sends = [action for action in self.last if isinstance(action, a.Send)]
        return found + [send for send in sends if isinstance(send.instruction, kind)]

    def one(self, kind: type[Any]) -> Any:
        found = self.all(kind)
        assert len(found) == 1, f"{len(found)} of {kind.__name__} in {self.last}"
        return found[0]

    def to(self, kind: type[m.Instruction]) -> list[str]:  # type: ignore[valid-type]
        """Sites that an instruction of this kind went to in the last batch."""
        return [send.site for send in self.all(kind)]
