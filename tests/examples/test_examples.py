"""The examples: valid jobs, tasks that run, and a port that is as short as it is said to be."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from client.taskcheck import check
from protocol import jobfile
from protocol.jobspec import JobSpec, Period, Stop, TaskRef
from skerry.cli.jobs import read_job
from skerry.datasets import has_fashion_mnist
from skerry.federation import EXAMPLES

JOBS = sorted(EXAMPLES.glob("*/job.toml"))
PORT_LINES_MAX = 30


def test_there_are_jobs():
    assert {file.parent.name for file in JOBS} == {"digits", "fashion_mnist"}


@pytest.mark.parametrize("file", JOBS, ids=lambda file: file.parent.name)
def test_a_job_is_valid_and_its_task_is_there(file: Path):
    spec = read_job(file)
    assert len(spec.task.sha256) == 64
    assert jobfile.validate(spec) == ((), ())


def small(spec: JobSpec | None = None) -> JobSpec:
    base = spec or JobSpec(name="x", task=TaskRef(name="x"))
    return JobSpec(
        name="x", task=base.task, optimizer=base.optimizer, period=Period(steps=3),
        stop=Stop(versions=1),
    )  # fmt: skip


def test_the_digits_task_trains_on_its_part():
    folder = EXAMPLES / "digits"
    options = {"part": "1", "parts": "4", "alpha": "0.1"}
    report = check(
        str(folder / "task.py:Digits"), small(read_job(folder / "job.toml")), options=options
    )
    assert 0 < report.train_examples < 1437
    assert report.eval_examples == 90
    assert sum(tensor.leaves for tensor in report.tensors) == 4 * 4810
    assert report.notes == ()


@pytest.mark.skipif(not has_fashion_mnist(), reason="Fashion-MNIST is not installed")
def test_the_fashion_mnist_task_trains_on_its_part():
    folder = EXAMPLES / "fashion_mnist"
    options = {"part": "0", "parts": "4", "alpha": "0.5"}
    report = check(
        str(folder / "task.py:FashionMnist"), small(read_job(folder / "job.toml")), options=options
    )
    assert 0 < report.train_examples < 60_000
    assert report.eval_examples == 2500
    assert sum(tensor.leaves for tensor in report.tensors) == 4 * 30_330


def test_porting_a_script_takes_thirty_lines_or_fewer():
    plain, ported = (
        (EXAMPLES / "porting" / name).read_text(encoding="utf-8").splitlines()
        for name in ("plain_script.py", "ported.py")
    )
    changes = list(difflib.unified_diff(plain, ported, n=0, lineterm=""))[2:]
    written = [line for line in changes if line.startswith("+")]
    assert 0 < len(written) <= PORT_LINES_MAX
    # What is not written anew is kept or thrown away: the model, the data and the loss are kept.
    for name in ("def load", "def build", "def smoothed_loss"):
        assert not [line for line in changes if line[1:].startswith(name)]


def test_the_ported_script_trains():
    report = check(str(EXAMPLES / "porting" / "ported.py:Ported"), small())
    assert report.steps == 3
    assert report.train_examples == 1438
