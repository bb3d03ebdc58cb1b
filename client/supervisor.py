"""The worker process: started clean, spoken to over pipes, ended with everything it started."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from asyncio.subprocess import PIPE, Process
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
_CHUNK_BYTES: Final = 1 << 14
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


class Worker:
    """One worker process, in a session (and process group) of its own."""

    def __init__(
        self,
        process: Process,
        on_message: Callable[[ipc.FromWorker], None],
        on_death: Callable[[str], None],
    ) -> None:
        self._process = process
        self._on_message = on_message
        self._on_death = on_death
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._ending = False
        self._reader = asyncio.create_task(self._watch(), name="worker")

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
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            cwd=folder,
            env=dict(environment),
            start_new_session=True,
            limit=limits.JSON_BODY_BYTES_MAX,
        )
        return cls(process, on_message, on_death)

    @property
    def pid(self) -> int:
        """Process id, also of its group."""
        return self._process.pid

    def tell(self, message: ipc.ToWorker) -> None:
        """Hand over a request; one that no longer finds the worker is answered by its death."""
        stdin = self._process.stdin
        assert stdin is not None
        if not stdin.is_closing():
            stdin.write(msgspec.json.encode(message) + b"\n")

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """End it and all it started within `seconds`; nothing is heard of it from now on."""
        self._ending = True
        stdin = self._process.stdin
        assert stdin is not None
        stdin.close()
        for signum in (signal.SIGTERM, signal.SIGKILL):
            try:
                async with asyncio.timeout(seconds / 3):
                    await self._process.wait()
                break
            except TimeoutError:
                self._signal(signum)
        # Whatever it started is in its group: loader processes must not outlive it.
        self._signal(signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds / 3):
                await self._process.wait()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    def _signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signum)

    async def _watch(self) -> None:
        errors = asyncio.create_task(self._read_errors(), name="worker stderr")
        try:
            problem = await self._read_messages()
            if problem:
                self._signal(signal.SIGKILL)
            code = await self._process.wait()
            # A child may hold stderr open after the worker is gone: do not wait for it for ever.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await asyncio.shield(errors)
            self._signal(signal.SIGKILL)
        finally:
            errors.cancel()
            await asyncio.gather(errors, return_exceptions=True)
        if not self._ending:
            self._on_death(self._last_words(problem or _how_it_ended(code)))

    async def _read_messages(self) -> str:
        """Hand out messages until its stdout ends; the reason, if it is the worker's fault."""
        stdout = self._process.stdout
        assert stdout is not None
        while True:
            try:
                line = await stdout.readline()
            except ValueError:
                return f"the worker sent a line of more than {limits.JSON_BODY_BYTES_MAX} bytes"
            if not line:
                return ""
            try:
                message = ipc.from_worker.decode(line)
            except msgspec.MsgspecError as error:
                return f"the worker sent a line that is no message ({error})"
            if not self._ending:
                self._on_message(message)

    async def _read_errors(self) -> None:
        """Log what the worker and the user's code print, line by line."""
        stderr = self._process.stderr
        assert stderr is not None
        rest = b""
        while chunk := await stderr.read(_CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._said(line)
            # Progress bars write one endless line: only its newest state is of interest.
            rest = rest[-LINE_CHARS_MAX * 4 :]
        self._said(rest)

    def _said(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2].rstrip()
        if text:
            self._last.append(text[:LINE_CHARS_MAX])
            log.info("%s", text[:LINE_CHARS_MAX])

    def _last_words(self, reason: str) -> str:
        words = "\n".join(self._last)
        return f"{reason}. Its last words:\n{words}" if words else f"{reason}."


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
