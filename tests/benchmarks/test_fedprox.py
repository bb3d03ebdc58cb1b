"""The benchmark's fast solver is the worker's own training, and its data are the published ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.fedprox import CLASSES, FEATURES, LR, Device, local_sgd, synthetic
from client.task import Data, SiteContext, Task
from protocol.jobspec import Local, Optimizer
from tests.client.localjobs import Site
from tests.client.workerprocess import make_spec


class Softmax(Task):
    """Softmax regression that starts at zero, on one device's data."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def model(self) -> nn.Module:
        model = nn.Linear(FEATURES, CLASSES)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        return model

    def data(self, site: SiteContext) -> Data:
        return Data(
            train=TensorDataset(
                torch.from_numpy(self._device.x.astype(np.float32)),
                torch.from_numpy(self._device.y),
            )
        )


@pytest.mark.parametrize("mu", [0.0, 1.0])
def test_the_solver_equals_the_workers_training_with_and_without_the_proximal_term(
    tmp_path: Path, mu: float
):
    whole = synthetic("1,1", 0)[0]
    device = Device(whole.x[:10], whole.y[:10], whole.test_x, whole.test_y)  # one batch an epoch
    epochs = 12
    start = np.zeros((FEATURES + 1, CLASSES))
    ours = local_sgd(start, device, epochs, mu, np.random.default_rng(0))
    spec = make_spec(local=Local(prox=mu), optimizer=Optimizer(lr=LR, batch_size=10))
    site = Site(tmp_path, Softmax(device), spec=spec)
    _, parts = site.train(0, steps=0, epochs=epochs)
    weight, bias = parts["delta"].split([FEATURES * CLASSES, CLASSES])
    theirs = np.concatenate([weight.reshape(CLASSES, FEATURES).numpy().T, bias.numpy()[None]])
    np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-6)


def test_the_devices_have_the_published_sizes_and_labels():
    devices = synthetic("1,1", 0)
    assert len(devices) == 30
    assert all(len(d.y) + len(d.test_y) >= 50 for d in devices)
    assert all(
        len(d.test_y) == len(d.y) + len(d.test_y) - int(0.9 * (len(d.y) + len(d.test_y)))
        for d in devices
    )
    shared = synthetic("iid", 0)
    spread = np.std([d.x.mean() for d in devices]) / np.std([d.x.mean() for d in shared])
    assert spread > 10, "devices are centred apart in (1,1) and not in iid"
