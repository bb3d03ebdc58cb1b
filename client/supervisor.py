"""The worker process: started clean, spoken to over pipes, ended with everything it started."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from client import ipc
from client.agentsettings import AgentSettings
from client.allow import Allowed, AllowList, Refused
from client.sessionapi import (
    AnyStimulus,
    StartWorker,
    StopWorker,
    TaskDeclined,
    Tell,
    WorkerDied,
    WorkerSaid,
)
from client.sitefiles import SiteFolder, SiteIdentity, job_folder, text_of
from protocol import limits

log = logging.getLogger("skerry.worker")

STOP_SECONDS: Final = 1.5  # from "please" to "now", in three steps
LAST_LINES: Final = 12
LINE_CHARS_MAX: Final = 500
DRAIN_SECONDS: Final = 1.0
_PRINT_BYTES_MAX: Final = 1 << 16
_ROOT: Final = Path(__file__).resolve().parent.parent


def clean_environment(
    inherited: Mapping[str, str], *, base: Path | None = None, threads: int = 0
) -> dict[str, str]:
    """What a worker sees: the user's environment without the agent's own settings and secrets.

    The packages are put on its path, wherever it is started, then `base`, where the owner's own
    modules lie; text is UTF-8 whatever the system says.
    """
    kept = {key: value for key, value in inherited.items() if not key.startswith("SKERRY_")}
    path = [str(_ROOT), *([str(base)] if base else []), kept.get("PYTHONPATH", "")]
    kept |= {
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "PYTHONSAFEPATH": "1",  # the current folder is no place for code
        "PYTHONUTF8": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if threads:
        kept |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return kept


class Worker(asyncio.SubprocessProtocol):
    """One worker process, in a session (and process group) of its own.

    A protocol and no streams: only so is its end seen when it comes, and not when the last process
    that inherited one of its pipes lets go of it.
    """

    def __init__(
        self,
        on_message: Callable[[ipc.FromWorker], None],
        on_death: Callable[[str], None],
    ) -> None:
        self._on_message = on_message
        self._on_death = on_death
        self._transport: asyncio.SubprocessTransport | None = None
        self._messages = Lines(limits.JSON_BODY_BYTES_MAX)
        self._prints = Lines(_PRINT_BYTES_MAX)
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._problem = ""
        self._exited = asyncio.Event()
        self._quiet = False  # stopped, or its death was told already

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        on_message: Callable[[ipc.FromWorker], None],
        on_death: Callable[[str], None],
    ) -> Worker:
        """Start it; raises OSError when it cannot be started."""
        loop = asyncio.get_running_loop()
        transport, worker = await loop.subprocess_exec(
            lambda: cls(on_message, on_death),
            *command,
            cwd=folder,
            env=dict(environment),
            start_new_session=True,
        )
        worker._transport = transport  # noqa: SLF001  of our own class
        return worker

    @property
    def pid(self) -> int:
        """Process id, also of its group."""
        assert self._transport is not None
        return self._transport.get_pid()

    def tell(self, message: ipc.ToWorker) -> None:
        """Hand over a request; one that no longer finds the worker is answered by its death."""
        stdin = self._stdin()
        if not stdin.is_closing():
            stdin.write(msgspec.json.encode(message) + b"\n")

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """End it and all it started within `seconds`; nothing is heard of it from now on."""
        self._quiet = True
        self._stdin().close()
        for signum in (signal.SIGTERM, signal.SIGKILL):
            if await self._gone_within(seconds / 3):
                break
            self._signal(signum)
        # Whatever it started is in its group: loader processes must not outlive it.
        self._signal(signal.SIGKILL)
        await self._gone_within(seconds / 3)
        self._close()

    async def _gone_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._exited.wait()
        except TimeoutError:
            return False

    def _stdin(self) -> asyncio.WriteTransport:
        assert self._transport is not None
        stdin = self._transport.get_pipe_transport(0)
        assert isinstance(stdin, asyncio.WriteTransport)
        return stdin

    def _signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signum)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # ------------------------------------------------------------ what the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It runs."""
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """It wrote a message (stdout), or the user's code printed something (stderr)."""
        if fd == 2:
            for line in self._prints.feed(data):
                self._print(line)
            return
        for line in self._messages.feed(data):
            self._take(line)
        if self._messages.overflown:
            self._blame(f"the worker sent a line of more than {self._messages.most} bytes")

    def process_exited(self) -> None:
        """It ended. What is still in its pipes is read before its death is told."""
        self._exited.set()
        self._signal(signal.SIGKILL)
        # A process that left the group may hold a pipe open for ever: do not wait for that.
        asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._tell_death)

    def connection_lost(self, exc: Exception | None) -> None:
        """It ended, and its pipes are empty."""
        del exc
        self._tell_death()

    def _take(self, line: bytes) -> None:
        try:
            message = ipc.from_worker.decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            self._blame(f"the worker sent a line that is no message ({error})")
        else:
            if not self._quiet and not self._problem:
                self._on_message(message)

    def _blame(self, problem: str) -> None:
        self._problem = self._problem or problem
        self._signal(signal.SIGKILL)

    def _print(self, line: bytes) -> None:
        # Of a progress bar, which rewrites its line, only the newest state is of interest.
        text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2].rstrip()
        if text:
            self._last.append(text[:LINE_CHARS_MAX])
            log.info("%s", text[:LINE_CHARS_MAX])

    def _tell_death(self) -> None:
        if self._quiet:
            return
        self._quiet = True
        self._print(self._prints.rest())
        assert self._transport is not None
        code = self._transport.get_returncode()
        reason = self._problem or _how_it_ended(code if code is not None else 0)
        words = "\n".join(self._last)
        self._close()
        self._on_death(f"{reason}. Its last words:\n{words}" if words else f"{reason}.")


