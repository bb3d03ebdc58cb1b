from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from client import ipc
from client.agentsettings import AgentSettings, TaskSettings
from client.allow import AllowList
from client.sessionapi import (
    AnyStimulus,
    StartWorker,
    StopWorker,
    TaskDeclined,
    Tell,
    WorkerDied,
    WorkerSaid,
)
from client.sitefiles import SiteFolder, SiteIdentity
from client.supervisor import LINE_CHARS_MAX, Supervisor, Worker, clean_environment
from protocol.names import file_id
from tests.client.fake_coordinator import JOB, stub_spec

ROOT = Path(__file__).parents[2]
IDENTITY = SiteIdentity(name="a", role="site", url="", coordinator="c", protocol=1)


class Script:
    """A worker that is a few lines of Python, and what was heard of it."""

    def __init__(self, folder: Path, code: str) -> None:
        self.folder = folder
        self.code = code
        self.said: asyncio.Queue[ipc.FromWorker] = asyncio.Queue()
        self.died: asyncio.Queue[str] = asyncio.Queue()

    async def start(self) -> Worker:
        self.worker = await Worker.start(
            (sys.executable, "-c", self.code),
            folder=self.folder,
            environment=clean_environment(os.environ),
            on_message=self.said.put_nowait,
            on_death=self.died.put_nowait,
        )
        return self.worker

    async def death(self) -> str:
        async with asyncio.timeout(20):
            return await self.died.get()

    async def word(self) -> ipc.FromWorker:
        async with asyncio.timeout(20):
            return await self.said.get()


READY = 'import sys; print(\'{"type":"stopped"}\', flush=True);'


async def test_a_message_to_the_worker_arrives_and_its_answer_comes_back(tmp_path: Path):
    code = 'import sys\nfor line in sys.stdin: print(\'{"type":"stopped"}\', flush=True)'
    script = Script(tmp_path, code)
    worker = await script.start()
    worker.tell(ipc.Stop())
    assert await script.word() == ipc.Stopped()
    await worker.stop()
    assert script.died.empty()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; print('no data here', file=sys.stderr); sys.exit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL (often: out of memory)"),
        ("print('hello', flush=True); input()", "no message"),
        ('print(\'{"type":"no such"}\', flush=True); input()', "no message"),
    ],
)
async def test_a_death_is_told_with_its_reason(tmp_path: Path, code: str, words: str):
    script = Script(tmp_path, code)
    await script.start()
    assert words in await script.death()


async def test_the_last_lines_of_stderr_are_in_the_reason(tmp_path: Path):
    code = (
        "import sys\nfor i in range(200): print(f'line {i}', file=sys.stderr)\n"
        "sys.stderr.write('10%\\r50%\\r99%' + 'x' * 100000); sys.exit(1)"
    )
    script = Script(tmp_path, code)
    await script.start()
    reason = await script.death()
    assert "line 199" in reason
    assert "line 100\n" not in reason
    assert max(len(line) for line in reason.splitlines()) <= LINE_CHARS_MAX


async def test_a_worker_that_will_not_end_is_ended_with_all_it_started_within_two_seconds(
    tmp_path: Path,
):
    """PC-083: nothing that a task started outlives the agent's Ctrl-C."""
    code = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import signal;"
        "signal.signal(15, signal.SIG_IGN);print(1, flush=True);signal.pause()'],"
        " stdout=sys.stderr)\n"
        f"{READY}\nsignal.pause()"
    )
    script = Script(tmp_path, code)
    worker = await script.start()
    await script.word()
    processes = [psutil.Process(worker.pid), *psutil.Process(worker.pid).children(recursive=True)]
    assert len(processes) == 2
    begin = time.monotonic()
    await worker.stop()
    assert time.monotonic() - begin < 1.9
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, 2)
    assert not alive
    assert script.died.empty()


async def test_children_of_a_worker_that_died_are_ended_too(tmp_path: Path):
    code = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        'print(\'{"type":"init_made","path":"x","bytes":%d}\' % child.pid, flush=True)\n'
        "os.kill(os.getpid(), 9)"
    )
    script = Script(tmp_path, code)
    await script.start()
    made = await script.word()
    assert isinstance(made, ipc.InitMade)
    await script.death()
    assert not psutil.pid_exists(made.bytes) or await asyncio.to_thread(_ends, made.bytes)


