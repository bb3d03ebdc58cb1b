"""Carries out what takes long: folds, checkpoints, files that go. Each runs in its own task."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeVar

from coordinator import actions as a
from coordinator import queries
from coordinator.crashpoints import reach
from coordinator.disk import TEMPORARY, in_thread
from coordinator.foldapi import (
    Answer,
    Done,
    DropJob,
    Export,
    Exported,
    Fold,
    Folded,
    FoldRequest,
    InitTaken,
    Recover,
    SaveCheckpoint,
    Saved,
    TakeInit,
)
from coordinator.foldclient import FoldClient, FoldError
from coordinator.intake import Stimulate
from coordinator.recovery import KINDS, recovery
from coordinator.spool import JobFolders, Quota
from coordinator.stimuli import CheckpointDone, CommitDone, CommitFacts, InitComplete, InitFacts
from coordinator.store import Store
from protocol.errors import NotFoundError

log = logging.getLogger("coordinator.engine")

A = TypeVar("A", bound=Answer)


class Carrier:
    """The fold process and the job folders, at the core's command.

    `room(error)` waits until the disk has room again: a fold that found none is simply asked again,
    since nothing was damaged. `kept(job)` are the spools that the core counts on (None: all),
    `busy(path)` says whether one is on its way in.
    """

    def __init__(
        self,
        *,
        folders: JobFolders,
        quota: Quota,
        store: Store,
        fold: FoldClient,
        stimulate: Stimulate,
        room: Callable[[FoldError], Awaitable[None]],
        kept: Callable[[str], frozenset[str] | None],
        busy: Callable[[Path], bool],
    ) -> None:
        self._folders = folders
        self._quota = quota
        self._store = store
        self._fold = fold
        self._stimulate = stimulate
        self._room = room
        self._kept = kept
        self._busy = busy

    async def commit(self, action: a.Commit) -> None:
        """Fold a cohort and report."""
        reach("round_closed_before_fold")
        request = Fold(
            id=0,
            job=action.job,
            folder=str(self._folders.job(action.job)),
            spec=action.spec,
            version=action.version,
            base_version=action.base_version,
            base_digest=action.base_digest,
            cohort=action.cohort,
            active_sites=action.active_sites,
            additive=action.additive,
        )
        size = sum(
            _size(self._folders.spool(action.job, member.spool)) for member in action.cohort
        ) + 4 * _size(self._folders.version(action.job, action.base_version))
        try:
            facts = (await self._when_there_is_room(request, Folded, size)).facts
        except FoldError as error:
            facts = CommitFacts(version=action.version, problem=error.message)
        reach("folded_before_persist")
        await self._stimulate(CommitDone(job=action.job, facts=facts))

    async def take_init(self, action: a.TakeInit) -> None:
        """Make version 0 of the file that came with the job, and report."""
        init = self._folders.init(action.job)
        request = TakeInit(
            id=0,
            job=action.job,
            folder=str(self._folders.job(action.job)),
            spec=action.spec,
            safetensors=True,
            layout=action.layout,
        )
        try:
            facts = (await self._when_there_is_room(request, InitTaken, 3 * _size(init))).facts
        except FoldError as error:
            facts = InitFacts(problem=error.message)
        await self._stimulate(InitComplete(job=action.job, site="", facts=facts))
        if not facts.problem:
            await in_thread(init.unlink, missing_ok=True)

    async def checkpoint(self, action: a.WriteCheckpoint) -> None:
        """Write a checkpoint and report."""
        problem = ""
        try:
            await self.save(action.job, action.version)
        except FoldError as error:
            problem = error.message
        await self._stimulate(
            CheckpointDone(job=action.job, version=action.version, problem=problem)
        )
        await self.prune(action.job)

    async def save(self, job: str, version: int) -> None:
        """Write a checkpoint; FoldError."""
        request = SaveCheckpoint(
            id=0,
            job=job,
            folder=str(self._folders.job(job)),
            version=version,
            fsync=self._store.power,
        )
        size = 4 * _size(self._folders.version(job, version))
        await self._fold.ask(request, Saved, size=size)
        reach("checkpoint_before_persist")

    async def discard(self, action: a.Discard) -> None:
        """Remove spools."""
        await self._remove(self._folders.spool(action.job, name) for name in action.spools)

    async def keep_versions(self, action: a.KeepVersions) -> None:
        """Remove snapshot files of old versions; a download under way keeps its open file."""
        folder = self._folders.job(action.job)
        await in_thread(_remove_versions, folder, action.oldest, frozenset(action.besides))

    async def release(self, action: a.Release) -> None:
        """Free the fold process's memory, and remove spools that nobody needs any more."""
        request = DropJob(id=0, job=action.job, folder=str(self._folders.job(action.job)))
        try:
            await self._fold.ask(request, Done)
        except FoldError as error:
            log.warning("job %s: %s", action.job, error)
        await self.prune(action.job)

    async def prune(self, job: str) -> None:
        """Remove spools that the core needs no more and that nobody is sending."""
        kept = self._kept(job)
        if kept is None:
            return
        await self._remove(
            path
            for path in (self._folders.job(job) / "spools").glob("*.body")
            if path.name not in kept and not self._busy(path)
        )

    async def _remove(self, spools: Iterable[Path]) -> None:
        # One hop for all of them: to free a file's pages takes longer than to name it.
        gone = list(spools)
        await in_thread(_remove_files, gone)
        for path in gone:
            self._quota.release(path)

    async def export(self, job: str, version: int, target: Path) -> tuple[str, ...]:
        """Write a safetensors file; -> names that it lacks.

        Raises:
            NotFoundError: the version is not kept.
        """
        if not self._folders.version(job, version).exists():
            kept = self._folders.kept_versions(job)
            if not kept:
                raise NotFoundError(f"job {job} has no version yet.", "Wait until it is running.")
            raise NotFoundError(
                f"version {version} of job {job} is not kept; "
                f"kept are {', '.join(map(str, kept))}.",
                "[keep] versions in the job file says how many are.",
            )
        request = Export(
            id=0,
            job=job,
            folder=str(self._folders.job(job)),
            version=version,
            target=str(target),
        )
        size = 4 * _size(self._folders.version(job, version))
        return (await self._fold.ask(request, Exported, size=size)).missing

    async def recover(self, request: FoldRequest) -> tuple[Recover, int]:
        """What brings a new fold process to where `request` begins: design 4.5."""
        spec = await queries.job_spec(self._store, request.job)
        entries = await self._store.entries_of_kinds(request.job, KINDS)
        recover = recovery(request, spec, entries)
        size = sum(
            _size(self._folders.spool(request.job, member.spool))
            for fold in recover.folds
            for member in fold.cohort
        )
        newest = recover.checkpoint + len(recover.folds)
        model = _size(self._folders.version(request.job, newest))
        return recover, size + 8 * model * (1 + len(recover.folds))

    async def remove_job(self, job: str) -> None:
        """Remove a deleted job's folder. It is renamed first: what a crash leaves is stale."""
        folder = self._folders.job(job)
        for path in (folder / "spools").glob("*.body"):
            self._quota.release(path)
        if folder.exists():
            stale = folder.with_name(f"{folder.name}{TEMPORARY}")
            folder.replace(stale)
            await in_thread(shutil.rmtree, stale, ignore_errors=True)

    async def _when_there_is_room(self, request: FoldRequest, kind: type[A], size: int) -> A:
        while True:
            try:
                return await self._fold.ask(request, kind, size=size)
            except FoldError as error:
                if not error.disk_full:
                    raise
                await self._room(error)


def _remove_files(paths: list[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _remove_versions(folder: Path, oldest: int, besides: frozenset[int]) -> None:
    for path in (folder / "versions").glob("*.body"):
        if path.stem.isdigit() and int(path.stem) < oldest and int(path.stem) not in besides:
            path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
