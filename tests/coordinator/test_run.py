"""Batches, and what is known only while the process lives."""

from __future__ import annotations

import pytest

from coordinator.actions import Persist, Release, Send
from coordinator.job import submitted
from coordinator.journal import Commanded, JobSubmitted
from coordinator.run import Batch, CoreConfig, Run
from protocol import limits
from protocol.errors import ConflictError
from protocol.messages import Bye
from tests.coordinator.coretools import make_spec


def run() -> Run:
    return Run(submitted(JobSubmitted(job="j", spec=make_spec(), by="ann"), 0.0), CoreConfig())


def test_the_journal_rows_come_first_in_a_batch() -> None:
    batch, here = Batch(3.0), run()
    batch.do(Release(job="j"))
    event = Commanded(job="j", by="ann", what="pause")
    batch.emit(here.job, event)
    assert batch.close() == [Persist(now=3.0, events=(event,)), Release(job="j")]


def test_a_batch_without_events_persists_nothing() -> None:
    batch = Batch(3.0)
    batch.do(Release(job="j"))
    assert batch.close() == [Release(job="j")]


def test_instructions_wait_until_the_site_is_ready() -> None:
    batch, here = Batch(0.0), run()
    bye = Bye(reason="", retry=True)
    here.send(batch, "a", bye)
    here.present["a"] = "loading"
    here.send(batch, "a", bye)
    assert batch.close() == []
    here.present["a"] = "ready"
    here.send(batch, "a", bye)
    assert batch.close() == [Send(site="a", instruction=bye)]


def test_moving_keeps_to_the_table_and_to_the_length_of_a_reason() -> None:
    batch, here = Batch(0.0), run()
    with pytest.raises(ConflictError, match="initialising cannot finish"):
        here.move(batch, "finish", "")
    here.move(batch, "fail", "x" * 99_999)
    assert len(here.job.reason) == limits.REASON_CHARS_MAX