def _ends(pid: int) -> bool:
    try:
        psutil.Process(pid).wait(timeout=2)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_the_workers_environment_holds_none_of_the_agents_settings(tmp_path: Path):
    inherited = {"SKERRY_TOKEN": "secret", "HOME": "/h", "PYTHONPATH": "/user", "LANG": "C"}
    found = clean_environment(inherited, base=tmp_path, threads=3)
    assert not [key for key in found if key.startswith("SKERRY")]
    assert found["HOME"] == "/h"
    assert found["PYTHONPATH"].split(os.pathsep) == [str(ROOT), str(tmp_path), "/user"]
    assert found["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in clean_environment({})


# ---------------------------------------------------------------- in the session's order


class Supervised:
    def __init__(self, folder: Path, command: tuple[str, ...]) -> None:
        self.heard: asyncio.Queue[AnyStimulus] = asyncio.Queue()
        settings = AgentSettings(
            folder=folder,
            tasks={"stub": TaskSettings(reference="client.stub:Stub")},
            worker_command=command,
        )
        site = SiteFolder(folder)
        allowed = AllowList(settings.tasks, folder)
        self.supervisor = Supervisor(settings, allowed, site, IDENTITY, self.heard.put_nowait)
        self.task = asyncio.create_task(self.supervisor.run())

    async def hear(self) -> AnyStimulus:
        async with asyncio.timeout(20):
            return await self.heard.get()

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
async def stub(tmp_path: Path) -> AsyncIterator[Supervised]:
    made = Supervised(tmp_path, (sys.executable, "-m", "client.stub"))
    yield made
    await made.close()


def start(number: int, task: str = "stub") -> StartWorker:
    spec = stub_spec()
    if task != "stub":
        spec = type(spec)(name="x", task=type(spec.task)(name=task), stop=spec.stop)
    return StartWorker(worker=number, job=JOB, spec=spec, evaluator=False)


async def test_a_started_worker_is_loaded_in_the_jobs_folder(stub: Supervised, tmp_path: Path):
    stub.supervisor.order(start(1))
    said = await stub.hear()
    assert isinstance(said, WorkerSaid)
    assert isinstance(said.message, ipc.Loaded)
    assert (tmp_path / "jobs" / file_id(JOB)).is_dir()


async def test_a_stopped_worker_is_not_heard_and_the_next_one_is(stub: Supervised):
    for order in (start(1), StopWorker(worker=1, reason="x"), start(2)):
        stub.supervisor.order(order)
    stub.supervisor.order(Tell(worker=1, message=ipc.Stop()))  # too late: nobody gets it
    stub.supervisor.order(Tell(worker=2, message=ipc.Stop()))
    first, second = await stub.hear(), await stub.hear()
    assert isinstance(first, WorkerSaid)
    assert isinstance(second, WorkerSaid)
    assert (first.worker, second.worker) == (2, 2)
    assert isinstance(first.message, ipc.Loaded)
    assert second.message == ipc.Stopped()


async def test_a_task_that_is_not_allowed_starts_nothing(stub: Supervised):
    stub.supervisor.order(start(1, "miner"))
    declined = await stub.hear()
    assert isinstance(declined, TaskDeclined)
    assert "'miner'" in declined.reason
    assert not psutil.Process().children()


async def test_a_command_that_is_not_there_is_a_death_with_its_name(tmp_path: Path):
    made = Supervised(tmp_path, ("/no/such/python",))
    made.supervisor.order(start(1))
    died = await made.hear()
    await made.close()
    assert isinstance(died, WorkerDied)
    assert "/no/such/python" in died.reason


async def test_closing_ends_the_worker(stub: Supervised):
    stub.supervisor.order(start(1))
    await stub.hear()
    workers = psutil.Process().children()
    assert workers
    await stub.close()
    _, alive = await asyncio.to_thread(psutil.wait_procs, workers, 2)
    assert not alive
