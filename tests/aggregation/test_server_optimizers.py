from __future__ import annotations

import math

import pytest
import torch

from aggregation import server_optimizers
from aggregation.server_optimizers import (
    ServerOptimizer,
    adagrad,
    adam,
    average,
    delayed_nesterov,
    momentum,
    nesterov,
    tile_of,
    yogi,
)
from aggregation.tiles import TILE_ELEMENTS, spans
from protocol.jobspec import JobSpec, Server, TaskRef

ALL = {
    "average": average(0.5),
    "momentum": momentum(),
    "nesterov": nesterov(),
    "delayed_nesterov": delayed_nesterov(),
    "adagrad": adagrad(),
    "adam": adam(),
    "yogi": yogi(),
}


def gradients(n: int, rounds: int) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(n, generator=rng) for _ in range(rounds)]


def run(optimizer: ServerOptimizer, x: torch.Tensor, steps: list[torch.Tensor]) -> torch.Tensor:
    params, state = x.clone(), optimizer.init(x.numel())
    assert set(state) == set(optimizer.slots)
    for gradient in steps:
        optimizer.step(state, params, gradient.clone())
    return params


@pytest.mark.parametrize(("nest", "lr"), [(True, 0.7), (False, 1.0)])
def test_momentum_is_that_of_torch_bit_for_bit(nest: bool, lr: float):
    x, steps = torch.linspace(-1, 1, 1000), gradients(1000, 6)
    reference = torch.nn.Parameter(x.clone())
    sgd = torch.optim.SGD([reference], lr=lr, momentum=0.9, nesterov=nest)
    for gradient in steps:
        reference.grad = gradient.clone()
        sgd.step()
    ours = run(nesterov() if nest else momentum(), x, steps)
    assert torch.equal(ours, reference.detach())


def test_averaging_with_lr_one_is_the_mean_model():
    base, sites = torch.tensor([1.0, 2.0]), torch.tensor([[2.0, 2.0], [4.0, 0.0]])
    gradient = -(sites - base).mean(0)
    assert run(average(), base, [gradient]).tolist() == [3.0, 1.0]


@pytest.mark.parametrize("kind", ["adagrad", "adam", "yogi"])
def test_adaptive_steps_follow_the_paper_by_hand(kind: str):
    lr, b1, b2, tau = 0.1, 0.9, 0.99, 1e-3
    x, m, v = 1.0, 0.0, tau * tau
    deltas = [0.2, -0.1, 0.05]
    for d in deltas:
        m = d if kind == "adagrad" else b1 * m + (1 - b1) * d
        if kind == "adagrad":
            v += d * d
        elif kind == "adam":
            v = b2 * v + (1 - b2) * d * d
        else:
            v -= (1 - b2) * d * d * math.copysign(1.0, v - d * d)
        x += lr * m / (math.sqrt(v) + tau)
    ours = run(ALL[kind], torch.tensor([1.0]), [torch.tensor([-d]) for d in deltas])
    assert float(ours) == pytest.approx(x, rel=1e-5)


@pytest.mark.parametrize("kind", ALL)
def test_any_tiling_gives_the_same_bits(kind: str):
    n = 2 * TILE_ELEMENTS + 77
    optimizer, x, steps = ALL[kind], torch.linspace(-1, 1, n), gradients(n, 2)
    whole = run(optimizer, x, steps)
    params, state = x.clone(), optimizer.init(n)
    for gradient in steps:
        scratch = gradient.clone()
        for span in spans(n):
            optimizer.step(tile_of(state, span), params[span], scratch[span])
    assert torch.equal(whole, params)


@pytest.mark.parametrize("kind", ALL)
def test_a_zero_gradient_of_a_fresh_state_moves_nothing(kind: str):
    x = torch.linspace(-1, 1, 16)
    assert torch.equal(run(ALL[kind], x, [torch.zeros(16)]), x)


@pytest.mark.parametrize(("name", "lr"), [("average", 1.0), ("nesterov", 0.7), ("yogi", 0.1)])
def test_a_job_without_a_rate_gets_the_default_of_its_optimizer(name: str, lr: float):
    job = JobSpec(name="j", task=TaskRef(name="t"), server=Server(optimizer=name))
    twin = {"average": average, "nesterov": nesterov, "yogi": yogi}[name](lr)
    x, steps = torch.linspace(-1, 1, 8), gradients(8, 3)
    assert torch.equal(run(server_optimizers.for_job(job), x, steps), run(twin, x, steps))


def test_every_optimizer_of_the_job_file_exists():
    for name, known in ALL.items():
        job = JobSpec(name="j", task=TaskRef(name="t"), server=Server(optimizer=name))
        assert server_optimizers.for_job(job).slots == known.slots


def run_delayed(n: int, x: torch.Tensor, steps: list[torch.Tensor]) -> torch.Tensor:
    """Through the job's own choice of the step for each version."""
    server = Server(optimizer="delayed_nesterov", delay=n)
    job = JobSpec(name="j", task=TaskRef(name="t"), server=server)
    params, state = x.clone(), server_optimizers.for_job(job).init(x.numel())
    for version, gradient in enumerate(steps, 1):
        server_optimizers.for_job(job, version).step(state, params, gradient.clone())
    return params


@pytest.mark.parametrize("n", [2, 4, 7])
def test_delayed_nesterov_follows_the_paper_over_fifty_versions(n: int):
    """Algorithm 3 of arXiv 2401.09135 with c = 0, in its own terms: outer gradients are n times
    ours, whose coefficients divide by n already.
    """
    x, steps = torch.linspace(-1, 1, 100), gradients(100, 50)
    theta, m, buffered = x.double(), torch.zeros(100).double(), torch.zeros(100).double()
    epsilon, beta = 0.7, 0.9
    for t, ours in enumerate(steps):
        g = ours.double() * n
        buffered += g
        if (t + 1) % n == 0:
            m = beta * m + buffered / n
            theta = theta - epsilon * (beta * m + g / n)
            buffered = torch.zeros(100).double()
        else:
            theta = theta - epsilon * g / n
    assert torch.allclose(run_delayed(n, x, steps).double(), theta, atol=1e-4, rtol=1e-5)


def test_delayed_nesterov_without_delay_is_nesterov_bit_for_bit():
    x, steps = torch.linspace(-1, 1, 1000), gradients(1000, 6)
    assert torch.equal(run_delayed(1, x, steps), run(nesterov(), x, steps))


def test_n_versions_together_make_one_nesterov_step_on_their_sum():
    x, steps = torch.linspace(-1, 1, 100), gradients(100, 12)
    sums = [torch.stack(steps[at : at + 4]).sum(0) for at in (0, 4, 8)]
    once = run(nesterov(), x, sums)
    assert torch.allclose(run_delayed(4, x, steps), once, atol=1e-5)


def test_between_two_refreshes_delayed_nesterov_is_plain_averaging():
    x, steps = torch.linspace(-1, 1, 100), gradients(100, 3)
    assert torch.equal(run_delayed(4, x, steps), run(average(0.7), x, steps))
