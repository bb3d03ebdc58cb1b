from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client import ipc, sitestate
from client.pipes import Pipe
from client.statefile import StateReader, read_value
from client.stub import Stub, pretend_delta, pretend_params
from protocol.bodies import BodyMeta, SnapshotMeta, UpdateMeta
from protocol.bodyio import BodyReader
from protocol.jobspec import Local
from tests.client.workerprocess import WorkerProcess, make_load, make_spec, make_train


def read_body(path: Path) -> tuple[BodyMeta, dict[str, bytes]]:
    with path.open("rb") as file:
        reader = BodyReader(file.readinto)
        parts = {part.name: bytearray(part.bytes) for part in reader.meta.parts}
        for index, offset, payload in reader.frames():
            parts[reader.meta.parts[index].name][offset : offset + len(payload)] = payload
    return reader.meta, {name: bytes(raw) for name, raw in parts.items()}


class Started:
    """A stub with version 0 made."""

    def __init__(self, folder: Path, worker: WorkerProcess, **fields: Any) -> None:
        self.worker = worker
        self.folder = folder
        self.load = make_load(folder, **fields)
        self.loaded = worker.ask(self.load)
        self.base = folder / "base-0.body"
        made = worker.ask(ipc.MakeInit(path=str(self.base)))
        assert made.bytes == self.base.stat().st_size
        self.meta = read_body(self.base)[0]
        assert isinstance(self.meta, SnapshotMeta)
        self.digest = self.meta.digest

    def train(self, clock: int = 0, **fields: Any) -> Any:
        return self.worker.ask(make_train(self.base, self.digest, clock, **fields))

    def settle(self, verdict: str, clock: int = 0) -> Any:
        return self.worker.ask(
            ipc.Settle(epoch=1, clock=clock, attempt=1, verdict=verdict)  # type: ignore[arg-type]
        )


@pytest.fixture
def worker():
    with WorkerProcess("client.stub") as process:
        yield process


def test_an_update_is_real_and_its_delta_can_be_computed_by_a_test(
    tmp_path: Path, worker: WorkerProcess
):
    spec = make_spec(options={"elements": 5000, "buffers": 1}, local=Local(scaffold=True))
    stub = Started(tmp_path, worker, spec=spec)
    assert stub.loaded.control
    trained = stub.train()
    meta, parts = read_body(Path(trained.path) / sitestate.BODY)
    assert isinstance(meta, UpdateMeta)
    assert (meta.base_digest, meta.layout_digest) == (stub.digest, stub.loaded.layout.digest())
    assert list(parts) == ["delta", "buffers", "ints", "control"]
    expected = pretend_delta(7, "site-1", 0, 5000)
    np.testing.assert_array_equal(np.frombuffer(parts["delta"], np.float32), expected)
    base = read_body(stub.base)[1]
    np.testing.assert_array_equal(
        np.frombuffer(base["params"], np.float32), pretend_params(7, 5000)
    )
    record = sitestate.read_record(Path(trained.path))
    assert record.bytes == trained.bytes == (Path(trained.path) / "body").stat().st_size


def test_a_period_that_is_asked_for_again_is_answered_from_its_folder(
    tmp_path: Path, worker: WorkerProcess
):
    stub = Started(tmp_path, worker)
    first = stub.train()
    before = (Path(first.path) / "body").stat().st_mtime_ns
    assert stub.train() == first
    assert (Path(first.path) / "body").stat().st_mtime_ns == before


def test_a_returned_update_is_added_to_the_next_one(tmp_path: Path, worker: WorkerProcess):
    stub = Started(tmp_path, worker)
    stub.train(0)
    stub.settle("refused_return", 0)
    stub.settle("refused_return", 0)
    trained = stub.train(1)
    delta = np.frombuffer(read_body(Path(trained.path) / "body")[1]["delta"], np.float32)
    expected = pretend_delta(7, "site-1", 1, 1000) + pretend_delta(7, "site-1", 0, 1000)
    np.testing.assert_array_equal(delta, expected)


def test_failures_come_when_they_were_ordered(tmp_path: Path, worker: WorkerProcess):
    stub = Started(tmp_path, worker, options={"fail_at": "1", "fatal_at": "2", "zero_at": "3"})
    assert isinstance(stub.train(0), ipc.Trained)
    one, two = stub.train(1), stub.train(2)
    assert (one.clock, one.fatal, two.fatal) == (1, False, True)
    meta, _ = read_body(Path(stub.train(3).path) / "body")
    assert isinstance(meta, UpdateMeta)
    assert meta.examples == 0


def test_a_nan_is_sent_when_it_was_ordered(tmp_path: Path, worker: WorkerProcess):
    stub = Started(tmp_path, worker, options={"nan_at": "0"})
    _, parts = read_body(Path(stub.train(0).path) / "body")
    assert np.isnan(np.frombuffer(parts["delta"], np.float32)).sum() == 1


