"""A job's model in memory, with the version that it holds.

A worker has one to itself. Simulated sites of one process take turns at a single one: whoever takes
it over finds another's numbers in it, and puts its own there from its files. So memory does not
grow with the number of sites.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from client.bodyfiles import digest_of, read_snapshot, write_body_file
from client.seeds import seed_everything
from client.task import Task
from client.tensors import (
    byte_view,
    describe,
    fingerprint,
    gather,
    new_part,
    scatter,
    tensors_of,
)
from protocol.bodies import SnapshotMeta, dense_parts
from protocol.errors import ConflictError
from protocol.jobspec import JobSpec
from protocol.layout import SNAPSHOT_PARTS, Part, TensorSpec
from protocol.names import derive_seed


class Holder(Protocol):
    """Whose numbers are in the model."""

    def put_away(self) -> None:
        """Somebody else takes over: what is in memory is not yours any more."""


class Workbench:
    """The model of a job, built from the job's seed.

    `staging` has the flat parts of the version that was loaded last, `control` a site's own
    SCAFFOLD control variate (float32, as long as `params`) or None, `local` the live tensors that
    never leave a site, `first_local` what they held at first.
    """

    def __init__(self, task: Task, spec: JobSpec, device: torch.device) -> None:
        self.device = device
        self._seed = derive_seed(spec.seed, "model")
        seed_everything(self._seed)
        self.model = task.model().to(device)
        described = describe(self.model, personal=spec.local.personal, buffers=spec.buffers.mix)
        self.layout, self.notes = described.layout, described.notes
        self.tensors = tensors_of(self.model)
        self.staging: dict[Part, Tensor] = {
            part: new_part(self.layout, part)
            for part in SNAPSHOT_PARTS
            if part != "control" or spec.local.scaffold
        }
        self.control = new_part(self.layout, "control", device) if spec.local.scaffold else None
        self.local = {s.name: self.tensors[s.name] for s in self.layout.tensors if _stays(s)}
        self.first_local = {name: t.detach().clone() for name, t in self.local.items()}
        self.loaded = ""  # digest of the version that the model holds, untouched
        self._first = True  # the model is as it was built
        self._holder: Holder | None = None
        self._frozen_versions = self._versions_of_frozen()

    def take(self, holder: Holder | None) -> None:
        """From now on what a site carries is this holder's, or nobody's; the version stays."""
        if self._holder is not None and self._holder is not holder:
            self._holder.put_away()
        self._holder = holder

    def touched(self) -> None:
        """The model moves on from the version that it held."""
        self.loaded = ""
        self._first = False

    def write_init(self, task: Task, path: Path, job: str) -> int:
        """Write version 0, the model as it was built from the job's seed; its bytes.

        A model that has moved on is built again, so that every call gives the same version.
        """
        source = self.tensors
        if not self._first:
            seed_everything(self._seed)
            source = tensors_of(task.model())
        self.loaded = ""  # its parts are overwritten here
        for part, flat in self.staging.items():
            if part == "control":
                flat.zero_()
            else:
                gather(source, self.layout, part, flat)
        views = [byte_view(flat) for flat in self.staging.values()]
        meta = SnapshotMeta(
            job=job,
            version=0,
            digest=digest_of(views),
            layout=self.layout,
            parts=dense_parts(self.layout, "snapshot", control="control" in self.staging),
        )
        return write_body_file(path, meta, views)

    def load(self, path: Path, digest: str) -> None:
        """Put a version into the model, after checking digest and layout."""
        if self.loaded == digest:
            return
        self.touched()
        read_snapshot(
            path,
            layout=self.layout,
            digest=digest,
            control="control" in self.staging,
            into={part: byte_view(flat) for part, flat in self.staging.items()},
        )
        for part in ("params", "buffers", "ints"):
            scatter(self.tensors, self.layout, part, self.staging[part])
        self.loaded = digest

    def start(self) -> dict[Part, Tensor]:
        """The parts that a period starts from, on the model's device; training may begin."""
        self.touched()
        start = {part: flat.to(self.device) for part, flat in self.staging.items()}
        gather(self.tensors, self.layout, "params", start["params"])  # as the dtypes could hold it
        return start

    # ------------------------------------------------------------ frozen tensors

    def _versions_of_frozen(self) -> list[int]:
        return [
            self.tensors[spec.name]._version  # noqa: SLF001  the only way to see a write
            for spec in self.layout.tensors
            if spec.role == "frozen" and not spec.tie
        ]

    def check_frozen(self) -> None:
        """Refuse a task that trained what it declared frozen; free when nothing was written."""
        versions = self._versions_of_frozen()
        if versions == self._frozen_versions:
            return
        found = fingerprint(self.tensors, self.layout.tensors)
        if found != self.layout.frozen_fingerprint:
            raise ConflictError(
                "the task changed tensors that do not require a gradient: the base model of this "
                "site is not that of the job any more.",
                "Leave frozen tensors alone, or let them train.",
            )
        self._frozen_versions = versions


def _stays(spec: TensorSpec) -> bool:
    return spec.role == "local" and not spec.tie
