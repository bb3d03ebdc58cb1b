"""The engine's side of the fold process: start, ask, watch, start again.

One request is in work at a time, so that its deadline measures it alone. Requests are idempotent:
when the process dies, or does not answer in time and is killed, a new one is asked again. A process
that does not hold the job (it is new, or freed it) says so, is told to recover it, and asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, TypeVar

import msgspec

from coordinator import crashpoints
from coordinator.foldapi import (
    Answer,
    Done,
    FoldAnswer,
    Folded,
    FoldRequest,
    Quit,
    Recover,
    Wake,
    answer_decoder,
)
from protocol.errors import SkerryError

log = logging.getLogger("coordinator.fold")

COMMAND: Final = (sys.executable, "-m", "coordinator.fold_process")
# Sums are as long as the model and are new in every round: with huge pages the kernel has a third
# of the work of giving the process their memory.
HUGE_PAGES: Final = ("THP_MEM_ALLOC_ENABLE", "1")
SECONDS_BASE: Final = 60.0  # importing torch on a busy machine included
BYTES_PER_SECOND: Final = 20e6  # far below the slowest disk that this is run on
TRIES: Final = 3
_LINE_BYTES_MAX: Final = 64 << 20  # an answer that carries a layout
_QUIT_SECONDS: Final = 1.0

A = TypeVar("A", bound=Answer)
RecoverHow = Callable[[FoldRequest], Awaitable[tuple[Recover, int]]]


class FoldError(SkerryError):
    """The fold process could not carry out a request; `disk_full` says that space would help."""

    http_status = 503

    def __init__(
        self, message: str, *, disk_full: bool = False, unknown_state: bool = False
    ) -> None:
        super().__init__(message)
        self.disk_full = disk_full
        self.unknown_state = unknown_state


class FoldClient:
    """A fold process that is there when needed.

    `recover`, set by the owner, answers a request with what brings a new process to the state that
    this request needs, and about how many bytes that moves.
    """

    def __init__(
        self,
        *,
        command: tuple[str, ...] = COMMAND,
        environment: Mapping[str, str] | None = None,
        seconds_base: float = SECONDS_BASE,
    ) -> None:
        self._command = command
        self._environment = dict(os.environ if environment is None else environment)
        self._environment.setdefault(*HUGE_PAGES)
        self.recover: RecoverHow | None = None
        self._seconds_base = seconds_base
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._log_task: asyncio.Task[None] | None = None
        self._ids = 0
        self._stopped = False
        self.starts = 0
        self.trouble = ""  # why the last request failed; empty when all is well
        self.idle_mb = 0.0
        self.peak_mb = 0.0

    async def ask(self, request: FoldRequest, kind: type[A], *, size: int = 0) -> A:
        """Carry out a request on about `size` bytes of data.

        Raises:
            FoldError: the process says that it cannot, or three processes in a row died over it.
        """
        async with self._lock:
            for attempt in range(1, TRIES + 1):
                try:
                    await self._ensure()
                    answer = await self._ask(request, kind, size)
                except _ProcessLostError as lost:
                    self.trouble = f"the fold process {lost}"
                    log.warning("%s; attempt %d of %d", self.trouble, attempt, TRIES)
                    await self._kill()
                    continue
                self.trouble = ""
                return answer
        raise FoldError(f"{self.trouble}, {TRIES} times in a row, over the same request.")

    async def _ask(self, request: FoldRequest, kind: type[A], size: int) -> A:
        try:
            return await self._ask_once(request, kind, size)
        except FoldError as error:
            if not error.unknown_state or self.recover is None:
                raise
        recover, bytes_moved = await self.recover(request)
        log.info("job %s: recovering from checkpoint %d", recover.job, recover.checkpoint)
        await self._ask_once(recover, Folded, bytes_moved)
        return await self._ask_once(request, kind, size)

    async def _ask_once(self, request: FoldRequest, kind: type[A], size: int) -> A:
        self._ids += 1
        numbered = msgspec.structs.replace(request, id=self._ids)
        deadline = self._seconds_base + size / BYTES_PER_SECOND
        try:
            async with asyncio.timeout(deadline):
                answer = await self._exchange(numbered)
        except TimeoutError:
            raise _ProcessLostError(f"did not answer within {deadline:.0f} s") from None
        finally:
            self._measure()
        if answer.fault or answer.unknown_state:
            raise FoldError(
                answer.fault or "the fold process does not hold this job.",
                disk_full=answer.disk_full,
                unknown_state=answer.unknown_state,
            )
        if not isinstance(answer, kind):
            raise _ProcessLostError(f"answered {type(answer).__name__} instead of {kind.__name__}")
        return answer

    async def _exchange(self, request: FoldRequest) -> FoldAnswer:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise _ProcessLostError("is not running")
        try:
            process.stdin.write(msgspec.json.encode(request) + b"\n")
            await process.stdin.drain()
            while True:
                line = await process.stdout.readuntil(b"\n")
                answer = answer_decoder.decode(line)
                if answer.id == request.id:
                    return answer
                # an answer to somebody who was cancelled meanwhile
        except (asyncio.IncompleteReadError, ConnectionError):
            raise _ProcessLostError(f"died ({await self._death(process)})") from None
        except (msgspec.MsgspecError, asyncio.LimitOverrunError) as error:
            raise _ProcessLostError(f"answered what cannot be read: {error}") from None

    async def _death(self, process: asyncio.subprocess.Process) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_QUIT_SECONDS):
                await process.wait()
        code = process.returncode
        if code is None:
            return "its output is closed"
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    async def _ensure(self) -> None:
        if self._stopped:
            raise FoldError("the coordinator is stopping.")
        if self._process is not None and self._process.returncode is None:
            return
        if self._process is not None:
            await self._kill()
        if self.starts:
            # A test that kills the process at a named instant wants to see it come back.
            self._environment.pop(crashpoints.VARIABLE, None)
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment,
            limit=_LINE_BYTES_MAX,
        )
        self.starts += 1
        self._log_task = asyncio.create_task(self._copy_log(self._process))

    async def start(self) -> None:
        """Start the process before it is needed, and wait until it has loaded torch.

        A process that does not come up is no error yet: `trouble` says so until a request is
        carried out.
        """
        with contextlib.suppress(FoldError):
            await self.ask(Wake(id=0, job="", folder=""), Done)

    async def _copy_log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while True:
            try:
                line = await process.stderr.readuntil(b"\n")
            except asyncio.IncompleteReadError as last:
                if last.partial:
                    log.info("%s", last.partial.decode("utf-8", "replace").rstrip())
                return
            except asyncio.LimitOverrunError:
                await process.stderr.read(_LINE_BYTES_MAX)
                continue
            log.info("%s", line.decode("utf-8", "replace").rstrip())

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return None if self._process is None else self._process.pid

    def _measure(self) -> None:
        memory = memory_mb(self._process.pid) if self._process is not None else None
        if memory is not None:
            now, peak = memory
            self.peak_mb = max(self.peak_mb, peak)
            if not self.idle_mb:
                self.idle_mb = now

    def memory(self) -> tuple[float, float, float]:
        """(resident now, highest ever, idle: before its first job), in MB = 1e6 bytes."""
        memory = memory_mb(self._process.pid) if self._process is not None else None
        now, peak = memory or (0.0, 0.0)
        self.peak_mb = max(self.peak_mb, peak)
        return now, self.peak_mb, self.idle_mb

    async def stop(self) -> None:
        """End the process: by word if it is idle, else by SIGKILL; its files are always whole."""
        self._stopped = True
        process = self._process
        if process is None:
            return
        if process.returncode is None and not self._lock.locked() and process.stdin is not None:
            with contextlib.suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(_QUIT_SECONDS):
                    process.stdin.write(msgspec.json.encode(Quit(id=0, job="", folder="")) + b"\n")
                    process.stdin.close()
                    await process.wait()
        await self._kill()

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if self._log_task is not None:
            await self._log_task
            self._log_task = None


class _ProcessLostError(Exception):
    """The process is gone, or as good as gone; never leaves this module."""


def memory_mb(pid: int | str) -> tuple[float, float] | None:
    """(VmRSS, VmHWM) of a process in MB = 1e6 bytes; None where /proc does not say."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:  # noqa: PTH123
            fields = dict(
                line.split(":", 1) for line in file if line.startswith(("VmRSS", "VmHWM"))
            )
        now, peak = (float(fields[name].split()[0]) * 1024 / 1e6 for name in ("VmRSS", "VmHWM"))
    except (OSError, KeyError, ValueError, IndexError):
        return None
    return now, peak
