"""FedProx on its synthetic data sets: the published direction, with paired seeds.

Data follow the authors' generator (Li et al., MLSys 2020, arXiv 1812.06127, section 5.1 and its
code): 30 devices, n_k = int(LogNormal(4, 2)) + 50, 60 features, 10 classes, x ~ N(v_k, Sigma) with
Sigma_jj = j^-1.2, y = argmax(W_k x + b_k); alpha and beta are standard deviations, as in the code.
Training: softmax regression, lr 0.01, batch 10, 20 local epochs, 10 of 30 devices a round, weight
by n_k. Stragglers finish uniform {1..19} epochs: FedAvg drops them, FedProx keeps them.

The local solver is numpy, because two million steps of ten examples each are all call overhead;
that it equals the worker's training is asserted in `tests/benchmarks/test_fedprox.py`. The mean is
the platform's own accumulator.
"""

from __future__ import annotations

import dataclasses
import statistics
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from aggregation.fold import Accumulator

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

DEVICES: Final = 30
PER_ROUND: Final = 10
FEATURES: Final = 60
CLASSES: Final = 10
EPOCHS: Final = 20
BATCH: Final = 10
LR: Final = 0.01


class Device(NamedTuple):
    """One device's data: x [n, 60], y [n], and its part of the pooled test set."""

    x: Array
    y: Ints
    test_x: Array
    test_y: Ints


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of the table. `mu` None is FedAvg, which drops stragglers."""

    data: str
    stragglers: float
    mu: float | None

    @property
    def name(self) -> str:
        """Key of the row in the result."""
        rule = "fedavg" if self.mu is None else f"fedprox_mu{self.mu:g}"
        return f"{self.data}/{round(self.stragglers * 100)}%/{rule}"


SETTINGS: Final = (
    Setting("1,1", 0.0, None),
    Setting("1,1", 0.0, 1.0),
    Setting("1,1", 0.9, None),
    Setting("1,1", 0.9, 0.0),
    Setting("1,1", 0.9, 1.0),
    Setting("iid", 0.0, None),
    Setting("iid", 0.0, 1.0),
)


def synthetic(data: str, seed: int, size_max: int = 10_000) -> list[Device]:
    """The devices of one data seed. `size_max` cuts the log-normal's extreme tail, for time."""
    rng = np.random.default_rng(seed)
    sizes = np.minimum(rng.lognormal(4, 2, DEVICES).astype(int) + 50, size_max)
    iid = data == "iid"
    alpha, beta = (0.0, 0.0) if iid else tuple(float(part) for part in data.split(","))
    scale = np.arange(1, FEATURES + 1) ** -0.6  # square root of Sigma's diagonal
    shared_w, shared_b = rng.normal(0, 1, (FEATURES, CLASSES)), rng.normal(0, 1, CLASSES)
    u = rng.normal(0, alpha, DEVICES)
    centre = rng.normal(0, beta, DEVICES)
    devices = []
    for k, size in enumerate(sizes):
        w, b = shared_w, shared_b
        v: Array = np.zeros(FEATURES)
        if not iid:
            w = rng.normal(u[k], 1, (FEATURES, CLASSES))
            b = rng.normal(u[k], 1, CLASSES)
            v = rng.normal(centre[k], 1, FEATURES)
        x = v + rng.normal(0, 1, (size, FEATURES)) * scale
        y = np.argmax(x @ w + b, axis=1)
        cut = int(0.9 * size)
        devices.append(Device(x[:cut], y[:cut], x[cut:], y[cut:]))
    return devices


def local_sgd(
    start: Array, device: Device, epochs: int, mu: float, rng: np.random.Generator
) -> Array:
    """`epochs` passes of minibatch SGD from `start` [61, 10] (last row is the bias), with the
    proximal gradient mu (w - start).
    """
    x = np.concatenate([device.x, np.ones((len(device.x), 1))], axis=1)
    onehot = np.eye(CLASSES)[device.y]
    w = start.copy()
    for _ in range(epochs):
        order = rng.permutation(len(x))
        for begin in range(0, len(x), BATCH):
            rows = order[begin : begin + BATCH]
            part = x[rows]
            scores = part @ w
            np.exp(scores - scores.max(axis=1, keepdims=True), out=scores)
            scores /= scores.sum(axis=1, keepdims=True)
            scores -= onehot[rows]
            step = part.T @ scores
            step /= len(rows)
            if mu:
                step += mu * (w - start)
            step *= LR
            w -= step
    return w


