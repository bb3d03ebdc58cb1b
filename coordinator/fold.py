"""The fold process: the only part of the coordinator with torch. It screens, commits and exports.

It reads one request per line on stdin and answers on stdout, in order (`coordinator.foldapi`), and
ends when stdin closes; `fold_process` starts it. `FoldService.handle` is the whole logic, so that
the simulator can call it in its own process. Everything is done by one thread, in the order asked,
so the same requests give the same bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
import torch

from aggregation import compensation
from coordinator import crashpoints, fold_checkpoint
from coordinator.fold_commit import commit
from coordinator.fold_delay import bases, missing_bases
from coordinator.fold_export import export
from coordinator.fold_files import DISK_FULL
from coordinator.fold_init import read_init, read_init_safetensors
from coordinator.fold_jobs import Folder, Jobs, Resident, UnknownStateError, facts_of
from coordinator.fold_model import digest_of, initial_state, read_version, write_version
from coordinator.fold_screen import no_facts, screen_update
from coordinator.foldapi import (
    Done,
    DropJob,
    Export,
    Exported,
    Fold,
    FoldAnswer,
    Folded,
    FoldRequest,
    InitTaken,
    Quit,
    Recover,
    Refold,
    SaveCheckpoint,
    Saved,
    Screen,
    Screened,
    TakeInit,
    Wake,
    request_decoder,
)
from coordinator.journal import CohortMember
from coordinator.stimuli import CommitFacts, InitFacts
from protocol import limits
from protocol.errors import MalformedError, SkerryError
from protocol.jobspec import JobSpec

log = logging.getLogger("coordinator.fold")

RESIDENT_VARIABLE: Final = "SKERRY_JOBS_RESIDENT_BYTES_MAX"


class FoldService:
    """Carries out requests, one at a time; every request may be repeated."""

    def __init__(self, *, resident_bytes_max: int = limits.JOBS_RESIDENT_BYTES_MAX) -> None:
        self._jobs = Jobs(resident_bytes_max)

    def handle(self, request: FoldRequest) -> FoldAnswer:
        """The answer to a request; whatever goes wrong is in its `fault`, never raised."""
        try:
            return self._answer(request)
        except UnknownStateError as error:
            return _failed(request, error.message, unknown_state=True)
        except SkerryError as error:
            return _failed(request, error.message)
        except OSError as error:
            full = error.errno in DISK_FULL
            what = "the coordinator's disk is full" if full else "a file cannot be used"
            return _failed(request, f"{what}: {error}", disk_full=full)
        except (RuntimeError, MemoryError) as error:  # how torch says that memory ran out
            log.exception("request failed", extra={"job": request.job})
            self._jobs.forget(request.job)  # it may have stopped half-way
            return _failed(request, f"the fold process could not do it: {error}")

    def _answer(self, request: FoldRequest) -> FoldAnswer:
        if isinstance(request, (Quit, Wake)):
            return Done(id=request.id)
        if isinstance(request, DropJob):
            self._jobs.release(request.job)
            return Done(id=request.id)
        folder = self._jobs.folder(request.folder)
        match request:
            case TakeInit():
                return InitTaken(id=request.id, facts=self._take_init(request, folder))
            case Screen():
                shape = self._jobs.shape(request.job, folder, request.layout_version)
                facts = screen_update(folder.spool(request.spool), shape)
                return Screened(id=request.id, facts=facts)
            case Fold():
                return Folded(id=request.id, facts=self._fold(request, folder))
            case SaveCheckpoint():
                self._save(request, folder)
                return Saved(id=request.id, version=request.version)
            case Recover():
                return Folded(id=request.id, facts=self._recover(request, folder))
            case Export():
                return self._export(request, folder)

    def _take_init(self, request: TakeInit, folder: Folder) -> InitFacts:
        spec, control = request.spec, request.spec.local.scaffold
        if max(fold_checkpoint.versions(folder.checkpoints), default=0) > 0:
            raise MalformedError("this job has a later version already.")
        try:
            if not folder.init.exists():  # taken before, and cleared away
                model = self._jobs.load(request.job, folder, 0, spec).model
            elif request.safetensors:
                model = read_init_safetensors(
                    folder.init, request.job, request.layout, control=control
                )
            else:
                model = read_init(folder.init, request.job, control=control)
        except MalformedError as error:
            return InitFacts(problem=f"version 0 cannot be taken: {error.message}")
        model.state = initial_state(spec, model.parts["params"].numel())
        fsync = spec.durability == "power"
        size = write_version(model, folder.version(0), fsync=fsync)
        resident = Resident(
            model=model, key="", facts=facts_of(model, size), folder=folder, durable=False
        )
        resident.checkpoint(fsync=fsync)
        self._jobs.keep(resident)
        return InitFacts(digest=model.digest, bytes=size, layout=model.layout)

    def _fold(self, request: Fold, folder: Folder) -> CommitFacts:
        key = _key(request.cohort, request.active_sites)
        resident = self._base(request, folder, key)
        if resident.model.version == request.version:
            if not folder.version(request.version).exists():  # the disk was full before
                _write(resident, request.spec)
            return resident.facts
        if resident.model.digest != request.base_digest:
            self._jobs.forget(request.job)
            raise UnknownStateError(
                f"version {request.base_version} here has the digest "
                f"{resident.model.digest[:12]}, the journal says {request.base_digest[:12]}."
            )
        started = time.perf_counter()
        problem = _advance(resident, request.spec, request)
        if problem:
            return CommitFacts(version=request.version, problem=problem)
        _write(resident, request.spec)
        seconds = time.perf_counter() - started
        resident.facts = msgspec.structs.replace(resident.facts, fold_seconds=seconds)
        return resident.facts

    def _base(self, request: Fold, folder: Folder, key: str) -> Resident:
        """The job where this very commit left it, or at the commit's base."""
        for found in self._candidates(request, folder):
            version = found.model.version
            if version == request.base_version or (version == request.version and found.key == key):
                self._jobs.keep(found)
                return found
        raise UnknownStateError(
            f"version {request.base_version} of job {request.job} is not in memory and has no "
            "whole checkpoint."
        )

    def _candidates(self, request: Fold, folder: Folder) -> Iterator[Resident]:
        resident = self._jobs.get(request.job)
        if resident is not None:
            yield resident
        for version in (request.version, request.base_version):
            with contextlib.suppress(UnknownStateError):
                yield self._jobs.load(request.job, folder, version, request.spec)

    def _save(self, request: SaveCheckpoint, folder: Folder) -> None:
        resident = self._jobs.get(request.job)
        if resident is not None and resident.model.version == request.version:
            resident.checkpoint(fsync=request.fsync)
        else:
            self._jobs.load(request.job, folder, request.version, None)  # there, and whole?
        fold_checkpoint.remove_older(folder.checkpoints, request.version)

    def _recover(self, request: Recover, folder: Folder) -> CommitFacts:
        resident, folds = self._jobs.newest(request, folder)
        needed: set[int] = set()
        if compensation.for_job(request.spec) is not None:
            start = resident.model.version
            if missing := missing_bases(folds, start, folder.version):
                raise MalformedError(f"version {folds[-1].version} cannot be made again: {missing}")
            needed = bases(folds)
        for fold in folds:
            here = resident.model.version
            if here in needed and not folder.version(here).exists():
                _write(resident, request.spec)
            problem = _advance(resident, request.spec, fold)
            found = resident.model.digest
            if problem or found != fold.digest:
                self._jobs.forget(request.job)
                reason = problem or f"it has the digest {found[:12]}, not {fold.digest[:12]}."
                raise MalformedError(
                    f"version {fold.version} cannot be made again from its spools: {reason}"
                )
        if folds or not folder.version(resident.model.version).exists():
            _write(resident, request.spec)
        self._jobs.keep(resident)
        return resident.facts

    def _export(self, request: Export, folder: Folder) -> Exported:
        resident = self._jobs.get(request.job)
        path = folder.version(request.version)
        if resident is not None and resident.model.version == request.version:
            model = resident.model
        elif path.exists():
            model = read_version(path)
        else:
            model = self._jobs.load(request.job, folder, request.version, None).model
        digest, missing = export(model, Path(request.target))
        return Exported(id=request.id, path=request.target, digest=digest, missing=missing)


