"""Processes that end together."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from protocol.errors import JobFailedError
from skerry.processes import Processes, read_addresses, wait_for_line

STUBBORN = "tests.skerry.stubborn"


def test_a_process_that_ignores_sigterm_is_gone_after_the_block(tmp_path: Path):
    with Processes(tmp_path) as processes:
        child = processes.start("stubborn", ["a", "b"], module=STUBBORN)
        assert wait_for_line(processes, child) == b"ready a b"
        processes.check()
        processes.stop(seconds=0.2)
    assert child.process.returncode == -9
    assert not psutil.pid_exists(child.process.pid)


def test_a_process_that_ends_by_itself_is_named_with_the_end_of_its_log(tmp_path: Path):
    with Processes(tmp_path) as processes:
        child = processes.start("helper", ["no-such-verb"])
        with pytest.raises(JobFailedError, match="helper ended with exit code 2") as caught:
            wait_for_line(processes, child)
        assert "no-such-verb" in caught.value.message
        assert str(tmp_path / "helper.log") in caught.value.hint
        with pytest.raises(JobFailedError, match="exit code 2"):
            processes.wait_for_an_end()


def test_a_process_that_is_never_ready_is_given_up(tmp_path: Path):
    with Processes(tmp_path) as processes:
        child = processes.start("silent", [], module=STUBBORN)
        wait_for_line(processes, child)
        with pytest.raises(JobFailedError, match=r"silent was not ready after 0\.1 s"):
            wait_for_line(processes, child, 0.1)
        processes.stop(seconds=0.1)


def test_settings_of_the_shell_do_not_leak_into_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SKERRY_LEASE_SECONDS", "nonsense")
    with Processes(tmp_path) as processes:
        child = processes.start("version", ["config", "show", "coordinator", "--json"])
        assert b'"lease_seconds":{"value":15.0' in wait_for_line(processes, child)


def test_addresses_are_read_when_they_are_whole(tmp_path: Path):
    assert read_addresses(tmp_path) is None
    (tmp_path / "addresses.json").write_text('{"agents": "http://a"', encoding="utf-8")
    assert read_addresses(tmp_path) is None
    (tmp_path / "addresses.json").write_text(
        '{"agents": "http://a", "people": "http://b", "pid": 3}', encoding="utf-8"
    )
    found = read_addresses(tmp_path)
    assert found is not None
    assert (found.agents, found.people) == ("http://a", "http://b")


def test_a_child_leads_a_group_of_its_own(tmp_path: Path):
    with Processes(tmp_path) as processes:
        child = processes.start("stubborn", [], module=STUBBORN)
        wait_for_line(processes, child)
        assert os.getpgid(child.process.pid) == child.process.pid != os.getpgrp()
        processes.stop(seconds=0.1)
