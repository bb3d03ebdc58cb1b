"""Periods of several sites trained as one come to what each comes to by itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from client import sitestate
from client.task import Data, SiteContext, Task
from client.workbench import Workbench
from protocol.bodies import UpdateMeta
from protocol.jobspec import Local, Optimizer
from simulation.batched import Item, NotTogetherError, steps_of_adam, train_together, why_not
from tests.client.localjobs import Parts, Site, read_parts
from tests.client.sampletasks import Loaders, Normed, examples
from tests.client.workerprocess import make_spec, make_train

Periods = list[tuple[UpdateMeta, Parts]]


class Net(Task):
    """Sites have different numbers of examples, so that the last batches of a pass differ."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def data(self, site: SiteContext) -> Data:
        number = int(site.name[-1])
        return Data(train=examples(10 + 3 * number, number), test=examples(8, 99))


class Smoothed(Net):
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


class Jittered(Net):
    """Its model draws random numbers that torch.func knows nothing of."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        import random

        return nn.functional.cross_entropy(model(batch[0] * random.random()), batch[1])


class Peeks(Net):
    """What it does depends on values, which one gradient of many cannot follow."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        scores = model(batch[0])
        return scores.mean() if scores.sum() > 0 else -scores.mean()


class Unused(Net):
    def model(self) -> nn.Module:
        model = super().model()
        model.extra = nn.Linear(2, 2)
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model[2](model[1](model[0](batch[0]))), batch[1])


def sites_of(folder: Path, task: type[Task], spec: object, count: int = 4) -> list[Site]:
    benches: dict[str, Workbench] = {}
    return [Site(folder / f"s{k}", task(), benches, spec=spec, site=f"s{k}") for k in range(count)]


def together(sites: Sequence[Site], clock: int, steps: Sequence[int]) -> Periods:
    items = [
        Item(
            job=site.job,
            message=make_train(site.base, site.digest, clock, steps=count),
            steps=count,
            of=count,
        )
        for site, count in zip(sites, steps, strict=True)
    ]
    found = train_together(items)
    return [read_parts(folder / sitestate.BODY) for folder in found if isinstance(folder, Path)]


def one_by_one(sites: Sequence[Site], clock: int, steps: Sequence[int]) -> Periods:
    return [site.train(clock, steps=count) for site, count in zip(sites, steps, strict=True)]


def go_on(sites: Sequence[Site], clock: int, found: Periods) -> None:
    for site, (_, parts) in zip(sites, found, strict=True):
        site.settle("counted", clock)
        new = {"params": site.version["params"] + parts["delta"]}
        site.give(clock + 1, new | {name: parts[name] for name in ("buffers", "ints")})


