"""Coordinator and sites as processes of this machine: started, waited for, and ended.

The demo, `skerry dev` and the end-to-end tests are built from these pieces. Every process writes
to a log file of its own; errors name that file. Nothing here outlives the `with` block.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Final, Self

import msgspec

from protocol.errors import JobFailedError

READY_SECONDS: Final = 30.0
STOP_SECONDS: Final = 8.0
CHECK_SECONDS: Final = 1.0
_LOG_TAIL_BYTES: Final = 2_000
_LINE_BYTES_MAX: Final = 1 << 16


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """Where a coordinator listens: base addresses of its two listeners."""

    agents: str
    people: str


def read_addresses(data_dir: Path) -> Addresses | None:
    """What the coordinator of this folder wrote when it was ready; None when there is nothing."""
    try:
        raw = (data_dir / "addresses.json").read_bytes()
        return msgspec.json.decode(raw[:_LINE_BYTES_MAX], type=Addresses)
    except (OSError, msgspec.MsgspecError):
        return None


class Child(msgspec.Struct, frozen=True, kw_only=True):
    """One process, the leader of its own process group, and its log."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


class Processes:
    """Processes that end together. Use as a context manager."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: list[Child] = []
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def children(self) -> tuple[Child, ...]:
        """What was started and not stopped yet, oldest first."""
        return tuple(self._children)

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        module: str = "skerry",
        env: Mapping[str, str] | None = None,
    ) -> Child:
        """Start `python -m MODULE ARGUMENTS`; its stdout is a pipe, its stderr goes to its log."""
        log = self._logs / f"{name}.log"
        # Settings of the caller's shell must not leak into processes that have their own files.
        inherited = {key: text for key, text in os.environ.items() if not key.startswith("SKERRY_")}
        with log.open("ab") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-X", "utf8", "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**inherited, **(env or {})},
                # A Ctrl-C at the terminal reaches this process alone, which then ends the others.
                start_new_session=True,
            )
        child = Child(name=name, process=process, log=log)
        self._children.append(child)
        return child

    def check(self) -> None:
        """Notice a process that has ended by itself.

        Raises:
            JobFailedError: naming it, its exit code, the end of its log and the log's path.
        """
        for child in self._children:
            code = child.process.poll()
            if code is not None:
                raise self.failure(child, f"ended with exit code {code}")

    def wait_for_an_end(self) -> None:
        """Block until a process ends by itself, and raise as `check` does."""
        while True:
            self.check()
            select.select([], [], [], CHECK_SECONDS)

    def failure(self, child: Child, what: str) -> JobFailedError:
        """The error for a process that did not do what it should."""
        with child.log.open("rb") as file:
            file.seek(max(0, child.log.stat().st_size - _LOG_TAIL_BYTES))
            tail = file.read().decode("utf-8", "replace").strip()
        said = f" It said last:\n{_indent(tail)}" if tail else " It said nothing."
        return JobFailedError(f"{child.name} {what}.{said}", f"Its whole log: {child.log}")

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """SIGTERM to all, newest first; after `seconds` SIGKILL to what is left of each group."""
        for child in reversed(self._children):
            _signal(child, signal.SIGTERM)
        end = monotonic() + seconds
        for child in reversed(self._children):
            try:
                child.process.wait(max(0.0, end - monotonic()))
            except subprocess.TimeoutExpired:
                _kill_group(child)
                child.process.wait()
            _kill_group(child)  # a worker that its agent left behind
            if child.process.stdout:
                child.process.stdout.close()
        self._children.clear()


def wait_for_line(processes: Processes, child: Child, seconds: float = READY_SECONDS) -> bytes:
    """The first line that a process prints on stdout.

    Raises:
        JobFailedError: it ended, or printed nothing in time.
    """
    assert child.process.stdout is not None
    descriptor = child.process.stdout.fileno()
    end = monotonic() + seconds
    line = b""
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([descriptor], [], [], max(0.0, end - monotonic()))
        if not readable:
            raise processes.failure(child, f"was not ready after {seconds:g} s")
        piece = os.read(descriptor, _LINE_BYTES_MAX)
        if not piece:
            child.process.wait(seconds)
            raise processes.failure(child, f"ended with exit code {child.process.returncode}")
        line += piece
    return line.splitlines()[0]


def start_coordinator(
    processes: Processes,
    folder: Path,
    flags: Mapping[str, str] | None = None,
    *,
    env: Mapping[str, str] | None = None,
) -> Addresses:
    """A coordinator on free loopback ports, with its data in `folder`; returns when it is ready."""
    settings = {
        "config": os.devnull,  # not the settings of whoever runs this
        "data-dir": str(folder),
        "listen-agents": "127.0.0.1:0",
        "listen-people": "127.0.0.1:0",
        **(flags or {}),
    }
    arguments = [part for key, value in settings.items() for part in (f"--{key}", value)]
    child = processes.start("coordinator", ["coordinator", "--json", *arguments], env=env)
    return msgspec.json.decode(wait_for_line(processes, child), type=Addresses)


def start_agent(processes: Processes, name: str, folder: Path) -> Child:
    """The agent of a site that has joined; it connects by itself, now or later."""
    config = folder / "agent.toml"
    return processes.start(name, ["agent", "--folder", str(folder), "--config", str(config)])


def _signal(child: Child, number: signal.Signals) -> None:
    if child.process.poll() is None:
        child.process.send_signal(number)


def _kill_group(child: Child) -> None:
    try:
        os.killpg(child.process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines()[-12:])
