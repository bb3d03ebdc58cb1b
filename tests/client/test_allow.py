from __future__ import annotations

import hashlib
from pathlib import Path

from client.agentsettings import TaskSettings
from client.allow import Allowed, AllowList, Refused
from protocol.jobspec import TaskRef

CODE = b"class Digits: pass\n"
HASH = hashlib.sha256(CODE).hexdigest()
OTHER = "ab" * 32


def allow_list(base: Path, **settings: object) -> AllowList:
    (base / "task.py").write_bytes(CODE)
    task = TaskSettings(reference="task.py:Digits", **settings)  # type: ignore[arg-type]
    return AllowList({"digits": task}, base)


def reason_of(decision: Allowed | Refused) -> str:
    assert isinstance(decision, Refused)
    return decision.reason


def test_an_allowed_task_runs_from_the_owners_file_with_the_owners_settings(tmp_path: Path):
    allowed = allow_list(tmp_path, data="data/digits", options={"part": "2"})
    assert allowed.decide(TaskRef(name="digits", sha256=HASH)) == Allowed(
        reference=f"{tmp_path}/task.py:Digits",
        sha256=HASH,
        data=f"{tmp_path}/data/digits",
        options={"part": "2"},
    )


def test_a_task_that_nobody_allowed_is_refused_and_the_allowed_ones_are_named(tmp_path: Path):
    reason = reason_of(allow_list(tmp_path).decide(TaskRef(name="miner")))
    assert "'miner'" in reason
    assert "digits" in reason
    assert '[tasks."miner"]' in reason


def test_another_hash_than_the_jobs_is_refused_with_both(tmp_path: Path):
    reason = reason_of(allow_list(tmp_path).decide(TaskRef(name="digits", sha256=OTHER)))
    assert HASH in reason
    assert OTHER in reason


def test_another_hash_than_the_owner_approved_is_refused_even_when_it_is_the_jobs(tmp_path: Path):
    reason = reason_of(
        allow_list(tmp_path, sha256=OTHER).decide(TaskRef(name="digits", sha256=HASH))
    )
    assert "approved" in reason
    assert HASH in reason
    assert OTHER in reason


def test_the_hash_is_taken_each_time(tmp_path: Path):
    allowed = allow_list(tmp_path)
    spec = TaskRef(name="digits", sha256=HASH)
    assert isinstance(allowed.decide(spec), Allowed)
    (tmp_path / "task.py").write_bytes(CODE + b"import os\n")
    assert isinstance(allowed.decide(spec), Refused)


def test_a_file_or_module_that_is_not_there_is_refused_with_its_name(tmp_path: Path):
    gone = AllowList({"a": TaskSettings(reference="gone.py")}, tmp_path)
    assert "gone.py" in reason_of(gone.decide(TaskRef(name="a")))
    module = AllowList({"a": TaskSettings(reference="no_such_module_here:Task")}, tmp_path)
    assert "no_such_module_here" in reason_of(module.decide(TaskRef(name="a")))


def test_a_name_in_any_language_is_found(tmp_path: Path):
    """PC-085: task names and data paths are any text."""
    (tmp_path / "病院.py").write_bytes(CODE)
    task = TaskSettings(reference="病院.py", data="Zürich/データ")
    decision = AllowList({"Übung 🏥": task}, tmp_path).decide(TaskRef(name="Übung 🏥"))
    assert isinstance(decision, Allowed)
    assert decision.reference == f"{tmp_path}/病院.py"
    assert decision.data == f"{tmp_path}/Zürich/データ"
