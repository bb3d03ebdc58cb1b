"""Local training: the steps of one period.

One step, in this order: gradient of the task's loss; clipped to `clip_norm`; the FedProx pull and
SCAFFOLD's correction added (they are exact, so they are not clipped); optimizer; schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from aggregation.prox import add_pull_
from aggregation.scaffold import correct_
from client.optimizers import UnitRun, learning_rate, make_optimizer
from client.stream import Stream, period_batches
from client.task import Task
from client.tensors import tensors_of, unwrap
from protocol.errors import RefusedError
from protocol.jobspec import JobSpec
from protocol.layout import Layout, Part

BetweenSteps = Callable[[int, int], None]  # steps done, steps in all (0: unknown); may raise
IsOver = Callable[[], bool]


class Corrections:
    """What is added to the gradients of the shared parameters: FedProx, SCAFFOLD, or nothing.

    `start` has the flat `params` that the period starts from and, with SCAFFOLD, the server's
    `control`; `own_control` is the site's. All of them are float32 and as long as `params`.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        start: Mapping[Part, Tensor],
        *,
        prox: float,
        own_control: Tensor | None,
    ) -> None:
        tensors = tensors_of(model)
        self._prox = prox
        self._shared: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = []
        if not prox and own_control is None:
            return
        for slot in layout.slots("params"):
            span = slice(slot.start, slot.start + slot.spec.elements)
            server = own = None
            if own_control is not None:
                server = start["control"][span].view(slot.spec.shape)
                own = own_control[span].view(slot.spec.shape)
            parameter = tensors[slot.spec.name]
            base = start["params"][span].view(slot.spec.shape)
            self._shared.append((parameter, base, server, own))

    @torch.no_grad()
    def apply(self) -> None:
        """Change the gradients in place; a parameter outside this step's loss gets one if it must
        move all the same.
        """
        for parameter, base, server, own in self._shared:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self._prox:
                add_pull_(parameter.grad, parameter, base, self._prox)
            if server is not None and own is not None:
                correct_(parameter.grad, server, own)


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """What a period was: `loss` is the mean over its examples, `distance` is sum_t lr_t a_t.

    `of` are the steps asked for (0: unknown); `cut` says that it ended before them.
    """

    steps: int
    of: int
    cut: bool
    effective_steps: float
    distance: float
    velocity: float
    examples: int
    loss: float
    first_lr: float
    last_lr: float


class Learner:
    """A task's model with its optimizer, schedule and stream of training batches."""

    def __init__(
        self, task: Task, model: nn.Module, spec: JobSpec, stream: Stream, device: torch.device
    ) -> None:
        self.task = task
        self.model = model
        self.spec = spec
        self.stream = stream
        self.device = device
        self.velocity = 0.0
        self.renew_optimizer()

    def renew_optimizer(self) -> None:
        """A fresh optimizer and schedule: the task's own, or the job's."""
        parameters = [p for p in unwrap(self.model).parameters() if p.requires_grad]
        own = self.task.optimizer(self.model)
        self.optimizer = own if own is not None else make_optimizer(self.spec.optimizer, parameters)
        self.schedule = self.task.schedule(self.optimizer)
        self.velocity = 0.0
        # Only plain SGD takes the row-sparse gradients of nn.Embedding(sparse=True) as they are.
        group = self.optimizer.param_groups[0]
        plain = isinstance(self.optimizer, torch.optim.SGD) and not (
            group["momentum"] or group["weight_decay"]
        )
        local = self.spec.local
        self._densify = not plain or bool(
            local.prox or local.scaffold or self.spec.optimizer.clip_norm
        )
        self.parameters = parameters

    def forget_moments(self) -> None:
        """Reset momentum and Adam moments; learning rates stay where the schedule put them."""
        self.optimizer.state.clear()
        self.velocity = 0.0

    def train(
        self,
        corrections: Corrections,
        *,
        steps: int,
        epochs: int,
        between_steps: BetweenSteps,
        is_over: IsOver | None = None,
    ) -> Period:
        """Train one period: `steps` local steps, or `epochs` passes over the data.

        `is_over` is asked after every step: when it says so, the period ends there.

        Raises:
            RefusedError: the loss is no scalar, or there is no data.
        """
        of = steps or epochs * self.stream.batches_per_pass
        run = UnitRun(self.optimizer, self.spec.local.prox, self.velocity)
        total = torch.zeros((), dtype=torch.float64)
        examples, cut = 0, False
        first_lr = last_lr = learning_rate(self.optimizer)
        self.model.train()
        between_steps(0, of)
        for batch in period_batches(self.stream, steps=steps, epochs=epochs):
            last_lr = learning_rate(self.optimizer)
            loss, count = self._step(batch, corrections)
            run.step(last_lr)
            total = total.to(loss.device).add_(loss.double(), alpha=count)
            examples += count
            between_steps(run.steps, of)
            if is_over is not None and run.steps != of:
                self._await_device()
                if is_over():
                    cut = True
                    break
        self.optimizer.zero_grad(set_to_none=True)
        self.velocity = run.velocity
        return Period(
            steps=run.steps,
            of=of,
            cut=cut,
            effective_steps=run.effective_steps,
            distance=run.distance,
            velocity=run.velocity,
            examples=examples,
            loss=float(total) / max(examples, 1),
            first_lr=first_lr,
            last_lr=last_lr,
        )

    def _await_device(self) -> None:
        """Steps that are only queued on a GPU have not been taken yet."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _step(self, batch: Any, corrections: Corrections) -> tuple[Tensor, int]:
        batch = self.task.to_device(batch, self.device)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.task.loss(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise RefusedError(
                f"{type(self.task).__name__}.loss must return a scalar tensor; it returned "
                f"{f'shape {tuple(loss.shape)}' if isinstance(loss, Tensor) else type(loss)}."
            )
        loss.backward()  # type: ignore[no-untyped-call]
        if self._densify:
            for parameter in self.parameters:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
        if self.spec.optimizer.clip_norm:
            nn.utils.clip_grad_norm_(self.parameters, self.spec.optimizer.clip_norm)
        corrections.apply()
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        return loss.detach().reshape(()), self.task.batch_examples(batch)
