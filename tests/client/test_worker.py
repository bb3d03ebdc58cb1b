from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from client import ipc, sitestate
from protocol.jobspec import Optimizer
from tests.client.localjobs import read_parts
from tests.client.workerprocess import ROOT, WorkerProcess, make_load, make_spec, make_train

TASKS = ROOT / "tests" / "client" / "sampletasks.py"


@pytest.fixture
def worker():
    with WorkerProcess("client.worker") as process:
        yield process


def start(worker: WorkerProcess, folder: Path, name: str, **load: Any) -> tuple[Path, str]:
    loaded = worker.ask(make_load(folder, f"{TASKS}:{name}", **load))
    assert isinstance(loaded, ipc.Loaded), loaded
    base = folder / "base-0.body"
    made = worker.ask(ipc.MakeInit(path=str(base)))
    assert made.bytes == base.stat().st_size
    return base, read_parts(base)[0].digest


def status(pid: int, name: str) -> int:
    """A number of /proc/PID/status: VmRSS in kB, Threads."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise AssertionError(f"no {name}")


def test_a_period_goes_through_the_process_and_prints_do_not_disturb_it(
    tmp_path: Path, worker: WorkerProcess
):
    base, digest = start(worker, tmp_path, "Linear")
    evaluated = worker.ask(make_train(base, digest, evaluate=True))
    assert isinstance(evaluated, ipc.EvaluatedHere)
    assert evaluated.examples == 8
    assert set(evaluated.metrics) == {"loss", "accuracy"}
    progress = worker.receive()
    trained = worker.receive()
    assert (progress.step, progress.of) == (0, 2)
    assert isinstance(trained, ipc.Trained)
    meta, _ = read_parts(Path(trained.path) / sitestate.BODY)
    assert (meta.epoch, meta.clock, meta.attempt, meta.base_digest) == (1, 0, 1, digest)
    assert meta.norm > 0
    settled = worker.ask(ipc.Settle(epoch=1, clock=0, attempt=1, verdict="counted"))
    assert settled == ipc.SettledHere(epoch=1, clock=0)
    assert worker.close() == 0


def test_what_the_users_code_raises_comes_with_file_and_line(tmp_path: Path, worker: WorkerProcess):
    base, digest = start(worker, tmp_path, "Broken")
    failed = worker.ask(make_train(base, digest))
    assert isinstance(failed, ipc.WorkerFailed)
    line = next(
        number
        for number, text in enumerate(TASKS.read_text().splitlines(), 1)
        if "torch.zeros(3, 3)" in text
    )
    assert failed.reason.startswith(f"sampletasks.py:{line} in loss: RuntimeError: mat1 and mat2")
    assert (failed.clock, failed.attempt, failed.fatal) == (0, 1, False)
    errors = worker.errors()
    assert "loss was called" in errors
    assert "Traceback" in errors


@pytest.mark.parametrize(
    ("reference", "words"),
    [("nowhere.py:Task", "there is no task file"), (f"{TASKS}:Nothing", "its tasks: Linear, Cons")],
)
def test_a_task_that_cannot_be_loaded_is_a_fatal_failure(
    tmp_path: Path, worker: WorkerProcess, reference: str, words: str
):
    failed = worker.ask(make_load(tmp_path, reference))
    assert isinstance(failed, ipc.WorkerFailed)
    assert failed.fatal
    assert words in failed.reason


def test_a_stop_ends_the_period_between_two_steps_and_leaves_nothing(
    tmp_path: Path, worker: WorkerProcess
):
    base, digest = start(worker, tmp_path, "Linear")
    worker.send(make_train(base, digest, steps=10**8))
    assert isinstance(worker.receive(), ipc.Stepped)
    worker.send(ipc.Stop())
    answer = worker.receive()
    while isinstance(answer, ipc.Stepped):
        answer = worker.receive()
    assert isinstance(answer, ipc.Stopped)
    assert not list(tmp_path.glob("*update*"))
    assert isinstance(worker.ask(make_train(base, digest)), ipc.Trained)


def test_a_killed_period_is_repeated_from_the_base_it_was_told(tmp_path: Path):
    """PC-046: killed after 3 of 10 steps: base 1.0 and 10 x 0.04 give the change 0.4, not 1.4."""
    spec = make_spec(optimizer=Optimizer(lr=0.04, batch_size=1))
    with WorkerProcess("client.worker") as first:
        base, digest = start(first, tmp_path, "Constant", spec=spec)
        first.send(make_train(base, digest, steps=10**8))
        assert isinstance(first.receive(), ipc.Stepped)
        first.process.kill()
        first.process.wait(30)
    with WorkerProcess("client.worker") as second:
        second.ask(make_load(tmp_path, f"{TASKS}:Constant", spec=spec))
        trained = second.ask(make_train(base, digest, attempt=2, steps=10))
        meta, parts = read_parts(Path(trained.path) / sitestate.BODY)
    assert meta.base_digest == digest
    assert parts["delta"].tolist() == pytest.approx([-0.4])


def test_a_damaged_base_and_another_digest_are_refused(tmp_path: Path, worker: WorkerProcess):
    base, digest = start(worker, tmp_path, "Linear")
    refused = worker.ask(make_train(base, "0" * 64))
    assert "announced 000000000000" in refused.reason
    raw = bytearray(base.read_bytes())
    raw[-30] ^= 1
    base.write_bytes(raw)
    assert f"announced {digest[:12]}" in worker.ask(make_train(base, digest)).reason


def test_the_process_does_not_grow_over_200_periods(tmp_path: Path, worker: WorkerProcess):
    """PC-049 (scaled): resident memory after 200 periods within 2 percent of that after 20."""
    spec = make_spec(optimizer=Optimizer(name="adam", lr=0.01, batch_size=4))
    base, digest = start(worker, tmp_path, "Normed", spec=spec)
    early = 0
    for clock in range(200):
        answer = worker.ask(make_train(base, digest, clock, evaluate=True))
        while not isinstance(answer, ipc.Trained):
            assert not isinstance(answer, ipc.WorkerFailed), answer
            answer = worker.receive()
        worker.ask(ipc.Settle(epoch=1, clock=clock, attempt=1, verdict="counted"))
        if clock == 19:
            early = status(worker.process.pid, "VmRSS")
    assert status(worker.process.pid, "VmRSS") < 1.02 * early + 1024


def test_loader_processes_are_forked_from_a_process_without_threads(
    tmp_path: Path, worker: WorkerProcess
):
    """PC-056: a DataLoader with 2 processes, 50 periods of one pass, without a hang."""
    spec = make_spec(options={"workers": 2})
    base, digest = start(worker, tmp_path, "Loaders", spec=spec)
    assert status(worker.process.pid, "Threads") == 1
    for clock in range(50):
        trained = worker.ask(make_train(base, digest, clock, steps=0, epochs=1))
        assert isinstance(trained, ipc.Trained), trained
        worker.ask(ipc.Settle(epoch=1, clock=clock, attempt=1, verdict="counted"))
    assert worker.close() == 0


def test_the_worker_dies_with_an_agent_that_was_killed(tmp_path: Path):
    """The agent is killed while the worker trains: nothing is left running."""
    script = (
        "import subprocess, sys, time\n"
        "worker = subprocess.Popen([sys.executable, '-m', 'client.worker'],"
        " stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "for line in sys.stdin.buffer:\n"
        "    worker.stdin.write(line)\n"
        "    worker.stdin.flush()\n"
        "    sys.stdout.buffer.write(worker.stdout.readline())\n"
        "    sys.stdout.write(str(worker.pid) + '\\n')\n"
        "    sys.stdout.flush()\n"
    )
    agent = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert agent.stdin is not None
    assert agent.stdout is not None

    def ask(message: ipc.WorkerMessage) -> tuple[Any, int]:
        agent.stdin.write(msgspec.json.encode(message) + b"\n")
        agent.stdin.flush()
        return ipc.from_worker.decode(agent.stdout.readline()), int(agent.stdout.readline())

    ask(make_load(tmp_path, f"{TASKS}:Linear"))
    base = tmp_path / "base-0.body"
    ask(ipc.MakeInit(path=str(base)))
    digest = read_parts(base)[0].digest
    _, pid = ask(make_train(base, digest, steps=10**8))
    watch = os.pidfd_open(pid)
    agent.send_signal(signal.SIGKILL)
    agent.wait(30)
    ready, _, _ = select.select([watch], [], [], 30)
    os.close(watch)
    agent.stdin.close()
    agent.stdout.close()
    assert ready, "the worker outlived its agent"
