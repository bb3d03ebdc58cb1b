from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from client.evaluation import evaluate
from client.task import Task
from client.tensors import byte_view
from protocol.errors import ConflictError, MalformedError, UsageError
from tests.client.localjobs import Site
from tests.client.sampletasks import Linear, Normed, examples
from tests.client.workerprocess import make_spec, make_train

CPU = torch.device("cpu")


def state_hash(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(byte_view(tensor))
    return digest.hexdigest()


def test_evaluation_leaves_no_trace_and_repeats_exactly():
    """PC-053: BatchNorm and dropout: equal hash before and after, equal values, no draw taken."""
    task = Normed()
    model = task.model()
    model.train()
    before, random = state_hash(model), torch.get_rng_state()
    first = evaluate(task, model, examples(10), device=CPU, batch_size=4)
    second = evaluate(task, model, examples(10), device=CPU, batch_size=4)
    assert first == second
    assert first[0] == 10
    assert state_hash(model) == before
    assert torch.get_rng_state().equal(random)
    assert all(module.training for module in model.modules())


def test_an_empty_test_set_is_not_available():
    """PC-053: 0 test examples give no metrics at all."""
    task = Linear()
    assert evaluate(task, task.model(), examples(0), device=CPU, batch_size=4) == (0.0, {})
    assert evaluate(task, task.model(), None, device=CPU, batch_size=4) == (0.0, {})


def test_evaluating_in_between_does_not_change_the_training(tmp_path: Path):
    """PC-053: with and without evaluations the update has the same bits."""
    plain = Site(tmp_path / "a", Normed(), spec=make_spec())
    seen = Site(tmp_path / "b", Normed(), spec=make_spec())
    for clock in range(2):
        seen.job.load_base(make_train(seen.base, seen.digest, clock))
        seen.job.evaluate_base()
        a, b = plain.period(clock)[1], seen.period(clock)[1]
        assert a["delta"].equal(b["delta"])
        assert a["buffers"].equal(b["buffers"])


class Reported(Task):
    """Metrics are taken from the batch itself: one row per example."""

    reductions: ClassVar[Mapping[str, Any]] = {"total": "sum", "least": "min", "most": "max"}

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        (values,) = batch
        mean = values.mean()
        return {
            "mean": mean,
            "total": float(values.sum()),
            "least": values.min(),
            "most": values.max().item(),
            "label": "north",
            "maybe": None if float(mean) > 2 else 1,
        }


def values_of(*values: float) -> dict[str, Any]:
    task = Reported()
    data = TensorDataset(torch.tensor(values))
    return evaluate(task, task.model(), data, device=CPU, batch_size=2)[1]


def test_batches_are_combined_by_the_tasks_reductions():
    metrics = values_of(1.0, 2.0, 6.0)
    assert metrics["mean"].value == pytest.approx(3.0)  # by examples, not by batches
    assert metrics["total"].value == 9.0
    assert (metrics["least"].value, metrics["most"].value) == (1.0, 6.0)
    assert metrics["total"].reduction == "sum"
    assert metrics["label"].value == "north"
    assert (metrics["maybe"].value, metrics["maybe"].examples) == (1.0, 2)
    assert metrics["mean"].examples == 3


def test_a_nan_is_reported_and_not_hidden():
    metrics = values_of(1.0, 2.0, float("nan"), 4.0, 9.0)
    for name in ("mean", "total", "least", "most"):
        assert metrics[name].nonfinite == "nan", name
        assert metrics[name].value is None


class Meddling(Linear):
    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        model.weight.add_(1)
        return {}


def test_metrics_that_write_to_the_model_are_refused_by_name():
    task = Meddling()
    with pytest.raises(ConflictError, match=r"metrics changed the model: weight"):
        evaluate(task, task.model(), examples(4), device=CPU, batch_size=4)


class Odd(Linear):
    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        return {str(self.options["name"]): self.options["value"]}


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("m", torch.zeros(3), UsageError, r"shape \(3,\)"),
        ("m", object(), UsageError, "is a object"),
        ("", 1.0, MalformedError, "empty or too long"),
    ],
)
def test_what_is_no_metric_is_refused_by_name(
    name: str, value: Any, error: type[Exception], words: str
):
    task = Odd({"name": name, "value": value})
    with pytest.raises(error, match=words):
        evaluate(task, task.model(), examples(4), device=CPU, batch_size=4)
