"""A worker process (real or stub) driven from a test, by the messages that an agent would send."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import msgspec

from client import ipc
from protocol.jobspec import JobSpec, Optimizer, Period, TaskRef

ROOT = Path(__file__).resolve().parents[2]


class WorkerProcess:
    def __init__(self, module: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # as an agent with `threads = 1` does
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def send(self, message: ipc.WorkerMessage) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(message) + b"\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.errors()
        return ipc.from_worker.decode(line)

    def ask(self, message: ipc.WorkerMessage) -> Any:
        """Send, and return the first answer that is not a progress message."""
        self.send(message)
        answer = self.receive()
        while isinstance(answer, ipc.Stepped):
            answer = self.receive()
        return answer

    def errors(self) -> str:
        self.process.kill()
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def close(self, timeout: float = 30) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


def make_spec(
    steps: int = 2,
    lr: float = 0.1,
    batch: int = 4,
    options: dict[str, Any] | None = None,
    optimizer: Optimizer | None = None,
    **sections: Any,
) -> JobSpec:
    return JobSpec(
        name="job",
        task=TaskRef(name="task", options=options or {}),
        seed=7,
        period=Period(steps=steps),
        optimizer=optimizer or Optimizer(lr=lr, batch_size=batch),
        **sections,
    )


def make_load(folder: Path, task: str = "", **fields: Any) -> ipc.Load:
    values: dict[str, Any] = {
        "job": "job-1",
        "spec": make_spec(),
        "folder": str(folder),
        "task": task,
        "site": "site-1",
        "role": "site",
    }
    return ipc.Load(**(values | fields))


def make_train(base: Path, digest: str, clock: int = 0, **fields: Any) -> ipc.TrainPeriod:
    values: dict[str, Any] = {
        "base_path": str(base),
        "base_version": clock,
        "base_digest": digest,
        "epoch": 1,
        "clock": clock,
        "attempt": 1,
        "steps": 2,
    }
    return ipc.TrainPeriod(**(values | fields))
