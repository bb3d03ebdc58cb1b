# ruff: noqa: D103  a script as people write them
"""An ordinary PyTorch training script: digits from scikit-learn, an MLP, Adam."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


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


def main(epochs: int = 20) -> None:
    train, test = load()
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(epochs):
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            smoothed_loss(model, images, labels).backward()
            optimizer.step()
        model.eval()
        right = count = 0
        with torch.no_grad():
            for images, labels in test:
                right += int((model(images).argmax(1) == labels).sum())
                count += len(labels)
        print(f"epoch {epoch + 1}: accuracy {right / count:.3f}")


if __name__ == "__main__":
    main()
