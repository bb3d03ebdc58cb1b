"""A simulated site: an agent and its worker as one small machine on the virtual clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from protocol import messages as m
from protocol.bodies import UpdateMeta, dense_parts
from protocol.layout import Layout
from protocol.metrics import Metric, metric
from simulation.bodies import Body, decode, encode_snapshot, encode_update, vector_layout


class Identity(NamedTuple):
    """Of an update: attempts of one clock are one update."""

    job: str
    epoch: int
    clock: int


@dataclass(slots=True)
class Period:
    """What training came to: a delta after so many seconds, or a failure."""

    seconds: float
    delta: list[float]
    examples: float = 100.0
    failure: str = ""
    fatal: bool = False


SiteModel = Callable[[str, m.Train, list[float]], Period]


def steady(site: str, train: m.Train, base: list[float]) -> Period:
    """A second of training that moves every entry by a number of the site's and the clock's own."""
    step = (sum(site.encode()) % 7 + 1) / 8 + train.clock / 64
    return Period(1.0, [step - x / 16 for x in base])


class Link(Protocol):
    """What a site may do to the coordinator; a lost message is told by `disconnected`."""

    def hello(self, site: SimSite) -> None:
        """Open a session."""

    def report(self, site: SimSite, event: m.Event) -> None:
        """Post an event."""

    def upload(self, site: SimSite, identity: Identity, attempt: int, body: bytes) -> None:
        """Send an update."""

    def upload_init(self, site: SimSite, job: str, body: bytes) -> None:
        """Send version 0."""

    def fetch(self, job: str, version: int) -> Body:
        """A snapshot body; KeyError when it is gone."""

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Make a call later."""


@dataclass(slots=True)
class Finished:
    """An update that waits for its verdict."""

    attempt: int
    body: bytes


