"""A `LocalJob` in the test's own process, with the coordinator's part played in a few lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from client import ipc, sitestate
from client.bodyfiles import digest_of, write_body_file
from client.localjob import LocalJob
from client.task import Task
from client.tensors import byte_view
from client.workbench import Workbench
from protocol.bodies import SnapshotMeta, UpdateMeta, dense_parts
from protocol.bodyio import BodyReader
from protocol.layout import ELEMENT_BYTES, Layout
from tests.client.workerprocess import make_load, make_train

Parts = dict[str, Tensor]


def read_parts(path: Path) -> tuple[Any, Parts]:
    """META and the parts of a body as flat tensors."""
    with path.open("rb") as file:
        reader = BodyReader(file.readinto)
        raw = {part.name: bytearray(part.bytes) for part in reader.meta.parts}
        for index, offset, payload in reader.frames():
            raw[reader.meta.parts[index].name][offset : offset + len(payload)] = payload
    kinds = {4: torch.float32, 8: torch.int64}
    parts: Parts = {
        name: torch.frombuffer(data, dtype=kinds[ELEMENT_BYTES[name]])
        if data
        else torch.empty(0, dtype=kinds[ELEMENT_BYTES[name]])
        for name, data in raw.items()
    }
    return reader.meta, parts


def write_version(path: Path, layout: Layout, version: int, parts: Parts) -> str:
    """Write a snapshot body; its digest."""
    views = [byte_view(part.contiguous()) for part in parts.values()]
    meta = SnapshotMeta(
        job="job-1",
        version=version,
        digest=digest_of(views),
        layout=layout,
        parts=dense_parts(layout, "snapshot", control="control" in parts),
    )
    write_body_file(path, meta, views)
    return meta.digest


class Site:
    """One site of a job. `version` is what it was given last; time passes by its steps only."""

    def __init__(
        self,
        folder: Path,
        task: Task,
        benches: dict[str, Workbench] | None = None,
        **load: Any,
    ) -> None:
        self.now = 0.0
        self.step_seconds = 0.0
        self.folder = folder
        self.task = task
        self.load = make_load(folder, **load)
        self.job = LocalJob(self.load, task, lambda: self.now, benches)
        self.steps = 0
        self.base = folder / "base.body"
        self.job.make_init(self.base)
        meta, self.version = read_parts(self.base)
        self.digest = meta.digest

    def restart(self, task: Task | None = None) -> None:
        """What a new worker process does."""
        task = task or type(self.task)(self.task.options)
        self.job = LocalJob(self.load, task, lambda: self.now)

    def give(self, version: int, parts: Parts) -> None:
        self.version = {name: part.clone() for name, part in parts.items()}
        self.digest = write_version(self.base, self.job.layout, version, parts)

    def train(self, clock: int = 0, **fields: Any) -> tuple[UpdateMeta, Parts]:
        message = make_train(self.base, self.digest, clock, **fields)
        self.job.load_base(message)
        folder = self.job.train(message, self._between)
        meta, parts = read_parts(folder / sitestate.BODY)
        assert isinstance(meta, UpdateMeta)
        return meta, parts

    def settle(self, verdict: str, clock: int = 0, attempt: int = 1) -> None:
        self.job.settle(
            ipc.Settle(epoch=1, clock=clock, attempt=attempt, verdict=verdict)  # type: ignore[arg-type]
        )

    def period(self, clock: int, **fields: Any) -> tuple[UpdateMeta, Parts]:
        """Train, have it counted, and make the next version of this update alone."""
        meta, parts = self.train(clock, **fields)
        self.settle("counted", clock)
        new = {"params": self.version["params"] + parts["delta"]}
        new |= {name: parts[name] for name in ("buffers", "ints")}
        if "control" in self.version:
            new["control"] = self.version["control"]
        self.give(clock + 1, new)
        return meta, parts

    def _between(self, step: int, of: int) -> None:
        self.now += self.step_seconds * (step - self.steps if step else 0)
        self.steps = step
