"""The fold process as the engine sees it: a line in, a line out, and little memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from coordinator import foldclient
from coordinator.foldapi import (
    DropJob,
    Fold,
    FoldRequest,
    Quit,
    Screen,
    TakeInit,
    answer_decoder,
)
from coordinator.foldclient import memory_mb
from tests.coordinator.folding import JOB, Bench, layout, spec, tensor, write_init

SECONDS = 60.0
ROOT = Path(__file__).resolve().parents[2]


class Process:
    def __init__(self) -> None:
        self.popen = subprocess.Popen(
            foldclient.COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "SKERRY_JOBS_RESIDENT_BYTES_MAX": "1000000000"},
        )

    def ask(self, request: FoldRequest) -> Any:
        assert self.popen.stdin
        assert self.popen.stdout
        self.popen.stdin.write(msgspec.json.encode(request) + b"\n")
        self.popen.stdin.flush()
        answer = answer_decoder.decode(self.popen.stdout.readline())
        assert answer.id == request.id
        return answer

    def memory(self) -> tuple[float, float]:
        found = memory_mb(self.popen.pid)
        assert found
        return found


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    made = Process()
    try:
        yield made
    finally:
        made.popen.kill()
        made.popen.wait(SECONDS)


def test_peak_memory_does_not_grow_with_the_number_of_sites(
    process: Process, tmp_path: Path
) -> None:
    """PC-019: 16 updates of an 8 MB model (64 MiB, scaled): at most 4.5 models above idle."""
    elements = 2_000_000
    process.ask(DropJob(id=1, job="none", folder=str(tmp_path)))
    idle, _ = process.memory()
    bench = Bench(tmp_path, layout(tensor("w", (elements,))), spec())
    write_init(tmp_path / "init.body", bench.layout, torch.zeros(elements))
    where = {"job": JOB, "folder": str(tmp_path)}
    taken = process.ask(TakeInit(id=2, spec=bench.spec, **where))
    cohort = []
    for k in range(16):
        member = bench.spool(f"s{k:02}", torch.full((elements,), float(k)))
        facts = process.ask(Screen(id=3 + k, spool=member.spool, **where)).facts
        assert not facts.problem
        cohort.append(member)
    folded = process.ask(
        Fold(
            id=99, spec=bench.spec, version=1, base_version=0, base_digest=taken.facts.digest,
            cohort=tuple(cohort), active_sites=16, **where,
        )
    )  # fmt: skip
    assert folded.facts.version == 1
    assert bench.version(1).parts["params"][0] == 7.5
    _, peak = process.memory()
    assert peak - idle < 4.5 * 4 * elements / 1e6


def test_a_request_that_cannot_be_carried_out_is_answered_and_the_process_lives(
    process: Process, tmp_path: Path
) -> None:
    where = {"job": "nowhere", "folder": str(tmp_path)}
    answer = process.ask(Screen(id=7, spool="x.body", **where))
    assert answer.unknown_state
    assert answer.facts.problem == answer.fault
    assert process.ask(DropJob(id=8, **where)).fault == ""


@pytest.mark.parametrize("how", ["quit", "close"])
def test_it_ends_when_told_to_or_when_its_engine_is_gone(how: str) -> None:
    process = Process()
    try:
        process.ask(DropJob(id=1, job="j", folder="/nowhere"))
        assert process.popen.stdin
        if how == "quit":
            process.popen.stdin.write(msgspec.json.encode(Quit(id=0, job="", folder="")) + b"\n")
            process.popen.stdin.flush()
        else:
            process.popen.stdin.close()
        assert process.popen.wait(SECONDS) == 0
    finally:
        process.popen.kill()
        process.popen.wait(SECONDS)


def test_it_dies_with_its_engine_even_while_it_imports_torch(tmp_path: Path) -> None:
    """PC-083: `kill -9` of the coordinator leaves no process behind, whatever that one is doing."""
    (tmp_path / "torch.py").write_text(
        "import os, signal\nos.write(1, b'importing\\n')\nsignal.pause()\n"
    )
    program = (
        "import signal, subprocess\nfrom coordinator.foldclient import COMMAND\n"
        "child = subprocess.Popen(COMMAND, stdin=subprocess.PIPE)\nsignal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    ) as engine:  # fmt: skip
        assert engine.stdout
        assert engine.stdout.readline() == b"importing\n"
        engine.kill()
        assert engine.stdout.read() == b""  # the end comes when both have let go of the pipe


def test_whatever_is_printed_never_stands_between_answers() -> None:
    program = (
        "import os, sys\n"
        "from coordinator import fold\n"
        "from coordinator.foldapi import Done\n"
        "def handle(self, request):\n"
        "    print('stray'); os.write(1, b'stray too\\n')\n"
        "    return Done(id=request.id)\n"
        "fold.FoldService.handle = handle\n"
        "sys.exit(fold.main())\n"
    )
    line = msgspec.json.encode(DropJob(id=5, job="j", folder="/nowhere")) + b"\n"
    done = subprocess.run(
        [sys.executable, "-c", program], input=line, capture_output=True, cwd=ROOT,
        timeout=SECONDS, check=True,
    )  # fmt: skip
    assert answer_decoder.decode(done.stdout).id == 5
    assert done.stdout.count(b"\n") == 1
    assert b"stray too" in done.stderr
