from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from client import sitestate
from client.statefile import read_value
from client.task import Data, SiteContext, Task
from client.tensors import tensors_of
from protocol.errors import ConflictError, InvalidFileError, RefusedError, UsageError
from protocol.jobspec import Buffers, Local, Optimizer
from tests.client.localjobs import Site, read_parts
from tests.client.sampletasks import Linear, Loaders, Normed, examples
from tests.client.workerprocess import make_spec, make_train

ADAM = Optimizer(name="adam", lr=0.05, batch_size=4)


class CrashError(Exception):
    """The worker dies here."""


def test_a_restarted_worker_goes_on_bit_for_bit(tmp_path: Path):
    spec = make_spec(optimizer=ADAM, local=Local(prox=0.1), steps=2)
    whole = Site(tmp_path / "a", Normed(), spec=spec)
    broken = Site(tmp_path / "b", Normed(), spec=spec)
    for clock in range(4):
        if clock:
            broken.restart()
        expected, found = whole.period(clock), broken.period(clock)
        for name, part in expected[1].items():
            assert part.equal(found[1][name]), (clock, name)


@pytest.mark.parametrize("task", [Normed, Loaders])
def test_a_repeated_attempt_gives_the_same_bits(tmp_path: Path, task: type[Task]):
    site = Site(tmp_path, task(), spec=make_spec(optimizer=ADAM))
    site.period(0)
    _, first = site.train(1, steps=2)
    site.settle("refused_drop", 1)
    _, second = site.train(1, attempt=2, steps=2)
    site.settle("refused_drop", 1, 2)
    site.restart()
    _, third = site.train(1, attempt=3, steps=2)
    assert first["delta"].equal(second["delta"])
    assert first["delta"].equal(third["delta"])


def test_a_dropped_period_leaves_the_state_as_it_was(tmp_path: Path):
    site = Site(tmp_path, Linear(), spec=make_spec(optimizer=ADAM))
    site.period(0)
    before = sitestate.current_state(tmp_path).read_bytes()
    site.train(1)
    site.settle("refused_drop", 1)
    assert sitestate.current_state(tmp_path).read_bytes() == before
    assert not list(tmp_path.glob("update-*"))


def test_what_is_returned_is_added_to_the_next_update_once(tmp_path: Path):
    """Produced = applied + residual: a returned delta comes again, even after a repeated verdict."""
    plain = Site(tmp_path / "plain", Linear(), spec=make_spec(optimizer=ADAM))
    site = Site(tmp_path / "site", Linear(), spec=make_spec(optimizer=ADAM))
    first = plain.train(0)[1]["delta"]
    plain.settle("counted", 0)
    second = plain.train(1)[1]["delta"]

    site.train(0)
    update = site.folder / "update-1-0-1"
    copy = {path.name: path.read_bytes() for path in update.iterdir()}
    site.settle("refused_return", 0)
    update.mkdir()
    for name, raw in copy.items():
        (update / name).write_bytes(raw)  # as if it died before the folder was removed
    site.restart()
    site.settle("refused_return", 0)
    meta, parts = site.train(1)
    torch.testing.assert_close(parts["delta"], first + second)
    assert meta.norm == pytest.approx(float((first + second).norm()))
    site.settle("counted", 1)
    third = site.train(2)[1]["delta"]
    plain.settle("counted", 1)
    torch.testing.assert_close(third, plain.train(2)[1]["delta"])


def test_a_queued_update_that_is_voided_comes_back(tmp_path: Path):
    site = Site(tmp_path, Linear(), spec=make_spec())
    first = site.train(0)[1]["delta"]
    site.settle("queued", 0)
    assert read_value(sitestate.current_state(tmp_path))["update"] == "update-1-0-1"
    site.restart()
    site.settle("refused_return", 0)
    again = Site(tmp_path / "again", Linear(), spec=make_spec())
    again.train(0)
    again.settle("counted", 0)
    expected = first + again.train(1)[1]["delta"]
    torch.testing.assert_close(site.train(1)[1]["delta"], expected)


def test_a_queued_update_goes_when_the_next_period_begins(tmp_path: Path):
    site = Site(tmp_path, Linear(), spec=make_spec())
    site.train(0)
    site.settle("queued", 0)
    site.train(1)
    assert [path.name for path in tmp_path.glob("update-*")] == ["update-1-1-1"]


