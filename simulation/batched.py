"""Periods of many sites trained as one: the same architecture, each site with its own numbers.

Parameters and optimizer moments of the sites are stacked, [S, ...], and one step of all of them is
one vectorised gradient (torch.func) and one step of the very optimizer that a single site uses,
which works element by element. Sites whose batch has another shape in a step are a group of their
own in that step; sites with fewer steps leave earlier. What only one site at a time can do is
refused with its reason, and the plain loop does it.

S = sites of the batch
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.data import TensorDataset

from aggregation.prox import add_pull_
from client import ipc
from client.localjob import Begun, LocalJob
from client.optimizers import UnitRun, learning_rate, make_optimizer
from client.stream import period_batches
from client.task import Task
from client.tensors import unwrap
from client.training import Period
from protocol.layout import Part, Slot

# So that memory does not grow with the number of sites, nor with that times a large model.
BATCH_SITES_MAX: Final = 32
BATCH_BYTES_MAX: Final = 512 << 20
_COPIES: Final = 6  # of the parameters: start, now, gradients, moments


class NotTogetherError(Exception):
    """These periods cannot be trained as one; the text says why."""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One site's period: `steps` will be taken of the `of` that the whole period has, in so many
    seconds.
    """

    job: LocalJob
    message: ipc.TrainPeriod
    steps: int
    of: int
    seconds: float = 0.0


def why_not(job: LocalJob) -> str:
    """Why this site's periods are trained by themselves; empty when they need not be."""
    task, model, learner = job.task, job.bench.model, job.learner
    if type(task).optimizer is not Task.optimizer or type(task).schedule is not Task.schedule:
        return "the task has an optimizer or a schedule of its own"
    if type(task).loss is not Task.loss and set(vars(task)) != {"options"}:
        return "the task's loss may depend on what this site's task object holds"
    if not isinstance(job.stream.data, TensorDataset):
        return "its data are no TensorDataset and may draw random numbers"
    if job.control:
        return "SCAFFOLD"
    if unwrap(model) is not model:
        return f"the model is wrapped in {type(model).__name__}"
    if any(True for _ in model.buffers()):
        return "the model has buffers, as those of BatchNorm"
    if any(isinstance(module, _DropoutNd) and module.p for module in model.modules()):
        return "dropout draws random numbers of each site's own"
    if job.bench.local:
        return "parts of the model stay at the site"
    if any(p.dtype is not torch.float32 for p in learner.parameters):
        return "the model is not float32"
    return ""


