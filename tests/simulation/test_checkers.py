"""The checkers notice what they are there for."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator import journal as j
from coordinator.core import Core, CoreConfig
from simulation.checkers import Checkers
from tests.coordinator.coretools import World


def followed() -> tuple[World, Checkers]:
    here = World().running("a", "b")
    here.upload("a")
    checkers = Checkers(CoreConfig())
    for entry in here.journal:
        checkers.entry(entry)
    return here, checkers


def entry(event: j.Event) -> j.Entry:
    return j.Entry(seq=1, now=0.0, event=event)


def settled(**changes: Any) -> j.UpdateSettled:
    base: dict[str, Any] = {
        "job": "j",
        "site": "a",
        "epoch": 1,
        "clock": 0,
        "attempt": 1,
        "verdict": "refused_drop",
        "reason": "",
    }
    return j.UpdateSettled(**{**base, **changes})


def test_a_good_run_passes() -> None:
    here, checkers = followed()
    checkers.after(here.core, here.now)
    checkers.restored(here.core)


def test_a_second_settlement_is_noticed() -> None:
    _, checkers = followed()
    with pytest.raises(AssertionError, match="without being open"):
        checkers.entry(entry(settled()))


def test_a_version_that_goes_back_is_noticed() -> None:
    _, checkers = followed()
    with pytest.raises(AssertionError, match="version 5 after 0"):
        checkers.entry(entry(j.VersionMade(job="j", version=5, digest="", bytes=0)))


def test_a_round_that_closes_over_open_tasks_is_noticed() -> None:
    _, checkers = followed()
    closed = j.RoundClosed(job="j", round=1, version=0, cohort=(), active_sites=2, reason="")
    with pytest.raises(AssertionError, match="open tasks"):
        checkers.entry(entry(closed))


def test_state_that_the_journal_does_not_tell_is_noticed() -> None:
    here, checkers = followed()
    here.job.members["a"].clock += 1
    with pytest.raises(AssertionError, match="live state differs"):
        checkers.after(here.core, here.now)
    with pytest.raises(AssertionError, match="restored state differs"):
        checkers.restored(here.core)


def test_what_is_overdue_and_not_done_is_noticed() -> None:
    here, checkers = followed()
    with pytest.raises(AssertionError, match="would wake for ever"):
        checkers.after(here.core, here.now + 60.0)


def test_a_wait_without_a_deadline_is_noticed() -> None:
    here, checkers = followed()

    class Forgetful(Core):
        def wake_at(self) -> float | None:
            return None

    here.core.__class__ = Forgetful
    with pytest.raises(AssertionError, match="without a deadline"):
        checkers.after(here.core, here.now)


def test_what_is_never_settled_is_noticed_at_the_end() -> None:
    _, checkers = followed()
    with pytest.raises(AssertionError, match="never settled"):
        checkers.at_end({})
