"""What the agent and its worker say to each other: one JSON message per line over pipes.

The worker moves its real stdout away at start, so that the user's prints land on stderr (which the
agent logs), never between messages. The agent hands over file paths; bodies are read and written
by the worker only.

A job's folder at the site:

    base-<version>.body               the snapshot that was fetched last
    state/                            what the site carries from period to period
    update-<epoch>-<clock>-<attempt>/ body (as it goes over the wire), meta.json, the state after it

`sitestate` has the details. The agent reads `meta.json` and `body`; only the worker moves or
removes anything but bases. An update's folder is there from `Trained` until a final verdict was
settled; a `queued` one stays until the verdict on it is final or a later period says so by
`applied`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from protocol.jobspec import JobSpec
from protocol.layout import Layout
from protocol.messages import SiteRole, VerdictKind
from protocol.metrics import Metric


class WorkerMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base."""


# ---------------------------------------------------------------- agent -> worker


class Load(WorkerMessage, frozen=True, kw_only=True, tag="load"):
    """First message: load task, model and data. -> Loaded or WorkerFailed"""

    job: str
    spec: JobSpec
    folder: str
    task: str  # `path.py:Class` or `module:Class`, as the owner allowed it
    site: str
    role: SiteRole
    data: str = ""
    options: dict[str, str] = {}


class MakeInit(WorkerMessage, frozen=True, kw_only=True, tag="make_init"):
    """Build version 0 from the job's seed and write its body. -> InitMade"""

    path: str


class TrainPeriod(WorkerMessage, frozen=True, kw_only=True, tag="train"):
    """Load the base, evaluate it if asked (-> EvaluatedHere), train, write. -> Trained"""

    base_path: str
    base_version: int
    base_digest: str
    epoch: int
    clock: int
    attempt: int
    steps: int = 0
    epochs: int = 0
    evaluate: bool = False
    seconds: float = 0.0  # > 0: the period ends at the first step after so long a training
    applied: int | None = None  # queued updates before this clock may go; None: all


class EvaluateBase(WorkerMessage, frozen=True, kw_only=True, tag="evaluate"):
    """Evaluate a snapshot. -> EvaluatedHere"""

    base_path: str
    base_version: int
    base_digest: str


class Settle(WorkerMessage, frozen=True, kw_only=True, tag="settle"):
    """The verdict on an update: its state becomes current, or is thrown away. -> SettledHere

    `attempt` 0: whichever of this clock is there.
    """

    epoch: int
    clock: int
    attempt: int
    verdict: VerdictKind


class Stop(WorkerMessage, frozen=True, kw_only=True, tag="stop"):
    """Stop training after the current step and throw the period away. -> Stopped

    To end the process the agent closes its stdin; after a grace it is killed.
    """


ToWorker = Load | MakeInit | TrainPeriod | EvaluateBase | Settle | Stop


# ---------------------------------------------------------------- worker -> agent


class Loaded(WorkerMessage, frozen=True, kw_only=True, tag="loaded"):
    """Task, model and data are there."""

    layout: Layout
    train_examples: int
    eval_examples: int
    control: bool = False
    notes: tuple[str, ...] = ()


class InitMade(WorkerMessage, frozen=True, kw_only=True, tag="init_made"):
    """Version 0 is at `path`."""

    path: str
    bytes: int


class Stepped(WorkerMessage, frozen=True, kw_only=True, tag="stepped"):
    """At most every PROGRESS_EVERY_SECONDS."""

    epoch: int
    clock: int
    step: int
    of: int


class Trained(WorkerMessage, frozen=True, kw_only=True, tag="trained"):
    """The update's folder `path` is complete and in its place; its file `body` has `bytes` bytes.

    A period that was trained before, and is asked for again, is answered from its folder.
    """

    epoch: int
    clock: int
    attempt: int
    path: str
    bytes: int
    seconds: float
    steps: int = 0
    of: int = 0  # as asked for; 0: unknown
    cut: bool = False  # by the period's time box


class EvaluatedHere(WorkerMessage, frozen=True, kw_only=True, tag="evaluated"):
    """Metrics of the version on this site's test data."""

    version: int
    examples: float
    metrics: dict[str, Metric]


class SettledHere(WorkerMessage, frozen=True, kw_only=True, tag="settled"):
    """The site's state is what the verdict says."""

    epoch: int
    clock: int


class Stopped(WorkerMessage, frozen=True, kw_only=True, tag="stopped"):
    """Nothing is running."""


class WorkerFailed(WorkerMessage, frozen=True, kw_only=True, tag="failed"):
    """The request could not be carried out. `fatal`: this worker cannot go on in this job."""

    reason: str
    fatal: bool = False
    epoch: int = 0
    clock: int = 0
    attempt: int = 0


FromWorker = (
    Loaded | InitMade | Stepped | Trained | EvaluatedHere | SettledHere | Stopped | WorkerFailed
)

to_worker: Final = msgspec.json.Decoder(ToWorker)
from_worker: Final = msgspec.json.Decoder(FromWorker)