@pytest.mark.parametrize("seed", range(4))
def test_produced_is_applied_and_residual_and_discards_in_every_entry(tmp_path: Path, seed: int):
    """Over verdicts of every kind, with the worker killed between any two; a twin whose updates are
    never given back tells what each period produced.
    """
    rng = random.Random(seed)
    spec = make_spec(optimizer=ADAM)
    site = Site(tmp_path / "site", Linear(), spec=spec)
    twin = Site(tmp_path / "twin", Linear(), spec=spec)
    zero = torch.zeros_like(site.version["params"])
    produced, applied, discards, owed = zero.clone(), zero.clone(), zero.clone(), zero.clone()
    for clock in range(14):
        sent, made = site.train(clock)[1]["delta"], twin.train(clock)[1]["delta"]
        assert sent.equal(made + owed), "what was owed is in the next update, all of it"
        produced += made
        verdict = rng.choice(["counted", "queued", "refused_return", "refused_drop", "voided"])
        if verdict == "voided":
            site.settle("queued", clock)
        if rng.random() < 0.5:
            site.restart()
        site.settle("refused_return" if verdict == "voided" else verdict, clock)
        twin.settle("refused_drop" if verdict == "refused_drop" else "counted", clock)
        match verdict:
            case "refused_return" | "voided":
                owed = sent
            case "refused_drop":
                discards += made  # what was owed before is owed still
            case _:
                applied, owed = applied + sent, zero
        if rng.random() < 0.5:
            site.restart()
        residual = site.job.state.residual()
        torch.testing.assert_close(zero if residual is None else residual, owed, rtol=0, atol=0)
        torch.testing.assert_close(produced, applied + owed + discards)
        base = {name: part + 0.01 * clock for name, part in site.version.items()}
        for one in (site, twin):
            one.give(clock + 1, base)


class Diverging(Linear):
    def model(self) -> nn.Module:
        model = nn.Sequential()
        model.add_module("body", nn.Linear(4, 2))
        model.add_module("head", nn.Linear(2, 2))
        return model

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) * (float("nan") if self.options.get("nan") else 1.0)


def test_a_nan_fails_the_period_with_the_tensors_name_and_the_next_one_is_clean(tmp_path: Path):
    site = Site(tmp_path, Diverging(), spec=make_spec())
    expected = site.train(0)[1]["delta"]
    site.settle("refused_drop", 0)
    site.task.options = {"nan": 1}
    with pytest.raises(RefusedError, match=r"'body\.weight' holds 8 values of 8"):
        site.train(0, attempt=2)
    site.task.options = {}
    assert site.train(0, attempt=3)[1]["delta"].equal(expected)


