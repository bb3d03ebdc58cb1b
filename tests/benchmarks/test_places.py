"""What the process benchmarks are built from, and that the small ones measure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import idle, rounds
from benchmarks.places import place

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).resolve().parents[2]


def test_one_case_of_rounds_counts_every_byte_once():
    found = rounds.measure(sites=1, elements=20_000, rounds=3)
    assert set(found) == {"round_seconds", "wire_over_ideal", "coordinator_mb", "fold_mb"}
    assert 1.0 < found["wire_over_ideal"] < 1.2, "the model and a little more"


def test_a_process_is_read_from_proc():
    with place() as here:
        pid = here.processes.children[0].process.pid
        assert idle.rss_mb(pid) > 10
        assert idle.cpu_seconds(pid) > 0


def test_json_is_one_line_with_the_common_fields():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "digits", "--json", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    last = json.loads(done.stdout.splitlines()[-1])
    assert {"bench", "commit", "seconds", "quick", "accuracy"} <= set(last)
    assert last["accuracy"]["scaffold"]["round_10"] > 0.5
