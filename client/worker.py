"""The training process of a site: `python -m client.worker`.

It loads one job, then answers one request after the other. It starts no thread, so that a user's
data loader may fork from it; between two local steps it looks whether the agent wants it to stop.
What the user's code raises becomes a reason of one line for the agent; the traceback goes to
stderr.
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from pathlib import Path

from client import ipc, sitestate
from client.loading import code_folder, load_task, user_reason
from client.localjob import LocalJob
from client.pipes import AgentGoneError, Pipe, live_with_parent, take_over_stdio
from protocol.errors import RefusedError
from protocol.limits import PROGRESS_EVERY_SECONDS, REASON_CHARS_MAX


class _StopAskedError(Exception):
    """The agent asked to stop the running period."""


class Worker:
    """Turns messages into calls of a `LocalJob`, and results into messages."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._job: LocalJob | None = None
        self._load: ipc.Load | None = None

    def serve(self) -> None:
        """Answer requests until the agent closes the pipe.

        Raises:
            AgentGoneError: it did.
        """
        while True:
            message = self._pipe.next()
            try:
                self._handle(message)
            except _StopAskedError:
                self._pipe.send(ipc.Stopped())
            except AgentGoneError:
                raise
            except (Exception, SystemExit) as error:  # the user's code may raise anything
                traceback.print_exc(file=sys.stderr)
                self._pipe.send(self._failure(error, message))

    def _handle(self, message: ipc.ToWorker) -> None:
        if isinstance(message, ipc.Load):
            self._pipe.send(self._loaded(message))
            return
        if isinstance(message, ipc.Stop):
            self._pipe.send(ipc.Stopped())
            return
        job = self._job
        if job is None:
            raise RefusedError("no job is loaded: the first message must be load.")
        match message:
            case ipc.MakeInit():
                size = job.make_init(Path(message.path))
                self._pipe.send(ipc.InitMade(path=message.path, bytes=size))
            case ipc.TrainPeriod():
                self._train(job, message)
            case ipc.EvaluateBase():
                job.load_base(message)
                self._evaluate(job, message.base_version)
            case ipc.Settle():
                job.settle(message)
                self._pipe.send(ipc.SettledHere(epoch=message.epoch, clock=message.clock))

    def _loaded(self, message: ipc.Load) -> ipc.Loaded:
        if self._job is not None:
            raise RefusedError("this worker has loaded a job already.")
        self._load = message
        task = load_task(message.task, dict(message.spec.task.options))
        self._job = LocalJob(message, task)
        return self._job.loaded()

    def _train(self, job: LocalJob, message: ipc.TrainPeriod) -> None:
        name = sitestate.update_name(message.epoch, message.clock, message.attempt)
        folder = job.folder / name
        if not folder.exists():
            job.load_base(message)
            if message.evaluate:
                self._evaluate(job, message.base_version)
            folder = job.train(message, Progress(self._pipe, message))
        record = sitestate.read_record(folder)
        self._pipe.send(
            ipc.Trained(
                epoch=message.epoch,
                clock=message.clock,
                attempt=message.attempt,
                path=str(folder),
                bytes=record.bytes,
                seconds=record.seconds,
                steps=record.steps,
                of=record.of,
                cut=record.cut,
            )
        )

    def _evaluate(self, job: LocalJob, version: int) -> None:
        examples, metrics = job.evaluate_base()
        self._pipe.send(ipc.EvaluatedHere(version=version, examples=examples, metrics=metrics))

    def _failure(self, error: BaseException, message: ipc.ToWorker) -> ipc.WorkerFailed:
        reference = self._load.task if self._load is not None else ""
        reason = user_reason(error, _folder_of(reference))[:REASON_CHARS_MAX]
        if isinstance(message, ipc.TrainPeriod):
            return ipc.WorkerFailed(
                reason=reason, epoch=message.epoch, clock=message.clock, attempt=message.attempt
            )
        return ipc.WorkerFailed(reason=reason, fatal=self._job is None)


class Progress:
    """Called between steps: reports at most every PROGRESS_EVERY_SECONDS, and obeys a Stop."""

    def __init__(self, pipe: Pipe, message: ipc.TrainPeriod) -> None:
        self._pipe = pipe
        self._message = message
        self._reported_at = -math.inf

    def __call__(self, step: int, of: int) -> None:
        """Report and look for a Stop.

        Raises:
            AgentGoneError: the pipe was closed.
        """
        if self._pipe.stop_asked():
            raise _StopAskedError
        now = time.monotonic()
        if now - self._reported_at >= PROGRESS_EVERY_SECONDS:
            self._reported_at = now
            epoch, clock = self._message.epoch, self._message.clock
            self._pipe.send(ipc.Stepped(epoch=epoch, clock=clock, step=step, of=of))


def _folder_of(reference: str) -> Path | None:
    try:
        return code_folder(reference)
    except Exception:  # a reference that cannot be parsed has no folder
        return None


def main() -> None:
    """Run until stdin closes."""
    live_with_parent()
    try:
        Worker(take_over_stdio()).serve()
    except AgentGoneError:
        return


if __name__ == "__main__":
    main()