def sites_max(job: LocalJob) -> int:
    """How many sites with this model are trained as one."""
    each = _COPIES * 4 * max(job.layout.elements("params"), 1)
    return max(min(BATCH_SITES_MAX, BATCH_BYTES_MAX // each), 1)


def steps_of_adam(job: LocalJob) -> int:
    """Only sites with the same number are trained as one: the bias correction depends on it."""
    if job.spec.optimizer.name == "sgd" or job.spec.optimizer.state == "reset":
        return 0
    job.bench.take(job)
    job.state.restore()
    for state in job.learner.optimizer.state.values():
        return int(state.get("step", 0))
    return 0


def train_together(items: Sequence[Item]) -> list[Path | Exception]:
    """Train at most `sites_max` sites of one job; in order the folders of their updates, or why a
    site has none.

    Raises:
        NotTogetherError: nothing was written, and every site is as it was.
    """
    order = sorted(range(len(items)), key=lambda i: -items[i].steps)
    try:
        stack = _Stack([items[i] for i in order])
        before = _random_state()
        stack.train()
    except NotTogetherError:
        raise
    except Exception as error:  # the user's code in an unusual place: alone it may be all right
        raise NotTogetherError(f"torch.func: {type(error).__name__}: {error}"[:200]) from error
    if _random_state() != before:
        raise NotTogetherError("the task draws random numbers while it trains")
    folders = {i: stack.finish(place) for place, i in enumerate(order)}
    return [folders[i] for i in range(len(items))]


def _random_state() -> tuple[Any, ...]:
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002  what user code would draw from
    return torch.get_rng_state().tolist(), random.getstate(), str(numpy)


class _Loss(nn.Module):
    """The task's loss as a module, so that its model's parameters can be put in from outside."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.task = task
        self.model = model

    def forward(self, batch: Any) -> Tensor:
        return self.task.loss(self.model, batch)


class _Stack:
    """The numbers of the sites, the longest period first."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        first = items[0].job
        self._job, self._spec = first, first.spec
        self._slots: tuple[Slot, ...] = first.layout.slots("params")
        sites, device = len(items), first.bench.device
        self._starts = torch.empty(sites, first.layout.elements("params"), device=device)
        self._bases = [
            self._starts[:, slot.start : slot.start + slot.spec.elements].view(
                sites, *slot.spec.shape
            )
            for slot in self._slots
        ]
        self._params = [torch.empty_like(base) for base in self._bases]
        self._moments: list[dict[str, Tensor]] = [{} for _ in self._slots]
        self._kind = type(first.learner.optimizer)
        # Adam's, the same of all; SGD counts none.
        self._step = None if self._kind is torch.optim.SGD else torch.zeros(())
        self._runs: list[UnitRun] = []
        self._begun = [self._take_in(place) for place in range(sites)]
        self._batches = [
            period_batches(item.job.stream, steps=item.message.steps, epochs=item.message.epochs)
            for item in items
        ]
        self._losses = torch.zeros(sites, dtype=torch.float64, device=device)
        self._examples = [0] * sites
        self._lr = learning_rate(first.learner.optimizer)
        self._ties = any(spec.tie for spec in first.layout.tensors)
        self._losses_of = vmap(self._loss_of, randomness="error")
        self._holder = _Loss(first.task, first.bench.model)
        self._names = [f"model.{slot.spec.name}" for slot in self._slots]

    def _loss_of(self, params: dict[str, Tensor], batch: Any) -> Tensor:
        loss = functional_call(self._holder, params, (batch,), tie_weights=self._ties)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise NotTogetherError("the loss is no scalar tensor")
        return loss.reshape(())

    # ------------------------------------------------------------ in and out

    @torch.no_grad()
    def _take_in(self, place: int) -> Begun:
        """Let a site begin its period, and copy its numbers out of the shared model."""
        item = self.items[place]
        job = item.job
        job.load_base(item.message)
        begun = job.begin(item.message)
        self._starts[place] = begun.start["params"]
        learner = job.learner
        self._runs.append(UnitRun(learner.optimizer, self._spec.local.prox, learner.velocity))
        state = learner.optimizer.state
        for index, slot in enumerate(self._slots):
            tensor = job.bench.tensors[slot.spec.name]
            self._params[index][place] = tensor
            for key, value in state.get(tensor, {}).items():
                if key == "step":
                    self._step = value.clone()
                elif value is not None:
                    moments = self._moments[index]
                    if key not in moments:
                        moments[key] = torch.zeros_like(self._params[index])
                    moments[key][place] = value
        start: dict[Part, Tensor] = {"params": self._starts[place]}
        for part, flat in begun.start.items():
            start.setdefault(part, flat.clone())
        return Begun(
            start=start,
            corrections=begun.corrections,
            began_at=begun.began_at - item.seconds,
        )

    @torch.no_grad()
    def finish(self, place: int) -> Path | Exception:
        """Put a site's numbers back into the shared model, and let it write its update."""
        item, run = self.items[place], self._runs[place]
        job = item.job
        job.bench.take(job)
        job.bench.touched()
        job.state.leave()
        learner = job.learner
        learner.forget_moments()
        for index, slot in enumerate(self._slots):
            tensor = job.bench.tensors[slot.spec.name]
            tensor.copy_(self._params[index][place])
            state = {key: value[place].clone() for key, value in self._moments[index].items()}
            if self._step is not None:
                state["step"] = self._step + item.steps
            if state:
                learner.optimizer.state[tensor] = state
        learner.velocity = run.velocity
        examples = self._examples[place]
        period = Period(
            steps=run.steps,
            of=item.of,
            cut=run.steps < item.of,
            effective_steps=run.effective_steps,
            distance=run.distance,
            velocity=run.velocity,
            examples=examples,
            loss=float(self._losses[place]) / max(examples, 1),
            first_lr=self._lr,
            last_lr=self._lr,
        )
        try:
            return job.finish(item.message, self._begun[place], period)
        except Exception as error:  # as of a NaN: this site's update, and nobody else's
            return error

    # ------------------------------------------------------------ steps

    def train(self) -> None:
        """All steps of all sites."""
        self._job.bench.model.train()
        done = 0
        for sites in range(len(self.items), 0, -1):
            until = self.items[sites - 1].steps
            if until > done:
                self._train_first(sites, done, until)
                done = until

    def _train_first(self, sites: int, begin: int, end: int) -> None:
        """Steps `begin` to `end` of the first so many sites; the others are through."""
        params = [stacked[:sites] for stacked in self._params]
        optimizer = make_optimizer(self._spec.optimizer, params)
        for index, param in enumerate(params):
            state: dict[str, Any] = {
                key: value[:sites] for key, value in self._moments[index].items()
            }
            if state and self._step is not None:
                state["step"] = self._step + begin
            if state:
                optimizer.state[param] = state
        for _ in range(begin, end):
            for param, gradient in zip(params, self._gradients(params, sites), strict=True):
                param.grad = gradient
            self._change(params, sites)
            optimizer.step()
            for run in self._runs[:sites]:
                run.step(self._lr)
        for index, param in enumerate(params):
            for key, value in optimizer.state.get(param, {}).items():
                if key != "step" and value is not None:
                    self._keep(index, key, value, sites)

    def _keep(self, index: int, key: str, value: Tensor, sites: int) -> None:
        moments = self._moments[index]
        if key not in moments:  # made in this stretch, which has all sites
            moments[key] = value
        elif value.data_ptr() != moments[key].data_ptr():
            moments[key][:sites] = value

    def _gradients(self, params: list[Tensor], sites: int) -> list[Tensor | None]:
        """Gradients [S, ...] of the mean loss of each site's next batch; None where it has none."""
        groups: dict[Any, tuple[list[int], list[Any]]] = {}
        counts = []
        for place in range(sites):
            job = self.items[place].job
            batch = job.task.to_device(next(self._batches[place]), job.bench.device)
            counts.append(job.task.batch_examples(batch))
            where, batches = groups.setdefault(_shapes(batch), ([], []))
            where.append(place)
            batches.append(batch)
            self._examples[place] += counts[place]
        weights = torch.tensor(counts, dtype=torch.float64, device=self._losses.device)
        if len(groups) == 1:
            ((where, batches),) = groups.values()
            return self._of_group(params, where, batches, weights)
        found: list[Tensor | None] = [None] * len(params)
        for where, batches in groups.values():
            few = [param[where] for param in params]
            part = self._of_group(few, where, batches, weights[where])
            for index, gradient in enumerate(part):
                if gradient is None:
                    continue
                whole = found[index]
                if whole is None:
                    whole = found[index] = torch.zeros_like(params[index])
                whole[where] = gradient
        return found

    def _of_group(
        self, params: list[Tensor], where: list[int], batches: list[Any], weights: Tensor
    ) -> list[Tensor | None]:
        stacked = tuple(map(torch.stack, zip(*batches, strict=True)))
        leaves = [param.detach().requires_grad_() for param in params]
        losses = self._losses_of(dict(zip(self._names, leaves, strict=True)), stacked)  # [S]
        # A site's loss depends on its own parameters only: the gradient of the sum is that of each.
        gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        self._losses[where] += losses.detach().double() * weights
        return list(gradients)

    @torch.no_grad()
    def _change(self, params: list[Tensor], sites: int) -> None:
        """What comes between gradient and optimizer, in the order of a single site's step."""
        spec = self._spec
        if spec.optimizer.clip_norm:
            _clip(params, spec.optimizer.clip_norm)
        if spec.local.prox:
            for param, base in zip(params, self._bases, strict=True):
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                add_pull_(param.grad, param, base[:sites], spec.local.prox)


def _shapes(batch: Any) -> tuple[Any, ...]:
    if not isinstance(batch, tuple) or not all(isinstance(part, Tensor) for part in batch):
        raise NotTogetherError("its batches are no tuples of tensors")
    return tuple((part.shape, part.dtype) for part in batch)


def _clip(params: list[Tensor], norm_max: float) -> None:
    """`torch.nn.utils.clip_grad_norm_` for each site by itself."""
    gradients = [param.grad for param in params if param.grad is not None]
    each = [torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients]
    total = torch.linalg.vector_norm(torch.stack(each), dim=0)  # [S]
    factor = (norm_max / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.view(-1, *[1] * (gradient.ndim - 1)))
