"""Bodies on their way in: checked as they arrive, stored as they arrive, settled once.

`Uploads` knows which uploads are open and which are being settled. A second connection for the
same upload takes it over (its first connection is dead, and the agent has noticed before us); a
body that is whole is settled by one task, whoever still waits for the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from coordinator.crashpoints import reach
from coordinator.disk import DiskWatch, in_thread
from coordinator.spool import Quota, SpoolFile, UploadKey, rescan
from protocol import frames
from protocol.bodies import SnapshotMeta, UpdateMeta, decode_meta_json
from protocol.errors import ConflictError, LimitError, MalformedError
from protocol.frames import Scanner
from protocol.messages import Receipt

Settle = Callable[[int], Awaitable[Receipt]]  # length of the body -> receipt with a verdict
CheckMeta = Callable[[bytes, int], Sequence[int]]  # META, length of the body -> sizes of parts


def check_update(key: UploadKey) -> CheckMeta:
    """META of an update must be what its URL says; its length must be what META says."""

    def check(raw: bytes, total: int) -> Sequence[int]:
        meta = decode_meta_json(raw)
        if not isinstance(meta, UpdateMeta):
            raise MalformedError("this body is a snapshot; an update was expected here.")
        found = UploadKey(meta.job, meta.site, meta.epoch, meta.clock, meta.attempt)
        if found != key:
            raise MalformedError(f"the metadata is of {found}, the request is for {key}.")
        return _sizes(raw, [part.bytes for part in meta.parts], total)

    return check


def check_init(job: str) -> CheckMeta:
    """META of version 0 on its way in."""

    def check(raw: bytes, total: int) -> Sequence[int]:
        meta = decode_meta_json(raw)
        if not isinstance(meta, SnapshotMeta):
            raise MalformedError("this body is an update; a snapshot was expected here.")
        if meta.job != job or meta.version != 0:
            raise MalformedError(
                f"this is version {meta.version} of job {meta.job}; version 0 of {job} is wanted."
            )
        return _sizes(raw, [part.bytes for part in meta.parts], total)

    return check


def _sizes(raw: bytes, sizes: list[int], total: int) -> Sequence[int]:
    whole = frames.body_bytes(len(raw), sizes)
    if whole != total:
        raise MalformedError(
            f"the metadata announces a body of {whole} bytes, the request one of {total}."
        )
    return sizes


class Upload:
    """One body over one connection. Write every chunk, then exactly one of finish and broken."""

    def __init__(
        self, uploads: Uploads, file: SpoolFile, scanner: Scanner, total: int, settle: Settle
    ) -> None:
        self._uploads = uploads
        self._file = file
        self._scanner = scanner
        self._total = total
        self._settle = settle
        self._writing = asyncio.Lock()
        self._ended = ""

    @property
    def path(self) -> Path:
        """Where it lies."""
        return self._file.path

    @property
    def good_offset(self) -> int:
        """Length of the prefix of whole, valid frames."""
        return self._scanner.good_offset

    async def write(self, chunk: bytes | memoryview) -> None:
        """Check and append a chunk.

        Raises:
            MalformedError: not what a body may hold here; what was good before it is kept.
            LimitError: more bytes than announced, or a frame above its limit.
            BusyError: the disk is full.
            ConflictError: another connection has taken this upload over.
        """
        async with self._writing:
            if self._ended:
                raise ConflictError(self._ended)
            if self._file.length + len(chunk) > self._total:
                raise LimitError(f"more bytes than the {self._total} that were announced.")
            self._scanner.feed(chunk)
            await self._file.append(chunk)
        if 2 * self._file.length >= self._total:
            reach("upload_half_stored")

    async def finish(self) -> Receipt:
        """The request's body has ended: settle it when it is whole, else tell how far it got."""
        if not self._scanner.done:
            await self.broken()
            return Receipt(offset=self._scanner.good_offset)
        async with self._writing:
            if self._ended:
                raise ConflictError(self._ended)
            self._ended = "this upload is whole and is being settled."
            if self._uploads.power:
                await self._file.sync()
            self._file.close()
            reach("upload_stored_before_screen")
            task = self._uploads.settle(self, self._settle, self._total)
        return await asyncio.shield(task)

    async def broken(self) -> None:
        """The connection broke or the body was bad: keep the prefix of whole frames."""
        await self._end("this upload was broken off.")

    async def take_over(self) -> None:
        """Make room for another connection with the same upload."""
        await self._end("another connection has taken this upload over.")

    async def _end(self, reason: str) -> None:
        async with self._writing:
            if self._ended:
                return
            self._ended = reason
            good = self._scanner.rewind()
            with contextlib.suppress(FileNotFoundError):
                self._file.truncate(good)
            self._file.close()
            self._uploads.closed(self, good)


