# ruff: noqa: D101, D102, D103, ARG002  a script as people write them
"""An ordinary PyTorch training script: digits from scikit-learn, an MLP, Adam."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import skerry


def load(test_fraction: float = 0.2) -> tuple[DataLoader, DataLoader]:
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32) / 16
    everything = TensorDataset(images, torch.tensor(bunch.target))
    held_out = int(len(everything) * test_fraction)
    generator = torch.Generator().manual_seed(0)
    train, test = random_split(everything, [len(everything) - held_out, held_out], generator)
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=256)


def build() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(64, 10),
    )


def smoothed_loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(images), labels, label_smoothing=0.05)


class Ported(skerry.Task):
    def model(self) -> nn.Module:
        return build()

    def data(self, site: skerry.SiteContext) -> skerry.Data:
        train, test = load()
        return skerry.Data(train=train, test=test)

    def loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return smoothed_loss(model, *batch)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-3)
