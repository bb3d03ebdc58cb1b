"""Runs the core: one stimulus at a time, its actions in order, the journal before anything else.

Callers only wait for the answer: one that is cancelled never leaves a batch half done.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from sqlalchemy import exc

from coordinator import narrate
from coordinator.actions import AnyAction, Persist
from coordinator.beat import next_second
from coordinator.core import Core
from coordinator.crashpoints import reach
from coordinator.feed import Feed
from coordinator.job import Job
from coordinator.journal import JobSubmitted, VersionMade
from coordinator.stimuli import Stimulus, Tick
from coordinator.store import Store
from protocol.errors import ConflictError, SkerryError

log = logging.getLogger("coordinator.engine")

BEAT_SECONDS: Final = 1.0
STALL_SECONDS: Final = 1.0
_INBOX_MAX: Final = 10_000
_PAGE: Final = 2_000
_RETRY_FIRST_SECONDS: Final = 0.2
_RETRY_LAST_SECONDS: Final = 5.0

Step = Callable[[float], list[AnyAction]]


class Runner:
    """The one writer of the journal, and the one who calls `core.handle`."""

    def __init__(
        self,
        core: Core,
        store: Store,
        feed: Feed,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
        carry_out: Callable[[AnyAction], None],
        on_power: Callable[[bool], None],
    ) -> None:
        self.core = core
        self._store = store
        self._feed = feed
        self._clock = clock
        self._wall = wall
        self._carry_out = carry_out
        self._on_power = on_power
        self._powered: set[str] = set()  # jobs that ask for durability through a power cut
        self._inbox: asyncio.Queue[tuple[Step, asyncio.Future[list[AnyAction]]]] = asyncio.Queue(
            _INBOX_MAX
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._origin = 0.0
        self._beat = 0.0
        self.trouble = ""  # what keeps the journal from being written right now
        self.fatal = ""  # why this process cannot go on
        self.failed = asyncio.Event()

    def now(self) -> float:
        """Job time (4.9): it goes on from the last journalled instant, whatever clocks say."""
        return self._origin + self._clock()

    async def restore(self) -> None:
        """Bring the core to where the journal ends."""
        began = self._store.last_now if self._store.last_now is not None else self._wall()
        self._origin = began - self._clock()
        after = 0
        while page := await self._store.entries(after, limit=_PAGE):
            self.core.restore(page)
            for entry in page:
                self._note_power_on(entry.event)
            after = page[-1].seq
        self._note_power_off()

    async def start(self) -> None:
        """Begin to work, and ask again for what was outstanding."""
        self._beat = self._clock()
        self._loops = [asyncio.create_task(self._work()), asyncio.create_task(self._watch())]
        await self.step(self.core.resume)

    async def stop(self) -> None:
        """Give up whatever is under way."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        tasks = [*self._loops, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while not self._inbox.empty():
            self._inbox.get_nowait()[1].cancel()

    # ------------------------------------------------------------ one batch after the other

    async def stimulate(self, stimulus: Stimulus) -> list[AnyAction]:
        """Run the core; returns after every action of the batch was begun, Persist durable.

        Raises:
            SkerryError: the core refuses; nothing has changed.
        """
        return await self.step(lambda now: self.core.handle(stimulus, now))

    async def step(self, step: Step) -> list[AnyAction]:
        """Run `step(now)` in turn with all stimuli, and carry out what it answers."""
        answer: asyncio.Future[list[AnyAction]] = asyncio.get_running_loop().create_future()
        await self._inbox.put((step, answer))
        return await answer

    def post(self, stimulus: Stimulus) -> None:
        """Stimulate without waiting for the answer."""

        async def tell() -> None:
            await self.stimulate(stimulus)

        self.spawn(tell())

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Let something long go on by itself; its failure is logged."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, SkerryError):
            log.warning("%s", error)
        else:
            log.error("an internal error in the background", exc_info=error)

    async def _work(self) -> None:
        while True:
            step, answer = await self._inbox.get()
            self._notice_stall()
            try:
                if self.fatal:
                    raise ConflictError(self.fatal, "Restart the coordinator.")
                batch = await self._batch(step)
            except SkerryError as error:
                if not answer.done():
                    answer.set_exception(error)
            except Exception as error:
                # The core is ahead of its journal, or wrong: only a restart from the journal is
                # sure to be right.
                log.exception("an internal error")
                self._fail(f"an internal error: {type(error).__name__}: {error}")
                if not answer.done():
                    answer.set_exception(error)
            else:
                if not answer.done():
                    answer.set_result(batch)
            self._set_timer()

    async def _batch(self, step: Step) -> list[AnyAction]:
        batch = step(self.now())
        for action in batch:
            if isinstance(action, Persist):
                await self._persist(action)
            else:
                self._carry_out(action)
        return batch

    async def _persist(self, action: Persist) -> None:
        for event in action.events:
            self._note_power_on(event)
        pause = _RETRY_FIRST_SECONDS
        while True:
            try:
                entries = await self._store.append(action.now, self._wall(), action.events)
                break
            except ConflictError as error:
                self._fail(error.message)
                raise
            except (exc.IntegrityError, exc.ProgrammingError, exc.DataError):
                raise  # rows that no database would take: trying on cannot help
            except (exc.DBAPIError, exc.TimeoutError, OSError) as error:
                # The core has decided: whatever comes later must wait until this is stored.
                text = f"the journal cannot be written: {getattr(error, 'orig', error)}"
                if not self.trouble:
                    log.warning("%s; trying on.", text)
                self.trouble = text
                await asyncio.sleep(pause)
                pause = min(_RETRY_LAST_SECONDS, pause * 2)
        if self.trouble:
            log.info("the journal can be written again.")
            self.trouble = ""
        if self._powered:
            self._note_power_off()
        self._feed.publish(entries)
        narrate.tell(action.events)
        if any(isinstance(event, VersionMade) for event in action.events):
            reach("version_persisted_before_announce")

    def _note_power_on(self, event: object) -> None:
        if isinstance(event, JobSubmitted) and event.spec.durability == "power":
            self._powered.add(event.job)
            self._on_power(True)

    def _note_power_off(self) -> None:
        # Only once it is stored: the end of the job is to survive a power cut too, and so is the
        # checkpoint that is written after it and lets its uploads go.
        known = self._powered & set(self.core.jobs())
        self._powered = {job for job in known if not _is_at_rest(self.core.job(job))}
        self._on_power(bool(self._powered))

    def _fail(self, reason: str) -> None:
        self.fatal = self.fatal or reason
        self.failed.set()

    # ------------------------------------------------------------ time

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.fatal or (wake_at := self.core.wake_at()) is None:
            return
        delay = max(0.0, wake_at - self.now())
        self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.post(Tick())

    async def _watch(self) -> None:
        while True:
            await next_second()
            self._notice_stall()

    def _notice_stall(self) -> None:
        """A site's silence counts only while this loop was able to hear (PC-089)."""
        now = self._clock()
        late = now - self._beat - BEAT_SECONDS
        self._beat = now
        if late > STALL_SECONDS:
            log.warning("the event loop stood still for %.1f s.", late)
            self.core.stalled(late)


def _is_at_rest(job: Job) -> bool:
    return job.terminal and job.committing is None and job.checkpoint >= job.number