class Unstable(Linear):
    """Changes the make-up of its model."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        model.bias = None
        return loss


def test_a_tensor_that_is_gone_after_a_period_is_refused_by_name(tmp_path: Path):
    """PC-005 (site side): nothing is sent for a model that lost 'bias'."""
    site = Site(tmp_path, Unstable(), spec=make_spec())
    with pytest.raises(ConflictError, match="'bias' is missing"):
        site.train(0, steps=1)
    assert not list(tmp_path.glob("update-*"))


class Adapter(Linear):
    """A frozen base with a small trainable head."""

    def model(self) -> nn.Module:
        base = nn.Linear(4, 4)
        base.requires_grad_(False)
        base.weight.fill_(float(self.options.get("base", 0.5)))
        return nn.Sequential(base, nn.Linear(4, 2))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if self.options.get("cheat"):
            with torch.no_grad():
                model[0].weight += 1  # type: ignore[index]
        return super().loss(model, batch)


def test_only_the_adapter_travels_and_the_base_stays_byte_identical(tmp_path: Path):
    """PC-012: the base is untouched after training; another base is refused by its fingerprint."""
    site = Site(tmp_path / "a", Adapter(), spec=make_spec())
    before = site.job.bench.tensors["0.weight"].clone()
    _, parts = site.period(0)
    assert parts["delta"].numel() == 10
    assert site.job.bench.tensors["0.weight"].equal(before)
    other = Site(tmp_path / "b", Adapter({"base": 0.25}), spec=make_spec())
    with pytest.raises(ConflictError, match="start from the same base model"):
        other.job.load_base(make_train(site.base, site.digest))


def test_a_task_that_trains_what_it_froze_is_refused(tmp_path: Path):
    site = Site(tmp_path, Adapter({"cheat": 1}), spec=make_spec())
    with pytest.raises(ConflictError, match="do not require a gradient"):
        site.train(0)


def test_personal_layers_train_stay_here_and_survive_a_restart(tmp_path: Path):
    spec = make_spec(local=Local(personal=("head.*",)), optimizer=ADAM)
    site = Site(tmp_path, Diverging(), spec=spec)
    first = site.job.bench.tensors["head.weight"].clone()
    _, parts = site.period(0)
    assert parts["delta"].numel() == 10
    trained = site.job.bench.tensors["head.weight"].clone()
    assert not trained.equal(first)
    site.restart()
    assert site.job.bench.tensors["head.weight"].equal(trained)
    site.train(1)
    site.settle("refused_drop", 1)
    site.job.load_base(make_train(site.base, site.digest))
    assert site.job.bench.tensors["head.weight"].equal(trained)


def test_local_buffers_keep_their_own_statistics(tmp_path: Path):
    spec = make_spec(buffers=Buffers(mix="local"))
    site = Site(tmp_path, Normed(), spec=spec)
    _, parts = site.period(0)
    assert parts["buffers"].numel() == parts["ints"].numel() == 0
    mean = site.job.bench.tensors["1.running_mean"].clone()
    assert mean.abs().sum() > 0
    site.restart()
    assert site.job.bench.tensors["1.running_mean"].equal(mean)


class Tied(Task):
    def model(self) -> nn.Module:
        model = nn.Module()
        model.embedding = nn.Embedding(4, 3)
        model.out = nn.Linear(3, 4, bias=False)
        model.out.weight = model.embedding.weight
        return model

    def data(self, site: SiteContext) -> Data:
        return Data(train=TensorDataset(torch.arange(4), torch.arange(4)))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        scores = model.out(model.embedding(batch[0]))  # type: ignore[operator]
        return nn.functional.cross_entropy(scores, batch[1])


def test_tied_weights_are_sent_once_and_stay_tied_through_a_restart(tmp_path: Path):
    """PC-010: 12 values travel; after each download both names share one storage."""
    site = Site(tmp_path, Tied(), spec=make_spec())
    for clock in range(2):
        _, parts = site.period(clock)
        assert parts["delta"].numel() == 12
        site.restart()
        site.job.load_base(make_train(site.base, site.digest, clock + 1))
        tensors = tensors_of(site.job.bench.model)
        assert tensors["out.weight"].data_ptr() == tensors["embedding.weight"].data_ptr()
        assert tensors["out.weight"].flatten().equal(site.version["params"])


class Half(Linear):
    """A model in another dtype."""

    def model(self) -> nn.Module:
        return nn.Linear(4, 2).to(getattr(torch, self.options["dtype"]))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(model(x.to(model.weight.dtype)).float(), y)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes_train_against_the_base_as_they_could_hold_it(tmp_path: Path, dtype: str):
    """PC-008, PC-009 (site side): float32 base, cast once; delta is the training alone."""
    site = Site(tmp_path, Half({"dtype": dtype}), spec=make_spec(optimizer=ADAM))
    base = site.version["params"] + 1e-5  # values between two numbers of the narrow types
    site.give(0, site.version | {"params": base})
    kind = getattr(torch, dtype)
    _, parts = site.train(0, steps=1)
    end = torch.cat([site.job.bench.tensors[name].flatten() for name in ("weight", "bias")])
    assert end.dtype == kind
    assert parts["delta"].equal((end.double() - base.to(kind).double()).float())
    assert parts["delta"].abs().max() > 0.01
    site.settle("counted")
    site.restart()
    assert site.train(1)[1]["delta"].isfinite().all()


def test_a_last_batch_of_one_is_merged_for_batchnorm_and_noted_once(tmp_path: Path):
    """PC-047: 33 examples in batches of 32: one batch of 33, said before round 1."""
    site = Site(tmp_path, Normed({"examples": 33}), spec=make_spec(batch=32))
    assert sum("merged into the batch before" in note for note in site.job.notes) == 1
    meta, _ = site.train(0, steps=0, epochs=1)
    assert meta.steps == 1
    assert meta.metrics["train_loss"].examples == 33


def test_a_single_example_and_batchnorm_are_refused_before_round_1(tmp_path: Path):
    """PC-047: one example in all is refused by the layer's name."""
    with pytest.raises(RefusedError, match="BatchNorm layer '1' cannot train"):
        Site(tmp_path, Normed({"examples": 1}), spec=make_spec())