KINDS: dict[str, tuple[dict[str, Any], type[Task]]] = {
    "sgd": ({}, Net),
    "momentum": ({"optimizer": Optimizer(lr=0.1, momentum=0.9, batch_size=4)}, Net),
    "nesterov, decay": (
        {
            "optimizer": Optimizer(
                lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, batch_size=4
            )
        },
        Net,
    ),
    "adam": ({"optimizer": Optimizer(name="adam", lr=0.01, batch_size=4)}, Net),
    "adamw": (
        {"optimizer": Optimizer(name="adamw", lr=0.01, weight_decay=0.1, batch_size=4)},
        Net,
    ),
    "moments reset": (
        {"optimizer": Optimizer(lr=0.1, momentum=0.9, state="reset", batch_size=4)},
        Net,
    ),
    "prox, clipped": (
        {"optimizer": Optimizer(lr=0.1, clip_norm=0.2, batch_size=4), "local": Local(prox=0.5)},
        Net,
    ),
    "own loss": ({}, Smoothed),
    "unused parameters": (
        {"optimizer": Optimizer(name="adamw", lr=0.01, weight_decay=0.1, batch_size=4)},
        Unused,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_many_sites_as_one_train_what_each_trains_by_itself(kind: str, tmp_path: Path):
    fields, task = KINDS[kind]
    spec = make_spec(**fields)
    alone, joined = (sites_of(tmp_path / name, task, spec) for name in ("alone", "joined"))
    assert [why_not(site.job) for site in joined] == [""] * 4
    same = fields.get("optimizer", Optimizer()).name != "sgd"
    for clock in range(3):
        steps = [5, 5, 5, 5] if same else [5, 3, 7, 3]
        expected, found = one_by_one(alone, clock, steps), together(joined, clock, steps)
        for (meta, parts), (other, others) in zip(expected, found, strict=True):
            torch.testing.assert_close(others["delta"], parts["delta"], rtol=0, atol=1e-6)
            assert parts["delta"].norm() > 1e-3
            loss, other_loss = meta.metrics["train_loss"].value, other.metrics["train_loss"].value
            assert isinstance(loss, float)
            assert other_loss == pytest.approx(loss, abs=1e-6)
            for field in ("steps", "examples", "effective_steps", "site", "clock", "base_digest"):
                assert getattr(other, field) == pytest.approx(getattr(meta, field))
        go_on(alone, clock, expected)
        go_on(joined, clock, expected)


def test_adam_counts_the_steps_of_each_site(tmp_path: Path):
    spec = make_spec(optimizer=Optimizer(name="adam", lr=0.01, batch_size=4))
    sites = sites_of(tmp_path, Net, spec, 2)
    go_on(sites, 0, together(sites, 0, [3, 5]))
    assert [steps_of_adam(site.job) for site in sites] == [3, 5]


def test_after_periods_as_one_a_site_goes_on_by_itself(tmp_path: Path):
    spec = make_spec(optimizer=Optimizer(lr=0.1, momentum=0.9, batch_size=4))
    alone, joined = (sites_of(tmp_path / name, Net, spec, 2) for name in ("alone", "joined"))
    go_on(alone, 0, one_by_one(alone, 0, [3, 4]))
    go_on(joined, 0, together(joined, 0, [3, 4]))
    for one, other in zip(one_by_one(alone, 1, [4, 2]), one_by_one(joined, 1, [4, 2]), strict=True):
        torch.testing.assert_close(one[1]["delta"], other[1]["delta"], rtol=0, atol=1e-6)


class Wild(Net):
    """One site's examples are far too large."""

    def data(self, site: SiteContext) -> Data:
        data = super().data(site)
        if site.name == "s1":
            data.train.tensors[0].mul_(1e30)
        return data


def test_a_site_whose_numbers_explode_is_the_only_one_without_an_update(tmp_path: Path):
    sites = sites_of(tmp_path, Wild, make_spec(), 3)
    items = [
        Item(job=s.job, message=make_train(s.base, s.digest, 0, steps=4), steps=4, of=4)
        for s in sites
    ]
    first, wild, last = train_together(items)
    assert isinstance(first, Path)
    assert isinstance(last, Path)
    assert "NaN" in str(wild)
    assert not (sites[1].job.folder / "update-1-0-1").exists()


REFUSED: dict[str, tuple[dict[str, Any], type[Task], str]] = {
    "batchnorm": ({}, Normed, "buffers"),
    "loader": ({}, Loaders, "TensorDataset"),
    "scaffold": ({"local": Local(scaffold=True)}, Net, "SCAFFOLD"),
    "personal": ({"local": Local(personal=("2.*",))}, Net, "stay at the site"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_trained_as_one_says_why(kind: str, tmp_path: Path):
    fields, task, reason = REFUSED[kind]
    (site,) = sites_of(tmp_path, task, make_spec(**fields), 1)
    assert reason in why_not(site.job)


@pytest.mark.parametrize(
    ("task", "reason"), [(Jittered, "draws random numbers"), (Peeks, "torch.func")]
)
def test_what_shows_only_in_training_leaves_no_trace(task: type[Task], reason: str, tmp_path: Path):
    spec = make_spec()
    alone, joined = (sites_of(tmp_path / name, task, spec, 2) for name in ("alone", "joined"))
    with pytest.raises(NotTogetherError, match=reason):
        together(joined, 0, [3, 4])
    for one, other in zip(one_by_one(alone, 0, [3, 4]), one_by_one(joined, 0, [3, 4]), strict=True):
        assert torch.equal(one[1]["delta"], other[1]["delta"])
