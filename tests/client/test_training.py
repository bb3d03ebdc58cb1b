from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from client import sitestate
from client.optimizers import UnitRun, make_optimizer
from client.task import Data, SiteContext, Task
from protocol.jobspec import Local, Optimizer
from tests.client.localjobs import Site
from tests.client.sampletasks import Constant, Linear, examples
from tests.client.workerprocess import make_spec

CONSTANT = Optimizer(lr=0.1, momentum=0.9, batch_size=1)


def changes(site: Site, count: int, restart_at: int = -1, **fields: Any) -> list[float]:
    found = []
    for clock in range(count):
        if clock == restart_at:
            site.restart()
        found.append(round(site.period(clock, **fields)[1]["delta"].item(), 6))
    return found


@pytest.mark.parametrize("restart_at", [-1, 1, 2])
def test_kept_momentum_goes_on_across_periods_and_restarts(tmp_path: Path, restart_at: int):
    """PC-045: keep gives -0.1, -0.19, -0.271, also when the worker is restarted in between."""
    site = Site(tmp_path, Constant(), spec=make_spec(optimizer=CONSTANT))
    assert changes(site, 3, restart_at, steps=1) == [-0.1, -0.19, -0.271]


def test_reset_momentum_begins_anew_every_period(tmp_path: Path):
    """PC-045: reset gives -0.1 each time."""
    spec = make_spec(optimizer=Optimizer(lr=0.1, momentum=0.9, batch_size=1, state="reset"))
    site = Site(tmp_path, Constant(), spec=spec)
    assert changes(site, 3, 2, steps=1) == [-0.1, -0.1, -0.1]


class Stepwise(Constant):
    """x0.1 every 4 steps: every 2 rounds of 2 steps."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.1)


@pytest.mark.parametrize("state", ["keep", "reset"])
def test_a_schedule_goes_on_across_periods_and_restarts(tmp_path: Path, state: Any):
    """PC-044: rounds 1-2 at 0.1, 3-4 at 0.01, 5 at 0.001, restarted before rounds 2 and 4."""
    spec = make_spec(optimizer=Optimizer(lr=0.1, batch_size=1, state=state))
    site = Site(tmp_path, Stepwise(), spec=spec)
    rates = []
    for clock in range(5):
        if clock in (1, 3):
            site.restart()
        meta, parts = site.period(clock)
        rates.append(meta.metrics["lr"].value)
        assert parts["delta"].item() == pytest.approx(-2 * rates[-1], abs=1e-6)
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001])


@pytest.mark.parametrize(
    ("seconds", "steps"), [(0.5, 1), (1.0, 1), (2.5, 3), (9.5, 10), (60.0, 10), (0.0, 10)]
)
def test_a_time_box_ends_the_period_at_the_next_step(tmp_path: Path, seconds: float, steps: int):
    """What was done is delivered, at least one step; the figures are those of the steps taken."""
    site = Site(tmp_path, Constant(), spec=make_spec(optimizer=CONSTANT))
    site.step_seconds = 1.0
    meta, parts = site.train(steps=10, seconds=seconds)
    record = sitestate.read_record(tmp_path / "update-1-0-1")
    assert (meta.steps, record.steps, record.of) == (steps, steps, 10)
    assert record.cut == (steps < 10)
    assert meta.train_seconds == steps
    assert meta.metrics["train_loss"].examples == steps
    twin = Site(tmp_path / "twin", Constant(), spec=make_spec(optimizer=CONSTANT))
    plain, expected = twin.train(steps=steps)
    assert parts["delta"].equal(expected["delta"])
    assert meta.effective_steps == plain.effective_steps
    done = meta.metrics.get("period_done")
    assert (done and done.value) == (steps / 10 if seconds else None)


def test_a_time_box_cuts_epochs_too_and_the_data_goes_on(tmp_path: Path):
    """8 examples, 2 epochs, 5 steps in time: the third period has seen 15 batches, no more."""
    site = Site(tmp_path, Constant(), spec=make_spec(optimizer=CONSTANT))
    site.step_seconds = 1.0
    for clock in range(3):
        if clock == 2:
            site.restart()
        meta, _ = site.period(clock, steps=0, epochs=2, seconds=4.5)
        assert meta.steps == 5
        assert meta.metrics["period_done"].value == 5 / 16
    assert site.job.stream.position == (1, 7)


def test_a_schedule_counts_the_steps_that_were_taken(tmp_path: Path):
    """3 of 10 steps a period: the rate falls after every fourth step, wherever that is."""
    site = Site(tmp_path, Stepwise(), spec=make_spec(optimizer=Optimizer(lr=0.1, batch_size=1)))
    site.step_seconds = 1.0
    found = []
    for clock in range(3):
        if clock == 1:
            site.restart()
        found.append(site.period(clock, steps=10, seconds=3.0)[1]["delta"].item())
    assert found == pytest.approx([-0.3, -0.12, -0.021], abs=1e-6)


class Multi(Constant):
    """Schedules and optimizers whose state has more kinds in it."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        first = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        second = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], [3])


