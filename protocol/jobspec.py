"""The job as values. `jobfile` reads TOML into it, `docs/job.md` is generated from it.

Every field has its type, its bounds and its sentence here and nowhere else: the reader of job
files, the reference page and the command line all walk these classes.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Fraction = Annotated[float, Meta(ge=0.0, lt=1.0)]
Positive = Annotated[float, Meta(gt=0.0)]
NonNegative = Annotated[float, Meta(ge=0.0)]
Count = Annotated[int, Meta(ge=0, le=10**9)]
CountFromOne = Annotated[int, Meta(ge=1, le=10**9)]


class Section(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all sections."""


class TaskRef(Section, frozen=True, kw_only=True):
    """The user's code, named. It is installed at the sites; the coordinator never sees it."""

    name: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=255,
            description=("Name under which every site's owner has allowed the task."),
        ),
    ]
    sha256: Annotated[
        str,
        Meta(
            pattern="^([0-9a-f]{64})?$",
            description=(
                "Hash of the task's code. Filled in from `file` at submission; a site whose copy "
                "has another hash declines."
            ),
        ),
    ] = ""
    file: Annotated[
        str,
        Meta(
            description=(
                "Path of the task's code beside the job file, `task.py` or `task.py:Class`. Hashed at "
                "submission, never sent."
            )
        ),
    ] = ""
    options: Annotated[
        dict[str, str | int | float | bool],
        Meta(description=("Values for the task's own use: `self.options` in the task.")),
    ] = {}


class Sites(Section, frozen=True, kw_only=True):
    """Who takes part."""

    wanted: Annotated[
        CountFromOne, Meta(description=("The job starts when this many sites are ready."))
    ] = 1
    names: Annotated[
        tuple[str, ...],
        Meta(description=("Only these sites. Empty: any site that allows the task.")),
    ] = ()
    select: Annotated[
        Count, Meta(description=("Sites drawn for each round, uniformly, from the seed. 0: all."))
    ] = 0
    over_select: Annotated[
        NonNegative,
        Meta(
            description=(
                "Draw this fraction more than `select`, and close the round when `select` updates are in."
            )
        ),
    ] = 0.0


class Period(Section, frozen=True, kw_only=True):
    """What a site does between two exchanges. Exactly one of `steps` and `epochs` is set."""

    steps: Annotated[Count | None, Meta(description="H local optimizer steps.")] = None
    epochs: Annotated[
        Count | None,
        Meta(
            description=("E passes over the site's data. 0: evaluation only, nothing is trained.")
        ),
    ] = None


class Optimizer(Section, frozen=True, kw_only=True):
    """The optimizer inside a site. A task with its own `optimizer` method wins over `name`."""

    name: Annotated[Literal["sgd", "adam", "adamw"], Meta(description="Local optimizer.")] = "sgd"
    lr: Annotated[Positive, Meta(description="Learning rate.")] = 0.05
    momentum: Annotated[Fraction, Meta(description="SGD momentum.")] = 0.0
    nesterov: Annotated[bool, Meta(description="Nesterov momentum for SGD.")] = False
    weight_decay: Annotated[NonNegative, Meta(description="L2 penalty (decoupled in AdamW).")] = 0.0
    betas: Annotated[tuple[Fraction, Fraction], Meta(description="Adam's decay rates.")] = (
        0.9,
        0.999,
    )
    eps: Annotated[Positive, Meta(description="Adam's denominator offset.")] = 1e-8
    state: Annotated[
        Literal["keep", "reset"],
        Meta(description=("What becomes of momentum and Adam moments between periods.")),
    ] = "keep"
    batch_size: Annotated[
        CountFromOne,
        Meta(
            description=("Examples per local step, when the task gives data sets and not loaders.")
        ),
    ] = 32
    clip_norm: Annotated[
        NonNegative, Meta(description=("Clip each step's gradient to this L2 norm. 0: off."))
    ] = 0.0


