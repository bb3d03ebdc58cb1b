"""One period of a task, offline, on local data: how it goes, and what would leave the site."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from client import ipc, sitestate
from client.loading import load_task
from client.localjob import LocalJob
from client.taskref import hash_task
from protocol.bodies import SnapshotMeta, UpdateMeta
from protocol.bodyio import BodyReader
from protocol.jobspec import JobSpec
from protocol.layout import ELEMENT_BYTES, ROLE_OF_PART, Layout, Role
from protocol.metrics import Metric


class TensorReport(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor: `leaves` is what of it goes over the wire in each update, in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    leaves: int
    tie: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What one period of this task is like at this site.

    `update_bytes` is the whole body on the wire, `parts` its content by part. Metrics belong to the
    model before and after the period; both are blank without test data.
    """

    task: str
    sha256: str
    train_examples: int
    eval_examples: int
    steps: int
    seconds_per_step: float
    train_loss: float | None
    norm: float
    update_bytes: int
    parts: dict[str, int]
    tensors: tuple[TensorReport, ...]
    before: dict[str, Metric]
    after: dict[str, Metric]
    notes: tuple[str, ...]


def check(
    reference: str,
    spec: JobSpec,
    *,
    data: str = "",
    options: Mapping[str, str] | None = None,
    site: str = "this-site",
    base: Path | None = None,
) -> Report:
    """Load a task and run one period of the job with it; nothing leaves this process.

    Files go to a temporary folder that is removed. Errors of the user's code come as they are.

    Raises:
        SkerryError: whatever would make a site decline or fail, in the same words.
    """
    sha256 = hash_task(reference, base)
    with tempfile.TemporaryDirectory(prefix="skerry-check-") as folder:
        load = ipc.Load(
            job="check",
            spec=spec,
            folder=folder,
            task=reference,
            site=site,
            role="site",
            data=data,
            options=dict(options or {}),
        )
        job = LocalJob(load, load_task(reference, dict(spec.task.options), base))
        return _run(job, sha256, Path(folder) / "base.body")


def _run(job: LocalJob, sha256: str, base: Path) -> Report:
    job.make_init(base)
    with base.open("rb") as file:
        version = BodyReader(file.readinto).meta
    assert isinstance(version, SnapshotMeta)
    message = ipc.TrainPeriod(
        base_path=str(base),
        base_version=0,
        base_digest=version.digest,
        epoch=1,
        clock=0,
        attempt=1,
        steps=job.spec.period.steps or 0,
        epochs=job.spec.period.epochs or 0,
    )
    job.load_base(message)
    _, before = job.evaluate_base()
    meta: UpdateMeta | None = None
    seconds, size = 0.0, 0
    if not job.spec.evaluation_only and job.train_examples:
        begin = time.monotonic()
        update = job.train(message, lambda _step, _of: None)
        seconds = time.monotonic() - begin
        with (update / sitestate.BODY).open("rb") as file:
            found = BodyReader(file.readinto).meta
        assert isinstance(found, UpdateMeta)
        meta = found
        size = sitestate.read_record(update).bytes
    _, after = job.evaluate_base()
    steps = meta.steps if meta is not None else 0
    loss = meta.metrics["train_loss"].value if meta is not None else None
    return Report(
        task=job.load.task,
        sha256=sha256,
        train_examples=job.train_examples,
        eval_examples=job.eval_examples,
        steps=steps,
        seconds_per_step=seconds / steps if steps else 0.0,
        train_loss=loss if isinstance(loss, float) and math.isfinite(loss) else None,
        norm=meta.norm if meta is not None else 0.0,
        update_bytes=size,
        parts={part.name: part.bytes for part in meta.parts} if meta is not None else {},
        tensors=_tensors(job.layout, control=job.control),
        before=before,
        after=after,
        notes=job.notes,
    )


def _tensors(layout: Layout, *, control: bool) -> tuple[TensorReport, ...]:
    """Every tensor of the model with the bytes of it that each update carries."""
    per_element: dict[Role, int] = {
        ROLE_OF_PART[part]: ELEMENT_BYTES[part] for part in ("delta", "buffers", "ints")
    }
    if control:
        per_element["train"] += ELEMENT_BYTES["control"]
    return tuple(
        TensorReport(
            name=spec.name,
            shape=spec.shape,
            dtype=spec.dtype,
            role=spec.role,
            leaves=0 if spec.tie else spec.elements * per_element.get(spec.role, 0),
            tie=spec.tie,
        )
        for spec in layout.tensors
    )
