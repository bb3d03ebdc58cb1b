import tomllib
from pathlib import Path

import pytest

from protocol.jobfile import job_type, parse
from protocol.jobstates import TRANSITIONS
from protocol.schema import leaves
from skerry import reference


def test_the_page_in_docs_is_up_to_date():
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), "run ./run docs"


def test_every_key_stands_in_the_page_with_a_sentence():
    rows = [line for line in reference.page().splitlines() if line.startswith("| `")]
    assert sorted(row.split("`")[1] for row in rows) == sorted(key for key, _ in leaves(job_type()))
    assert all(row.rstrip(" |")[-1] == "." for row in rows)


def test_every_transition_stands_in_the_page():
    lines = reference.page().splitlines()
    head = next(line for line in lines if line.startswith("| state |"))
    stimuli = [cell.strip() for cell in head.split("|")[2:-1]]
    found = {}
    for line in lines[lines.index(head) + 2 :]:
        state, *cells = [cell.strip(" *") for cell in line.split("|")[1:-1]]
        found |= {
            (state, stimulus): cell for stimulus, cell in zip(stimuli, cells, strict=True) if cell
        }
    assert found == TRANSITIONS


def test_the_smallest_job_in_the_page_is_a_job():
    text = reference.page().split("```toml\n")[1].split("```")[0]
    assert tomllib.loads(text)
    assert parse(text, where="docs/job.md").stop.versions == 50


def test_check_says_so_when_the_page_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(reference, "PAGE", tmp_path / "job.md")
    assert reference.main(["--check"]) == 1
    assert "./run docs" in capsys.readouterr().err
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0
    (tmp_path / "job.md").write_text("old", encoding="utf-8")
    assert reference.main(["--check"]) == 1


def test_a_wrong_call_is_refused(capsys: pytest.CaptureFixture[str]):
    assert reference.main(["--help-me"]) == 2
    assert "usage" in capsys.readouterr().err