class Local(Section, frozen=True, kw_only=True):
    """What is done at the sites about client drift and about layers that stay at home."""

    prox: Annotated[
        NonNegative,
        Meta(description=("FedProx: mu of the proximal term mu/2 |w - w_start|^2. 0: off.")),
    ] = 0.0
    scaffold: Annotated[
        bool,
        Meta(
            description=(
                "SCAFFOLD: control variates (option II), one more part in both directions."
            )
        ),
    ] = False
    personal: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "Tensors whose names match one of these patterns (`head.*`, `*.bn*.*`) stay at their site "
                "and are never sent: personal layers, FedBN."
            )
        ),
    ] = ()


class Server(Section, frozen=True, kw_only=True):
    """The server optimizer; its pseudo-gradient is minus the weighted mean of the updates."""

    optimizer: Annotated[
        Literal["average", "momentum", "nesterov", "delayed_nesterov", "adagrad", "adam", "yogi"],
        Meta(
            description=(
                "`average` with lr 1 is plain parameter averaging. `delayed_nesterov`: Nesterov momentum for updates that do not come together."
            )
        ),
    ] = "average"
    lr: Annotated[
        Positive | None,
        Meta(
            description=(
                "Server learning rate. Default: 1.0 for average and momentum, 0.7 for nesterov (DiLoCo) and delayed_nesterov, "
                "0.1 for the adaptive ones."
            )
        ),
    ] = None
    momentum: Annotated[
        Fraction, Meta(description="For momentum, nesterov and delayed_nesterov.")
    ] = 0.9
    delay: Annotated[
        CountFromOne,
        Meta(
            description=(
                "delayed_nesterov: every this many versions their sum refreshes the momentum; between, steps are plain. Usually the number of sites, under `buffered` sites / K."
            )
        ),
    ] = 4
    betas: Annotated[tuple[Fraction, Fraction], Meta(description="For adam and yogi.")] = (
        0.9,
        0.99,
    )
    tau: Annotated[Positive, Meta(description="Adaptivity offset of adagrad, adam, yogi.")] = 1e-3


class Weights(Section, frozen=True, kw_only=True):
    """How updates are weighed in the mean."""

    by: Annotated[
        Literal["examples", "steps", "equal"],
        Meta(
            description=(
                "`examples`: by the site's number of training examples. `steps`: FedNova, examples with "
                "normalisation by local steps. `equal`: every site counts the same."
            )
        ),
    ] = "examples"
    examples_max: Annotated[
        Positive | None, Meta(description=("Declared example counts are capped here."))
    ] = None


class Buffers(Section, frozen=True, kw_only=True):
    """Floating and integer buffers (BatchNorm statistics and counters)."""

    mix: Annotated[
        Literal["average", "local"],
        Meta(
            description=(
                "`average`: weighted mean of values (integers rounded half to even). `local`: every site "
                "keeps its own (FedBN statistics)."
            )
        ),
    ] = "average"


