"""Bodies between the coordinator and this site's disk, in pieces, resumed where they broke.

Control (asking, waiting, giving up) is the session's; here is one try each, and the patience to
repeat what only the connection spoilt. The pieces begin small and grow while the link is fast, so
that even on a slow one every piece is a sign of life.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import BinaryIO, Final

from crc32c import crc32c

from client.backoff import Backoff
from client.sessionapi import (
    AnyStimulus,
    Fetched,
    FetchFailed,
    Identity,
    InitRefused,
    InitTaken,
    JobUnknown,
    Stands,
    StoredUpdate,
    UploadBroke,
    UploadRefused,
)
from client.sitefiles import SentLog, SiteFolder, base_body, job_folder
from client.transport import STALL_SECONDS, Transport, read_capped
from protocol import limits
from protocol.errors import (
    BusyError,
    ConflictError,
    LimitError,
    MalformedError,
    NotFoundError,
    RefusedError,
    RemovedError,
    SkerryError,
    UnauthenticatedError,
    UnreachableError,
    VersionError,
)
from protocol.messages import Receipt, VersionRef

log = logging.getLogger("skerry.agent")

PIECE_BYTES_FIRST: Final = 64 << 10
PIECE_BYTES_LAST: Final = 256 << 10  # what asyncio reads at once; more is copied once more
FAST_PIECE_SECONDS: Final = 0.05
SCREEN_SECONDS: Final = 120.0  # the coordinator looks at every number before it answers ...
SCREEN_BYTES_PER_SECOND: Final = 20e6  # ... at no less than this


class Outgoing:
    """A file's bytes from `offset` on; keeps count of what the connection took.

    `watch` is called with the seconds in which the next piece, or the answer, is due.
    """

    def __init__(self, path: Path, offset: int, size: int, watch: Callable[[float], None]) -> None:
        self._path = path
        self._offset = offset
        self._size = size
        self._watch = watch
        self.sent = 0
        self.crc = 0

    async def __aiter__(self) -> AsyncIterator[bytes]:
        piece_bytes = PIECE_BYTES_FIRST
        with self._path.open("rb", buffering=0) as file:
            file.seek(self._offset)
            while left := self._size - self._offset - self.sent:
                # Fresh bytes each time: transports keep views of what they have not sent yet.
                piece = file.read(min(piece_bytes, left))
                if not piece:
                    raise MalformedError(f"{self._path} is shorter than it was.")
                self.sent += len(piece)
                self.crc = crc32c(piece, self.crc)
                begin = time.monotonic()
                self._watch(STALL_SECONDS)
                yield piece
                if time.monotonic() - begin < FAST_PIECE_SECONDS:
                    piece_bytes = min(2 * piece_bytes, PIECE_BYTES_LAST)
        self._watch(SCREEN_SECONDS + self._size / SCREEN_BYTES_PER_SECOND)


class Transfers:
    """What moves between this site and the coordinator, besides control.

    Answers go to `tell`; while `connected` is not set nothing is tried again.
    """

    def __init__(
        self,
        transport: Transport,
        folder: SiteFolder,
        sent: SentLog,
        *,
        rng: random.Random,
        tell: Callable[[AnyStimulus], None],
        connected: asyncio.Event,
    ) -> None:
        self._transport = transport
        self._folder = folder
        self._sent = sent
        self._rng = rng
        self._tell = tell
        self._connected = connected
        self._fetch: tuple[str, int, asyncio.Task[None]] | None = None
        self._init: tuple[str, asyncio.Task[None]] | None = None
        self._updates: dict[Identity, asyncio.Task[None]] = {}

    # ------------------------------------------------------------ what the session asks for

    def fetch(self, job: str, base: VersionRef) -> None:
        """Begin a download, in place of one that is under way."""
        if self._fetch is not None:
            self._fetch[2].cancel()
        task = asyncio.create_task(self._run_fetch(job, base), name=f"fetch {base.version}")
        self._fetch = (job, base.version, task)

    def fetching(self, job: str) -> tuple[int, ...]:
        """The version of the job that is being downloaded, if any."""
        if self._fetch is None or self._fetch[0] != job or self._fetch[2].done():
            return ()
        return (self._fetch[1],)

    def ask(self, identity: Identity) -> None:
        """Begin to ask where an update stands."""
        self._start(identity, self._run_ask(identity))

    def upload(self, update: StoredUpdate, offset: int) -> None:
        """Begin to send an update's bytes."""
        self._start(update.identity, self._run_upload(update, offset))

    def call_off(self, identity: Identity) -> None:
        """Stop asking about and sending an update."""
        task = self._updates.pop(identity, None)
        if task is not None:
            task.cancel()

    def upload_init(self, job: str, path: Path, size: int) -> None:
        """Begin to send version 0."""
        if self._init is not None:
            self._init[1].cancel()
        self._init = (job, asyncio.create_task(self._run_init(job, path, size), name="init"))

    def leave(self, job: str, *, forget: bool) -> None:
        """Call off what belongs to a job."""
        if self._fetch is not None and self._fetch[0] == job:
            self._fetch[2].cancel()
            self._fetch = None
        if self._init is not None and self._init[0] == job:
            self._init[1].cancel()
            self._init = None
        if forget:
            for identity in [identity for identity in self._updates if identity.job == job]:
                self.call_off(identity)

    async def close(self) -> None:
        """Stop everything."""
        tasks = list(self._updates.values())
        tasks += [self._fetch[2]] if self._fetch else []
        tasks += [self._init[1]] if self._init else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, identity: Identity, work: Coroutine[None, None, None]) -> None:
        self.call_off(identity)
        task = asyncio.create_task(work, name=f"deliver {identity}")
        self._updates[identity] = task
        task.add_done_callback(lambda done: self._ended(identity, done))

    def _ended(self, identity: Identity, task: asyncio.Task[None]) -> None:
        if self._updates.get(identity) is task:
            del self._updates[identity]

    # ------------------------------------------------------------ downloads

    async def _run_fetch(self, job: str, base: VersionRef) -> None:
        folder = job_folder(self._folder.jobs, job)
        whole = base_body(folder, base.version)
        part = whole.with_name(whole.name + ".part")
        backoff = Backoff(self._rng)
        while True:
            before = _size(part)
            try:
                if _size(whole) != base.bytes:
                    self._folder.check_space(base.bytes - before)
                    await self._download(job, base, part)
                    part.replace(whole)
            except (LimitError, NotFoundError, RemovedError, MalformedError, OSError) as error:
                text = error.message if isinstance(error, SkerryError) else str(error)
                self._tell(FetchFailed(job=job, version=base.version, reason=text))
                return
            except SkerryError as error:
                log.debug("version %d: %s", base.version, error.message, extra={"job": job})
                if _size(part) > before:
                    backoff.reset()
                await self._pause(backoff)
            else:
                self._tell(Fetched(job=job, version=base.version))
                return

    async def _download(self, job: str, base: VersionRef, part: Path) -> None:
        offset = _size(part)
        if offset > base.bytes:
            part.unlink()
            offset = 0
        async with self._transport.request(
            "GET",
            f"/agent/v1/jobs/{job}/versions/{base.version}",
            params={"offset": offset},
            sock_read=STALL_SECONDS,
        ) as answer:
            file = _open(part)
            try:
                async for piece in answer.content.iter_any():
                    offset += len(piece)
                    if offset > base.bytes:
                        raise LimitError(
                            f"version {base.version} was announced with {base.bytes} bytes, and "
                            "more came."
                        )
                    _write(file, part, piece)
            finally:
                file.close()
        if offset < base.bytes:
            raise UnreachableError(f"version {base.version} broke off after {offset} bytes.")

    # ------------------------------------------------------------ updates

    async def _run_ask(self, identity: Identity) -> None:
        backoff = Backoff(self._rng)
        while True:
            try:
                receipt = await self._transport.call(
                    Receipt, "GET", _updates_path(identity.job), params=_params(identity)
                )
            except NotFoundError:
                self._tell(JobUnknown(job=identity.job))
                return
            except SkerryError as error:
                if _is_final(error):
                    self._tell(UploadRefused(identity=identity, reason=error.message))
                    return
                await self._pause(backoff)
            else:
                self._tell(Stands(identity=identity, receipt=receipt))
                return

    async def _run_upload(self, update: StoredUpdate, offset: int) -> None:
        identity = update.identity
        path = _updates_path(identity.job)
        entry = {"job": identity.job, **_params(identity)}
        try:
            receipt = await self._send("update", path, update.body, update.bytes, offset, entry)
        except NotFoundError:
            self._tell(JobUnknown(job=identity.job))
        except (SkerryError, OSError) as error:
            text = error.message if isinstance(error, SkerryError) else str(error)
            damaged = isinstance(error, MalformedError)
            if isinstance(error, SkerryError) and _is_final(error) and not damaged:
                self._tell(UploadRefused(identity=identity, reason=text))
            else:
                log.debug("update of %s: %s", identity, text, extra={"job": identity.job})
                self._tell(UploadBroke(identity=identity, reason=text, damaged=damaged))
        else:
            self._tell(Stands(identity=identity, receipt=receipt))

    async def _run_init(self, job: str, path: Path, size: int) -> None:
        backoff = Backoff(self._rng)
        offset = 0
        while True:
            try:
                there = f"/agent/v1/jobs/{job}/init"
                receipt = await self._send("version 0", there, path, size, offset, {"job": job})
            except ConflictError as error:
                # A conflict passes: another session, another try that is being settled, or another
                # part stored there than we thought; then it goes on from that.
                stored = error.details.get("offset")
                if isinstance(stored, int):
                    if not 0 <= stored <= size:
                        self._tell(InitRefused(job=job, reason=error.message))
                        return
                    offset = stored
                log.debug("version 0: %s", error.message, extra={"job": job})
                await self._pause(backoff)
            except (SkerryError, OSError) as error:
                if isinstance(error, SkerryError) and _is_final(error):
                    self._tell(InitRefused(job=job, reason=error.message))
                    return
                await self._pause(backoff)
            else:
                path.unlink(missing_ok=True)
                if receipt.verdict.startswith("refused"):
                    self._tell(InitRefused(job=job, reason=receipt.reason))
                else:
                    self._tell(InitTaken(job=job))
                return

    async def _send(
        self,
        kind: str,
        path: str,
        file: Path,
        size: int,
        offset: int,
        entry: Mapping[str, str | int],
    ) -> Receipt:
        """One POST of a file's bytes from `offset` on; what was sent is logged however it ends."""
        loop = asyncio.get_running_loop()
        fields: dict[str, str | int | float] = {**entry, "offset": offset}
        params = {key: value for key, value in entry.items() if key != "job"} | {"offset": offset}
        outgoing = None
        try:
            async with asyncio.timeout(STALL_SECONDS) as deadline:
                outgoing = Outgoing(
                    file, offset, size, lambda seconds: deadline.reschedule(loop.time() + seconds)
                )
                async with self._transport.request(
                    "POST",
                    path,
                    params=params,
                    data=outgoing,
                    headers={
                        "Content-Type": "application/octet-stream",
                        "Content-Length": str(size - offset),
                    },
                ) as answer:
                    raw = await read_capped(answer, limits.SMALL_BODY_BYTES_MAX)
            receipt = self._transport.decode(Receipt, raw)
            fields["verdict"] = receipt.verdict
            return receipt
        except TimeoutError:
            raise UnreachableError("the connection stalled in the middle of an upload.") from None
        finally:
            if outgoing is not None and outgoing.sent:
                fields |= {"bytes": outgoing.sent, "crc32c": f"{outgoing.crc:08x}"}
                self._sent.add(time.time(), kind, fields)

    async def _pause(self, backoff: Backoff) -> None:
        await asyncio.sleep(backoff.pause())
        await self._connected.wait()


def _updates_path(job: str) -> str:
    return f"/agent/v1/jobs/{job}/updates"


def _params(identity: Identity) -> dict[str, str | int]:
    return {"epoch": identity.epoch, "clock": identity.clock, "attempt": identity.attempt}


def _is_final(error: SkerryError) -> bool:
    """True when the coordinator understood and will say the same again.

    A conflict passes (another offset, another session); so does what concerns the whole session,
    which the long poll hears too and ends the agent by.
    """
    passing = (
        BusyError, ConflictError, RemovedError, UnauthenticatedError, VersionError,
    )  # fmt: skip
    return isinstance(error, RefusedError) and not isinstance(error, passing)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _open(part: Path) -> BinaryIO:
    try:
        return part.open("ab")
    except OSError as error:
        raise _disk_trouble(part, error) from None


def _write(file: BinaryIO, part: Path, piece: bytes) -> None:
    try:
        file.write(piece)
    except OSError as error:
        raise _disk_trouble(part, error) from None


def _disk_trouble(part: Path, error: OSError) -> LimitError:
    return LimitError(f"{part} cannot be written: {error.strerror}.", "Free some space.")
