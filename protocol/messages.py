"""Control messages, in JSON.

The agent opens every conversation:

- `POST /agent/v1/join`    Join -> Joined        once, with a one-time token
- `POST /agent/v1/hello`   Hello -> Welcome      opens a session; a live namesake is refused
- `GET  /agent/v1/next`    -> Instructions       long poll, at most LONG_POLL_SECONDS; instructions
                                                 are redelivered until the cursor moves past them
- `POST /agent/v1/events`  Events -> 204         what happened at the site, in order
- `POST /agent/v1/jobs/{job}/updates?epoch=&clock=&attempt=&offset=`  a body -> Receipt
- `GET  /agent/v1/jobs/{job}/updates?epoch=&clock=&attempt=`          -> Receipt (after a crash)
- `POST /agent/v1/jobs/{job}/init?offset=`       version 0, a snapshot body -> Receipt
- `GET  /agent/v1/jobs/{job}/versions/{version}?offset=`              a snapshot body
- `POST /agent/v1/leave`   Leave -> 204

Authentication is `Authorization: Bearer SECRET` plus `X-Skerry-Session: SESSION` (after hello) and
`X-Skerry-Protocol: N` on every request. Decoding is strict about types and lenient about unknown
fields, so that protocol n can talk to n-1.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from protocol import limits
from protocol.errors import LimitError, MalformedError
from protocol.jobspec import JobSpec
from protocol.layout import Layout
from protocol.metrics import Metric, check_metrics

SiteRole = Literal["site", "evaluator"]
VerdictKind = Literal[
    "counted", "queued", "duplicate", "refused_drop", "refused_return", "unsettled"
]


Whole = Annotated[int, Meta(ge=0, le=limits.COUNT_MAX)]
Examples = Annotated[float, Meta(ge=0.0, le=limits.EXAMPLES_MAX)]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all control messages."""


# ---------------------------------------------------------------- joining and sessions


class Join(Message, frozen=True, kw_only=True):
    """Enrol under a name: the token's secret and the public half of a new Ed25519 key (hex)."""

    protocol: Whole | None = None
    software: str = ""
    token_id: str
    token_secret: str
    name: str
    role: SiteRole = "site"
    public_key: str
    proof: str  # Ed25519 signature (hex) over "skerry join" + token id + name


class Joined(Message, frozen=True, kw_only=True):
    """The site's own secret, shown once; the coordinator keeps a hash of it."""

    site: str
    secret: str
    coordinator: str
    protocol: Whole


class Hello(Message, frozen=True, kw_only=True):
    """Open a session. `instance` is drawn anew by every agent process."""

    protocol: Whole | None = None
    software: str = ""
    instance: str
    tasks: tuple[str, ...] = ()  # names of the tasks that the site's owner allows


class Welcome(Message, frozen=True, kw_only=True):
    """A session: its id, its lease and the cursor to poll from."""

    session: str
    site: str
    coordinator: str
    protocol: Whole
    lease_seconds: float
    long_poll_seconds: float
    cursor: Whole


class Leave(Message, frozen=True, kw_only=True):
    """The agent stops on purpose."""

    reason: str = ""


# ---------------------------------------------------------------- instructions to a site


class Prepare(Message, frozen=True, kw_only=True, tag="prepare"):
    """Start a worker for this job: check the task against the allow-list, load model and data."""

    job: str
    spec: JobSpec
    evaluator: bool = False


class Initialise(Message, frozen=True, kw_only=True, tag="initialise"):
    """Build the model from the job's seed and upload version 0."""

    job: str


class VersionRef(Message, frozen=True, kw_only=True):
    """A version to fetch: `bytes` is the exact length of its snapshot body."""

    version: Whole
    digest: str
    bytes: Whole


class Train(Message, frozen=True, kw_only=True, tag="train"):
    """Train one period from `base` and upload the update under this very identity.

    Exactly one of `steps` (H) and `epochs` (E) is positive. With `evaluate` the site evaluates
    the base first, and reports. `deadline_seconds` counts from receipt; 0 means none is set yet.
    With `seconds` the period is time-boxed: after so many seconds of training the site ends it at
    the next step, after one step at least, and delivers what it has. `applied`: the site's updates
    before this clock are settled for good; None: all before this period are.
    """

    job: str
    epoch: Whole
    clock: Whole
    attempt: Whole
    base: VersionRef
    steps: Whole = 0
    epochs: Whole = 0
    evaluate: bool = False
    deadline_seconds: float = 0.0
    seconds: float = 0.0
    applied: Whole | None = None


class Evaluate(Message, frozen=True, kw_only=True, tag="evaluate"):
    """Evaluate a version on the site's own test data and report."""

    job: str
    base: VersionRef


