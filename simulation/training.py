"""A person's real task at simulated sites: the worker's own code, in virtual time.

Every site has its own task object, data, stream, optimizer state and folder, as a worker has; the
model is one for all of them, and what a site carries from period to period lies in its folder, so
that memory does not grow with the number of sites. A period that is trained by itself comes to the
very bits that a worker makes; several that are outstanding are trained as one where that comes to
the same within rounding (`batched`).
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import msgspec

from client import ipc, sitestate
from client.loading import user_reason
from client.localjob import LocalJob
from client.task import Task
from client.workbench import Workbench
from protocol.errors import RefusedError
from protocol.jobspec import JobSpec
from protocol.limits import REASON_CHARS_MAX
from protocol.messages import VerdictKind
from simulation.batched import (
    Item,
    NotTogetherError,
    sites_max,
    steps_of_adam,
    train_together,
    why_not,
)
from simulation.bodies import Body
from simulation.compute import Compute
from simulation.trainer import Base, Evaluation, Loading, Outcome, Plan, Work

BASES_KEPT: Final = 4  # versions as files, of each job
TOGETHER: Final = "together"
Key = tuple[str, str]  # job, site


class _Site(msgspec.Struct):
    """A site with a loaded job; `batches` of its training data make one pass."""

    job: LocalJob
    batches: int
    apart: str  # why its periods are trained by themselves


class TaskTrainer:
    """Trains a task for any number of sites (a `simulation.trainer.Trainer`).

    `make_task` makes a site's task of the job's options, `compute` gives a site's machine, `code`
    is the folder of the task's code, for reasons. `how` counts the periods that were trained
    together, and those by themselves by the reason for it.
    """

    def __init__(
        self,
        make_task: Callable[[JobSpec], Task],
        compute: Callable[[str], Compute],
        *,
        code: Path | None = None,
        batched: bool = True,
    ) -> None:
        self.how: Counter[str] = Counter()
        self._make_task = make_task
        self._compute = compute
        self._code = code
        self._batched = batched
        self._folder = tempfile.TemporaryDirectory(prefix="skerry-simulate-")
        self._root = Path(self._folder.name)
        self._sites: dict[Key, _Site] = {}
        self._benches: dict[str, dict[str, Workbench]] = {}
        self._apart: dict[int, str] = {}  # by bench: what has shown only in training
        self._bases: dict[str, dict[str, Path]] = {}  # by job and digest, the newest last
        self._now = 0.0  # since the period began

    def close(self) -> None:
        """Remove all files."""
        self._folder.cleanup()

    # ------------------------------------------------------------ sites

    def load(self, loading: Loading) -> ipc.Loaded | str:
        """Task, model and data of a site; a text: why not."""
        key = (loading.job, loading.site)
        load = ipc.Load(
            job=loading.job,
            spec=loading.spec,
            folder=str(self._root / loading.job / "sites" / loading.site),
            task=loading.spec.task.file or loading.spec.task.name,
            site=loading.site,
            role=loading.role,
            options=loading.options,
        )
        benches = self._benches.setdefault(loading.job, {})
        try:
            job = LocalJob(load, self._make_task(loading.spec), lambda: self._now, benches)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            return self._reason(error)
        batches = job.stream.batches_per_pass or _count(job.stream.data)
        self._sites[key] = _Site(job=job, batches=batches, apart=why_not(job))
        return job.loaded()

    def forget(self, site: str, job: str) -> None:
        """The site left the job for good."""
        found = self._sites.pop((job, site), None)
        if found is None:
            return
        found.job.bench.take(None)
        shutil.rmtree(found.job.folder, ignore_errors=True)
        if not any(of == job for of, _ in self._sites):
            for bench in self._benches.pop(job, {}).values():
                self._apart.pop(id(bench), None)
            self._bases.pop(job, None)
            shutil.rmtree(self._root / job, ignore_errors=True)

    def settle(
        self, site: str, job: str, epoch: int, clock: int, attempt: int, verdict: VerdictKind
    ) -> None:
        """The verdict on an update."""
        found = self._sites.get((job, site))
        if found is not None:
            found.job.settle(ipc.Settle(epoch=epoch, clock=clock, attempt=attempt, verdict=verdict))

    # ------------------------------------------------------------ versions

    def make_init(self, site: str, job: str) -> Body:
        """Version 0 as a snapshot body."""
        path = self._root / job / "init.body"
        try:
            self._sites[job, site].job.make_init(path)
        except (Exception, SystemExit) as error:
            raise RefusedError(self._reason(error)) from error
        return path.read_bytes()

    def evaluate(self, site: str, job: str, base: Base) -> Evaluation:
        """Metrics of a version at a site.

        Raises:
            RefusedError: the task's own code failed; with its reason.
        """
        local = self._sites[job, site].job
        message = ipc.EvaluateBase(
            base_path=str(self._base_path(job, base)),
            base_version=base.version.version,
            base_digest=base.version.digest,
        )
        try:
            local.load_base(message)
            examples, metrics = local.evaluate_base()
        except (Exception, SystemExit) as error:
            raise RefusedError(f"site {site} cannot evaluate: {self._reason(error)}") from error
        self._tidy(job)
        return Evaluation(examples=examples, metrics=metrics)

    def _base_path(self, job: str, base: Base) -> Path:
        kept = self._bases.setdefault(job, {})
        digest = base.version.digest
        path = kept.pop(digest, None)
        if path is None:
            path = self._root / job / f"base-{digest}.body"
            assert isinstance(base.body, bytes), "a thin body cannot be trained from"
            path.write_bytes(base.body)
        kept[digest] = path
        return path

    def _tidy(self, job: str) -> None:
        kept = self._bases.get(job, {})
        while len(kept) > BASES_KEPT:
            kept.pop(next(iter(kept))).unlink()

    # ------------------------------------------------------------ periods

    def plan(self, work: Work) -> Plan:
        """How long a period will take, and how many steps it will have done."""
        return self._compute(work.site).plan(
            work.clock, self._steps(work), at=work.started_at, budget=work.seconds_budget
        )

    def _steps(self, work: Work) -> int:
        return max(work.steps or work.epochs * self._sites[work.job, work.site].batches, 1)

    def train(self, works: list[Work]) -> list[Outcome]:
        """The outcomes of a batch, in its order."""
        outcomes: dict[int, Outcome] = {}
        alone: dict[int, str] = {}
        groups: dict[Any, list[int]] = {}
        seen: set[Key] = set()
        for index, work in enumerate(works):
            site = self._sites[work.job, work.site]
            made = site.job.folder / sitestate.update_name(work.epoch, work.clock, work.attempt)
            if made.exists():
                outcomes[index] = _outcome(made)
                continue
            bench = site.job.bench
            reason = site.apart or self._apart.get(id(bench), "")
            if (work.job, work.site) in seen:
                reason = "another period of the same site"
            seen.add((work.job, work.site))
            if not self._batched:
                reason = "as asked for"
            if reason:
                alone[index] = reason
            else:
                groups.setdefault((id(bench), steps_of_adam(site.job)), []).append(index)
        for members in groups.values():
            size = sites_max(self._sites[works[members[0]].job, works[members[0]].site].job)
            for start in range(0, len(members), size):
                chunk = members[start : start + size]
                alone |= self._train_chunk(works, chunk, outcomes)
        for index, reason in sorted(alone.items()):
            self.how[reason] += 1
            outcomes[index] = self._train_alone(works[index])
        for job in {work.job for work in works}:
            self._tidy(job)
        return [outcomes[index] for index in range(len(works))]

    def _train_chunk(
        self, works: list[Work], chunk: list[int], outcomes: dict[int, Outcome]
    ) -> dict[int, str]:
        """Train these as one; those that cannot be, with the reason."""
        if len(chunk) == 1:
            return dict.fromkeys(chunk, "no other period was outstanding")
        items, plans = [], []
        for index in chunk:
            work = works[index]
            plans.append(self.plan(work))
            items.append(
                Item(
                    job=self._sites[work.job, work.site].job,
                    message=self._message(work),
                    steps=plans[-1].steps,
                    of=self._steps(work),
                    seconds=plans[-1].seconds,
                )
            )
        try:
            folders = train_together(items)
        except NotTogetherError as error:
            self._apart[id(items[0].job.bench)] = str(error)
            return dict.fromkeys(chunk, str(error))
        for index, found in zip(chunk, folders, strict=True):
            outcomes[index] = (
                _outcome(found) if isinstance(found, Path) else Outcome(failure=self._reason(found))
            )
        self.how[TOGETHER] += len(chunk)
        return {}

    def _train_alone(self, work: Work) -> Outcome:
        """As a worker does."""
        job, plan = self._sites[work.job, work.site].job, self.plan(work)
        message = self._message(work)
        before = math.nextafter(work.seconds_budget, 0.0) or math.inf
        self._now = 0.0

        def between_steps(step: int, _of: int) -> None:
            over = step >= plan.steps
            self._now = plan.seconds if over else min(plan.seconds * step / plan.steps, before)

        try:
            job.load_base(message)
            folder = job.train(message, between_steps)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            return Outcome(failure=self._reason(error))
        return _outcome(folder)

    def _message(self, work: Work) -> ipc.TrainPeriod:
        return ipc.TrainPeriod(
            base_path=str(self._base_path(work.job, work.base)),
            base_version=work.base_version,
            base_digest=work.base.version.digest,
            epoch=work.epoch,
            clock=work.clock,
            attempt=work.attempt,
            steps=work.steps,
            epochs=work.epochs,
            seconds=work.seconds_budget,
            applied=work.applied,
        )

    def _reason(self, error: BaseException) -> str:
        return user_reason(error, self._code)[:REASON_CHARS_MAX]


def _count(data: Iterable[Any]) -> int:
    return sum(1 for _ in data)


def _outcome(folder: Path) -> Outcome:
    record = sitestate.read_record(folder)
    return Outcome(
        body=(folder / sitestate.BODY).read_bytes(),
        examples=record.examples,
        steps=record.steps,
        norm=record.norm,
    )
