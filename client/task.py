"""What a user writes: a model, this site's data, a loss and metrics.

    import skerry
    from torch import nn

    class Digits(skerry.Task):
        def model(self):
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

        def data(self, site):
            return skerry.Data(train=my_train_set(site.data), test=my_test_set(site.data))

Loss and metrics have defaults for classification (`batch` is a pair of inputs and labels);
everything else is overridden by defining the method. Task code runs at sites only, in the worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from protocol.messages import SiteRole
from protocol.metrics import Reduction

if TYPE_CHECKING:
    import torch


class SiteContext(msgspec.Struct, frozen=True, kw_only=True):
    """Where the task runs.

    `data` is the path that the site's owner configured (or None), `options` are the owner's
    `key = value` settings, `seed` derives from the job's seed and the site's name.
    """

    name: str
    role: SiteRole
    job: str
    seed: int
    data: Path | None = None
    options: Mapping[str, str] = {}


class Data(msgspec.Struct, frozen=True, kw_only=True):
    """This site's data: map-style data sets, or iterables of batches such as a DataLoader.

    A data set (it has `__len__` and `__getitem__` of one example) is batched and shuffled by
    Skerry, by the job's batch size and the site's seed. A DataLoader or any other re-iterable of
    batches is taken as it is. `train` None: this site never trains. `test` None: it never
    evaluates.
    """

    train: Any = None
    test: Any = None


class Task:
    """Base class of all tasks. One object lives as long as the worker; `options` are the job's."""

    #: How a metric is combined over batches and sites: "mean" (by examples) unless named here.
    reductions: ClassVar[Mapping[str, Reduction]] = {}

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options: Mapping[str, Any] = dict(options or {})

    def model(self) -> torch.nn.Module:
        """Build the model. Called after seeding: the same seed gives the same model."""
        raise TypeError(f"{type(self).__name__} must define model(self).")

    def data(self, site: SiteContext) -> Data:
        """Load this site's data. Called once per worker."""
        del site
        raise TypeError(f"{type(self).__name__} must define data(self, site).")

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Mean loss of a batch, a scalar to differentiate. Default: cross entropy of (x, y)."""
        from torch.nn import functional  # noqa: PLC0415  the agent imports this module torch-free

        inputs, labels = batch
        return functional.cross_entropy(model(inputs), labels)

    def metrics(self, model: torch.nn.Module, batch: Any) -> Mapping[str, Any]:
        """Metrics of one test batch, means over its examples. Default: loss and accuracy.

        Called in evaluation mode without gradients. Values are numbers, 0-dim tensors or text.
        """
        from torch.nn import functional  # noqa: PLC0415

        inputs, labels = batch
        scores = model(inputs)
        return {
            "loss": functional.cross_entropy(scores, labels),
            "accuracy": (scores.argmax(dim=-1) == labels).float().mean(),
        }

    def batch_examples(self, batch: Any) -> int:
        """Number of examples in a batch. Default: length of its first tensor or first list."""
        while isinstance(batch, (tuple, list, Mapping)) and batch:
            first = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
            if isinstance(first, str) or not getattr(first, "ndim", hasattr(first, "__len__")):
                break  # plain numbers, 0-dim tensors or texts: one for each example
            batch = first
        return len(batch)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer | None:
        """The task's own optimizer over `model`'s trainable parameters; None: the job's."""
        del model
        return None

    def schedule(
        self, optimizer: torch.optim.Optimizer
    ) -> torch.optim.lr_scheduler.LRScheduler | None:
        """A learning-rate schedule, stepped once per local step; it goes on across periods."""
        del optimizer
        return None

    def to_device(self, batch: Any, device: torch.device) -> Any:
        """Move a batch to the training device. Default: tensors in tuples, lists and mappings."""
        if hasattr(batch, "to"):
            return batch.to(device, non_blocking=True)
        if isinstance(batch, Mapping):
            return {key: self.to_device(value, device) for key, value in batch.items()}
        if isinstance(batch, (tuple, list)):
            moved = [self.to_device(value, device) for value in batch]
            return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
        return batch