class Abort(Message, frozen=True, kw_only=True, tag="abort"):
    """Stop working on this clock; nothing of it will be counted. `reason` is for people."""

    job: str
    epoch: Whole
    clock: Whole
    attempt: Whole
    reason: str


class Settled(Message, frozen=True, kw_only=True, tag="settled"):
    """A later word about an update, when the receipt could not say it (queued, then voided)."""

    job: str
    epoch: Whole
    clock: Whole
    verdict: VerdictKind
    reason: str


class EndJob(Message, frozen=True, kw_only=True, tag="end"):
    """The job is over for this site: stop its worker. `final`: its local state may go too."""

    job: str
    reason: str
    final: bool


class Bye(Message, frozen=True, kw_only=True, tag="bye"):
    """The session is over. `retry` False: the site was removed, do not come back."""

    reason: str
    retry: bool


Instruction = Prepare | Initialise | Train | Evaluate | Abort | Settled | EndJob | Bye


class Instructions(Message, frozen=True, kw_only=True):
    """Answer of the long poll: instructions after the cursor that was sent, and the next cursor."""

    cursor: Whole
    items: tuple[Instruction, ...] = ()


# ---------------------------------------------------------------- events from a site


class Ready(Message, frozen=True, kw_only=True, tag="ready"):
    """The worker has loaded task and data. `layout` is there so that differences can be named."""

    job: str
    layout: Layout
    layout_digest: str
    train_examples: Whole
    eval_examples: Whole
    control: bool = False
    notes: tuple[str, ...] = ()


class Declined(Message, frozen=True, kw_only=True, tag="declined"):
    """The site will not run this job: task not allowed, another hash, or it cannot be loaded."""

    job: str
    reason: str


class Progress(Message, frozen=True, kw_only=True, tag="progress"):
    """Training goes on; renews the lease and is never journalled."""

    job: str
    epoch: Whole
    clock: Whole
    step: Whole
    of: Whole


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    """The worker could not finish a period. `fatal`: it cannot go on in this job at all."""

    job: str
    epoch: Whole
    clock: Whole
    attempt: Whole
    reason: str
    fatal: bool = False


class Evaluated(Message, frozen=True, kw_only=True, tag="evaluated"):
    """Metrics of a version on the site's own data. `examples` 0: no data, metrics are blank."""

    job: str
    version: Whole
    examples: Examples
    metrics: dict[str, Metric]


Event = Ready | Declined | Progress | Failed | Evaluated


class Events(Message, frozen=True, kw_only=True):
    """What happened at the site, in order. `first` numbers the first item within the session, so
    that a repeated post is taken once.
    """

    first: Whole
    items: tuple[Event, ...]


# ---------------------------------------------------------------- uploads


class Receipt(Message, frozen=True, kw_only=True):
    """Where an upload stands.

    `offset` bytes are stored; `verdict` stays `unsettled` until the last byte was screened. What
    the site does next comes by the long poll that is open all the time.
    """

    offset: Whole
    verdict: VerdictKind = "unsettled"
    reason: str = ""


M = TypeVar("M")
_MAX_TEXT: Final = 200


def decode(kind: type[M], raw: bytes) -> M:
    """Decode JSON into a message type.

    Raises:
        MalformedError: with the path of the first field that does not fit.
        LimitError: larger than JSON_BODY_BYTES_MAX.
    """
    if len(raw) > limits.JSON_BODY_BYTES_MAX:
        raise LimitError(
            f"{len(raw)} bytes of JSON are above JSON_BODY_BYTES_MAX = "
            f"{limits.JSON_BODY_BYTES_MAX}.",
            details={"limit": limits.JSON_BODY_BYTES_MAX, "found": len(raw)},
        )
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        name = getattr(kind, "__name__", str(kind))
        raise MalformedError(f"this is not a {name}: {str(error)[:_MAX_TEXT]}") from None


def encode(message: object) -> bytes:
    """JSON of a message.

    Raises:
        LimitError: larger than what the other side takes.
        UsageError: a metric whose name is not text.
    """
    for event in message.items if isinstance(message, Events) else (message,):
        if isinstance(event, Evaluated):
            check_metrics(event.metrics)
    raw = msgspec.json.encode(message)
    if len(raw) > limits.JSON_BODY_BYTES_MAX:
        raise LimitError(
            f"a {type(message).__name__} of {len(raw)} bytes is above JSON_BODY_BYTES_MAX = "
            f"{limits.JSON_BODY_BYTES_MAX}.",
            details={"limit": limits.JSON_BODY_BYTES_MAX, "found": len(raw)},
        )
    return raw
