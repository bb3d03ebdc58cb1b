"""What the site's session hears and what it asks its shell to do: values, nothing else.

Duties of the shell: carry out a batch in order; answer every `Fetch`, `AskVerdict`, `Upload` and
`UploadInit` with exactly one of the answers named beside it, unless it is called off; send
`Report`s in order, and again until the coordinator has them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from client.ipc import FromWorker, ToWorker
from protocol.jobspec import JobSpec
from protocol.messages import Event, Instruction, Receipt, VersionRef


class Identity(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """An update, as the coordinator named it in `Train`. Later ones of a job compare greater."""

    job: str
    epoch: int
    clock: int
    attempt: int

    def __str__(self) -> str:
        again = f", attempt {self.attempt}" if self.attempt > 1 else ""
        return f"clock {self.clock} (epoch {self.epoch}{again})"


class StoredUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """A finished update on this site's disk: its body, `bytes` long, as it goes over the wire."""

    identity: Identity
    body: Path
    bytes: int


# ---------------------------------------------------------------- stimuli


class Stimulus(msgspec.Struct, frozen=True, kw_only=True):
    """Base."""


class Connected(Stimulus, frozen=True, kw_only=True):
    """A session with the coordinator was opened."""


class Instructed(Stimulus, frozen=True, kw_only=True):
    """An instruction came by the long poll, for the first time or again."""

    instruction: Instruction


class WorkerSaid(Stimulus, frozen=True, kw_only=True):
    """A message of the worker that was started as number `worker`."""

    worker: int
    message: FromWorker


class WorkerDied(Stimulus, frozen=True, kw_only=True):
    """That worker is gone, or could not be started. `reason` ends with its last words."""

    worker: int
    reason: str


class TaskDeclined(Stimulus, frozen=True, kw_only=True):
    """Answer to StartWorker: the owner of this site does not allow this code."""

    worker: int
    reason: str


class Fetched(Stimulus, frozen=True, kw_only=True):
    """Answer to Fetch: the whole body of the version lies in the job's folder."""

    job: str
    version: int


class FetchFailed(Stimulus, frozen=True, kw_only=True):
    """Answer to Fetch: it cannot be had (trouble with the connection never ends a fetch)."""

    job: str
    version: int
    reason: str


class Stands(Stimulus, frozen=True, kw_only=True):
    """Answer to AskVerdict and Upload: where the update stands at the coordinator."""

    identity: Identity
    receipt: Receipt


class UploadBroke(Stimulus, frozen=True, kw_only=True):
    """Answer to Upload: the body did not arrive whole; how much did is not known here."""

    identity: Identity
    reason: str
    damaged: bool = False  # the coordinator read them and found them wrong


class UploadRefused(Stimulus, frozen=True, kw_only=True):
    """Answer to AskVerdict and Upload: the coordinator will never take these bytes."""

    identity: Identity
    reason: str


class InitTaken(Stimulus, frozen=True, kw_only=True):
    """Answer to UploadInit: version 0 is at the coordinator."""

    job: str


class InitRefused(Stimulus, frozen=True, kw_only=True):
    """Answer to UploadInit: version 0 was not taken."""

    job: str
    reason: str


class JobUnknown(Stimulus, frozen=True, kw_only=True):
    """Answer to AskVerdict and Upload: the coordinator knows no such job (any more)."""

    job: str


class Tick(Stimulus, frozen=True, kw_only=True):
    """`wake_at` has come."""


# ---------------------------------------------------------------- actions


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """Base."""


class RememberJob(Action, frozen=True, kw_only=True):
    """Keep what a worker of this job is started with, so that a restarted agent can go on."""

    job: str
    spec: JobSpec
    evaluator: bool


class StartWorker(Action, frozen=True, kw_only=True):
    """Check the task against the allow-list, start a worker and load it: WorkerSaid(Loaded),
    WorkerDied or TaskDeclined follows.
    """

    worker: int
    job: str
    spec: JobSpec
    evaluator: bool


class StopWorker(Action, frozen=True, kw_only=True):
    """End that worker's process group; nothing is heard of it any more."""

    worker: int
    reason: str


class Tell(Action, frozen=True, kw_only=True):
    """Hand the worker a request."""

    worker: int
    message: ToWorker


class Fetch(Action, frozen=True, kw_only=True):
    """Download a version, resuming what is there -> Fetched | FetchFailed. Replaces a fetch that
    is under way.
    """

    job: str
    base: VersionRef


class AskVerdict(Action, frozen=True, kw_only=True):
    """Ask where an update stands -> Stands | UploadRefused | JobUnknown. Never gives up."""

    identity: Identity


class Upload(Action, frozen=True, kw_only=True):
    """Send the stored bytes from `offset` on, once
    -> Stands | UploadBroke | UploadRefused | JobUnknown.
    """

    update: StoredUpdate
    offset: int


class CallOff(Action, frozen=True, kw_only=True):
    """Stop asking about and sending this update."""

    identity: Identity


class UploadInit(Action, frozen=True, kw_only=True):
    """Send version 0 -> InitTaken | InitRefused. Never gives up on the connection."""

    job: str
    body: Path
    bytes: int


class Report(Action, frozen=True, kw_only=True):
    """Post an event."""

    event: Event


class KeepBases(Action, frozen=True, kw_only=True):
    """Remove the job's snapshots of all other versions."""

    job: str
    versions: tuple[int, ...]


class LeaveJob(Action, frozen=True, kw_only=True):
    """Call off its downloads and its version 0; with `forget` also its uploads and its folder."""

    job: str
    forget: bool


class Say(Action, frozen=True, kw_only=True):
    """A line for the log, on a change that its reader waits for."""

    job: str
    text: str
    warning: bool = False


class Finish(Action, frozen=True, kw_only=True):
    """The coordinator sends this site away: the agent ends and does not come back."""

    reason: str


AnyStimulus = (
    Connected
    | Instructed
    | WorkerSaid
    | WorkerDied
    | TaskDeclined
    | Fetched
    | FetchFailed
    | Stands
    | UploadBroke
    | UploadRefused
    | InitTaken
    | InitRefused
    | JobUnknown
    | Tick
)
AnyAction = (
    RememberJob
    | StartWorker
    | StopWorker
    | Tell
    | Fetch
    | AskVerdict
    | Upload
    | CallOff
    | UploadInit
    | Report
    | KeepBases
    | LeaveJob
    | Say
    | Finish
)
