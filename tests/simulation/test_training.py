"""Real training at simulated sites: what workers would make, in bounded memory."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from client import ipc
from client.task import Data, SiteContext, Task
from protocol.bodies import SnapshotMeta, UpdateMeta
from protocol.jobspec import JobSpec, Optimizer
from protocol.messages import VersionRef
from simulation.bodies import decode
from simulation.compute import Compute, ComputeSpec
from simulation.trainer import Base, Loading, Outcome, Work
from simulation.training import TOGETHER, TaskTrainer
from tests.client.localjobs import Site, read_parts
from tests.client.sampletasks import Broken, Linear, Normed, examples
from tests.client.workerprocess import make_spec


class Noisy(Normed):
    """Dropout, BatchNorm, a schedule and examples with noise: all that a site draws or keeps."""

    def data(self, site: SiteContext) -> Data:
        return Data(train=Jitter(examples(11, int(site.name[-1]))), test=examples(8, 99))

    def schedule(
        self, optimizer: torch.optim.Optimizer
    ) -> torch.optim.lr_scheduler.LRScheduler | None:
        return torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)


class Jitter:
    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.data[index]
        return x + 0.1 * torch.randn(4), y


class World:
    """A trainer with loaded sites, and the version that they train from."""

    def __init__(
        self, task: type[Task], spec: JobSpec, sites: int, *, batched: bool = True
    ) -> None:
        self.trainer = TaskTrainer(
            lambda spec: task(spec.task.options),
            lambda site: Compute(ComputeSpec(step_seconds=0.5, spread=0.0), seed=1, site=site),
            batched=batched,
        )
        self.names = [f"s{k}" for k in range(sites)]
        for name in self.names:
            found = self.trainer.load(Loading(site=name, job="job-1", role="site", spec=spec))
            assert isinstance(found, ipc.Loaded), found
        body = self.trainer.make_init("s0", "job-1")
        meta, _ = decode(body)
        assert isinstance(meta, SnapshotMeta)
        ref = VersionRef(version=0, digest=meta.digest, bytes=len(body))
        self.base = Base(version=ref, body=body)

    def work(self, site: str, clock: int, **fields: Any) -> Work:
        values: dict[str, Any] = {"steps": 4, "attempt": 1} | fields
        return Work(site=site, job="job-1", epoch=1, clock=clock, base=self.base, **values)

    def period(self, clock: int, verdict: Any = "counted", **fields: Any) -> list[Outcome]:
        outcomes = self.trainer.train([self.work(name, clock, **fields) for name in self.names])
        for name in self.names:
            self.trainer.settle(name, "job-1", 1, clock, 1, verdict)
        return outcomes


def parts_of(outcome: Outcome, folder: Path) -> tuple[UpdateMeta, dict[str, Tensor]]:
    assert isinstance(outcome.body, bytes), outcome.failure
    path = folder / "read.body"
    path.write_bytes(outcome.body)
    return read_parts(path)


@pytest.mark.parametrize("task", [Linear, Noisy])
def test_a_period_by_itself_is_bit_for_bit_what_a_worker_makes(task: type[Task], tmp_path: Path):
    spec = make_spec(optimizer=Optimizer(lr=0.1, momentum=0.9, batch_size=4))
    world = World(task, spec, 2, batched=False)
    worker = Site(tmp_path / "w", task(), spec=spec, site="s1")
    for clock, verdict in enumerate(["counted", "refused_return", "refused_drop", "counted"]):
        worker.give(0, worker.version)
        meta, parts = worker.train(clock, steps=4, base_version=0)
        worker.settle(verdict, clock)
        found, others = parts_of(world.period(clock, verdict)[1], tmp_path)
        assert {name: torch.equal(parts[name], others[name]) for name in parts} == dict.fromkeys(
            parts, True
        )
        assert found.metrics == meta.metrics
        assert found.train_seconds == 2.0
    world.trainer.close()


def test_outstanding_periods_are_trained_as_one_and_are_the_same_to_1e_6(tmp_path: Path):
    spec = make_spec(optimizer=Optimizer(lr=0.1, momentum=0.9, batch_size=4))
    one, other = World(Linear, spec, 3), World(Linear, spec, 3, batched=False)
    for clock in range(2):
        for a, b in zip(one.period(clock), other.period(clock), strict=True):
            (meta, parts), (_, others) = parts_of(a, tmp_path), parts_of(b, tmp_path)
            torch.testing.assert_close(parts["delta"], others["delta"], rtol=0, atol=1e-6)
            assert meta.train_seconds == 2.0
    assert one.trainer.how == {TOGETHER: 6}
    assert other.trainer.how == {"as asked for": 6}


def test_what_cannot_be_trained_as_one_is_trained_by_itself_and_says_why():
    world = World(Normed, make_spec(), 2)
    assert all(isinstance(outcome.body, bytes) for outcome in world.period(0))
    assert world.trainer.how == {"the model has buffers, as those of BatchNorm": 2}


@pytest.mark.parametrize("batched", [True, False])
def test_a_time_boxed_period_delivers_the_steps_it_had_time_for(batched: bool, tmp_path: Path):
    world = World(Linear, make_spec(), 2, batched=batched)
    work = world.work("s0", 0, steps=10, seconds_budget=1.6)
    assert world.trainer.plan(work).steps == 4
    for outcome in world.period(0, steps=10, seconds_budget=1.6):
        meta, _ = parts_of(outcome, tmp_path)
        assert meta.steps == outcome.steps == 4
        assert meta.train_seconds == 2.0
        assert meta.metrics["period_done"].value == 0.4


def test_epochs_are_planned_by_the_batches_of_the_site():
    world = World(Linear, make_spec(), 1)  # 12 examples in batches of 4
    assert world.trainer.plan(world.work("s0", 0, steps=0, epochs=3)).steps == 9
    (outcome,) = world.period(0, steps=0, epochs=3)
    assert outcome.steps == 9


def test_the_users_errors_are_reasons_and_a_finished_period_is_not_trained_again():
    world = World(Broken, make_spec(), 2)
    assert all("shape" in outcome.failure for outcome in world.period(0))
    world = World(Linear, make_spec(), 1)
    (first,) = world.trainer.train([world.work("s0", 0)])
    (again,) = world.trainer.train([world.work("s0", 0)])
    assert again == first
    assert world.trainer.how.total() == 1


def test_a_site_that_left_leaves_nothing_behind():
    world = World(Linear, make_spec(), 2)
    world.period(0)
    root = Path(world.trainer._folder.name)
    world.trainer.forget("s0", "job-1")
    assert [path.name for path in (root / "job-1" / "sites").iterdir()] == ["s1"]
    world.trainer.forget("s1", "job-1")
    assert list(root.iterdir()) == []


class Wide(Linear):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 512), nn.ReLU(), nn.Linear(512, 2))


def floats_alive() -> int:
    """Elements of all tensors that the process holds on to."""
    gc.collect()
    return sum(o.numel() for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter))


@pytest.mark.parametrize("batched", [True, False])
def test_memory_depends_on_the_model_and_not_on_the_number_of_sites(batched: bool):
    """PC-108: Adam's moments of 40 sites over 200 periods are not in memory, nor is any model but
    one; what is there after the first version is all that is there after the last.
    """
    spec = make_spec(optimizer=Optimizer(name="adam", lr=0.01, batch_size=4))
    world = World(Wide, spec, 40, batched=batched)
    model = sum(p.numel() for p in Wide().model().parameters())
    before = floats_alive()
    seen = []
    for clock in range(5):
        world.period(clock, steps=2)
        seen.append(floats_alive() - before)
    assert world.trainer.how.total() == 200
    assert max(seen) <= 4 * model  # the moments of the last site, and its gradients
    assert seen[-1] <= seen[0]
    folder = Path(world.trainer._folder.name)
    assert len(list(folder.rglob("*.body"))) <= 2