class Pacing(Section, frozen=True, kw_only=True):
    """The rule that says when a site may go on; `docs/pacing.md` states what each one guarantees."""

    rule: Annotated[
        Literal["bsp", "ssp", "async", "buffered"],
        Meta(
            description=(
                "`bsp`: bulk-synchronous rounds. `ssp`: bounded staleness in clocks, or in unseen mass. `async`: every update is a version, staleness capped. `buffered`: a version for every K updates."
            )
        ),
    ] = "bsp"
    quorum: Annotated[
        Count,
        Meta(
            description=(
                "Fewest usable updates that make a version. A round waits for all its sites until its deadline; with fewer than this it is void. 0: one is enough."
            )
        ),
    ] = 0
    first: Annotated[
        Count,
        Meta(
            description=(
                "bsp: close a round as soon as this many updates are in (fastest m of n). 0: wait for all."
            )
        ),
    ] = 0
    deadline_seconds: Annotated[
        Positive,
        Meta(
            description=(
                "A round closes after this time with what it has, if that is a quorum; under the other rules a site's period is given up after it, and a buffer that does not fill is committed."
            )
        ),
    ] = 3600.0
    deadline: Annotated[
        Literal["fixed", "measured"],
        Meta(
            description=(
                "`measured`: median + `deadline_mads` x MAD of the times that this job's periods took, and never more than `deadline_seconds`."
            )
        ),
    ] = "fixed"
    deadline_mads: Annotated[
        Positive, Meta(description=("k of the measured deadline: how far from the median is late."))
    ] = 6.0
    late: Annotated[
        Literal["drop", "return", "fold"],
        Meta(
            description=(
                "What happens to an update that comes after its round closed. `drop`: its site is told to stop. `return`: it goes back into its site's residual. `fold`: it counts in the next version."
            )
        ),
    ] = "drop"
    partial: Annotated[
        bool,
        Meta(
            description=(
                "A site that runs out of time delivers the steps it has done instead of nothing: its period ends by the clock, in time for the deadline."
            )
        ),
    ] = False
    periods: Annotated[
        Literal["equal", "esync", "dylu"],
        Meta(
            description=(
                "`equal`: every site takes `period.steps`. `esync`: faster sites take more, so that all arrive together. `dylu`: slower sites take fewer, in proportion to their speed."
            )
        ),
    ] = "equal"
    steps_max: Annotated[
        Count,
        Meta(description=("esync: most steps of a period. 0: four times `period.steps`.")),
    ] = 0
    staleness: Annotated[
        Count,
        Meta(
            description=(
                "ssp: a site at clock c goes on if c - slowest clock <= this. async: an update that started from a version older by this much is refused, and its site starts again."
            )
        ),
    ] = 3
    reads: Annotated[
        Literal["eager", "pinned"],
        Meta(
            description=(
                "ssp: `eager`: sites start from the newest version (ESSP). `pinned`: from the oldest one that the staleness bound allows."
            )
        ),
    ] = "eager"
    unseen_mass: Annotated[
        NonNegative,
        Meta(
            description=(
                "ssp: significance-bounded staleness. A site waits when what others have produced and a site at work has not seen would outweigh this fraction of the model's norm; clocks do not count then. 0: off."
            )
        ),
    ] = 0.0
    staleness_weight: Annotated[
        Literal["constant", "polynomial", "hinge"],
        Meta(
            description=(
                "async, buffered: weight of an update tau versions old. `polynomial`: (1 + tau)^-a. `hinge`: 1 up to b, then 1 / (a (tau - b) + 1)."
            )
        ),
    ] = "polynomial"
    staleness_a: Annotated[Positive, Meta(description="a of the staleness weight.")] = 0.5
    staleness_b: Annotated[NonNegative, Meta(description="b of the hinge, in versions.")] = 4.0
    compensation: Annotated[
        Literal["none", "constant", "adaptive"],
        Meta(
            description=(
                "async, buffered: DC-ASGD's delay compensation, for plain SGD at the sites. `adaptive` divides lambda by the root of a running mean of squared gradients."
            )
        ),
    ] = "none"
    compensation_lambda: Annotated[
        Positive | None,
        Meta(
            description=(
                "Strength lambda of the delay compensation. Default: 0.04 for constant, 2 for adaptive."
            )
        ),
    ] = None
    buffer: Annotated[
        Count, Meta(description=("buffered: K updates make a version (FedBuff)."))
    ] = 0
    concurrency: Annotated[
        Count, Meta(description=("buffered: at most C sites train at a time. 0: all."))
    ] = 0
    one_per_site: Annotated[
        bool,
        Meta(
            description=(
                "buffered: at most one update of a site in a buffer; a site waits until its update is in a version."
            )
        ),
    ] = False
    failed_rounds_max: Annotated[
        CountFromOne,
        Meta(
            description=("The job fails after this many rounds in a row without a usable quorum.")
        ),
    ] = 3
    start_timeout_seconds: Annotated[
        Positive,
        Meta(description=("The job fails when the wanted sites are not ready after this time.")),
    ] = 86400.0