def quality(w: Array, devices: list[Device]) -> tuple[float, float]:
    """Accuracy on the pooled test set, and mean training loss over all devices' data."""
    test_x = np.concatenate([d.test_x for d in devices])
    test_y = np.concatenate([d.test_y for d in devices])
    accuracy = float((np.argmax(test_x @ w[:-1] + w[-1], axis=1) == test_y).mean())
    x, y = np.concatenate([d.x for d in devices]), np.concatenate([d.y for d in devices])
    scores = x @ w[:-1] + w[-1]
    scores -= scores.max(axis=1, keepdims=True)
    loss = float((np.log(np.exp(scores).sum(axis=1)) - scores[np.arange(len(y)), y]).mean())
    return accuracy, loss


class Curve(NamedTuple):
    """One run: means over the last 20 rounds, accuracy at round 50, and the late jitter."""

    accuracy: float
    loss: float
    accuracy_50: float
    jitter: float


def run_one(setting: Setting, seed: int, rounds: int) -> Curve:
    """Train one setting. Choice of devices and stragglers depends on the seed alone."""
    devices = synthetic(setting.data, seed)
    w: Array = np.zeros((FEATURES + 1, CLASSES))
    accuracies, losses = [], []
    for number in range(rounds):
        draw = np.random.default_rng([seed, number])
        chosen = sorted(draw.choice(DEVICES, PER_ROUND, replace=False).tolist())
        late = set(draw.choice(chosen, round(setting.stragglers * PER_ROUND), False).tolist())
        partial = {k: int(draw.integers(1, EPOCHS)) for k in chosen}
        sums, weights = Accumulator({"delta": w.size}), 0.0
        for k in chosen:
            if k in late and setting.mu is None:
                continue
            epochs = partial[k] if k in late else EPOCHS
            order = np.random.default_rng([seed, number, k])
            end = local_sgd(w, devices[k], epochs, setting.mu or 0.0, order)
            delta = torch.from_numpy((end - w).astype(np.float32).ravel())
            sums.add_values("delta", 0, delta, float(len(devices[k].y)))
            weights += len(devices[k].y)
        w = w + (sums.sums["delta"] / weights).numpy().reshape(w.shape)
        if number >= rounds - 50 or number == 49:
            accuracy, loss = quality(w, devices)
            accuracies.append((number, accuracy))
            losses.append((number, loss))
    last = [value for number, value in accuracies if number >= rounds - 20]
    late_values = [value for number, value in accuracies if number >= rounds - 50]
    return Curve(
        accuracy=statistics.fmean(last),
        loss=statistics.fmean(value for number, value in losses if number >= rounds - 20),
        accuracy_50=next((value for number, value in accuracies if number == 49), float("nan")),
        jitter=statistics.pstdev(late_values),
    )


BARS: Final[dict[str, str]] = {}


def run(*, quick: bool) -> dict[str, Any]:
    """The table: 4 paired seeds and 200 rounds (quick: 1 seed, 60 rounds, the 90 % rows)."""
    seeds = [0] if quick else [0, 1, 2, 3]
    rounds = 60 if quick else 200
    settings = [s for s in SETTINGS if s.stragglers] if quick else list(SETTINGS)
    with ProcessPoolExecutor(2) as pool:
        futures = {
            (setting.name, seed): pool.submit(run_one, setting, seed, rounds)
            for setting in settings
            for seed in seeds
        }
        curves = {key: future.result() for key, future in futures.items()}
    table = {}
    for setting in settings:
        rows = [curves[setting.name, seed] for seed in seeds]
        table[setting.name] = {
            field: round(statistics.fmean(getattr(row, field) for row in rows), 4)
            for field in Curve._fields
        }
    gains = {
        point: [
            getattr(curves["1,1/90%/fedprox_mu1", seed], point)
            - getattr(curves["1,1/90%/fedavg", seed], point)
            for seed in seeds
        ]
        for point in ("accuracy_50", "accuracy")
    }
    return {
        "seeds": len(seeds),
        "rounds": rounds,
        "table": table,
        "gain_90_round_50": round(statistics.fmean(gains["accuracy_50"]), 4),
        "gain_90_end": round(statistics.fmean(gains["accuracy"]), 4),
        "seeds_positive_round_50": sum(gain > 0 for gain in gains["accuracy_50"]),
    }