def test_another_layout_is_refused_by_name_when_the_base_is_read(
    tmp_path: Path, worker: WorkerProcess
):
    stub = Started(tmp_path, worker)
    with WorkerProcess("client.stub") as other:
        other.ask(make_load(tmp_path / "other", options={"layout": "other"}))
        answer = other.ask(make_train(stub.base, stub.digest))
    assert isinstance(answer, ipc.WorkerFailed)
    assert "extra.bias" in answer.reason


def test_a_waiting_period_goes_on_at_a_byte_and_ends_at_a_stop(
    tmp_path: Path, worker: WorkerProcess
):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    stub = Started(tmp_path / "job", worker, options={"wait": str(gate)})
    worker.send(make_train(stub.base, stub.digest, 0))
    assert isinstance(worker.receive(), ipc.Stepped)
    worker.send(ipc.Stop())
    assert isinstance(worker.receive(), ipc.Stopped)
    worker.send(make_train(stub.base, stub.digest, 0))
    assert isinstance(worker.receive(), ipc.Stepped)
    with gate.open("wb") as file:
        file.write(b"1")
    assert isinstance(worker.receive(), ipc.Trained)


class Clockwork(Pipe):
    """A pipe on which nothing comes: time passes as the stub lets it pass."""

    def __init__(self) -> None:
        super().__init__(-1, -1)
        self.now = 100.0
        self.sent: list[ipc.WorkerMessage] = []

    def stop_asked(self) -> bool:
        return False

    def stop_within(self, seconds: float) -> bool:
        self.now += max(seconds, 0.0)
        return False

    def send(self, message: ipc.WorkerMessage) -> None:
        self.sent.append(message)


@pytest.mark.parametrize(
    ("clock", "seconds", "steps", "took"),
    [(0, 0.0, 10, 5.0), (1, 2.0, 4, 2.0), (1, 0.1, 1, 0.5), (3, 0.0, 10, 50.0), (3, 9.0, 2, 10.0)],
)
def test_steps_take_their_time_and_more_at_a_straggling_clock(
    tmp_path: Path, clock: int, seconds: float, steps: int, took: float
):
    options = {"step_seconds": "0.5", "straggle_at": "3", "straggle": "10"}
    pipe = Clockwork()
    stub = Stub(make_load(tmp_path, options=options), pipe, lambda: pipe.now)
    base = tmp_path / "base"
    stub.make_init(base)
    digest = read_body(base)[0].digest  # type: ignore[union-attr]
    train = make_train(base, digest, clock, steps=10, seconds=seconds)
    stub.train(train)
    trained = pipe.sent[-1]
    assert isinstance(trained, ipc.Trained)
    assert (trained.steps, trained.of, trained.cut) == (steps, 10, steps < 10)
    assert trained.seconds == pytest.approx(took)
    meta, _ = read_body(Path(trained.path) / "body")
    assert isinstance(meta, UpdateMeta)
    assert (meta.steps, meta.effective_steps) == (steps, steps)
    assert sum(isinstance(message, ipc.Stepped) for message in pipe.sent) <= 1 + took / 2
    stub.train(train)
    assert pipe.sent[-1] == trained, "asked for again it is answered from its folder"


def test_a_stop_ends_a_slow_step_at_once(tmp_path: Path, worker: WorkerProcess):
    stub = Started(tmp_path, worker, options={"step_seconds": "3600"})
    worker.send(make_train(stub.base, stub.digest))
    assert isinstance(worker.receive(), ipc.Stepped)
    worker.send(ipc.Stop())
    assert isinstance(worker.receive(), ipc.Stopped)


def test_a_death_in_the_middle_leaves_no_update_and_is_cleaned_up(tmp_path: Path):
    with WorkerProcess("client.stub") as first:
        stub = Started(tmp_path, first, options={"die_at": "0"})
        first.send(make_train(stub.base, stub.digest, 0))
        assert first.process.wait(30) < 0
    assert not list(tmp_path.glob("update-*"))
    assert list(tmp_path.glob(".tmp-*"))
    with WorkerProcess("client.stub") as second:
        second.ask(make_load(tmp_path))
        assert not list(tmp_path.glob(".tmp-*"))
        assert isinstance(second.ask(make_train(stub.base, stub.digest, 0)), ipc.Trained)


def test_it_ends_when_its_agent_closes_the_pipe(tmp_path: Path, worker: WorkerProcess):
    worker.ask(make_load(tmp_path))
    assert worker.close() == 0


def test_settling_moves_the_state(tmp_path: Path, worker: WorkerProcess):
    stub = Started(tmp_path, worker)
    stub.train(0)
    stub.settle("counted", 0)
    current = sitestate.current_state(tmp_path)
    assert read_value(current)["update"] == "update-1-0-1"
    assert not list(tmp_path.glob("update-*"))
    with current.open("rb") as file:
        assert StateReader(file).entries == {}
