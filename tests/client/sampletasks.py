"""Small tasks for tests: loaded by the worker process from this file, or built in a test."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from client.task import Data, SiteContext, Task


def examples(count: int, seed: int = 0, width: int = 4) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


class Linear(Task):
    """Logistic regression on data that depends on the site's name."""

    def model(self) -> nn.Module:
        return nn.Linear(4, 2)

    def data(self, site: SiteContext) -> Data:
        seed = int(site.name[-1]) if site.name[-1].isdigit() else 0
        count = int(self.options.get("examples", 12))
        return Data(train=examples(count, seed), test=examples(8, 99))


class Constant(Task):
    """One weight with the gradient 1 at every step."""

    def model(self) -> nn.Module:
        model = nn.Module()
        model.w = nn.Parameter(torch.tensor([1.0]))
        return model

    def data(self, site: SiteContext) -> Data:
        return Data(train=TensorDataset(torch.zeros(8, 1)))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model.w.sum()  # type: ignore[union-attr, operator]


class Normed(Linear):
    """BatchNorm and dropout."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 2)
        )


class Loaders(Linear):
    """A DataLoader of the task's own, with processes."""

    def data(self, site: SiteContext) -> Data:
        workers = int(self.options.get("workers", 0))
        train = DataLoader(examples(12), batch_size=4, shuffle=True, num_workers=workers)
        return Data(train=train, test=None)


class Broken(Linear):
    """Raises in its loss."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, _ = batch
        print("loss was called")
        return model(inputs @ torch.zeros(3, 3)).sum()
