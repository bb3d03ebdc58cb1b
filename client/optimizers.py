"""The optimizer inside a site, and what its steps amount to."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from protocol.jobspec import Optimizer as OptimizerSpec


def make_optimizer(spec: OptimizerSpec, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimizer that the job names, over a model's trainable parameters."""
    params = list(parameters)
    if spec.name == "sgd":
        return torch.optim.SGD(
            params,
            lr=spec.lr,
            momentum=spec.momentum,
            nesterov=spec.nesterov,
            weight_decay=spec.weight_decay,
        )
    kind = torch.optim.Adam if spec.name == "adam" else torch.optim.AdamW
    return kind(params, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay)


class UnitRun:
    """How far a period would have moved under a constant gradient of 1.

    It runs the optimizer's own recursion on one number, with the FedProx term and the learning
    rate of every step. `distance` is sum_t lr_t a_t: SCAFFOLD's K eta. Divided by the mean learning
    rate it is the L1 norm of a_k in FedNova (arXiv 2007.07481, section 4: momentum and proximal
    solvers are special cases). Adaptive optimizers have no such a_k: every step counts as one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, prox: float, velocity: float) -> None:
        group = optimizer.param_groups[0]
        self._is_sgd = isinstance(optimizer, torch.optim.SGD)
        self._momentum = float(group.get("momentum", 0.0)) if self._is_sgd else 0.0
        self._nesterov = bool(group.get("nesterov", False))
        self._prox = prox
        self._lr_sum = 0.0
        self.velocity = velocity
        self.distance = 0.0
        self.steps = 0

    def step(self, lr: float) -> None:
        """Count one local step at this learning rate."""
        gradient = 1.0 - self._prox * self.distance
        if self._is_sgd:
            self.velocity = self._momentum * self.velocity + gradient
            gradient = gradient + self._momentum * self.velocity if self._nesterov else (
                self.velocity
            )  # fmt: skip
        self.distance += lr * gradient
        self._lr_sum += lr
        self.steps += 1

    @property
    def effective_steps(self) -> float:
        """L1 norm of a_k; equal to `steps` for plain SGD."""
        if not self._is_sgd or self._lr_sum == 0.0:
            return float(self.steps)
        return max(self.distance * self.steps / self._lr_sum, 0.0)


def learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """Learning rate of the first parameter group, now."""
    return float(optimizer.param_groups[0]["lr"])