class SettledUpload:
    """A body that nobody needs: it was settled before. Its bytes are let through unread."""

    def __init__(self, receipt: Receipt) -> None:
        self._receipt = receipt

    async def write(self, chunk: bytes | memoryview) -> None:
        """Drop a chunk."""

    async def finish(self) -> Receipt:
        """What was said before."""
        return self._receipt

    async def broken(self) -> None:
        """Nothing to keep."""


class Uploads:
    """All uploads that are open or being settled, by path."""

    def __init__(self, quota: Quota, disk: DiskWatch) -> None:
        self._quota = quota
        self._disk = disk
        self._open: dict[Path, Upload] = {}
        self._settling: dict[Path, asyncio.Task[Receipt]] = {}
        self.power = False

    def settling(self, path: Path) -> asyncio.Task[Receipt] | None:
        """The task that settles the upload at `path` right now."""
        return self._settling.get(path)

    def busy(self, path: Path) -> bool:
        """Whether the upload at `path` is open or being settled."""
        return path in self._open or path in self._settling

    async def begin(
        self, path: Path, check: CheckMeta, settle: Settle, *, offset: int, length: int
    ) -> Upload:
        """Open an upload of `length` more bytes from `offset` on.

        Raises:
            ConflictError: `offset` is not where the stored part ends (details: offset), or the
                body is whole and being settled.
            LimitError: too large, ever. BusyError: no room for now.
        """
        if self.settling(path) is not None:
            raise ConflictError("this upload is whole and is being settled; ask for its state.")
        total = offset + length
        self._quota.check_size(total)
        if (before := self._open.get(path)) is not None:
            await before.take_over()
        scanner = Scanner(lambda raw: check(raw, total))
        good = await in_thread(rescan, path, scanner) if path.exists() else 0
        if path in self._open:
            raise ConflictError("another connection has taken this upload over.")
        if offset != good:
            raise ConflictError(
                f"the upload goes on at offset {good}, not at {offset}.", details={"offset": good}
            )
        self._disk.check_room(length, "an upload")
        self._quota.claim(path, total)
        try:
            file = SpoolFile(path, good, self._disk)
        except OSError:
            self._quota.stored(path, good)
            raise
        upload = Upload(self, file, scanner, total, settle)
        self._open[path] = upload
        return upload

    async def stored(self, path: Path, check: CheckMeta) -> int:
        """How much of an upload is stored and good, without opening it."""
        if (upload := self._open.get(path)) is not None:
            return upload.good_offset
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return 0
        # The length of the whole is not known here: META is checked against it when it goes on.
        scanner = Scanner(lambda raw: _sizes_of(raw, check))
        good = await in_thread(rescan, path, scanner)
        return min(good, size)

    def settle(self, upload: Upload, settle: Settle, total: int) -> asyncio.Task[Receipt]:
        """Settle a whole body in a task of its own, that a lost connection does not cancel."""
        path = upload.path
        self.closed(upload, total)
        task = asyncio.ensure_future(settle(total))
        self._settling[path] = task

        def done(finished: asyncio.Task[Receipt]) -> None:
            self._settling.pop(path, None)
            if not finished.cancelled():
                finished.exception()

        task.add_done_callback(done)
        return task

    def closed(self, upload: Upload, stored: int) -> None:
        """An upload is not open any more; `stored` bytes of it are there."""
        if self._open.get(upload.path) is upload:
            del self._open[upload.path]
            self._quota.stored(upload.path, stored)

    async def stop(self) -> None:
        """Break off what is open, wait for what is being settled."""
        for upload in list(self._open.values()):
            await upload.broken()
        if self._settling:
            await asyncio.wait(list(self._settling.values()))


def _sizes_of(raw: bytes, check: CheckMeta) -> Sequence[int]:
    parts = [part.bytes for part in decode_meta_json(raw).parts]
    return check(raw, frames.body_bytes(len(raw), parts))