def _advance(resident: Resident, spec: JobSpec, asked: Fold | Refold) -> str:
    """Make the next version in memory; a problem, with nothing changed, or an empty string."""
    model, folder = resident.model, resident.folder
    version, cohort, active_sites = asked.version, asked.cohort, asked.active_sites
    paths = [folder.spool(member.spool) for member in cohort]
    try:
        moved = commit(
            model,
            paths,
            cohort,
            spec,
            version=version,
            active_sites=active_sites,
            versions=folder.versions,
            additive=asked.additive,
        )
    except FileNotFoundError as error:
        raise MalformedError(f"a spool of version {version} is gone: {error}") from None
    if moved.problem:
        return moved.problem
    model.version = version
    model.digest = digest_of(model.parts)
    resident.key = _key(cohort, active_sites)
    resident.durable = False
    resident.facts = CommitFacts(
        version=version,
        digest=model.digest,
        update_norm=moved.update_norm,
        model_norm=moved.model_norm,
    )
    return ""


def _write(resident: Resident, spec: JobSpec) -> None:
    """Write the version's file; the facts are complete only then."""
    model = resident.model
    crashpoints.reach("fold_before_version_file")
    path = resident.folder.version(model.version)
    size = write_version(model, path, fsync=spec.durability == "power")
    crashpoints.reach("fold_after_version_file")
    resident.durable = resident.durable or not model.state
    resident.facts = msgspec.structs.replace(resident.facts, bytes=size)


