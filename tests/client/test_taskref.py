from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from client.taskref import hash_task, parse_ref
from protocol.errors import NotFoundError, UsageError


def test_the_three_forms_are_parsed(tmp_path: Path):
    assert parse_ref("a/task.py:Digits", tmp_path).path == tmp_path / "a/task.py"
    assert parse_ref("a/task.py:Digits").name == "Digits"
    assert parse_ref("/x/task.py").name == ""
    assert parse_ref("pkg.mod:Digits").module == "pkg.mod"


@pytest.mark.parametrize("reference", ["", "task", "pkg.mod", "pkg mod:X", "task.txt", ":X"])
def test_anything_else_is_refused_with_the_forms(reference: str):
    with pytest.raises(UsageError, match="does not name a task"):
        parse_ref(reference)


def test_an_absolute_path_ignores_the_base(tmp_path: Path):
    assert parse_ref("/x/task.py", tmp_path).path == Path("/x/task.py")


def test_a_files_hash_is_the_sha256_of_its_bytes_whatever_class_is_named(tmp_path: Path):
    (tmp_path / "task.py").write_bytes(b"class A: pass\n")
    expected = hashlib.sha256(b"class A: pass\n").hexdigest()
    assert hash_task("task.py", tmp_path) == hash_task("task.py:A", tmp_path) == expected


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(NotFoundError, match=r"nowhere\.py"):
        hash_task("nowhere.py", tmp_path)


def test_a_missing_module_is_named():
    with pytest.raises(NotFoundError, match="no_such_module_here"):
        hash_task("no_such_module_here.sub:Task")


def test_a_packages_hash_covers_every_file_and_runs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    package = tmp_path / "somepackage_x"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "sub" / "__init__.py").write_text("")
    (package / "sub" / "net.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    first = hash_task("somepackage_x.sub:Task")
    assert first == hash_task("somepackage_x:Other")
    (package / "sub" / "net.py").write_text("x = 2\n")
    second = hash_task("somepackage_x.sub:Task")
    (package / "sub" / "net.py").rename(package / "sub" / "model.py")
    assert len({first, second, hash_task("somepackage_x.sub:Task")}) == 3


def test_the_module_needs_no_torch():
    code = "import sys, client.taskref; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