class Stop(Section, frozen=True, kw_only=True):
    """The job is finished when any of these is met. At least one is set."""

    versions: Annotated[CountFromOne | None, Meta(description="After this version.")] = None
    seconds: Annotated[Positive | None, Meta(description="After this running time.")] = None
    metric: Annotated[str, Meta(description="Name of the metric for `target`.")] = ""
    target: Annotated[float | None, Meta(description="Stop when the metric reaches this.")] = None
    mode: Annotated[
        Literal["max", "min"],
        Meta(
            description=("`max`: reached when the metric is at least the target; `min`: at most.")
        ),
    ] = "max"


class Evaluation(Section, frozen=True, kw_only=True):
    """Who evaluates, and how often."""

    every: Annotated[
        Count,
        Meta(description=("Evaluate every this many versions, and the last. 0: only the last.")),
    ] = 1
    sites: Annotated[
        bool,
        Meta(
            description=(
                "Sites evaluate what they fetched before they train on it. Evaluators always do."
            )
        ),
    ] = True
    lower_is_better: Annotated[
        tuple[str, ...],
        Meta(description=("Metrics for which the worst site is the one with the highest value.")),
    ] = ("loss",)


class Checkpoint(Section, frozen=True, kw_only=True):
    """When the durable state is written; spools are kept until a checkpoint covers them."""

    every: Annotated[CountFromOne, Meta(description="Versions between checkpoints.")] = 10
    seconds: Annotated[Positive, Meta(description="Or this much time, if sooner.")] = 600.0


class Keep(Section, frozen=True, kw_only=True):
    """What is kept on the coordinator's disk."""

    updates: Annotated[
        bool, Meta(description=("Keep every update, so that the job replays bit for bit."))
    ] = False
    versions: Annotated[CountFromOne, Meta(description="Newest versions kept as files.")] = 2


class JobSpec(Section, frozen=True, kw_only=True):
    """A whole job file."""

    name: Annotated[str, Meta(min_length=1, max_length=255, description="Name for people.")]
    task: Annotated[TaskRef, Meta(description="The user's code.")]
    seed: Annotated[
        int,
        Meta(
            ge=0,
            le=2**63 - 1,
            description=(
                "Everything random derives from it: the first model, selection, each site's data order."
            ),
        ),
    ] = 0
    durability: Annotated[
        Literal["process", "power"],
        Meta(
            description=(
                "`process`: survives the death of any process. `power`: and a power cut (fsync)."
            )
        ),
    ] = "process"
    sites: Annotated[Sites, Meta(description="Who takes part.")] = Sites()
    period: Annotated[Period, Meta(description="Local work per exchange.")] = Period()
    optimizer: Annotated[Optimizer, Meta(description="The local optimizer.")] = Optimizer()
    local: Annotated[Local, Meta(description="Drift correction, personal layers.")] = Local()
    server: Annotated[Server, Meta(description="The server optimizer.")] = Server()
    weights: Annotated[Weights, Meta(description="Weights in the mean.")] = Weights()
    buffers: Annotated[Buffers, Meta(description="Buffers.")] = Buffers()
    pacing: Annotated[Pacing, Meta(description="When a site may go on.")] = Pacing()
    stop: Annotated[Stop, Meta(description="When the job is finished.")] = Stop()
    evaluation: Annotated[Evaluation, Meta(description="Evaluation.")] = Evaluation()
    checkpoint: Annotated[Checkpoint, Meta(description="Checkpoints.")] = Checkpoint()
    keep: Annotated[Keep, Meta(description="Retention.")] = Keep()

    @property
    def evaluation_only(self) -> bool:
        """True when nothing is trained: zero epochs or zero steps."""
        return not (self.period.steps or self.period.epochs)

    @property
    def server_lr(self) -> float:
        """The server learning rate with its default filled in."""
        if self.server.lr is not None:
            return self.server.lr
        rates = {"average": 1.0, "momentum": 1.0, "nesterov": 0.7, "delayed_nesterov": 0.7}
        return rates.get(self.server.optimizer, 0.1)

    @property
    def compensation_lambda(self) -> float:
        """The strength of the delay compensation with its default filled in (DC-ASGD's own)."""
        if self.pacing.compensation_lambda is not None:
            return self.pacing.compensation_lambda
        return 2.0 if self.pacing.compensation == "adaptive" else 0.04
