"""Instructions are redelivered until the cursor moves past them."""

from __future__ import annotations

import asyncio

import pytest

from coordinator import mailbox as mailbox_module
from coordinator.mailbox import Mailbox
from protocol.errors import BusyError, UsageError
from protocol.messages import Abort, Bye, Initialise, Settled


def note(job: str) -> Initialise:
    return Initialise(job=job)


async def test_what_waits_is_answered_at_once_and_again_until_acknowledged() -> None:
    box = Mailbox()
    box.put(note("1"))
    box.put(note("2"))
    first = await box.wait(0, 60.0)
    assert (first.cursor, first.items) == (2, (note("1"), note("2")))
    assert await box.wait(0, 60.0) == first
    box.put(note("3"))
    assert (await box.wait(1, 60.0)).items == (note("2"), note("3"))
    assert (await box.wait(2, 60.0)).items == (note("3"),)
    assert len(box) == 1
    assert (await box.wait(3, 0.0)).items == ()
    assert len(box) == 0


async def test_a_poll_wakes_when_something_is_put() -> None:
    box = Mailbox()
    poll = asyncio.ensure_future(box.wait(0, 60.0))
    await asyncio.sleep(0)
    box.put(note("1"))
    assert (await poll).items == (note("1"),)


async def test_an_empty_poll_ends_at_its_time_with_the_same_cursor() -> None:
    answer = await Mailbox().wait(0, 0.001)
    assert (answer.cursor, answer.items) == (0, ())


async def test_a_newer_poll_sends_the_older_one_home_empty() -> None:
    box = Mailbox()
    older = asyncio.ensure_future(box.wait(0, 60.0))
    await asyncio.sleep(0)
    newer = asyncio.ensure_future(box.wait(0, 60.0))
    assert (await older).items == ()
    box.put(note("1"))
    assert (await newer).items == (note("1"),)


async def test_a_cursor_of_another_session_is_refused() -> None:
    box = Mailbox()
    box.put(note("1"))
    for cursor in (2, -1):
        with pytest.raises(UsageError, match="cursor"):
            await box.wait(cursor, 0.0)


def test_a_site_that_reads_nothing_does_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox_module, "ITEMS_MAX", 3)
    box = Mailbox()
    for _ in range(3):
        box.put(note("x"))
    with pytest.raises(BusyError):
        box.put(note("x"))


async def test_closing_answers_the_open_poll_with_what_there_is() -> None:
    box = Mailbox()
    poll = asyncio.ensure_future(box.wait(0, 60.0))
    await asyncio.sleep(0)
    box.close()
    assert (await poll).items == ()
    assert (await box.wait(0, 60.0)).items == ()


async def test_a_closed_mailbox_says_goodbye_once() -> None:
    box = Mailbox()
    goodbye = Bye(reason="revoked", retry=False)
    box.put(goodbye)
    box.close(Bye(reason="again", retry=True))
    assert (await box.wait(0, 60.0)).items == (goodbye,)
    box = Mailbox()
    poll = asyncio.ensure_future(box.wait(0, 60.0))
    await asyncio.sleep(0)
    box.close(goodbye)
    assert (await poll).items == (goodbye,)


async def test_only_words_about_updates_carry_over_to_the_next_session() -> None:
    box = Mailbox()
    word = Settled(job="j", epoch=1, clock=2, verdict="refused_return", reason="void")
    box.put(note("1"))
    box.put(word)
    box.put(Abort(job="j", epoch=1, clock=3, attempt=1, reason="late"))
    heir = box.successor()
    assert (await heir.wait(0, 0.0)).items == (word,)


def test_without_waiting_there_is_something_or_nothing_yet() -> None:
    box = Mailbox()
    assert box.take(0) is None
    box.put(note("1"))
    found = box.take(0)
    assert found is not None
    assert (found.cursor, found.items) == (1, (note("1"),))
    assert box.take(1) is None
    box.close()
    assert box.take(1) is not None