class SimSite:
    """Keeps to the protocol: finishes a clock once, sends it until it has a verdict."""

    def __init__(
        self,
        name: str,
        link: Link,
        *,
        model: SiteModel = steady,
        role: m.SiteRole = "site",
        layout: Layout | None = None,
        train_examples: int = 100,
        eval_examples: int = 50,
        load_seconds: float = 0.5,
        declines: str = "",
        score: Callable[[int], float] = lambda version: version / 100,
    ) -> None:
        self.name = name
        self.role: m.SiteRole = role
        self.model = model
        self.layout = layout or vector_layout(4)
        self.train_examples = 0 if role == "evaluator" else train_examples
        self.eval_examples = eval_examples
        self.load_seconds = load_seconds
        self.declines = declines
        self.score = score
        self.instance = 1
        self.running = True
        self.frozen = False
        self.connected = False
        self.refusals: list[str] = []
        self.loaded: set[str] = set()
        self.training: tuple[Identity, int] | None = None
        self.next_train: m.Train | None = None
        self.finished: dict[Identity, Finished] = {}
        self.outbox: list[m.Event] = []
        self.produced: set[Identity] = set()
        self.outcome: dict[Identity, m.VerdictKind] = {}
        self.ended: dict[str, str] = {}
        self._link = link

    # ------------------------------------------------------------ life

    def kill(self) -> None:
        """The process dies; what it had finished stays on its disk."""
        self.running = self.connected = False
        self.training = self.next_train = None
        self.loaded.clear()
        self.outbox.clear()

    def start(self) -> None:
        """A new process of the same site."""
        self.instance += 1
        self.running = True
        self._link.hello(self)

    def welcomed(self) -> None:
        """A session is open: what was not answered is sent again."""
        self.connected = True
        for event in self.outbox:
            self._link.report(self, event)
        for identity, done in self.finished.items():
            self._link.upload(self, identity, done.attempt, done.body)

    def disconnected(self, retry: bool, reason: str) -> None:
        """The session is over."""
        self.connected = False
        self.refusals.append(reason)
        if retry and self.running:
            self._link.hello(self)
        elif not retry:
            self.running = False

    # ------------------------------------------------------------ instructions

    def receive(self, instruction: m.Instruction) -> None:
        """Do what the coordinator says; a repeated instruction changes nothing."""
        match instruction:
            case m.Prepare():
                self._later(self.load_seconds, lambda: self._prepared(instruction.job))
            case m.Initialise():
                params = [0.0] * self.layout.elements("params")
                body = encode_snapshot(instruction.job, 0, self.layout, params)
                self._later(0.1, lambda: self._link.upload_init(self, instruction.job, body))
            case m.Train():
                self._train(instruction)
            case m.Evaluate():
                self._later(0.1, lambda: self._evaluate(instruction.job, instruction.base))
            case m.Abort():
                self._abort(instruction)
            case m.Settled():
                identity = Identity(instruction.job, instruction.epoch, instruction.clock)
                self.finished.pop(identity, None)
                self.outcome[identity] = instruction.verdict
            case m.EndJob():
                self._end(instruction)
            case m.Bye():
                self.disconnected(instruction.retry, instruction.reason)

    def verdict(self, identity: Identity, verdict: m.VerdictKind) -> None:
        """The answer to an upload."""
        if self.finished.pop(identity, None) is None:
            return  # it was settled before: an echo, or overtaken by the later word
        self.outcome[identity] = verdict
        if self.next_train is not None and not self.finished:
            train, self.next_train = self.next_train, None
            self._train(train)

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        instance = self.instance
        self._link.after(seconds, lambda: call() if self._alive(instance) else None)

    def _alive(self, instance: int) -> bool:
        return self.running and not self.frozen and self.instance == instance

    def _report(self, event: m.Event) -> None:
        self.outbox.append(event)
        if self.connected:
            self._link.report(self, event)

    def _prepared(self, job: str) -> None:
        if self.declines:
            self._report(m.Declined(job=job, reason=self.declines))
            return
        self.loaded.add(job)
        self._report(
            m.Ready(
                job=job,
                layout=self.layout,
                layout_digest=self.layout.digest(),
                train_examples=self.train_examples,
                eval_examples=self.eval_examples,
            )
        )

    def _evaluate(self, job: str, base: m.VersionRef) -> None:
        found: dict[str, Metric] = {}
        if self.eval_examples:
            found["accuracy"] = metric(self.score(base.version), self.eval_examples)
        self._report(
            m.Evaluated(job=job, version=base.version, examples=self.eval_examples, metrics=found)
        )

    def _train(self, train: m.Train) -> None:
        identity = Identity(train.job, train.epoch, train.clock)
        if identity in self.finished:
            done = self.finished[identity]
            self._link.upload(self, identity, done.attempt, done.body)
            return
        before = [other for other in self.finished if other.job == train.job]
        if before:  # a period starts from what the one before it was settled to
            self.next_train = train
            for other in before:
                done = self.finished[other]
                self._link.upload(self, other, done.attempt, done.body)
            return
        asked = (identity, train.attempt)
        if identity in self.outcome or self.training == asked or train.job not in self.loaded:
            return
        self.training = asked
        if train.evaluate:
            self._evaluate(train.job, train.base)
        try:
            body = self._link.fetch(train.job, train.base.version)
        except KeyError:
            self.training = None
            self._failed(train, f"version {train.base.version} cannot be fetched")
            return
        meta, base = decode(body)
        assert meta.digest == train.base.digest if hasattr(meta, "digest") else False
        period = self.model(self.name, train, base)
        self._later(period.seconds, lambda: self._trained(train, period))

    def _trained(self, train: m.Train, period: Period) -> None:
        identity = Identity(train.job, train.epoch, train.clock)
        if self.training != (identity, train.attempt):
            return
        self.training = None
        if period.failure:
            self._failed(train, period.failure, fatal=period.fatal)
            return
        meta = UpdateMeta(
            job=train.job,
            site=self.name,
            epoch=train.epoch,
            clock=train.clock,
            attempt=train.attempt,
            base_version=train.base.version,
            base_digest=train.base.digest,
            layout_digest=self.layout.digest(),
            examples=period.examples,
            steps=max(train.steps, 1),
            effective_steps=float(max(train.steps, 1)),
            train_seconds=period.seconds,
            parts=dense_parts(self.layout, "update", control=False),
            norm=math.hypot(*(x for x in period.delta if math.isfinite(x))),
        )
        body = encode_update(meta, period.delta)
        self.produced.add(identity)
        self.finished[identity] = Finished(train.attempt, body)
        if self.connected:
            self._link.upload(self, identity, train.attempt, body)

    def _failed(self, train: m.Train, reason: str, *, fatal: bool = False) -> None:
        self._report(
            m.Failed(
                job=train.job,
                epoch=train.epoch,
                clock=train.clock,
                attempt=train.attempt,
                reason=reason,
                fatal=fatal,
            )
        )

    def _abort(self, abort: m.Abort) -> None:
        identity = Identity(abort.job, abort.epoch, abort.clock)
        if self.training == (identity, abort.attempt):
            self.training = None
        waiting = self.next_train
        if waiting is not None and (waiting.epoch, waiting.clock) == (abort.epoch, abort.clock):
            self.next_train = None
        done = self.finished.get(identity)
        if done is not None and done.attempt == abort.attempt:
            del self.finished[identity]
            self.outcome.setdefault(identity, "refused_drop")

    def _end(self, end: m.EndJob) -> None:
        self.loaded.discard(end.job)
        self.ended[end.job] = end.reason
        if self.training is not None and self.training[0].job == end.job:
            self.training = None
