"""One model for many sites: who takes it over finds nothing of the one before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from client.localjob import LocalJob
from client.task import Task
from client.workbench import Workbench
from protocol.errors import UsageError
from protocol.jobspec import Local, Optimizer
from tests.client.localjobs import Parts, Site
from tests.client.sampletasks import Linear, Normed
from tests.client.workerprocess import make_spec

KINDS = {
    "momentum": ({"optimizer": Optimizer(lr=0.1, momentum=0.9)}, Normed),
    "adam": ({"optimizer": Optimizer(name="adam", lr=0.01)}, Normed),
    "scaffold": ({"local": Local(scaffold=True)}, Linear),
    "personal": ({"local": Local(personal=("4.*",))}, Normed),
}


def deltas(
    folder: Path, task: type[Task], spec: object, benches: dict[str, Workbench] | None
) -> list[Parts]:
    """Two sites, three periods each, in turns; every update."""
    sites = [
        Site(folder / name, task(), spec=spec, site=name, benches=benches) for name in ("s1", "s2")
    ]
    return [site.period(clock, steps=4)[1] for clock in range(3) for site in sites]


@pytest.mark.parametrize("kind", KINDS)
def test_sites_that_share_a_model_train_the_very_same_as_sites_of_their_own(
    kind: str, tmp_path: Path
):
    fields, task = KINDS[kind]
    spec = make_spec(**fields)  # type: ignore[arg-type]
    benches: dict[str, Workbench] = {}
    alone = deltas(tmp_path / "alone", task, spec, None)
    shared = deltas(tmp_path / "shared", task, spec, benches)
    assert len(benches) == 1
    for one, other in zip(alone, shared, strict=True):
        assert {name: torch.equal(one[name], other[name]) for name in one} == dict.fromkeys(
            one, True
        )


def test_version_0_is_the_same_after_the_model_has_moved_on(tmp_path: Path):
    benches: dict[str, Workbench] = {}
    spec = make_spec()
    first = Site(tmp_path / "a", Linear(), spec=spec, site="s1", benches=benches)
    version_0 = first.version
    first.train(0, steps=2)
    second = Site(tmp_path / "b", Linear(), spec=spec, site="s2", benches=benches)
    assert all(torch.equal(version_0[name], second.version[name]) for name in version_0)
    first.settle("refused_drop")
    again, _ = first.train(0, steps=2)
    assert again.norm > 0


def test_a_site_that_cannot_be_loaded_leaves_the_model_to_the_others(tmp_path: Path):
    class Odd(Linear):
        def schedule(
            self, optimizer: torch.optim.Optimizer
        ) -> torch.optim.lr_scheduler.LRScheduler:
            return torch.optim.lr_scheduler.LambdaLR(optimizer, [Unkept()])

    class Unkept:
        def __init__(self) -> None:
            self.values = object()

        def __call__(self, step: int) -> float:
            return 1.0

    benches: dict[str, Workbench] = {}
    good = Site(tmp_path / "a", Linear(), spec=make_spec(), site="s1", benches=benches)
    with pytest.raises(UsageError, match="cannot be kept"):
        LocalJob(good.load, Odd(), benches=benches)
    _, parts = good.train(0, steps=2)
    assert parts["delta"].norm() > 0