class Lines:
    """Splits a stream into lines; of one that is longer than `most` bytes only the end is kept."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.overflown = False
        self._open = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes, without their ends."""
        first, *others = data.split(b"\n")
        self._open += first
        lines = []
        for other in others:
            lines.append(bytes(self._open))
            self._open = bytearray(other)
        if len(self._open) > self.most:
            self.overflown = True
            del self._open[: -self.most // 2]
        return lines

    def rest(self) -> bytes:
        """What came after the last line's end."""
        return bytes(self._open)


def _how_it_ended(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            hint = " (often: out of memory)" if name == "SIGKILL" else ""
            return f"the worker was ended by {name}{hint}"
    return f"the worker ended with exit code {code}"


class Supervisor:
    """Starts, tells and stops workers in the order that the session asked for, one at a time."""

    def __init__(
        self,
        settings: AgentSettings,
        allowed: AllowList,
        folder: SiteFolder,
        identity: SiteIdentity,
        tell: Callable[[AnyStimulus], None],
    ) -> None:
        self._settings = settings
        self._allowed = allowed
        self._folder = folder
        self._identity = identity
        self._tell = tell
        self._orders: asyncio.Queue[StartWorker | StopWorker | Tell] = asyncio.Queue()
        self._running: tuple[int, Worker] | None = None

    def order(self, action: StartWorker | StopWorker | Tell) -> None:
        """Take an action, to be carried out after those before it."""
        self._orders.put_nowait(action)

    async def run(self) -> None:
        """Carry out what is ordered; when this is cancelled the worker is ended."""
        try:
            while True:
                match await self._orders.get():
                    case StartWorker() as start:
                        await self._stop()
                        await self._start(start)
                    case StopWorker(worker=worker, reason=reason):
                        if self._running and self._running[0] == worker:
                            log.debug("worker %d is stopped: %s", worker, reason)
                            await self._stop()
                    case Tell(worker=worker, message=message):
                        if self._running and self._running[0] == worker:
                            self._running[1].tell(message)
        finally:
            await self._stop()

    async def _stop(self) -> None:
        if self._running is not None:
            (_, worker), self._running = self._running, None
            await worker.stop()

    async def _start(self, start: StartWorker) -> None:
        # Hashing reads files: a package of many must not hold up the long poll.
        decision = await asyncio.to_thread(self._allowed.decide, start.spec.task)
        if isinstance(decision, Refused):
            self._tell(TaskDeclined(worker=start.worker, reason=decision.reason))
            return
        number = start.worker
        folder = job_folder(self._folder.jobs, start.job)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            worker = await Worker.start(
                self._settings.worker_command,
                folder=folder,
                environment=clean_environment(
                    os.environ, base=self._allowed.base, threads=self._settings.threads
                ),
                on_message=lambda message: self._tell(WorkerSaid(worker=number, message=message)),
                on_death=lambda reason: self._tell(WorkerDied(worker=number, reason=reason)),
            )
        except OSError as error:
            command = " ".join(self._settings.worker_command)
            reason = f"the worker ({command}) cannot be started: {error.strerror}"
            self._tell(WorkerDied(worker=number, reason=reason))
            return
        self._running = (number, worker)
        log.debug("worker %d runs as process %d", number, worker.pid, extra={"job": start.job})
        worker.tell(self._load(start, folder, decision))

    def _load(self, start: StartWorker, folder: Path, task: Allowed) -> ipc.Load:
        return ipc.Load(
            job=start.job,
            spec=start.spec,
            folder=text_of(folder),
            task=task.reference,
            site=self._identity.name,
            role="evaluator" if start.evaluator else self._identity.role,
            data=task.data,
            options=task.options,
        )