def _key(cohort: tuple[CohortMember, ...], active_sites: int) -> str:
    """What identifies a commit, besides its base: who is in it, in which order, out of how many."""
    return hashlib.sha256(msgspec.json.encode((cohort, active_sites))).hexdigest()


def _failed(
    request: FoldRequest, fault: str, *, disk_full: bool = False, unknown_state: bool = False
) -> FoldAnswer:
    """The answer of the request's own kind, with a fault in it."""
    answer: FoldAnswer
    match request:
        case TakeInit():
            answer = InitTaken(id=request.id, facts=InitFacts(problem=fault))
        case Screen():
            answer = Screened(id=request.id, facts=no_facts(fault))
        case Fold():
            facts = CommitFacts(version=request.version, problem=fault)
            answer = Folded(id=request.id, facts=facts)
        case Recover():
            facts = CommitFacts(version=request.checkpoint, problem=fault)
            answer = Folded(id=request.id, facts=facts)
        case SaveCheckpoint():
            answer = Saved(id=request.id, version=request.version)
        case Export():
            answer = Exported(id=request.id, path="", digest="")
        case DropJob() | Wake() | Quit():
            answer = Done(id=request.id)
    return msgspec.structs.replace(
        answer, fault=fault, disk_full=disk_full, unknown_state=unknown_state
    )


def serve(requests: BinaryIO, answers: BinaryIO, service: FoldService) -> None:
    """Answer one request per line until the requests end, or Quit."""
    for line in requests:
        request = request_decoder.decode(line)
        if isinstance(request, Quit):
            return
        answers.write(msgspec.json.encode(service.handle(request)) + b"\n")
        answers.flush()


def main() -> int:
    """The process: answers go to the real stdout, whatever else is printed to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the group; the engine ends us
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    torch.set_num_threads(1)
    cap = int(os.environ.get(RESIDENT_VARIABLE, limits.JOBS_RESIDENT_BYTES_MAX))
    serve(sys.stdin.buffer, answers, FoldService(resident_bytes_max=cap))
    return 0
