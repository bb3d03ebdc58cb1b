"""Finished updates on their way to a verdict, pure: asked first, resumed, never made twice.

    unasked -> asking -> uploading -> judged      `judged` waits for the worker to settle it
                  ^  \\_____ waiting <___|          `waiting` until `retry_at`

A fresh update begins at `uploading`: nobody can have a byte of it yet.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from client.backoff import Backoff
from client.sessionapi import AnyAction, AskVerdict, CallOff, Identity, StoredUpdate, Upload
from protocol.messages import Receipt, VerdictKind

DAMAGED_MAX: Final = 5  # times that the same bytes are found wrong before they are given up


class Delivery(msgspec.Struct, kw_only=True):
    """One stored update and how far its delivery is."""

    update: StoredUpdate
    backoff: Backoff
    state: Literal["unasked", "asking", "uploading", "waiting", "judged"] = "unasked"
    retry_at: float = 0.0
    offset: int = 0
    damaged: int = 0
    verdict: VerdictKind = "unsettled"


class Deliveries:
    """All updates of this site that are not settled yet."""

    def __init__(self, stored: Iterable[StoredUpdate], rng: random.Random) -> None:
        self._rng = rng
        self._all: dict[Identity, Delivery] = {}
        for update in stored:
            self._all[update.identity] = Delivery(update=update, backoff=Backoff(rng))

    def send(self, update: StoredUpdate) -> list[AnyAction]:
        """Begin with an update that was finished just now."""
        self._all[update.identity] = Delivery(
            update=update, backoff=Backoff(self._rng), state="uploading"
        )
        return [Upload(update=update, offset=0)]

    def hold(self, update: StoredUpdate, verdict: VerdictKind) -> None:
        """Take in an update that is judged already: nobody wants it any more."""
        self._all[update.identity] = Delivery(
            update=update, backoff=Backoff(self._rng), state="judged", verdict=verdict
        )

    def connected(self) -> list[AnyAction]:
        """Ask about everything that an earlier life of this agent left behind."""
        return [
            self._ask(delivery) for delivery in self._all.values() if delivery.state == "unasked"
        ]

    def stands(
        self, identity: Identity, receipt: Receipt, now: float, *, superseded: bool
    ) -> list[AnyAction]:
        """The coordinator said where the update stands; `superseded`: it wants a later one now."""
        delivery = self._all.get(identity)
        if delivery is None or delivery.state == "judged":
            return []
        if receipt.verdict != "unsettled":
            self.judge(identity, receipt.verdict)
            return []
        if receipt.offset > delivery.offset:
            delivery.damaged = 0
            delivery.backoff.reset()
        asked = delivery.state == "asking"
        delivery.offset = receipt.offset
        if superseded and receipt.offset < delivery.update.bytes:
            self.judge(identity, "refused_drop")
            return []
        if not asked:
            return self._wait(delivery, now)
        # Also when all is there: if nobody looks at it any more, because the coordinator was
        # restarted in between, an upload of nothing from the end on makes it look again.
        delivery.state = "uploading"
        return [Upload(update=delivery.update, offset=receipt.offset)]

    def broke(self, identity: Identity, now: float, *, damaged: bool) -> bool:
        """An upload did not arrive whole. False: the same bytes were refused too often."""
        delivery = self._all.get(identity)
        if delivery is None or delivery.state == "judged":
            return True
        delivery.damaged += damaged
        if delivery.damaged >= DAMAGED_MAX:
            self.judge(identity, "refused_drop")
            return False
        self._wait(delivery, now)
        return True

    def judge(self, identity: Identity, verdict: VerdictKind) -> list[AnyAction]:
        """Close it with a verdict: the coordinator's, or this site's own when nobody wants it."""
        delivery = self._all.get(identity)
        if delivery is None or delivery.state == "judged":
            return []
        under_way = delivery.state in ("asking", "uploading")
        delivery.state, delivery.verdict = "judged", verdict
        return [CallOff(identity=identity)] if under_way else []

    def is_judged(self, identity: Identity) -> bool:
        """It has its verdict, which the worker may have been told already."""
        delivery = self._all.get(identity)
        return delivery is not None and delivery.state == "judged"

    def judged(self, job: str) -> Delivery | None:
        """The oldest update of the job that its worker must settle now."""
        ready = [d for d in self._of(job) if d.state == "judged"]
        return min(ready, key=lambda d: d.update.identity, default=None)

    def pending(self, job: str) -> list[Identity]:
        """Updates of the job that are not settled at this site, in order."""
        return sorted(delivery.update.identity for delivery in self._of(job))

    def settled(self, identity: Identity) -> None:
        """The worker has settled it: it is no longer on this disk."""
        self._all.pop(identity, None)

    def forget(self, job: str) -> None:
        """The job is gone, and its updates with it."""
        for identity in self.pending(job):
            del self._all[identity]

    def tick(self, now: float) -> list[AnyAction]:
        """Ask again about those whose pause is over."""
        due = [d for d in self._all.values() if d.state == "waiting" and d.retry_at <= now]
        return [self._ask(delivery) for delivery in due]

    def wake_at(self) -> float | None:
        """When the next pause ends."""
        return min((d.retry_at for d in self._all.values() if d.state == "waiting"), default=None)

    def _of(self, job: str) -> list[Delivery]:
        return [d for d in self._all.values() if d.update.identity.job == job]

    def _ask(self, delivery: Delivery) -> AskVerdict:
        delivery.state = "asking"
        return AskVerdict(identity=delivery.update.identity)

    def _wait(self, delivery: Delivery, now: float) -> list[AnyAction]:
        delivery.state = "waiting"
        delivery.retry_at = now + delivery.backoff.pause()
        return []
