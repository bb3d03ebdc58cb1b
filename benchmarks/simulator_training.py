"""Training many simulated sites as one batch against one site after the other.

An MLP 784-64-10 and plain SGD, `SITES` sites with random examples of their own, one period of
`STEPS` steps each, from reading the base to the written updates: what the simulator does for the
periods that are outstanding at one time. Both ways use as many threads as torch takes by itself;
the ratio is of the shortest of several runs in turns, and both must come to the same updates.
"""

from __future__ import annotations

import time
from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import TensorDataset

from client.task import Data, SiteContext, Task
from protocol.bodies import SnapshotMeta
from protocol.jobspec import JobSpec, Optimizer, Period, Stop, TaskRef
from protocol.messages import VersionRef
from simulation.bodies import Body, decode
from simulation.compute import Compute, ComputeSpec
from simulation.trainer import Base, Loading, Work
from simulation.training import TOGETHER, TaskTrainer

SITES: Final = 32
STEPS: Final = 50
EXAMPLES: Final = 1600  # whole passes of both batch sizes
DIFFERENCE_MAX: Final = 1e-6

BARS: Final = {"batched_over_loop_32": ">= 1.5", "batched_over_loop_8": ">= 2.5"}


class Mlp(Task):
    """784-64-10 on random examples."""

    def model(self) -> nn.Module:
        """50,890 weights."""
        return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))

    def data(self, site: SiteContext) -> Data:
        """Examples of the site's own."""
        generator = torch.Generator().manual_seed(site.seed)
        x = torch.randn(EXAMPLES, 784, generator=generator)
        y = torch.randint(0, 10, (EXAMPLES,), generator=generator)
        return Data(train=TensorDataset(x, y))


class _Sites:
    """The sites of one way of training."""

    def __init__(self, batch_size: int, sites: int, *, batched: bool) -> None:
        self.trainer = TaskTrainer(
            lambda _: Mlp(),
            lambda site: Compute(ComputeSpec(), seed=1, site=site),
            batched=batched,
        )
        spec = JobSpec(
            name="mlp",
            task=TaskRef(name="mlp"),
            period=Period(steps=STEPS),
            optimizer=Optimizer(lr=0.01, batch_size=batch_size),
            stop=Stop(versions=1),
            seed=1,
        )
        self.names = [f"site-{k:02d}" for k in range(sites)]
        for name in self.names:
            loaded = self.trainer.load(Loading(site=name, job="j", role="site", spec=spec))
            assert not isinstance(loaded, str), loaded
        body = self.trainer.make_init(self.names[0], "j")
        meta, _ = decode(body)
        assert isinstance(meta, SnapshotMeta)
        self.base = Base(
            version=VersionRef(version=0, digest=meta.digest, bytes=len(body)), body=body
        )
        self.attempt = 0

    def period(self) -> tuple[float, list[Body | None]]:
        """Seconds that a period of all sites took, and their updates."""
        self.attempt += 1
        works = [
            Work(
                site=name, job="j", epoch=1, clock=0, attempt=self.attempt, base=self.base,
                steps=STEPS,
            )
            for name in self.names
        ]  # fmt: skip
        started = time.perf_counter()
        outcomes = self.trainer.train(works)
        seconds = time.perf_counter() - started
        for name in self.names:
            self.trainer.settle(name, "j", 1, 0, self.attempt, "refused_drop")
        return seconds, [outcome.body for outcome in outcomes]


def ratio(batch_size: int, *, sites: int, repeats: int) -> tuple[float, float]:
    """How many times as fast the batch is, and the largest difference between any two weights."""
    loop = _Sites(batch_size, sites, batched=False)
    together = _Sites(batch_size, sites, batched=True)
    times, difference = [], 0.0
    for _ in range(repeats):
        (slow, expected), (fast, found) = loop.period(), together.period()
        times.append((slow, fast))
        difference = max(map(_difference, expected, found))
    assert set(together.trainer.how) == {TOGETHER}, together.trainer.how
    loop.trainer.close()
    together.trainer.close()
    return min(slow for slow, _ in times) / min(fast for _, fast in times), difference


def _difference(one: Body | None, other: Body | None) -> float:
    assert one is not None
    assert other is not None
    (_, a), (_, b) = decode(one), decode(other)
    return float((torch.tensor(a) - torch.tensor(b)).abs().max())


def measure(*, quick: bool) -> dict[str, Any]:
    """Both ratios. AssertionError when the two ways do not come to the same.

    Quick: fewer sites, fewer repetitions.
    """
    sites, repeats = (8, 2) if quick else (SITES, 7)
    figures: dict[str, Any] = {"batched_sites": sites, "batched_threads": torch.get_num_threads()}
    for batch_size in (32, 8):
        faster, difference = ratio(batch_size, sites=sites, repeats=repeats)
        assert difference <= DIFFERENCE_MAX, f"batches of {batch_size}: {difference} apart"
        figures[f"batched_over_loop_{batch_size}"] = round(faster, 2)
        figures[f"batched_difference_{batch_size}"] = difference
    return figures
