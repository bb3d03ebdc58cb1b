"""The generated pages of docs/ are what the classes say now."""

from __future__ import annotations

from pathlib import Path

import pytest

from skerry import reference


@pytest.mark.parametrize("name", reference.PAGES)
def test_the_page_in_docs_is_up_to_date(name: str):
    written = (reference.DOCS / name).read_text(encoding="utf-8")
    assert written == reference.PAGES[name](), "run ./run docs"


def test_check_names_the_pages_that_are_old_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert reference.main(["--check"], tmp_path) == 1
    assert not list(tmp_path.iterdir())
    said = capsys.readouterr().err
    assert "./run docs" in said
    assert all(name in said for name in reference.PAGES)
    assert reference.main([], tmp_path) == 0
    assert reference.main(["--check"], tmp_path) == 0
    (tmp_path / "job.md").write_text("old", encoding="utf-8")
    assert reference.main(["--check"], tmp_path) == 1


def test_a_wrong_call_is_refused(capsys: pytest.CaptureFixture[str]):
    assert reference.main(["--help-me"]) == 2
    assert "usage" in capsys.readouterr().err
