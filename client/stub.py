"""A worker without torch, for tests and benchmarks of everything but training.

    python -m client.stub

It speaks `ipc` and writes real updates; only the training is pretended: the delta is a function of
(site, clock) that tests can compute too (`pretend_delta`). Options come from the job's
`task.options`, overridden by the site's own; clocks are those of the job:

    elements         trainable values (1000)
    buffers          1: two more tensors, a float buffer of 4 and a 0-dim integer counter
    train_examples   (100)
    eval_examples    (50)
    wait             path of a FIFO: every period waits until it can read one byte from it
    step_seconds     what a step takes (0)
    straggle_at      at this clock, and every multiple of it, steps take `straggle` times as long
    straggle         (5)
    fail_at          this clock fails, whatever the attempt
    fatal_at         this clock fails for good
    die_at           the process kills itself at this clock, after it wrote half an update
    nan_at           this clock sends a NaN
    zero_at          this clock declares zero examples
    layout           other: a tensor more than the other sites have
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from client import ipc, sitestate
from client.bodyfiles import digest_of, read_delta, read_snapshot, write_body_file
from client.pipes import AgentGoneError, Pipe, live_with_parent, take_over_stdio
from client.statefile import StateReader, Stored, read_value, write_state
from protocol.bodies import SnapshotMeta, UpdateMeta, dense_parts
from protocol.errors import RefusedError
from protocol.layout import Layout, Part, TensorSpec
from protocol.limits import PROGRESS_EVERY_SECONDS
from protocol.metrics import metric
from protocol.names import derive_seed

Floats = NDArray[np.float32]
_TILE: Final = 4096


def pretend_delta(seed: int, site: str, clock: int, elements: int) -> Floats:
    """What the stub of a site sends at a clock: a tile of 4096 normal values, repeated."""
    return _tiled(np.empty(elements, np.float32), derive_seed(seed, "stub", site, str(clock)))


def pretend_params(seed: int, elements: int) -> Floats:
    """The trainable part of the stub's version 0."""
    return _tiled(np.empty(elements, np.float32), derive_seed(seed, "stub", "init"))


def _tiled(out: Floats, seed: int) -> Floats:
    tile = np.random.default_rng(seed).standard_normal(_TILE, dtype=np.float32) / np.float32(10)
    whole = out.size - out.size % _TILE
    out[:whole].reshape(-1, _TILE)[:] = tile
    out[whole:] = tile[: out.size - whole]
    return out


