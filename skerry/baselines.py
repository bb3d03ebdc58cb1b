"""The process behind `skerry.comparison`: trains baselines with the code that sites train with.

`python -m skerry.baselines REQUEST.json` prints one JSON line. One thread: its twin has the other
core.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors.torch import load_file
from torch import nn

from client.evaluation import evaluate
from client.loading import load_task
from client.seeds import seed_everything
from client.stream import Stream
from client.task import Data, SiteContext, Task
from client.tensors import describe
from client.training import Corrections, Learner
from protocol.errors import JobFailedError
from skerry.comparison import Measured, Request

_CPU: Final = torch.device("cpu")
_TEST_BATCH: Final = 500


def measure(request: Request) -> Measured:
    """Do everything that a request asks for, one thing after the other."""
    task = load_task(request.reference, dict(request.spec.task.options))
    everything = _data(task, request.everything)
    alone = tuple(
        _accuracy(task, _train(task, _data(task, options), request), everything)
        for options in request.alone
    )
    central = model = None
    if request.central:
        central = _accuracy(task, _train(task, everything, request), everything)
    if request.model:
        federated = task.model()
        federated.load_state_dict(load_file(request.model), strict=True)
        model = _accuracy(task, federated, everything)
    return Measured(alone=alone, central=central, model=model)


def _data(task: Task, options: dict[str, str]) -> Data:
    site = SiteContext(name="baseline", role="site", job="baseline", seed=0, options=options)
    return task.data(site)


def _train(task: Task, data: Data, request: Request) -> nn.Module:
    """Start from the job's seed and take the job's own optimizer for `steps` steps."""
    spec = request.spec
    seed_everything(spec.seed)
    model = task.model()
    layout = describe(model).layout
    stream = Stream(
        data.train, batch_size=spec.optimizer.batch_size, seed=spec.seed, merge_single=True
    )
    learner = Learner(task, model, spec, stream, _CPU)
    # No other site, hence nothing to correct for.
    nothing = Corrections(model, layout, {}, prox=0.0, own_control=None)
    learner.train(nothing, steps=request.steps, epochs=0, between_steps=_go_on)
    return model


def _accuracy(task: Task, model: nn.Module, everything: Data) -> float:
    _, metrics = evaluate(task, model, everything.test, device=_CPU, batch_size=_TEST_BATCH)
    found: Any = metrics["accuracy"].value
    if not isinstance(found, float):
        raise JobFailedError("a baseline has no accuracy: its training went to infinity.")
    return found


def _go_on(step: int, of: int) -> None:
    del step, of


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Request)
    print(msgspec.json.encode(measure(asked)).decode(), flush=True)
