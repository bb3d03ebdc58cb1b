"""Evaluation of a model on a site's own test data; it leaves no trace in the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from client.seeds import seeded
from client.stream import sequential_batches
from client.task import Task
from client.tensors import tensors_of
from protocol.errors import ConflictError, UsageError
from protocol.metrics import Metric, Reduction, check_metrics, metric

# No gradients are kept, so that a test batch may be larger than a training batch.
BATCH_FACTOR: Final = 4


class _Running:
    """One metric over the batches of one evaluation."""

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        self.text: str | None = None
        self.value: float | None = None
        self.examples = 0

    def add(self, value: float | str | None, examples: int) -> None:
        if value is None:
            return
        if isinstance(value, str):
            self.text = value
            self.examples += examples
            return
        weighted = value * examples if self.reduction == "mean" else value
        if self.value is None:
            self.value = weighted
        elif math.isnan(self.value) or math.isnan(weighted):
            self.value = math.nan
        elif self.reduction in ("mean", "sum"):
            self.value += weighted
        else:
            self.value = (min if self.reduction == "min" else max)(self.value, weighted)
        self.examples += examples

    def result(self) -> Metric:
        value = self.value
        if value is not None and self.reduction == "mean":
            value /= self.examples
        return metric(self.text if value is None else value, self.examples, self.reduction)


def evaluate(
    task: Task, model: nn.Module, data: Any, *, device: torch.device, batch_size: int
) -> tuple[float, dict[str, Metric]]:
    """Examples behind the evaluation, and the metrics; 0 and none without test data.

    Values are combined over batches by the task's reductions; NaN is reported, never hidden. The
    model is in evaluation mode, without gradients, and its random numbers are the same every time.

    Raises:
        ConflictError: the task's metrics changed a tensor of the model.
        UsageError: a metric that is no number, 0-dim tensor or text.
    """
    if data is None:
        return 0.0, {}
    before = _versions(model)
    training = {module: module.training for module in model.modules()}
    running: dict[str, _Running] = {}
    examples = 0
    model.eval()
    try:
        with torch.no_grad(), seeded(0):
            for batch in sequential_batches(data, batch_size):
                moved = task.to_device(batch, device)
                count = task.batch_examples(moved)
                if not count:
                    continue
                examples += count
                for name, value in task.metrics(model, moved).items():
                    if name not in running:
                        running[name] = _Running(task.reductions.get(name, "mean"))
                    running[name].add(_plain(name, value), count)
    finally:
        for module, mode in training.items():
            module.training = mode
    after = _versions(model)
    changed = [name for name, version in before.items() if after.get(name) != version]
    if changed or len(after) != len(before):
        raise ConflictError(
            f"{type(task).__name__}.metrics changed the model: {', '.join(changed[:5])}.",
            "Evaluation must leave every tensor as it is.",
        )
    metrics = {name: item.result() for name, item in running.items()}
    check_metrics(metrics)
    return float(examples), metrics


def _versions(model: nn.Module) -> Mapping[str, tuple[int, int]]:
    """Which memory each tensor has, and how often it was written to."""
    return {
        name: (t.data_ptr(), t._version)  # noqa: SLF001  the only way to see a write
        for name, t in tensors_of(model).items()
    }


def _plain(name: str, value: Any) -> float | str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Tensor) and value.numel() != 1:
        raise UsageError(
            f"metric {name!r} is a tensor of shape {tuple(value.shape)}; give one number a batch."
        )
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(
            f"metric {name!r} is a {type(value).__name__}; give a number, a 0-dim tensor or text."
        ) from None