def test_a_tasks_own_optimizer_and_nested_schedule_survive_a_restart(tmp_path: Path):
    whole = changes(Site(tmp_path / "a", Multi()), 4)
    assert changes(Site(tmp_path / "b", Multi()), 4, restart_at=2) == whole
    assert len(set(whole)) == 4


def test_a_step_is_that_of_plain_pytorch(tmp_path: Path):
    site = Site(tmp_path, Linear(), spec=make_spec(batch=12, lr=0.3))
    weight, bias = site.version["params"][:8].view(2, 4), site.version["params"][8:]
    model = nn.Linear(4, 2)
    model.load_state_dict({"weight": weight, "bias": bias})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x, y = examples(12, 1).tensors
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    _, parts = site.train(steps=3)
    expected = torch.cat([model.weight.flatten(), model.bias]) - site.version["params"]
    torch.testing.assert_close(parts["delta"], expected.detach(), atol=1e-6, rtol=1e-5)


def test_one_step_averaged_over_two_sites_is_one_step_on_all_the_data(tmp_path: Path):
    """H = 1 averaging by examples equals a large-batch SGD step."""

    class Share(Linear):
        def data(self, site: SiteContext) -> Data:
            x, y = examples(20).tensors
            part = slice(0, 5) if site.name == "a" else slice(5, 20)
            if site.name == "all":
                part = slice(0, 20)
            return Data(train=TensorDataset(x[part], y[part]))

    spec = make_spec(batch=100, lr=0.5)
    deltas = {}
    for name in ("a", "b", "all"):
        meta, parts = Site(tmp_path / name, Share(), spec=spec, site=name).train(steps=1)
        deltas[name] = (meta.examples, parts["delta"])
    assert [count for count, _ in deltas.values()] == [5, 15, 20]
    mean = (5 * deltas["a"][1] + 15 * deltas["b"][1]) / 20
    torch.testing.assert_close(mean, deltas["all"][1], atol=1e-7, rtol=1e-5)


class Groups(Task):
    """Two parameter groups with rates of their own; all sites see the same data."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))

    def data(self, site: SiteContext) -> Data:
        return Data(train=examples(8))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        first, second = model
        return torch.optim.SGD(
            [
                {"params": first.parameters(), "lr": 0.1},
                {"params": second.parameters(), "lr": 0.02},
            ],
            momentum=0.5,
        )


def test_periodic_averaging_of_equal_sites_is_neutral(tmp_path: Path):
    """PC-048: 2 ranks, 8 steps, period 4, two parameter groups: the same as plain training."""
    spec = make_spec(batch=8)
    plain = Site(tmp_path / "plain", Groups(), spec=spec)
    _, parts = plain.train(steps=8)
    expected = plain.version["params"] + parts["delta"]
    sites = [Site(tmp_path / name, Groups(), spec=spec, site=name) for name in ("a", "b")]
    for clock in range(2):
        deltas = [site.train(clock, steps=4)[1]["delta"] for site in sites]
        mean = (deltas[0] + deltas[1]) / 2
        for site in sites:
            site.settle("counted", clock)
            new = site.version | {"params": site.version["params"] + mean}
            site.give(clock + 1, new)
    torch.testing.assert_close(sites[0].version["params"], expected, atol=1e-6, rtol=0)


class Quadratic(Task):
    """f(w) = 1/2 |w - e|^2 with e of the task's options; full gradients."""

    def model(self) -> nn.Module:
        model = nn.Module()
        model.w = nn.Parameter(torch.tensor([1.0, -2.0]))
        return model

    def data(self, site: SiteContext) -> Data:
        return Data(train=TensorDataset(torch.zeros(4, 1)))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        target = torch.tensor([float(self.options["e0"]), float(self.options["e1"])])
        return 0.5 * (model.w - target).square().sum()  # type: ignore[operator]


