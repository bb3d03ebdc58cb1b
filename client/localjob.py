"""One job at one site: its task, model and data, and the updates that it makes of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from client import ipc, sitestate
from client.bodyfiles import digest_of, read_snapshot, write_body_file
from client.evaluation import BATCH_FACTOR, evaluate
from client.loading import count_examples, load_data, single_example_note
from client.localstate import LocalState
from client.pipeline import Outgoing, make_update
from client.seeds import seed_everything
from client.stream import Stream
from client.task import SiteContext, Task
from client.tensors import (
    byte_view,
    describe,
    fingerprint,
    gather,
    new_part,
    scatter,
    tensors_of,
)
from client.training import BetweenSteps, Corrections, Learner, Period
from protocol.bodies import SnapshotMeta, UpdateMeta, dense_parts
from protocol.errors import ConflictError, RefusedError, UsageError
from protocol.layout import SNAPSHOT_PARTS, Part, TensorSpec
from protocol.metrics import Metric, metric
from protocol.names import derive_seed


class LocalJob:
    """A loaded job. Everything that may fail for a reason in the task raises."""

    def __init__(
        self, load: ipc.Load, task: Task, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.load = load
        self._clock = clock
        self.spec = load.spec
        self.task = task
        self.folder = Path(load.folder)
        self.device = _device(load.options.get("device", ""))
        self.control = self.spec.local.scaffold
        sitestate.prepare_folder(self.folder)
        self._build_model()
        self._load_data()
        layout = self.layout
        self._staging: dict[Part, Tensor] = {
            part: new_part(layout, part)
            for part in SNAPSHOT_PARTS
            if part != "control" or self.control
        }
        self._loaded = ""  # digest of the version that the model holds, untouched
        self.state = LocalState(
            self.folder,
            self.learner,
            local={s.name: self.tensors[s.name] for s in layout.tensors if _stays(s)},
            control=new_part(layout, "control", self.device) if self.control else None,
            elements=layout.elements("delta"),
        )

    # ------------------------------------------------------------ loading

    def _build_model(self) -> None:
        seed_everything(derive_seed(self.spec.seed, "model"))
        self.model = self.task.model().to(self.device)
        described = describe(
            self.model, personal=self.spec.local.personal, buffers=self.spec.buffers.mix
        )
        self.layout, self.notes = described.layout, described.notes
        self.tensors = tensors_of(self.model)
        self._frozen_versions = self._versions_of_frozen()

    def _load_data(self) -> None:
        seed = derive_seed(self.spec.seed, "site", self.load.site)
        seed_everything(seed)
        site = SiteContext(
            name=self.load.site,
            role=self.load.role,
            job=self.load.job,
            seed=seed,
            data=Path(self.load.data) if self.load.data else None,
            options=self.load.options,
        )
        data = load_data(self.task, site)
        train = None if self.load.role == "evaluator" else data.train
        self.test = data.test
        self.train_examples = count_examples(self.task, train)
        self.eval_examples = count_examples(self.task, self.test)
        batch_size = self.spec.optimizer.batch_size
        merged = single_example_note(self.model, train, self.train_examples, batch_size)
        self.notes += (merged,) if merged else ()
        self.stream = Stream(
            train if train is not None else (),
            batch_size=batch_size,
            seed=seed,
            merge_single=bool(merged),
        )
        self.learner = Learner(self.task, self.model, self.spec, self.stream, self.device)
        if self.control and not isinstance(self.learner.optimizer, torch.optim.SGD):
            raise RefusedError(
                "SCAFFOLD estimates gradients from the way that SGD went; this task uses "
                f"{type(self.learner.optimizer).__name__}.",
                "Use sgd, or switch local.scaffold off.",
            )

    def loaded(self) -> ipc.Loaded:
        """The answer to Load."""
        return ipc.Loaded(
            layout=self.layout,
            train_examples=self.train_examples,
            eval_examples=self.eval_examples,
            control=self.control,
            notes=self.notes,
        )

    # ------------------------------------------------------------ versions

    def make_init(self, path: Path) -> int:
        """Write version 0, the model as it was built from the job's seed; its bytes.

        A model that has moved on is built again, so that every call gives the same version.
        """
        if self._loaded or not self.state.is_first:
            seed_everything(derive_seed(self.spec.seed, "model"))
            source = tensors_of(self.task.model())
        else:
            source = self.tensors
        for part, flat in self._staging.items():
            if part == "control":
                flat.zero_()
            else:
                gather(source, self.layout, part, flat)
        views = [byte_view(flat) for flat in self._staging.values()]
        meta = SnapshotMeta(
            job=self.load.job,
            version=0,
            digest=digest_of(views),
            layout=self.layout,
            parts=dense_parts(self.layout, "snapshot", control=self.control),
        )
        return write_body_file(path, meta, views)

    def load_base(self, message: ipc.TrainPeriod | ipc.EvaluateBase) -> None:
        """Put a version into the model, after checking digest and layout."""
        if self.state.restore():
            self._loaded = ""
        if self._loaded == message.base_digest:
            return
        self._loaded = ""
        read_snapshot(
            Path(message.base_path),
            layout=self.layout,
            digest=message.base_digest,
            control=self.control,
            into={part: byte_view(flat) for part, flat in self._staging.items()},
        )
        for part in ("params", "buffers", "ints"):
            scatter(self.tensors, self.layout, part, self._staging[part])
        self._loaded = message.base_digest

    def evaluate_base(self) -> tuple[float, dict[str, Metric]]:
        """Metrics of the version in the model, on this site's test data."""
        return evaluate(
            self.task,
            self.model,
            self.test if self.eval_examples else None,
            device=self.device,
            batch_size=BATCH_FACTOR * self.spec.optimizer.batch_size,
        )

    # ------------------------------------------------------------ one period

    def train(self, message: ipc.TrainPeriod, between_steps: BetweenSteps) -> Path:
        """Train from the base that `load_base` put in place; the update's folder."""
        begin = self._clock()
        if not self.train_examples:
            raise RefusedError("this site has no training data.")
        if not (message.steps or message.epochs):
            raise UsageError("a period needs steps or epochs.")
        sitestate.forget_queued(self.folder, message.applied)
        seed = derive_seed(self.spec.seed, "period", self.load.site, str(message.clock))
        seed_everything(seed)
        self._loaded = ""
        self.state.leave()
        if self.spec.optimizer.state == "reset":
            self.learner.forget_moments()
        start = {part: flat.to(self.device) for part, flat in self._staging.items()}
        gather(self.tensors, self.layout, "params", start["params"])  # as the dtypes could hold it
        corrections = Corrections(
            self.model,
            self.layout,
            start,
            prox=self.spec.local.prox,
            own_control=self.state.control,
        )
        period = self.learner.train(
            corrections,
            steps=message.steps,
            epochs=message.epochs,
            between_steps=between_steps,
            is_over=(lambda: self._clock() - begin >= message.seconds) if message.seconds else None,
        )
        self._check_frozen()
        update = make_update(
            self.model,
            self.layout,
            start,
            distance=period.distance,
            residual=self.state.residual(),
        )
        if self.state.control is not None:
            self.state.control.add_(update.parts["control"])
        return self._write(message, period, update, begin)

    def _write(
        self, message: ipc.TrainPeriod, period: Period, update: Outgoing, begin: float
    ) -> Path:
        name = sitestate.update_name(message.epoch, message.clock, message.attempt)
        seconds = self._clock() - begin
        meta = UpdateMeta(
            job=self.load.job,
            site=self.load.site,
            epoch=message.epoch,
            clock=message.clock,
            attempt=message.attempt,
            base_version=message.base_version,
            base_digest=message.base_digest,
            layout_digest=self.layout.digest(),
            examples=float(self.train_examples),
            steps=period.steps,
            effective_steps=period.effective_steps,
            parts=dense_parts(self.layout, "update", control=self.control),
            metrics=_metrics_of(period, boxed=message.seconds > 0),
            norm=update.norm,
            train_seconds=seconds,
        )
        views = [byte_view(flat.cpu()) for flat in update.parts.values()]
        with sitestate.new_update(self.folder, name) as folder:
            size = write_body_file(folder / sitestate.BODY, meta, views)
            self.state.save(folder / sitestate.STATE, name)
            sitestate.write_record(folder, meta, size, of=period.of, cut=period.cut)
        self.state.reached(name)
        return self.folder / name

    def settle(self, message: ipc.Settle) -> None:
        """Make the state what the verdict says."""
        name = sitestate.find_update(self.folder, message.epoch, message.clock, message.attempt)
        sitestate.settle(self.folder, name, message.verdict, self.state.give_back)

    # ------------------------------------------------------------ frozen tensors

    def _versions_of_frozen(self) -> list[int]:
        return [
            self.tensors[spec.name]._version  # noqa: SLF001  the only way to see a write
            for spec in self.layout.tensors
            if spec.role == "frozen" and not spec.tie
        ]

    def _check_frozen(self) -> None:
        """Refuse a task that trained what it declared frozen; free when nothing was written."""
        versions = self._versions_of_frozen()
        if versions == self._frozen_versions:
            return
        found = fingerprint(self.tensors, self.layout.tensors)
        if found != self.layout.frozen_fingerprint:
            raise ConflictError(
                "the task changed tensors that do not require a gradient: the base model of this "
                "site is not that of the job any more.",
                "Leave frozen tensors alone, or let them train.",
            )
        self._frozen_versions = versions


def _metrics_of(period: Period, *, boxed: bool) -> dict[str, Metric]:
    metrics = {
        "train_loss": metric(period.loss, period.examples),
        "lr": metric(period.last_lr, period.examples),
    }
    if boxed and period.of:
        metrics["period_done"] = metric(period.steps / period.of, period.examples)
    return metrics


def _stays(spec: TensorSpec) -> bool:
    return spec.role == "local" and not spec.tie


def _device(name: str) -> torch.device:
    if name:
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
