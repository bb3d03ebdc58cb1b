from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as runner
from benchmarks import common
from benchmarks.common import Bar


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    module = types.SimpleNamespace(
        run=lambda quick: {"fast": 2.0, "sizes": {"2x1e5": 7}, "quick_run": quick},
        BARS={"fast": ">= 5", "sizes.2x1e5": "<= 8"},
    )
    monkeypatch.setattr(runner, "names", lambda: ["toy"])
    monkeypatch.setattr(runner.importlib, "import_module", lambda _: module)
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    return tmp_path / "results" / "toy.jsonl"


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    line = capsys.readouterr().out.splitlines()[-1]
    assert ": " not in line
    found: dict[str, Any] = json.loads(line)
    return found


def test_json_is_one_compact_line_even_when_a_bar_is_missed(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert runner.main(["toy", "--json", "--quick"]) == 0
    result = last_line(capsys)
    assert {"bench", "commit", "seconds", "quick"} <= set(result)
    assert (result["bench"], result["quick"], result["fast"]) == ("toy", True, 2.0)
    assert not toy.exists()


def test_the_table_judges_each_figure_by_its_bar(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runner.main(["toy"])
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert rows["fast"].endswith("missed")
    assert rows["sizes.2x1e5"].endswith("ok")


def test_recorded_results_are_appended(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        runner.main(["toy", "--json", "--record"])
    assert [json.loads(line)["bench"] for line in toy.read_text().splitlines()] == ["toy"] * 2
    assert last_line(capsys)["bench"] == "toy"


def test_an_unknown_name_is_a_usage_error_that_lists_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert runner.main(["nope"]) == 2
    assert "fold" in capsys.readouterr().err


def test_a_bar_that_is_neither_is_refused() -> None:
    assert Bar.parse("<= 0.05") == Bar("<=", 0.05)
    with pytest.raises(ValueError, match="not a bar"):
        Bar.parse("< 3")
