"""SIGKILL at every named instant: nothing acked is lost, and the model is the same bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator import crashpoints
from coordinator.crashpoints import NAMES, reach

# (name, its n-th passage): spread over the job, which has 6 versions of 2 sites.
KILLS = (
    "upload_half_stored:1",
    "upload_stored_before_screen:2",
    "screened_before_persist:2",
    "persisted_before_ack:2",
    "round_closed_before_fold:2",
    "folded_before_persist:1",
    "version_persisted_before_announce:1",
    "checkpoint_before_persist:1",
)
FOLD_KILLS = ("fold_after_version_file:2", "fold_during_checkpoint:5")


def run(folder: Path, at: str = "") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "SKERRY_CRASH_AT"}
    if at:
        environment["SKERRY_CRASH_AT"] = at
    return subprocess.run(
        [sys.executable, "-m", "tests.coordinator.story", str(folder), "6"],
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=90,
        check=False,
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    done = run(tmp_path_factory.mktemp("undisturbed"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "12 updates ['counted']"
    return done.stdout


def test_every_instant_has_its_kill() -> None:
    killed = {at.split(":")[0] for at in KILLS} | {n for n in NAMES if n.startswith("fold_")}
    assert killed == set(NAMES)


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_coordinator_killed_again_and_again_makes_the_same_model(
    tmp_path: Path, undisturbed: str
) -> None:
    """PC-078: kill -9 at each instant in turn, in one job; it goes on, no round is done twice."""
    for at in KILLS:
        done = run(tmp_path, at)
        assert done.returncode == -9, (at, done.stderr)
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == undisturbed
    spools = list(tmp_path.glob("jobs/*/spools/*"))
    assert spools == []  # nor is anything left over


@pytest.mark.e2e
@pytest.mark.parametrize("at", FOLD_KILLS)
def test_a_fold_process_killed_comes_back_and_makes_the_same_model(
    tmp_path: Path, undisturbed: str, at: str
) -> None:
    """PC-078: the coordinator lives on, recovers the job in a new fold process and asks again."""
    done = run(tmp_path, at)
    assert "the fold process died (signal 9)" in done.stderr
    assert done.returncode == 0, done.stderr
    assert done.stdout == undisturbed


def test_only_the_wanted_passage_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    kills: list[int] = []
    monkeypatch.setattr(crashpoints.os, "kill", lambda _pid, number: kills.append(number))
    monkeypatch.setattr(crashpoints, "_passages", {})
    monkeypatch.setenv(crashpoints.VARIABLE, "folded_before_persist:2")
    reach("persisted_before_ack")
    reach("folded_before_persist")
    assert kills == []
    reach("folded_before_persist")
    reach("folded_before_persist")
    assert kills == [9]
