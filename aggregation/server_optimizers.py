"""Server optimizers: one step per version on the pseudo-gradient g = -mean(delta).

Each is an (init, step) pair. The state is a value: a dictionary of flat tensors as long as the
parameters, empty for plain averaging; it is what a checkpoint holds besides the model. `step` works
in place on tiles of parameters and state and uses `gradient` as scratch; every operation is
elementwise, so any tiling gives the same bits. Only trainable parameters come here: buffers are
mixed, never stepped.

Sources: Hsu et al., arXiv 1909.06335 (momentum); Douillard et al., DiLoCo, arXiv 2311.08105
(Nesterov, lr 0.7, momentum 0.9); Liu et al., arXiv 2401.09135, algorithm 3 with c = 0 (delayed
Nesterov); Reddi et al., Adaptive Federated Optimization, arXiv 2003.00295,
algorithm 2 (Adagrad without momentum, Adam, Yogi: no bias correction, v starts at tau^2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from protocol.jobspec import JobSpec

State = dict[str, torch.Tensor]


class ServerOptimizer(NamedTuple):
    """`init(elements)` makes the state; `step(state, params, gradient)` moves params in place.

    `slots` names the state's tensors; with none, a version is its own whole state.
    """

    slots: tuple[str, ...]
    init: Callable[[int], State]
    step: Callable[[State, torch.Tensor, torch.Tensor], None]


def average(lr: float = 1.0) -> ServerOptimizer:
    """Averaging: x <- x + lr * mean(delta); lr 1 is plain parameter averaging."""

    def step(state: State, params: torch.Tensor, gradient: torch.Tensor) -> None:
        del state
        params.add_(gradient, alpha=-lr)

    return ServerOptimizer((), _empty, step)


def momentum(lr: float = 1.0, beta: float = 0.9) -> ServerOptimizer:
    """FedAvgM: b <- beta b + g; x <- x - lr b."""

    def step(state: State, params: torch.Tensor, gradient: torch.Tensor) -> None:
        buffer = state["momentum"]
        buffer.mul_(beta).add_(gradient)
        params.add_(buffer, alpha=-lr)

    return ServerOptimizer(("momentum",), _zeros("momentum"), step)


def nesterov(lr: float = 0.7, beta: float = 0.9) -> ServerOptimizer:
    """DiLoCo: b <- beta b + g; x <- x - lr (g + beta b), as `torch.optim.SGD(nesterov=True)`."""

    def step(state: State, params: torch.Tensor, gradient: torch.Tensor) -> None:
        buffer = state["momentum"]
        buffer.mul_(beta).add_(gradient)
        gradient.add_(buffer, alpha=beta)
        params.add_(gradient, alpha=-lr)

    return ServerOptimizer(("momentum",), _zeros("momentum"), step)


def delayed_nesterov(
    lr: float = 0.7, beta: float = 0.9, *, refreshes: bool = True
) -> ServerOptimizer:
    """Nesterov where one step is not one cohort: x <- x - lr g at every version, and at every N-th,
    which `refreshes` the momentum, b <- beta b + sum of the last N g; x <- x - lr (g + beta b).

    So N versions together make one Nesterov step on their sum, and no single stale update is
    amplified by the momentum. The paper divides each g by N; here the coefficients of a commit do
    (1/n or 1/K), so with N = n the two are the same. With N = 1 it is `nesterov`, to the bit.
    """

    def step(state: State, params: torch.Tensor, gradient: torch.Tensor) -> None:
        buffered = state["buffered"]
        if refreshes:
            momentum = state["momentum"]
            momentum.mul_(beta).add_(buffered.add_(gradient))
            buffered.zero_()
            gradient.add_(momentum, alpha=beta)
        else:
            buffered.add_(gradient)
        params.add_(gradient, alpha=-lr)

    return ServerOptimizer(("momentum", "buffered"), _zeros("momentum", "buffered"), step)


def adagrad(lr: float = 0.1, tau: float = 1e-3) -> ServerOptimizer:
    """FedAdagrad: v <- v + g^2; x <- x - lr g / (sqrt(v) + tau)."""

    def step(state: State, params: torch.Tensor, gradient: torch.Tensor) -> None:
        second = state["second"]
        second.addcmul_(gradient, gradient)
        params.addcdiv_(gradient, second.sqrt().add_(tau), value=-lr)

    return ServerOptimizer(("second",), _second(tau), step)


def adam(
    lr: float = 0.1, betas: tuple[float, float] = (0.9, 0.99), tau: float = 1e-3
) -> ServerOptimizer:
    """FedAdam: m, v are exponential means of g and g^2; x <- x - lr m / (sqrt(v) + tau)."""
    first_decay, second_decay = betas

    def step(state: State, params: torch.Tensor, gradient: torch.Tensor) -> None:
        first, second = state["first"], state["second"]
        first.mul_(first_decay).add_(gradient, alpha=1.0 - first_decay)
        second.mul_(second_decay).addcmul_(gradient, gradient, value=1.0 - second_decay)
        params.addcdiv_(first, second.sqrt().add_(tau), value=-lr)

    return ServerOptimizer(("first", "second"), _moments(tau), step)


def yogi(
    lr: float = 0.1, betas: tuple[float, float] = (0.9, 0.99), tau: float = 1e-3
) -> ServerOptimizer:
    """FedYogi: as Adam, but v <- v - (1 - beta2) g^2 sign(v - g^2)."""
    first_decay, second_decay = betas

    def step(state: State, params: torch.Tensor, gradient: torch.Tensor) -> None:
        first, second = state["first"], state["second"]
        first.mul_(first_decay).add_(gradient, alpha=1.0 - first_decay)
        square = gradient.mul_(gradient)
        direction = (second - square).sign_()
        second.addcmul_(square, direction, value=second_decay - 1.0)
        params.addcdiv_(first, second.sqrt().add_(tau), value=-lr)

    return ServerOptimizer(("first", "second"), _moments(tau), step)


def for_job(spec: JobSpec, version: int = 0) -> ServerOptimizer:
    """The server optimizer that a job asks for, with its defaults filled in; its step is the one
    that makes `version`.
    """
    server, lr = spec.server, spec.server_lr
    match server.optimizer:
        case "average":
            return average(lr)
        case "momentum":
            return momentum(lr, server.momentum)
        case "nesterov":
            return nesterov(lr, server.momentum)
        case "delayed_nesterov":
            refreshes = version % server.delay == 0
            return delayed_nesterov(lr, server.momentum, refreshes=refreshes)
        case "adagrad":
            return adagrad(lr, server.tau)
        case "adam":
            return adam(lr, server.betas, server.tau)
        case "yogi":
            return yogi(lr, server.betas, server.tau)


def tile_of(state: State, span: slice) -> State:
    """Views of the same tile of every tensor of the state."""
    return {name: flat[span] for name, flat in state.items()}


def _empty(elements: int) -> State:
    del elements
    return {}


def _zeros(*names: str) -> Callable[[int], State]:
    return lambda elements: {name: torch.zeros(elements) for name in names}


def _second(tau: float) -> Callable[[int], State]:
    return lambda elements: {"second": torch.full((elements,), tau * tau)}


def _moments(tau: float) -> Callable[[int], State]:
    return lambda elements: {
        "first": torch.zeros(elements),
        "second": torch.full((elements,), tau * tau),
    }