class Stub:
    """One loaded job. Its arrays are allocated once."""

    def __init__(
        self, load: ipc.Load, pipe: Pipe, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.load = load
        self._clock = clock
        self.pipe = pipe
        self.folder = Path(load.folder)
        self.options = {k: str(v) for k, v in load.spec.task.options.items()} | load.options
        self.control = load.spec.local.scaffold
        tensors = [self._tensor("weight", self._number("elements", 1000))]
        if self.options.get("layout") == "other":
            tensors.append(self._tensor("extra.bias", 1))
        if self._number("buffers", 0):
            tensors += [
                TensorSpec(name="running_mean", shape=(4,), dtype="float32", role="buffer"),
                TensorSpec(name="num_batches", shape=(), dtype="int64", role="int"),
            ]
        self.layout = Layout(tensors=tuple(tensors))
        n = self.layout.elements("params")
        self.base: dict[Part, NDArray[np.float32] | NDArray[np.int64]] = {
            "params": np.zeros(n, np.float32),
            "buffers": np.zeros(self.layout.elements("buffers"), np.float32),
            "ints": np.zeros(self.layout.elements("ints"), np.int64),
        }
        if self.control:
            self.base["control"] = np.zeros(n, np.float32)
        self.delta = np.empty(n, np.float32)
        sitestate.prepare_folder(self.folder)

    @staticmethod
    def _tensor(name: str, elements: int) -> TensorSpec:
        return TensorSpec(name=name, shape=(elements,), dtype="float32", role="train")

    def _number(self, name: str, default: int) -> int:
        return int(self.options.get(name, default))

    def loaded(self) -> ipc.Loaded:
        """The answer to Load."""
        evaluator = self.load.role == "evaluator"
        return ipc.Loaded(
            layout=self.layout,
            train_examples=0 if evaluator else self._number("train_examples", 100),
            eval_examples=self._number("eval_examples", 50),
            control=self.control,
            notes=("this site runs the stub worker: it pretends to train",),
        )

    def handle(self, message: ipc.ToWorker) -> None:
        """Carry out one request and answer it."""
        match message:
            case ipc.MakeInit():
                self.pipe.send(self.make_init(Path(message.path)))
            case ipc.TrainPeriod():
                self.train(message)
            case ipc.EvaluateBase():
                self._read(message)
                self._evaluated(message.base_version)
            case ipc.Settle():
                epoch, clock = message.epoch, message.clock
                name = sitestate.find_update(self.folder, epoch, clock, message.attempt)
                sitestate.settle(self.folder, name, message.verdict, self._give_back)
                self.pipe.send(ipc.SettledHere(epoch=message.epoch, clock=message.clock))
            case ipc.Stop():
                self.pipe.send(ipc.Stopped())
            case ipc.Load():
                self.pipe.send(ipc.WorkerFailed(reason="a job is loaded already.", fatal=True))

    def make_init(self, path: Path) -> ipc.InitMade:
        """Write version 0."""
        _tiled(self._floats("params"), derive_seed(self.load.spec.seed, "stub", "init"))
        for name in ("buffers", "ints", "control"):
            if name in self.base:
                self.base[name].fill(0)
        parts = [array.data.cast("B") for array in self.base.values() if array.nbytes]
        meta = SnapshotMeta(
            job=self.load.job,
            version=0,
            digest=digest_of(parts),
            layout=self.layout,
            parts=dense_parts(self.layout, "snapshot", control=self.control),
        )
        return ipc.InitMade(path=str(path), bytes=write_body_file(path, meta, self._views()))

    def train(self, message: ipc.TrainPeriod) -> None:
        """Pretend a period: read the base, wait if told to, write an update."""
        name = sitestate.update_name(message.epoch, message.clock, message.attempt)
        if (self.folder / name).exists():
            self._trained(message, self.folder / name)
            return
        sitestate.forget_queued(self.folder, message.applied)
        self._read(message)
        if message.evaluate:
            self._evaluated(message.base_version)
        begin = self._clock()
        steps = 0 if self._wait(message) else self._steps(message, begin)
        if not steps:
            self.pipe.send(ipc.Stopped())
            return
        if message.clock in (self._number("fail_at", -1), self._number("fatal_at", -1)):
            raise RefusedError(f"the stub was told to fail at clock {message.clock}.")
        _tiled(self.delta, self._seed(message.clock))
        if self._residual is not None:
            self.delta += self._residual
        if message.clock == self._number("nan_at", -1):
            self.delta[-1] = math.nan
        norm = float(np.linalg.norm(self.delta))
        with sitestate.new_update(self.folder, name) as update:
            if message.clock == self._number("die_at", -1):
                (update / sitestate.BODY).write_bytes(b"half")
                os.kill(os.getpid(), signal.SIGKILL)
            self._write(message, update, steps, norm, self._clock() - begin)
        self._trained(message, self.folder / name)

    def _write(
        self, message: ipc.TrainPeriod, update: Path, steps: int, norm: float, seconds: float
    ) -> None:
        examples = 0.0 if message.clock == self._number("zero_at", -1) else float(
            self._number("train_examples", 100)
        )  # fmt: skip
        of = message.steps or message.epochs
        meta = UpdateMeta(
            job=self.load.job,
            site=self.load.site,
            epoch=message.epoch,
            clock=message.clock,
            attempt=message.attempt,
            base_version=message.base_version,
            base_digest=message.base_digest,
            layout_digest=self.layout.digest(),
            examples=examples,
            steps=steps,
            effective_steps=float(steps),
            parts=dense_parts(self.layout, "update", control=self.control),
            metrics={"train_loss": metric(1.0 / (1 + message.clock), examples)},
            norm=norm if math.isfinite(norm) else 0.0,
            train_seconds=seconds,
        )
        views = self._views()
        views[0] = self.delta.data
        size = write_body_file(update / sitestate.BODY, meta, views)
        name = sitestate.update_name(message.epoch, message.clock, message.attempt)
        write_state(update / sitestate.STATE, {"update": name}, ())
        sitestate.write_record(update, meta, size, of=of, cut=steps < of)

    def _trained(self, message: ipc.TrainPeriod, update: Path) -> None:
        record = sitestate.read_record(update)
        self.pipe.send(
            ipc.Trained(
                epoch=message.epoch,
                clock=message.clock,
                attempt=message.attempt,
                path=str(update),
                bytes=record.bytes,
                seconds=record.seconds,
                steps=record.steps,
                of=record.of,
                cut=record.cut,
            )
        )

    def _evaluated(self, version: int) -> None:
        examples = float(self._number("eval_examples", 50))
        score = version / (version + 1)
        metrics = {
            "accuracy": metric(score, examples),
            "loss": metric(1 - score, examples),
        }
        self.pipe.send(
            ipc.EvaluatedHere(
                version=version, examples=examples, metrics=metrics if examples else {}
            )
        )

    def _read(self, message: ipc.TrainPeriod | ipc.EvaluateBase) -> None:
        views = {name: a.data.cast("B") for name, a in self.base.items() if a.nbytes}
        read_snapshot(
            Path(message.base_path),
            layout=self.layout,
            digest=message.base_digest,
            control=self.control,
            into=views,
        )

    def _views(self) -> list[memoryview]:
        return [array.data for array in self.base.values()]

    def _floats(self, part: Part) -> Floats:
        return self.base[part].view(np.float32)

    def _seed(self, clock: int) -> int:
        return derive_seed(self.load.spec.seed, "stub", self.load.site, str(clock))

    def _steps(self, message: ipc.TrainPeriod, begin: float) -> int:
        """Let the time of the steps pass; how many were done, 0 when a Stop came instead."""
        of = message.steps or message.epochs  # an epoch is a step here
        each = float(self.options.get("step_seconds", 0.0))
        every = self._number("straggle_at", 0)
        if every and message.clock and message.clock % every == 0:
            each *= float(self.options.get("straggle", 5.0))
        reported = begin
        for step in range(1, of + 1):
            if self.pipe.stop_within(begin + each * step - self._clock()):
                return 0
            now = self._clock()
            if message.seconds and now - begin >= message.seconds:
                return step
            if now - reported >= PROGRESS_EVERY_SECONDS:
                reported = now
                self._stepped(message, step, of)
        return of

    def _stepped(self, message: ipc.TrainPeriod, step: int, of: int) -> None:
        self.pipe.send(ipc.Stepped(epoch=message.epoch, clock=message.clock, step=step, of=of))

    def _wait(self, message: ipc.TrainPeriod) -> bool:
        """Wait for a byte from the FIFO, if one is named; True when a Stop came instead."""
        self._stepped(message, 0, message.steps or message.epochs)
        path = self.options.get("wait")
        if not path:
            return self.pipe.stop_asked()
        gate = os.open(path, os.O_RDWR)  # keeps a writer, so that nobody's leaving ends the wait
        try:
            while True:
                if self.pipe.stop_asked():
                    return True
                if self.pipe.wait_with(gate):
                    os.read(gate, 1)
                    return False
        finally:
            os.close(gate)

    @property
    def _residual(self) -> Floats | None:
        return _read_residual(sitestate.current_state(self.folder), self.delta.size)

    def _give_back(self, state: Path, body: Path, target: Path, returned: list[str]) -> None:
        residual = np.empty_like(self.delta)
        read_delta(body, residual.data.cast("B"))
        before = _read_residual(state, self.delta.size)
        if before is not None:
            residual += before
        stored = Stored("residual", "F32", residual.shape, residual.data)
        write_state(target, read_value(state) | {"returned": returned}, (stored,))


def _read_residual(path: Path, elements: int) -> Floats | None:
    try:
        with path.open("rb") as file:
            reader = StateReader(file)
            if "residual" not in reader.entries:
                return None
            residual = np.empty(elements, np.float32)
            reader.read_into("residual", residual.data)
            return residual
    except FileNotFoundError:
        return None


def failed(error: Exception, message: ipc.ToWorker, options: Mapping[str, str]) -> ipc.WorkerFailed:
    """The answer to a request that could not be carried out."""
    if isinstance(message, ipc.TrainPeriod):
        return ipc.WorkerFailed(
            reason=str(error),
            fatal=options.get("fatal_at") == str(message.clock),
            epoch=message.epoch,
            clock=message.clock,
            attempt=message.attempt,
        )
    return ipc.WorkerFailed(reason=str(error), fatal=isinstance(message, ipc.Load))


def serve(pipe: Pipe) -> None:
    """Answer requests until the agent closes the pipe."""
    stub: Stub | None = None
    while True:
        message = pipe.next()
        try:
            if stub is not None:
                stub.handle(message)
            elif isinstance(message, ipc.Load):
                stub = Stub(message, pipe)
                pipe.send(stub.loaded())
            else:
                raise RefusedError("the first message must be load.")
        except Exception as error:  # whatever it was: the agent gets the reason, the log the rest
            traceback.print_exc(file=sys.stderr)
            pipe.send(failed(error, message, stub.options if stub else {}))


def main() -> None:
    """Run until stdin closes."""
    live_with_parent()
    try:
        serve(take_over_stdio())
    except AgentGoneError:
        return


if __name__ == "__main__":
    main()