def quadratic(folder: Path, **local: Any) -> Site:
    options = {"e0": 3.0, "e1": 0.5}
    spec = make_spec(batch=4, lr=0.1, local=Local(**local), options=options)
    return Site(folder, Quadratic(options), spec=spec)


def test_fedprox_pulls_towards_the_start(tmp_path: Path):
    site = quadratic(tmp_path, prox=0.7)
    meta, parts = site.train(steps=6)
    start, target = torch.tensor([1.0, -2.0]), torch.tensor([3.0, 0.5])
    w = start.clone()
    for _ in range(6):
        w -= 0.1 * ((w - target) + 0.7 * (w - start))
    torch.testing.assert_close(parts["delta"], w - start, atol=1e-6, rtol=1e-5)
    assert meta.effective_steps == pytest.approx((1 - 0.93**6) / 0.07)


def test_scaffold_corrects_every_step_and_keeps_its_control_across_a_restart(tmp_path: Path):
    site = quadratic(tmp_path, scaffold=True)
    target = torch.tensor([3.0, 0.5])
    server, own = torch.zeros(2), torch.zeros(2)
    for clock in range(3):
        if clock == 2:
            site.restart()
        start = site.version["params"]
        w = start.clone()
        for _ in range(4):
            w -= 0.1 * ((w - target) + server - own)
        change = -server - (w - start) / (4 * 0.1)
        own = own + change
        _, parts = site.period(clock, steps=4)
        torch.testing.assert_close(parts["delta"], w - start, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(parts["control"], change, atol=1e-5, rtol=1e-5)
        server = server + 0.5 * change
        site.give(clock + 1, site.version | {"control": server})


def test_scaffold_with_adam_is_refused_before_the_first_round(tmp_path: Path):
    spec = make_spec(optimizer=Optimizer(name="adam"), local=Local(scaffold=True))
    with pytest.raises(Exception, match="this task uses Adam"):
        Site(tmp_path, Linear(), spec=spec)


def test_gradients_are_clipped_to_the_norm(tmp_path: Path):
    spec = make_spec(optimizer=Optimizer(lr=1.0, clip_norm=0.25, batch_size=1))
    site = Site(tmp_path, Constant(), spec=spec)
    assert site.train(steps=1)[1]["delta"].item() == pytest.approx(-0.25, rel=1e-4)


def test_epochs_are_whole_passes(tmp_path: Path):
    site = Site(tmp_path, Linear({"examples": 10}), spec=make_spec(batch=4))
    meta, _ = site.train(steps=0, epochs=2)
    assert meta.steps == 6
    assert meta.metrics["train_loss"].examples == 20


class Embedded(Task):
    def model(self) -> nn.Module:
        return nn.Embedding(6, 2, sparse=True)

    def data(self, site: SiteContext) -> Data:
        return Data(train=TensorDataset(torch.tensor([0, 1, 2, 3])))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).sum()


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_sparse_gradients_of_embeddings_work_with_every_optimizer(tmp_path: Path, name: Any):
    site = Site(tmp_path, Embedded(), spec=make_spec(optimizer=Optimizer(name=name, lr=0.1)))
    _, parts = site.train(steps=1)
    torch.testing.assert_close(
        parts["delta"].view(6, 2)[:4], torch.full((4, 2), -0.1), atol=1e-5, rtol=0
    )
    assert parts["delta"][8:].tolist() == [0, 0, 0, 0]


def run_of(steps: int, *, momentum: float = 0.0, prox: float = 0.0, lr: float = 0.1) -> UnitRun:
    spec = Optimizer(lr=lr, momentum=momentum)
    run = UnitRun(make_optimizer(spec, [torch.zeros(1, requires_grad=True)]), prox, 0.0)
    for _ in range(steps):
        run.step(lr)
    return run


def test_effective_steps_are_those_of_fednova():
    assert run_of(7).effective_steps == pytest.approx(7)
    m = 0.9
    expected = (7 - m * (1 - m**7) / (1 - m)) / (1 - m)
    assert run_of(7, momentum=m).effective_steps == pytest.approx(expected)
    assert run_of(7, prox=2.0).effective_steps == pytest.approx((1 - 0.8**7) / 0.2)
    adam = UnitRun(torch.optim.Adam([torch.zeros(1, requires_grad=True)]), 0.0, 0.0)
    adam.step(0.1)
    assert adam.effective_steps == 1
