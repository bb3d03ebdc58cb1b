"""Sessions: who holds a name, events told once, who may come back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.engine import Engine
from protocol.errors import (
    ConflictError,
    NotFoundError,
    RefusedError,
    RemovedError,
)
from protocol.messages import Bye, Events, Hello, Progress
from tests.coordinator.engines import running
from tests.coordinator.stubsite import (
    joined,
)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    async with running(tmp_path) as made:
        yield made


async def test_a_live_namesake_is_refused_with_the_time_it_was_heard(engine: Engine) -> None:
    """PC-033: the second process under a name learns who holds it."""
    await joined(engine, "a")
    welcome = await engine.open_session("a", Hello(instance="one"))
    with pytest.raises(ConflictError, match="already connected") as caught:
        await engine.open_session("a", Hello(instance="two"))
    assert caught.value.details["last_heard_seconds"] is not None
    engine.check_session("a", welcome.session)  # the first is not disturbed
    again = await engine.open_session("a", Hello(instance="one"))
    engine.check_session("a", again.session)
    with pytest.raises(ConflictError, match="hello again"):
        engine.check_session("a", welcome.session)


async def test_events_are_told_once_however_often_they_are_posted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await joined(engine, "a")
    welcome = await engine.open_session("a", Hello(instance="one"))
    told: list[int] = []
    stimulate = engine._runner.stimulate

    async def listening(stimulus: Any) -> Any:
        told.append(stimulus.event.step)
        return await stimulate(stimulus)

    monkeypatch.setattr(engine._runner, "stimulate", listening)

    def progress(*steps: int) -> tuple[Progress, ...]:
        return tuple(Progress(job="j", epoch=1, clock=1, step=step, of=9) for step in steps)

    for first, steps in ((5, (5, 6)), (5, (5, 6)), (6, (6, 7)), (8, (8,))):
        await engine.site_events("a", welcome.session, Events(first=first, items=progress(*steps)))
    assert told == [5, 6, 7, 8]
    with pytest.raises(ConflictError, match="event 9 was expected"):
        await engine.site_events("a", welcome.session, Events(first=10, items=progress(10)))
    with pytest.raises(ConflictError):
        await engine.site_events("a", "another", Events(first=9, items=progress(9)))


async def test_an_event_that_the_core_refuses_does_not_hold_up_the_next(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await joined(engine, "a")
    welcome = await engine.open_session("a", Hello(instance="one"))
    told: list[int] = []

    async def refusing(stimulus: Any) -> Any:
        told.append(stimulus.event.step)
        raise NotFoundError("no such job")

    monkeypatch.setattr(engine._runner, "stimulate", refusing)
    events = tuple(Progress(job="j", epoch=1, clock=1, step=step, of=9) for step in (1, 2))
    await engine.site_events("a", welcome.session, Events(first=1, items=events))
    assert told == [1, 2]


async def test_a_revoked_site_is_told_and_never_comes_back(engine: Engine) -> None:
    secret = await joined(engine, "a")
    await engine.open_session("a", Hello(instance="one"))
    box = engine.mailbox("a")
    await engine.site_command("a", "revoke", "me", "lost laptop")
    said = [item for item in (await box.wait(0, 1.0)).items if isinstance(item, Bye)]
    assert said
    assert not said[0].retry
    assert "lost laptop" in said[0].reason
    with pytest.raises(RemovedError):
        engine.authenticate_site(secret)
    with pytest.raises(ConflictError):
        engine.mailbox("a")
    assert [(site.name, site.state) for site in (await engine.sites()).sites] == [("a", "revoked")]


async def test_a_drained_site_comes_back_only_as_another_process(engine: Engine) -> None:
    await joined(engine, "a")
    await engine.open_session("a", Hello(instance="one"))
    await engine.site_command("a", "drain", "me")
    assert (await engine.sites()).sites[0].state == "drained"
    with pytest.raises(RefusedError, match="drained"):
        await engine.open_session("a", Hello(instance="one"))
    await engine.open_session("a", Hello(instance="two"))
    assert (await engine.sites()).sites[0].state == "connected"
