from __future__ import annotations

from pathlib import Path

import pytest

from client.taskcheck import check
from client.taskref import hash_task
from protocol.errors import NotFoundError
from protocol.jobspec import JobSpec, Local, Period, TaskRef
from tests.client.workerprocess import ROOT, make_spec

TASKS = ROOT / "tests" / "client" / "sampletasks.py"


def test_the_report_says_what_would_leave_the_site(tmp_path: Path):
    report = check(f"{TASKS}:Normed", make_spec(local=Local(scaffold=True)))
    assert report.sha256 == hash_task(f"{TASKS}:Normed")
    leaves = {tensor.name: tensor.leaves for tensor in report.tensors}
    assert leaves["0.weight"] == 32 * (4 + 4)  # delta and control
    assert leaves["1.running_mean"] == 8 * 4
    assert leaves["1.num_batches_tracked"] == 8
    assert sum(leaves.values()) == sum(report.parts.values())
    overhead = report.update_bytes - sum(report.parts.values())
    assert 0 < overhead < 2000
    assert report.steps == 2
    assert report.seconds_per_step > 0
    assert set(report.before) == set(report.after) == {"loss", "accuracy"}
    assert report.before != report.after
    assert report.train_examples == 12


def test_warnings_are_those_of_the_worker():
    report = check(f"{TASKS}:Normed", make_spec(options={"examples": 9}))
    assert any("merged into the batch before" in note for note in report.notes)


def test_an_evaluation_only_job_leaves_nothing():
    spec = JobSpec(name="j", task=TaskRef(name="t"), period=Period(epochs=0))
    report = check(f"{TASKS}:Linear", spec)
    assert (report.steps, report.update_bytes, report.parts) == (0, 0, {})
    assert report.before == report.after


def test_a_missing_file_is_named():
    with pytest.raises(NotFoundError, match=r"nowhere\.py"):
        check("nowhere.py", make_spec())
