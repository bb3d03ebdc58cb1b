"""What comes in as bulk: updates, version 0 from a site, version 0 from a person."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import time
from typing import Final

from coordinator import queries
from coordinator.actions import AnyAction, Verdict
from coordinator.crashpoints import reach
from coordinator.disk import TEMPORARY, DiskWatch, in_thread
from coordinator.foldapi import InitTaken, Screen, Screened, TakeInit
from coordinator.foldclient import FoldClient
from coordinator.spool import JobFolders, Quota, SpoolFile, UploadKey
from coordinator.stimuli import InitComplete, InitFacts, Stimulus, UploadComplete
from coordinator.store import Store
from coordinator.uploads import SettledUpload, Upload, Uploads, check_init, check_update
from protocol.errors import ConflictError, LimitError, NotFoundError
from protocol.jobspec import JobSpec
from protocol.messages import Receipt
from protocol.views import InitStored

_SETTLING_SECONDS: Final = 20.0
_INIT_KEPT_SECONDS: Final = 24 * 3600.0
_ID_CHARS: Final = 16

Stimulate = Callable[[Stimulus], Awaitable[list[AnyAction]]]


class Intake:
    """Opens uploads, and settles them when they are whole: screen, tell the core, answer.

    `is_open(key)`: the core waits for just this update, so there is no verdict to look up.
    """

    def __init__(
        self,
        *,
        folders: JobFolders,
        quota: Quota,
        disk: DiskWatch,
        store: Store,
        fold: FoldClient,
        stimulate: Stimulate,
        is_open: Callable[[UploadKey], bool],
    ) -> None:
        self._folders = folders
        self._quota = quota
        self._disk = disk
        self._store = store
        self._fold = fold
        self._stimulate = stimulate
        self._is_open = is_open
        self._taking_init = asyncio.Lock()  # a job has one init.body
        self.uploads = Uploads(quota, disk)

    # ------------------------------------------------------------ updates

    async def begin_upload(
        self, key: UploadKey, *, offset: int, length: int
    ) -> Upload | SettledUpload:
        """See Engine.begin_upload."""
        if (receipt := await self._settled(key)) is not None:
            return SettledUpload(receipt)
        path = self._folders.spool(key.job, key.spool)
        return await self.uploads.begin(
            path,
            check_update(key),
            lambda total: self._settle_update(key, total),
            offset=offset,
            length=length,
        )

    async def upload_state(self, key: UploadKey) -> Receipt:
        """See Engine.upload_state."""
        path = self._folders.spool(key.job, key.spool)
        if (task := self.uploads.settling(path)) is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SETTLING_SECONDS):
                    return await asyncio.shield(task)
        if (receipt := await self._settled(key)) is not None:
            return receipt
        return Receipt(offset=await self.uploads.stored(path, check_update(key)))

    async def _settled(self, key: UploadKey) -> Receipt | None:
        if self._is_open(key):
            return None
        found = await queries.settlement(self._store, key.job, key.site, key.epoch, key.clock)
        if found is None or found.attempt != key.attempt:
            return None
        return Receipt(offset=found.wire_bytes, verdict=found.verdict, reason=found.reason)

    async def _settle_update(self, key: UploadKey, total: int) -> Receipt:
        request = Screen(id=0, job=key.job, folder=str(self._folders.job(key.job)), spool=key.spool)
        facts = (await self._fold.ask(request, Screened, size=total)).facts
        reach("screened_before_persist")
        actions = await self._stimulate(
            UploadComplete(
                job=key.job, site=key.site, spool=key.spool, wire_bytes=total, facts=facts
            )
        )
        reach("persisted_before_ack")
        return _receipt(actions, key.job, key.site, total)

    # ------------------------------------------------------------ version 0

    async def begin_init(
        self, job: str, site: str, spec: JobSpec, *, offset: int, length: int
    ) -> Upload:
        """See Engine.begin_init."""
        path = self._folders.init_part(job, site)
        return await self.uploads.begin(
            path,
            check_init(job),
            lambda total: self._settle_init(job, site, spec, path, total),
            offset=offset,
            length=length,
        )

    async def _settle_init(
        self, job: str, site: str, spec: JobSpec, path: Path, total: int
    ) -> Receipt:
        async with self._taking_init:
            init = self._folders.init(job)
            path.replace(init)
            self._quota.release(path)
            request = TakeInit(id=0, job=job, folder=str(self._folders.job(job)), spec=spec)
            try:
                facts = (await self._fold.ask(request, InitTaken, size=3 * total)).facts
                actions = await self._stimulate(InitComplete(job=job, site=site, facts=facts))
            finally:
                await in_thread(init.unlink, missing_ok=True)
        return _receipt(actions, job, site, total)

    async def begin_init_file(self, length: int) -> InitFile:
        """See Engine.begin_init_file."""
        self._quota.check_size(length)
        self._disk.check_room(length, "a file for version 0")
        name = secrets.token_hex(_ID_CHARS // 2)
        path = self._folders.inits / f"{name}.safetensors{TEMPORARY}"
        return InitFile(name, SpoolFile(path, 0, self._disk), length)

    async def claim_init_file(self, init: str, job: str, spec: JobSpec) -> InitFacts:
        """Move a person's file to the job's folder and have it read; -> what was found.

        Raises:
            NotFoundError: there is no such file (any more).
        """
        known = len(init) == _ID_CHARS and init.isascii() and init.isalnum()
        path = self._folders.inits / f"{init}.safetensors"
        if not known or not path.exists():
            raise NotFoundError(
                f"there is no uploaded file {init[:40]!r}.", "Upload it again: it is kept one day."
            )
        async with self._taking_init:
            path.replace(self._folders.init(job))
            size = self._folders.init(job).stat().st_size
            request = TakeInit(
                id=0, job=job, folder=str(self._folders.job(job)), spec=spec, safetensors=True
            )
            return (await self._fold.ask(request, InitTaken, size=3 * size)).facts

    def remove_old_inits(self) -> None:
        """Files that no job has claimed within a day."""
        for path in self._folders.inits.glob("*.safetensors"):
            if time() - path.stat().st_mtime > _INIT_KEPT_SECONDS:
                path.unlink(missing_ok=True)


class InitFile:
    """A person's safetensors file on its way in; used like an Upload, but does not resume."""

    def __init__(self, name: str, file: SpoolFile, total: int) -> None:
        self._name = name
        self._file = file
        self._total = total

    async def write(self, chunk: bytes | memoryview) -> None:
        """Append a chunk; LimitError beyond the announced length, BusyError on a full disk."""
        if self._file.length + len(chunk) > self._total:
            raise LimitError(f"more bytes than the {self._total} that were announced.")
        await self._file.append(chunk)

    async def finish(self) -> InitStored:
        """The id to submit a job with."""
        if self._file.length != self._total:
            await self.broken()
            raise ConflictError(f"{self._file.length} of {self._total} bytes came; send it again.")
        self._file.close()
        await in_thread(
            os.replace, self._file.path, self._file.path.with_name(f"{self._name}.safetensors")
        )
        return InitStored(init=self._name, bytes=self._total)

    async def broken(self) -> None:
        """Remove what was stored."""
        self._file.close()
        await in_thread(self._file.path.unlink, missing_ok=True)


def _receipt(actions: list[AnyAction], job: str, site: str, total: int) -> Receipt:
    """The core answers every whole body by exactly one Verdict in its batch."""
    for action in actions:
        if isinstance(action, Verdict) and (action.job, action.site) == (job, site):
            return Receipt(offset=total, verdict=action.verdict, reason=action.reason)
    raise AssertionError(f"no verdict for an upload of {site!r} in job {job}")