class OwnLoader(Normed):
    def data(self, site: SiteContext) -> Data:
        return Data(train=DataLoader(examples(33), batch_size=32))


def test_a_loader_that_ends_with_one_example_is_refused_before_round_1(tmp_path: Path):
    """PC-047: a user's own loader cannot be merged: drop_last is named."""
    with pytest.raises(RefusedError, match="drop_last=True"):
        Site(tmp_path, OwnLoader(), spec=make_spec())


class NoData(Linear):
    def data(self, site: SiteContext) -> Data:
        return Data()


def test_a_site_without_data_loads_reports_zero_and_has_blank_metrics(tmp_path: Path):
    """PC-055 (site side): 0 training and 0 evaluation examples."""
    site = Site(tmp_path, NoData(), spec=make_spec())
    loaded = site.job.loaded()
    assert (loaded.train_examples, loaded.eval_examples) == (0, 0)
    assert site.job.evaluate_base() == (0.0, {})
    with pytest.raises(RefusedError, match="no training data"):
        site.train(0)


def test_an_evaluator_never_trains(tmp_path: Path):
    site = Site(tmp_path, Linear(), spec=make_spec(), role="evaluator")
    assert site.job.loaded().train_examples == 0
    assert site.job.evaluate_base()[0] == 8


def test_every_site_builds_the_same_first_model_and_orders_its_own_data(tmp_path: Path):
    a = Site(tmp_path / "a", Linear({"examples": 64}), site="a0", spec=make_spec())
    b = Site(tmp_path / "b", Linear({"examples": 64}), site="b0", spec=make_spec())
    assert a.digest == b.digest
    assert not a.train(0)[1]["delta"].equal(b.train(0)[1]["delta"])


def test_version_0_is_the_same_after_training_too(tmp_path: Path):
    site = Site(tmp_path, Normed(), spec=make_spec())
    first = site.digest
    site.period(0)
    again = tmp_path / "again.body"
    site.job.make_init(again)
    assert read_parts(again)[0].digest == first


class Strange(Linear):
    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        schedule.hook = object()
        return schedule


def test_a_schedule_that_cannot_be_kept_is_refused_at_loading(tmp_path: Path):
    with pytest.raises(UsageError, match=r"schedule/hook is a builtins\.object"):
        Site(tmp_path, Strange(), spec=make_spec())


def test_a_model_that_cannot_travel_is_refused_at_loading(tmp_path: Path):
    class Complex(Linear):
        def model(self) -> nn.Module:
            return nn.Linear(4, 2, dtype=torch.complex64)

    with pytest.raises(InvalidFileError, match="weight: found complex"):
        Site(tmp_path, Complex(), spec=make_spec())


@pytest.mark.parametrize("killed_at", ["new_update", "write_record", "settle"])
def test_a_death_at_any_point_leaves_a_state_that_goes_on(
    tmp_path: Path, killed_at: str, monkeypatch: pytest.MonkeyPatch
):
    spec = make_spec(optimizer=ADAM)
    whole = Site(tmp_path / "whole", Linear(), spec=spec)
    site = Site(tmp_path / "site", Linear(), spec=spec)
    for one in (whole, site):
        one.period(0)
    expected = whole.period(1)[1]["delta"]

    def die(*_: object, **__: object) -> None:
        raise CrashError

    with monkeypatch.context() as patch:
        if killed_at == "settle":
            patch.setattr(sitestate, "_remove", die)
            site.train(1)
        else:
            patch.setattr(sitestate, killed_at, die)
        call = (
            (lambda: site.settle("counted", 1)) if killed_at == "settle" else lambda: site.train(1)
        )
        with pytest.raises(CrashError):
            call()
    site.restart()
    if killed_at == "settle":
        site.settle("duplicate", 1)
        assert read_value(sitestate.current_state(site.folder))["update"] == "update-1-1-1"
    else:
        assert site.train(1)[1]["delta"].equal(expected)
    assert not list(site.folder.glob(".tmp-*"))
