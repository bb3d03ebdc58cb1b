"""The jobs that this process holds in memory, and where they come from when it does not.

    <folder>/versions/<v>.body     what sites download; the whole version if it has no server state
    <folder>/checkpoints/<v>/      model and server state
    <folder>/spools/               updates

Jobs stay resident between commits up to a cap; over it the least recently used one is freed, after
a checkpoint when its server state is nowhere else.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from aggregation.screen import energy_of
from coordinator import fold_checkpoint
from coordinator.fold_files import remove_stale
from coordinator.fold_model import Model, initial_state, read_meta, read_version
from coordinator.fold_screen import Shape
from coordinator.foldapi import Recover, Refold
from coordinator.stimuli import CommitFacts
from protocol.errors import MalformedError, SkerryError
from protocol.jobspec import JobSpec

log = logging.getLogger("coordinator.fold")


class UnknownStateError(SkerryError):
    """This process does not hold the base that a request needs; Recover brings it back."""


class Folder:
    """A job's folder: the names of what is in it."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.init = self.path / "init.body"
        self.spools = self.path / "spools"
        self.versions = self.path / "versions"
        self.checkpoints = self.path / "checkpoints"

    def version(self, version: int) -> Path:
        """The file of a version."""
        return self.versions / f"{version}.body"

    def spool(self, name: str) -> Path:
        """A spool by its plain name.

        Raises:
            MalformedError: the name would lead out of the folder.
        """
        if not name or name in (".", "..") or "/" in name or "\0" in name:
            raise MalformedError(f"{name!r} is not the name of a spool.")
        return self.spools / name


class Resident(msgspec.Struct, kw_only=True):
    """A job in memory: its newest version, and the commit that made it."""

    model: Model
    key: str  # of the commit
    facts: CommitFacts
    folder: Folder
    durable: bool  # a checkpoint of this version is on disk, or its body is all there is to it

    def checkpoint(self, *, fsync: bool = False) -> None:
        """Have checkpoints/<version>/ on disk."""
        fold_checkpoint.save(self.model, self.key, self.facts, self.folder.checkpoints, fsync=fsync)
        self.durable = True


class Jobs:
    """Resident jobs in the order of use, at most `resident_bytes_max` of them (but always one)."""

    def __init__(self, resident_bytes_max: int) -> None:
        self._resident_bytes_max = resident_bytes_max
        self._resident: dict[str, Resident] = {}
        self._shapes: dict[str, Shape] = {}
        self._seen: set[Path] = set()

    def folder(self, path: str) -> Folder:
        """A job's folder; at its first use what an earlier process left unfinished is removed."""
        folder = Folder(path)
        if folder.path not in self._seen:
            self._seen.add(folder.path)
            removed = remove_stale(folder.path)
            if removed:
                log.info("removed %d unfinished files in %s", removed, folder.path.name)
        return folder

    def get(self, job: str) -> Resident | None:
        """The job, if it is resident."""
        return self._resident.get(job)

    def release(self, job: str) -> None:
        """Free the job's tensors, after a checkpoint when they are nowhere else."""
        resident = self._resident.get(job)
        if resident is not None and not resident.durable and resident.folder.path.exists():
            resident.checkpoint()
        self.forget(job)

    def forget(self, job: str) -> None:
        """Free the job's tensors, whatever state they are in."""
        self._resident.pop(job, None)
        self._shapes.pop(job, None)

    def keep(self, resident: Resident) -> None:
        """Make the job resident and the most recently used, and free others above the cap."""
        model = resident.model
        self._resident.pop(model.job, None)
        self._resident[model.job] = resident
        if model.job not in self._shapes or self._shapes[model.job].layout is not model.layout:
            self._shapes[model.job] = Shape(
                layout=model.layout, layout_digest=model.layout.digest(), control=model.control
            )
        for job in [*self._resident][:-1]:
            held = sum(item.model.bytes for item in self._resident.values())
            if held <= self._resident_bytes_max:
                break
            if not self._resident[job].durable:
                self._resident[job].checkpoint()
            del self._resident[job]

    def shape(self, job: str, folder: Folder, version: int) -> Shape:
        """What updates of the job look like, from memory or from the metadata of a version.

        Raises:
            UnknownStateError: no version of the job is here.
        """
        shape = self._shapes.get(job)
        if shape is not None:
            return shape
        for path in (folder.version(version), *sorted(folder.versions.glob("*.body"))):
            with contextlib.suppress(FileNotFoundError, MalformedError):
                meta = read_meta(path)
                self._shapes[job] = Shape(
                    layout=meta.layout,
                    layout_digest=meta.layout.digest(),
                    control=any(part.name == "control" for part in meta.parts),
                )
                return self._shapes[job]
        raise UnknownStateError(f"no version of job {job} is here.")

    def load(self, job: str, folder: Folder, version: int, spec: JobSpec | None) -> Resident:
        """A version from its checkpoint, or from its body when `spec` needs no server state.

        Raises:
            UnknownStateError: neither is there and whole.
        """
        try:
            model, meta = fold_checkpoint.load(folder.checkpoints / str(version))
            return Resident(
                model=model, key=meta.key, facts=meta.facts, folder=folder, durable=True
            )
        except FileNotFoundError:
            pass
        except MalformedError as error:
            log.warning("%s", error.message, extra={"job": job, "version": version})
        if spec is not None and not initial_state(spec, 0):
            path = folder.version(version)
            with contextlib.suppress(FileNotFoundError, MalformedError):
                model = read_version(path)
                facts = facts_of(model, path.stat().st_size)
                return Resident(model=model, key="", facts=facts, folder=folder, durable=True)
        raise UnknownStateError(f"there is no whole checkpoint of version {version}.")

    def newest(self, request: Recover, folder: Folder) -> tuple[Resident, tuple[Refold, ...]]:
        """The newest version of the journal that is whole here, and the folds that follow it.

        A checkpoint may be newer than the journal knows, when the coordinator died between the two.

        Raises:
            UnknownStateError: none is.
        """
        digests = {fold.version: fold.digest for fold in request.folds}
        for found in self._candidates(request, folder, [request.checkpoint, *digests]):
            version = found.model.version
            if version == request.checkpoint or digests.get(version) == found.model.digest:
                return found, tuple(fold for fold in request.folds if fold.version > version)
        raise UnknownStateError(
            f"no whole checkpoint is left of version {request.checkpoint} or later: the job cannot "
            "go on from here."
        )

    def _candidates(
        self, request: Recover, folder: Folder, versions: list[int]
    ) -> Iterator[Resident]:
        resident = self.get(request.job)
        if resident is not None:
            yield resident
        for version in sorted(versions, reverse=True):
            with contextlib.suppress(UnknownStateError):
                yield self.load(request.job, folder, version, None)


def facts_of(model: Model, size: int) -> CommitFacts:
    """Facts about a version whose commit is not remembered."""
    norm = math.sqrt(energy_of(model.parts["params"]))
    return CommitFacts(version=model.version, digest=model.digest, bytes=size, model_norm=norm)
