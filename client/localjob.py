"""One job at one site: its task, model and data, and the updates that it makes of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from client import ipc, sitestate
from client.bodyfiles import write_body_file
from client.evaluation import BATCH_FACTOR, evaluate
from client.loading import count_examples, load_data, single_example_note
from client.localstate import LocalState
from client.pipeline import Outgoing, make_update
from client.seeds import seed_everything
from client.stream import Stream
from client.task import SiteContext, Task
from client.tensors import byte_view
from client.training import BetweenSteps, Corrections, Learner, Period
from client.workbench import Workbench
from protocol.bodies import UpdateMeta, dense_parts
from protocol.errors import RefusedError, UsageError
from protocol.layout import Part
from protocol.metrics import Metric, metric
from protocol.names import derive_seed


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """A period before its first step: the parts that it starts from, and when it began."""

    start: dict[Part, Tensor]
    corrections: Corrections
    began_at: float


class LocalJob:
    """A loaded job. Everything that may fail for a reason in the task raises.

    Jobs that are given the same `benches` share one model, by its layout, and take turns at it.
    """

    def __init__(
        self,
        load: ipc.Load,
        task: Task,
        clock: Callable[[], float] = time.monotonic,
        benches: dict[str, Workbench] | None = None,
    ) -> None:
        self.load = load
        self._clock = clock
        self.spec = load.spec
        self.task = task
        self.folder = Path(load.folder)
        self.control = self.spec.local.scaffold
        sitestate.prepare_folder(self.folder)
        bench = Workbench(task, self.spec, _device(load.options.get("device", "")))
        if benches is not None:
            bench = benches.setdefault(bench.layout.digest(), bench)
        self.bench = bench
        self.layout, self.notes = bench.layout, bench.notes
        self._load_data()
        bench.take(None)
        self.state = LocalState(
            self.folder,
            self.learner,
            local=bench.local,
            first_local=bench.first_local,
            control=bench.control,
            elements=self.layout.elements("delta"),
        )
        bench.take(self)
        if not self.state.is_first:
            bench.touched()

    # ------------------------------------------------------------ loading

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
        model = self.bench.model
        merged = single_example_note(model, train, self.train_examples, batch_size)
        self.notes += (merged,) if merged else ()
        self.stream = Stream(
            train if train is not None else (),
            batch_size=batch_size,
            seed=seed,
            merge_single=bool(merged),
        )
        self.learner = Learner(self.task, model, self.spec, self.stream, self.bench.device)
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

    def put_away(self) -> None:
        """Another site takes its turn at the model: what this one carries is in its files."""
        self.state.leave()
        self.learner.forget_moments()

    # ------------------------------------------------------------ versions

    def make_init(self, path: Path) -> int:
        """Write version 0; its bytes. The same at every call."""
        return self.bench.write_init(self.task, path, self.load.job)

    def load_base(self, message: ipc.TrainPeriod | ipc.EvaluateBase) -> None:
        """Put a version into the model, after checking digest and layout."""
        self.bench.take(self)
        self.state.restore()
        self.bench.load(Path(message.base_path), message.base_digest)

    def evaluate_base(self) -> tuple[float, dict[str, Metric]]:
        """Metrics of the version in the model, on this site's test data."""
        return evaluate(
            self.task,
            self.bench.model,
            self.test if self.eval_examples else None,
            device=self.bench.device,
            batch_size=BATCH_FACTOR * self.spec.optimizer.batch_size,
        )

    # ------------------------------------------------------------ one period

    def train(self, message: ipc.TrainPeriod, between_steps: BetweenSteps) -> Path:
        """Train from the base that `load_base` put in place; the update's folder."""
        begun = self.begin(message)
        until = begun.began_at + message.seconds
        period = self.learner.train(
            begun.corrections,
            steps=message.steps,
            epochs=message.epochs,
            between_steps=between_steps,
            is_over=(lambda: self._clock() >= until) if message.seconds else None,
        )
        return self.finish(message, begun, period)

    def begin(self, message: ipc.TrainPeriod) -> Begun:
        """All that comes before the first step; the model holds the base."""
        began_at = self._clock()
        if not self.train_examples:
            raise RefusedError("this site has no training data.")
        if not (message.steps or message.epochs):
            raise UsageError("a period needs steps or epochs.")
        sitestate.forget_queued(self.folder, message.applied)
        seed_everything(derive_seed(self.spec.seed, "period", self.load.site, str(message.clock)))
        self.state.leave()
        if self.spec.optimizer.state == "reset":
            self.learner.forget_moments()
        start = self.bench.start()
        corrections = Corrections(
            self.bench.model,
            self.layout,
            start,
            prox=self.spec.local.prox,
            own_control=self.state.control,
        )
        return Begun(start=start, corrections=corrections, began_at=began_at)

    def finish(self, message: ipc.TrainPeriod, begun: Begun, period: Period) -> Path:
        """All that comes after the last step: the model holds what was learnt. The update's folder.

        The memory of `begun.start` becomes the update.
        """
        self.bench.check_frozen()
        update = make_update(
            self.bench.model,
            self.layout,
            begun.start,
            distance=period.distance,
            residual=self.state.residual(),
        )
        if self.state.control is not None:
            self.state.control.add_(update.parts["control"])
        return self._write(message, period, update, self._clock() - begun.began_at)

    def _write(
        self, message: ipc.TrainPeriod, period: Period, update: Outgoing, seconds: float
    ) -> Path:
        name = sitestate.update_name(message.epoch, message.clock, message.attempt)
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


def _metrics_of(period: Period, *, boxed: bool) -> dict[str, Metric]:
    metrics = {
        "train_loss": metric(period.loss, period.examples),
        "lr": metric(period.last_lr, period.examples),
    }
    if boxed and period.of:
        metrics["period_done"] = metric(period.steps / period.of, period.examples)
    return metrics


def _device(name: str) -> torch.device:
    if name:
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
